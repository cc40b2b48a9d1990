"""Operations of a stage, and their text form.

Index letters: s stage, b mini-batch, i micro-batch.

    1F0.2   stage 1, forward of mini-batch 0's micro-batch 2
    1B0.2   its backward, in systems whose backward takes one micro-batch
    1B0     backward of the whole mini-batch 0
    1W0.2   gradients of the weights for micro-batch 2, in systems that split the backward:
            1B0.2 is then the gradients of what the stage received, alone
    1U0     optimizer step after mini-batch 0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ...profiles.errors import ScheduleError

FORWARD, BACKWARD, WEIGHT, UPDATE = "F", "B", "W", "U"

_TEXT = re.compile(r"(\d+)([FBWU])(\d+)(?:\.(\d+))?")


class Op(NamedTuple):
    """One operation of a stage."""

    kind: str
    mini_batch: int
    micro_batch: int | None = None


Schedule = tuple[tuple[Op, ...], ...]
"""For each stage, the operations it executes, first to last."""


def op_text(stage: int, op: Op) -> str:
    """``1F0.2``."""
    micro = "" if op.micro_batch is None else f".{op.micro_batch}"
    return f"{stage}{op.kind}{op.mini_batch}{micro}"


def parse_op(text: str) -> tuple[int, Op]:
    """The reverse of `op_text`. Raises ScheduleError."""
    match = _TEXT.fullmatch(text)
    if not match:
        raise ScheduleError(f"{text!r} is no operation; write it like 1F0.2, 1B0 or 1U0")
    stage, kind, mini, micro = match.groups()
    return int(stage), Op(kind, int(mini), None if micro is None else int(micro))


def schedule_text(schedule: Sequence[Iterable[Op]]) -> str:
    """A schedule as text, a line for each stage."""
    return "\n".join(
        " ".join(op_text(stage, op) for op in ops) for stage, ops in enumerate(schedule)
    )


def parse_schedule(text: str) -> Schedule:
    """The reverse of `schedule_text`. Raises ScheduleError."""
    stages = []
    for s, line in enumerate(text.splitlines()):
        ops = []
        for word in line.split():
            stage, op = parse_op(word)
            if stage != s:
                raise ScheduleError(f"{word!r} stands in the line of stage {s}")
            ops.append(op)
        stages.append(tuple(ops))
    return tuple(stages)


# Schedules in short: a byte for each of a stage's operations, which says its kind ----------------
# In every schedule that a rule makes, a stage runs its forwards in the sequence of their micro-
# batches, its backwards and their weight parts likewise, and its updates in that of their mini-
# batches: kinds alone say all.

FORWARDS, BACKWARDS, UPDATES, WEIGHTS = 0, 1, 2, 3

F, B, U, W = (bytes([kind]) for kind in (FORWARDS, BACKWARDS, UPDATES, WEIGHTS))


def numbered(
    kinds: Iterable[int],
    micro_batches: int,
    *,
    micro: bool,
    mini_batches: int | None = None,
    update_every: int = 1,
) -> tuple[Op, ...]:
    """The operations.

    Args:
        micro: each backward takes a micro-batch.
        mini_batches: forwards of further ones are left out.
        update_every: only each so many-th update stands, and that of the last mini-batch.
    """
    n = micro_batches
    forwards = backwards = updates = weights = 0
    ops = []
    for kind in kinds:
        if kind == FORWARDS:
            if mini_batches is None or forwards < mini_batches * n:
                ops.append(Op(FORWARD, forwards // n, forwards % n))
            forwards += 1
        elif kind == UPDATES:
            if not (updates + 1) % update_every or updates + 1 == mini_batches:
                ops.append(Op(UPDATE, updates))
            updates += 1
        elif kind == WEIGHTS:
            ops.append(Op(WEIGHT, weights // n, weights % n))
            weights += 1
        else:
            b, i = divmod(backwards, n) if micro else (backwards, None)
            ops.append(Op(BACKWARD, b, i))
            backwards += 1
    return tuple(ops)


def in_rows(kinds: bytes, micro_batches: int, *, micro: bool) -> Iterator[tuple[Op, int]]:
    """The operations, with forwards of a mini-batch in a row as one, and how many they are.

    A mini-batch's last forward stands for itself.
    """
    n = micro_batches
    forwards = backwards = updates = weights = position = 0
    others = (B, W) if W in kinds else (B,)
    while position < len(kinds):
        kind = kinds[position]
        if kind == FORWARDS:
            ends = [end for end in (kinds.find(o, position) for o in others) if end >= 0]
            row = min(ends, default=len(kinds)) - position
            b, i = divmod(forwards, n)
            row = min(row, max(n - 1 - i, 1))
            yield Op(FORWARD, b, i), row
            forwards += row
            position += row
            continue
        position += 1
        if kind == UPDATES:
            yield Op(UPDATE, updates), 1
            updates += 1
        elif kind == WEIGHTS:
            yield Op(WEIGHT, weights // n, weights % n), 1
            weights += 1
        else:
            b, at = divmod(backwards, n) if micro else (backwards, None)
            yield Op(BACKWARD, b, at), 1
            backwards += 1
