"""Downsets of the layer graph: the places where a pipeline may be cut.

A downset holds, with a layer, everything that layer needs. Layers that must share a stage, and
what lies on a cycle once they are joined, are in a downset together or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from ..problem import Deadline, StageProblem, Vector, closures, members

Words = NDArray[np.uint64]
Positions = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Lattice:
    """Places to cut: downsets by ascending size, the first empty, the last full.

    Attributes:
        words: membership, packed, [D, W] for n layers with W = ⌈n / 64⌉: layer j is bit j % 64
            of word j // 64.
        layers: n.
        complete: all downsets of the problem are there, so that no cut is left out.
    """

    words: Words
    layers: int
    complete: bool

    @property
    def size(self) -> int:
        """D."""
        return len(self.words)

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """The downsets as bit masks."""
        width = 8 * self.words.shape[1]
        raw = self.words.astype("<u8").tobytes()
        return tuple(
            int.from_bytes(raw[at : at + width], "little") for at in range(0, len(raw), width)
        )

    def column(self, layer: int) -> NDArray[np.bool_]:
        """Which downsets hold a layer, [D]."""
        word, bit = divmod(layer, 64)
        holds: NDArray[np.bool_] = (self.words[:, word] >> np.uint64(bit) & np.uint64(1)) > 0
        return holds


def find_downsets(problem: StageProblem, limit: int, deadline: Deadline = None) -> Lattice | None:
    """All downsets; None where there are more than `limit`, or time runs out.

    With the groups of layers in topological order, a downset of the first i + 1 groups is one
    of the first i, or one of those that hold what group i needs, with it. So each is met once.

    Args:
        problem: its `needs` and `together` count.
        limit: of D.
    """
    groups = joined(problem)
    width = _width(problem)
    found = np.zeros((width, 64), dtype=np.uint64)
    sizes = np.zeros(64, dtype=np.intp)
    count = 1
    for group in groups:
        if deadline is not None and monotonic() > deadline:
            return None
        needs = 0
        for layer in members(group):
            needs |= problem.needs[layer]
        old = _holding(found[:, :count], needs & ~group)
        total = count + len(old)
        if total > limit:
            return None
        while total > found.shape[1]:
            found = np.concatenate([found, np.zeros_like(found)], axis=1)
            sizes = np.concatenate([sizes, np.zeros_like(sizes)])
        found[:, count:total] = found[:, old] | packed(group, width)[:, None]
        sizes[count:total] = sizes[old] + group.bit_count()
        count = total
    # The last key counts most: by size, then by mask.
    order = np.lexsort((*found[:, :count], sizes[:count]))
    return Lattice(np.ascontiguousarray(found[:, order].T), problem.layers, complete=True)


def lattice_of(problem: StageProblem, masks: Iterable[int], *, complete: bool = False) -> Lattice:
    """Just these downsets, and the empty and the full one.

    Args:
        problem: whose downsets they are.
        masks: bit masks, in any order, each a downset that respects `together`.
        complete: whether they are all there are.
    """
    chosen = sorted({0, problem.full, *masks}, key=lambda mask: (mask.bit_count(), mask))
    width = _width(problem)
    raw = b"".join(mask.to_bytes(8 * width, "little") for mask in chosen)
    words = np.frombuffer(raw, dtype="<u8").astype(np.uint64).reshape(len(chosen), width)
    return Lattice(words, problem.layers, complete)


def joined(problem: StageProblem) -> list[int]:
    """The finest groups of layers that no downset takes apart, as bit masks, in topological order:
    those that need the fewest layers first.
    """
    if not problem.together:
        return [1 << layer for layer in range(problem.layers)]
    groups: dict[int, int] = {}
    for layer, closure in enumerate(closures(problem.needs, problem.together)):
        groups[closure] = groups.get(closure, 0) | 1 << layer
    found = sorted((c.bit_count() - g.bit_count(), g & -g, g) for c, g in groups.items())
    return [group for _, _, group in found]


def packed(mask: int, width: int) -> Words:
    """A bit mask as `width` words, [W]."""
    return np.frombuffer(mask.to_bytes(8 * width, "little"), dtype="<u8").astype(np.uint64)


def _width(problem: StageProblem) -> int:
    return max(-(-problem.layers // 64), 1)


def _holding(words: Words, needs: int) -> Positions:
    """Positions of the downsets, [W, D], that hold all layers of `needs`."""
    holds: NDArray[np.bool_] | None = None
    for row, wanted in zip(words, packed(needs, len(words)), strict=True):
        if wanted:
            holds_row = row & wanted == wanted
            holds = holds_row if holds is None else holds & holds_row
    return np.arange(words.shape[1]) if holds is None else np.flatnonzero(holds)


# Which downsets hold which: a test on one or a few words, however many layers there are ---------

Flags = NDArray[np.bool_]

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

    def with_one_more(self) -> Positions | None:
        """Positions of the downsets that have one group more, of each chain, [C, D]; −1 where
        there is none. None where numbers for them are too large."""
        # Digits leave room for one that no downset has.
        digits = [int(row.max()) + 2 for row in self.heights]
        if math.prod(digits) >= 2**63:
            return None
        steps = np.cumprod([1, *digits[:-1]], dtype=np.int64)
        numbers = steps[: len(digits)] @ self.heights
        order = numbers.argsort()
        wanted = numbers + steps[: len(digits), None]
        at = np.minimum(np.searchsorted(numbers[order], wanted), len(order) - 1)
        return np.where(numbers[order[at]] == wanted, order[at], -1)

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
            so_far = np.maximum.accumulate(values[chain[start:]], dtype=np.float64)
            so_far = np.concatenate([[0.0], so_far])
            np.maximum(largest, so_far[heights[above] - start], out=largest)
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
