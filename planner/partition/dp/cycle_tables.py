"""What stages wait for in critical cycles, from the last one on: tables for `critical_cycles`.

A table has one number for each downset and class of stages that begin there: what a stage before
them waits for at the least. Where the pipeline flushes a second one has the ways to them.

Index letters: S stages; N micro-batches; D downsets; K classes; p stages between two downsets.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..problem import FITS, Vector
from .cost_tables import Flags
from .cycle_stages import CycleProblem, Stages, StageTable, check_time
from .lattice import Positions

ROUNDING = 1e-12
"""Of a period."""

FORGIVEN = 1e-9
"""Of what stages wait for, and of sums of work: what rules nothing out."""

NEVER = -math.inf
"""What isn't waited for."""


class Timed(NamedTuple):
    """Stages on the device at their place, [p], in s.

    Attributes:
        own: a micro-batch's forward and backward.
        update: of a period.
    """

    forward: Vector
    backward: Vector
    own: Vector
    busy: Vector
    update: Vector


class Waits(NamedTuple):
    """Per class and downset, of stages that begin there, [K, D]: infinite where there are none.

    Attributes:
        linked: what a stage waits for that sends to them, and gets gradients back.
        passed: likewise, where its message passes them on the path.
    """

    linked: Vector
    passed: Vector


class Ways(NamedTuple):
    """What a micro-batch's way to a border takes at the least, there and back.

    Attributes:
        linked: with the message to a stage behind it, per class and downset, [K, D].
        passed: with the path's message, that passes the next stage, [D].
    """

    linked: Vector
    passed: Vector


class Picks(NamedTuple):
    """Of one stage.

    Attributes:
        stages: those that it may be.
        best: per class and lower downset, the position of that which is waited for least, [K, D].
        flight, next_kind: of each of them, what it has in flight and the next one's class, [p].
    """

    stages: Stages
    best: Positions
    flight: Positions
    next_kind: Positions


class CycleTable(NamedTuple):
    """What is known of all cuts under a target: per stage, and of waits also behind the last."""

    target: float
    stages: Stages
    waits: list[Waits]
    picks: list[Picks]


