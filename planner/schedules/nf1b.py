"""The list schedule of nF1B (TiMePReSt; the rule that orders it is our reading).

At every step the operation that can start earliest runs; ties go to backwards, then to the
lower stage. A forward of a new mini-batch needs room under the stage's in-flight limit. The
backward of a stage's replicas can start when its last share can.

Where devices have several stages, it is the operation of all of a device's stages that can start
earliest; ties go to backwards, then to the stage nearer to the output. An update follows its
stage's backward at once. (The rule is ours: no publication of such schedules without a flush was
found.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from ..simulator.clock import SimulatedClock
from ..simulator.event_loop import EventLoop, Offer
from ..simulator.pipeline import Pipeline
from ..systems.operations import BACKWARDS, FORWARDS, UPDATES

SAME = 1 + 1e-10
"""Starts that differ by less are a tie: sums of the same times differ by rounding."""

_Entry = tuple[float, int, int, int]
"""Start; -1 for updates, 0 for backwards, 1 for forwards; what ties go by, and the stage."""


class ListScheduler(EventLoop):
    """Makes the schedule of all stages, operation by operation, and the times with it. A lane is a
    stage.

    Attributes:
        kinds: per stage, kinds of what it has run. Forwards and backwards follow their numbers.
        turns: where devices have several stages: per device, the stages that they are of.
        forwards: per stage, micro-batches whose forward it has run.
    """

    def __init__(self, pipeline: Pipeline, mini_batches: int) -> None:
        super().__init__(SimulatedClock(pipeline), pipeline.stages)
        # One more: what comes after the last forward isn't ready.
        self.clock.grow(mini_batches + 1)
        stages = range(pipeline.stages)
        self.kinds: list[list[int]] = [[] for _ in stages]
        devices = pipeline.stages_of
        several = len(devices) < len(stages)
        self.turns: list[list[int]] = [[] for _ in devices] if several else []
        self._rank = [-s if several else s for s in stages]
        self._turns_of = [self.turns[d] for d in pipeline.placement] if several else []
        # Stages that share a stage's device with it.
        self._others = [tuple(t for t in pipeline.beside(s) if t != s) for s in stages]
        # Where replicas share every mini-batch, each runs a part of every forward.
        self._whole = pipeline.variant.whole_mini_batches
        self._parts = self.clock.width[FORWARDS]
        self.forwards = [0 for _ in stages]
        self._micro_batches = pipeline.micro_batches
        self._end = mini_batches * pipeline.micro_batches
        # A forward of micro-batch f needs f < room; the next backward needs f ≥ needed.
        self._limits = pipeline.limits
        self._room = [min(limit * self._micro_batches, self._end) for limit in pipeline.limits]
        self._needed = [self._micro_batches for _ in stages]
        self._update_due = [False for _ in stages]
        for s in stages:
            self._offer(s)

    @property
    def ended(self) -> bool:
        """Whether some stage has run forward all there is."""
        return max(self.forwards) == self._end

    def _take(self, offer: Offer) -> int:
        _, rank, _, s = offer
        clock, updated = self.clock, 0
        if self.turns:
            last_s = offer[0] * SAME
            for other in [self._current[t] for t in self._others[s]]:
                if other is not None and other[0] <= last_s and other[1:] < offer[1:]:
                    offer = other
            self.now_s, rank, _, s = offer
            self._turns_of[s].append(s)
        if rank > 0:
            f = self.forwards[s]
            self.forwards[s] = f + 1
            self.kinds[s].append(FORWARDS)
            if self._whole:
                for k in range(f * self._parts[s], (f + 1) * self._parts[s]):
                    self._arrived(FORWARDS, clock.run(FORWARDS, s, k))
            else:
                for t, slot in clock.run(FORWARDS, s, f):
                    if slot == self.forwards[t]:
                        self._offer(t)
        elif self._update_due[s]:
            updated = self._update(s)
        else:
            self._backward(s)
        self._offer(s)
        for t in self._others[s]:
            self._offer(t)
        return updated

    def _offer(self, s: int) -> None:
        """Put what the stage would run next into the heap."""
        clock = self.clock
        free = clock.free_s[s]
        if self._update_due[s]:
            # Where no update follows, replicas needn't wait for one another.
            start = max(free) if clock.updates_after(self.updates[s]) else min(free)
            self._current[s] = entry = (start, -1, self._rank[s], s)
            heapq.heappush(self._heap, entry)
            return
        if self._others[s] and any(self._update_due[t] for t in self._others[s]):
            self._current[s] = None
            return
        f = self.forwards[s]
        start, rank = inf, 1
        if f < self._room[s]:
            if self._whole:
                parts = slice(f * self._parts[s], (f + 1) * self._parts[s])
                start, busy = max(clock.ready_s[FORWARDS][s][parts]), max(free)
            else:
                start = clock.ready_s[FORWARDS][s][f]
                busy = free[f % len(free)]
            if busy > start:
                start = busy
        if f >= self._needed[s]:
            last_start = clock.ready_s[BACKWARDS][s][self.updates[s]]
            if len(free) > 1:
                # When the last replica has what it needs.
                slots = slice(self.updates[s] * len(free), (self.updates[s] + 1) * len(free))
                last_start = max(clock.ready_s[BACKWARDS][s][slots])
            if last_start < inf:
                busy = max(free)
                if busy > last_start:
                    last_start = busy
                if last_start <= start * SAME:
                    start, rank = last_start, 0
        if start < inf:
            self._current[s] = entry = (start, rank, self._rank[s], s)
            heapq.heappush(self._heap, entry)
        else:
            self._current[s] = None

    def _backward(self, s: int) -> None:
        b, r = self.updates[s], self.clock.replicas[s]
        self.kinds[s].append(BACKWARDS)
        self._update_due[s] = True
        for k in range(b * r, (b + 1) * r):
            self._arrived(BACKWARDS, self.clock.run(BACKWARDS, s, k))

    def _update(self, s: int) -> int:
        b = self.updates[s]
        self.kinds[s].append(UPDATES)
        self.clock.update(s, b)
        self._update_due[s] = False
        self.updates[s] = b + 1
        self._room[s] = min((b + 1 + self._limits[s]) * self._micro_batches, self._end)
        self._needed[s] += self._micro_batches
        return b + 1

    def _arrived(self, kind: int, complete: Sequence[tuple[int, int]]) -> None:
        """Offer anew what waits for one of these messages."""
        for t, slot in complete:
            if kind == FORWARDS:
                waits, number = self.forwards[t], slot // self._parts[t]
            else:
                waits, number = self.updates[t], slot // self.clock.replicas[t]
            if waits == number:
                self._offer(t)

    def _lanes(self, s: int) -> tuple[int, ...]:
        return (s, *self._others[s])
