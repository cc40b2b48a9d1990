"""A schedule as torch.distributed.pipelining has it in CSV: a row for each rank, a cell for each
operation, such as ``1F0``: stage, kind, micro-batch.

Kinds are F, B (whole backwards), I and W (the parts of split ones, for the inputs and for the
weights). It is one mini-batch: all stages flush behind it and then update, which has no cell.
torch 2.13 reads it by ``_PipelineScheduleRuntime._load_csv(file, format="compute_only")``.
"""

from __future__ import annotations

from ...profiles.errors import ScheduleError
from ..systems.operations import BACKWARD, UPDATE, WEIGHT, Schedule

WHOLE, OF_INPUT = "B", "I"
"""Kinds of a backward there: one that is whole, and the first part of a split one."""


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
