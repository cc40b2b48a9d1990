"""The Pareto front of plans."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.comparison.pareto import ParetoFront, ParetoPoint

PRICES = st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 3))


def pareto_front(points):
    """The front of these plans; of equal ones the first."""
    front = ParetoFront()
    for point in points:
        front.add(point)
    return front.points


def point(prices):
    return ParetoPoint("timeprest", None, float(prices[0]), prices[1], prices[2])


def beats(a, b):
    return a != b and all(x <= y for x, y in zip(a, b, strict=True))


@given(st.lists(PRICES))
def test_the_front_is_what_nothing_beats(drawn):
    found = [(p.period_s, p.memory_bytes, p.delay) for p in pareto_front(map(point, drawn))]
    wanted = {p for p in drawn if not any(beats(other, p) for other in drawn)}
    assert set(found) == wanted
    assert len(found) == len(wanted)
    assert found == sorted(found)


def test_periods_that_differ_by_rounding_are_the_same():
    front = pareto_front([point((1, 2, 1)), ParetoPoint("gpipe", None, 1 + 1e-12, 1, 1)])
    assert [p.variant for p in front] == ["gpipe"]
