"""Operations of a stage, and their text form.

Index letters: s stage, b mini-batch, i micro-batch.

    1F0.2   stage 1, forward of mini-batch 0's micro-batch 2
    1B0.2   its backward, in systems whose backward takes one micro-batch
    1B0     backward of the whole mini-batch 0
    1W0.2   gradients of the weights for micro-batch 2, in systems that split the backward:
            1B0.2 is then the gradients of what the stage received, alone
    1U0     optimizer step after mini-batch 0

A device's operations are those of all its stages: `0F0.0 3F0.0 3B0 3U0 0B0 0U0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from ...profiles.errors import ScheduleError

FORWARD, BACKWARD, WEIGHT, UPDATE = "F", "B", "W", "U"

_TEXT = re.compile(r"(\d+)([FBWU])(\d+)(?:\.(\d+))?")


class Op(NamedTuple):
    """One operation of a stage."""

    kind: str
    mini_batch: int
    micro_batch: int | None = None


@dataclass(frozen=True)
class Schedule:
    """What a pipeline executes. As a sequence, it is that of its stages' operations.

    Attributes:
        stages: for each stage, the operations it executes, first to last.
        turns: where devices have several stages: for each device, the stage of each of its
            operations, first to last. Empty: every stage has a device of its own.
    """

    stages: tuple[tuple[Op, ...], ...]
    turns: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.stages)

    def __getitem__(self, stage: int) -> tuple[Op, ...]:
        return self.stages[stage]

    def __iter__(self) -> Iterator[tuple[Op, ...]]:
        return iter(self.stages)

    def on_devices(self) -> tuple[tuple[tuple[int, Op], ...], ...]:
        """For each device, (stage, operation), first to last."""
        if not self.turns:
            return tuple(tuple((s, op) for op in ops) for s, ops in enumerate(self.stages))
        found = []
        for turns in self.turns:
            upcoming = {s: iter(self.stages[s]) for s in turns}
            found.append(tuple((s, next(upcoming[s])) for s in turns))
        return tuple(found)


def op_text(stage: int, op: Op, first: int = 0) -> str:
    """``1F0.2``. `first`: number of the mini-batch that the operation counts from."""
    micro = "" if op.micro_batch is None else f".{op.micro_batch}"
    return f"{stage}{op.kind}{first + op.mini_batch}{micro}"


def parse_op(text: str) -> tuple[int, Op]:
    """The reverse of `op_text`. Raises ScheduleError."""
    match = _TEXT.fullmatch(text)
    if not match:
        raise ScheduleError(f"{text!r} is no operation; write it like 1F0.2, 1B0 or 1U0")
    stage, kind, mini, micro = match.groups()
    return int(stage), Op(kind, int(mini), None if micro is None else int(micro))


# Schedules in short: a byte for each of a stage's operations, which says its kind ----------------
# In every schedule that a rule makes, a stage runs its forwards in the sequence of their micro-
# batches, its backwards and their weight parts likewise, and its updates in that of their mini-
# batches: kinds alone say all.

FORWARDS, BACKWARDS, UPDATES, WEIGHTS = 0, 1, 2, 3

F, B, U, W = (bytes([kind]) for kind in (FORWARDS, BACKWARDS, UPDATES, WEIGHTS))

LETTERS = (FORWARD, BACKWARD, UPDATE, WEIGHT)
KINDS = {letter: kind for kind, letter in enumerate(LETTERS)}

Row = tuple[bytes, tuple[int, ...]]
"""Kinds of a device's operations, and the stage of each."""

Rows = tuple[Row, ...]
"""Per device. Of a mini-batch updates are left out."""


def row_of(steps: Iterable[tuple[int, int]]) -> Row:
    """The row of these kinds and stages."""
    both = list(steps)
    return bytes(kind for kind, _ in both), tuple(s for _, s in both)


