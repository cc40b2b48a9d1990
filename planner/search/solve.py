"""Finding a plan: a request becomes branches of a search, which decides them with a proof."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from ...profiles.profile import Profile
from ..cluster.cluster import Cluster
from ..evaluate import Evaluation, gap_between, make_plan
from ..partition.problem import SAME
from ..plan import Plan, SolverReport
from ..systems.orders import Order
from .answer.diagnosis import closest_plan
from .answer.fitting import Fitting
from .answer.preference import Candidates, fastest_of, placed_first, signed_plan
from .answer.recheck import signed
from .branching import explore, read_asked
from .given_order import search_of, under
from .parts import INTERRUPTED, run_parts
from .stages_per_device import PlacedSearch, placed_search
from .state import FAR_OFF, SOON_S, Progress, SearchState


def solve(
    profile: Profile,
    cluster: Cluster,
    variant: str = "timeprest",
    *,
    order: Order | None = None,
    incumbent: Plan | None = None,
    progress: Progress | None = None,
    seen: Callable[[Evaluation], None] | None = None,
    **asked: Any,
) -> Plan:
    """Find the plan with the shortest period that fits every device's memory.

    Args:
        order: what devices run, in the system's weight rules and in the place of its own; it says
            stages, micro-batches and which device runs what (line by line, the first ones).
        incumbent: a plan of this question that is known; the search begins with it.
        progress: told (what is done, how much of it, of how much).
        seen: told every plan that fits.
        asked: fields of `SearchRequest`, and what `question_for` takes besides.

    Raises:
        PlanError: settings that contradict each other or the profile.
        UserError: a headroom that is all of a device's memory.
        InfeasibleError: nothing fits; names the stage that lacks memory and how much.
    """
    begin = time.perf_counter()
    question, request = read_asked(profile, cluster, variant, asked)
    progress = progress or (lambda *_: None)
    met = Candidates(question.cluster, request.tolerance, question.loading_s)
    placed: PlacedSearch | None = None

    def note(found: Evaluation) -> None:
        met.add(found)
        if seen is not None:
            seen(found)

    if order is not None:
        question = under(question, order)
        search, placed = search_of(question, order, request, progress, note)
    else:
        search = explore(question, request, progress, note)
        placed = placed_search(search, request)
    go = partial(run_parts, search, placed, request, incumbent)
    try:
        apart = placed is None and order is None
        fitting = Fitting(search, request.micro_batches)
        stopped, hopeless = None, order is None and _hopeless(search, fitting, placed)
        if apart and not hopeless and fitting.is_far():
            stopped, hopeless = FAR_OFF, True
        stopped = stopped if hopeless else go()
        if search.best is None and search.budget.is_late and not hopeless:
            # A plan a little late is better than none, and than looking for why there is none.
            search.budget.deadline = time.monotonic() + SOON_S / 2
            stopped = go()
    except KeyboardInterrupt:
        # Once there is a plan to keep, Ctrl-C ends the search alone.
        if search.best is None:
            raise
        stopped = INTERRUPTED
    if search.best is None:
        search.best = closest_plan(search, stopped, request, placed, apart=apart)
    several = placed is not None and (search.best.pipeline.placement or not search.branches)
    moves = placed.local_search if placed is not None and several else None
    chosen = placed_first(question, signed_plan(search, met, moves))
    return signed(make_plan(question, chosen, _report(search, chosen, stopped, begin)), question)


def _hopeless(search: SearchState, fitting: Fitting, placed: PlacedSearch | None) -> bool:
    """Whether it is soon proven that no plan fits; one is looked at then, to say what it lacks.
    Branches of which that is proven alone are left out."""
    left = fitting.branches()
    if left:
        search.branches = left
    if left or not (search.branches or placed):
        return False
    return placed is None or placed.is_hopeless()


def _report(
    search: SearchState, chosen: Evaluation, stopped: str | None, begin: float
) -> SolverReport:
    best, objective = search.best, search.period_s
    assert best is not None
    bound = min(search.bound_s, objective)
    proven = objective <= bound * SAME
    if search.budget.hurried and stopped == "effort":
        # With more time the same effort may have gone elsewhere.
        stopped = "time limit"
    by_loads = best.pipeline.placement or search.question.order
    return SolverReport(
        method="loads" if by_loads else search.source.method,
        objective_s=objective,
        bound_s=bound,
        gap=0.0 if proven else gap_between(objective, bound),
        optimal=proven,
        plans_tried=search.budget.tried,
        seconds=round(time.perf_counter() - begin, 3),
        stopped=None if proven else stopped,
        fastest=fastest_of(best, chosen, search.question.cluster, search.question.loading_s),
    )
