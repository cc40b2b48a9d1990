"""The recording of a plan: its own schedule, simulated with its own times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm

from ..costs.device_memory import DeviceTies, walks_of
from ..costs.memory import HoldingsWalk, Moment, StageBytes
from ..plan import Plan, pipeline_of
from ..schedules.schedules import make_schedule
from ..simulator.clock import SimulatedMessage
from ..simulator.pipeline import Pipeline
from ..simulator.timeline import Event, simulate, warm_mini_batches
from ..systems.operations import BACKWARD, FORWARD, FORWARDS, UPDATE, Op
from ..systems.versions import VersionWalk, entry_versions
from .recording import Lane, MemoryPoint, Message, Recording, Span, by_kind, lanes_of, window

MOST_OPERATIONS = 60_000
"""Unless asked for, no more are recorded, however long the pipeline takes to settle."""


def default_mini_batches(plan: Plan) -> int:
    """Enough for a steady state, but no more than `MOST_OPERATIONS` have room for."""
    stages, n = len(plan.stages), plan.micro_batches
    most = MOST_OPERATIONS // (stages * (2 * n + 1))
    return min(warm_mini_batches(stages, n), max(2, most))


def predicted(
    plan: Plan,
    mini_batches: int | None = None,
    *,
    first: int = 0,
    more: int = 0,
    memory_too: bool = True,
) -> Recording:
    """Simulate a plan's own schedule from its own times.

    Args:
        mini_batches: how many to record; by default `default_mini_batches`.
        first: the first of them. On every lane, the recording goes from its first operation to
            the last one's last operation, what runs between of other mini-batches included.
        more: mini-batches that follow those recorded; with none, the pipeline drains.
        memory_too: with bytes over time, which take longer than all the rest.

    Raises ScheduleError for in-flight limits with which the stages wait for each other.
    """
    count = mini_batches or default_mini_batches(plan)
    pipeline = pipeline_of(plan)
    schedule = make_schedule(pipeline, first + count + more)
    sent: list[SimulatedMessage] = []
    timeline = simulate(pipeline, schedule, sent)
    lanes = lanes_of(plan)
    entries = entry_versions(pipeline.variant, plan.micro_batches, schedule[0])
    used = [
        _uses(own, VersionWalk(pipeline.variant, plan.micro_batches, entries)) for own in schedule
    ]
    recompute = [bool(stage.recompute) for stage in plan.stages]
    spans: list[Span] = []
    memory: list[MemoryPoint] = []
    lane = 0
    devices = zip(pipeline.stages_of, schedule.on_devices(), timeline.lanes, strict=True)
    for mine, ops, replicas in devices:
        for j, events in enumerate(replicas):
            spans += (
                Span(lane + j, s, *op, start_s, end_s, *used[s][op])
                for s, op, start_s, end_s in events
            )
        holds = {s: found for s in mine if (found := plan.predicted.stages[s].holds) is not None}
        if memory_too and len(holds) == len(mine):
            tied = [(tie.stages, tie.holds) for tie in plan.predicted.ties_on(mine)]
            walks, ties = walks_of(pipeline, mine, tied, entries, recompute)
            memory += _memory(walks, ops, replicas, lane, holds, ties)
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


def _uses(ops: Iterable[Op], walk: VersionWalk) -> dict[Op, tuple[int, int | None]]:
    """Version of each operation of a stage, of an update the one it makes; and of backwards the
    one that their forward used. Where micro-batches of one differ, it is the oldest."""
    found: dict[Op, tuple[int, int | None]] = {}
    for op in ops:
        if op.kind == FORWARD:
            found[op] = walk.forward(op), None
        elif op.kind == BACKWARD:
            found[op] = walk.backward(op), walk.forward_version(op)
            walk.finish(op)
        else:
            found[op] = walk.update() if op.kind == UPDATE else walk.latest, None
    return found


# Memory --------------------------------------------------------------------------------------


def _memory(
    walks: Mapping[int, HoldingsWalk],
    ops: Iterable[tuple[int, Op]],
    replicas: Sequence[Iterable[Event]],
    lane: int,
    holds: Mapping[int, StageBytes],
    ties: DeviceTies,
) -> list[MemoryPoint]:
    """Bytes over time of all replicas of a device: the sum over its stages.

    Args:
        walks, holds: of each of its stages.
        ops: (stage, operation), in the device's sequence.
        lane: the first replica's.
        ties: what several of the stages use, which none of them `holds`.
    """
    holds = {**holds, **ties.needs}
    found: list[list[MemoryPoint]] = [[] for _ in replicas]
    upcoming = [iter(events) for events in replicas]
    following = [next(events, None) for events in upcoming]
    known: dict[tuple[int, Moment], tuple[int, ...]] = {}
    # Whether the last point of each is one between two operations.
    between = [False for _ in replicas]
    ends_s = [0.0 for _ in replicas]
    # What each holds for each stage.
    first = {s: walk.between() for s, walk in walks.items()} | ties.between()
    held = [{s: by_kind(holds[s].by_kind(first[s])) for s in holds} for _ in replicas]

    def note(j: int, at_s: float, moments: Mapping[int, Moment]) -> None:
        for s, moment in moments.items():
            if (s, moment) not in known:
                known[s, moment] = by_kind(holds[s].by_kind(moment))
            held[j][s] = nbytes = known[s, moment]
        if len(holds) > 1:
            nbytes = tuple(map(sum, zip(*held[j].values(), strict=True)))
        points, moment = found[j], next(iter(moments.values()))
        if points and points[-1].at_s == at_s and between[j]:
            # One operation follows the other at once, or is another replica's.
            points.pop()
        between[j] = moment.kind is None
        if not points or points[-1].nbytes != nbytes:
            points.append(MemoryPoint(lane + j, at_s, nbytes))

    for s, op in ops:
        walk = walks[s]
        before = tuple(walk.kept)
        at_hand = walk.step(op)
        of_ties, after_ties = ties.step(s, op)
        for j, event in enumerate(following):
            # Replicas that share every mini-batch are walked as one.
            k = j % len(before)
            if event is not None and (event.stage, event.op) == (s, op):
                meanwhile = at_hand
                # That is what the replica has which holds most.
                if op.kind in (FORWARD, UPDATE):
                    now = walk.kept[k], walk.postponed[k]
                    meanwhile = at_hand._replace(kept=now[0], postponed=now[1])
                elif op.micro_batch is None:
                    meanwhile = at_hand._replace(kept=before[k])
                note(j, event.start_s, {s: meanwhile, **of_ties})
                ends_s[j] = event.end_s
                following[j] = next(upcoming[j], None)
            # What another replica ran was the last use of a version, or made one needed.
            after = Moment(None, walk.versions, walk.gradients, walk.kept[k], walk.postponed[k])
            note(j, ends_s[j], {s: after, **after_ties})
    return [point for points in found for point in points]


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
