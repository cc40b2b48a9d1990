"""Devices all alike: the cut by how few of them do the rest of the model under a target load.

Where devices are alike, a stage's load is the same wherever it stands, and what it holds rises
with the devices behind it: fewer of them for what follows are never worse. So a downset needs one
number, the fewest devices that do the layers beyond it under the target, where `minimax` keeps one
for each number of devices left. The best target is some stage's load, found by halving a sorted
list of them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from ..problem import ChosenStage, Cut, StageProblem
from ..stage_load import stage_load
from .lattice import Lattice
from .minimax import Answer
from .rising_places import RisingPlaces
from .rising_stages import StagesAbove, StageTable

Positions = NDArray[np.intp]

FEW = 2_000
"""Options × devices up to which `minimax` is as quick."""

MOST_NUMBERS = 100_000_000
"""Steps of making the table of stages: about a second."""

NEVER = 2**62
"""A cost that no chain has."""


def rising_minimax(
    problem: StageProblem,
    lattice: Lattice,
    *,
    deadline: float | None = None,
    few: int | None = None,
) -> Answer | None:
    """The cut on a lattice whose largest stage load is smallest, or what is known at the deadline.

    Among cuts with the same objective one with the fewest devices, then with the fewest stages.

    Args:
        deadline: on the clock of `time.monotonic`.
        few: options × devices that count as few; FEW by default.

    Returns:
        None where this isn't the way: places aren't `RisingPlaces`, the number of stages is
        given, devices are few, or there are too many stages to hold in memory.
    """
    places = problem.place
    if not isinstance(places, RisingPlaces) or problem.stages is not None:
        return None
    if len(problem.options) * problem.devices <= (FEW if few is None else few):
        return None
    rows = problem.layers + len(problem.tensors) + len(problem.options) + len(problem.modes) ** 2
    if lattice.size**2 // 2 * rows > MOST_NUMBERS:
        return None
    table = StageTable(problem, lattice, places)
    stages = [table.stages(below) for below in range(lattice.size - 1)]
    return _Halving(problem, lattice, stages, deadline).answer()


@dataclass(frozen=True)
class _Halving:
    problem: StageProblem
    lattice: Lattice
    stages: Sequence[StagesAbove]
    deadline: float | None

    def answer(self) -> Answer:
        loads = np.unique(np.concatenate([stages.load for stages in self.stages]))
        # No cut is below the load at `low`; the best one so far has that at `high`.
        low, high, best = 0, len(loads), None
        while low < high:
            if self.deadline is not None and monotonic() > self.deadline:
                break
            middle = (low + high) // 2 if best else high - 1
            chosen = self.choices(float(loads[middle]))
            if chosen is None:
                low = middle + 1
                continue
            best = list(self.chain(chosen))
            largest = max(self.stages[below].load[at] for below, at in best)
            high = int(np.searchsorted(loads, largest))
        cut = self.cut(best) if best else None
        if low < high:
            return Answer(cut, float(loads[low]), complete=False)
        return Answer(cut, cut.objective_s if cut else float("inf"), complete=True)

    def choices(self, target: float) -> Positions | None:
        """The stage to take from each downset, with the fewest devices; None without a cut."""
        devices, step = self.problem.devices, self.problem.layers + 1
        # Devices · step + stages, which are fewer than that.
        cost = np.full(self.lattice.size, NEVER, dtype=np.int64)
        cost[-1] = 0
        chosen = np.zeros(len(cost), dtype=np.intp)
        for below in range(len(cost) - 2, -1, -1):
            stages = self.stages[below]
            total = cost[stages.above] + (stages.replicas * step + 1)
            k = total // step
            good = (stages.load <= target) & (k <= devices)
            good &= -(-k // stages.replicas) <= stages.units
            total[~good] = NEVER
            if len(total):
                chosen[below] = total.argmin()
                cost[below] = total[chosen[below]]
        return chosen if cost[0] < NEVER else None

    def chain(self, chosen: Positions) -> Iterator[tuple[int, int]]:
        """Positions of the downsets that stages begin at, and of these in their lists."""
        below = 0
        while below != self.lattice.size - 1:
            at = int(chosen[below])
            yield below, at
            below = int(self.stages[below].above[at])

    def cut(self, chain: Sequence[tuple[int, int]]) -> Cut:
        """A chain as an answer, on the last devices, its objective from the definition."""
        masks = self.lattice.masks
        k = sum(int(self.stages[below].replicas[at]) for below, at in chain)
        chosen, worst = [], 0.0
        for below, at in chain:
            stages = self.stages[below]
            layers, option = masks[stages.above[at]] & ~masks[below], int(stages.option[at])
            chosen.append(ChosenStage(layers, option, k))
            worst = max(worst, stage_load(self.problem, masks[below], layers, option, k))
            k -= int(stages.replicas[at])
        return Cut(tuple(chosen), worst)
