"""The interleaved 1F1B schedule: several stages on each device, dealt in a loop (2104.04473).

Micro-batches go through a device in groups of D: a group forward through its first stage, then
through its next one, and so on; the backwards likewise, the last stage first. Before its first
backward device d runs 2·(D − d − 1) + (v − 1)·D forwards, then one forward and one backward in
turn.
Where micro-batches don't divide into groups of D, the last group is smaller (our reading: the
paper's are a multiple of D). With some numbers of them operations then wait for each other
(`check.deadlocks`): 8 on six devices.

Index letters: D devices; v stages on each; d device; N micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..systems.operations import BACKWARDS, FORWARDS, Row, Rows, row_of


def rows_of(devices: Sequence[tuple[int, ...]], micro_batches: int) -> Rows:
    """Of devices that have these stages each."""
    n, found = micro_batches, list[Row]()
    for d, stages in enumerate(devices):
        forwards = list(_in_groups(stages, n, len(devices)))
        backwards = list(_in_groups(stages[::-1], n, len(devices)))
        ahead = 2 * (len(devices) - d - 1) + (len(stages) - 1) * len(devices)
        if len(stages) == 1:
            # One stage for each device: plain 1F1B.
            ahead = len(devices) - d - 1
        ahead = min(ahead, len(forwards))
        row = [(FORWARDS, s) for s in forwards[:ahead]]
        for position, s in enumerate(backwards):
            if ahead + position < len(forwards):
                row.append((FORWARDS, forwards[ahead + position]))
            row.append((BACKWARDS, s))
        found.append(row_of(row))
    return tuple(found)


def _in_groups(stages: tuple[int, ...], micro_batches: int, size: int) -> Iterator[int]:
    """The stage of each forward, or backward, of a device."""
    for first in range(0, micro_batches, size):
        for s in stages:
            for _ in range(first, min(first + size, micro_batches)):
                yield s
