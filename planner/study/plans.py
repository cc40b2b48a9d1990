"""Several plans of one request: of systems side by side, ever fresher ones, or after changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...profiles.errors import InfeasibleError, PlanError
from ..cluster.changes import clusters_after
from ..cluster.cluster import Cluster
from ..cluster.contention import contention_on
from ..evaluate import Evaluation
from ..plan import Plan
from ..search.request import Planning
from ..search.solve import INTERRUPTED
from ..search.state import Progress
from ..systems.variants import variant_named
from .choose import StudyFigures, TargetPoint, by_time_to_target, chosen_by_study
from .front import staleness_front
from .pareto import ParetoFront, ParetoPoint, pareto_point
from .study import read_study

_NOT_TRIED = "not looked at: interrupted"


@dataclass(frozen=True)
class SystemPlans:
    """The best plan of each system.

    Attributes:
        plans: by the system's name as it was given, in that sequence.
        failed: why the others have none.
        points: the Pareto front of all plans seen.
        times: times to a study's target, the shortest first; none without a study.
        chosen: the plan with the shortest.
    """

    plans: Mapping[str, Plan]
    failed: Mapping[str, str]
    points: Sequence[ParetoPoint]
    times: Sequence[TargetPoint] = ()
    chosen: Plan | None = None


def figures_of(planning: Planning, path: str | Path | None) -> StudyFigures | None:
    """A study that the plans can be judged by. Raises FileError, UserError as `StudyFigures`."""
    if path is None:
        return None
    figures = StudyFigures(read_study(str(path)))
    mini_batch = planning.asked["mini_batch"] or planning.profile.batch_size
    figures.check(planning.profile.fingerprint, mini_batch, str(path))
    return figures


def plans_of_systems(
    planning: Planning,
    names: Iterable[str],
    figures: StudyFigures | None = None,
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
        # By a study a plan may be best that another system's beats in all three prices.
        kept = (pareto, fronts[name]) if figures else (pareto,)
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
    if figures is None:
        return SystemPlans(plans, failed, pareto.points)
    points = [point for front in fronts.values() for point in front.points]
    times = by_time_to_target(points, figures, planning.asked["update_every"])
    if not times:
        return SystemPlans(plans, failed, pareto.points)
    own = next(plan for plan in plans.values() if plan.variant == times[0].point.variant)
    chosen = chosen_by_study(planning.profile, own, times[0])
    return SystemPlans(plans, failed, pareto.points, times, chosen)


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
    together = contention_on(planning.cluster, planning.profile.together)
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
