"""Plans judged by a study (tp-plan solve --study): their time to its target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.text import Text

from ....cli.tables.layout import counted, fixed
from ....cli.tables.plans import points_table
from ....planner.comparison.pareto import ParetoPoint
from ....planner.plan import Plan
from ....planner.search.planning import Planning
from ....profiles.units import format_seconds
from ..figures.choose import StudyFigures, TargetPoint, by_time_to_target, chosen_by_study
from ..figures.study import read_study


class StudyJudge:
    """A study as a `planner.comparison.plans.Judge`."""

    def __init__(self, planning: Planning, path: str) -> None:
        """Raises FileError, and UserError as `StudyFigures.check`."""
        self.figures = StudyFigures(read_study(path))
        mini_batch = planning.asked["mini_batch"] or planning.profile.batch_size
        self.figures.check(planning.profile.fingerprint, mini_batch, path)

    def judge(
        self, planning: Planning, plans: Mapping[str, Plan], points: Sequence[ParetoPoint]
    ) -> ByTimeToTarget:
        """The plans' times to the target."""
        times = by_time_to_target(points, self.figures, planning.asked["update_every"])
        chosen = None
        if times:
            own = next(plan for plan in plans.values() if plan.variant == times[0].point.variant)
            chosen = chosen_by_study(planning.profile, own, times[0])
        return ByTimeToTarget(self.figures, plans, times, chosen)


@dataclass(frozen=True)
class ByTimeToTarget:
    """A study's `planner.comparison.plans.Judgement`.

    Attributes:
        plans: the fastest of each system.
        times: of the plans that the study has a figure for, the shortest first.
    """

    figures: StudyFigures
    plans: Mapping[str, Plan]
    times: Sequence[TargetPoint]
    chosen: Plan | None
    by: str = "time to target"

    def tables(self, width: int) -> Sequence[Any]:
        """The front of time to target and memory, and what the study says nothing of."""
        lines = target_lines(self.times, self.plans, self.figures)
        return [target_table(self.times, width), *lines]

    def as_json(self) -> Mapping[str, Any]:
        """The times, and the systems without one."""
        return {
            "target": self.figures.target,
            "points": [
                {
                    "variant": each.point.variant,
                    "stages": len(each.point.evaluation.stages),
                    "micro_batches": each.point.evaluation.micro_batches,
                    "time_s": each.forecast.time_s,
                    "overhead": each.forecast.overhead,
                    "exact": each.forecast.exact,
                    "period_s": each.point.period_s,
                    "memory_bytes": each.point.memory_bytes,
                    "on_front": each.on_front,
                }
                for each in self.times
            ],
            "without_figure": without_figure(self.times, self.plans),
        }


def target_table(points: Sequence[TargetPoint], width: int) -> Group:
    """Table of the plans that none beats in time to target and memory per device."""
    shown = [each for each in points if each.on_front]
    first = [
        fixed(
            "time to target",
            [
                f"{'' if each.forecast.exact else '≈ '}{format_seconds(each.forecast.time_s.mean)}"
                for each in shown
            ],
        ),
        fixed("overhead", [_overhead(each) for each in shown]),
    ]
    title = (
        "Pareto front of time to target and memory per device, of all plans seen that the study "
        f"has a figure for: {counted(len(shown), 'plan')}"
    )
    return points_table(title, [each.point for each in shown], first, width)


def target_lines(
    points: Sequence[TargetPoint], plans: Mapping[str, Plan], figures: StudyFigures
) -> list[Text]:
    """Which plan is best by a study, and what the study says nothing of."""
    lines = []
    if points:
        best = points[0]
        about = "" if best.forecast.exact else ", about: study this very plan"
        lines.append(
            Text(
                f"best by time to target: {best.point.variant}, "
                f"{format_seconds(best.forecast.time_s.mean)}{about}",
                style="bold",
            )
        )
    missing = without_figure(points, plans)
    late = [name for name in missing if figures.trained(name)]
    other = [name for name in missing if name not in late]
    if late:
        lines.append(
            Text(f"don't reach the target in the study, or with other stages: {', '.join(late)}")
        )
    if other:
        lines.append(Text(f"the study has no figure for: {', '.join(other)}"))
    if any(each.on_front and not each.forecast.exact for each in points):
        lines.append(
            Text(
                "≈: by the overhead of the nearest plan that was studied, of the same system and "
                "stages",
                style="dim",
            )
        )
    return lines


def without_figure(points: Sequence[TargetPoint], plans: Mapping[str, Plan]) -> list[str]:
    """Systems with plans that the study has no time to target for."""
    known = {each.point.variant for each in points}
    return [name for name in plans if name not in known]


def _overhead(each: TargetPoint) -> str:
    spread = each.forecast.overhead
    return "-" if spread is None else f"{spread.mean:.2f}"
