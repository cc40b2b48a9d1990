"""The cut with the smallest largest stage load, exactly.

Targets are tried from a bound on; the first one that any chain keeps to shows the optimum, as
the program under it goes over all chains within it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from heapq import heappop, heappush
from time import monotonic

import numpy as np

from ..problem import (
    Answer,
    Cut,
    Deadline,
    OutOfTime,
    StageProblem,
    Step,
    Vector,
    check_time,
    cut_load,
    cut_of,
)
from .grown_stages import grown_stages
from .lattice import Lattice, Positions
from .program import Program, just_below
from .sweep import CLOCK, Sweep

# From what a sweep knows to a chain: the one with the fewest devices, then the fewest stages ----


class Level:
    """States reached at one number of stages to go, and how cheaply.

    Attributes:
        cost: devices · (n + 1) + stages so far, for n layers, [D, K + 1].
    """

    def __init__(self, program: Program) -> None:
        self._rank = np.empty(program.lattice.size, dtype=np.intp)
        self._rank[program.order[::-1]] = np.arange(program.lattice.size)
        shape = (program.lattice.size, program.problem.devices + 1)
        self.cost = np.full(shape, np.inf)
        self._came = np.zeros((*shape, 3), dtype=np.int32)
        self._queue: list[tuple[int, int]] = []
        self._queued: set[int] = set()

    def add(
        self, below: int, above: Positions, left: Positions, cost: Vector, how: Positions
    ) -> None:
        """Reach states from one downset.

        Args:
            below: its position.
            above, left, cost: of the states, [p].
            how: option and k of the stages that lead there, [p, 2].
        """
        state = above * self.cost.shape[1] + left
        order = np.lexsort((cost, state))
        first = np.concatenate([[True], np.diff(state[order]) > 0])
        best = order[first]
        best = best[cost[best] < self.cost[above[best], left[best]]]
        self.cost[above[best], left[best]] = cost[best]
        self._came[above[best], left[best], 0] = below
        self._came[above[best], left[best], 1:] = how[best]
        for position in set(above[best].tolist()) - self._queued:
            self._queued.add(position)
            heappush(self._queue, (int(self._rank[position]), position))

    def take(self) -> int | None:
        """The next downset; None when there are no more."""
        return heappop(self._queue)[1] if self._queue else None

    def step(self, above: int, left: int) -> Step:
        """The stage that a state was reached by."""
        below, option, k = self._came[above, left].tolist()
        return below, above, option, k


def fewest_chain(sweep: Sweep, limit: float, deadline: Deadline = None) -> Cut:
    """Of the chains with loads up to a limit, one with the fewest devices, then fewest stages.

    Args:
        sweep: under a target not below the limit; its best cut is within the limit.

    Raises OutOfTime.
    """
    program, narrow = sweep.program, sweep.narrowed(limit)
    devices = program.problem.devices
    first = devices
    if program.places.same:
        # As many as are needed at the first downset.
        first = int((sweep.values[sweep.start, 0, :-1] <= limit).argmax())
    levels = [Level(program) for _ in range(sweep.start + 1)]
    how = np.zeros((1, 2), dtype=np.intp)
    levels[-1].add(0, np.array([0]), np.array([first]), np.zeros(1), how)
    for level in range(sweep.start, -1, -1):
        number = 0
        while (below := levels[level].take()) is not None:
            if number % CLOCK == 0:
                check_time(deadline)
            number += 1
            if below != program.top:
                _advance(narrow, levels, level, below)
    steps = _traced(program, levels)
    steps = [(a, b, option, k + devices - first) for a, b, option, k in steps]
    return cut_of(program.problem, program.lattice.masks, steps)


def _advance(sweep: Sweep, levels: list[Level], level: int, below: int) -> None:
    program, beyond = sweep.program, max(level - 1, 0)
    cost = levels[level].cost[below]
    if not program.places.same:
        # It may help to leave devices out.
        cost = np.minimum.accumulate(cost[::-1])[::-1]
    wanted = np.flatnonzero(np.isfinite(cost) & (sweep.values[level, below, :-1] <= sweep.target))
    grid = sweep.stages(below, beyond, int(wanted[0]), int(wanted[-1])) if len(wanted) else None
    if grid is None:
        return
    fine = (sweep.reached(grid, beyond) <= sweep.target) & np.isfinite(cost[grid.k])
    row, column = np.nonzero(fine)
    if len(row):
        k, r = grid.k[column], grid.replicas[row]
        total = cost[k] + r * (program.problem.layers + 1) + 1
        how = np.stack([grid.option[row], k], axis=1)
        levels[beyond].add(below, grid.above[row], k - r, total, how)


def _traced(program: Program, levels: list[Level]) -> list[Step]:
    above, level, left = program.top, 0, int(levels[0].cost[program.top].argmin())
    steps: list[Step] = []
    while above:
        steps.append(levels[level].step(above, left))
        above, _, _, k = steps[-1]
        level = min(level + 1, len(levels) - 1)
        # Devices left out come before the stage.
        left = k + int(levels[level].cost[above, k:].argmin())
    return steps[::-1]


def any_chain(sweep: Sweep) -> Cut:
    """A chain as good as the sweep's best."""
    program = sweep.program
    below, k, level = 0, program.problem.devices, sweep.start
    steps: list[Step] = []
    while below != program.top:
        beyond = max(level - 1, 0)
        grid = sweep.stages(below, beyond, 1, k)
        assert grid is not None, "the sweep found a chain here"
        reached = sweep.reached(grid, beyond)
        row, column = np.unravel_index(int(reached.argmin()), reached.shape)
        steps.append((below, int(grid.above[row]), int(grid.option[row]), int(grid.k[column])))
        below, k, level = steps[-1][1], steps[-1][3] - int(grid.replicas[row]), beyond
    return cut_of(program.problem, program.lattice.masks, steps)


