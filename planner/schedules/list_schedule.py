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
from dataclasses import dataclass, field
from math import inf

from ..simulator.clock import SimulatedClock
from ..simulator.event_loop import EventLoop, Offer
from ..simulator.pipeline import Pipeline
from ..systems.operations import BACKWARDS, FORWARDS, UPDATES, WEIGHTS
from .nf1b import SAME
from .zero_bubble import GAP

_FIRST, _SOONER, _BETWEEN, _LATER, _LAST = range(5)

_Entry = tuple[float, int, int, int, int, int]
"""Start; what ties go by, twice; kind, stage and device."""


@dataclass
class _StageState:
    """How far a stage is."""

    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    kinds: list[int] = field(default_factory=list)


class MicroBatchScheduler(EventLoop):
    """Makes the schedule of all stages, operation by operation, and the times with it. A lane is a
    device.

    Attributes:
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
        self._devices = pipeline.stages_of
        super().__init__(SimulatedClock(pipeline), len(self._devices))
        self.pipeline = pipeline
        # One more: what comes after the last forward isn't ready.
        self.clock.grow(mini_batches + 1)
        self._stages = [_StageState() for _ in range(pipeline.stages)]
        self._device_of = {s: d for d, mine in enumerate(self._devices) for s in mine}
        self.turns: list[list[int]] = [[] for _ in self._devices]
        self._n = pipeline.micro_batches
        self._end = mini_batches * self._n
        self._keep, self._most_kept = keep, most_kept
        self._split = pipeline.variant.split_backward
        self._forwards_first = forwards_first
        for d in range(len(self._devices)):
            self._offer(d)

    @property
    def kinds(self) -> list[list[int]]:
        """Per stage, kinds of what it has run."""
        return [stage.kinds for stage in self._stages]

    def rows(self) -> tuple[tuple[bytes, tuple[int, ...]], ...]:
        """Per device, kinds and stages of what it has run, updates left out."""
        found = []
        for turns in self.turns:
            upcoming = {s: iter(self._stages[s].kinds) for s in turns}
            both = [(next(upcoming[s]), s) for s in turns]
            left = [(kind, s) for kind, s in both if kind != UPDATES]
            found.append((bytes(kind for kind, _ in left), tuple(s for _, s in left)))
        return tuple(found)

    @property
    def ended(self) -> bool:
        """Whether some stage has run forward all there is."""
        return max(stage.forwards for stage in self._stages) == self._end

    def _lanes(self, s: int) -> tuple[int, ...]:
        return (self._device_of[s],)

    def _arrived(self, kind: int, complete: Sequence[tuple[int, int]]) -> None:
        # Others than what a stage would run next change nothing yet.
        for d in {self._device_of[t] for t, slot in complete if slot == self._following(kind, t)}:
            self._offer(d)

    def _following(self, kind: int, s: int) -> int:
        stage = self._stages[s]
        return stage.forwards if kind == FORWARDS else stage.backwards

    def _take(self, offer: Offer) -> int:
        _, _, _, kind, s, d = offer
        stage, updated = self._stages[s], 0
        stage.kinds.append(kind)
        self.turns[d].append(s)
        complete: list[tuple[int, int]] = []
        if kind == FORWARDS:
            complete = self.clock.run(FORWARDS, s, stage.forwards)
            stage.forwards += 1
        elif kind == BACKWARDS:
            complete = self.clock.run(BACKWARDS, s, stage.backwards)
            stage.backwards += 1
        elif kind == WEIGHTS:
            self.clock.run(WEIGHTS, s, stage.weights)
            stage.weights += 1
        else:
            self.clock.update(s, self.updates[s])
            self.updates[s] = updated = self.updates[s] + 1
        self._offer(d)
        self._arrived(kind, [(t, slot) for t, slot in complete if self._device_of[t] != d])
        return updated

    def _offer(self, d: int) -> None:
        """Put what the device would run next into the heap."""
        found = [entry for s in self._devices[d] for entry in self._next(s, d)]
        if self._split:
            soonest = min((entry[0] for entry in found), default=inf)
            found += [entry for s in self._devices[d] for entry in self._weight(s, d, soonest)]
        entry = min(found, default=None)
        if entry is not None:
            last_s = entry[0] * SAME
            for other in found:
                if other[0] <= last_s and other[1:] < entry[1:]:
                    entry = other
            heapq.heappush(self._heap, entry)
        self._current[d] = entry

    def _next(self, s: int, d: int) -> list[_Entry]:
        """A stage's update, or its next backward and forward, where they can be told to start."""
        stage, n = self._stages[s], self._n
        if self._update_due(s, d):
            return [(max(self.clock.free_s[s]), _FIRST, -s, UPDATES, s, d)]
        found = []
        f, b = stage.forwards, stage.backwards
        if b < f and self._backward_may(stage):
            rank, tie = (_LATER, s) if self._forwards_first else (_SOONER, -s)
            found.append((self._start(BACKWARDS, s, b), rank, tie, BACKWARDS, s, d))
        flushed = f < (self.updates[s] + 1) * n or not self.pipeline.variant.flushes
        flying = f // n - b // n < self.pipeline.limits[s]
        if f < self._end and flushed and flying:
            start = self._start(FORWARDS, s, f)
            if self._room(s, d):
                rank = _SOONER if self._forwards_first else _LATER
                found.append((start, rank, -s, FORWARDS, s, d))
            elif self._forwards_first:
                found += self._making_room(d, start)
        return [entry for entry in found if entry[0] < inf]

    def _making_room(self, d: int, start: float) -> list[_Entry]:
        """The device's oldest weight part, for a forward that could run but for room."""
        waiting = [s for s in self._devices[d] if self._weights_left(s)]
        if not waiting:
            return []
        s = min(waiting, key=lambda t: (self._stages[t].weights, t))
        free = self.clock.free_s[s]
        begin = max(start, free[self._stages[s].weights % len(free)])
        return [(begin, _BETWEEN, -s, WEIGHTS, s, d)]

    def _weights_left(self, s: int) -> bool:
        return self._split and self._stages[s].weights < self._stages[s].backwards

    def _start(self, kind: int, s: int, slot: int) -> float:
        free = self.clock.free_s[s]
        return max(self.clock.ready_s[kind][s][slot], free[slot % len(free)])

    def _backward_may(self, stage: _StageState) -> bool:
        if not self.pipeline.variant.forwards_first:
            return True
        return stage.forwards >= (stage.backwards // self._n + 1) * self._n

    def _done(self, stage: _StageState) -> int:
        return stage.weights if self._split else stage.backwards

    def _update_due(self, s: int, d: int) -> bool:
        """Where pipelines flush, a device's stages update together."""
        flushes = self.pipeline.variant.flushes
        own = self.updates[s]
        together = self._devices[d] if flushes else (s,)
        wanted = (own + 1) * self._n
        if self._done(self._stages[s]) < wanted:
            return False
        return all(self._done(self._stages[t]) >= wanted or self.updates[t] > own for t in together)

    def _kept(self, s: int) -> int:
        stage = self._stages[s]
        return stage.forwards - self._done(stage)

    def _room(self, s: int, d: int) -> bool:
        """Whether a stage may keep one more micro-batch."""
        if self._kept(s) >= self._keep[s]:
            return False
        if self._most_kept is None:
            return True
        kept = [self._kept(t) for t in self._devices[d]]
        # One place for each other stage, so that what has begun can always go on.
        reserved = sum(
            not count
            for t, count in zip(self._devices[d], kept, strict=True)
            if t > s and self._stages[t].forwards < self._end
        )
        return sum(kept) + reserved < self._most_kept[d]

    def _weight(self, s: int, d: int, soonest: float) -> list[_Entry]:
        """A stage's next weight part; what else the device has next starts at `soonest`."""
        if not self._weights_left(s):
            return []
        free, done = self.clock.free_s[s], self._stages[s].weights
        start = free[done % len(free)]
        if soonest - start < GAP * self.clock.seconds[WEIGHTS][s][done % len(free)]:
            # After what comes first.
            start = max(start, soonest)
        return [(start, _LAST, done, WEIGHTS, s, d)]
