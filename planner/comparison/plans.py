"""Several plans of one request: of systems side by side, ever fresher ones, or after changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

NOT_TRIED = "not looked at: interrupted"


class Judgement(Protocol):
    """How a judge finds plans.

    Attributes:
        by: what it goes by, in words.
        chosen: the best plan by that.
    """

    @property
    def by(self) -> str:
        """As above."""

    @property
    def chosen(self) -> Plan:
        """As above."""

    def tables(self, width: int) -> Sequence[Any]:
        """What a terminal so wide shows in the place of periods and their Pareto front."""

    def notes(self) -> Sequence[Any]:
        """Of that, what a single plan's own report doesn't say."""

    def as_json(self) -> Mapping[str, Any]:
        """The same as data."""


class Judge(Protocol):
    """Looks for plans that are best by something else than their period; a plugin makes it."""

    def plans(
        self, planning: Planning, systems: Mapping[str, str], progress: Progress | None
    ) -> SystemPlans:
        """The best plan of each system by it. Raises as `plans_of_systems`; UserError where it has
        nothing to say of any.

        Args:
            systems: by the name that was given.
        """


@dataclass(frozen=True)
class SystemPlans:
    """The best plan of each system.

    Attributes:
        plans: by the system's name as it was given, in that sequence.
        failed: why the others have none.
        points: the Pareto front of all plans seen, where periods are compared.
        judged: what a judge says, where there is one.
    """

    plans: Mapping[str, Plan]
    failed: Mapping[str, str]
    points: Sequence[ParetoPoint]
    judged: Judgement | None = None


def plans_of_systems(planning: Planning, progress: Progress | None = None) -> SystemPlans:
    """Plan for each system, by a study if one is to judge. Ctrl-C ends the search of one, and those
    after it.

    Raises InfeasibleError where no system has a plan; FileError, and UserError where the study is
    of another model, or says nothing of any plan.
    """
    systems = {name: variant_named(name).name for name in planning.systems}
    if planning.study is not None:
        judge: Judge = plugins.load("judges", "study")(planning, planning.study)
        return judge.plans(planning, systems, progress)
    pareto = ParetoFront()
    found, failed = _by_system(
        systems, lambda system: [_plan_of(planning, system, pareto, progress)]
    )
    return SystemPlans({name: plans[0] for name, plans in found.items()}, failed, pareto.points)


def _by_system(
    systems: Mapping[str, str], plans_of: Callable[[str], list[Plan]]
) -> tuple[dict[str, list[Plan]], dict[str, str]]:
    """Plans of each system, and why others have none. Raises InfeasibleError where none has."""
    plans: dict[str, list[Plan]] = {}
    failed: dict[str, str] = {}
    for name, system in systems.items():
        try:
            plans[name] = plans_of(system)
        except (InfeasibleError, PlanError) as error:
            failed[name] = str(error)
            continue
        if INTERRUPTED in (plan.solver.stopped for plan in plans[name]):
            left = [other for other in systems if other not in (*plans, *failed)]
            failed |= dict.fromkeys(left, NOT_TRIED)
            break
    if not plans:
        raise InfeasibleError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    return plans, failed


def best_plan_of(planning: Planning, progress: Progress | None = None) -> Plan:
    """The best of what was asked for, by a study if one is to judge. Raises as `plans_of_systems`
    and `Planning.best`."""
    if planning.study is None:
        return planning.best(progress)
    judged = plans_of_systems(planning, progress).judged
    assert judged is not None
    return judged.chosen


def _plan_of(
    planning: Planning, system: str, front: ParetoFront, progress: Progress | None
) -> Plan:
    def keep(found: Evaluation) -> None:
        front.add(pareto_point(system, found))

    return planning.best(naming_system(system, progress), variant=system, seen=keep)


def naming_system(system: str, progress: Progress | None) -> Progress:
    """Progress on a system's plan, which names it."""

    def report(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(f"{system}: {what}", done, total)

    return report


def fresher_plans(planning: Planning, progress: Progress | None = None) -> list[Plan]:
    """As `staleness_front`, of one system."""
    return staleness_front(lambda most: planning.best(progress, max_delay=most))


def fresher_plans_of_systems(
    planning: Planning, progress: Progress | None = None
) -> tuple[dict[str, list[Plan]], dict[str, str]]:
    """Each system's `staleness_front`, and why others have none. Ctrl-C ends the search of one, and
    those after it. Raises InfeasibleError where no system has a plan."""

    def front_of(system: str) -> list[Plan]:
        report = naming_system(system, progress)
        return staleness_front(lambda d: planning.best(report, variant=system, max_delay=d))

    return _by_system({name: variant_named(name).name for name in planning.systems}, front_of)


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
            failed[name] = NOT_TRIED
            continue
        try:
            plans[name] = planning.best(progress, cluster)
        except (InfeasibleError, PlanError) as error:
            failed[name] = str(error)
    return plans, failed
