"""Good cuts where there are too many downsets to list: along a few orders of the layers.

The first layers of any topological order are a downset. A few orders, each good for a reason of
its own, give a lattice of a few thousand; the best cut on it is then made better on lattices of
what is cheap to cut at, and of what lies around its own downsets, as long as that helps.
"""

from __future__ import annotations

from itertools import accumulate
from operator import or_

from .dp.lattice import Lattice, lattice_of
from .dp.minimax import minimax_with_bound
from .neighbours import around, cheapest
from .problem import Cut, StageProblem
from .warm_start import good_orders, groups_of

NEAR = 3000
"""Downsets to look at, besides those along orders, and each time around a cut's own."""


def good_cut(problem: StageProblem, *, deadline: float | None = None) -> Cut | None:
    """A cut that is good, if not the best; None where none was found.

    Args:
        deadline: on the clock of `time.monotonic`; the best so far is the answer then.
    """
    groups, along = groups_of(problem), prefix_lattice(problem)
    best = minimax_with_bound(problem, along, deadline=deadline).cut
    wider = lattice_of(problem, {*along.masks, *cheapest(groups, NEAR)})
    best = _better(problem, wider, best, deadline) or best
    better = best
    while better is not None:
        best = better
        nearby = lattice_of(problem, around(groups, best, NEAR))
        better = _better(problem, nearby, best, deadline)
    return best


def _better(
    problem: StageProblem, lattice: Lattice, best: Cut | None, deadline: float | None
) -> Cut | None:
    below = float("inf") if best is None else best.objective_s
    return minimax_with_bound(problem, lattice, below=below, deadline=deadline).cut


def prefix_lattice(problem: StageProblem) -> Lattice:
    """The downsets along good orders."""
    masks: set[int] = set()
    for order in good_orders(problem):
        masks.update(accumulate(order, or_))
    return lattice_of(problem, masks)
