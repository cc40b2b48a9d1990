"""Plans that are looked for by a study (tp-plan solve --study): those with the least time to its
target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from ....cli.tables.layout import fitted, fixed, words
from ....cli.tables.plan import shortest_text, target_bound, target_interval, target_name
from ....cli.tables.plans import plan_columns
from ....planner.comparison.plans import SystemPlans
from ....planner.plan import Plan, TargetPrediction
from ....planner.search.planning import Planning
from ....planner.search.state import Progress
from ....profiles.units import format_seconds
from ..figures.choose import StudyFigures, TargetSearch, search_to_target
from ..figures.overhead import OverheadFit
from ..figures.study import read_study


class StudyJudge:
    """A study as a `planner.comparison.plans.Judge`."""

    def __init__(self, planning: Planning, path: str) -> None:
        """Raises FileError, and UserError as `StudyFigures` and its `check`."""
        study = read_study(path)
        mini_batch = planning.asked["mini_batch"] or planning.profile.batch_size
        self.figures = StudyFigures(study)
        self.figures.check(planning.profile.fingerprint, mini_batch, path)

    def plans(
        self, planning: Planning, systems: Mapping[str, str], progress: Progress | None
    ) -> SystemPlans:
        """The plan of each system with the least time to the target. Raises as
        `search_to_target`."""
        search, plans = search_to_target(planning, systems, self.figures, progress)
        judged = ByTimeToTarget(self.figures.fit, plans, open_systems(search), search.unbounded)
        return SystemPlans(plans, search.failed, (), judged)


def open_systems(search: TargetSearch) -> list[str]:
    """Those that may take less than the best plan: no training with delays such as some plan of
    theirs has reached the target, or the interval of their best, if another, has that time in it;
    or the study dropped some before that was decided.
    """
    best = search.best
    if best is None:
        return []
    found = list(search.undecided)
    for name, one in search.systems.items():
        other = one.best if one.best is not best else None
        least_s = min(one.open_s, one.open_s if other is None else other.least_s)
        if least_s < best.time_s and name not in found:
            found.append(name)
    return found


@dataclass(frozen=True)
class ByTimeToTarget:
    """A study's `planner.comparison.plans.Judgement`.

    Attributes:
        plans: the best of each system, the best of all first.
        open: systems that may take less than that.
        unbounded: those of some of whose delays the bound isn't.
    """

    fit: OverheadFit
    plans: Mapping[str, Plan]
    open: Sequence[str]
    unbounded: Sequence[str]
    by: str = "time to target"

    @property
    def chosen(self) -> Plan:
        """The best plan."""
        return next(iter(self.plans.values()))

    def tables(self, width: int) -> Sequence[Any]:
        """The systems' plans, the best one's time, and how sure that is."""
        (best, plan), found = next(iter(self.plans.items())), to_target(self.chosen)
        time_s = f"{format_seconds(found.time_s)}{target_interval(found)}"
        lines = [
            Text(f"best by time to target: {best}, {time_s}; {target_bound(found)}", style="bold"),
            Text(shortest_text(plan, found)),
        ]
        for name, each in self.plans.items():
            said = to_target(each)
            if said.options and (name == best or said.cure):
                lines.append(Text(f"as studied, {name} is to be trained with {said.options}"))
        return [target_table(self.plans, width), *lines, *self.notes()]

    def notes(self) -> Sequence[Any]:
        """How sure it is that nothing takes less."""
        lines = []
        if self.open:
            names = ", ".join(self.open)
            lines.append(f"not decided: other plans of {names} may take less; study them")
        if self.unbounded:
            names = ", ".join(self.unbounded)
            lines.append(f"the bound leaves out delays that the study says too little of: {names}")
        if not self.fit.begun:
            lines.append(
                "training has hardly begun at the study's target, so that what delays cost there "
                "is mostly chance: plans without delay alone are taken; study for longer"
            )
        lines.append(self.fit.refusal or _fitted(self.fit))
        return [Text(line) for line in lines]

    def as_json(self) -> Mapping[str, Any]:
        """What the plans' files don't say of the study."""
        return {
            "target": self.fit.target,
            "best": next(iter(self.plans)),
            "open": self.open,
            "unbounded": self.unbounded,
            "fit": {
                name: getattr(self.fit, name)
                for name in ("begun", "number", "trainings", "miss", "residual", "refusal")
            },
        }


def _fitted(fit: OverheadFit) -> str:
    """How well trainings are foretold by others."""
    return (
        f"overheads (≈) by {fit.number}: of {fit.trainings} trainings that were left out in turn "
        f"{fit.told} can be held against the others, and are {math.expm1(fit.miss):.0%} from what "
        f"these foretell, and {math.expm1(fit.residual):.0%} outside of what they allow"
    )


def to_target(plan: Plan) -> TargetPrediction:
    """What a plan that was found by a study says of its target."""
    assert isinstance(plan.to_target, TargetPrediction)
    return plan.to_target


def target_table(plans: Mapping[str, Plan], width: int) -> Group:
    """The systems' plans, the least time first."""
    found = [to_target(plan) for plan in plans.values()]
    marks = ["" if each.exact else "≈ " for each in found]
    columns = [
        fixed(
            "time to target",
            [f"{m}{format_seconds(each.time_s)}" for m, each in zip(marks, found, strict=True)],
        ),
        fixed("95 %", [target_interval(each, "") for each in found], left=True),
        fixed("overhead", [f"{each.overhead:.2f}" for each in found]),
        *plan_columns(
            list(plans.values()),
            ("period_s", "memory_bytes", "delay", "stages", "micro_batches", "in_flight"),
        ),
    ]
    target = target_name(found[0].metric, found[0].level)
    title = f"the plan of each system with the least time to a {target}"
    return fitted(title, words("system", list(plans), 12), columns, width)
