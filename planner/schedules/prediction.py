"""How many updates a prediction looks ahead, read off the schedule.

Where weights are predicted, the distance is counted on a *unit clock*: every forward and backward
takes one unit, updates and messages none, every stage feeds the next, and each runs its list as
early as it can. So distances follow from the schedule alone. With S − s mini-batches in flight they
are, once the pipeline is full, SpecTrain's ⌊s/2⌋ + S − s − 1 and ⌊s/2⌋ (1809.02839, section 3.2).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...profiles.errors import ScheduleError
from ..simulator.clock import NOT_YET, SimulatedClock
from ..simulator.executor import execute
from ..simulator.pipeline import in_a_row
from ..systems.operations import BACKWARD, BACKWARDS, FORWARD, UPDATE, UPDATES, Op, Schedule
from ..systems.variants import Horizon, Variant


@dataclass(frozen=True)
class Distances:
    """Of one stage: updates between the version at hand and the one aimed at.

    Attributes:
        forward: per micro-batch of all mini-batches, from the version at its forward.
        backward: per backward, of micro-batches or whole mini-batches, from the version there.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def of_forward(self, op: Op, micro_batches: int) -> int:
        """Of this forward. `micro_batches`: N."""
        return self.forward[op.mini_batch * micro_batches + (op.micro_batch or 0)]

    def of_backward(self, op: Op, micro_batches: int) -> int:
        """Of this backward."""
        n, i = (1, 0) if op.micro_batch is None else (micro_batches, op.micro_batch)
        return self.backward[op.mini_batch * n + i]


def prediction_distances(
    variant: Variant, schedule: Schedule, updated_by: Sequence[int] = ()
) -> tuple[Distances, ...]:
    """Per stage; without any entries for systems that predict nothing.

    Args:
        updated_by: per stage, the stage of its device whose updates its weights' versions count;
            by default its own.

    Raises ScheduleError where a stage's backward doesn't wait for the next one's, as its device
    runs both.
    """
    if not variant.horizon:
        return tuple(Distances((), ()) for _ in schedule)
    return _HORIZONS[variant.horizon](variant, schedule, updated_by or range(len(schedule)))


def _round_trip(
    variant: Variant, schedule: Schedule, updated_by: Sequence[int]
) -> tuple[Distances, ...]:
    """To the version that the stage has when the backward of that micro-batch or, where it takes
    all of them, mini-batch starts at stage 0.

    What is updated at that very moment doesn't count; stage 0's version is what its own backward
    sees.
    """
    clock, heads = _unit_clock(variant, schedule), _backwards(schedule[0])
    starts, each = clock.starts_s[BACKWARDS][0], clock.slots[BACKWARDS][0]
    versions = _versions(schedule, updated_by)
    found = []
    for own, by in zip(versions, updated_by, strict=True):
        updates = [start for start in clock.starts_s[UPDATES][by] if start != NOT_YET]
        aims = {op: versions[0][op] for op in heads}
        if by:
            slots = {op: op.mini_batch * each + (op.micro_batch or 0) for op in heads}
            aims = {op: bisect_left(updates, starts[slot]) for op, slot in slots.items()}
        found.append(_to(aims, own))
    return tuple(found)


def _own_backward(
    _: Variant, schedule: Schedule, updated_by: Sequence[int]
) -> tuple[Distances, ...]:
    """To the version that the stage has at the micro-batch's or mini-batch's own backward."""
    return tuple(
        _to({op: own[op] for op in _backwards(own)}, own) for own in _versions(schedule, updated_by)
    )


def _versions(schedule: Schedule, updated_by: Sequence[int]) -> list[dict[Op, int]]:
    """Per stage, the version before each operation but updates."""
    found: list[dict[Op, int]] = [{} for _ in schedule]
    updates = [0 for _ in schedule]
    for ops in schedule.on_devices():
        for s, op in ops:
            if op.kind == UPDATE:
                updates[s] += 1
            else:
                found[s][op] = updates[updated_by[s]]
    return found


def _to(aims: Mapping[Op, int], versions: Mapping[Op, int]) -> Distances:
    """`aims`: per backward."""
    # A backward takes a micro-batch, as its forward does, or the whole mini-batch.
    whole = {op.mini_batch: aim for op, aim in aims.items() if op.micro_batch is None}
    forward = {
        op: whole[op.mini_batch] if whole else aims[op._replace(kind=BACKWARD)]
        for op in versions
        if op.kind == FORWARD
    }
    return Distances(
        tuple(forward[op] - versions[op] for op in sorted(forward)),
        tuple(aims[op] - versions[op] for op in sorted(aims)),
    )


def _backwards(ops: Iterable[Op]) -> list[Op]:
    return [op for op in ops if op.kind == BACKWARD]


def _unit_clock(variant: Variant, schedule: Schedule) -> SimulatedClock:
    """After a run of the schedule on the unit clock."""
    n = 1 + max((op.micro_batch or 0 for op in schedule[0]), default=0)
    device_of = {s: d for d, turns in enumerate(schedule.turns) for s in turns}
    placement = tuple(device_of[s] for s in sorted(device_of))
    try:
        return execute(in_a_row(variant, n, (1,) * len(schedule), placement), schedule).clock
    except ScheduleError:
        raise ScheduleError(
            "how far predictions look ahead can't be counted: a stage's backward comes before the "
            "forward of a later stage of its device, from which no gradient comes back; plan with "
            "--stages-per-device 1, or another system than one that predicts to the round trip's "
            "end (spectrain)"
        ) from None


_HORIZONS: dict[Horizon, Callable[[Variant, Schedule, Sequence[int]], tuple[Distances, ...]]] = {
    "round-trip": _round_trip,
    "backward": _own_backward,
}
