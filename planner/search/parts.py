"""A search's parts in turn: devices as listed, other sequences, several stages on each device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ...profiles.files import ratio
from ..evaluate import Evaluation
from ..partition.problem import SAME
from ..plan import Plan
from ..question import Question
from .branching import SearchRequest, explore
from .choices import Branch, Choice, PlacedBranch, micro_batch_counts
from .device_sequences import cluster_in_sequence, few_sequences, follows_list, sequence_matters
from .effort import placed_operations
from .exploration import run
from .stages_per_device import PlacedSearch
from .state import EFFORT, OutOfBudget, SearchState

INTERRUPTED = "interrupted"
"""What ends a search by Ctrl-C."""

LEAST_GAIN = 0.05
"""Several stages on each device must make the period so much shorter, where one will do: they cost
versions, messages and waits that the simulation sees in part. In races (docs/benchmarks.md) plans
that were to gain 0 to 8 % gained −12 to +4."""

LISTED_SHARE = 1 / 3
"""Of effort and time, for devices as listed, before other sequences are tried; where these can't
be told apart but by replicas, the rest."""

_QUICK, _SIMULATED = 200_000, 60
"""Simulated operations for a plan that is soon found; and plans that can be simulated by it where
devices have several stages, which takes longer: some eight of them are first cuts."""


def quick_effort(question: Question, request: SearchRequest) -> int:
    """Simulated operations for a plan that is soon found, of those that there are."""
    each, variant = request.stages_per_device or 1, question.system
    most = _QUICK
    if variant.placement != "any" or each > 1:
        stages = request.stages or len(question.cluster.devices) * max(each, 2)
        counts = micro_batch_counts(question, request.micro_batches)
        n = next((n for n in counts if n >= stages), counts[-1])
        several = _SIMULATED * placed_operations(variant, stages, n)
        most = min(max(_QUICK, several), EFFORT // 2)
    return min(request.effort, most)


def run_parts(
    search: SearchState,
    placed: PlacedSearch | None,
    request: SearchRequest,
    incumbent: Plan | None = None,
) -> str | None:
    """Search until all is proven, or the budget is used up: says then what was.

    Args:
        incumbent: a plan that is known.
    """
    known = None if incumbent is None or incumbent.placement else incumbent
    if placed is None:
        return _run_straight(search, request, known)
    stopped, budget, straight = None, search.budget, None
    if search.branches:
        # Half of it is for plans with a stage for each device.
        deadline, left, rest = budget.deadline, budget.seconds_left, budget.effort // 2
        budget.effort -= rest
        budget.deadline = None if left is None else time.monotonic() + left / 2
        try:
            stopped = _run_straight(search, request, known)
        except KeyboardInterrupt:
            placed.enter_bounds()
            raise
        budget.effort, budget.deadline = max(budget.effort, 0) + rest, deadline
        straight = search.best
    if incumbent is not None and incumbent.placement:
        _begin_with(search, incumbent)
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


def _begin_with(search: SearchState, plan: Plan) -> None:
    """Evaluate a plan that is known, though nothing be left for it."""
    budget, limits = search.budget, tuple(stage.in_flight for stage in plan.stages)
    deadline, budget.deadline = budget.deadline, None
    try:
        with suppress(OutOfBudget), budget.on_top(EFFORT):
            search.look(Choice.of(plan.stages), plan.micro_batches, limits)
    finally:
        budget.deadline = deadline


def _run_straight(
    search: SearchState, request: SearchRequest, incumbent: Plan | None = None
) -> str | None:
    """Plans with a stage for each device, first on those as listed, then in other sequences."""
    if incumbent is not None and follows_list([stage.devices for stage in incumbent.stages]):
        _begin_with(search, incumbent)
    # It may be asked again, where the time was over before there was a plan.
    search.any_sequence = False
    question = search.question
    if request.sequence == "listed" or not sequence_matters(question, request.replicas):
        return run(search)
    # Of equal devices in equal machines other sequences are seldom better; then by much, as where
    # the messages of replicas stay in a machine.
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
    if incumbent is not None:
        _begin_with(search, incumbent)
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
        # Those of which it is proven that nothing fits are left out in every sequence.
        own.branches = search.branches
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
