"""What stages wait for in critical cycles, from the last one on: tables for `critical_cycles`.

A table has one number for each downset and class of stages that begin there: what a stage before
them waits for at the least. Where the pipeline flushes a second one has the ways to them.

Index letters: S stages; N micro-batches; D downsets; K classes; p stages between two downsets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import numpy as np

from ..problem import FITS, Deadline, OutOfTime, Vector, check_time
from .cycle_devices import CyclePlace, CycleStage, Wires
from .cycle_stages import FORGIVEN, CycleProblem, Stages, StageTable
from .lattice import Flags, Lattice, Positions

ROUNDING = 1e-12
"""Of a period."""

NEVER = -math.inf
"""What isn't waited for."""

_NEAR, _LAST = 3, 4
"""Rows of stages that end so near, or so many stages before the last one, are looked at."""

_ABOUT = 0.95
"""Where a table for some period took too long, one for so much of it, or for more, does as well."""

_WAY = -1
"""Of rows of stages that take turns, that of one micro-batch; others have numbers below."""

_NONE = np.zeros(0, dtype=np.intp)

Wire = TypeVar("Wire", float, Vector)


class Timed(NamedTuple):
    """Stages on the device at their place, [p], in s.

    Attributes:
        own: a micro-batch's forward and backward.
        weight: its weight part, if that is split off.
        serial: whether all of a backward is done before the next forward that waits for it.
        update: of a period, with all weight parts.
        step: that alone: in a pipeline that flushes, between a mini-batch's last backward at the
            stage and the next one's first forward.
    """

    forward: Vector
    backward: Vector
    own: Vector
    weight: Vector
    serial: Flags
    busy: Vector
    update: Vector
    step: Vector

    def those(self, which: Positions) -> Timed:
        return Timed._make(each[which] for each in self)


class Waits(NamedTuple):
    """Per class and downset, of stages that begin there, [K, D]: infinite where there are none.

    Attributes:
        linked: what a stage waits for that sends to them, and gets gradients back.
        passed: likewise, where its message passes them on the path.
        users: per layer, of the stage that has it, wherever that begins behind; of no layer 0,
            [n + 1].
        rows: where the pipeline flushes, as `linked` up to and with some stages, by their place;
            with replicas that take turns those of `turned`.
    """

    linked: Vector
    passed: Vector
    users: Vector
    rows: dict[int, Vector]

    def times(self, share: float) -> Waits:
        """All of them so many times as long, where the pipeline never drains."""
        return self._replace(
            linked=self.linked * share, passed=self.passed * share, users=self.users * share
        )


class Row(NamedTuple):
    """What stages wait for beyond themselves up to another one, where the pipeline flushes.

    Attributes:
        units: micro-batches in flight at that one.
        beyond_s: for one micro-batch, [p].
        filled_s: likewise, messages of all others being before its own on the wire, [p].
    """

    units: int
    beyond_s: Vector
    filled_s: Vector


class Ways(NamedTuple):
    """What a micro-batch's way to a border takes at the least, there and back.

    Attributes:
        linked: with the message to a stage behind it, per class and downset, [K, D].
        passed: with the path's message, that passes the next stage, [D].
        makers: per layer, the way through the stage that has it, wherever that ends before; of no
            layer 0, [n + 1].
    """

    linked: Vector
    passed: Vector
    makers: Vector


class Looked(NamedTuple):
    """Stages on one device that keep to a target, [p].

    Attributes:
        which: positions in the table's.
        value: what a stage before them waits for.
        flight, next_kind: the position of what they have in flight, and the next one's class.
        rows_s: where the pipeline flushes, what rows of stages up to some places take.
    """

    which: Positions
    value: Vector
    flight: Positions
    next_kind: Positions
    rows_s: Mapping[int, Vector]


class CycleTable(NamedTuple):
    """What is known of all cuts under a target.

    Attributes:
        by_wires: those that any stage may be, and others, by the wires to the next one.
        timed: all of these, by the device.
        waits: per stage, and behind the last one, by the state of devices from there on.
        ways: per stage, by the state of devices before it; empty where the pipeline stays full.
    """

    target: float
    by_wires: dict[Wires, Stages]
    timed: dict[Hashable, Timed]
    waits: list[list[Waits]]
    ways: list[list[Ways]]

    @property
    def stages(self) -> Stages:
        """The same, by the most wires."""
        return self.by_wires[max(self.by_wires)]


