"""The list schedule of systems whose backward takes a micro-batch, several stages on a device.

At every step the operation that can start earliest runs, of all those of a device's stages; ties go
to backwards, then to the stage nearer to the output. A stage keeps no more micro-batches than its
part of the system's rule says. Weight parts of split backwards run when a device would be idle, or
when a forward needs their room. (Our reading, where the system's own rule is for one stage per
device.)

Index letters: N micro-batches; f, b, w micro-batches that a stage has run forward, backward, and
the weight part of.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import inf

from ..simulator.clock import SimulatedClock
from ..simulator.event_loop import EventLoop, Offer
from ..simulator.pipeline import Pipeline
from ..systems.operations import BACKWARDS, FORWARDS, UPDATES, WEIGHTS, Rows, row_of
from .nf1b import SAME
from .zero_bubble import GAP

_FIRST, _SOONER, _BETWEEN, _LATER, _LAST = range(5)

_Entry = tuple[float, int, int, int, int, int]
"""Start; what ties go by, twice; kind, stage and device."""


class MicroBatchScheduler(EventLoop):
    """Makes the schedule of all stages, operation by operation, and the times with it. A lane is a
    device.

    Attributes:
        kinds: per stage, kinds of what it has run.
        turns: per device, the stages of what it has run.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        mini_batches: int,
        keep: Sequence[int],
        most_kept: Sequence[int] | None = None,
        *,
        forwards_first: bool = False,
    ) -> None:
        """
        Args:
            keep: per stage, micro-batches that it may keep at once, all its replicas together.
            most_kept: per device, those that all its stages together may; None: any.
            forwards_first: ties go to forwards, then to weight parts that a forward waits for to
                have room, then to backwards of the stage nearer to the input.
        """
        self._devices, variant = pipeline.stages_of, pipeline.variant
        super().__init__(SimulatedClock(pipeline), len(self._devices))
        self.pipeline, stages = pipeline, pipeline.stages
        # One more: what comes after the last forward isn't ready.
        self.clock.grow(mini_batches + 1)
        self.kinds: list[list[int]] = [[] for _ in range(stages)]
        self._counts = {kind: [0] * stages for kind in (FORWARDS, BACKWARDS, WEIGHTS)}
        self._forwards, self._backwards, self._weights = self._counts.values()
        self._device_of = {s: d for d, mine in enumerate(self._devices) for s in mine}
        self.turns: list[list[int]] = [[] for _ in self._devices]
        self._n = pipeline.micro_batches
        self._end = mini_batches * self._n
        self._keep, self._most_kept = keep, most_kept
        self._split, self._flushes = variant.split_backward, variant.flushes
        self._all_forward = variant.forwards_first
        # What a stage keeps a micro-batch until.
        self._done = self._weights if self._split else self._backwards
        self._forwards_first = forwards_first
        for d in range(len(self._devices)):
            self._offer(d)

    def rows(self) -> Rows:
        """Per device, kinds and stages of what it has run, updates left out."""
        found = []
        for turns in self.turns:
            upcoming = {s: iter(self.kinds[s]) for s in turns}
            both = [(next(upcoming[s]), s) for s in turns]
            found.append(row_of((kind, s) for kind, s in both if kind != UPDATES))
        return tuple(found)

    @property
    def ended(self) -> bool:
        """Whether some stage has run forward all there is."""
        return max(self._forwards) == self._end

    def _lanes(self, s: int) -> tuple[int, ...]:
        return (self._device_of[s],)

    def _arrived(self, kind: int, complete: Sequence[tuple[int, int]]) -> None:
        following = self._forwards if kind == FORWARDS else self._backwards
        # Others than what a stage would run next change nothing yet.
        for d in {self._device_of[t] for t, slot in complete if slot == following[t]}:
            self._offer(d)

    def _take(self, offer: Offer) -> int:
        _, _, _, kind, s, d = offer
        updated = 0
        self.kinds[s].append(kind)
        self.turns[d].append(s)
        complete: list[tuple[int, int]] = []
        if kind == UPDATES:
            self.clock.update(s, self.updates[s])
            self.updates[s] = updated = self.updates[s] + 1
        else:
            counts = self._counts[kind]
            complete = self.clock.run(kind, s, counts[s])
            counts[s] += 1
        self._offer(d)
        if complete:
            self._arrived(kind, [(t, slot) for t, slot in complete if self._device_of[t] != d])
        return updated

    def _offer(self, d: int) -> None:
        """Put what the device would run next into the heap."""
        found: list[_Entry] = []
        for s in self._devices[d]:
            self._next(s, d, found)
        if self._split:
            soonest = min(found)[0] if found else inf
            for s in self._devices[d]:
                if self._weights[s] < self._backwards[s]:
                    found.append(self._weight(s, d, soonest))
        entry = min(found) if found else None
        if entry is not None:
            last_s = entry[0] * SAME
            for other in found:
                if other[0] <= last_s and other[1:] < entry[1:]:
                    entry = other
            heapq.heappush(self._heap, entry)
        self._current[d] = entry

    def _next(self, s: int, d: int, found: list[_Entry]) -> None:
        """Add a stage's update, or its next backward and forward, where they can be told to
        start."""
        n, updates, free = self._n, self.updates[s], self.clock.free_s[s]
        wanted = (updates + 1) * n
        if self._done[s] >= wanted and self._update_due(s, d, wanted):
            found.append((max(free), _FIRST, -s, UPDATES, s, d))
            return
        f, b, replicas = self._forwards[s], self._backwards[s], len(free)
        if b < f and (not self._all_forward or f >= (b // n + 1) * n):
            start = self.clock.ready_s[BACKWARDS][s][b]
            if start < inf:
                rank, tie = (_LATER, s) if self._forwards_first else (_SOONER, -s)
                found.append((max(start, free[b % replicas]), rank, tie, BACKWARDS, s, d))
        if f >= self._end or (self._flushes and f >= wanted):
            return
        start = self.clock.ready_s[FORWARDS][s][f]
        if start < inf and f // n - b // n < self.pipeline.limits[s]:
            start = max(start, free[f % replicas])
            if self._room(s, d):
                rank = _SOONER if self._forwards_first else _LATER
                found.append((start, rank, -s, FORWARDS, s, d))
            elif self._forwards_first:
                found += self._making_room(d, start)

    def _making_room(self, d: int, start: float) -> list[_Entry]:
        """The device's oldest weight part, for a forward that could run but for room."""
        waiting = [s for s in self._devices[d] if self._weights[s] < self._backwards[s]]
        if not self._split or not waiting:
            return []
        s = min(waiting, key=lambda t: (self._weights[t], t))
        free = self.clock.free_s[s]
        begin = max(start, free[self._weights[s] % len(free)])
        return [(begin, _BETWEEN, -s, WEIGHTS, s, d)]

    def _update_due(self, s: int, d: int, wanted: int) -> bool:
        """Whether a stage that has run all micro-batches of its next update may update: where
        pipelines flush, a device's stages do together."""
        if not self._flushes:
            return True
        done, updates, own = self._done, self.updates, self.updates[s]
        return all(done[t] >= wanted or updates[t] > own for t in self._devices[d])

    def _room(self, s: int, d: int) -> bool:
        """Whether a stage may keep one more micro-batch."""
        forwards, done, mine = self._forwards, self._done, self._devices[d]
        if forwards[s] - done[s] >= self._keep[s]:
            return False
        if self._most_kept is None:
            return True
        kept = 0
        for t in mine:
            count = forwards[t] - done[t]
            # One place for each other stage, so that what has begun can always go on.
            kept += count or (t > s and forwards[t] < self._end)
        return kept < self._most_kept[d]

    def _weight(self, s: int, d: int, soonest: float) -> _Entry:
        """A stage's next weight part; what else the device has next starts at `soonest`."""
        free, done = self.clock.free_s[s], self._weights[s]
        start = free[done % len(free)]
        if soonest - start < GAP * self.clock.durations.seconds[WEIGHTS][s][done % len(free)]:
            # After what comes first.
            start = max(start, soonest)
        return (start, _LAST, done, WEIGHTS, s, d)
