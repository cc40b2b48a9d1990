"""The simulator's clock: when each operation starts and ends, and when its messages arrive, in
seconds.

An operation is run by one replica of its stage, or by all of them, each its share. Shares are
numbered by *slots*: b·N + i for micro-batch i of mini-batch b where a share has a micro-batch of
its own, b·r + j for replica j's part of mini-batch b where all replicas take part. Either way
slot k is replica k mod r's.

Messages that share a wire follow each other in the sequence in which they are made. Where
transfers don't overlap computing, they are the next thing that both devices do.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from functools import cached_property
from math import frexp, gcd, inf, lcm
from typing import NamedTuple

from ..systems.operations import BACKWARDS, FORWARDS, UPDATES, WEIGHTS
from .pipeline import Link, Pipeline

NOT_YET = -1.0
"""Start of what hasn't run."""


_GRID_BITS = 36
"""All durations are multiples of the longest one's 2^-36 or so: sums of them, up to 2^17 times as
long, are exact. So what takes equally long in sum ends at the same time, in whichever sequence it
is added up and whenever it is; else ties would go now this way, now that way, and what repeats
would change after a while."""


class _Part(NamedTuple):
    """One message of a share."""

    offset: int
    wire: int
    wire_s: float
    latency_s: float
    blocks: tuple[list[float], int] | None
    """Where transfers don't overlap computing: the receiving stage's `free_s`, and the replica."""


class SimulatedMessage(NamedTuple):
    """A message on its wire: when it is made, has its wire and is there; of one replica's part,
    where there are several.

    Attributes:
        kind, source, slot: of the share that made it.
        target, offset: the stage and the replica that it is for.
    """

    kind: int
    source: int
    slot: int
    target: int
    offset: int
    made_s: float
    begin_s: float
    arrival_s: float


class _Inbox(NamedTuple):
    """Of one kind and stage, when the messages of each slot are all there; where a slot gets
    several, how many are still to be sent, and when the last of those sent arrives."""

    ready_s: list[float]
    left: list[int]
    last_s: list[float]


class _Port(NamedTuple):
    """Where messages of one kind go from one stage to another.

    Message parts of slot k are ``parts[k % len(parts)]``. They are for slot k of the receiving
    stage; where its shares are numbered by its r2 replicas, for k // r1 * r2 + offset.
    """

    stage: int
    inbox: _Inbox
    parts: list[list[_Part]]
    r1: int
    r2: int


PlainSends = list[tuple[int, list[int], list[float], list[float], int, float, float]]
"""Of an operation's messages: target, those still to be sent to it and when the last is there, its
`ready_s`, wire, and seconds on it and on the way."""

PlainLane = tuple[list[float], list[float], list[float], float, PlainSends]
"""`free_s`, `ready_s` and `starts_s` of an operation's stage, seconds, and its messages."""


class _Durations(NamedTuple):
    """What operations take, in multiples of a grid.

    Attributes:
        seconds: per kind, stage and replica, of one share.
        update_s: per stage.
    """

    grid_s: float
    seconds: list[list[list[float]]]
    update_s: list[float]


def _on_grid(seconds: float, grid_s: float) -> float:
    """The nearest multiple."""
    return round(seconds / grid_s) * grid_s


def _durations(pipeline: Pipeline) -> _Durations:
    stages = range(pipeline.stages)
    routes = [route for link in pipeline.links for route in link.all_routes]
    longest = max(
        *pipeline.forward_s,
        *pipeline.backward_s,
        *(max(route.forward_s, route.backward_s, route.latency_s) for route in routes),
    )
    grid_s = 2.0 ** (frexp(longest)[1] - _GRID_BITS) if longest else 1.0
    by_kind = (
        pipeline.forward_s,
        [pipeline.backward_op_s(s) for s in stages],
        [0.0 for _ in stages],
        [pipeline.weight_op_s(s) for s in stages],
    )
    paces = pipeline.paces or [(1.0,) * pipeline.replicas(s) for s in stages]
    seconds = [
        [[_on_grid(times[s] * pace, grid_s) for pace in paces[s]] for s in stages]
        for times in by_kind
    ]
    update_s = [_on_grid(pipeline.update_op_s(s), grid_s) for s in stages]
    return _Durations(grid_s, seconds, update_s)


