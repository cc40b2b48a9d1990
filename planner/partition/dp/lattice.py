"""Downsets of the layer graph: the places where a pipeline may be cut.

A downset holds, with a layer, everything that layer needs. Layers that must share a stage, and
what lies on a cycle once they are joined, are in a downset together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from ..problem import StageProblem
from ..stage_load import members

Words = NDArray[np.uint64]
Positions = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Lattice:
    """Places to cut: downsets by rising size, the first empty, the last full.

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


def find_downsets(
    problem: StageProblem, limit: int, deadline: float | None = None
) -> Lattice | None:
    """All downsets; None where there are more than `limit`, or time runs out.

    With the groups of layers in topological order, a downset of the first i + 1 groups is one
    of the first i, or one of those that hold what group i needs, with it. So each is met once.

    Args:
        problem: its `needs` and `together` count.
        limit: of D.
        deadline: on the clock of `time.monotonic`.
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
    """The finest groups of layers that no downset takes apart, as bit masks, in topological order.

    `together` joins layers, and joins all that lies on a cycle between groups already joined.
    """
    if not problem.together:
        return [1 << layer for layer in range(problem.layers)]
    group_of = {layer: 1 << layer for layer in range(problem.layers)}
    for together in problem.together:
        _join(group_of, together)
    while True:
        above = _needed(problem, group_of)
        cyclic = [group for group in above if above[group] & group]
        if not cyclic:
            return sorted(above, key=lambda group: (above[group].bit_count(), group & -group))
        for group in cyclic:
            for other in cyclic:
                if above[group] & other and above[other] & group:
                    _join(group_of, group | other)


def _join(group_of: dict[int, int], mask: int) -> None:
    for layer in list(members(mask)):
        mask |= group_of[layer]
    for layer in members(mask):
        group_of[layer] = mask


def _needed(problem: StageProblem, group_of: dict[int, int]) -> dict[int, int]:
    """Per group, all layers of groups it needs, however far away; itself only on a cycle."""
    needed = dict.fromkeys(group_of.values(), 0)
    changed = True
    while changed:
        changed = False
        for layer, group in group_of.items():
            more = needed[group]
            for other in members(problem.needs[layer] & ~group):
                more |= group_of[other] | needed[group_of[other]]
            changed = changed or more != needed[group]
            needed[group] = more
    return needed


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
