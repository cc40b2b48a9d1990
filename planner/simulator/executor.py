"""Running given lists of operations on the clock."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from math import inf

from ..systems.operations import (
    BACKWARD,
    BACKWARDS,
    FORWARD,
    FORWARDS,
    UPDATES,
    WEIGHT,
    WEIGHTS,
    Op,
)
from .clock import SimulatedClock

Code = tuple[int, int]
"""Kind and first slot of an operation; of an update, kind and mini-batch."""


def codes(clock: SimulatedClock, s: int, ops: Iterable[Op]) -> list[Code]:
    """A stage's operations as the clock numbers them."""
    found = []
    forwards, backwards = clock.slots[FORWARDS][s], clock.slots[BACKWARDS][s]
    for kind, b, i in ops:
        if kind == FORWARD:
            found.append((FORWARDS, b * forwards + (i or 0)))
        elif kind == BACKWARD:
            found.append((BACKWARDS, b * backwards + (i or 0)))
        elif kind == WEIGHT:
            found.append((WEIGHTS, b * backwards + (i or 0)))
        else:
            found.append((UPDATES, b))
    return found


def coded(
    clock: SimulatedClock, s: int, kinds: Iterable[int], done: Sequence[int] = (0, 0, 0, 0)
) -> list[Code]:
    """A stage's operations of these kinds, after so many of each, as the clock numbers them."""
    counts = list(done)
    widths = [width[s] for width in clock.width]
    found = []
    for kind in kinds:
        found.append((kind, counts[kind] * widths[kind]))
        counts[kind] += 1
    return found


class ListExecutor:
    """Runs lists in any sequence that respects messages, where none wait for one another.

    Attributes:
        lists: per stage, what it runs; may be added to.
        done: per stage, how much of it has run.
        sequence: (stage, position) of all that has run.
    """

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.lists: list[list[Code]] = [[] for _ in clock.replicas]
        self.done = [0 for _ in clock.replicas]
        self.sequence: list[tuple[int, int]] = []

    def run(self) -> bool:
        """Run as much as can be. Returns whether that was all."""
        clock, ready_s = self.clock, self.clock.ready_s
        pending = list(range(len(self.lists)))[::-1]
        waiting = [False] * len(pending)
        while pending:
            s = pending.pop()
            ops, p = self.lists[s], self.done[s]
            while p < len(ops):
                kind, slot = ops[p]
                if kind == UPDATES:
                    clock.update(s, slot)
                else:
                    end = slot + clock.width[kind][s]
                    if inf in ready_s[kind][s][slot:end]:
                        break
                    while slot < end:
                        for t, _ in clock.run(kind, s, slot):
                            if waiting[t]:
                                waiting[t] = False
                                pending.append(t)
                        slot += 1
                self.sequence.append((s, p))
                p += 1
            self.done[s] = p
            waiting[s] = True
        return all(done == len(ops) for done, ops in zip(self.done, self.lists, strict=True))


class _Worker:
    """One replica of a stage, which runs its own part of the stage's list.

    Attributes:
        ops: kind, slot, and position in the stage's list.
    """

    def __init__(self, s: int, j: int) -> None:
        self.stage, self.replica = s, j
        self.ops: list[tuple[int, int, int]] = []
        self.done = 0
        self.entry: tuple[float, int, int, int] | None = None


def _workers(clock: SimulatedClock, s: int, codes: Iterable[Code]) -> list[_Worker]:
    """A stage's replicas, with its list dealt among them."""
    r = clock.replicas[s]
    found = [_Worker(s, j) for j in range(r)]
    for position, (kind, slot) in enumerate(codes):
        if kind == UPDATES:
            for worker in found:
                worker.ops.append((kind, slot, position))
        elif clock.width[kind][s] > 1:
            for worker in found:
                worker.ops.append((kind, slot + worker.replica, position))
        else:
            found[slot % r].ops.append((kind, slot, position))
    return found