def _shares(pipeline: Pipeline) -> tuple[list[list[int]], list[list[int]]]:
    """Per kind and stage, slots of one operation, and of a mini-batch."""
    n, r = pipeline.micro_batches, [pipeline.replicas(s) for s in range(pipeline.stages)]
    ones, whole = [1] * len(r), pipeline.variant.whole_mini_batches
    micro = pipeline.variant.backward_unit == "micro"
    backward_width, backward_slots = (ones, [n] * len(r)) if micro else (r, r)
    # By kind: forwards, backwards, updates, weight parts.
    width = [r if whole else ones, backward_width, ones, backward_width]
    slots = [r if whole else [n] * len(r), backward_slots, ones, backward_slots]
    return width, slots


class SimulatedClock:
    """Start and end times of operations, whose drivers run them one by one in any order that
    respects messages.

    Attributes:
        durations: what operations take.
        width: per kind and stage, slots of one operation: 1, or r where all replicas take part.
        slots: per kind and stage, slots of a mini-batch.
        free_s: per stage and replica, when its device has finished what it was given so far.
        ready_s: per kind, stage and slot, when its messages are all there; infinite while some
            aren't even sent.
        starts_s: per kind, stage and slot (of updates: mini-batch), when it started.
        blocking: whether some messages keep devices busy.
        contended: whether messages wait for other stages' messages, or keep devices busy. Then
            `run` doesn't send: what is in `sending` is to be delivered in its time's sequence, and
            operations are to be run in that of their starts.
        sent: where all messages are noted; None: they aren't.
        last: the mini-batch that an update follows in any case; None: there is no such.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        stages = range(pipeline.stages)
        r = self.replicas = [pipeline.replicas(s) for s in stages]
        self.durations = _durations(pipeline)
        self.width, self.slots = _shares(pipeline)
        # Stages on one device share its list.
        lanes: dict[int, list[float]] = {}
        devices = pipeline.placement or stages
        self.free_s = [
            lanes.setdefault(d, [0.0] * count) for d, count in zip(devices, r, strict=True)
        ]
        self.ready_s: list[list[list[float]]] = [[[] for _ in stages] for _ in range(4)]
        self.starts_s: list[list[list[float]]] = [[[] for _ in stages] for _ in range(4)]
        self._inboxes = [[_Inbox(self.ready_s[kind][s], [], []) for s in stages] for kind in (0, 1)]
        self._due = [[0] * len(r), [0] * len(r)]
        self.ports: list[list[list[_Port]]] = [[[] for _ in stages] for _ in range(4)]
        self.sending: list[tuple[float, int, int, int, int]] = []
        self.sent: list[SimulatedMessage] | None = None
        self.last: int | None = None
        self._sent = 0
        self._held: dict[tuple[int, int], int] = {}
        self._connect()
        self._lanes = [
            [
                (self.free_s[s], self.ready_s[kind][s], self.starts_s[kind][s], seconds[s])
                for s in stages
            ]
            for kind, seconds in enumerate(self.durations.seconds)
        ]

    @cached_property
    def plain(self) -> list[list[PlainLane | None]]:
        """Per kind and stage, what running an operation takes where that is one share of one
        replica, whose messages go to one replica each and aren't noted; None where it isn't."""
        stages = range(len(self.replicas))
        if self.blocking or self.pipeline.late or self.sent is not None:
            return [[None for _ in stages] for _ in range(4)]
        return [[self._plain(kind, s) for s in stages] for kind in range(4)]

    def _plain(self, kind: int, s: int) -> PlainLane | None:
        free, ready_s, starts_s, seconds = self._lanes[kind][s]
        sends = []
        for t, (there_s, left, last_s), parts, _, _ in self.ports[kind][s]:
            if len(parts) > 1:
                return None
            for part in parts[0]:
                sends.append((t, left, last_s, there_s, part.wire, part.wire_s, part.latency_s))
        alone = len(free) == 1 and all(self.replicas[send[0]] == 1 for send in sends)
        return (free, ready_s, starts_s, seconds[0], sends) if alone else None

    def _connect(self) -> None:
        """Find out what goes where, link by link: activations, then gradients."""
        wires: dict[Hashable, int] = {}
        links = self.pipeline.links
        for link in links:
            self._open_port(FORWARDS, link, wires)
            if link.has_gradient:
                self._open_port(BACKWARDS, link, wires)
        self.wire_free = [0.0] * len(wires)
        self.blocking = any(not route.overlaps for link in links for route in link.all_routes)
        self.contended = self.blocking or len(wires) < sum(len(link.wires) for link in links)

    def _open_port(self, kind: int, link: Link, wires: dict[Hashable, int]) -> None:
        """`wires`: numbers of those there are so far; new ones are added."""
        pipeline, back, grid_s = self.pipeline, kind == BACKWARDS, self.durations.grid_s
        s, t = (link.target, link.source) if back else (link.source, link.target)
        r1, r2 = self.replicas[s], self.replicas[t]
        shared = self.width[kind][s] > 1 or self.width[kind][t] > 1
        # A mini-batch's backward gives the gradients of all its micro-batches at once.
        micro = pipeline.variant.backward_unit == "micro"
        held = 1 if micro else pipeline.messages_per_route(link)
        parts: list[list[_Part]] = [[] for _ in range(r1 if shared else lcm(r1, r2))]
        for x in link.all_routes:
            source, target = (x.target, x.source) if back else (x.source, x.target)
            wire = x.wire_back if back else x.wire
            part = _Part(
                offset=target,
                wire=wires.setdefault(wire, len(wires)),
                wire_s=_on_grid(x.backward_s * held if back else x.forward_s, grid_s),
                latency_s=_on_grid(x.latency_s, grid_s),
                blocks=None if x.overlaps else (self.free_s[t], target),
            )
            for k in range(len(parts)):
                if k % r1 == source and (shared or k % r2 == target):
                    parts[k].append(part)
        self.ports[kind][s].append(_Port(t, self._inboxes[kind][t], parts, r1, r2 if shared else 0))
        self._due[kind][t] += r1 // gcd(r1, r2) if shared else 1

    @property
    def mini_batches(self) -> int:
        """How many there is room for."""
        return len(self.starts_s[UPDATES][0])

    def grow(self, mini_batches: int) -> None:
        """Make room for so many mini-batches in all."""
        more = mini_batches - self.mini_batches
        if more <= 0:
            return
        for s in range(len(self.replicas)):
            for kind in (FORWARDS, BACKWARDS):
                count, due = more * self.slots[kind][s], self._due[kind][s]
                self.ready_s[kind][s] += [inf if due else 0.0] * count
                self.starts_s[kind][s] += [NOT_YET] * count
                if due > 1:
                    self._inboxes[kind][s].left.extend([due] * count)
                    self._inboxes[kind][s].last_s.extend([0.0] * count)
            for kind in (WEIGHTS,) if self.pipeline.variant.split_backward else ():
                count = more * self.slots[kind][s]
                self.ready_s[kind][s] += [0.0] * count
                self.starts_s[kind][s] += [NOT_YET] * count
            self.starts_s[UPDATES][s] += [NOT_YET] * more

    # Running -------------------------------------------------------------------------------

    def run(self, kind: int, s: int, slot: int) -> list[tuple[int, int]]:
        """Run a share whose messages have all been sent.

        Returns:
            (stage, slot) of each share of the same kind that now has all its messages.
        """
        free, ready_s, starts_s, seconds = self._lanes[kind][s]
        j = slot % len(free)
        start = ready_s[slot]
        if free[j] > start:
            start = free[j]
        starts_s[slot] = start
        end = start + seconds[j]
        free[j] = end
        if self.pipeline.late:
            return self._post_late(kind, s, slot, start, end)
        return self._post(kind, s, slot, end) if self.contended else self._send(kind, s, slot, end)

    def _post(self, kind: int, s: int, slot: int, now: float) -> list[tuple[int, int]]:
        """Send a share's messages now, or have them sent in their time's sequence."""
        if self.contended:
            self._sent += 1
            heapq.heappush(self.sending, (now, self._sent, kind, s, slot))
            return []
        return self._send(kind, s, slot, now)

    def _post_late(
        self, kind: int, s: int, slot: int, start: float, end: float
    ) -> list[tuple[int, int]]:
        """What `Pipeline.late` holds back, by stage and replica, goes as the replica's next
        operation begins."""
        r = self.replicas[s]
        held = self._held.pop((s, slot % r), None)
        sent = [] if held is None else self._post(FORWARDS, s, held, start)
        nth = slot % self.slots[FORWARDS][s] // r
        if kind == FORWARDS and nth >= self.pipeline.late[s]:
            self._held[s, slot % r] = slot
            return sent
        return sent + self._post(kind, s, slot, end)

    def deliver(self) -> tuple[int, int, list[tuple[int, int]]]:
        """Send the messages of the share that has ended first. Returns kind, stage, as `run`."""
        end, _, kind, s, slot = heapq.heappop(self.sending)
        return kind, s, self._send(kind, s, slot, end)

    def updates_after(self, mini_batch: int) -> bool:
        """Whether an update follows it; else replicas don't wait for one another."""
        return self.pipeline.updates_after(mini_batch) or mini_batch == self.last

    def update(self, s: int, mini_batch: int) -> None:
        """All replicas of a stage sum their gradients and update, where an update is due."""
        free = self.free_s[s]
        start = self.starts_s[UPDATES][s][mini_batch] = max(free)
        if self.updates_after(mini_batch):
            for j in range(len(free)):
                free[j] = start + self.durations.update_s[s]

    def _send(self, kind: int, s: int, slot: int, now: float) -> list[tuple[int, int]]:
        complete = []
        wire_free, sent = self.wire_free, self.sent
        for t, (ready_s, left, last_s), parts, r1, r2 in self.ports[kind][s]:
            for offset, wire, wire_s, latency_s, blocks in parts[slot % len(parts)]:
                begin = wire_free[wire]
                if now > begin:
                    begin = now
                if blocks is not None:
                    begin = self._block(s, slot, blocks, begin, wire_s)
                gone = begin + wire_s
                wire_free[wire] = gone
                arrival = gone + latency_s
                if sent is not None:
                    sent.append(SimulatedMessage(kind, s, slot, t, offset, now, begin, arrival))
                k = slot // r1 * r2 + offset if r2 else slot
                if left:
                    left[k] -= 1
                    if arrival > last_s[k]:
                        last_s[k] = arrival
                    if left[k]:
                        continue
                    arrival = last_s[k]
                ready_s[k] = arrival
                complete.append((t, k))
        return complete

    def _block(
        self, s: int, slot: int, receiver: tuple[list[float], int], begin: float, wire_s: float
    ) -> float:
        """Both devices are busy with a transfer as soon as both are free. Returns its start."""
        sending, receiving = self.free_s[s], receiver[0]
        j1, j2 = slot % len(sending), receiver[1]
        begin = max(begin, sending[j1], receiving[j2])
        sending[j1] = receiving[j2] = begin + wire_s
        return begin
