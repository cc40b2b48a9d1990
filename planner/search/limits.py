"""Trying a cut: under which in-flight limits it is evaluated.

Plans that fit are the search's; the best one is kept (`SearchState.look`).
"""

from __future__ import annotations

from ..evaluate import Evaluation, lay_out
from ..partition.problem import SAME, Cut, StageProblem
from ..simulator.timeline import filled_and_drained_s, least_period_s
from .choices import Choice, all_limits, capped, caps, choice_of
from .state import SearchState

_MOST_WIDENED = 16
"""With more stages, single limits aren't raised or lowered: each takes a simulation."""


def try_cut(
    search: SearchState,
    problem: StageProblem,
    cut: Cut,
    micro_batches: int,
    *,
    grain: int = 1,
    every_limit: bool = False,
) -> bool:
    """Evaluate a cut under limits that suit it. Returns whether all limits were looked at."""
    choice = choice_of(problem, cut, grain)
    return try_some(search, choice, micro_batches, cut.objective_s, every_limit=every_limit)


def try_some(
    search: SearchState,
    choice: Choice,
    micro_batches: int,
    objective_s: float,
    *,
    every_limit: bool = False,
) -> bool:
    """Evaluate a choice under limits that suit it. Returns whether all limits were looked at.

    Args:
        objective_s: no schedule has a shorter period, by what the choice is from.
        every_limit: all limits are wanted where they are few.
    """
    if not search.relaxation.allows(choice.stages, micro_batches):
        return True
    ranges = search.ranges(choice)
    vectors = all_limits(ranges)
    if vectors is not None and (every_limit or len(vectors) == 1):
        for limits in vectors:
            _evaluate(search, choice, micro_batches, limits)
        return True
    try_choice(search, choice, micro_batches, objective_s)
    return False


def try_choice(search: SearchState, choice: Choice, micro_batches: int, objective_s: float) -> None:
    """Evaluate a choice under some limits; under more while its relaxed load is less."""
    found = _first_that_fits(search, choice, micro_batches)
    if found is not None and search.period_s > objective_s * SAME:
        ranges = search.ranges(choice)
        widest = tuple(most for _, most in ranges)
        if _evaluate(search, choice, micro_batches, widest) is None:
            _widen(search, found, choice, micro_batches)


def try_placed(search: SearchState, choice: Choice, micro_batches: int, load_s: float) -> float:
    """Evaluate a choice whose devices have several stages, under all limits that may matter.
    Returns the least period that others may lead to; infinite: to none.

    Args:
        load_s: no schedule of it has a shorter period.
    """
    ranges = search.ranges(choice)
    widest = tuple(most for _, most in ranges)
    laid = lay_out(search.question, choice.with_limits(widest), micro_batches)
    floor_s = max(load_s, least_period_s(laid.pipeline))
    if search.relaxation.variant.flushes:
        floor_s = max(floor_s, filled_and_drained_s(laid.pipeline))
    if floor_s * SAME >= search.period_s:
        return float("inf")
    _first_that_fits(search, choice, micro_batches)
    vectors = all_limits(ranges) or [widest]
    for limits in vectors:
        if search.period_s > floor_s * SAME:
            _evaluate(search, choice, micro_batches, limits)
    if search.period_s <= floor_s * SAME or all_limits(ranges) is not None:
        return float("inf")
    return floor_s


def _first_that_fits(search: SearchState, choice: Choice, micro_batches: int) -> Evaluation | None:
    """With a mini-batch in flight for each stage behind, or as many as memory allows."""
    ranges = search.ranges(choice)
    behind = range(choice.stages - 1, -1, -1)
    usual = [
        (low, max(low, min(high, 1 + d))) for (low, high), d in zip(ranges, behind, strict=True)
    ]
    for cap in caps(usual):
        found = _evaluate(search, choice, micro_batches, capped(usual, cap))
        if found is not None:
            return found
    return None


def _widen(search: SearchState, found: Evaluation, choice: Choice, micro_batches: int) -> None:
    """Raise single limits, while memory allows and the period gets shorter."""
    ranges = search.ranges(choice)
    limits = [stage.in_flight for stage in found.stages]
    if choice.stages > _MOST_WIDENED:
        return
    for s, (_, most) in enumerate(ranges):
        while limits[s] < most and (s == 0 or limits[s] < limits[s - 1]):
            limits[s] += 1
            wider = _evaluate(search, choice, micro_batches, tuple(limits))
            if wider is None:
                limits[s] -= 1
                break


def _evaluate(
    search: SearchState, choice: Choice, micro_batches: int, limits: tuple[int, ...]
) -> Evaluation | None:
    """The plan, if it fits the devices; the best one is kept."""
    found = search.look(choice, micro_batches, limits)
    return None if found is None or not search.counts(found) else found