class ContendedExecutor:
    """Runs lists as time goes by, where messages of several stages wait for one another.

    Attributes:
        done: per stage, operations that all replicas concerned have run.
        sequence: (stage, position) in which they were run, each when its last share was.
        updates: per stage, mini-batches that it has updated after.
        ended: whether some replica has run all that it has to.
        now_s: all that starts before has been run.
    """

    def __init__(self, clock: SimulatedClock, lists: list[list[Code]]) -> None:
        self.clock = clock
        self.done = [0 for _ in lists]
        self.updates = [0 for _ in lists]
        self.ended = False
        self.now_s = 0.0
        self.sequence: list[tuple[int, int]] = []
        self._shares: dict[tuple[int, int], int] = {}
        self._heap: list[tuple[float, int, int, int]] = []
        # Per stage, replicas that have come to their next update.
        self._arrived: list[set[int]] = [set() for _ in lists]
        self._workers = [_workers(clock, s, codes) for s, codes in enumerate(lists)]
        for workers in self._workers:
            for worker in workers:
                self._offer(worker)

    def run(self, mini_batches: int) -> bool:
        """Go on until every stage has updated after so many; False when nothing is left first."""
        clock, heap = self.clock, self._heap
        behind = sum(done < mini_batches for done in self.updates)
        while behind:
            if not heap and not clock.sending:
                return False
            if clock.sending and (not heap or clock.sending[0][0] <= heap[0][0]):
                self._deliver()
                continue
            entry = heapq.heappop(heap)
            worker = self._workers[entry[2]][entry[3]]
            if worker.entry is entry:
                core_s = clock.core_s(worker.stage, worker.replica)
                if core_s > entry[0]:
                    worker.entry = entry = (core_s, *entry[1:])
                    heapq.heappush(heap, entry)
                    continue
                self.now_s = entry[0]
                self._run(worker)
                updated = worker.ops[worker.done - 1][0] == UPDATES
                behind -= updated and self.updates[worker.stage] == mini_batches
        return True

    def _next(self, worker: _Worker) -> tuple[int, int, int] | None:
        return worker.ops[worker.done] if worker.done < len(worker.ops) else None

    def _offer(self, worker: _Worker) -> None:
        """Put what the replica runs next into the heap, as soon as it is known when it can."""
        worker.entry = None
        todo = self._next(worker)
        if todo is None:
            self.ended = True
            return
        s, j = worker.stage, worker.replica
        kind, slot, _ = todo
        if kind == UPDATES:
            self._arrived[s].add(j)
            if len(self._arrived[s]) < len(self._workers[s]):
                return
            start = max(self.clock.free_s[s])
        else:
            start = max(self.clock.free_s[s][j], self.clock.ready_s[kind][s][slot])
            if start == inf:
                return
        worker.entry = entry = (start, int(kind == FORWARDS), s, j)
        heapq.heappush(self._heap, entry)

    def _run(self, worker: _Worker) -> None:
        s = worker.stage
        kind, slot, position = worker.ops[worker.done]
        if kind == UPDATES:
            self.clock.update(s, slot)
            self.updates[s] += 1
            self._finish(s, position)
            self._arrived[s].clear()
            for other in self._workers[s]:
                other.done += 1
                self._offer(other)
            return
        self.clock.run(kind, s, slot)
        shares = self._shares[s, position] = self._shares.get((s, position), 0) + 1
        if shares == self.clock.width[kind][s]:
            self._finish(s, position)
        worker.done += 1
        self._offer(worker)

    def _finish(self, s: int, position: int) -> None:
        self.done[s] += 1
        self.sequence.append((s, position))
        self._shares.pop((s, position), None)

    def _deliver(self) -> None:
        kind, s, complete = self.clock.deliver()
        for t, slot in complete:
            self._offer(self._workers[t][slot % self.clock.replicas[t]])
        if not self.clock.blocking:
            return
        # Where transfers don't overlap computing, they have moved what both stages do next.
        for t in (s, *(port.stage for port in self.clock.ports[kind][s])):
            for worker in self._workers[t]:
                self._offer(worker)
