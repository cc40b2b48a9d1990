"""Finding a plan: a request becomes branches of a search, which decides them with a proof."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from msgspec.structs import replace as changed

from ...profiles.errors import InfeasibleError
from ...profiles.files import ratio
from ...profiles.profile import Profile
from ..cluster.cluster import Cluster
from ..evaluate import Evaluation, Question, evaluate, gap_between, make_plan
from ..partition.problem import SAME
from ..plan import Plan, SolverReport
from ..systems.orders import Order
from .answer.diagnosis import Fitting, diagnose, lacking
from .answer.preference import Candidates, fastest_of, signed_plan
from .answer.recheck import signed
from .branching import (
    SearchRequest,
    check_request,
    deadline_of,
    explore,
    pins_of,
    read_asked,
)
from .choices import (
    Branch,
    Choice,
    PlacedBranch,
    micro_batch_counts,
    stages_asked,
)
from .device_sequences import (
    cluster_in_sequence,
    few_sequences,
    on_first_devices,
    sequence_matters,
)
from .exploration import run
from .given_order import check_asked, search_of, under
from .keep_more import keep_more
from .local_search.improve import LocalSearch
from .placed_branches import no_branches
from .stages_per_device import PlacedSearch
from .state import FAR_OFF, SOON_S, Budget, OutOfBudget, Progress, SearchState

INTERRUPTED = "interrupted"
"""What ends a search by Ctrl-C."""

LEAST_GAIN = 0.05
"""Several stages on each device must make the period so much shorter, where one will do: they cost
versions, messages and waits that the simulation sees in part. In races (docs/benchmarks.md) plans
that were to gain 0 to 8 % gained −12 to +4."""

LISTED_SHARE = 1 / 3
"""Of effort and time, for devices as listed, before other sequences are tried; where these can't
be told apart but by replicas, the rest."""


def solve(
    profile: Profile,
    cluster: Cluster,
    variant: str = "timeprest",
    *,
    order: Order | None = None,
    progress: Progress | None = None,
    seen: Callable[[Evaluation], None] | None = None,
    **asked: Any,
) -> Plan:
    """Find the plan with the shortest period that fits every device's memory.

    Args:
        order: what devices run, in the system's weight rules and in the place of its own; it says
            stages, micro-batches and which device runs what (line by line, the first ones).
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
    met = Candidates(question.cluster, request.tolerance)
    placed: PlacedSearch | None = None

    def note(found: Evaluation) -> None:
        met.add(found)
        if seen is not None:
            seen(found)

    if order is not None:
        question = under(question, order)
        search, placed = _ordered(question, request, order, progress, note)
    else:
        search = explore(question, request, progress, note)
        placed = _placed(search, request)
    go = partial(_run, search, placed, request)
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
        search.best = _closest(search, stopped, request, placed, apart=apart)
    keep_more(search)
    several = placed is not None and (search.best.pipeline.placement or not search.branches)
    moves = placed.local_search if placed is not None and several else LocalSearch
    chosen = _on_first_devices(question, signed_plan(search, met, moves))
    return signed(make_plan(question, chosen, _report(search, chosen, stopped, begin)), question)


def _on_first_devices(question: Question, found: Evaluation) -> Evaluation:
    """The same plan on the first of devices that are alike, where it is as fast there: replicas
    change places, and which of them exchange messages with which."""
    lying = tuple(stage.devices for stage in found.stages)
    first = lying if question.order else on_first_devices(question.cluster, lying)
    if first == lying:
        return found
    stages = [changed(x, devices=mine) for x, mine in zip(found.stages, first, strict=True)]
    there = evaluate(question, stages, found.micro_batches)
    longest_s = found.prediction.period_s * SAME
    return there if there.prediction.period_s <= longest_s else found


def _ordered(
    question: Question,
    request: SearchRequest,
    order: Order,
    progress: Progress,
    seen: Callable[[Evaluation], None],
) -> tuple[SearchState, PlacedSearch]:
    """The search for the cut that suits an order. Raises PlanError."""
    check_request(question, request)
    check_asked(
        order,
        len(question.cluster.devices),
        stages=request.stages,
        micro_batches=request.micro_batches,
        per_device=request.stages_per_device,
        placement=request.placement,
        solver=request.solver,
    )
    return search_of(
        question,
        order,
        freedom=replace(request.freedom, replicas=False),
        solver=request.solver,
        pins=lambda relaxation: pins_of(relaxation, request.pins, order.stages),
        budget=Budget(request.effort, deadline_of(request)),
        progress=progress,
        seen=seen,
    )


def _placed(search: SearchState, request: SearchRequest) -> PlacedSearch | None:
    """The search for plans with several stages on each device; None where there can be none.

    Raises PlanError where all that was asked for are such plans, and there can be none.
    """
    question, stages = search.question, request.stages
    asked = stages_asked(
        question.system, request.stages_per_device, request.placement, request.stages
    )
    alone = len(question.cluster.devices) == 1 and not search.relaxation.limited
    if not asked.per_device or (search.branches and alone):
        return None
    counts = micro_batch_counts(question, request.micro_batches)
    most = max(asked.per_device) * len(question.cluster.devices)
    pins = pins_of(search.relaxation, request.pins, stages or most)
    placed = PlacedSearch(search, asked, counts, stages, pins)
    if any(placed.branches):
        return placed
    if search.branches:
        return None
    raise no_branches(placed.relaxation, asked, stages)


