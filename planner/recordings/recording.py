"""A recording: what a schedule did or should do, for every picture of a plan or a run.

It has a lane for each worker, what ran on it when, of which of its stages and on which weight
version, the messages between lanes, and the bytes that each lane held over time. Those of plans
are made by simulation (`predicted`); those of runs, from their logs (`runtime.records.recording`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from ..costs.memory import MemoryByKind
from ..plan import Plan

MEMORY_KINDS = tuple(name.removesuffix("_bytes") for name in MemoryByKind.__struct_fields__)
"""What `MemoryPoint.nbytes` counts, in its sequence."""

ACCOUNTED_KINDS = tuple(kind for kind in MEMORY_KINDS if kind != "engine")
"""What a run accounts for, in its logs' sequence."""


def by_kind(memory: MemoryByKind) -> tuple[int, ...]:
    """Bytes as in `MEMORY_KINDS`."""
    return msgspec.structs.astuple(memory)


class Lane(NamedTuple):
    """One worker: a device with its stages, or one replica of them.

    Attributes:
        stages: ascending; more than one where stages share the device.
    """

    name: str
    stages: tuple[int, ...]
    replica: int


class Span(NamedTuple):
    """An operation on a lane, in seconds from the recording's beginning.

    Attributes:
        lane: position in `Recording.lanes`.
        stage: the one of the lane's stages that it is of.
        kind: F, B, W or U (`operations`).
        version: that it used; of an update, the one it made.
        forward_version: of backwards: the version that their forward used.
    """

    lane: int
    stage: int
    kind: str
    mini_batch: int
    micro_batch: int | None
    start_s: float
    end_s: float
    version: int | None
    forward_version: int | None

    @property
    def name(self) -> str:
        """``F3.1``."""
        micro = "" if self.micro_batch is None else f".{self.micro_batch}"
        return f"{self.kind}{self.mini_batch}{micro}"


class Message(NamedTuple):
    """What crosses from lane to lane; what one stage of a lane hands to another isn't any.

    Attributes:
        source, target: lanes.
        source_stage, target_stage: those of their stages that send and receive it.
        tensor: its name; of several that go together, all of them.
        backward: a gradient.
        sent_s: made at the source.
        start_s: on the wire.
        end_s: there.
    """

    source: int
    target: int
    source_stage: int
    target_stage: int
    tensor: str
    mini_batch: int
    micro_batch: int | None
    backward: bool
    nbytes: int
    sent_s: float
    start_s: float
    end_s: float


class MemoryPoint(NamedTuple):
    """What a lane holds from a time on, until its next point; bytes as in `MEMORY_KINDS`."""

    lane: int
    at_s: float
    nbytes: tuple[int, ...]


class Activity(NamedTuple):
    """What a worker did besides computing, around an operation.

    Attributes:
        kind: "load" samples, "wait" for messages, "send" them, or "sum" gradients with others.
        name: the operation's.
    """

    lane: int
    kind: str
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Recording:
    """Attributes:
    source: "predicted" or "measured".
    variant: the training system.
    spans: sorted by lane, then by time.
    messages: empty where they aren't known; so is `memory`.
    period_s: seconds per mini-batch: predicted in the steady state, or measured.
    activities: sorted as spans; of what was measured alone.
    idle_shares: of each lane (docs/reading_tables.md): predicted in the steady state, or measured
        in all training, not of these spans alone; empty where they aren't known.
    """

    source: str
    variant: str
    lanes: tuple[Lane, ...]
    spans: tuple[Span, ...]
    messages: tuple[Message, ...]
    memory: tuple[MemoryPoint, ...]
    period_s: float
    activities: tuple[Activity, ...] = ()
    idle_shares: tuple[float | None, ...] = ()

    @property
    def end_s(self) -> float:
        """When the last operation ends or the last message is there."""
        ends = [span.end_s for span in self.spans]
        return max([*ends, *(message.end_s for message in self.messages)], default=0.0)

    def name(self, span: Span) -> str:
        """``F3.1``; ``2F3.1`` of stage 2 on a lane with several."""
        stage = str(span.stage) if len(self.lanes[span.lane].stages) > 1 else ""
        return stage + span.name