class _Known(NamedTuple):
    """Of a target that some cut keeps to, and so of all that are shorter.

    Attributes:
        stages: those that keep to it.
        which: per stage, which of these may be in such a cut.
    """

    target: float
    stages: Stages
    which: list[Positions]


class Halves:
    """What a mini-batch takes whose forwards all run before its backwards, in a chain of stages
    (`critical_cycles`, *flush*): each half is waited for where it is longest."""

    def __init__(self, problem: CycleProblem, stages: StageTable) -> None:
        """`stages`: of the same problem, with as many stages or more."""
        self._problem, self._all = problem, stages

    @cached_property
    def _longest_s(self) -> tuple[float, float]:
        """What a cut's longest forward takes at the least, and its longest backward."""
        fastest = max(stage.speed for stage in self._problem.devices.every)
        halves = self._problem.forward_s.min(axis=0), self._problem.backward_s.min(axis=0)
        count = len(self._problem.stages)
        forward_s, backward_s = (self._all.least_longest(half, count) / fastest for half in halves)
        return forward_s, backward_s

    def least(self, forward_s: Vector, backward_s: Vector, way_s: Vector) -> Vector:
        """What no cut with any of some stages is below, [p]. `way_s`: of one micro-batch, there and
        back."""
        longest = self._longest_s
        forward, backward = np.maximum(forward_s, longest[0]), np.maximum(backward_s, longest[1])
        found: Vector = way_s + (self._problem.micro_batches - 1) * (forward + backward)
        return found


