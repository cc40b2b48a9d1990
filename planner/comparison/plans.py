"""Several plans of one request: of systems side by side, ever fresher ones, or after changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ...profiles import plugins
from ...profiles.errors import InfeasibleError, PlanError
from ..cluster.changes import changed, parse_change
from ..cluster.cluster import Cluster
from ..cluster.contention import contention_on, with_contention
from ..evaluate import Evaluation
from ..plan import Plan
from ..search.parts import INTERRUPTED
from ..search.planning import Planning
from ..search.state import Progress
from ..systems.variants import variant_named
from .pareto import ParetoFront, ParetoPoint, unbeaten

NOT_TRIED = "not looked at: interrupted"

_EVERY = 16
"""Up to such delays each is asked for; of larger ones, those an eighth apart or so."""

T = TypeVar("T")


class Judgement(Protocol):
    """How a judge finds plans."""

    @property
    def by(self) -> str:
        """What it goes by, in words."""

    @property
    def chosen(self) -> Plan:
        """The best plan by that."""

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

    def best_of(system: str) -> list[Plan]:
        def keep(found: Evaluation) -> None:
            predicted = found.prediction
            prices = predicted.period_s, predicted.most_bytes, found.delay
            pareto.add(ParetoPoint(system, found, *prices))

        return [planning.best(naming_system(system, progress), variant=system, seen=keep)]

    found, failed = _by_system(systems, best_of)
    return SystemPlans({name: plans[0] for name, plans in found.items()}, failed, pareto.points)


def _by_system(
    systems: Mapping[str, str], plans_of: Callable[[str], list[Plan]]
) -> tuple[dict[str, list[Plan]], dict[str, str]]:
    """Plans of each system, and why others have none. Raises InfeasibleError where none has."""
    plans, failed = _of_each(systems, plans_of)
    if not plans:
        raise InfeasibleError("; ".join(f"{name}: {why}" for name, why in failed.items()))
    return plans, failed


def _of_each(
    asked: Mapping[str, T], plans_of: Callable[[T], list[Plan]], *, stopped: bool = False
) -> tuple[dict[str, list[Plan]], dict[str, str]]:
    """Plans of each that was asked for, and why others have none; `stopped`, as one of them may
    be by Ctrl-C: those after it aren't tried."""
    plans: dict[str, list[Plan]] = {}
    failed: dict[str, str] = {}
    for name, each in asked.items():
        if stopped:
            failed[name] = NOT_TRIED
            continue
        try:
            plans[name] = plans_of(each)
        except (InfeasibleError, PlanError) as error:
            failed[name] = str(error)
            continue
        stopped = INTERRUPTED in (plan.solver.stopped for plan in plans[name])
    return plans, failed


def best_plan_of(planning: Planning, progress: Progress | None = None) -> Plan:
    """The best of what was asked for, by a study if one is to judge. Raises as `plans_of_systems`
    and `Planning.best`."""
    if planning.study is None:
        return planning.best(progress)
    judged = plans_of_systems(planning, progress).judged
    assert judged is not None
    return judged.chosen


def naming_system(system: str, progress: Progress | None) -> Progress:
    """Progress on a system's plan, which names it."""

    def report(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(f"{system}: {what}", done, total)

    return report


def staleness_front(solve: Callable[[int | None], Plan], most: int | None = None) -> list[Plan]:
    """Plans with ever smaller delays, down to none; the least late first.

    Each is the best one with a delay below the last one's. Those that others beat in both are
    left out: a search that ended early may be beaten by one that was asked for more.

    Args:
        solve: gives the plan with no larger delay, or raises as `search.solve.solve`.
        most: the largest delay to begin with; None: any.

    Raises as `solve`, where there is no plan at all.
    """
    found: list[Plan] = []
    while True:
        try:
            plan = solve(most)
        except InfeasibleError:
            if not found:
                raise
            break
        found.append(plan)
        delay = plan.predicted.delay
        if not delay or plan.solver.stopped == INTERRUPTED:
            break
        most = delay - max(delay * 2 // _EVERY, 1)
    prices = {
        str(k): (plan.predicted.period_s, float(plan.predicted.delay))
        for k, plan in enumerate(found)
    }
    return [found[int(k)] for k in sorted(unbeaten(prices), key=lambda k: prices[k][1])]


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
    """The cluster after each change by itself, by the change; devices of a machine slow each other
    down there as `with_contention` says. Raises as `parse_change` and `changed`."""
    together = contention_on(planning.cluster, planning.together)
    return {
        text: with_contention(changed(planning.cluster, parse_change(text, what), what), together)
        for text in changes
    }


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
    stopped = before is not None and before.solver.stopped == INTERRUPTED
    plans, failed = _of_each(clusters, lambda c: [planning.best(progress, c)], stopped=stopped)
    return {name: plan for name, (plan,) in plans.items()}, failed
