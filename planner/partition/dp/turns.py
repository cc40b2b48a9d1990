"""What a cut has in flight where its stages take turns, as in 1F1B: the lowest that a period takes.

From the last stage on: each waits for its own work and, of what gradients come back from, for the
longest; and so many micro-batches in flight take so many N-ths of a period
(`critical_cycles`, *turns*).

Index letters: S stages; N micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from .cycle_devices import Flight

_CLOSE = _ROUNDING = 1e-12
"""Relative: where bisection ends, and of units."""


class Turn(NamedTuple):
    """A stage of a cut.

    Attributes:
        own_s: a micro-batch's forward and backward.
        update_s: what comes on top of each, where a mini-batch has one alone.
        behind: later stages that gradients come back from, and what a micro-batch's messages to
            each of them take, there and back.
        flights: what it may have in flight, by rising units.
    """

    own_s: float
    update_s: float
    behind: Sequence[tuple[int, float]]
    flights: Sequence[Flight]


def turnings(
    stages: Sequence[Turn], micro_batches: int, period_s: float
) -> Iterator[tuple[Flight, ...]]:
    """All that stages may have in flight that keeps to a period, [S] each, the lowest first."""
    each = period_s / micro_batches

    def further(waits: tuple[float, ...], mine: tuple[Flight, ...]) -> Iterator[tuple[Flight, ...]]:
        """Those with these of the last stages, which are waited for so long."""
        s = len(stages) - 1 - len(mine)
        if s < 0:
            yield mine
            return
        own_s, update_s, behind, flights = stages[s]
        beyond = max((sent_s + waits[t - s - 1] for t, sent_s in behind), default=0.0)
        needed = (own_s + update_s + beyond) / each - 1 if each else float("inf")
        least = mine[0].limit if mine else 0
        for flight in flights:
            if flight.units >= needed * (1 - _ROUNDING) and flight.limit >= least:
                wait_s, fits = own_s + max(flight.units * each, beyond), False
                for found in further((wait_s, *waits), (flight, *mine)):
                    fits = True
                    yield found
                if not fits:
                    # With more here stages before it wait for more, too.
                    return

    return further((), ())


def least_turning(
    stages: Sequence[Turn],
    micro_batches: int,
    below_s: float,
    fits: Callable[[Sequence[Flight]], bool] = lambda _: True,
) -> tuple[float, tuple[Flight, ...] | None]:
    """The least period that a cut may have, and the lowest that it takes in flight: by bisection,
    as for all cuts. None where longer ones than asked for alone are left.

    Args:
        below_s: longer ones don't matter.
        fits: what is in flight is within the memory.
    """

    def within(period_s: float) -> tuple[Flight, ...] | None:
        found = next(turnings(stages, micro_batches, period_s), None)
        return found if found is not None and fits(found) else None

    low, high, best = 0.0, below_s, within(below_s)
    if best is None:
        return below_s, None
    while high > low * (1 + _CLOSE) and high > 0:
        middle = (low + high) / 2
        found = within(middle)
        low, high = (low, middle) if found else (middle, high)
        best = found or best
    return low, best
