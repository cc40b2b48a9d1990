"""What a schedule did or should do, operation by operation: for every picture of a plan or a run.

A recording has a lane for each worker, what ran on it when, of which of its stages and on which
weight version, the messages between lanes, and the bytes that each lane held over time. Those of
plans are made here by simulation; those of runs, from their logs, in `runtime.records.recording`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import NamedTuple

import msgspec

from .costs.memory import HoldingsWalk, MemoryByKind, Moment, StageBytes
from .plan import Plan, PlanStage, pipeline_of
from .schedules.schedules import make_schedule
from .simulator.clock import SimulatedMessage
from .simulator.pipeline import Pipeline
from .simulator.timeline import Event, simulate, warm_mini_batches
from .systems.operations import BACKWARD, FORWARD, FORWARDS, UPDATE, Op
from .systems.placement import numbered_devices
from .systems.versions import entry_versions, version_use

MEMORY_KINDS = (
    "weights",
    "versions",
    "gradients",
    "optimizer",
    "activations",
    "boundary",
    "workspace",
)
"""What `MemoryPoint.nbytes` counts, in its sequence: that of `memory.MemoryByKind`."""

MOST_OPERATIONS = 60_000
"""Unless asked for, no more are recorded, however long the pipeline takes to settle."""


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


def lanes_of(stages: Sequence[PlanStage]) -> tuple[Lane, ...]:
    """The lanes of a plan's stages, in the sequence of their workers' ranks: device by device as
    the stages come to them, replica by replica."""
    placement = numbered_devices([stage.devices for stage in stages])
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


def default_mini_batches(plan: Plan) -> int:
    """Enough for a steady state, but no more than `MOST_OPERATIONS` have room for."""
    stages, n = len(plan.stages), plan.micro_batches
    most = MOST_OPERATIONS // (stages * (2 * n + 1))
    return min(warm_mini_batches(stages, n), max(2, most))


def predicted(
    plan: Plan, mini_batches: int | None = None, *, first: int = 0, more: int = 0
) -> Recording:
    """Simulate a plan's own schedule from its own times.

    Args:
        mini_batches: how many to record; by default `default_mini_batches`.
        first: the first of them. On every lane, the recording goes from its first operation to
            the last one's last operation, what runs between of other mini-batches included.
        more: mini-batches that follow those recorded; with none, the pipeline drains.

    Raises ScheduleError for in-flight limits with which the stages wait for each other.
    """
    count = mini_batches or default_mini_batches(plan)
    pipeline = pipeline_of(plan)
    schedule = make_schedule(pipeline, first + count + more)
    sent: list[SimulatedMessage] = []
    timeline = simulate(pipeline, schedule, sent)
    lanes = lanes_of(plan.stages)
    entries = entry_versions(pipeline.variant, plan.micro_batches, schedule[0])
    used = []
    for stage, own in zip(plan.stages, schedule, strict=True):
        use = version_use(
            pipeline.variant, plan.micro_batches, own, entries, recompute=stage.recompute
        )
        used.append(_uses(own, use.versions, use.differences))
    spans: list[Span] = []
    memory: list[MemoryPoint] = []
    lane = 0
    for mine, ops in zip(pipeline.stages_of, schedule.on_devices(), strict=True):
        replicas = [
            list(_in_turns(ops, {s: timeline.replicas[s][j] for s in mine}))
            for j in range(pipeline.replicas(mine[0]))
        ]
        for j, events in enumerate(replicas):
            spans += (
                Span(lane + j, s, *event.op, event.start_s, event.end_s, *used[s][event.op])
                for s, event in events
            )
        walks = {s: _walk_of(plan, pipeline, s, entries) for s in mine}
        holds = {s: found for s in mine if (found := plan.predicted.stages[s].holds) is not None}
        if len(holds) == len(mine):
            memory += _memory(walks, ops, replicas, lane, holds)
        lane += len(replicas)
    recording = Recording(
        source="predicted",
        variant=plan.variant,
        lanes=lanes,
        spans=tuple(spans),
        messages=tuple(_messages(plan, pipeline, lanes, sent)),
        memory=tuple(memory),
        period_s=plan.predicted.period_s,
        idle_shares=tuple(plan.predicted.device_of(lane.stages[0]).idle_share for lane in lanes),
    )
    return window(recording, first, first + count) if first or more else recording


def _uses(
    ops: Iterable[Op], versions: Iterable[int], differences: Iterable[int]
) -> dict[Op, tuple[int, int | None]]:
    """Version and forward version of each operation of a stage."""
    difference = iter(differences)
    return {
        op: (version, version - next(difference) if op.kind == BACKWARD else None)
        for op, version in zip(ops, versions, strict=True)
    }


_StageEvent = tuple[int, Event]
"""The stage, and what ran."""


def _in_turns(
    ops: Iterable[tuple[int, Op]], events: Mapping[int, Iterable[Event]]
) -> Iterator[_StageEvent]:
    """A replica's events of all its stages, in its device's sequence."""
    upcoming = {s: iter(mine) for s, mine in events.items()}
    following = {s: next(mine, None) for s, mine in upcoming.items()}
    for s, op in ops:
        event = following[s]
        if event is not None and event.op == op:
            yield s, event
            following[s] = next(upcoming[s], None)


# Memory --------------------------------------------------------------------------------------


def _walk_of(plan: Plan, pipeline: Pipeline, s: int, entries: Sequence[int]) -> HoldingsWalk:
    return HoldingsWalk(
        pipeline.variant,
        plan.micro_batches,
        pipeline.replicas(s),
        entries,
        recompute=plan.stages[s].recompute,
        update_every=plan.update_every,
    )


def _memory(
    walks: Mapping[int, HoldingsWalk],
    ops: Iterable[tuple[int, Op]],
    replicas: Sequence[Iterable[_StageEvent]],
    lane: int,
    holds: Mapping[int, StageBytes],
) -> list[MemoryPoint]:
    """Bytes over time of all replicas of a device: the sum over its stages.

    Args:
        walks, holds: of each of its stages.
        ops: (stage, operation), in the device's sequence.
        lane: the first replica's.
    """
    found: list[list[MemoryPoint]] = [[] for _ in replicas]
    upcoming = [iter(events) for events in replicas]
    following = [next(events, None) for events in upcoming]
    known: dict[tuple[int, Moment], tuple[int, ...]] = {}
    # Whether the last point of each is one between two operations.
    between = [False for _ in replicas]
    # What each holds for each stage.
    held = [{s: by_kind(holds[s].by_kind(walks[s].between())) for s in holds} for _ in replicas]

    def note(j: int, at_s: float, s: int, moment: Moment) -> None:
        nbytes = known.get((s, moment))
        if nbytes is None:
            nbytes = known[s, moment] = by_kind(holds[s].by_kind(moment))
        held[j][s] = nbytes
        if len(holds) > 1:
            nbytes = tuple(map(sum, zip(*held[j].values(), strict=True)))
        points = found[j]
        if moment.kind is not None and points and points[-1].at_s == at_s and between[j]:
            # One operation follows the other at once.
            points.pop()
        between[j] = moment.kind is None
        if not points or points[-1].nbytes != nbytes:
            points.append(MemoryPoint(lane + j, at_s, nbytes))

    for s, op in ops:
        walk = walks[s]
        before = tuple(walk.kept)
        gathered = walk.gradients
        at_hand = walk.step(op)
        for j, event in enumerate(following):
            if event is None or event[0] != s or event[1].op != op:
                continue
            # Replicas that share every mini-batch are walked as one.
            k = j % len(before)
            note(j, event[1].start_s, s, _meanwhile(walk, at_hand, op, before, gathered, k))
            after = Moment(None, walk.versions, walk.gradients, walk.kept[k], walk.postponed[k])
            note(j, event[1].end_s, s, after)
            following[j] = next(upcoming[j], None)
    return [point for points in found for point in points]


def _meanwhile(
    walk: HoldingsWalk, at_hand: Moment, op: Op, before: Sequence[int], gathered: bool, k: int
) -> Moment:
    """What replica k holds while it runs an operation that the walk has just taken.

    Args:
        at_hand: the same of the replica that holds most.
        before, gathered: micro-batches kept and whether there were gradients before.
    """
    if op.kind == FORWARD:
        return at_hand._replace(kept=walk.kept[k], postponed=walk.postponed[k])
    if op.kind == UPDATE:
        own = at_hand._replace(kept=walk.kept[k], postponed=walk.postponed[k])
        return own._replace(gradients=gathered)
    if op.micro_batch is None:
        return at_hand._replace(kept=before[k])
    return at_hand


def by_kind(memory: MemoryByKind) -> tuple[int, ...]:
    """Bytes as in `MEMORY_KINDS`."""
    found: tuple[int, ...] = msgspec.structs.astuple(memory)
    return found


# Messages ------------------------------------------------------------------------------------


def _messages(
    plan: Plan, pipeline: Pipeline, lanes: Sequence[Lane], sent: Iterable[SimulatedMessage]
) -> Iterator[Message]:
    """The messages that the clock noted, but for what goes from stage to stage of one device.
    Tensors that go together are one."""
    first: dict[int, int] = {}
    for position, lane in enumerate(lanes):
        for s in lane.stages:
            first.setdefault(s, position)
    n, whole = pipeline.micro_batches, pipeline.variant.whole_mini_batches
    micro = pipeline.variant.backward_unit == "micro"
    between = {(link.source, link.target): link for link in pipeline.links}
    names, nbytes = {}, {}
    for pair, link in between.items():
        ends = pipeline.replicas(link.source), pipeline.replicas(link.target)
        parts = lcm(*ends) if whole else 1
        held = 1 if micro else pipeline.messages_per_route(link)
        mine = [edge for edge in plan.edges if (edge.source, edge.target) == pair]
        back = [edge for edge in mine if edge.needs_grad]
        names[pair] = ", ".join(edge.tensor for edge in mine)
        nbytes[pair] = round(sum(edge.bytes_per_micro_batch for edge in mine) / parts)
        reverse = pair[::-1]
        names[reverse] = ", ".join(edge.tensor for edge in back)
        nbytes[reverse] = round(sum(e.bytes_per_micro_batch for e in back) * held / parts)
    for m in sent:
        if first[m.source] == first[m.target]:
            continue
        r = pipeline.replicas(m.source)
        b: int
        i: int | None
        if m.kind == FORWARDS:
            b, i = (m.slot // r, 0) if whole else divmod(m.slot, n)
        else:
            b, i = divmod(m.slot, n) if micro else (m.slot // r, None)
        pair = m.source, m.target
        yield Message(
            first[m.source] + m.slot % r,
            first[m.target] + m.offset,
            *pair,
            names[pair],
            b,
            i,
            m.kind != FORWARDS,
            nbytes[pair],
            m.made_s,
            m.begin_s,
            m.arrival_s,
        )


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


# Where each worker's time goes: computing, communicating, idle ----------------------------------
# Idle is what is left of a worker's time in training when computing and communicating are taken
# out of it; its share of that time is what every table, page and figure calls idle
# (docs/reading_tables.md). What a plan predicts is `timeline.idle_shares`, of the steady state;
# what a run measured is `runtime.records.metrics.measured_times`, of all training.


class LaneTimes(NamedTuple):
    """One worker's, in seconds; together they are all of its time.

    Attributes:
        compute_s: operations, and the loading of samples for them.
        communication_s: handing messages over, and summing gradients with others. What is predicted
            has these inside operations, or beside them.
        idle_s: neither; waiting for messages above all.
    """

    compute_s: float
    communication_s: float
    idle_s: float

    @property
    def wall_s(self) -> float:
        """All of it."""
        return self.compute_s + self.communication_s + self.idle_s

    @property
    def idle_share(self) -> float:
        """Share of it that is idle."""
        return self.idle_s / self.wall_s if self.wall_s else 0.0

    def per(self, count: float) -> LaneTimes:
        """Mean of so many."""
        return LaneTimes(*(seconds / count for seconds in self)) if count else self


def of_wall(wall_s: float, compute_s: float, communication_s: float) -> LaneTimes:
    """What wasn't spent on either is idle. Times in seconds."""
    return LaneTimes(compute_s, communication_s, max(wall_s - compute_s - communication_s, 0.0))


