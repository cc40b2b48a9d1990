"""The steady state of a pipeline: simulated until it repeats itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from ...profiles.errors import ScheduleError
from ..simulator.clock import SimulatedClock
from ..simulator.executor import ContendedExecutor, ListExecutor, coded, codes
from ..simulator.pipeline import Pipeline
from ..simulator.timeline import least_period_s, round_trip_s
from ..systems.operations import BACKWARDS, FORWARDS, UPDATES, WEIGHTS, numbered_schedule
from .list_schedule import MicroBatchScheduler
from .nf1b import ListScheduler
from .schedules import is_patterned, kinds_by_stage, list_scheduler, schedule_patterns

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
        kinds: per stage, kinds of what it runs, in a run without an end, until everything that
            can happen has happened.
        turns: where devices have several stages: per device, the stages of these.
    """

    period_s: float
    cycle: int
    mini_batches: int
    clock: SimulatedClock
    kinds: tuple[bytes, ...]
    turns: tuple[tuple[int, ...], ...] = ()


def steady_state(pipeline: Pipeline) -> Steady:
    """Simulate without an end until all stages repeat what they did some mini-batches before.

    Raises ScheduleError for in-flight limits with which the stages wait for each other.
    """
    run = _run_patterned if is_patterned(pipeline) else _run_scheduled
    clock, kinds, turns, done, cycle = run(pipeline)
    if not done:
        raise ScheduleError("deadlock: the stages wait for each other under these in-flight limits")
    period_s = max(_period_s(clock, done, cycle), least_period_s(pipeline))
    if not cycle:
        kept = [] if is_patterned(pipeline) or pipeline.paces else _most_kept(pipeline, kinds)
        period_s = max(period_s, round_trip_s(pipeline), round_trip_s(pipeline, kept))
    return Steady(period_s, cycle, done, clock, kinds, turns)


_Run = tuple[SimulatedClock, tuple[bytes, ...], tuple[tuple[int, ...], ...], int, int]
"""SimulatedClock, kinds run, turns, mini-batches done, cycle."""