def lanes_of(plan: Plan) -> tuple[Lane, ...]:
    """The lanes of a plan, in the sequence of their workers' ranks: device by device as
    the stages come to them, replica by replica."""
    stages, placement = plan.stages, plan.placement
    on_device: dict[int, list[int]] = {}
    for s in range(len(stages)):
        on_device.setdefault(placement[s] if placement else s, []).append(s)
    lanes = []
    for mine in on_device.values():
        devices = stages[mine[0]].devices
        for j, device in enumerate(devices):
            name = stages_text(mine)
            if placement:
                name = f"device {device}: {name}"
            if len(devices) > 1:
                name += f" replica {j}"
            lanes.append(Lane(name, tuple(mine), j))
    return tuple(lanes)


_MOST_NAMED = 4


def stages_text(stages: Sequence[int]) -> str:
    """``stage 3``, ``stages 0, 3`` or ``stages 0, 4 … 28``."""
    if len(stages) == 1:
        return f"stage {stages[0]}"
    if len(stages) <= _MOST_NAMED:
        return f"stages {', '.join(map(str, stages))}"
    return f"stages {stages[0]}, {stages[1]} … {stages[-1]}"


# Parts of recordings -------------------------------------------------------------------------


def window(recording: Recording, begin: int, end: int) -> Recording:
    """What lies, on each lane, between its first operation of mini-batch `begin` and its last of
    mini-batch `end` − 1; times from the first of these on."""
    # Positions of spans, and times, by lane.
    places: dict[int, tuple[int, int]] = {}
    for k, span in enumerate(recording.spans):
        if begin <= span.mini_batch < end:
            places[span.lane] = places.get(span.lane, (k, k))[0], k
    spans = [s for low, high in places.values() for s in recording.spans[low : high + 1]]
    times = {
        lane: (recording.spans[low].start_s, recording.spans[high].end_s)
        for lane, (low, high) in places.items()
    }
    zero = min((low for low, _ in times.values()), default=0.0)

    def inside(lane: int, at_s: float) -> bool:
        low, high = times.get(lane, (0.0, -1.0))
        return low <= at_s <= high

    messages = (
        m for m in recording.messages if inside(m.source, m.sent_s) and inside(m.target, m.end_s)
    )
    part = replace(
        recording,
        spans=tuple(spans),
        messages=tuple(messages),
        memory=tuple(p for p in recording.memory if inside(p.lane, p.at_s)),
        activities=tuple(a for a in recording.activities if inside(a.lane, a.end_s)),
    )
    return shifted(part, -zero)


def shifted(
    recording: Recording, seconds: float, mini_batches: int = 0, versions: int = 0
) -> Recording:
    """The same that much later, with mini-batches and versions that count from elsewhere."""

    def plus(version: int | None) -> int | None:
        return None if version is None else version + versions

    spans = (
        s._replace(
            mini_batch=s.mini_batch + mini_batches,
            start_s=s.start_s + seconds,
            end_s=s.end_s + seconds,
            version=plus(s.version),
            forward_version=plus(s.forward_version),
        )
        for s in recording.spans
    )
    messages = (
        m._replace(
            mini_batch=m.mini_batch + mini_batches,
            sent_s=m.sent_s + seconds,
            start_s=m.start_s + seconds,
            end_s=m.end_s + seconds,
        )
        for m in recording.messages
    )
    activities = (
        a._replace(start_s=a.start_s + seconds, end_s=a.end_s + seconds)
        for a in recording.activities
    )
    return replace(
        recording,
        spans=tuple(spans),
        messages=tuple(messages),
        memory=tuple(p._replace(at_s=p.at_s + seconds) for p in recording.memory),
        activities=tuple(activities),
    )
