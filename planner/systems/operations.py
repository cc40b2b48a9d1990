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
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...profiles.errors import OrderError

FORWARD, BACKWARD, WEIGHT, UPDATE = "F", "B", "W", "U"

_TEXT = re.compile(r"(\d+)([FBWU])(\d+)(?:\.(\d+))?")


class Op(NamedTuple):
    """One operation of a stage."""

    kind: str
    mini_batch: int
    micro_batch: int | None = None


Order = tuple[tuple[Op, ...], ...]
"""For each stage, the operations it executes, first to last."""


def op_text(stage: int, op: Op) -> str:
    """``1F0.2``."""
    micro = "" if op.micro_batch is None else f".{op.micro_batch}"
    return f"{stage}{op.kind}{op.mini_batch}{micro}"


def parse_op(text: str) -> tuple[int, Op]:
    """The reverse of `op_text`. Raises OrderError."""
    match = _TEXT.fullmatch(text)
    if not match:
        raise OrderError(f"{text!r} is no operation; write it like 1F0.2, 1B0 or 1U0")
    stage, kind, mini, micro = match.groups()
    return int(stage), Op(kind, int(mini), None if micro is None else int(micro))


def order_text(order: Sequence[Iterable[Op]]) -> str:
    """An order as text, a line for each stage."""
    return "\n".join(" ".join(op_text(stage, op) for op in ops) for stage, ops in enumerate(order))


def parse_order(text: str) -> Order:
    """The reverse of `order_text`. Raises OrderError."""
    stages = []
    for s, line in enumerate(text.splitlines()):
        ops = []
        for word in line.split():
            stage, op = parse_op(word)
            if stage != s:
                raise OrderError(f"{word!r} stands in the line of stage {s}")
            ops.append(op)
        stages.append(tuple(ops))
    return tuple(stages)
