"""Where a stage may end: the downsets that it can reach, found without looking at its costs."""

from __future__ import annotations

import numpy as np

from .lattice import Positions
from .program import SLACK, Program


class Limits:
    """What keeps a stage from reaching from one downset to another, whatever lies between.

    A sum may rise over the stage by no more than it can take: work by what the devices do that
    aren't needed beyond it, bytes by what one stage can hold.

    Attributes:
        lower, upper: the sums at the stage's lower and upper downset, [J, D].
        left: what is added to a lower sum, by devices left there, [J, K + 1].
        needed: what is added to an upper sum, by devices needed there, [J, K + 1].
        rate, span: work that a device and that a stage can do at most.
    """

    def __init__(self, program: Program, target: float) -> None:
        places, memory = program.places, program.memory
        self.rate = places.fastest * target * (1 + SLACK)
        self.span = self.rate * int(program.replicas.max(initial=0)) + program.slack
        held = [bound.held for bound in memory]
        below, above = program.potentials
        self.lower, self.upper = np.array([*below, *held]), np.array([*above, *held])
        work = np.tile(self.rate * np.arange(places.devices + 1), (len(below), 1))
        slack = [np.full(places.devices + 1, SLACK * total[-1]) for total in held]
        self.left = np.array([*(work + program.slack), *slack])
        self.needed = np.array([*work, *(-bound.single for bound in memory)])


class Targets:
    """Downsets that stages may end at, by falling work, each with the devices it needs to go.

    Attributes:
        count: how many there are.
        position, need: of each; the first `count` entries.
    """

    def __init__(self, program: Program, limits: Limits) -> None:
        """None yet."""
        self._program, self._limits = program, limits
        size, words = program.lattice.size, len(program.costs.inside.guards)
        self.count = 0
        self.position = np.empty(size, dtype=np.intp)
        self.need = np.empty(size, dtype=np.intp)
        self._fall = np.empty(size)
        self._keys = np.empty((len(limits.upper), size))
        self._guarded = np.empty((words, size), dtype=np.uint64)

    def add(self, position: int, need: int) -> None:
        """Let stages end at a downset. Its work is at most that of those added before."""
        at, limits, inside = self.count, self._limits, self._program.costs.inside
        self.position[at], self.need[at] = position, need
        self._fall[at] = -self._program.costs.work[position]
        self._keys[:, at] = limits.upper[:, position] + limits.needed[:, need]
        self._guarded[:, at] = inside.counts[:, position] | inside.guards
        self.count += 1

    def beyond_reach(self, below: int) -> bool:
        """Whether each of them has more work than a stage from a downset can take."""
        most = self._program.costs.work[below] + self._limits.span
        return bool(-self._fall[self.count - 1] > most) if self.count else True

    def above(self, below: int, devices: int) -> Positions:
        """Which of them, as places in this list, hold a downset and may end a stage from it.

        Args:
            below: position of the downset.
            devices: left at it.
        """
        program, limits, end = self._program, self._limits, self.count
        most = -(program.costs.work[below] + limits.span)
        start = int(np.searchsorted(self._fall[:end], most))
        fine = program.costs.inside.holding(below, self._guarded[:, start:end])
        reach = limits.lower[:, below] + limits.left[:, devices]
        for keys, limit in zip(self._keys, reach, strict=True):
            fine &= keys[start:end] <= limit
        at: Positions = fine.nonzero()[0] + start
        fresh: Positions = at[(self.need[at] < devices) & (self.position[at] != below)]
        return fresh
