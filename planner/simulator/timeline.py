"""Times of a schedule: each operation's start and end, and bounds on the period by load and round
trip."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from ..systems.operations import FORWARDS, UPDATE, UPDATES, Op, Schedule
from .clock import NOT_YET, SimulatedClock, SimulatedMessage
from .executor import Task, execute
from .pipeline import Link, Pipeline, Route


class Event(NamedTuple):
    """An operation's start and end, in seconds from the start of the run."""

    stage: int
    op: Op
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """When each stage runs each of its operations.

    Attributes:
        stages: per stage, its events in order. What several replicas run takes from the first
            one's start to the last one's end.
        lanes: per device and replica, the events of its own part, in order.
        sequence: (stage, position in that stage's list) in an order in which one process
            could run them all.
    """

    stages: tuple[tuple[Event, ...], ...]
    lanes: tuple[tuple[tuple[Event, ...], ...], ...]
    sequence: tuple[tuple[int, int], ...]


def simulate(
    pipeline: Pipeline, schedule: Schedule, sent: list[SimulatedMessage] | None = None
) -> Timeline:
    """The timeline of a schedule, by simulation.

    Args:
        sent: where all messages are noted.

    Raises ScheduleError as `execute`.
    """
    ran = execute(pipeline, schedule, sent)
    clock = ran.clock
    stages: list[list[Event]] = [[] for _ in schedule]
    lanes: list[list[list[Event]]] = []
    last_starts: list[list[float]] = [[] for _ in schedule]
    # Per device and position, the stage and the position in its list.
    places: list[list[tuple[int, int]]] = []
    for of, ops, tasks in zip(pipeline.stages_of, ran.devices, ran.tasks, strict=True):
        lanes.append([[] for _ in range(pipeline.replicas(of[0]))])
        mine = []
        for (s, op), task in zip(ops, tasks, strict=True):
            shares = list(_shares(clock, op, task))
            for j, event in shares:
                lanes[-1][j].append(event)
            first = shares[0][1]
            if len(shares) > 1:
                start = min(event.start_s for _, event in shares)
                first = Event(s, op, start, max(event.end_s for _, event in shares))
            mine.append((s, len(stages[s])))
            stages[s].append(first)
            last_starts[s].append(max(event.start_s for _, event in shares))
        places.append(mine)
    # By start time people see the pipeline's own sequence; the stable sort keeps causes first.
    order = sorted(
        (places[d][p] for d, p in ran.sequence), key=lambda place: last_starts[place[0]][place[1]]
    )
    return Timeline(
        tuple(map(tuple, stages)), tuple(tuple(map(tuple, own)) for own in lanes), tuple(order)
    )


def whole_sequence(pipeline: Pipeline, schedule: Schedule) -> list[tuple[int, Op]]:
    """All devices' (stage, operation) in one sequence that one process can run. Raises as
    `simulate`."""
    places = simulate(pipeline, schedule).sequence
    return updates_last(pipeline, [(s, schedule[s][k]) for s, k in places])


def updates_last(pipeline: Pipeline, sequence: Iterable[tuple[int, Op]]) -> list[tuple[int, Op]]:
    """A sequence of operations, where a pipeline flushes with each mini-batch's updates behind
    everything else of it: any stage may wait for sums with any other before it updates."""
    if not pipeline.variant.flushes:
        return list(sequence)
    return sorted(sequence, key=lambda at: (at[1].mini_batch, at[1].kind == UPDATE))


def _shares(clock: SimulatedClock, op: Op, task: Task) -> Iterable[tuple[int, Event]]:
    """Replica and event of each share of an operation that has run."""
    kind, slot, s = task
    r = clock.replicas[s]
    if kind == UPDATES:
        start = clock.starts_s[UPDATES][s][slot]
        yield from ((j, Event(s, op, start, start + clock.durations.update_s[s])) for j in range(r))
        return
    for k in range(slot, slot + clock.width[kind][s]):
        start = clock.starts_s[kind][s][k]
        yield k % r, Event(s, op, start, start + clock.durations.seconds[kind][s][k % r])