def steady_times(plan: Plan) -> tuple[LaneTimes, ...]:
    """What the plan predicts for a mini-batch in the steady state: of each stage's device, with
    all that it runs; of replicas' devices, of the busiest. In seconds."""
    pipeline, period_s = pipeline_of(plan), plan.predicted.period_s
    found = []
    for s, stage in enumerate(plan.predicted.stages):
        idle_s = stage.idle_share * period_s
        work_s = sum(pipeline.work_s(t) for t in pipeline.beside(s))
        compute_s = min(work_s, period_s - idle_s)
        found.append(LaneTimes(compute_s, period_s - idle_s - compute_s, idle_s))
    return tuple(found)


def lane_times(recording: Recording) -> tuple[LaneTimes, ...]:
    """Of each lane, from its first moment in the recording to its last."""
    count = len(recording.lanes)
    compute, communication = [0.0] * count, [0.0] * count
    first, last = [float("inf")] * count, [0.0] * count
    for span in recording.spans:
        compute[span.lane] += span.end_s - span.start_s
        first[span.lane] = min(first[span.lane], span.start_s)
        last[span.lane] = max(last[span.lane], span.end_s)
    for activity in recording.activities:
        lane, seconds = activity.lane, activity.end_s - activity.start_s
        if activity.kind == "load":
            compute[lane] += seconds
        elif activity.kind != "wait":
            communication[lane] += seconds
        first[lane] = min(first[lane], activity.start_s)
        last[lane] = max(last[lane], activity.end_s)
    return tuple(
        of_wall(max(last[k] - first[k], 0.0), own, other)
        for k, (own, other) in enumerate(zip(compute, communication, strict=True))
    )


def mini_batches_in(recording: Recording, lane: int) -> float:
    """How many mini-batches' work a lane did in the recording, by its forwards."""
    forwards: dict[int, int] = {}
    for span in recording.spans:
        if span.lane == lane and span.kind == FORWARD:
            forwards[span.mini_batch] = forwards.get(span.mini_batch, 0) + 1
    return sum(forwards.values()) / max(forwards.values(), default=1)
