"""Tensors that are carried on past stages: how old they are where a stage begins.

What a stage sends to the next one is known from both. A tensor that crosses several borders may
also go from where it was made to a later stage, over another wire. Of those that cross a place the
one that takes most is followed from border to border: by its age, the stages that it was made
before the one that begins there. Others are left out, which is true of any bound.

Index letters: P places; p stages between two of them.
"""

from __future__ import annotations

import math

import numpy as np

from ...partition.dp.cycle_stages import StageTable
from ...partition.dp.lattice import Flags, Positions
from ...partition.problem import Vector, members

_OLDEST = 4
"""Older ones aren't followed."""


class Carried:
    """The tensors of one table.

    Attributes:
        ages: numbers of ages: 1 for what the stage before made, up to the oldest; 0: not known.
        sent_s: what a micro-batch's message of it, and its gradients, take to stages that use what
            is carried to where they begin, [2, p].
        reached: per age and place, whether some stage may begin there, [ages, P].
    """

    def __init__(self, table: StageTable) -> None:
        self._stages, lattice = table.within(math.inf), table.lattice
        below, above, messages = self._stages.below, self._stages.above, table.problem.messages
        inside = np.array([lattice.column(layer) for layer in range(lattice.layers)])
        self._made: Flags = inside[[m.maker for m in messages]].reshape(-1, lattice.size)
        # Users that are before each place.
        users = np.array([inside[[*members(m.users)]].sum(axis=0) for m in messages])
        users = users.reshape(-1, lattice.size)
        left = users < np.array([m.users.bit_count() for m in messages])[:, None]
        crosses = self._made & left
        spans = crosses.sum(axis=1)
        takes = np.array([m.wire_s + m.back_s for m in messages]) * spans * (spans > 1)
        value = crosses * takes[:, None]
        # Numbers of messages; -1: none is carried there.
        carried = np.full(lattice.size, -1)
        if len(messages):
            carried = np.where(value.any(axis=0), value.argmax(axis=0), -1)
        before, behind = carried[below], carried[above]
        used = (before >= 0) & (users[before, above] > users[before, below])
        both_s = np.array([(m.wire_s, m.back_s) for m in messages]).reshape(-1, 2).T
        self.sent_s: Vector = both_s[:, before] * used
        self.ages = 1 + _OLDEST if bool(used.any()) else 1
        self._fresh: Flags = (behind >= 0) & ~self._made[behind, below]
        self._same: Flags = (behind >= 0) & (behind == before)
        self.reached = self._reached(lattice.size)

    def forget(self) -> None:
        """Follow none."""
        reached: Flags = np.logical_or.reduce(self.reached, axis=0, keepdims=True)
        self.ages, self.reached = 1, reached

    def older(self, which: Positions, age: Positions) -> Positions:
        """The age behind stages, from that before them."""
        known = (age > 0) & (age < self.ages - 1)
        aged = np.where(self._fresh[which], 1, np.where(self._same[which] & known, age + 1, 0))
        found: Positions = np.minimum(aged, self.ages - 1)
        return found

    def _reached(self, size: int) -> Flags:
        below, above = self._stages.below, self._stages.above
        found = np.zeros((self.ages, size), dtype=np.bool_)
        found[0, 0] = True
        for place, (low, high) in enumerate(
            zip(*(np.searchsorted(below, np.arange(size) + k) for k in (0, 1)), strict=True)
        ):
            which = np.arange(low, high)
            for age in np.flatnonzero(found[:, place]):
                found[self.older(which, np.full(len(which), age)), above[which]] = True
        return found
