"""Identical devices, as many for every stage: least load and least that all stages wait for.

Where a pipeline runs empty after each mini-batch, its period is about the largest load, of a stage
that waits for one micro-batch's way through all others, and what stages compute again on that way.
The least load alone has stages compute again that need not.
"""

from __future__ import annotations

from time import monotonic

import numpy as np

from ..problem import Cut, StageProblem, Vector, cut_on_last_devices
from .identical_devices import IdenticalPlaces, StagesAbove, StageTable
from .lattice import Lattice

_STEPS, _STEP = 14, 1.02
"""Targets for the largest load: from the least on, each so many times the one before."""


def waited_for(problem: StageProblem, again: Vector, cut: Cut) -> float:
    """What stages compute again for one micro-batch, in s; see `with_least_waits`."""
    return sum(
        float(again[[j for j in range(problem.layers) if stage.layers >> j & 1]].sum())
        for stage in cut.stages
        if _recomputes(problem, stage.option)
    )


def with_least_waits(
    problem: StageProblem,
    lattice: Lattice,
    again: Vector,
    best: Cut,
    deadline: float | None = None,
) -> Cut:
    """The cut with the smallest sum of its largest load and of what its stages compute again.

    For each target of a few the least there is to compute again, by the number of stages beyond
    each downset, which says what is in flight.

    Args:
        problem: whose places are `IdenticalPlaces`, and whose options have as many replicas.
        again: per layer, [n]: seconds, for one micro-batch, where a stage computes again.
        best: the cut with the least largest load, to begin with; returned where none is better.
        deadline: by `time.monotonic`.
    """
    places = problem.place
    assert isinstance(places, IdenticalPlaces)
    table = StageTable(problem, lattice, places)
    stages = [table.stages(below) for below in range(lattice.size - 1)]
    columns = np.array([lattice.column(layer) for layer in range(lattice.layers)])
    sums = again @ columns.reshape(lattice.layers, lattice.size)
    least, sum_s = best, best.objective_s + waited_for(problem, again, best)
    for step in range(_STEPS):
        target = best.objective_s * _STEP**step
        if target >= sum_s or (deadline is not None and monotonic() > deadline):
            break
        steps = _under(problem, stages, sums, target)
        if steps is not None:
            cut = cut_on_last_devices(problem, lattice.masks, steps)
            found_s = cut.objective_s + waited_for(problem, again, cut)
            if found_s < sum_s:
                least, sum_s = cut, found_s
    return least


def _under(
    problem: StageProblem, stages: list[StagesAbove], sums: Vector, target: float
) -> list[tuple[int, int, int]] | None:
    """Stages with loads up to a target that compute the least again; of those the fewest.

    Args:
        stages: from each downset but the full one.
        sums: of what the layers of each downset take again, [D].
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
        for at in np.flatnonzero(found.load <= target).tolist():
            above, option = int(found.above[at]), int(found.option[at])
            count = min(most, int(found.units[at]))
            extra_s = few
            if _recomputes(problem, option):
                extra_s += float(sums[above] - sums[below])
            new = cost[above, :count] + extra_s
            known = cost[below, 1 : count + 1]
            less = new < known
            known[less] = new[less]
            chosen[below, 1 : count + 1][less] = at
    count = int(cost[0].argmin())
    if not np.isfinite(cost[0, count]):
        return None
    steps, below = [], 0
    while below != top:
        found, at = stages[below], int(chosen[below, count])
        steps.append((below, int(found.above[at]), int(found.option[at])))
        below, count = int(found.above[at]), count - 1
    return steps


def _recomputes(problem: StageProblem, option: int) -> bool:
    return problem.modes[problem.options[option].mode].name == "recompute"
