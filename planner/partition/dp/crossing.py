"""What tensors add to a stage between two downsets, for one lower downset and many upper ones.

A tensor that has no end in the lower downset a, or all, adds to a stage a difference of sums over
downsets: only tensors that are *open* at a, with some of their ends in it, have to be looked at
for the pair. With E(d, t) the number of ends of t in d, and O(b) the sum over tensors open at b,

    lower(a, b) = Σ of t open at a with E(b, t) > E(a, t)
    upper(a, b) = O(b) − Σ of t open at a and at b

and, for memory that several layers share, with Z(d) the sum over all that have an end in d,

    shared(a, b) = Z(b) − Z(a) + Σ of those open at a with E(b, t) > E(a, t).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..problem import Vector
from ..stage_load import members
from .containment import Containment
from .lattice import Positions

Flags = NDArray[np.bool_]
Counted = tuple[int, Sequence[float], Sequence[float]]
"""Ends of a tensor, what it adds at lower and what it adds at upper cuts."""


CHUNK = 1 << 15
"""Downsets that are counted at a time."""


class Crossing:
    """Sums over tensors.

    Attributes:
        upper_open: over tensors open at a downset, of their upper numbers, [U, D].
        lower_due: over those that layers beyond it use, of their lower numbers, [L, D].
        met: over those with an end in it, of their lower numbers, [L, D].
    """

    def __init__(self, inside: Containment, tensors: Sequence[Counted], result: int) -> None:
        """Count ends.

        Args:
            inside: of the lattice.
            tensors: at least one, all with as many numbers.
            result: the bit of their ends that lies beyond all downsets but the full one.
        """
        merged = _merged(inside, tensors, result)
        numbers = np.array(list(merged.values()))
        self._lower, self._upper = np.split(numbers, [len(tensors[0][1])], axis=1)
        used = np.array([len(groups) for groups, _ in merged])
        counts = used + [beyond for _, beyond in merged]
        kind = np.uint8 if counts.max() < 256 else np.uint16
        self._all = counts.astype(kind)
        size = inside.member.shape[1]
        self._full = size - 1
        self._ends = np.empty((size, len(merged)), dtype=kind)
        self.upper_open = np.zeros((self._upper.shape[1], size))
        self.lower_due, self.met = np.zeros((2, self._lower.shape[1], size))
        for at in range(0, size, CHUNK):
            part = slice(at, at + CHUNK)
            ends = np.zeros((len(merged), min(CHUNK, size - at)), dtype=kind)
            for row, (groups, _) in zip(ends, merged, strict=True):
                for group in groups:
                    row += inside.member[group, part].view(np.uint8)
            _add(self.upper_open[:, part], (ends > 0) & (ends < self._all[:, None]), self._upper)
            _add(self.lower_due[:, part], (ends > 0) & (ends < used[:, None]), self._lower)
            _add(self.met[:, part], ends > 0, self._lower)
            self._ends[part] = ends.T
        self.upper_open[:, self._full] = 0.0

    def between(self, below: int, above: Positions) -> tuple[Vector, Vector]:
        """lower, [L, B], and upper, [U, B], of the stages from `below` to each of `above`."""
        row = self._ends[below]
        at = ((row > 0) & (row < self._all)).nonzero()[0]
        upper: Vector = self.upper_open[:, above]
        if not len(at):
            return np.zeros((self._lower.shape[1], len(above))), upper
        ends = self._ends.take(at[:, None] + above * self._ends.shape[1])
        lower: Vector = self._lower[at].T @ (ends > row[at][:, None])
        passed: Vector = self._upper[at].T @ (ends < self._all[at][:, None])
        return lower, np.where(above == self._full, 0.0, upper - passed)

    def met_between(self, below: int, above: Positions) -> Vector:
        """Numbers of what has an end in the stage, whether elsewhere too or not, [L, B]."""
        fresh: Vector = self.met[:, above] - self.met[:, below, None]
        return fresh + self.between(below, above)[0]


def _add(total: Vector, flags: Flags, numbers: Vector) -> None:
    """Add Σ over tensors of flags times numbers: [T, D] and [T, U] to [U, D]."""
    # Row by row: a product of matrices would make floats of all flags first.
    for row, of_row in zip(flags, numbers.tolist(), strict=True):
        for sums, number in zip(total, of_row, strict=True):
            if number:
                sums += number * row


def _merged(
    inside: Containment, tensors: Iterable[Counted], result: int
) -> dict[tuple[tuple[int, ...], bool], Vector]:
    """Numbers by the groups that a tensor has ends in, and whether the result is another."""
    group_of = {layer: g for g, mask in enumerate(inside.groups) for layer in members(mask)}
    merged: dict[tuple[tuple[int, ...], bool], Vector] = {}
    for ends, lower, upper in tensors:
        numbers = np.array([*lower, *upper], dtype=np.float64)
        groups = tuple(sorted({group_of[layer] for layer in members(ends & (result - 1))}))
        key = (groups, bool(ends & result))
        merged[key] = merged[key] + numbers if key in merged else numbers
    return merged