class CycleTables:
    """Makes the tables of one problem on one lattice.

    Attributes:
        entries: classes × stages that were gone through so far.
        first: in flight at the first stage, at the least, in cuts that keep to the last table's
            period.
        halves: None where a mini-batch has none, or stages aren't in a chain, or have replicas.
    """

    def __init__(self, problem: CycleProblem, stages: StageTable) -> None:
        """`stages`: of the same problem, with as many stages or more."""
        self.problem, self.lattice, self.all = problem, stages.lattice, stages
        self.entries, self.halves = 0, None
        if problem.rule == "forwards-first" and not problem.devices.replicated and stages.is_chain:
            self.halves = Halves(problem, stages)
        self._known: _Known | None = None
        # A period that there was no time to make a table for, and how much there was.
        self._late = math.inf, 0.0
        # Periods, and what the first stage has in flight at the least in cuts that keep to them.
        self._firsts = list[tuple[float, int]]()
        self.first = 1
        # Where the pipeline flushes, micro-batches in flight at each stage.
        most = problem.micro_batches if problem.rule == "forwards-first" else 1
        self._units = [
            mine[0].stage.flights[0].units if mine else most for mine in problem.devices.places
        ]
        self._replicated = problem.devices.replicated
        # Of how many micro-batches rows are known, where stages with replicas take turns.
        several = (stage for stage in problem.devices.every if stage.turns > 1)
        self._after_updates = sorted({x.after_update for x in several if x.after_update})
        # Of each message a micro-batch's way there and back; and what more it takes until those of
        # all others have been on the wire. The last ones are of no message.
        n, messages, latency_s = problem.micro_batches, problem.messages, 2 * problem.latency_s
        wires, last = [(m.wire_s, m.back_s) for m in messages], self._units[-1]
        # Replicas that share micro-batches have several wires for each.
        shared = max(place.wires.most for mine in problem.devices.places for place in mine)
        shared = shared if problem.shares else 1
        self._way_s = np.array([sum(both) / shared + latency_s for both in wires] + [NEVER])
        self._others_s = np.array([others_s(n, max(b), min(b), last) for b in wires] + [0.0])
        self._makers = np.array([m.maker for m in messages] + [problem.loads.layers])
        places = range(len(problem.devices.places) + 1)
        self._begins = [_by_pins(problem, self.lattice, s) for s in places]

    # Tables ------------------------------------------------------------------------------------

    def table(self, target: float, deadline: Deadline) -> CycleTable | None:
        """None where no cut keeps to the target. Raises OutOfTime: at once where there is no more
        time than was too little for such a table before."""
        if target <= 0:
            return None
        left = math.inf if deadline is None else deadline - time.monotonic()
        late, too_little = self._late
        if target >= _ABOUT * late and left <= too_little:
            raise OutOfTime
        self.first = max((first for at, first in self._firsts if at >= target), default=1)
        try:
            while True:
                table, first = self._table(target, deadline)
                if table is None or not self.problem.entered or first <= self.first:
                    return table
                # So many versions the stages behind it hold, with which fewer cuts keep to it.
                self.first = first
                self._firsts.append((target, first))
        except OutOfTime:
            self._late = target, left
            raise

    def _table(self, target: float, deadline: Deadline) -> tuple[CycleTable | None, int]:
        """The same by what is known of the first stage; and what is known of it then."""
        devices, known = self.problem.devices, self.known(target, deadline)
        stages, count = known.stages, len(devices.places)
        wires = {place.wires for mine in devices.places for place in mine}
        by_wires = {
            each: _on_wires(self.problem, _on_time(stages, target, each), each) for each in wires
        }
        stages = by_wires[max(wires)]
        timed = {_like(each): self.timed(stages, each) for each in devices.every}
        ways = self.ways(stages, known.which, timed, target, deadline)
        every = [[_no_waits(self.all) for _ in range(devices.states(count))]]
        for waits in every[0]:
            # Behind the last stage there is nothing to wait for.
            waits.linked[0, -1], waits.passed[0, -1] = 0.0, NEVER
        table, picks = CycleTable(target, by_wires, timed, every, ways), list[Positions]()
        first = list[int]()
        for s in range(count - 1, -1, -1):
            check_time(deadline)
            found, mine = [_no_waits(self.all) for _ in range(devices.states(s))], list[Positions]()
            for place in devices.places[s]:
                behind = every[place.stage.replicas - 1][place.behind]
                looked = self.looked(table, known.which[s], place, behind, s)
                if len(looked.which):
                    some = [found[used] for used in place.used]
                    self._take_least(table, looked, behind, some)
                    mine.append(looked.which)
                    first.append(place.stage.flights[int(looked.flight.min())].units)
            if not (mine or self._replicated):
                return None, 1
            first = first if s == 0 else []
            every.insert(0, found)
            picks.insert(0, np.unique(np.concatenate(mine)) if len(mine) > 1 else [*mine, _NONE][0])
        firsts = (every[s][state].linked[:, 0] for s, state in devices.starts)
        if not any(np.isfinite(each).any() for each in firsts):
            return None, 1
        which = picks if self._replicated else _on_the_way(stages, picks)
        self._known = _Known(target, known.stages, which)
        return table, min(first, default=1)

    def looked(
        self, table: CycleTable, which: Positions, place: CyclePlace, waits: Waits, s: int
    ) -> Looked:
        """Those of some stages that keep to a table's target as stage s on one device.

        Args:
            waits: of the next stage, with the devices that are left behind this one.
        """
        stages, timed = table.by_wires[place.wires], table.timed[_like(place.stage)]
        target = table.target
        # What is before it must be done by the devices before it.
        work, slack = self.all.work_s, FORGIVEN * self.all.work_s[-1]
        begins = work <= target * place.speed_before + slack
        some = which[any_class(waits.linked)[stages.above[which]] & begins[stages.below[which]]]
        some = some[timed.busy[some] <= target * (1 + ROUNDING)]
        some = some[suits(self.problem, stages, some, place.stage)]
        self.entries += len(some) * self.all.classes
        beyond, nexts = self.beyond(stages, some, waits)
        fits = np.flatnonzero(np.isfinite(beyond))
        some, beyond, nexts = some[fits], beyond[fits], nexts[fits]
        mine, needs, rows_s = timed.those(some), None, dict[int, Vector]()
        if table.ways:
            rows = self.rows(stages, some, waits, beyond, place.wires)
            ways = [self.before(stages, some, table.ways[s][state]) for state in place.before]
            needs = self.drained(np.minimum.reduce(ways), rows, mine, place.stage)
            if self.halves is not None:
                way_s = mine.own + beyond + (mine.step if place.stage.first else 0.0)
                needs = np.maximum(needs, self.halves.least(mine.forward, mine.backward, way_s))
            for t in () if self._replicated else _ends(len(self._units) - 1, s):
                rows_s[t] = mine.own + (rows[t].beyond_s if t in rows else 0.0)
        elif self._after_updates:
            way = partial(way_behind, stages, some, waits)
            needs, rows_s = self.turned(mine, place.stage, way)
        value, flight = self.waited(stages, some, mine, place.stage, beyond, target, needs)
        fits = np.flatnonzero(np.isfinite(value))
        rows_s = {t: row_s[fits] for t, row_s in rows_s.items()}
        return Looked(some[fits], value[fits], flight[fits], nexts[fits], rows_s)

    def _take_least(
        self, table: CycleTable, looked: Looked, behind: Waits, every: list[Waits]
    ) -> None:
        """Lower what is waited for to that of some stages, where that is less."""
        stages, which = table.stages, looked.which
        below, kind = stages.below[which], stages.kind[which]
        starts = np.flatnonzero(np.diff(below, prepend=-1) | np.diff(kind, prepend=-1))
        at, least = (kind[starts], below[starts]), np.minimum.reduceat(looked.value, starts)
        passed = np.minimum.reduceat(self.passed(stages, which, behind), starts)
        users = np.minimum(behind.users, _of_each_layer(self.all, stages, which, looked.value))
        for waits in every:
            np.minimum(waits.users, users, out=waits.users)
            for t, row_s in looked.rows_s.items():
                row = waits.rows.setdefault(t, np.full_like(waits.linked, math.inf))
                row[at] = np.minimum(row[at], np.minimum.reduceat(row_s, starts))
            waits.linked[at] = np.minimum(waits.linked[at], least)
            waits.passed[at] = np.minimum(waits.passed[at], passed)

    def known(self, target: float, deadline: Deadline) -> _Known:
        """What any stage may be. A cut that keeps to a target keeps to longer ones, too, and so do
        its last stages alone: what can be in no cut for a longer one is left out."""
        if self._known is not None and target <= self._known.target:
            return self._known
        stages, borders = self.within(target, deadline), self.borders(target)
        ends: list[Flags] = borders[1:]
        if self._replicated:
            numbers, most = self.problem.devices.replicas, len(borders)
            ends = [
                np.logical_or.reduce([borders[s + r] for r in numbers if s + r < most])
                for s in range(most - 1)
            ]
        which = [stages.between(a, b) for a, b in zip(borders, ends, strict=False)]
        return _Known(target, stages, which)

    def borders(self, target: float) -> list[Flags]:
        """Per stage, and behind the last one, the downsets where it may begin, [S + 1] of [D]: the
        stages before it can do what is in them, and those from it on the rest, none of them busy
        for longer than the target; and pinned layers are on their stages."""
        work, slack = self.all.work_s, FORGIVEN * self.all.work_s[-1]
        return [
            (work <= target * before + slack) & (work[-1] - work <= target * rest + slack) & begins
            for (before, rest), begins in zip(
                self.problem.devices.speeds, self._begins, strict=True
            )
        ]

    def within(self, target: float, deadline: Deadline = None) -> Stages:
        """Stages that are busy for no longer than that on the fastest device."""
        fastest = max(stage.rate for stage in self.problem.devices.every)
        return self.all.within(target * (1 + ROUNDING) * fastest, deadline)

    def timed(self, stages: Stages, stage: CycleStage) -> Timed:
        forward, backward = stages.forward_s / stage.speed, stages.backward_s / stage.speed
        own, weight = forward + backward, np.zeros(stages.count)
        if self.problem.split:
            weight = np.maximum(stages.whole_s / stage.speed - own, 0.0)
        besides_s = self.problem.operation_s / stage.speed
        forward, own = forward + besides_s, own + besides_s
        if self.problem.split and stage.first:
            # No other stage waits for its backwards, so that all of them is weight part; and it
            # keeps so many micro-batches that each one's is done before it takes a new one.
            backward, own, weight = backward + weight, own + weight, np.zeros(stages.count)
        serial = np.full(stages.count, stage.first or not self.problem.split)
        whole, mine = self.problem.micro_batches, self.problem.micro_batches // stage.turns
        busy = stages.busy_s / stage.speed + stage.per_byte_s * stages.parameters
        busy += stages.summing_s - (whole - mine) * (stages.whole_s / stage.speed)
        update = np.maximum(busy - mine * own, 0.0)
        step = np.maximum(update - mine * weight, 0.0)
        return Timed(forward, backward, own, weight, serial, busy, update, step)

    def beyond(self, stages: Stages, which: Positions, waits: Waits) -> tuple[Vector, Positions]:
        """What some stages wait for beyond themselves, and the next one's class that goes with it,
        [p], by what comes behind them."""
        above, all_off = stages.above[which], self.all.off_path
        least, nexts = np.full(len(which), math.inf), np.zeros(len(which), dtype=np.intp)
        for k in range(self.all.classes):
            linked = waits.linked[k]
            there = np.isfinite(linked)
            if not there.any():
                continue
            some: Positions | slice = slice(None)
            if self.all.classes > 1:
                some = np.flatnonzero(there[above])
            at, mine = above[some], which[some]
            value = stages.sent_s[k][mine] + linked[at]
            np.maximum(value, 0.0, out=value)
            if all_off[k][there].any():
                # Past a stage off the path to the next one on it.
                off = np.flatnonzero(all_off[k][at])
                past = stages.passed_s[mine[off]] + waits.passed[k][at[off]]
                value[off] = np.maximum(value[off], past)
            better = value < least[some]
            nexts[some] = np.where(better, k, nexts[some])
            least[some] = np.minimum(least[some], value)
        return np.maximum(least, self._far(stages, which, waits)), nexts

    def _far(self, stages: Stages, which: Positions, waits: Waits) -> Vector:
        """What some stages wait for by their heaviest message, wherever its first user is, [p]."""
        return self._way_s[stages.made[which]] + waits.users[stages.user[which]]

    def rows(
        self, stages: Stages, which: Positions, waits: Waits, least: Vector, wires: Wires
    ) -> dict[int, Row]:
        """What some stages wait for up to some places, where the pipeline flushes; the last one is
        there.

        Args:
            least: up to that, of one micro-batch, [p].
            wires: to the next stage, each of which has its share of messages.
        """
        found, latency_s = dict[int, Row](), self.problem.latency_s
        n = self.problem.micro_batches // (1 if wires.apart else wires.most)
        last, above = len(self._units) - 1, stages.above[which]
        for t, linked_s in {**waits.rows, last: waits.linked}.items():
            units = 1 if self._replicated else self._units[t]
            beyond_s, filled_s = np.full((2, len(which)), math.inf)
            for k in range(self.all.classes):
                row_s, sent_s = linked_s[k][above], stages.sent_s[k][which]
                with np.errstate(invalid="ignore"):
                    # One way is no less busy than the other one: half of both, at the least.
                    wire_s = np.maximum(sent_s / 2 - latency_s, 0.0)
                    full_s = sent_s + others_s(n, wire_s, wire_s, units) + row_s
                    value_s = sent_s + row_s
                there = np.isfinite(row_s)
                beyond_s = np.where(there, np.minimum(beyond_s, value_s), beyond_s)
                filled_s = np.where(there, np.minimum(filled_s, full_s), filled_s)
            if t == last:
                beyond_s = least
                far_s = self._far(stages, which, waits) + self._others_s[stages.made[which]]
                # What replicas send past the next stage is on who knows how many wires.
                filled_s = filled_s if self._replicated else np.maximum(filled_s, far_s)
            found[t] = Row(self._units[t], np.maximum(beyond_s, 0.0), np.maximum(filled_s, 0.0))
        return found

    def turned(
        self, timed: Timed, stage: CycleStage, behind: Callable[[int], Vector]
    ) -> tuple[Vector, dict[int, Vector]]:
        """What stages with replicas that take turns need from update to update at the least, [p];
        and the rows from them on, there and back, of one micro-batch, or of some.

        Each of r replicas has u of its own N / r micro-batches in flight. With W behind the stage

            T  ≥  k · (f + b + W) + (N / r - k·u) · (f + b) + update,  k = ⌊N / (r·u)⌋.

        And M of a mini-batch's micro-batches run after the last update and before the next one,
        whichever stage behind takes longest for them:

            T  ≥  update + R + (⌈M / r(t)⌉ - 1) · (f + b)(t) + W(t).

        Args:
            behind: by a row's number, what is behind the stages, [p].
        """
        own, units, way_s = timed.own, stage.flights[0].units, behind(_WAY)
        rounds, left = divmod(self.problem.micro_batches // stage.replicas, units // stage.replicas)
        least, rows = (rounds + left) * own + rounds * way_s, {_WAY: own + way_s}
        for some in self._after_updates:
            rows[-some - 1] = np.maximum(
                -(-some // stage.replicas) * own + way_s, own + behind(-some - 1)
            )
            if some <= stage.after_update:
                least = np.maximum(least, rows[-some - 1])
        return least + timed.step, rows

    def passed(self, stages: Stages, which: Positions, waits: Waits) -> Vector:
        """What is waited for where a message passes some stages, [p], by what comes behind them."""
        least = np.where(self.all.off_path, waits.passed, waits.linked).min(axis=0)
        return np.where(stages.on_path[which], NEVER, least[stages.above[which]])

    def waited(
        self,
        stages: Stages,
        which: Positions,
        timed: Timed,
        stage: CycleStage,
        beyond: Vector,
        target: float,
        needs: Vector | None,
    ) -> tuple[Vector, Positions]:
        """What a stage before some on one device waits for, and the position of what they have in
        flight, [p]; infinite where they don't keep to the target.

        Args:
            timed, beyond: of those, [p].
            needs: what they need besides, [p].
        """
        n, mine = self.problem.micro_batches, self.problem.micro_batches // stage.turns
        units = np.array([flight.units for flight in stage.flights])
        fine, full = np.ones(len(which), dtype=np.bool_), None
        if needs is not None:
            fine = needs <= target * (1 + ROUNDING)
        if self.problem.flushes:
            needed = np.zeros(len(which))
        elif self.problem.rule == "turns":
            extra = timed.update if n == 1 else 0.0
            needed = (timed.own + extra + beyond) / (target / n) - 1
        else:
            stay = mine * timed.own + beyond + timed.update
            needed = stay / target
            full = least_kept(stay, timed.forward, target, mine)
            if stage.first:
                # The first stage always has forwards. So it never idles, and the period is its
                # load, or it does as its limit is reached and all that it allows is kept.
                busy = np.maximum(timed.busy, target * FORGIVEN) * (1 + FORGIVEN)
                filled = mine * np.ceil(needed * (1 - ROUNDING) - ROUNDING)
                full = np.maximum(
                    full, np.minimum(filled, least_kept(stay, timed.forward, busy, mine))
                )
        at = np.searchsorted(units, needed * (1 - ROUNDING) - ROUNDING)
        fine &= at < len(units)
        at = np.minimum(at, len(units) - 1)
        value = self.behind(timed, beyond, (units[at] + 1 - stage.turns) * (target / n), stage)
        if math.isfinite(stage.memory_bytes):
            versions = np.array([flight.versions for flight in stage.flights])[at]
            versions = np.maximum(versions, self.problem.versions(self.first, units[at]))
            kept = np.array([flight.kept for flight in stage.flights])[at]
            if full is not None:
                kept = np.maximum(kept, full)
            held = stages.once_bytes[which] + (stage.copies + versions) * stages.parameters[which]
            fine &= held + kept * stages.kept_bytes[which] <= stage.memory_bytes * FITS
        return np.where(fine, value, math.inf), at

    def behind(self, timed: Timed, beyond: Vector, turns_s: Vector, stage: CycleStage) -> Vector:
        """What a stage before these waits for. `turns_s`: of all that they have in flight."""
        if self.problem.rule == "turns":
            return timed.own + np.maximum(turns_s, beyond)
        if self.problem.rule == "room":
            backwards = self.problem.micro_batches // stage.turns
            return timed.forward + backwards * timed.backward + beyond
        return timed.own + beyond

    def drained(
        self, before: Vector, rows: Mapping[int, Row], timed: Timed, stage: CycleStage
    ) -> Vector:
        """Of a pipeline that flushes, what its stages need at the least, [p]. Of each replica that
        is as of a stage with its own micro-batches alone."""
        n, own = self.problem.micro_batches // stage.turns, timed.own
        units = stage.flights[0].units
        whole = rows[len(self._units) - 1]
        shorter = np.minimum(timed.forward, timed.backward)
        # Before its last forward but so many weight parts are done as may be kept.
        kept = max(self._units) if self._replicated else self._units[0]
        all_s = n * own + max(n - kept, 0) * timed.weight
        # In rounds they may be beside waiting, and so may be all backwards that none waits for.
        turn_s = np.where(timed.serial | (before > 0), own, timed.forward)
        before = np.maximum(before, timed.step)
        least: Vector = before + all_s
        for row in rows.values():
            end_units = min(row.units, n)
            beyond_s, fewer = row.beyond_s, units - end_units
            least = np.maximum(least, before + all_s - fewer * shorter + beyond_s)
            least = np.maximum(least, before + own + row.filled_s)
            least = np.maximum(least, timed.busy - fewer * timed.forward + beyond_s)
            rounds, left = divmod(n - end_units, fewer + 1)
            if rounds:
                ahead_s = (end_units - 1) * timed.forward
                turned_s = (
                    ahead_s + rounds * (turn_s + beyond_s) + (left + 1) * turn_s + whole.beyond_s
                )
                least = np.maximum(least, before + turned_s)
            if units < n:
                rounds, left = divmod(n - 1 - units, fewer + 1)
                turned_s = (
                    (rounds * beyond_s if rounds else 0.0)
                    + (rounds + left + 2) * turn_s
                    + 2 * whole.beyond_s
                )
                least = np.maximum(least, before + turned_s)
        return least

    # The way to a stage, where the pipeline flushes --------------------------------------------

    def ways(
        self,
        stages: Stages,
        which: list[Positions],
        every_timed: dict[Hashable, Timed],
        target: float,
        deadline: Deadline,
    ) -> list[list[Ways]]:
        """Per stage, and state of the devices before it, the ways to where it begins, through those
        that the stages may be; none where the pipeline never drains."""
        if not self.problem.flushes:
            return []
        devices, classes, size = self.problem.devices, self.all.classes, self.lattice.size
        none = _no_layer(self.problem.loads.layers)

        def nowhere(s: int) -> list[Ways]:
            return [
                Ways(np.full((classes, size), math.inf), np.full(size, math.inf), none.copy())
                for _ in range(devices.states_before(s))
            ]

        found = [nowhere(s) for s in range(len(devices.places))]
        for s, _ in devices.starts:
            for first in found[s]:
                first.linked[:, 0], first.passed[0] = 0.0, NEVER
        for s, steps in enumerate(devices.ways):
            check_time(deadline)
            each = which[s]
            each = each[np.argsort(stages.above[each], kind="stable")]
            for stage, before, nexts in steps:
                if s + stage.replicas == len(found):
                    continue
                ways, timed = found[s][before], every_timed[_like(stage)]
                there = np.isfinite(self.before(stages, each, ways))
                there &= (timed.busy[each] <= target * (1 + ROUNDING)) & suits(
                    self.problem, stages, each, stage
                )
                some = each[there]
                self.entries += len(some) * classes
                if not len(some):
                    continue
                mine = stages.those(some)
                ways_s = np.maximum(self.before(stages, some, ways), timed.step[some])
                ways_s += timed.own[some]
                makers = np.minimum(ways.makers, _of_each_layer(self.all, stages, some, ways_s))
                linked, passed = self.onward(mine, ways_s, ways.passed[mine.below])
                starts = np.flatnonzero(np.diff(mine.above, prepend=-1))
                at = mine.above[starts]
                linked = np.minimum.reduceat(linked, starts, axis=1)
                passed = np.minimum.reduceat(passed, starts)
                for other in (found[s + stage.replicas][k] for k in nexts):
                    other.linked[:, at] = np.minimum(other.linked[:, at], linked)
                    other.passed[at] = np.minimum(other.passed[at], passed)
                    np.minimum(other.makers, makers, out=other.makers)
        return found

    def before(self, stages: Stages, which: Positions, ways: Ways) -> Vector:
        """The ways to some stages, [p]: from the one before them, and by the heaviest message."""
        taken = stages.taken[which]
        far = self._way_s[taken] + ways.makers[self._makers[taken]]
        found: Vector = np.maximum(ways.linked[stages.kind[which], stages.below[which]], far)
        return found

    def onward(self, stages: Stages, ways_s: Vector, around: Vector) -> tuple[Vector, Vector]:
        """Ways on to the next stage, per class, [K, p], and past it, [p].

        Args:
            ways_s: through stages, [p].
            around: past them, [p].
        """
        above = stages.above
        # Nobody asks for ways through stages that are never reached, nor can they be added to.
        ways_s = np.where(np.isfinite(ways_s), ways_s, 0.0)
        linked, passed = ways_s + stages.sent_s, ways_s + stages.passed_s
        on_path = ~self.all.off_path[:, above]
        linked = np.where(on_path & ~stages.on_path, np.maximum(linked, around), linked)
        return np.maximum(linked, 0.0), np.where(stages.on_path, passed, around)


def way_behind(stages: Stages, which: Positions, waits: Waits, row: int = _WAY) -> Vector:
    """What some stages wait for behind them by a row of `CycleTables.turned`, [p]; by default for a
    micro-batch's way alone."""
    found, above = np.full(len(which), math.inf), stages.above[which]
    if row not in waits.rows:
        return np.zeros(len(which))
    for sent_s, row_s in zip(stages.sent_s, waits.rows[row], strict=True):
        there = np.flatnonzero(np.isfinite(row_s[above]))
        value_s = sent_s[which[there]] + row_s[above[there]]
        found[there] = np.minimum(found[there], value_s)
    least: Vector = np.maximum(found, 0.0)
    return least


def least_kept(stay: Vector, forward: Vector, period: float | Vector, n: int) -> Vector:
    """Micro-batches that a stage keeps at some backward, at the least, [p], of N that it has of
    each mini-batch.

    With u of them kept from a mini-batch's first on at its backward, at the most, the next
    forward is behind its update; and from that one the rest of its mini-batch's is to come
    before the next mini-batch begins. So for u = (j - 1)·N + r

        j · T  ≥  stay + (N - r)·f,  1 ≤ r ≤ N.
    """
    trips = np.maximum(np.ceil(stay / period * (1 - FORGIVEN)), 1.0)
    spare = np.maximum(trips * period * (1 + FORGIVEN) - stay, 0.0)
    ahead = np.divide(spare, forward, out=np.full(len(stay), float(n)), where=forward > 0)
    found: Vector = (trips - 1) * n + np.maximum(n - np.floor(ahead * (1 + FORGIVEN)), 1.0)
    return found


def _on_time(stages: Stages, target: float, wires: Wires) -> Stages:
    """Stages, with messages that keep a wire busy for longer than the target made infinite."""
    room = target * (1 + ROUNDING)
    late = (stages.wire_s > room * wires.speed) | (stages.alone_s > room)
    return replace(stages, sent_s=np.where(late, math.inf, stages.sent_s)) if late.any() else stages


def _on_wires(problem: CycleProblem, stages: Stages, wires: Wires) -> Stages:
    """Where each message is on several wires, a part on each; or on a slower one. Of parts that are
    on one in turns the first ones come back while the last ones go there: one counts."""
    speed = wires.slowest * wires.most if problem.shares else wires.slowest
    if speed == 1 or not (problem.shares or wires.apart):
        return stages
    latency_s = 2 * problem.latency_s
    return replace(stages, sent_s=(stages.sent_s - latency_s) / speed + latency_s)


def suits(problem: CycleProblem, stages: Stages, which: Positions, stage: CycleStage) -> Flags:
    """Which of some stages are of as many replicas, [p]."""
    if not problem.shares:
        return np.ones(len(which), dtype=np.bool_)
    shares = np.array(problem.shares)
    found: Flags = shares[stages.mode[which]] == stage.replicas
    return found


def _like(stage: CycleStage) -> Hashable:
    """What times on its device depend on."""
    return stage.speed, stage.per_byte_s, stage.first, stage.replicas


def others_s(micro_batches: int, busier_s: Wire, other_s: Wire, units: int) -> Wire:
    """What more it takes until all micro-batches of a mini-batch have been on a wire, and so many
    of them on the one back, each of which takes so long."""
    return (micro_batches - 1) * busier_s + (units - 1) * other_s


def _ends(last: int, s: int) -> list[int]:
    """Places of stages that rows from this place end at: some near ones, and the last ones."""
    return sorted({*range(s, min(s + _NEAR, last)), *range(max(s, last - _LAST), last)})


def _no_layer(layers: int) -> Vector:
    """Of each layer infinite, and of none 0, [n + 1]."""
    return np.append(np.full(layers, math.inf), 0.0)


def _no_waits(table: StageTable) -> Waits:
    shape = table.classes, table.lattice.size
    none = _no_layer(table.problem.loads.layers)
    return Waits(np.full(shape, math.inf), np.full(shape, math.inf), none, {})


def _of_each_layer(table: StageTable, stages: Stages, which: Positions, value: Vector) -> Vector:
    """The least value of stages that have a layer, at the least; of no layer 0, [n + 1]."""
    size = table.lattice.size
    least = np.full((size, size), math.inf)
    # Upper downsets from the last one on.
    at = (stages.below[which] + 1) * size - 1 - stages.above[which]
    np.minimum.at(least.ravel(), at, value)
    np.minimum.accumulate(least, axis=1, out=least)
    least = least[:, size - 1 - table.first_with]
    np.minimum.accumulate(least, axis=0, out=least)
    found = least[table.last_without, np.arange(least.shape[1])]
    return np.append(found, 0.0)


def _on_the_way(stages: Stages, picks: list[Positions]) -> list[Positions]:
    """Per stage, of its picks those that begin where a pick of the stage before ends."""
    reached, found = np.arange(1), list[Positions]()
    for which in picks:
        mine = which[np.isin(stages.below[which], reached)]
        found.append(mine)
        reached = np.unique(stages.above[mine])
    return found


def any_class(waits: Vector) -> Flags:
    """Downsets with something, [D], of classes, [K, D]."""
    found: Flags = np.isfinite(waits.min(axis=0))
    return found


def _by_pins(problem: CycleProblem, lattice: Lattice, s: int) -> Flags:
    """Downsets that stage s may begin at, by what layers are pinned to, [D]."""
    found = np.ones(lattice.size, dtype=np.bool_)
    for layer, stage in problem.loads.pins:
        inside = lattice.column(layer)
        found &= inside if stage < s else ~inside
    return found
