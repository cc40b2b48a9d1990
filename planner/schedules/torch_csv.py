"""A schedule as torch.distributed.pipelining has it in CSV: a row for each rank, a cell for each
operation, such as ``1F0``: stage, kind, micro-batch.

Kinds are F, B (whole backwards), I and W (the parts of split ones, for the inputs and for the
weights). It is one mini-batch: all stages flush behind it and then update, which has no cell.
torch 2.13 reads it by ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from ...profiles.errors import OrderError, ScheduleError
from ..systems.operations import BACKWARD, FORWARD, UPDATE, WEIGHT, Op, Schedule
from ..systems.orders import Order, OrderLine, OrderWord, order_of

WHOLE, OF_INPUT = "B", "I"
"""Kinds of a backward there: one that is whole, and the first part of a split one."""

_CELL = re.compile(r"(\d{1,9})([A-Z_]+?)(\d{0,9})")

_SHOWN = 40
"""So many characters of what is no operation are in messages."""
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
_SUMS = "REDUCE_GRAD"


def csv_text(schedule: Schedule) -> str:
    """The schedule of one mini-batch as CSV. Raises ScheduleError where it is of more."""
    split = any(op.kind == WEIGHT for ops in schedule for op in ops)
    rows = []
    for ops in schedule.on_devices():
        cells = []
        for stage, op in ops:
            if op.kind == UPDATE:
                continue
            if op.mini_batch or op.micro_batch is None:
                raise ScheduleError(
                    "torch's CSV has the operations of one mini-batch, micro-batch by micro-batch"
                )
            kind = op.kind
            if kind == BACKWARD:
                kind = OF_INPUT if split else WHOLE
            cells.append(f"{stage}{kind}{op.micro_batch}")
        rows.append(",".join(cells))
    return "".join(f"{row}\n" for row in rows)


def parse_csv(text: str, where: str) -> Order:
    """An order from torch's CSV, the reverse of `csv_text`; bubbles are empty cells.

    Where some backwards are split and others whole, as in torch's DualPipeV, a whole one is both
    parts at once; and what torch overlaps, as ``(0F4;3B1)OVERLAP_F_B``, is one after the other.
    Summing gradients over data-parallel replicas (``0REDUCE_GRAD``) is left out: here it is the
    update's.

    Raises OrderError naming line and cell, as `parse_order`.
    """
    rows = [
        (number, [cell for each in row for cell in _cells(each)])
        for number, row in enumerate(csv.reader(text.splitlines()), 1)
    ]
    split = any(re.fullmatch(r"\d+[IW]\d+", cell) for _, row in rows for cell in row)

    def spelt(stage: int, op: Op) -> str:
        kind = OF_INPUT if split and op.kind == BACKWARD else op.kind
        return f"{stage}{kind}{'' if op.micro_batch is None else op.micro_batch}"

    lines = []
    for number, row in rows:
        words = tuple(
            word
            for cell in row
            if not cell.endswith(_SUMS)
            for word in _words(cell, f"{where}: line {number}", split=split)
        )
        if words:
            lines.append(OrderLine(number, words))
    return order_of(lines, where, spelt)


def _cells(cell: str) -> Iterator[str]:
    cell = cell.strip()
    together = _TOGETHER.fullmatch(cell)
    for each in together.group(1).split(";") if together else [cell]:
        if each.strip():
            yield each.strip()


def _words(cell: str, where: str, *, split: bool) -> Iterator[OrderWord]:
    match = _CELL.fullmatch(cell)
    kinds = {
        FORWARD: [FORWARD],
        WHOLE: [BACKWARD, WEIGHT] if split else [BACKWARD],
        OF_INPUT: [BACKWARD],
        WEIGHT: [WEIGHT],
    }
    if match is None or (match.group(2) in kinds and not match.group(3)):
        shown = cell if len(cell) <= _SHOWN else f"{cell[:_SHOWN]}…"
        raise OrderError(f"{where}: {shown!r} is no operation; torch's are as 1F0, 1B0, 1I0 or 1W0")
    stage, kind, micro_batch = match.groups()
    if kind not in kinds:
        raise OrderError(
            f"{where}: {cell} isn't computing; give the compute-only CSV, without what is sent, "
            "received and sharded"
        )
    for each in kinds[kind]:
        yield OrderWord(cell, int(stage), Op(each, 0, int(micro_batch)))
