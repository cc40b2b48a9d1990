"""Which downsets hold which: a test on one or a few words, however many layers there are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..problem import Vector
from .lattice import Lattice

Flags = NDArray[np.bool_]
Words = NDArray[np.uint64]

WORD_BITS = 64


class Containment:
    """Layers in chains; a downset is known by how many layers of each chain it has.

    Layers that all downsets have together or not at all make one group. A chain is a row of
    groups, each in a downset only with the one before it. One downset holds another when it has
    as much or more of every chain. The counts stand side by side in words, with a guard bit
    above each: subtracting the smaller set's counts clears a guard where they are more.

    Attributes:
        groups: per group, a bit mask of layers.
        member: bool, [G, D].
        chains: positions of groups, along each chain.
        heights: groups of each chain in each downset, [C, D].
        guards: [V] for V words.
        counts: [V, D].
    """

    def __init__(self, lattice: Lattice) -> None:
        groups: dict[bytes, int] = {}
        columns: dict[bytes, Flags] = {}
        for layer in range(lattice.layers):
            column = lattice.column(layer)
            key = np.packbits(column).tobytes()
            groups[key] = groups.get(key, 0) | 1 << layer
            columns[key] = column
        self.groups = list(groups.values())
        self.member: Flags = np.array(list(columns.values())).reshape(len(groups), lattice.size)
        self.chains = _chains(self.member, [int.from_bytes(key, "big") for key in groups])
        self.heights = np.array([self.member[chain].sum(axis=0) for chain in self.chains])
        self.heights = self.heights.reshape(len(self.chains), lattice.size)
        self.guards, self.counts = _packed(self.heights)

    def holding(self, below: int, guarded: Words) -> Flags:
        """Which of some downsets hold the downset at position `below`.

        Args:
            guarded: their counts with the guards set, [V, B].
        """
        held: Flags | None = None
        for row, guard, count in zip(guarded, self.guards, self.counts[:, below], strict=True):
            left = row - count
            left &= guard
            mine: Flags = left == guard
            held = mine if held is None else held & mine
        return np.ones(guarded.shape[1], dtype=np.bool_) if held is None else held

    def sums(self, values: Vector) -> Vector:
        """Sums of values over each downset's groups, [G] to [D]."""
        total = np.zeros(self.heights.shape[1])
        for chain, heights in zip(self.chains, self.heights, strict=True):
            total += np.concatenate([[0.0], np.cumsum(values[chain])])[heights]
        return total

    def largest(self, values: Vector, below: int, above: NDArray[np.intp]) -> Vector:
        """The largest value of a group in `above` but not in `below`; values at least 0, [B].

        Args:
            values: per group, [G].
            below: position of a downset.
            above: positions of downsets that hold it.
        """
        largest = np.zeros(len(above))
        for chain, heights in zip(self.chains, self.heights, strict=True):
            start = int(heights[below])
            rising = np.maximum.accumulate(values[chain[start:]], dtype=np.float64)
            rising = np.concatenate([[0.0], rising])
            np.maximum(largest, rising[heights[above] - start], out=largest)
        return largest


def _chains(member: Flags, columns: list[int]) -> list[list[int]]:
    """Groups in few chains: each goes on top of the chain whose top is closest below it."""
    counts = member.sum(axis=1)
    chains: list[list[int]] = []
    for group in np.argsort(-counts, kind="stable").tolist():
        fitting = [c for c in chains if not columns[group] & ~columns[c[-1]]]
        if fitting:
            min(fitting, key=lambda c: counts[c[-1]]).append(group)
        else:
            chains.append([group])
    return chains


def _packed(heights: NDArray[np.intp]) -> tuple[Words, Words]:
    """Guards, [V], and counts, [V, D]."""
    fields: list[list[tuple[int, int]]] = []
    used = WORD_BITS
    for c, row in enumerate(heights):
        bits = int(row.max()).bit_length() + 1
        if used + bits > WORD_BITS:
            fields.append([])
            used = 0
        fields[-1].append((c, used))
        used += bits
    counts = np.zeros((len(fields), heights.shape[1]), dtype=np.uint64)
    guards = np.zeros(len(fields), dtype=np.uint64)
    for word, inside in enumerate(fields):
        for c, shift in inside:
            bits = int(heights[c].max()).bit_length()
            counts[word] |= heights[c].astype(np.uint64) << np.uint64(shift)
            guards[word] |= np.uint64(1 << (shift + bits))
    return guards, counts
