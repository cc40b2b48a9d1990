"""The rules that every schedule obeys; what passes here can't deadlock the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ...profiles.errors import ScheduleError
from ..simulator.executor import execute
from ..simulator.pipeline import Pipeline, in_a_row
from ..systems.operations import BACKWARD, FORWARD, UPDATE, WEIGHT, Op, Schedule, op_text
from ..systems.variants import Variant
from .schedules import make_schedule


def check_schedule(pipeline: Pipeline, schedule: Schedule, mini_batches: int) -> None:
    """Check a schedule for `mini_batches` mini-batches.

    Raises:
        ScheduleError: a stage runs some operation twice or not at all, a backward before its
            forward, a weight part or an update before its backward, more mini-batches in flight
            than its limit; two stages exchange messages in different sequences; or a deadlock.
    """
    if len(schedule) != pipeline.stages:
        raise ScheduleError(f"the order has {len(schedule)} stages, the pipeline {pipeline.stages}")
    for s, ops in enumerate(schedule):
        _check_stage(pipeline, s, ops, mini_batches)
    found = [tuple(sorted(set(turns))) for turns in schedule.turns]
    if found != [*(pipeline.stages_of if pipeline.placement else ())]:
        raise ScheduleError("the order's devices run other stages than the pipeline's")
    for link in pipeline.links:
        for kind in (FORWARD, BACKWARD):
            source, target = (
                [op for op in schedule[s] if op.kind == kind] for s in (link.source, link.target)
            )
            if source != target:
                raise ScheduleError(
                    f"stages {link.source} and {link.target} don't exchange their {kind} "
                    "messages in the same sequence"
                )
    execute(pipeline, schedule)


@lru_cache(maxsize=4096)
def deadlocks(variant: Variant, placement: tuple[int, ...], micro_batches: int) -> bool:
    """Whether the operations of a system whose devices have a row wait for each other, where each
    stage waits for the one before it; `placement`: each stage's device."""
    pipeline = in_a_row(variant, micro_batches, (1,) * len(placement), placement)
    try:
        execute(pipeline, make_schedule(pipeline, 1))
    except ScheduleError:
        return True
    return False


def _check_stage(pipeline: Pipeline, s: int, ops: Sequence[Op], mini_batches: int) -> None:
    by_micro_batch = pipeline.variant.backward_unit == "micro"
    micro_batches = range(pipeline.micro_batches)
    parts = [BACKWARD, WEIGHT] if pipeline.variant.split_backward else [BACKWARD]
    wanted = {
        *(Op(FORWARD, b, i) for b in range(mini_batches) for i in micro_batches),
        *(
            Op(UPDATE, b)
            for b in range(mini_batches)
            if pipeline.updates_after(b) or b == mini_batches - 1
        ),
        *(
            Op(part, b, i)
            for part in parts
            for b in range(mini_batches)
            for i in (micro_batches if by_micro_batch else [None])
        ),
    }
    seen: set[Op] = set()
    flying: set[int] = set()
    left: dict[int, int] = {}
    for op in ops:
        name = op_text(s, op)
        if op in seen or op not in wanted:
            raise ScheduleError(f"{name}: {'runs twice' if op in seen else 'is not expected'}")
        if op.kind == FORWARD:
            flying.add(op.mini_batch)
            if len(flying) > pipeline.limits[s]:
                raise ScheduleError(
                    f"{name}: stage {s} would have {len(flying)} mini-batches in flight; its "
                    f"limit is {pipeline.limits[s]}"
                )
        else:
            before = [Op(FORWARD, op.mini_batch, i) for i in micro_batches]
            if op.kind == UPDATE:
                units = micro_batches if by_micro_batch else [None]
                before = [Op(parts[-1], op.mini_batch, i) for i in units]
            elif op.micro_batch is not None:
                earlier = FORWARD if op.kind == BACKWARD else BACKWARD
                before = [Op(earlier, op.mini_batch, op.micro_batch)]
            missing = [other for other in before if other not in seen]
            if missing:
                raise ScheduleError(f"{name}: runs before {op_text(s, missing[0])}")
        seen.add(op)
        if op.kind == BACKWARD:
            left[op.mini_batch] = left.get(op.mini_batch, pipeline.backwards_per_mini_batch) - 1
            if not left[op.mini_batch]:
                flying.discard(op.mini_batch)
    if wanted - seen:
        raise ScheduleError(f"{op_text(s, min(wanted - seen, key=repr))}: is missing")