class Pattern(NamedTuple):
    """A device's operations in a schedule that repeats.

    Attributes:
        blocks: those up to its first update (of all its stages), to the second one, and so on.
        cycle: of the last blocks, how many repeat.
    """

    blocks: Rows
    cycle: int = 1

    def block(self, updates: int) -> Row:
        """What comes behind so many updates, up to the next."""
        first = len(self.blocks) - self.cycle
        return self.blocks[min(updates, first + (updates - first) % self.cycle)]

    def kinds(self, updates: int) -> bytes:
        """Up to so many updates, in a run without an end."""
        return b"".join(self.block(b)[0] for b in range(updates))

    def turns(self, updates: int) -> tuple[int, ...]:
        """The stages of these."""
        return tuple(chain.from_iterable(self.block(b)[1] for b in range(updates)))


def numbered(
    kinds: Iterable[int], micro_batches: int, *, micro: bool, update_every: int = 1
) -> tuple[Op, ...]:
    """The operations.

    Args:
        micro: each backward takes a micro-batch.
        update_every: only each so many-th update stands.
    """
    every = _each(kinds, micro_batches, micro, update_every)
    return tuple(op for op in every if op is not None)


def numbered_schedule(
    kinds: Sequence[Iterable[int]],
    turns: Sequence[Iterable[int]],
    micro_batches: int,
    *,
    micro: bool,
    mini_batches: int | None = None,
    update_every: int = 1,
    reverse: bool = False,
) -> Schedule:
    """The schedule of all stages.

    Args:
        kinds: per stage.
        turns: as of `Schedule`, of all `kinds`.
        micro, update_every: as of `numbered`.
        mini_batches: operations of further ones are left out, but not the last one's update.
        reverse: backwards take a mini-batch's micro-batches from the last to the first.
    """
    stages = [_each(k, micro_batches, micro, update_every, mini_batches, reverse) for k in kinds]
    standing = []
    for mine in turns:
        upcoming = {s: iter(stages[s]) for s in mine}
        standing.append(tuple(s for s in mine if next(upcoming[s]) is not None))
    found = (tuple(op for op in ops if op is not None) for ops in stages)
    return Schedule(tuple(found), tuple(standing))


def _each(
    kinds: Iterable[int],
    micro_batches: int,
    micro: bool,
    update_every: int,
    mini_batches: int | None = None,
    reverse: bool = False,
) -> list[Op | None]:
    """The operation of each kind; None where it is left out."""
    each, named = _units(micro_batches, micro=micro)
    counts = [0, 0, 0, 0]
    found: list[Op | None] = []
    for kind in kinds:
        b, i = divmod(counts[kind], each[kind])
        counts[kind] += 1
        if reverse and kind in (BACKWARDS, WEIGHTS):
            i = each[kind] - 1 - i
        there = mini_batches is None or b < mini_batches
        if kind == UPDATES:
            there &= not counts[kind] % update_every or counts[kind] == mini_batches
        found.append(Op(LETTERS[kind], b, i if named[kind] else None) if there else None)
    return found


def _units(micro_batches: int, *, micro: bool) -> tuple[Sequence[int], Sequence[bool]]:
    """Per kind, operations of a mini-batch, and whether they name their micro-batch."""
    n = micro_batches
    return (n, n if micro else 1, 1, n), (True, micro, False, True)


def in_rows(kinds: bytes, micro_batches: int, *, micro: bool) -> Iterator[tuple[Op, int]]:
    """The operations, with forwards of a mini-batch in a row as one, and how many they are.

    A mini-batch's last forward stands for itself.
    """
    each, named = _units(micro_batches, micro=micro)
    counts, position = [0, 0, 0, 0], 0
    # In an order that a user gives, an update may stand between forwards.
    others = [kind for kind in (B, U, W) if kind in kinds]
    while position < len(kinds):
        kind, row = kinds[position], 1
        b, i = divmod(counts[kind], each[kind])
        if kind == FORWARDS:
            ends = [end for end in (kinds.find(o, position) for o in others) if end >= 0]
            row = min(ends, default=len(kinds)) - position
            row = min(row, max(micro_batches - 1 - i, 1))
        yield Op(LETTERS[kind], b, i if named[kind] else None), row
        counts[kind] += row
        position += row
