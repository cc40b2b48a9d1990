"""Several plans of one request: of systems side by side, ever fresher ones, or after changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...profiles import plugins
from ...profiles.errors import InfeasibleError, PlanError
from ..cluster.changes import clusters_after
from ..cluster.cluster import Cluster
from ..cluster.contention import contention_on
from ..evaluate import Evaluation
from ..plan import Plan
from ..search.planning import Planning
from ..search.solve import INTERRUPTED
from ..search.state import Progress
from ..systems.variants import variant_named
from .front import staleness_front
from .pareto import ParetoFront, ParetoPoint, pareto_point

_NOT_TRIED = "not looked at: interrupted"


class Judgement(Protocol):
    """How a judge finds plans.

    Attributes:
        by: what it goes by, in words.
        chosen: the best plan by that; None: it can't say.
    """

    @property
    def by(self) -> str:
        """As above."""

    @property
    def chosen(self) -> Plan | None:
        """As above."""

    def tables(self, width: int) -> Sequence[Any]:
        """What a terminal so wide shows in the place of the Pareto front."""

    def as_json(self) -> Mapping[str, Any]:
        """The same as data."""


class Judge(Protocol):
    """Judges plans by something else than their prices; a plugin makes it."""

    def judge(
        self, planning: Planning, plans: Mapping[str, Plan], points: Sequence[ParetoPoint]
    ) -> Judgement:
        """Judge plans.

        Args:
            plans: the fastest of each system.
            points: those that none of the same system beats in all prices.
        """


@dataclass(frozen=True)
class SystemPlans:
    """The best plan of each system.

    Attributes:
        plans: by the system's name as it was given, in that sequence.
        failed: why the others have none.
        points: the Pareto front of all plans seen.
        judged: what a judge says, where there is one.
    """

    plans: Mapping[str, Plan]
    failed: Mapping[str, str]
    points: Sequence[ParetoPoint]
    judged: Judgement | None = None


def judge_of(planning: Planning, study: str | Path | None) -> Judge | None:
    """A study as a judge of the plans. Raises FileError, and UserError where it is of another
    model."""
    found: Judge | None = None
    if study is not None:
        found = plugins.load("judges", "study")(planning, str(study))
    return found


def plans_of_systems(
    planning: Planning,
    names: Iterable[str],
    judge: Judge | None = None,
    progress: Progress | None = None,
) -> SystemPlans:
    """Plan for each system. Ctrl-C ends the search of one, and those after it.

    Raises InfeasibleError where no system has a plan, PlanError for a name that is none.
    """
    systems = {name: variant_named(name).name for name in names}
    pareto, fronts = ParetoFront(), {name: ParetoFront() for name in systems}
    plans: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    for name, system in systems.items():
        # By a judge a plan may be best that another system's beats in all three prices.
        kept = (pareto, fronts[name]) if judge else (pareto,)
        try:
            plans[name] = _plan_of(planning, system, kept, progress)
        except (InfeasibleError, PlanError) as error:
            failed[name] = str(error)
            continue
        if plans[name].solver.stopped == INTERRUPTED:
            left = [other for other in systems if other not in (*plans, *failed)]
            failed |= dict.fromkeys(left, _NOT_TRIED)
            break
    if not plans:
        raise InfeasibleError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    if judge is None:
        return SystemPlans(plans, failed, pareto.points)
    points = [point for front in fronts.values() for point in front.points]
    return SystemPlans(plans, failed, pareto.points, judge.judge(planning, plans, points))


def _plan_of(
    planning: Planning, system: str, fronts: Sequence[ParetoFront], progress: Progress | None
) -> Plan:
    def keep(found: Evaluation) -> None:
        point = pareto_point(system, found)
        for front in fronts:
            front.add(point)

    def report(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(f"{system}: {what}", done, total)

    return planning.best(report, variant=system, seen=keep)


def fresher_plans(planning: Planning, progress: Progress | None = None) -> list[Plan]:
    """As `staleness_front`, up to the version difference that was asked for."""
    return staleness_front(
        lambda most: planning.best(progress, max_difference=most), planning.asked["max_difference"]
    )


def changed_clusters(
    planning: Planning, changes: Sequence[str], what: str = "what_if"
) -> dict[str, Cluster]:
    """The cluster after each change, by the change. Raises as `clusters_after`."""
    together = contention_on(planning.cluster, planning.together)
    return clusters_after(planning.cluster, changes, together, what)


def plans_on(
    planning: Planning,
    clusters: Mapping[str, Cluster],
    progress: Progress | None = None,
    before: Plan | None = None,
) -> tuple[dict[str, Plan], dict[str, str]]:
    """The best plan on each cluster, and why others have none.

    Args:
        before: a plan that was looked for before; where Ctrl-C ended that, none are tried.
    """
    plans: dict[str, Plan] = {}
    failed: dict[str, str] = {}
    for name, cluster in clusters.items():
        tried = [*plans.values(), *([before] if before else [])]
        if INTERRUPTED in (plan.solver.stopped for plan in tried):
            failed[name] = _NOT_TRIED
            continue
        try:
            plans[name] = planning.best(progress, cluster)
        except (InfeasibleError, PlanError) as error:
            failed[name] = str(error)
    return plans, failed
