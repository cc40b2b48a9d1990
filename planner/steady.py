"""The steady state of a pipeline: simulated until it repeats itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..profiles.errors import OrderError
from .events import NOT_YET, Clock
from .kinds import BACKWARDS, FORWARDS, UPDATES, B, F
from .list_schedule import ListSchedule
from .listed import Code, Contended, Listed, coded, codes
from .operations import Order
from .orders import PATTERNS, order_patterns
from .pipeline import Pipeline
from .simulate import least_period_s, round_trip_s

MOST_OPERATIONS = 400_000
"""A simulation has about so many at most, settled or not."""

MOST_CYCLE = 32
"""Patterns of more mini-batches aren't looked for."""


@dataclass(frozen=True)
class Steady:
    """A pipeline that runs steadily.

    Attributes:
        period_s: seconds per mini-batch.
        cycle: mini-batches after which everything repeats; 0 when the simulation ended before:
            then the period is the mean over its second half.
        mini_batches: that all stages have updated after.
        clock: with the times.
        kinds: per stage, kinds of what it runs, in a run without an end, until everything that
            can happen has happened.
    """

    period_s: float
    cycle: int
    mini_batches: int
    clock: Clock
    kinds: tuple[bytes, ...]


def steady_state(pipeline: Pipeline) -> Steady:
    """Simulate without an end until all stages repeat what they did some mini-batches before.

    Raises OrderError for in-flight limits with which the stages wait for each other.
    """
    run = _run_patterned if pipeline.variant.order in PATTERNS else _run_scheduled
    clock, kinds, done, cycle = run(pipeline)
    if not done:
        raise OrderError("deadlock: the stages wait for each other under these in-flight limits")
    period_s = max(_period_s(clock, done, cycle), least_period_s(pipeline))
    if not cycle:
        period_s = max(period_s, round_trip_s(pipeline))
    return Steady(period_s, cycle, done, clock, kinds)


_Run = tuple[Clock, tuple[bytes, ...], int, int]
"""Clock, kinds run, mini-batches done, cycle."""


def _run_patterned(pipeline: Pipeline) -> _Run:
    most, _ = _lengths(pipeline)
    source = _Patterned(pipeline, min(1 + 2 * max(pipeline.limits), most))
    done, cycle = _settle(source, source.length if source.clock.contended else most)
    while done == source.length < most and not cycle and source.clock.contended:
        source = _Patterned(pipeline, min(4 * source.length, most))
        done, cycle = _settle(source, source.length)
    return source.clock, source.kinds(), done, cycle


def _run_scheduled(pipeline: Pipeline) -> _Run:
    most, horizon = _lengths(pipeline)
    schedule = ListSchedule(pipeline, horizon)
    done, cycle = _settle(schedule, most)
    clock = schedule.clock
    kinds = tuple(bytes(mine) for mine in schedule.kinds)
    if clock.contended and max(clock.replicas) > 1:
        # The schedule takes a stage's operations in turn, whichever replica is free first. Where
        # they wait for wires too, times come from running its lists as time goes by.
        schedule.run(min(done + max(pipeline.limits), horizon))
        replay = _replay(pipeline, schedule.order())
        done, cycle = _settle(replay, done)
        clock = replay.clock
    return clock, kinds, done, cycle