def warm_mini_batches(stages: int, micro_batches: int = 1) -> int:
    """Mini-batches after which the middle third of a run has the steady rate.

    What fills a pipeline are micro-batches: where a mini-batch has many, few of them are enough.
    """
    return 12 + -(-6 * stages // micro_batches)


def busy_s(pipeline: Pipeline) -> list[float]:
    """Seconds per mini-batch that each stage's device is busy: operations of all its stages, and
    transfers that block it.

    That of the replica with most of it; all of them wait for it before the update.
    """
    stages = range(pipeline.stages)
    if all(not link.routes for link in pipeline.links):
        work = [pipeline.work_s(s) for s in stages]
        return [sum(work[s] for s in pipeline.beside(stage)) for stage in stages]
    blocking = [
        (link, route) for link in pipeline.links for route in link.routes if not route.overlaps
    ]
    return [_busy_s(pipeline, stage, blocking) for stage in stages]


def _busy_s(pipeline: Pipeline, stage: int, blocking: Sequence[tuple[Link, Route]]) -> float:
    """A stage's device. `blocking`: what devices compute nothing beside."""
    beside = pipeline.beside(stage)
    busy = [0.0] * pipeline.replicas(stage)
    for s in beside:
        paces = pipeline.paces[s] if pipeline.paces else (1.0,)
        each = pipeline.micro_batches_per_replica(s)
        for j, pace in enumerate(paces):
            busy[j] += each * pace * (pipeline.forward_s[s] + pipeline.backward_s[s])
    for link, route in blocking:
        for s in {link.source, link.target} & {*beside}:
            replica = route.source if s == link.source else route.target
            wire_s = route.forward_s + (route.backward_s if link.has_gradient else 0.0)
            busy[replica] += wire_s * pipeline.messages_per_route(link)
    return max(busy) + sum(pipeline.update_op_s(s) / pipeline.update_every for s in beside)


def least_period_s(pipeline: Pipeline) -> float:
    """Lower bound on the period: the load of the busiest device or wire, in seconds per
    mini-batch."""
    return max(*loads_s(pipeline), 0.0)


def loads_s(pipeline: Pipeline) -> list[float]:
    """Seconds per mini-batch that each stage's device, and each wire, is busy."""
    wires: dict[object, float] = {}
    for link in pipeline.links:
        count = pipeline.messages_per_route(link)
        for route in link.all_routes:
            both = (route.wire, route.forward_s), (route.wire_back, route.backward_s)
            for wire, wire_s in both:
                wires[wire] = wires.get(wire, 0.0) + count * wire_s
    return [*busy_s(pipeline), *wires.values()]


def round_trip_s(pipeline: Pipeline, kept: Sequence[int] = ()) -> float:
    """Lower bound on the period by in-flight limits: the longest round trip of a mini-batch over
    its limit, in seconds.

    A stage begins mini-batch b + L after its update for b, so a period takes 1 / L of the time
    from a mini-batch's first forward there to its update.

    Args:
        kept: per stage, micro-batches from a mini-batch's first on that run forward before its
            backward, at the most, where that is known. The next forward is behind the update, and
            the rest of its mini-batch's before the next one.
    """
    n, found, stay_s = pipeline.micro_batches, 0.0, _stays_s(pipeline)
    for s in range(pipeline.stages):
        trips, rest_s = pipeline.limits[s], 0.0
        if kept:
            trips = -(-kept[s] // n)
            rest_s = (trips * n - kept[s]) * pipeline.forward_s[s]
        found = max(found, (stay_s[s] + rest_s) / trips)
    return found


def _stays_s(pipeline: Pipeline) -> list[float]:
    """Per stage, how long a mini-batch stays there at the least: down for its last micro-batch, and
    back up for its gradients."""
    stages = range(pipeline.stages)
    paces = [min(mine) for mine in pipeline.paces] or [1.0] * pipeline.stages
    forward_s = [seconds * pace for seconds, pace in zip(pipeline.forward_s, paces, strict=True)]
    backward_s = [pipeline.backward_op_s(s) * pace for s, pace in enumerate(paces)]
    # Per stage, which others it gets messages from, and gradients, and what these take.
    sources: list[list[tuple[int, float]]] = [[] for _ in stages]
    targets: list[list[tuple[int, float]]] = [[] for _ in stages]
    micro = pipeline.variant.backward_unit == "micro"
    for link in pipeline.links:
        there_s, back_s = link.fastest_s
        sources[link.target].append((link.source, there_s))
        if link.has_gradient:
            if not micro:
                count = pipeline.messages_per_route(link)
                back_s = min(r.backward_s * count + r.latency_s for r in link.all_routes)
            targets[link.source].append((link.target, back_s))
    found = []
    for stage in stages:
        down = {stage: pipeline.micro_batches_per_replica(stage) * forward_s[stage]}
        for t in stages[stage + 1 :]:
            came = [down[source] + there_s for source, there_s in sources[t] if source in down]
            if came:
                down[t] = max(came) + forward_s[t]
        up: dict[int, float] = {}
        for t in sorted(down, reverse=True):
            back = [up[target] + back_s for target, back_s in targets[t]]
            up[t] = max(down[t], *back, 0.0) + backward_s[t]
        # Its last weight part may come after all messages.
        after_s = pipeline.weight_op_s(stage) * paces[stage]
        update_s = pipeline.update_op_s(stage) if pipeline.update_every == 1 else 0.0
        found.append(up[stage] + after_s + update_s)
    return found


def filled_and_drained_s(pipeline: Pipeline) -> float:
    """Lower bound on a mini-batch's seconds in a pipeline that flushes: filling, work and draining.

    A device's work comes after the first micro-batch's way from another stage, and before the last
    one's way back there, where gradients come back, and the update there. Weight parts may run
    beside that, but for that stage's last one. Of replicas the slowest has that work; micro-batches
    may come by way of the fastest ones.
    """
    stages, most = pipeline.stages, 0.0
    paces = [min(mine) for mine in pipeline.paces] or [1.0] * stages
    both = [(f, pipeline.backward_op_s(s)) for s, f in enumerate(pipeline.forward_s)]
    work_s = [pipeline.micro_batches_per_replica(s) * sum(each) for s, each in enumerate(both)]
    forward_s, backward_s = zip(
        *((f * pace, b * pace) for (f, b), pace in zip(both, paces, strict=True)), strict=True
    )
    # Per link: its ends, and what a micro-batch and its gradient take from one to the other.
    ways = [
        (
            link.source,
            link.target,
            forward_s[link.source] + link.fastest_s[0],
            backward_s[link.source] + link.fastest_s[1],
            link.has_gradient,
        )
        for link in sorted(pipeline.links, key=lambda k: (k.target, k.source))
    ]
    after_s = [pipeline.weight_op_s(s) * paces[s] for s in range(stages)]
    if pipeline.update_every == 1:
        after_s = [mine + pipeline.update_op_s(s) for s, mine in enumerate(after_s)]
    firsts = {*range(stages)}
    if not pipeline.placement:
        # All that is behind a stage is behind those before it, whose way is longer.
        firsts -= {
            b
            for a, b, there_s, back_s, returns in ways
            if returns and there_s + back_s + after_s[a] >= after_s[b]
        }
    for first in firsts:
        # To and from this stage: from the begin of its forward, until the end of its backward;
        # below 0: there is no way.
        there, back = [-1.0] * stages, [-1.0] * stages
        there[first] = back[first] = 0.0
        for a, b, there_s, back_s, returns in ways:
            if there[a] >= 0 and there[a] + there_s > there[b]:
                there[b] = there[a] + there_s
            if returns and back[a] >= 0 and back[a] + back_s > back[b]:
                back[b] = back[a] + back_s
        for mine in pipeline.stages_of:
            busy_s, soonest_s, latest_s = 0.0, inf, inf
            for s in mine:
                if there[s] >= 0 and back[s] >= 0:
                    busy_s += work_s[s]
                    soonest_s, latest_s = min(soonest_s, there[s]), min(latest_s, back[s])
            if soonest_s < inf:
                most = max(most, busy_s + soonest_s + latest_s + after_s[first])
    return most


def idle_shares(pipeline: Pipeline, period_s: float) -> tuple[float, ...]:
    """Per stage's device, the idle share (bubble) of the steady period; of replicas' devices, the
    busiest one's."""
    if period_s <= 0:
        return tuple(0.0 for _ in range(pipeline.stages))
    return tuple(max(0.0, 1 - busy / period_s) for busy in busy_s(pipeline))


def most_waiting(clock: SimulatedClock, link: Link, posted: int) -> int:
    """The most forward messages of a replica at once that are sent before a receive is posted for
    them.

    Args:
        posted: receives that the target has posted ahead of its use of them.
    """
    s, t = link.source, link.target
    made, taken = clock.starts_s[FORWARDS][s], clock.starts_s[FORWARDS][t]
    r, targets, shared = clock.replicas[s], clock.replicas[t], clock.width[FORWARDS][t] > 1
    most = 0
    for j in range(r):
        seconds = clock.durations.seconds[FORWARDS][s][j]
        ends = [start + seconds for start in made[j::r] if start != NOT_YET]
        if shared:
            groups = (taken[k : k + targets] for k in range(0, len(taken), targets))
            starts = [max(group) for group in groups if NOT_YET not in group]
        else:
            starts = [start for start in (taken[j::r] if r > 1 else taken) if start != NOT_YET]
        if targets > 1:
            starts.sort()
        # What is taken at the very moment it is made never waits.
        waiting = (k + 1 - bisect_right(starts, end) for k, end in enumerate(ends))
        most = max(most, max(waiting, default=0))
    return max(most - posted, 1)


_FASTER = 1.005
"""Paces that differ by less are printed as the same."""


def running_ahead(pipeline: Pipeline, period_s: float) -> list[tuple[Link, float]]:
    """Links over which a source may run ever further ahead of its target, since no gradient comes
    back.

    A stage goes at the pace of the stages that gradients come back from, of those that send to it,
    and of those that these go at the pace of. Nothing keeps it at another one's.

    Returns:
        Links, each with the mini-batches, less than one, by which the source's lead grows in every
        period, at the most: what a stage takes besides its operations isn't counted.
    """
    import networkx as nx

    follows = nx.DiGraph()
    follows.add_nodes_from(range(pipeline.stages))
    follows.add_edges_from((link.target, link.source) for link in pipeline.links)
    follows.add_edges_from((k.source, k.target) for k in pipeline.links if k.has_gradient)
    paces = [sum(map(pipeline.work_s, pipeline.beside(s))) for s in follows]
    found = []
    for link in pipeline.links:
        if link.has_gradient:
            continue
        held = {link.source, *nx.descendants(follows, link.source)}
        pace_s = max(paces[s] for s in held)
        if link.target not in held and pace_s * _FASTER < period_s:
            found.append((link, 1 - pace_s / period_s))
    return found
