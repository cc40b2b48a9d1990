"""Identical devices, as many for every stage: the least period of a pipeline that flushes.

In 1F1B that runs empty after each mini-batch, the period is about the largest load, of a stage that
waits for one micro-batch's way through all others, and what stages compute again on that way. The
least load alone has stages compute again that need not. It also takes all stages alike: those with
more stages behind them run more forwards while they wait for that micro-batch, and may have more to
do (`places.returning` has the formula).
"""

from __future__ import annotations

from math import ceil
from time import monotonic

import numpy as np

from ..problem import Cut, StageProblem, Vector, cut_on_last_devices, members, stage_load
from .identical_devices import IdenticalPlaces, StagesAbove, StageTable
from .lattice import Lattice

_STEPS, _STEP = 14, 1.02
"""Targets for the largest load: from the least on, each so many times the one before; and as many
below it."""

LEAST = _STEP**-_STEPS
"""Of the least load, the least that the largest may come to where forwards run ahead."""


def waited_for(problem: StageProblem, cut: Cut) -> float:
    """What stages compute again for one micro-batch, in s; see `with_least_period`."""
    modes = ((problem.modes[problem.options[x.option].mode], x.layers) for x in cut.stages)
    return sum(_total(m.again_s, layers) for m, layers in modes if m.again_s is not None)


def period_of(problem: StageProblem, forward_s: Vector, cut: Cut, each: int = 1) -> float:
    """What a cut's period is about, in s.

    Args:
        forward_s: per layer, [n]: of one micro-batch.
        each: micro-batches of a replica, where it runs forwards while it waits for its first
            backward; 1: none.
    """
    below, largest = 0, 0.0
    for stage in cut.stages:
        load = stage_load(problem, below, stage.layers, stage.option, stage.k)
        behind = -(-stage.k // problem.options[stage.option].replicas) - 1
        largest = max(largest, load - min(behind, each - 1) * _total(forward_s, stage.layers))
        below |= stage.layers
    return largest + waited_for(problem, cut)


def with_least_period(
    problem: StageProblem,
    lattice: Lattice,
    forward_s: Vector,
    best: Cut,
    each: int = 1,
    deadline: float | None = None,
) -> Cut:
    """The cut with the least `period_of`, or about that.

    For each target of a few for the largest load, the least that there is to compute again, by the
    number of stages beyond each downset, which says what is in flight and what runs ahead.

    Args:
        problem: whose places are `IdenticalPlaces`, and whose options have as many replicas.
        best: the cut with the least largest load, to begin with; returned where none is better.
        each, forward_s: see `period_of`.
        deadline: by `time.monotonic`.
    """
    places = problem.place
    assert isinstance(places, IdenticalPlaces)
    table = StageTable(problem, lattice, places)
    stages = [table.stages(below) for below in range(lattice.size - 1)]
    columns = np.array([lattice.column(layer) for layer in range(lattice.layers)])
    columns = columns.reshape(lattice.layers, lattice.size)
    sums = forward_s @ columns
    modes = [problem.modes[option.mode].again_s for option in problem.options]
    again = [None if again_s is None else again_s @ columns for again_s in modes]
    least, least_s = best, period_of(problem, forward_s, best, each)
    # Where nothing runs ahead, none is below the least load.
    for step in range(-_STEPS if each > 1 else 0, _STEPS):
        target = best.objective_s * _STEP**step
        if target >= least_s or (deadline is not None and monotonic() > deadline):
            break
        steps = _under(problem, stages, sums, again, target, each)
        if steps is not None:
            cut = cut_on_last_devices(problem, lattice.masks, steps)
            found_s = period_of(problem, forward_s, cut, each)
            if found_s < least_s:
                least, least_s = cut, found_s
    return least


def _under(
    problem: StageProblem,
    stages: list[StagesAbove],
    sums: Vector,
    again: list[Vector | None],
    target: float,
    each: int,
) -> list[tuple[int, int, int]] | None:
    """Stages with loads up to a target that compute the least again; of those the fewest.

    Args:
        stages: from each downset but the full one.
        sums: of the forwards of each downset's layers, [D].
        again: per option, of what is computed again of them; None: nothing.
        each: see `period_of`.
    """
    (r,) = {option.replicas for option in problem.options}
    most, top = problem.devices // r, len(stages)
    few = 1e-9 * float(sums[-1])
    # Per downset, with so many stages beyond it, [D, most + 1].
    cost = np.full((top + 1, most + 1), np.inf)
    cost[top, 0] = 0.0
    chosen = np.zeros((top + 1, most + 1), dtype=np.intp)
    for below in range(top - 1, -1, -1):
        found = stages[below]
        forward = sums[found.above] - sums[below]
        over = np.maximum(found.load - target, 0.0)
        for at in np.flatnonzero(over <= (each - 1) * forward).tolist():
            above, option = int(found.above[at]), int(found.option[at])
            # Stages behind it, at the least and fewer than.
            least = ceil(over[at] / forward[at]) if over[at] else 0
            count = min(most, int(found.units[at]))
            extra_s = few
            mine = again[option]
            if mine is not None:
                extra_s += float(mine[above] - mine[below])
            new = cost[above, least:count] + extra_s
            known = cost[below, least + 1 : count + 1]
            less = new < known
            known[less] = new[less]
            chosen[below, least + 1 : count + 1][less] = at
    count = int(cost[0].argmin())
    if not np.isfinite(cost[0, count]):
        return None
    steps, below = [], 0
    while below != top:
        found, at = stages[below], int(chosen[below, count])
        steps.append((below, int(found.above[at]), int(found.option[at])))
        below, count = int(found.above[at]), count - 1
    return steps


def _total(values: Vector, layers: int) -> float:
    return float(values[list(members(layers))].sum())