def _lengths(pipeline: Pipeline) -> tuple[int, int]:
    """Mini-batches to wait for at most, and how many are begun."""
    each = pipeline.micro_batches + pipeline.backwards_per_mini_batch + 1
    affordable = max(3, MOST_OPERATIONS // (pipeline.stages * each))
    deep = max(pipeline.limits)
    most = min(40 + 8 * deep, affordable)
    return most, max(most, min(most + deep, affordable))


# What runs mini-batch after mini-batch -------------------------------------------------------


class _Source(Protocol):
    clock: Clock

    def run(self, mini_batches: int) -> bool:
        """Go on until every stage has updated after so many; False when it can't."""


class _Patterned:
    """Orders that don't depend on times.

    Where stages wait for one another's messages, they go by lists made beforehand: for `length`
    mini-batches, and so many more that the lists' end doesn't show.
    """

    def __init__(self, pipeline: Pipeline, length: int) -> None:
        self.length = length
        self.clock = clock = Clock(pipeline)
        self._patterns = order_patterns(pipeline)
        self._ahead = max(pipeline.limits)
        self._run: Listed | Contended = Listed(clock)
        if clock.contended:
            clock.grow(length + 2 * self._ahead)
            lists = [
                coded(clock, s, pattern.kinds(length + self._ahead), 0, 0, 0)
                for s, pattern in enumerate(self._patterns)
            ]
            self._run = Contended(clock, lists)

    def kinds(self) -> tuple[bytes, ...]:
        """Until all that are in flight entered after the first one had left."""
        updates = 1 if self.clock.pipeline.variant.flushes else 1 + 2 * self._ahead
        return tuple(pattern.kinds(updates) for pattern in self._patterns)

    def _block(self, s: int, b: int) -> list[Code]:
        """What the stage runs from its b-th update to the next."""
        first, further = self._patterns[s]
        if not b:
            return coded(self.clock, s, first, 0, 0, 0)
        forwards, backwards = (first.count(kind) + (b - 1) * further.count(kind) for kind in (F, B))
        return coded(self.clock, s, further, forwards, backwards, b)

    def run(self, mini_batches: int) -> bool:
        if isinstance(self._run, Contended):
            return self._run.run(mini_batches)
        self.clock.grow(mini_batches + self._ahead)
        for s, ops in enumerate(self._run.lists):
            ops += self._block(s, mini_batches - 1)
        return self._run.run()


def _replay(pipeline: Pipeline, order: Order) -> Contended:
    clock = Clock(pipeline)
    clock.grow(1 + max(op.mini_batch for ops in order for op in ops))
    return Contended(clock, [codes(clock, s, ops) for s, ops in enumerate(order)])


# Whether it repeats --------------------------------------------------------------------------


def _settle(source: _Source, most: int) -> tuple[int, int]:
    """Run until all repeats. Returns the mini-batches run, and the cycle, 0 for none."""
    entered = [0 for _ in source.clock.replicas]
    for done in range(1, most + 1):
        if not source.run(done):
            return done - 1, 0
        cycle = _cycle(source.clock, done, entered)
        if cycle:
            return done, cycle
    return most, 0


def _cycle(clock: Clock, done: int, entered: list[int]) -> int:
    """Mini-batches after which all stages repeat themselves; 0 when they don't yet.

    What comes next follows from when the mini-batches in flight, and those that made room for
    them, entered the stages and left. So all repeats where those times are those of c mini-batches
    before, later by the same time at every stage.

    Args:
        entered: per stage, mini-batches whose forward has begun; brought up to date.
    """
    window = 0
    for s, (starts, slots) in enumerate(
        zip(clock.starts_s[FORWARDS], clock.slots[FORWARDS], strict=True)
    ):
        b = entered[s]
        while b * slots < len(starts) and starts[b * slots] != NOT_YET:
            b += 1
        entered[s] = b
        window = max(window, b - done + 1)
    last = clock.starts_s[UPDATES][-1]
    for cycle in range(1, min(MOST_CYCLE, done - window) + 1):
        shift = last[done - 1] - last[done - 1 - cycle]
        if all(
            _shifted(starts, slots, end, window, cycle, shift)
            for starts, slots, end in _all_starts(clock, done, entered)
        ):
            return cycle
    return 0


def _all_starts(
    clock: Clock, done: int, entered: Sequence[int]
) -> Iterator[tuple[list[float], int, int]]:
    """Per stage and kind: starts, how many of them a mini-batch has, mini-batches so far."""
    yield from zip(clock.starts_s[FORWARDS], clock.slots[FORWARDS], entered, strict=True)
    for kind in (UPDATES, BACKWARDS):
        for starts, slots in zip(clock.starts_s[kind], clock.slots[kind], strict=True):
            yield starts, slots, done


def _shifted(
    starts: list[float], slots: int, end: int, window: int, cycle: int, shift: float
) -> bool:
    """Whether the last mini-batches came so much later than those a cycle before."""
    off, back = 1e-9 * shift, cycle * slots
    last = (end - 1) * slots
    if abs(starts[last] - starts[last - back] - shift) > off:
        return False
    first, until = (end - window) * slots, end * slots
    # The last mini-batch may be under way.
    return all(
        abs(now - before - shift) <= off or now == NOT_YET
        for now, before in zip(
            starts[first:until], starts[first - back : until - back], strict=True
        )
    )


def _period_s(clock: Clock, done: int, cycle: int) -> float:
    """Mean over the last cycle; without one, over the second half, on the slowest stage."""
    updates = clock.starts_s[UPDATES]
    if cycle:
        return (updates[-1][done - 1] - updates[-1][done - 1 - cycle]) / cycle
    if done == 1:
        return max(
            starts[0] + seconds for starts, seconds in zip(updates, clock.update_s, strict=True)
        )
    half = max(1, done // 2)
    return max(starts[done - 1] - starts[half - 1] for starts in updates) / (done - half)