# The cut with the smallest largest stage load, exactly ------------------------------------------

STEPS: tuple[float, ...] = (
    0.002,
    0.01,
    0.03,
    0.06,
    0.1,
    0.16,
    0.25,
    0.35,
    0.5,
    0.7,
    1.0,
    1.5,
    2.5,
    5.0,
    15.0,
)
"""How far above the bound targets are tried, in turn."""

RISE, LEAST_RISE = 1.06, 1.01
"""From one target to the next, where the time left won't do for the best known cut's."""

THINNED_STEP, SHARES, EACH = 2, 400, 6
"""On a large lattice, when so many targets have failed, the best cut on fewer downsets says where
to look on: those cheapest to cut at, so many of each of so many shares of the work."""

DEAR = 1.04
"""Where that is so many times above what no cut reaches, stages are grown layer by layer."""

TIED = 1 + 1e-10
"""Loads within this factor are the best one as well."""


def minimax_with_bound(
    problem: StageProblem,
    lattice: Lattice,
    *,
    below: float = float("inf"),
    deadline: Deadline = None,
) -> Answer:
    """The cut on a lattice whose largest stage load is smallest; less, where time runs out.

    Among cuts with the same objective one with the fewest devices, then with the fewest stages;
    on the first devices, where it makes no difference which.

    Args:
        below: only objectives less than this, by more than rounding, count.
    """
    if just_below(below) < 0:
        return Answer(None, below, optimal=True)
    return _Search(Program(problem, lattice), just_below(below), deadline).answer(below)


