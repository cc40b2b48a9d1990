"""Plans with ever smaller delays: which are asked for, and which are left out."""

from __future__ import annotations

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from helpers.plans import plan_by_hand
from timeprest.planner.comparison.plans import staleness_front
from timeprest.profiles.errors import InfeasibleError

PLAN = plan_by_hand(chain(2), "timeprest", 2, 2)


def made(delay, period_s, stopped=None):
    """A plan that costs so much."""
    replace, predicted = msgspec.structs.replace, PLAN.predicted
    stages = tuple(replace(stage, delay=delay) for stage in predicted.stages)
    return replace(
        PLAN,
        predicted=replace(predicted, period_s=period_s, stages=stages),
        solver=replace(PLAN.solver, stopped=stopped),
    )


def front(plans, most=None):
    """Of these, the first within each bound is what a search finds; and what was asked for."""
    asked = []

    def within(bound):
        asked.append(bound)
        for plan in plans:
            if bound is None or plan.predicted.delay <= bound:
                return plan
        raise InfeasibleError("nothing")

    found = staleness_front(within, most)
    return [(p.predicted.delay, p.predicted.period_s) for p in found], asked


def test_down_to_none_the_least_stale_first():
    found, asked = front([made(3, 1.0), made(1, 2.0), made(0, 4.0)])
    assert found == [(0, 4.0), (1, 2.0), (3, 1.0)]
    assert asked == [None, 2, 0]
    assert front([made(3, 1.0), made(1, 2.0), made(0, 4.0)], 1) == ([(0, 4.0), (1, 2.0)], [1, 0])


def test_what_another_beats_in_both_is_left_out():
    """A search that ended early found less than a later one with less to look at."""
    assert front([made(3, 1.0), made(2, 3.0), made(1, 2.0)])[0] == [(1, 2.0), (3, 1.0)]
    assert front([made(3, 2.0), made(0, 2.0)])[0] == [(0, 2.0)]


def test_it_ends_where_nothing_fits_or_the_user_ends_it():
    found, asked = front([made(2, 1.0)])
    assert (found, asked) == ([(2, 1.0)], [None, 1])
    assert front([made(2, 1.0, "interrupted"), made(0, 9.0)])[1] == [None]
    with pytest.raises(InfeasibleError, match="nothing"):
        front([])


def test_of_large_differences_not_each_is_asked_for():
    plans = [made(d, 100.0 - d) for d in range(63, -1, -1)]
    found, asked = front(plans)
    assert len(asked) < 30
    assert asked[-8:] == list(range(7, -1, -1))
    assert len(found) == len(asked)
