"""The best cut by an integer program, or the best one in the time there is, with a bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..problem import Cut, StageProblem
from ..stage_load import cut_load
from .search import Search
from .stages import StageModel
from .variables import least_load, make_slots

LIMITS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Limits on loads that are tried before the real one, as multiples of the least load."""
SMALL = 300
"""Layers times devices; a smaller program is as fast without trying limits."""


@dataclass(frozen=True)
class IlpAnswer:
    """What the integer program found.

    Attributes:
        cut: the best one, no worse than the cut that was given; None where there is none.
        bound_s: no allowed cut has a smaller load; infinite where there is no cut at all.
        optimal: the cut is proven best, or it is proven that there is none.
        status: the solver's own word for how it ended.
        interrupted: stopped from outside.
    """

    cut: Cut | None
    bound_s: float
    optimal: bool
    status: str
    interrupted: bool


def solve_ilp(
    problem: StageProblem,
    *,
    warm: Cut | None = None,
    below: float = math.inf,
    forbidden: Sequence[Cut] = (),
    gap: float = 0.0,
    time_limit_s: float | None = None,
    progress: Callable[[float, float], None] | None = None,
    stopped: Callable[[], bool] | None = None,
    solver: str | None = None,
) -> IlpAnswer:
    """The cut whose largest stage load is smallest.

    Args:
        problem: what to cut.
        warm: a cut to start from; it is the answer where nothing better is found.
        below: only cuts with a smaller load, in s, are looked for. Where it is proven that there
            is none, the answer's bound is this number.
        forbidden: cuts that are not wanted; those with the same layers and options per stage.
        gap: relative; the search may end when load and bound are no further apart.
        time_limit_s: of wall time, for writing programs down and solving them.
        progress: told the bound and the best load, in s, when they change.
        stopped: asked about ten times a second; true ends the search, as Ctrl-C does.
        solver: "highs" or "cbc"; by default HiGHS where it is installed.
    """
    slots = make_slots(problem)
    least_s = least_load(problem, slots)
    large = problem.layers * slots.count > SMALL and math.isfinite(least_s)
    search: Search[Cut] = Search(
        lambda limit_s, excluded: StageModel(problem, limit_s, excluded),
        least_s,
        below,
        list(forbidden),
        [least_s * times for times in LIMITS] if large else (),
        gap,
        time_limit_s,
        progress,
        stopped,
        solver,
    )
    if warm is not None and not any(_same(warm, cut) for cut in forbidden):
        search.offer(Cut(warm.stages, cut_load(problem, warm)))
    search.run()
    return IlpAnswer(search.best, search.bound_s, search.optimal, search.status, search.interrupted)


def _same(left: Cut, right: Cut) -> bool:
    """Whether two cuts have the same layers and options per stage."""
    pairs = [[(stage.layers, stage.option) for stage in cut.stages] for cut in (left, right)]
    return pairs[0] == pairs[1]