class CycleTables:
    """Makes the tables of one problem on one lattice."""

    def __init__(self, problem: CycleProblem, stages: StageTable) -> None:
        """`stages`: of the same problem, with as many stages or more."""
        self.problem, self.lattice, self.all = problem, stages.lattice, stages

    # Tables ------------------------------------------------------------------------------------

    def table(self, target: float, deadline: float | None) -> CycleTable | None:
        stages, shape = self.within(target), (self.all.classes, self.lattice.size)
        if not stages.count:
            return None
        ways = self.ways(stages, target, deadline) if self.problem.flushes else None
        waits = Waits(np.full(shape, math.inf), np.full(shape, math.inf))
        # Behind the last stage there is nothing to wait for.
        waits.linked[0, -1], waits.passed[0, -1] = 0.0, NEVER
        every, picks = [waits], list[Picks]()
        for s in range(len(self.problem.stages) - 1, -1, -1):
            check_time(deadline)
            # What is before it must be done by the devices before it.
            room = target * sum(stage.speed for stage in self.problem.stages[:s])
            begins = self.all.work_s <= room * (1 + FORGIVEN)
            ends = any_class(waits.linked)
            mine = stages.those(np.flatnonzero(ends[stages.above] & begins[stages.below]))
            timed = self.timed(mine, s)
            beyond, passed, nexts = self.beyond(mine, waits)
            before = None if ways is None else ways[s].linked[mine.kind, mine.below]
            value, flight = self.waited(mine, timed, s, beyond, target, before)
            fits = np.flatnonzero(np.isfinite(value))
            if not len(fits):
                return None
            mine = mine.those(fits)
            value, starts = value[fits], mine.begins()
            at = mine.kind[starts], mine.below[starts]
            waits = Waits(np.full(shape, math.inf), np.full(shape, math.inf))
            least = np.minimum.reduceat(value, starts)
            waits.linked[at] = least
            waits.passed[at] = np.minimum.reduceat(passed[fits], starts)
            hits = np.flatnonzero(value == np.repeat(least, np.diff([*starts, len(value)])))
            best = np.full(shape, -1)
            best[at] = hits[np.searchsorted(hits, starts)]
            every.append(waits)
            picks.append(Picks(mine, best, flight[fits], nexts[fits]))
        if not np.isfinite(waits.linked[:, 0]).any():
            return None
        return CycleTable(target, stages, every[::-1], picks[::-1])

    def within(self, target: float) -> Stages:
        """Stages that are busy for no longer than that on the fastest device; where a message
        would keep a wire busy for longer, it takes for ever."""
        fastest = max(stage.speed for stage in self.problem.stages)
        room = target * (1 + ROUNDING)
        every = self.all.stages
        stages = every.those(np.flatnonzero(every.busy_s <= room * fastest))
        stages.sent_s[stages.wire_s > room] = math.inf
        return replace(stages, wire_s=np.empty((0, stages.count)))

    def timed(self, stages: Stages, s: int) -> Timed:
        stage = self.problem.stages[s]
        forward, backward = stages.forward_s / stage.speed, stages.backward_s / stage.speed
        own = forward + backward
        busy = stages.busy_s / stage.speed + stage.per_byte_s * stages.parameters
        update = np.maximum(busy - self.problem.micro_batches * own, 0.0)
        return Timed(forward, backward, own, busy, update)

    def beyond(self, stages: Stages, waits: Waits) -> tuple[Vector, Vector, Positions]:
        """What stages wait for beyond themselves, what is waited for where a message passes them,
        and the next one's class that goes with the first, [p], by what comes behind them."""
        every, all_off = stages.above, self.all.off_path
        least = np.full(stages.count, math.inf)
        passed, nexts = least.copy(), np.zeros(stages.count, dtype=np.intp)
        classes = self.all.classes_at[every]
        for k in range(self.all.classes):
            some = np.flatnonzero(classes > k) if k else slice(None)
            above = every[some]
            linked, around, off = waits.linked[k][above], waits.passed[k][above], all_off[k][above]
            there = np.isfinite(linked)
            with np.errstate(invalid="ignore"):
                value = np.maximum(stages.sent_s[k][some] + linked, 0.0)
                # Past a stage off the path to the next one on it.
                past = np.where(off, stages.passed_s[some] + around, NEVER)
            value = np.where(there, np.maximum(value, past), math.inf)
            better = value < least[some]
            nexts[some] = np.where(better, k, nexts[some])
            least[some] = np.minimum(least[some], value)
            passed[some] = np.minimum(passed[some], np.where(off, around, linked))
        return least, np.where(stages.on_path, NEVER, passed), nexts

    def waited(
        self,
        stages: Stages,
        timed: Timed,
        s: int,
        beyond: Vector,
        target: float,
        before: Vector | None,
    ) -> tuple[Vector, Positions]:
        """What a stage before these at place s waits for, and the position of what they have in
        flight, [p]; infinite where they don't keep to the target."""
        stage, n = self.problem.stages[s], self.problem.micro_batches
        units = np.array([flight.units for flight in stage.flights])
        fine, full = timed.busy <= target * (1 + ROUNDING), None
        fine &= np.isfinite(beyond)
        beyond = np.where(fine, beyond, 0.0)
        if before is not None:
            needs = self.drained(before, beyond, timed, int(units[0]))
            fine &= needs <= target * (1 + ROUNDING)
            needed = np.zeros(stages.count)
        elif self.problem.rule == "turns":
            extra = timed.update if n == 1 else 0.0
            needed = (timed.own + extra + beyond) / (target / n) - 1
        else:
            stay = n * timed.own + beyond
            needed = (stay + timed.update) / target
            # When the last one of those comes that are there at once, the others' forwards are
            # all kept, and no backward has begun.
            full = np.ceil((stay - n * timed.backward) / target * (1 - ROUNDING) - ROUNDING)
        at = np.searchsorted(units, needed * (1 - ROUNDING) - ROUNDING)
        fine &= at < len(units)
        at = np.minimum(at, len(units) - 1)
        value = self.behind(timed, beyond, units[at] * (target / n))
        if math.isfinite(stage.memory_bytes):
            versions = np.array([flight.versions for flight in stage.flights])[at]
            kept = np.array([flight.kept for flight in stage.flights])[at]
            if full is not None:
                kept = np.maximum(kept, (full - 1) * n + 1)
            held = stages.once_bytes + (stage.copies + versions) * stages.parameters
            fine &= held + kept * stages.kept_bytes <= stage.memory_bytes * FITS
        return np.where(fine, value, math.inf), at

    def behind(self, timed: Timed, beyond: Vector, turns_s: Vector) -> Vector:
        """What a stage before these waits for. `turns_s`: of all that they have in flight."""
        if self.problem.rule == "turns":
            return timed.own + np.maximum(turns_s, beyond)
        if self.problem.rule == "room":
            return timed.forward + self.problem.micro_batches * timed.backward + beyond
        return timed.own + beyond

    def drained(self, before: Vector, beyond: Vector, timed: Timed, units: int) -> Vector:
        """Of a pipeline that flushes, what its stages need at the least, [p]."""
        n, own = self.problem.micro_batches, timed.own
        least: Vector = before + beyond + n * own
        if self.problem.rule == "forwards-first":
            return least
        least = least - (units - 1) * timed.forward
        if units < n:
            for m in {1, (n - 1) // units}:
                least = np.maximum(least, before + (m + 1) * beyond + (n - m * (units - 1)) * own)
        return least

    # The way to a stage, where the pipeline flushes --------------------------------------------

    def ways(self, stages: Stages, target: float, deadline: float | None) -> list[Ways]:
        """Per stage, the ways to where it begins."""
        classes, size = self.all.classes, self.lattice.size
        ways = Ways(np.full((classes, size), math.inf), np.full(size, math.inf))
        ways.linked[:, 0], ways.passed[0] = 0.0, NEVER
        found = [ways]
        stages = stages.those(np.argsort(stages.above, kind="stable"))
        for s in range(len(self.problem.stages) - 1):
            check_time(deadline)
            reached = np.isfinite(ways.linked[stages.kind, stages.below])
            mine = stages.those(np.flatnonzero(reached))
            timed = self.timed(mine, s)
            fits = np.flatnonzero(timed.busy <= target * (1 + ROUNDING))
            mine = mine.those(fits)
            ways_s = ways.linked[mine.kind, mine.below] + timed.own[fits]
            linked, passed = self.onward(mine, ways_s, ways.passed[mine.below])
            ways = Ways(np.full((classes, size), math.inf), np.full(size, math.inf))
            if mine.count:
                starts = np.flatnonzero(np.diff(mine.above, prepend=-1))
                at = mine.above[starts]
                ways.linked[:, at] = np.minimum.reduceat(linked, starts, axis=1)
                ways.passed[at] = np.minimum.reduceat(passed, starts)
            found.append(ways)
        return found

    def onward(self, stages: Stages, ways_s: Vector, around: Vector) -> tuple[Vector, Vector]:
        """Ways on to the next stage, per class, [K, p], and past it, [p].

        Args:
            ways_s: through stages, [p].
            around: past them, [p].
        """
        above = stages.above
        linked, passed = ways_s + stages.sent_s, ways_s + stages.passed_s
        on_path = ~self.all.off_path[:, above]
        linked = np.where(on_path & ~stages.on_path, np.maximum(linked, around), linked)
        return np.maximum(linked, 0.0), np.where(stages.on_path, passed, around)


def any_class(waits: Vector) -> Flags:
    """Downsets with something, [D], of classes, [K, D]."""
    found: Flags = np.isfinite(waits.min(axis=0))
    return found
