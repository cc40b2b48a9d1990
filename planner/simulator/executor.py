"""Simulation of given lists of operations, one list for each device."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from ...profiles.errors import ScheduleError
from ..systems.operations import FORWARDS, KINDS, UPDATES, Op, Row, Schedule, op_text
from .clock import PlainLane, PlainSends, SimulatedClock, SimulatedMessage
from .event_loop import EventLoop, Offer
from .pipeline import Pipeline

Task = tuple[int, int, int]
"""Kind and first slot of an operation, of an update its mini-batch; and its stage."""


@dataclass(frozen=True)
class Executed:
    """A simulated schedule: the clock with all times, and the sequence in which operations ran.

    Attributes:
        devices: per device, (stage, operation), first to last.
        tasks: the same, as the clock numbers them.
        sequence: (device, position) in an order in which one process could run them all.
    """

    clock: SimulatedClock
    devices: Sequence[Sequence[tuple[int, Op]]]
    tasks: Sequence[Sequence[Task]]
    sequence: Sequence[tuple[int, int]]


def execute(
    pipeline: Pipeline, schedule: Schedule, sent: list[SimulatedMessage] | None = None
) -> Executed:
    """Simulate a schedule from its first operation to its last.

    Args:
        sent: where all messages are noted.

    Raises:
        ScheduleError: some operation waits for a message that is never sent (a deadlock); the
            message names the operations that every stuck stage waits at.
    """
    devices = schedule.on_devices()
    clock = SimulatedClock(pipeline)
    clock.sent = sent
    clock.last = max((op.mini_batch for ops in devices for _, op in ops), default=-1)
    clock.grow(1 + clock.last)
    tasks = codes(clock, devices)
    run: ListExecutor | ContendedExecutor
    if clock.contended:
        run = ContendedExecutor(clock, tasks)
        run.run(clock.mini_batches)
    else:
        run = ListExecutor(clock)
        run.lists = tasks
        run.run()
    stuck = [
        op_text(*ops[done]) for ops, done in zip(devices, run.done, strict=True) if done < len(ops)
    ]
    if stuck:
        raise ScheduleError(f"deadlock: these operations wait for each other: {', '.join(stuck)}")
    return Executed(clock, devices, tasks, run.sequence)


def codes(clock: SimulatedClock, devices: Iterable[Iterable[tuple[int, Op]]]) -> list[list[Task]]:
    """A schedule's operations as the clock's numbers, per device."""

    def task(s: int, op: Op) -> Task:
        kind = KINDS[op.kind]
        return kind, op.mini_batch * clock.slots[kind][s] + (op.micro_batch or 0), s

    return [[task(s, op) for s, op in ops] for ops in devices]


def coded(clock: SimulatedClock, row: Row, counts: dict[int, list[int]]) -> list[Task]:
    """A device's operations as the clock's numbers.

    Args:
        counts: by stage, operations of each kind before these; they are added.
    """
    found: list[Task] = []
    last, count, width = -1, [0, 0, 0, 0], [1, 1, 1, 1]
    for kind, s in zip(*row, strict=True):
        if s != last:
            count = counts.setdefault(s, [0, 0, 0, 0])
            width, last = [each[s] for each in clock.width], s
        k = count[kind]
        count[kind] = k + 1
        found.append((kind, k * width[kind], s))
    return found


def _send_plain(sends: PlainSends, wire_free: list[float], slot: int, now: float) -> list[int]:
    """As the clock sends a share's messages, where each is for one replica. Returns the stages that
    have all of theirs for the slot now."""
    complete = []
    for t, left, last_s, ready_s, wire, wire_s, latency_s in sends:
        gone = wire_free[wire]
        gone = (now if now > gone else gone) + wire_s
        wire_free[wire] = gone
        arrival = gone + latency_s
        if left:
            left[slot] -= 1
            if arrival > last_s[slot]:
                last_s[slot] = arrival
            if left[slot]:
                continue
            arrival = last_s[slot]
        ready_s[slot] = arrival
        complete.append(t)
    return complete


class ListExecutor:
    """Simulates lists in topological order of their messages, where no messages share a wire.

    Attributes:
        lists: per device, what it runs; may be added to.
        done: per device, how much of it has run.
        sequence: (device, position) of all that has run.
        now_s, ended: as an event loop has them; times go no such way here, and lists no such end.
    """

    now_s, ended = -inf, False

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        devices = clock.pipeline.stages_of
        self.lists: list[list[Task]] = [[] for _ in devices]
        self.done = [0 for _ in devices]
        self.sequence: list[tuple[int, int]] = []
        self._device_of = clock.pipeline.placement or range(len(devices))

    def run(self) -> bool:
        """Run as much as can be. Returns whether that was all."""
        clock, ready_s = self.clock, self.clock.ready_s
        device_of, widths = self._device_of, self.clock.width
        plain, wire_free = clock.plain, clock.wire_free
        pending = list(range(len(self.lists)))[::-1]
        waiting = [False] * len(pending)
        while pending:
            d = pending.pop()
            ops, p = self.lists[d], self.done[d]
            while p < len(ops):
                kind, slot, s = ops[p]
                complete: Sequence[int] = ()
                if kind == UPDATES:
                    clock.update(s, slot)
                elif (lane := plain[kind][s]) is not None:
                    # As the clock does it, without a call for each of very many.
                    free, ready, starts, seconds, sends = lane
                    start = ready[slot]
                    if start == inf:
                        break
                    if free[0] > start:
                        start = free[0]
                    starts[slot] = start
                    free[0] = end_s = start + seconds
                    if sends:
                        complete = _send_plain(sends, wire_free, slot, end_s)
                else:
                    slots = range(slot, slot + widths[kind][s])
                    if inf in ready_s[kind][s][slots.start : slots.stop]:
                        break
                    complete = [t for k in slots for t, _ in clock.run(kind, s, k)]
                for t in complete:
                    other = device_of[t]
                    if waiting[other]:
                        waiting[other] = False
                        pending.append(other)
                self.sequence.append((d, p))
                p += 1
            self.done[d] = p
            waiting[d] = True
        return all(done == len(ops) for done, ops in zip(self.done, self.lists, strict=True))


class _Worker:
    """One replica of a device's stages, which runs its own part of the device's list.

    Attributes:
        ops: kind, slot, stage, and position in the device's list.
    """

    def __init__(self, d: int, j: int) -> None:
        self.device, self.replica = d, j
        self.ops: list[tuple[int, int, int, int]] = []
        self.done = 0


def _workers(clock: SimulatedClock, d: int, tasks: Iterable[Task]) -> list[_Worker]:
    """A device's replicas, with its list dealt among them."""
    r = clock.replicas[clock.pipeline.stages_of[d][0]]
    found = [_Worker(d, j) for j in range(r)]
    for position, (kind, slot, s) in enumerate(tasks):
        if kind == UPDATES:
            for worker in found:
                worker.ops.append((kind, slot, s, position))
        elif clock.width[kind][s] > 1:
            for worker in found:
                worker.ops.append((kind, slot + worker.replica, s, position))
        else:
            found[slot % r].ops.append((kind, slot, s, position))
    return found