def _closest(
    search: SearchState,
    stopped: str | None,
    request: SearchRequest,
    placed: PlacedSearch | None,
    *,
    apart: bool,
) -> Evaluation:
    """The plan that lacks least, should it fit after all. Raises InfeasibleError that says why none
    does. `apart`: plans with a stage for each device alone were asked for."""
    if search.least_difference is not None:
        raise InfeasibleError(
            f"--max-difference {search.relaxation.most_late}: no plan that fits has less than "
            f"{search.least_difference}; give at least that"
        )
    asked, explains = (stopped, request.pins, request.micro_batches), request.explains
    found: Evaluation | InfeasibleError
    if apart:
        found = diagnose(search, *asked, explains=explains)
    else:
        found = lacking(search, *asked, placed if explains else None)
    if isinstance(found, InfeasibleError):
        raise found
    return found


def _hopeless(search: SearchState, fitting: Fitting, placed: PlacedSearch | None) -> bool:
    """Whether it is soon proven that no plan fits; one is looked at then, to say what it lacks.
    Branches of which that is proven alone are left out."""
    left = fitting.branches()
    if left:
        search.branches = left
    if left or not (search.branches or placed):
        return False
    return placed is None or placed.is_hopeless()


def _run(search: SearchState, placed: PlacedSearch | None, request: SearchRequest) -> str | None:
    """Search until all is proven, or the budget is used up: says then what was."""
    if placed is None:
        return _run_straight(search, request)
    stopped, budget, straight = None, search.budget, None
    if search.branches:
        # Half of it is for plans with a stage for each device.
        deadline, left, rest = budget.deadline, budget.seconds_left, budget.effort // 2
        budget.effort -= rest
        budget.deadline = None if left is None else time.monotonic() + left / 2
        try:
            stopped = _run_straight(search, request)
        except KeyboardInterrupt:
            placed.enter_bounds()
            raise
        budget.effort, budget.deadline = max(budget.effort, 0) + rest, deadline
        straight = search.best
    try:
        placed.run()
    except OutOfBudget as reason:
        stopped = str(reason)
    best = search.best
    if straight is not None and best is not None and best is not straight:
        gain = 1 - ratio(best.prediction.period_s, straight.prediction.period_s)
        # What a system's own placement is worth isn't asked.
        if gain < LEAST_GAIN and search.question.system.placement == "any":
            search.best = straight
            return (
                f"asking {LEAST_GAIN:.0%} of several stages on each device, which gain {gain:.1%}"
            )
    return stopped


def _run_straight(search: SearchState, request: SearchRequest) -> str | None:
    """Plans with a stage for each device, first on those as listed, then in other sequences."""
    # It may be asked again, where the time was over before there was a plan.
    search.any_sequence = False
    question = search.question
    if request.sequence == "listed" or not sequence_matters(question, request.replicas):
        return run(search)
    # Of equal devices in equal machines other sequences are seldom better, and by little.
    differ = sequence_matters(question, replicas=False)
    budget, share = search.budget, LISTED_SHARE if differ else 1 - LISTED_SHARE
    try:
        with budget.part(share):
            run(search)
    except KeyboardInterrupt:
        search.any_sequence = True
        search.forget_bounds()
        raise
    listed, search.any_sequence = search.best, True
    stopped = run(search)
    if stopped is not None:
        stopped = _run_each_sequence(search, request) or stopped
    # The listed sequence is kept where it is as good.
    if listed is not None and listed.prediction.period_s <= search.period_s * SAME:
        search.best = listed
    return stopped


def _run_each_sequence(search: SearchState, request: SearchRequest) -> str | None:
    """Plans on devices as if the cluster listed them in each sequence that makes a difference,
    where those are few: with the bounds and proofs that there are for devices as they are listed.
    Says what ended a search before all was proven."""
    question, budget, stopped = search.question, search.budget, None
    sequences = [] if search.large else few_sequences(*search.device_kinds)
    least = float("inf" if sequences else "-inf")
    bounds = dict[Branch | PlacedBranch, float](dict.fromkeys(search.branches, least))
    for done, sequence in enumerate(sequences):
        if budget.is_late:
            return "time limit"
        cluster = cluster_in_sequence(question.cluster, sequence)
        within = replace(request, time_limit_s=budget.seconds_left)
        own = explore(replace(question, cluster=cluster), within, search.progress)
        own.budget, share = budget, 1 / (len(sequences) - done)
        with budget.on_top(request.effort // len(sequences)), budget.time_part(share):
            if search.best is not None:
                _evaluate_in(own, search.best, [*map(sequence.index, range(len(sequence)))])
            stopped = run(own) or stopped
            if own.best is not None:
                _evaluate_in(search, own.best, sequence)
        for branch, bound_s in own.bounds.items():
            bounds[branch] = min(bounds[branch], bound_s)
    search.bounds = {b: max(known_s, bounds[b]) for b, known_s in search.bounds.items()}
    return stopped


def _evaluate_in(search: SearchState, found: Evaluation, numbers: Sequence[int]) -> None:
    """Evaluate a plan in a search that has these numbers for its devices."""
    own = Choice.of(found.stages)
    lying = tuple(tuple(numbers[d] for d in mine) for mine in own.devices)
    with suppress(OutOfBudget):
        search.look(replace(own, devices=lying), found.micro_batches, found.limits)


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
        fastest=fastest_of(best, chosen, search.question.cluster),
    )
