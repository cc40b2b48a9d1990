"""How many updates a prediction looks ahead, read off the schedule.

Where weights are predicted, the distance is counted on a *unit clock*: every forward and backward
takes one unit, updates and messages none, every stage feeds the next, and each runs its list as
early as it can. So distances follow from the schedule alone. With S − s mini-batches in flight they
are, once the pipeline is full, SpecTrain's ⌊s/2⌋ + S − s − 1 and ⌊s/2⌋ (1809.02839, section 3.2).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ...profiles.errors import ScheduleError
from .operations import BACKWARD, FORWARD, UPDATE, Op, Schedule
from .variants import Horizon, Variant


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
    return _HORIZONS[variant.horizon](schedule, updated_by or range(len(schedule)))


@dataclass
class _StageTimes:
    """What a stage did when, in units from the start.

    Attributes:
        updates: when each update was made.
        starts: of each operation but updates.
    """

    updates: list[int] = field(default_factory=list)
    starts: dict[Op, int] = field(default_factory=dict)


def _round_trip(schedule: Schedule, updated_by: Sequence[int]) -> tuple[Distances, ...]:
    """To the version that the stage has when the backward of that micro-batch or, where it takes
    all of them, mini-batch starts at stage 0.

    What is updated at that very moment doesn't count; stage 0's version is what its own backward
    sees.
    """
    clocked = _clocked(schedule)
    heads = _backwards(clocked[0].starts)
    versions = _versions(schedule, updated_by)
    found = []
    for own, by in zip(versions, updated_by, strict=True):
        if by:
            aims = {op: bisect_left(clocked[by].updates, clocked[0].starts[op]) for op in heads}
        else:
            aims = {op: versions[0][op] for op in heads}
        found.append(_to(aims, own))
    return tuple(found)


def _own_backward(schedule: Schedule, updated_by: Sequence[int]) -> tuple[Distances, ...]:
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


def _backwards(ops: Mapping[Op, int]) -> list[Op]:
    return [op for op in ops if op.kind == BACKWARD]


def _clocked(schedule: Schedule) -> list[_StageTimes]:
    """Run the schedule on the unit clock."""
    last, devices = len(schedule) - 1, schedule.on_devices()
    device_of = {s: d for d, ops in enumerate(devices) for s, _ in ops}
    times = [_StageTimes() for _ in schedule]
    ends: list[dict[Op, int]] = [{} for _ in schedule]
    done, now = [0] * len(devices), [0] * len(devices)
    pending = list(range(len(devices)))
    while pending:
        d = pending.pop()
        while done[d] < len(devices[d]):
            s, op = devices[d][done[d]]
            if op.kind == UPDATE:
                times[s].updates.append(now[d])
            else:
                feeder = s - 1 if op.kind == FORWARD else s + 1
                start = now[d]
                if 0 <= feeder <= last:
                    if op not in ends[feeder]:
                        break
                    start = max(start, ends[feeder][op])
                times[s].starts[op] = start
                ends[s][op] = now[d] = start + 1
                others = {device_of[t] for t in (s - 1, s + 1) if 0 <= t <= last} - {d}
                pending += [other for other in others if other not in pending]
            done[d] += 1
    if any(count < len(ops) for count, ops in zip(done, devices, strict=True)):
        raise ScheduleError(
            "how far predictions look ahead can't be counted: a stage's backward comes before the "
            "forward of a later stage of its device, from which no gradient comes back; plan with "
            "--stages-per-device 1, or another system than one that predicts to the round trip's "
            "end (spectrain)"
        )
    return times


_HORIZONS: dict[Horizon, Callable[[Schedule, Sequence[int]], tuple[Distances, ...]]] = {
    "round-trip": _round_trip,
    "backward": _own_backward,
}