class ContendedExecutor(EventLoop):
    """Simulates lists by start time, where messages share wires or keep devices busy; ties go to
    what isn't a forward. A lane is a replica.

    Attributes:
        done: per device, operations that all replicas concerned have run.
        sequence: (device, position) in which they were run, each when its last share was.
        ended: whether some replica has run all that it has to.
    """

    def __init__(self, clock: SimulatedClock, lists: list[list[Task]]) -> None:
        parts = [_workers(clock, d, tasks) for d, tasks in enumerate(lists)]
        self._workers = [worker for part in parts for worker in part]
        super().__init__(clock, len(self._workers))
        firsts = [0, *accumulate(map(len, parts))]
        self._lanes_of = [range(first, end) for first, end in pairwise(firsts)]
        self.done = [0 for _ in lists]
        self.ended = False
        self.sequence: list[tuple[int, int]] = []
        self._shares: dict[tuple[int, int], int] = {}
        # Per device, replicas that have come to their next update.
        self._arrived_at: list[set[int]] = [set() for _ in lists]
        self._device_of = {s: d for d, mine in enumerate(clock.pipeline.stages_of) for s in mine}
        for lane in range(len(self._workers)):
            self._offer(lane)

    def run(self, mini_batches: int) -> bool:
        plain = [[lane for lane in mine if lane is not None] for mine in self.clock.plain]
        if any(len(mine) < len(self.updates) for mine in plain):
            return super().run(mini_batches)
        return self._run_plain(mini_batches, plain)

    def _run_plain(self, mini_batches: int, plain: Sequence[Sequence[PlainLane]]) -> bool:
        """The same where each device has one replica, without a call for each of very many."""
        clock, heap, current = self.clock, self._heap, self._current
        sending, wire_free = clock.sending, clock.wire_free
        workers, device_of, updates = self._workers, self._device_of, self.updates
        offer = self._offer_plain
        behind = sum(1 for done in updates if done < mini_batches)
        while behind:
            if sending and not (heap and heap[0][0] < sending[0][0]):
                end_s, _, kind, s, slot = heapq.heappop(sending)
                for t in _send_plain(plain[kind][s][-1], wire_free, slot, end_s):
                    if current[device_of[t]] is None:
                        offer(device_of[t])
                continue
            if not heap:
                return False
            self.now_s, _, lane = heapq.heappop(heap)
            worker = workers[lane]
            kind, slot, s, position = worker.ops[worker.done]
            if kind == UPDATES:
                clock.update(s, slot)
                updates[s] += 1
                behind -= updates[s] == mini_batches
            else:
                free, _, starts, seconds, sends = plain[kind][s]
                starts[slot] = self.now_s
                free[0] = end_s = self.now_s + seconds
                if sends:
                    heapq.heappush(sending, (end_s, len(self.sequence), kind, s, slot))
            self.done[lane] += 1
            self.sequence.append((lane, position))
            worker.done += 1
            offer(lane)
        return True

    def _lanes(self, s: int) -> range:
        return self._lanes_of[self._device_of[s]]

    def _arrived(self, kind: int, complete: Sequence[tuple[int, int]]) -> None:
        for t, slot in complete:
            lanes = self._lanes_of[self._device_of[t]]
            self._offer(lanes[slot % len(lanes)])

    def _offer_plain(self, lane: int) -> None:
        """As `_offer`, where each device has one replica."""
        worker = self._workers[lane]
        if worker.done == len(worker.ops):
            self._current[lane], self.ended = None, True
            return
        kind, slot, s, _ = worker.ops[worker.done]
        start = self.clock.free_s[s][0]
        if kind != UPDATES and (ready := self.clock.ready_s[kind][s][slot]) > start:
            start = ready
        self._current[lane] = offer = None if start == inf else (start, kind == FORWARDS, lane)
        if offer is not None:
            heapq.heappush(self._heap, offer)

    def _offer(self, lane: int) -> None:
        """Put what the replica runs next, as soon as it is known when it can."""
        self._current[lane] = None
        worker = self._workers[lane]
        if worker.done == len(worker.ops):
            self.ended = True
            return
        d, j = worker.device, worker.replica
        kind, slot, s, _ = worker.ops[worker.done]
        if kind == UPDATES and not self.clock.updates_after(slot):
            start = self.clock.free_s[s][j]
        elif kind == UPDATES:
            self._arrived_at[d].add(j)
            if len(self._arrived_at[d]) < len(self._lanes_of[d]):
                return
            start = max(self.clock.free_s[s])
        else:
            start = max(self.clock.free_s[s][j], self.clock.ready_s[kind][s][slot])
            if start == inf:
                return
        self._current[lane] = offer = (start, int(kind == FORWARDS), lane)
        heapq.heappush(self._heap, offer)

    def _take(self, offer: Offer) -> int:
        lane: int = offer[-1]
        worker = self._workers[lane]
        d = worker.device
        kind, slot, s, position = worker.ops[worker.done]
        if kind == UPDATES and self.clock.updates_after(slot):
            self.clock.update(s, slot)
            self.updates[s] += 1
            self._finish(d, position)
            self._arrived_at[d].clear()
            for other in self._lanes_of[d]:
                self._workers[other].done += 1
                self._offer(other)
            return self.updates[s]
        wanted, updated = self.clock.width[kind][s], 0
        if kind == UPDATES:
            # No update follows: each replica goes on as soon as it is through.
            wanted = len(self._lanes_of[d])
        else:
            self.clock.run(kind, s, slot)
        shares = self._shares[d, position] = self._shares.get((d, position), 0) + 1
        if shares == wanted:
            if kind == UPDATES:
                self.clock.starts_s[UPDATES][s][slot] = self.now_s
                self.updates[s] += 1
                updated = self.updates[s]
            self._finish(d, position)
        worker.done += 1
        self._offer(lane)
        return updated

    def _finish(self, d: int, position: int) -> None:
        self.done[d] += 1
        self.sequence.append((d, position))
        self._shares.pop((d, position), None)
