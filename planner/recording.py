"""What a schedule did or should do, operation by operation: for every picture of a plan or a run.

A recording has a lane for each worker, what ran on it when and on which weight version, the
messages between lanes, and the bytes that each lane held over time. Those of plans are made here by
simulation; those of runs, from their logs, in `runtime.records.recording`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import msgspec

from .costs.memory import HoldingsWalk, MemoryByKind, Moment, StageBytes
from .plan import Plan, pipeline_of
from .schedules.schedules import make_schedule
from .simulator.clock import SimulatedMessage
from .simulator.pipeline import Pipeline
from .simulator.timeline import Event, simulate, warm_mini_batches
from .systems.operations import BACKWARD, FORWARD, FORWARDS, UPDATE, Op
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
    """One worker: a stage, or one replica of it."""

    name: str
    stage: int
    replica: int


class Span(NamedTuple):
    """An operation on a lane, in seconds from the recording's beginning.

    Attributes:
        lane: position in `Recording.lanes`.
        kind: F, B, W or U (`operations`).
        version: that it used; of an update, the one it made.
        forward_version: of backwards: the version that their forward used.
    """

    lane: int
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
    """What crosses from lane to lane.

    Attributes:
        source, target: lanes.
        tensor: its name; of several that go together, all of them.
        backward: a gradient.
        sent_s: made at the source.
        start_s: on the wire.
        end_s: there.
    """

    source: int
    target: int
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


def lanes_of(replicas: Sequence[int]) -> tuple[Lane, ...]:
    """The lanes of stages with so many replicas each, in the sequence of their ranks."""
    return tuple(
        Lane(f"stage {s}" + (f" replica {j}" if count > 1 else ""), s, j)
        for s, count in enumerate(replicas)
        for j in range(count)
    )


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
    lanes = lanes_of([len(stage.devices) for stage in plan.stages])
    entries = entry_versions(pipeline.variant, plan.micro_batches, schedule[0])
    spans: list[Span] = []
    memory: list[MemoryPoint] = []
    lane = 0
    for s, ops in enumerate(schedule):
        again = plan.stages[s].recompute
        n = plan.micro_batches
        use = version_use(pipeline.variant, n, ops, entries, recompute=again)
        used = _uses(ops, use.versions, use.differences)
        replicas = timeline.replicas[s]
        for j, events in enumerate(replicas):
            spans += (
                Span(lane + j, *event.op, event.start_s, event.end_s, *used[event.op])
                for event in events
            )
        holds = plan.predicted.stages[s].holds
        if holds is not None:
            walk = HoldingsWalk(
                pipeline.variant,
                n,
                len(replicas),
                entries,
                recompute=again,
                update_every=plan.update_every,
            )
            memory += _memory(walk, ops, replicas, lane, holds)
        lane += len(replicas)
    recording = Recording(
        source="predicted",
        variant=plan.variant,
        lanes=lanes,
        spans=tuple(spans),
        messages=tuple(_messages(plan, pipeline, lanes, sent)),
        memory=tuple(memory),
        period_s=plan.predicted.period_s,
        idle_shares=tuple(plan.predicted.stages[lane.stage].idle_share for lane in lanes),
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


# Memory --------------------------------------------------------------------------------------


def _memory(
    walk: HoldingsWalk,
    ops: Iterable[Op],
    replicas: Sequence[Iterable[Event]],
    lane: int,
    holds: StageBytes,
) -> list[MemoryPoint]:
    """Bytes over time of all replicas of a stage. `lane`: the first one's."""
    found: list[list[MemoryPoint]] = [[] for _ in replicas]
    upcoming = [iter(events) for events in replicas]
    following = [next(events, None) for events in upcoming]
    known: dict[Moment, tuple[int, ...]] = {}
    # Whether the last point of each is one between two operations.
    between = [False for _ in replicas]

    def note(j: int, at_s: float, moment: Moment) -> None:
        nbytes = known.get(moment)
        if nbytes is None:
            nbytes = known[moment] = by_kind(holds.by_kind(moment))
        points = found[j]
        if moment.kind is not None and points and points[-1].at_s == at_s and between[j]:
            # One operation follows the other at once.
            points.pop()
        between[j] = moment.kind is None
        if not points or points[-1].nbytes != nbytes:
            points.append(MemoryPoint(lane + j, at_s, nbytes))

    # Replicas that share every mini-batch are walked as one.
    counted = len(walk.kept)
    for op in ops:
        before = tuple(walk.kept)
        gathered = walk.gradients
        at_hand = walk.step(op)
        for j, event in enumerate(following):
            if event is None or event.op != op:
                continue
            k = j % counted
            note(j, event.start_s, _meanwhile(walk, at_hand, op, before, gathered, k))
            after = Moment(None, walk.versions, walk.gradients, walk.kept[k], walk.postponed[k])
            note(j, event.end_s, after)
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
    """The messages that the clock noted. Tensors that go together are one."""
    first: dict[int, int] = {}
    for position, lane in enumerate(lanes):
        first.setdefault(lane.stage, position)
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

    return shifted(
        Recording(
            recording.source,
            recording.variant,
            recording.lanes,
            tuple(spans),
            tuple(
                m
                for m in recording.messages
                if inside(m.source, m.sent_s) and inside(m.target, m.end_s)
            ),
            tuple(p for p in recording.memory if inside(p.lane, p.at_s)),
            recording.period_s,
            tuple(a for a in recording.activities if inside(a.lane, a.end_s)),
            recording.idle_shares,
        ),
        -zero,
    )


def shifted(
    recording: Recording, seconds: float, mini_batches: int = 0, versions: int = 0
) -> Recording:
    """The same that much later, with mini-batches and versions that count from elsewhere."""

    def plus(version: int | None) -> int | None:
        return None if version is None else version + versions

    return Recording(
        recording.source,
        recording.variant,
        recording.lanes,
        tuple(
            Span(
                s.lane,
                s.kind,
                s.mini_batch + mini_batches,
                s.micro_batch,
                s.start_s + seconds,
                s.end_s + seconds,
                plus(s.version),
                plus(s.forward_version),
            )
            for s in recording.spans
        ),
        tuple(
            m._replace(
                mini_batch=m.mini_batch + mini_batches,
                sent_s=m.sent_s + seconds,
                start_s=m.start_s + seconds,
                end_s=m.end_s + seconds,
            )
            for m in recording.messages
        ),
        tuple(p._replace(at_s=p.at_s + seconds) for p in recording.memory),
        recording.period_s,
        tuple(
            a._replace(start_s=a.start_s + seconds, end_s=a.end_s + seconds)
            for a in recording.activities
        ),
        recording.idle_shares,
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
    """What the plan predicts for a mini-batch in the steady state: of each stage's busiest
    replica, in seconds."""
    pipeline, period_s = pipeline_of(plan), plan.predicted.period_s
    found = []
    for s, stage in enumerate(plan.predicted.stages):
        idle_s = stage.idle_share * period_s
        compute_s = min(pipeline.work_s(s), period_s - idle_s)
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