class _Search:
    """The search for the target.

    Attributes:
        known_s: no cut has a smaller objective.
        found: the best cut on fewer downsets.
    """

    def __init__(
        self, program: Program, limit: float, deadline: Deadline, *, thin: bool = True
    ) -> None:
        self._program, self._limit, self._deadline = program, limit, deadline
        self._large = thin and program.lattice.size > 2 * SHARES * EACH
        self._took: list[tuple[float, float]] = []
        self.known_s = program.bound_s
        self.found: Cut | None = None

    def answer(self, below: float) -> Answer:
        """What is known when a target is kept to, none can be, or time runs out."""
        try:
            for target in self._targets():
                begin = monotonic()
                sweep = Sweep(self._program, target, self._deadline)
                self._took.append((target, monotonic() - begin))
                if sweep.best_s <= target:
                    return self._best(sweep)
                self.known_s = max(self.known_s, target)
        except OutOfTime:
            return Answer(self.found, self.known_s, optimal=False)
        return Answer(self.found, self.found.objective_s if self.found else below, optimal=True)

    def _targets(self) -> Iterator[float]:
        bound, last, steps = self._program.bound_s, self._limit, STEPS
        for number, step in enumerate(STEPS):
            if number == THINNED_STEP and self._large:
                self._thin()
                if self._grow():
                    return
                # There may be no cut at all, which no target but the last can show.
                steps = STEPS if self.found else STEPS[::3]
                last = bound + (self._limit - bound) / 2 if self.found else self._limit
            target = bound * (1 + step)
            if step in steps and self.known_s < target < last:
                yield target
        if self.found is not None:
            yield from self._targets_between()
        yield self._limit

    def _targets_between(self) -> Iterator[float]:
        """Targets on the way to the limit, while that would take longer than there is time: each
        that fails raises the bound."""
        while self.known_s > 0 and self._deadline is not None:
            there_is = 0.8 * (self._deadline - monotonic())
            if self._foreseen_s(self._limit) < there_is:
                return
            target = self.known_s * RISE
            while target > self.known_s * LEAST_RISE and self._foreseen_s(target) > there_is:
                target = math.sqrt(target * self.known_s)
            if not self.known_s * LEAST_RISE < target < self._limit / LEAST_RISE:
                return
            yield target

    def _foreseen_s(self, target: float) -> float:
        """Time that a target will take, if it goes on rising with a power of the target as from
        the last but one to the last."""
        if len(self._took) < 2:
            return 0.0
        (one, before), (two, after) = self._took[-2:]
        if two <= one or min(before, after) <= 0:
            return 0.0
        power = math.log(after / before) / math.log(two / one)
        return float(after * (target / two) ** power)

    def _thin(self) -> None:
        program = self._program
        fewer = Program(program.problem, program.thinned(SHARES, EACH))
        search = _Search(fewer, self._limit, self._deadline, thin=False)
        self.found = search.answer(float("inf")).cut
        if self.found is not None:
            # Ties with it count: of those the one with the fewest devices is wanted.
            self._limit = min(self._limit, self.found.objective_s * TIED)

    def _grow(self) -> bool:
        """Find the best cut without memory limits: no cut is better. Whether it is proven best, or
        that there is none. Where grown stages aren't the way, or no quicker, nothing is done.

        Targets are just below the best cut, and halfway to the bound after one that was met.
        """
        above = self._limit if self.found is None else self.found.objective_s
        grown = grown_stages(self._program) if above > self.known_s * DEAR else None
        if grown is None:
            return False
        best, halfway = grown.under(self._limit, self._deadline), False
        if best is None:
            return True
        while True:
            if cut_load(self._program.problem, best) < float("inf"):
                self.found = best
            target = just_below(best.objective_s)
            if self.known_s >= target:
                break
            if halfway:
                target = min(target, (self.known_s + best.objective_s) / 2)
            better = grown.under(target, self._deadline)
            halfway = better is not None and better.objective_s <= target
            if better is not None and halfway:
                best = better
            else:
                self.known_s = target
        if self.found is None:
            return False
        self._limit = min(self._limit, self.found.objective_s * TIED)
        proven = self.known_s >= just_below(self.found.objective_s)
        return proven and len(self.found.stages) == len(best.stages)

    def _best(self, sweep: Sweep) -> Answer:
        limit = min(sweep.best_s * TIED, sweep.target)
        try:
            cut, optimal = fewest_chain(sweep, limit, self._deadline), True
        except OutOfTime:
            cut, optimal = any_chain(sweep), False
        return Answer(cut, cut.objective_s, optimal)