def sequence_distance(steady: Steady) -> int:
    """v: how far successive mini-batches of one sequence of updates are apart, at the most.

    Mini-batch b's backward begins on the last stage while those of the v − 1 before it are still
    on their way to stage 0, so that the update b sees there is mini-batch b − v's. With v = 1 all
    mini-batches make one sequence; with more there are v (TiMePReSt's multiple sequence problem,
    2410.14312). With unit times it is ceil(S / (N + 1)). Of the mini-batches of the last cycle;
    without one, of the last third.
    """
    clock, done = steady.clock, steady.mini_batches
    starts, slots = clock.starts_s[BACKWARDS], clock.slots[BACKWARDS]
    first, last = clock.pipeline.stages - 1, 0
    seconds, replicas = clock.durations.seconds[BACKWARDS][last], clock.replicas[last]

    def begins_s(b: int) -> float:
        return min(starts[first][b * slots[first] : (b + 1) * slots[first]])

    def ends_s(b: int) -> float:
        begun = range(b * slots[last], (b + 1) * slots[last])
        return max(starts[last][k] + seconds[k % replicas] for k in begun)

    most = 1
    for b in range(done - (steady.cycle or -(-done // 3)), done):
        begin_s, v = begins_s(b), 1
        # Rounding is no overlap.
        while v <= b and ends_s(b - v) > begin_s + 1e-9 * steady.period_s:
            v += 1
        most = max(most, v)
    return most


def _run_patterned(pipeline: Pipeline) -> _Run:
    most, _ = _lengths(pipeline)
    source = _Patterned(pipeline, min(1 + 2 * max(pipeline.limits), most))
    done, cycle = _settle(source, source.length if source.clock.contended else most)
    while source.length < most and not cycle and source.clock.contended:
        source = _Patterned(pipeline, min(4 * source.length, most))
        done, cycle = _settle(source, source.length)
    return source.clock, source.kinds(), source.turns(), done, cycle


def _run_scheduled(pipeline: Pipeline) -> _Run:
    most, horizon = _lengths(pipeline)
    scheduler = list_scheduler(pipeline, horizon)
    done, cycle = _settle(scheduler, most)
    clock = scheduler.clock
    kinds = tuple(bytes(mine) for mine in scheduler.kinds)
    turns = tuple(map(tuple, scheduler.turns))
    if clock.contended and max(clock.replicas) > 1:
        # The scheduler takes a stage's operations in turn, whichever replica is free first. Where
        # they wait for wires too, times come from running its lists as time goes by.
        scheduler.run(min(done + max(pipeline.limits), horizon))
        micro = pipeline.variant.backward_unit == "micro"
        ran = numbered_schedule(
            scheduler.kinds, scheduler.turns, pipeline.micro_batches, micro=micro
        )
        clock = SimulatedClock(pipeline)
        clock.grow(1 + max(op.mini_batch for ops in ran for op in ops))
        replay = ContendedExecutor(clock, codes(clock, ran.on_devices()))
        done, cycle = _settle(replay, done)
    return clock, kinds, turns, done, cycle


def _lengths(pipeline: Pipeline) -> tuple[int, int]:
    """Mini-batches to wait for at most, and how many are begun."""
    split = pipeline.variant.split_backward
    each = pipeline.micro_batches + pipeline.backwards_per_mini_batch * (1 + split) + 1
    affordable = max(3, MOST_OPERATIONS // (pipeline.stages * each))
    deep = max(pipeline.limits)
    most = min(40 + 8 * deep, affordable)
    return most, most + min(deep, max(most // 2, affordable - most))


def _most_kept(pipeline: Pipeline, kinds: Sequence[bytes]) -> list[int]:
    """Per stage, micro-batches from a mini-batch's first on that run forward before its backward;
    none where a backward takes less, or devices have several stages."""
    if pipeline.variant.backward_unit == "micro" or pipeline.placement:
        return []
    n, found = pipeline.micro_batches, list[int]()
    for mine in kinds:
        most, forwards, backwards = n, 0, 0
        for kind in mine:
            if kind == FORWARDS:
                forwards += 1
            elif kind == BACKWARDS:
                most = max(most, forwards - backwards * n)
                backwards += 1
        found.append(most)
    return found


# What runs mini-batch after mini-batch -------------------------------------------------------


class _Patterned:
    """Schedules that repeat with every mini-batch.

    Where stages wait for one another's messages, they go by lists made beforehand: for `length`
    mini-batches, and so many more that the lists' end doesn't show.
    """

    def __init__(self, pipeline: Pipeline, length: int) -> None:
        self.length = length
        self.clock = clock = SimulatedClock(pipeline)
        order = pipeline.variant.order
        self._patterns = schedule_patterns(pipeline)
        # In an order, stages of one device may be apart by what both have in flight.
        self._ahead = max(pipeline.limits) * (2 if order else 1)
        self._run: ListExecutor | ContendedExecutor = ListExecutor(clock)
        self._blocks = 0
        self._counts: dict[int, list[int]] = {}
        if clock.contended:
            clock.grow(length + 2 * self._ahead)
            most = length + self._ahead
            lists = [coded(clock, (p.kinds(most), p.turns(most)), {}) for p in self._patterns]
            self._run = ContendedExecutor(clock, lists)

    @property
    def now_s(self) -> float:
        return self._run.now_s

    @property
    def ended(self) -> bool:
        return self._run.ended

    def kinds(self) -> tuple[bytes, ...]:
        """Until all that are in flight entered after the first one had left."""
        return kinds_by_stage(self.clock.pipeline, self._patterns, self._updates)

    def turns(self) -> tuple[tuple[int, ...], ...]:
        """Per device, the stages of these; empty where each has a device of its own."""
        if not self.clock.pipeline.placement:
            return ()
        return tuple(pattern.turns(self._updates) for pattern in self._patterns)

    @property
    def _updates(self) -> int:
        pipeline = self.clock.pipeline
        updates = (0 if pipeline.variant.flushes else 2 * self._ahead) + pipeline.update_every
        order = pipeline.variant.order
        return updates + (max(r.begins for r in order.rows) + 2 * order.cycle if order else 0)

    def run(self, mini_batches: int) -> bool:
        if isinstance(self._run, ContendedExecutor):
            return self._run.run(mini_batches)
        done = False
        while self._blocks < mini_batches:
            done = self._run_block(self._run)
        # In an order, an update may stand behind forwards of later mini-batches, which other
        # devices run behind as many updates of their own.
        while not done and self.clock.pipeline.variant.order:
            updates = self.clock.starts_s[UPDATES]
            if all(mine[mini_batches - 1] >= 0 for mine in updates):
                return True
            if self._blocks >= mini_batches + self._ahead:
                return False
            done = self._run_block(self._run)
        return done

    def _run_block(self, executor: ListExecutor) -> bool:
        """Run what devices run up to their next updates, and what was left of before."""
        self._blocks += 1
        self.clock.grow(self._blocks + self._ahead)
        for d, ops in enumerate(executor.lists):
            ops += coded(self.clock, self._patterns[d].block(self._blocks - 1), self._counts)
        return executor.run()


_Source = _Patterned | ContendedExecutor | ListScheduler | MicroBatchScheduler


# Whether it repeats --------------------------------------------------------------------------


def _settle(source: _Source, most: int) -> tuple[int, int]:
    """Run until all repeats. Returns the mini-batches run, and the cycle, 0 for none."""
    watch = _CycleWatch(source)
    for done in range(1, most + 1):
        if not source.run(done):
            return done - 1, 0
        cycle = 0 if source.ended else watch.cycle(done)
        if cycle:
            return done, cycle
    return most, 0


class _CycleWatch:
    """Looks for a mini-batch after which all stages repeat themselves.

    What comes next follows from what the mini-batches that some stage hasn't updated after have
    done so far, and what not. So all repeats where that is what those of c mini-batches before had
    done, later by the same time at every stage; and what hasn't started now, hadn't then.
    """

    def __init__(self, source: _Source) -> None:
        self.source = source
        self.clock = source.clock
        split = source.clock.pipeline.variant.split_backward
        kinds = (FORWARDS, UPDATES, BACKWARDS, *((WEIGHTS,) if split else ()))
        starts, slots = self.clock.starts_s, self.clock.slots
        self._rows = [
            (mine, each)
            for kind in kinds
            for mine, each in zip(starts[kind], slots[kind], strict=True)
        ]
        self._begun = [0 for _ in self._rows]
        self._apart = 0
        # What repeats in an order given may be several mini-batches, after a beginning.
        order = source.clock.pipeline.variant.order
        self._every = source.clock.pipeline.update_every
        self._begins = 0
        if order:
            self._every = lcm(self._every, *(row.cycle for row in order.rows))
            self._begins = max(row.begins for row in order.rows)

    def cycle(self, done: int) -> int:
        """c, or 0 where nothing repeats yet. All stages have updated after `done` mini-batches."""
        last = self.clock.starts_s[UPDATES][-1]
        for k, (starts, slots) in enumerate(self._rows):
            while len(starts) > self._begun[k] * slots and starts[self._begun[k] * slots] >= 0:
                self._begun[k] += 1
        every = self._every
        most = min(max(MOST_CYCLE, every), done - 1 - self._begins)
        newest = [
            (starts, (begun - 1) * slots, slots)
            for (starts, slots), begun in zip(self._rows, self._begun, strict=True)
        ]
        for cycle in range(every, most + 1, every):
            shift = last[done - 1] - last[done - 1 - cycle]
            off = 1e-9 * shift
            # What told mini-batches apart before mostly does so again.
            for row in (self._apart, *range(len(newest))):
                starts, at, slots = newest[row]
                if abs(starts[at] - starts[at - cycle * slots] - shift) > off:
                    self._apart = row
                    break
            else:
                if all(
                    self._repeats(starts, slots, begun, done, cycle, shift)
                    for (starts, slots), begun in zip(self._rows, self._begun, strict=True)
                ):
                    return cycle
        return 0

    def _repeats(
        self, starts: list[float], slots: int, begun: int, done: int, cycle: int, shift: float
    ) -> bool:
        """Whether operations of one kind at one stage do; of the newest it is known."""
        off, back = 1e-9 * shift, cycle * slots
        now = self.source.now_s - off
        first, end = (done - 1) * slots, min((begun + 1) * slots, len(starts))
        return all(
            abs(this - before - shift) <= off if this >= 0 else before + shift >= now or before < 0
            for this, before in zip(
                starts[first:end], starts[first - back : end - back], strict=True
            )
        )


def _period_s(clock: SimulatedClock, done: int, cycle: int) -> float:
    """Mean over the last cycle; without one, over the second half, on the slowest stage."""
    updates = clock.starts_s[UPDATES]
    if cycle:
        return (updates[-1][done - 1] - updates[-1][done - 1 - cycle]) / cycle
    if done == 1:
        # A whole mini-batch, where each one begins when the last has ended.
        flushes = clock.pipeline.variant.flushes
        ends = (
            first[0] + taken for first, taken in zip(updates, clock.durations.update_s, strict=True)
        )
        return max(ends) if flushes else 0.0
    span = done - max(1, done // 2)
    deep = max(clock.pipeline.limits)
    if span > deep:
        # Mini-batches that limits hold back often come in rows of as many as may be in flight.
        span -= span % deep
    return max(starts[done - 1] - starts[done - 1 - span] for starts in updates) / span
