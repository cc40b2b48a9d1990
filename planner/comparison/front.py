"""The front of period and delay: plans of one system that no other beats in both."""

from __future__ import annotations

from collections.abc import Callable

from ...profiles.errors import InfeasibleError
from ..plan import Plan
from ..search.solve import INTERRUPTED
from .pareto import unbeaten

_EVERY = 16
"""Up to such delays each is asked for; of larger ones, those an eighth apart or so."""


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
