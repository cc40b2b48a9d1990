"""What a device with several stages holds at once, whatever its operations take.

Index letters: N micro-batches; S stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...costs.stage_costs import RECEIVES_AHEAD
from ...schedules.interleaved import rows_of
from ...schedules.schedules import has_row
from ...systems.operations import BACKWARD, BACKWARDS, FORWARD, FORWARDS, Row, Rows
from ...systems.variants import Variant


class AtOnce(NamedTuple):
    """A moment of a device.

    Attributes:
        kept: per stage, micro-batches in flight there, [S]; 0 for stages on other devices.
        gradients: per stage, whether there are any of its parameters, [S].
        works, turns: per stage, whether it runs an operation, and whether that is a backward, [S].
    """

    kept: tuple[int, ...]
    gradients: tuple[int, ...]
    works: tuple[int, ...]
    turns: tuple[int, ...]

    def messages(self, devices: Sequence[int], d: int) -> tuple[list[int], list[int]]:
        """Of the messages from each stage to the next one, and of those back, how many a device
        holds at the least (`costs.memory.boundary_buffers`), [S] each.

        Args:
            devices: of all stages.
            d: its own.
        """
        there, back = [0] * len(devices), [0] * len(devices)
        if not any(self.works):
            return there, back
        for s, (source, target) in enumerate(pairwise(devices)):
            if source == d != target:
                back[s] = RECEIVES_AHEAD[BACKWARD] + self.turns[s]
            elif target == d != source:
                there[s] = RECEIVES_AHEAD[FORWARD]
                # One may still be waiting for its sending while the next is made.
                back[s] = 1 + self.turns[s + 1]
        return there, back


def nothing(stages: int) -> AtOnce:
    """That of a device that holds nothing but what is always there."""
    return AtOnce(*[(0,) * stages] * 4)


def moments(
    variant: Variant,
    micro_batches: int,
    devices: tuple[int, ...],
    d: int,
    *,
    keeps: bool,
    linked: bool,
) -> list[AtOnce]:
    """The fullest moments of a device: none has at most as much of everything as another one.

    Args:
        devices: of all stages.
        d: its own.
        keeps: activations aren't computed again.
        linked: every stage waits for the one behind it. Where it doesn't, it may be done before
            that begins.
    """
    if has_row(variant):
        row = next(row for row in order_of(devices, micro_batches) if devices[row[1][0]] == d)
        return _in_sequence(row, len(devices), keeps=keeps)
    if not linked:
        return [nothing(len(devices))]
    # At the first backward of its last stage all others keep as many micro-batches.
    mine = [s for s, other in enumerate(devices) if other == d]
    all_n = variant.forwards_first or variant.backward_unit == "mini"
    kept = tuple(keeps * (micro_batches if all_n else 1) * (other == d) for other in devices)
    turns = tuple(int(s == mine[-1]) for s in range(len(devices)))
    gradients = (0,) * len(devices) if variant.split_backward else turns
    return [AtOnce(kept, gradients, turns, turns)]


def order_of(devices: tuple[int, ...], micro_batches: int) -> Rows:
    """Each device's operations where no times decide, of the one with the first stage on."""
    mine = [[s for s, other in enumerate(devices) if other == d] for d in dict.fromkeys(devices)]
    return rows_of([*map(tuple, mine)], micro_batches)


def _in_sequence(row: Row, stages: int, *, keeps: bool) -> list[AtOnce]:
    """Those of a device's operations in a given sequence: kinds and stages of a mini-batch."""
    none = (0,) * stages
    kept, summed, found = [*none], [*none], dict[AtOnce, None]()
    for kind, s in zip(*row, strict=True):
        kept[s] += keeps * (kind == FORWARDS)
        summed[s] |= kind == BACKWARDS
        works = tuple(int(s == other) for other in range(stages))
        turns = works if kind == BACKWARDS else none
        found[AtOnce(tuple(kept), tuple(summed), works, turns)] = None
        kept[s] -= keeps * (kind == BACKWARDS)
    every = np.array([np.concatenate(moment) for moment in found])
    fullest = (every[:, None] <= every).all(axis=2).sum(axis=1) == 1
    return [moment for moment, full in zip(found, fullest, strict=True) if full]
