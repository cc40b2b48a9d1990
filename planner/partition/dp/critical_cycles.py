"""Cuts into so many stages by the critical cycles of their schedule, exactly, by bisection.

Stages in a row, a device each, or each some replicas (`in_groups`). A schedule that repeats has a
period no shorter than the work along any cycle of operations, over the mini-batches that the cycle
comes round later (its maximum cycle mean, as of a max-plus matrix). Those that count go from a
stage to one behind it and back:

- *turns*: in 1F1B stage t runs the forward of a micro-batch, then the backward of the one u(t) - 1
  before it. So from stage s to t and back, with u in flight,

      (u(s) - u(t) + 1) · T  ≥  f + b of s … t, and the messages between them, there and back.

- *room*: in whatever sequence, a stage begins a mini-batch when the one u(s) before it is back, so
  u(s) · T is at least what a mini-batch stays: all its forwards at s, one at each stage behind, all
  backwards, and messages. So is how many it keeps (`CycleTables.least_kept`).

- *flush*: P is one micro-batch's way to the stage, R from behind it to stage t, both there and
  back, P with the update of the stage where it begins; W is R to the last stage. In GPipe N
  micro-batches are in flight at all stages. A mini-batch takes N times a stage's work, or the
  messages of one wire, m on the busier one and m' on the one back, besides the ways to and from
  there:

      T ≥ P + N·(f + b) + R - (u(s) - u(t))·min(f, b),
      T ≥ P + f + b + R + (N - 1)·m + (u(t) - 1)·m'.

  And where stages are in a chain, all forwards are waited for where these are longest, f', and
  all backwards where those are, b' (`Halves`):

      T ≥ f + b + W + (N - 1)·(f' + b').

  In 1F1B with u(s) < N, d = u(s) - u(t) + 1 more micro-batches come with each round to t and back:

      T ≥ P + 2·(f + b + W) + k·(f + b + R) + (N - 1 - u(s) - k·d)·(f + b),
      T ≥ P + (u(t) - 1)·f + k·(f + b + R) + (N - u(t) - k·d + 1)·(f + b) + W.

  Where backwards are split, b is without the weight part; but the first stage keeps so many
  micro-batches that it runs each one's weight part before the forward that takes its place.
  Each of r replicas has N / r micro-batches of its own: for it the same holds with these alone and
  R = W, as far as it runs ahead of its own first backward.

Messages go to the next stage, or past it along one path through the graph; and each stage's
heaviest one to its first user, wherever that is (`Waits.users`).

For a period to keep to, stages are laid from the last one on. Of all rows of stages that begin at a
downset only the one that what comes before it waits least for matters: a stage then has the fewest
in flight that the period allows, which takes the least memory, too. So a table with one number for
each downset and number of stages tells whether any cut keeps to a period, and which.

Index letters: S stages; N micro-batches; D downsets; M modes; p pairs of downsets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial, reduce
from math import lcm
from typing import NamedTuple

import numpy as np

from ..problem import FITS, Deadline, OutOfTime, Vector, check_time
from .cycle_devices import CyclePlace, CycleStage, Flight
from .cycle_stages import FORGIVEN, CycleProblem, Stages, StageTable
from .cycle_tables import (
    NEVER,
    ROUNDING,
    CycleTable,
    CycleTables,
    Row,
    Timed,
    Waits,
    any_class,
    others_s,
    suits,
    way_behind,
)
from .lattice import Lattice, Positions
from .program import Program
from .turns import Turn, least_turning

_MOST_PAIRS = 8_000_000
"""Pairs of downsets × ways to run a stage: with more, tables take too long."""

_CLOSE = 1e-10
"""Bisection ends there, relative."""

_VAGUE = 1e-5
"""The same where cycles are known from below only."""

_STEP = 0.01
"""The first step below a cut that was found, relative."""

_FAR, _RISE, _FASTER, _STEEPEST = 1.5, 1.25, 1.6, 2.0
"""Where no cut is known that is nearer to the bound: the first step above that, the power of each
that the next one is, and the largest."""

_NEAR = 1.0005
"""Where bound and best cut are so close, whether any other cut is better is asked."""

_SHARES, _SHARES_EACH, _CHEAPEST = 48, 4, 2
"""Thinned: of so many equal shares of the work, and at least so many for each stage, so many places
that are cheapest to cut at."""


def quick(lattice: Lattice, modes: int) -> bool:
    """Whether all stages between two downsets, in so many modes, are few enough for tables."""
    return lattice.size**2 * modes <= _MOST_PAIRS


def thinned(problem: CycleProblem, lattice: Lattice) -> Lattice:
    """Fewer places to cut, the cheapest ones."""
    shares = max(_SHARES, len(problem.stages) * _SHARES_EACH)
    return Program(problem.loads, lattice).thinned(shares, _CHEAPEST)


class CycleStep(NamedTuple):
    """A stage of a cut: positions of its downsets and of its mode, what it has in flight, and its
    device."""

    below: int
    above: int
    mode: int
    flight: Flight
    place: CyclePlace


class CycleCut(NamedTuple):
    """A cut, and the longest of its cycles, in s."""

    steps: tuple[CycleStep, ...]
    period_s: float


class CycleAnswer(NamedTuple):
    """Of all cuts.

    Attributes:
        bound_s: no cut has a shorter period.
        cut: the best one; None: none below what was asked for.
    """

    bound_s: float
    cut: CycleCut | None


_Link = tuple[int, float, float]
"""The later stage; and what a message there and one back take on the wire."""


_Links = dict[tuple[int, int], tuple[float, float, bool]]


class _Move(NamedTuple):
    """A stage of a cut that is being laid.

    Attributes:
        beyond: the number of the next one.
        most: what stages before it may wait for from the next one on, at the most, [K].
        ways: to the next one, [K], and past it; where the pipeline flushes.
        users: layers behind that take the heaviest messages made so far, and the same for the stage
            that has each of them.
    """

    step: CycleStep
    beyond: int
    most: tuple[Vector, Vector]
    ways: tuple[Vector, float]
    users: tuple[tuple[int, float], ...]

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from others at its place."""
        place = self.step.place
        return self.step.above, self.step.mode, place.device, place.behind, self.beyond, place.wires


class CriticalCycles(CycleTables):
    """Cuts of one problem on one lattice."""

    @classmethod
    def of(
        cls, problem: CycleProblem, lattice: Lattice, deadline: Deadline = None
    ) -> CriticalCycles:
        """On all places to cut. Raises OutOfTime."""
        return cls(problem, StageTable(problem, lattice, deadline))

    @cached_property
    def least_s(self) -> float:
        """No cut has a shorter period: all work, shared out evenly."""
        every, _ = self.problem.devices.speeds[-1]
        return float(self.all.work_s[-1]) / every * (1 - FORGIVEN)

    @cached_property
    def slow_s(self) -> float:
        """More than any cut needs whose stages take turns."""
        problem, n = self.problem, self.problem.micro_batches
        every = problem.devices.every
        slowest = min(stage.speed for stage in every)
        rules = max(stage.per_byte_s for stage in every) * self.all.parameter_bytes
        sent = sum(m.wire_s + m.back_s for m in problem.messages)
        wires = min(place.wires.speed for mine in problem.devices.places for place in mine)
        sent = max(sent, max(problem.path_s, default=0.0)) / min(wires, 1.0) + 2 * problem.latency_s
        return len(problem.devices.places) * (self.all.most_s / slowest + rules + sent * n) * 2

    # The best cut ------------------------------------------------------------------------------

    def best(
        self, low_s: float, below_s: float, deadline: Deadline = None, *, within: float = 0.0
    ) -> CycleAnswer:
        """The cut whose longest cycle is shortest, of those below a period, by bisection.

        Args:
            low_s: no cut has a shorter one.
            within: of it, relative, bound and cut may differ by.
        """
        found: CycleCut | None = None
        within = max(within, _CLOSE)
        high = below_s * (1 - FORGIVEN) if math.isfinite(below_s) else self.slow_s
        if high <= 0:
            return CycleAnswer(0.0, None)
        low, step = max(low_s, self.least_s), _STEP
        # The best cut so far may be about the best of all: ever larger steps below it, until there
        # is a period that none keeps to. Where there is none that is near, ever larger ones from
        # below: of shorter periods tables are smaller.
        target, rise = high, 0.0
        if high > low * _FAR and low > 0:
            target, rise, step = low * _RISE, _RISE, 0.0
        try:
            while low < high * (1 - within):
                cut = self.keeps(min(target, high), deadline)
                if cut is None:
                    if target <= low and not step:
                        # There are no numbers between.
                        break
                    low, step = min(target, high), 0.0
                else:
                    high, rise = min(target, high, cut.period_s), 0.0
                    if found is None or cut.period_s < found.period_s:
                        found = cut
                    if cut.period_s > target * (1 + FORGIVEN):
                        # What is known of cuts together doesn't tell it from one that does.
                        within = max(within, _VAGUE)
                if rise:
                    rise = min(rise**_FASTER, _STEEPEST)
                    target = low * rise
                elif step:
                    target, step = max(high / (1 + step), low), step * 3
                elif found is not None and high <= low * _NEAR and within < _VAGUE:
                    target = high * (1 - within / 2)
                else:
                    target = math.sqrt(max(low, high / 4) * high)
        except OutOfTime:
            pass
        if found is None and low >= high:
            # Not even where there is time for everything: memory is too small.
            return CycleAnswer(below_s, None)
        return CycleAnswer(min(low, below_s), found)

    def keeps(self, target: float, deadline: Deadline = None) -> CycleCut | None:
        """A cut whose cycles keep to a period; None: none does. Raises OutOfTime."""
        table = self.table(target, deadline)
        if table is None:
            return None
        steps, at, devices = list[CycleStep](), 0, self.problem.devices
        s, state = min(
            devices.starts,
            key=lambda start: float(table.waits[start[0]][start[1]].linked[:, 0].min()),
        )
        kind = int(table.waits[s][state].linked[:, 0].argmin())
        while s < len(devices.places):
            mine = np.arange(*np.searchsorted(table.stages.below, [at, at + 1]))
            mine = mine[table.stages.kind[mine] == kind]
            best, looked, place = math.inf, None, devices.places[s][0]
            for each in devices.places[s]:
                if state in each.used:
                    waits = table.waits[s + each.stage.replicas][each.behind]
                    found = self.looked(table, mine, each, waits, s)
                    least = float(found.value.min(initial=math.inf))
                    if least < best:
                        best, looked, place = least, found, each
            assert looked is not None
            p = int(looked.value.argmin())
            which = int(looked.which[p])
            above, mode = int(table.stages.above[which]), int(table.stages.mode[which])
            flight = place.stage.flights[int(looked.flight[p])]
            steps.append(CycleStep(at, above, mode, flight, place))
            at, kind, state = above, int(looked.next_kind[p]), place.behind
            s += place.stage.replicas
        found_s = self.period_s(steps)
        if found_s > target * (1 + FORGIVEN) and self.problem.rule == "turns":
            steps, found_s = _with_enough(self, steps, found_s)
        return CycleCut(tuple(steps), found_s)

    def _fits(self, steps: Sequence[CycleStep]) -> bool:
        """Whether a cut is within the memory, as far as that is known."""
        first = steps[0].flight.units
        return all(
            self.held_bytes(step, first) <= step.place.stage.memory_bytes * FITS for step in steps
        )

    def held_bytes(self, step: CycleStep, first: int = 1) -> float:
        """What a stage holds at the least. `first`: in flight at the first stage."""
        mine, stage, flight = self._stage(step), step.place.stage, step.flight
        versions = max(flight.versions, self.problem.versions(first, flight.units))
        held = mine.once_bytes + (stage.copies + versions) * mine.parameters
        return float((held + flight.kept * mine.kept_bytes)[0])

    # A cut's own period ------------------------------------------------------------------------

    def period_s(self, steps: Sequence[CycleStep]) -> float:
        """The longest cycle of a cut, with what it has in flight."""
        timed, links = self._timed(steps), self._links(steps)
        nexts = _nexts(links, steps)
        n, whole = self.problem.micro_batches, self.problem.rule == "room"
        back = 1 if whole else n
        # Between replicas there may be several, each of which has a share.
        shares = [step.place.stage.replicas for step in steps]
        wires = [
            max(n * there_s, back * back_s)
            / (steps[s].place.wires.speed if t == s + 1 else lcm(shares[s], shares[t]))
            for (s, t), (there_s, back_s, _) in links.items()
        ]
        busy = max(float(times.busy[0]) for times in timed)
        if self.problem.flushes:
            longest_s = self._flushed_s(timed, [step.place.stage for step in steps], nexts)
        else:
            longest_s = self._turned_s(timed, steps, nexts)
        return max(busy, *wires, longest_s)

    def _timed(self, steps: Sequence[CycleStep]) -> list[Timed]:
        """Of each stage, [1]."""
        return [self.timed(self._stage(step), step.place.stage) for step in steps]

    def _links(self, steps: Sequence[CycleStep]) -> _Links:
        """Per pair of stages that exchange tensors, what a micro-batch's take on the wire there and
        back, and whether gradients come back."""
        masks, found = self.lattice.masks, _Links()
        inside = [masks[step.above] & ~masks[step.below] for step in steps]
        for message in self.problem.messages:
            s = next(k for k, mask in enumerate(inside) if mask >> message.maker & 1)
            for t in range(s + 1, len(steps)):
                if message.users & inside[t]:
                    there_s, back_s, returns = found.get((s, t), (0.0, 0.0, False))
                    found[s, t] = (
                        there_s + message.wire_s,
                        back_s + message.back_s,
                        returns or message.returns,
                    )
        return found

    def _turned_s(
        self, timed: Sequence[Timed], steps: Sequence[CycleStep], nexts: Sequence[Sequence[_Link]]
    ) -> float:
        """The longest cycle where the pipeline never drains."""
        units, turning = zip(*((x.flight.units, x.place.stage.turns) for x in steps), strict=True)
        n, longest, turns = self.problem.micro_batches, 0.0, self.problem.rule == "turns"
        rows: list[dict[int, float]] = [{} for _ in timed]
        ways, latency_s = dict[int, dict[int, Vector]](), 2 * self.problem.latency_s
        for s in range(len(timed) - 1, -1, -1):
            mine, own = rows[s], float(timed[s].own[0]) / turning[s]
            base = self._rows_from(s, rows, timed[s], nexts[s], n // turning[s])
            extra = float(timed[s].update[0]) if n == 1 or not turns else 0.0
            for u, row_s in mine.items():
                if turns:
                    longest = max(longest, n * (row_s + extra) / max(units[s] - u + 1, 1))
                else:
                    whole_s = row_s - base + n * own + extra
                    longest = max(longest, whole_s / units[s])
            if not turns:
                longest = max(longest, (n * own + extra) / units[s])
            elif self._after_updates:

                def behind(row: int, s: int = s) -> Vector:
                    sent = (sum(both_s) + latency_s + ways[t][row] for t, *both_s in nexts[s])
                    return reduce(np.maximum, sent, np.zeros(1))

                needs, ways[s] = self.turned(timed[s], steps[s].place.stage, behind)
                longest = max(longest, float(needs[0]))
            last = units[s] + 1 - turning[s] if turns else 0
            mine[last] = max(mine.get(last, 0.0), base)
        return longest

    def _rows_from(
        self, s: int, rows: Sequence[dict[int, float]], timed: Timed, nexts: Sequence[_Link], n: int
    ) -> float:
        """Enter rows of stages from one on, by what the last stage of a row has in flight, what the
        longest row takes. Returns what the stage alone does. `n`: backwards in one."""
        base = float(timed.own[0])
        if self.problem.rule != "turns":
            base = float(timed.forward[0] + n * timed.backward[0])
        for t, *wires_s in nexts:
            for u, row_s in rows[t].items():
                message_s = sum(wires_s) + 2 * self.problem.latency_s
                rows[s][u] = max(rows[s].get(u, 0.0), base + message_s + row_s)
        return base

    def _flushed_s(
        self, timed: Sequence[Timed], stages: Sequence[CycleStage], nexts: Sequence[Sequence[_Link]]
    ) -> float:
        """What a pipeline that flushes takes at the least."""
        units = [stage.flights[0].units for stage in stages]
        longest, own = 0.0, [float(times.own[0]) for times in timed]
        latency_s, places = 2 * self.problem.latency_s, range(len(own))
        before = [0.0 for _ in places]
        for s in places:
            way_s = max(before[s], float(timed[s].step[0])) + own[s] + latency_s
            for t, there_s, back_s in nexts[s]:
                before[t] = max(before[t], way_s + there_s + back_s)
        # Rows from each stage to where they end, both of them included.
        rows_s = [own[:] for _ in places]
        for s in reversed(places):
            rows = dict[int, Row]()
            for end in places[-1:] if self._replicated else places[s:]:
                beyond = filled = 0.0
                for t, there_s, back_s in nexts[s]:
                    if t <= end:
                        row_s = there_s + back_s + latency_s + rows_s[t][end]
                        busier_s, other_s = max(there_s, back_s), min(there_s, back_s)
                        waiting_s = others_s(
                            self.problem.micro_batches, busier_s, other_s, units[end]
                        )
                        beyond, filled = max(beyond, row_s), max(filled, row_s + waiting_s)
                rows_s[s][end] = own[s] + beyond
                if self._replicated:
                    filled = beyond
                rows[end] = Row(units[end], np.array([beyond]), np.array([filled]))
            # Tables have what is beyond all of a row at its last place.
            whole = rows.pop(len(own) - 1)._replace(units=self._units[-1])
            rows[len(self._units) - 1] = whole
            needs = self.drained(np.array([before[s]]), rows, timed[s], stages[s])
            longest = max(longest, float(needs[0]))
        if self.halves is not None:
            once_s = timed[0].step + rows_s[0][len(own) - 1]
            forward_s = np.maximum.reduce([times.forward for times in timed])
            backward_s = np.maximum.reduce([times.backward for times in timed])
            longest = max(longest, float(self.halves.least(forward_s, backward_s, once_s)[0]))
        return longest

    def _stage(self, step: CycleStep) -> Stages:
        """One stage, [1]."""
        return self.all.stage(step.below, step.above, step.mode)

    # All cuts ----------------------------------------------------------------------------------

    def each_below(
        self, shorter: Callable[[], float], deadline: Deadline = None
    ) -> Iterator[tuple[CycleStep, ...]]:
        """Every cut that may keep to a shorter period, depth first; with the most in flight that
        memory has room for.

        Args:
            shorter: than that, in s; what it gives may fall meanwhile.

        Raises OutOfTime.
        """

        def below() -> float:
            return min(shorter(), self.slow_s)

        target = below()
        table = self.table(target * (1 - FORGIVEN), deadline)
        if table is None:
            return
        chain, left = list[_Move](), [self._moves(table, None, target)]
        while left:
            check_time(deadline)
            if below() < target:
                target = below()
                chain, left = self._renewed(table, chain, left, target)
            if not left[-1]:
                left.pop()
                if chain:
                    chain.pop()
                continue
            chain.append(left[-1].pop())
            if chain[-1].step.above < self.lattice.size - 1:
                left.append(self._moves(table, chain[-1], target))
                continue
            yield tuple(each.step for each in chain)
            chain.pop()

    def _renewed(
        self, table: CycleTable, chain: Sequence[_Move], left: Sequence[list[_Move]], below_s: float
    ) -> tuple[list[_Move], list[list[_Move]]]:
        """The stages laid so far, as far as they keep to a period that has become shorter, and what
        is left to try at each place."""
        kept, still = list[_Move](), list[list[_Move]]()
        for s, others in enumerate(left):
            last = kept[-1] if s else None
            moves = {move.key: move for move in self._moves(table, last, below_s)}
            still.append([moves[move.key] for move in others if move.key in moves])
            if s == len(chain) or chain[s].key not in moves:
                break
            kept.append(moves[chain[s].key])
        return kept, still

    def _moves(self, table: CycleTable, last: _Move | None, below_s: float) -> list[_Move]:
        """The stages that may come next, those last that are waited for least."""
        devices, found = self.problem.devices, list[tuple[float, _Move]]()
        starts = devices.starts if last is None else ((last.beyond, last.step.place.behind),)
        for s in dict.fromkeys(s for s, _ in starts):
            for place in devices.places[s]:
                if any((s, state) in starts for state in place.used):
                    found += self._moves_to(table, last, s, place, below_s)
        return [move for _, move in sorted(found, key=lambda item: item[0])][::-1]

    def _moves_to(
        self, table: CycleTable, last: _Move | None, s: int, place: CyclePlace, below_s: float
    ) -> Iterator[tuple[float, _Move]]:
        """Of stages on one device, with what is waited for."""
        stage, n, target = place.stage, self.problem.micro_batches, below_s * (1 - FORGIVEN)
        room, low = target * (1 + ROUNDING), 0 if last is None else last.step.above
        stages = table.by_wires[place.wires].from_downset(low)
        waits = table.waits[s + stage.replicas][place.behind]
        if self.problem.rule == "turns":
            # What is in flight takes that much less time; nothing else takes more.
            waits = waits.times(min(target / table.target, 1.0))
        stages = stages.those(np.flatnonzero(any_class(waits.linked)[stages.above]))
        most, past = _most_behind(self.lattice, stages, last)
        timed = self.timed(stages, stage)
        every = np.arange(stages.count)
        beyond, _ = self.beyond(stages, every, waits)
        passed = self.passed(stages, every, waits)
        top = self._most_in_flight(stages, stage)
        units = np.array([flight.units for flight in stage.flights])[top]
        fine = (
            (timed.busy <= room)
            & (top >= 0)
            & (past >= 0)
            & suits(self.problem, stages, every, stage)
        )
        ways = np.zeros((self.all.classes, stages.count)), np.full(stages.count, NEVER)
        rest = most - timed.own
        if self.problem.flushes:
            before, around = _ways_to(stages, last)
            rows = self.rows(stages, every, waits, beyond, place.wires)
            fine &= self.drained(before, rows, timed, stage) <= room
            ways = self.onward(stages, np.maximum(before, timed.step) + timed.own, around)
        elif self.problem.rule == "turns":
            each, extra = room / n, timed.update if n == 1 else 0.0
            # No more in flight than what comes before it can wait for.
            ahead = np.floor(np.minimum(rest / each * (1 + FORGIVEN), 1e9))
            units = np.minimum(units, ahead + stage.turns - 1)
            fine &= units >= stage.flights[0].units
            rest = np.minimum(rest, (units + 1) * each - timed.own - extra)
            if self._after_updates:
                behind = partial(way_behind, stages, every, waits)
                fine &= self.turned(timed, stage, behind)[0] <= room
        else:
            rest = most - timed.forward - n // stage.turns * timed.backward
            rest = np.minimum(rest, units * room - timed.update - n // stage.turns * timed.own)
        fine &= beyond <= rest * (1 + FORGIVEN) + _TINY
        fine &= np.where(stages.on_path, NEVER, passed) <= past * (1 + FORGIVEN) + _TINY
        nexts, around = self._allowed(stages, waits, rest, past)
        fine &= (nexts >= 0).any(axis=0)
        value = self.behind(timed, beyond, np.zeros(1), stage)
        far = rest - self._way_s[stages.made]
        for p in np.flatnonzero(fine).tolist():
            flight = stage.flights[int(top[p])]
            step = CycleStep(low, int(stages.above[p]), int(stages.mode[p]), flight, place)
            way = ways[0][:, p], float(ways[1][p])
            inside, waiting = self.lattice.masks[step.above], () if last is None else last.users
            users = tuple(each for each in waiting if not inside >> each[0] & 1)
            if stages.made[p] >= 0:
                users += ((int(stages.user[p]), float(far[p])),)
            waited = nexts[:, p], around[:, p]
            yield float(value[p]), _Move(step, s + stage.replicas, waited, way, users)

    def _allowed(
        self, stages: Stages, waits: Waits, rest: Vector, past: Vector
    ) -> tuple[Vector, Vector]:
        """What may be waited for from the next stage on, if it is linked, and past it, per class,
        [K, p]; negative where the next stage can't be of that class.

        Args:
            rest: beyond stages, at the most, [p].
            past: past them, at the most, [p].
        """
        above, off = stages.above, self.all.off_path[:, stages.above]
        with np.errstate(invalid="ignore"):
            linked = np.where(stages.sent_s == NEVER, math.inf, rest - stages.sent_s)
        around = np.where(off & (stages.passed_s > NEVER), rest - stages.passed_s, math.inf)
        # What passes this stage goes to the next one on the path.
        mine = np.where(stages.on_path, math.inf, past)
        linked = np.where(off, linked, np.minimum(linked, mine))
        around = np.where(off, np.minimum(around, mine), around)
        least, least_past = waits.linked[:, above], waits.passed[:, above]
        fine = np.isfinite(least) & (least <= linked * (1 + FORGIVEN) + _TINY)
        fine &= ~off | (least_past <= around * (1 + FORGIVEN) + _TINY)
        return np.where(fine, linked, -1.0), np.where(fine, around, -1.0)

    def _most_in_flight(self, stages: Stages, stage: CycleStage) -> Positions:
        """Position of the most that stages may have in flight by their memory, [p]; -1: none."""
        found = np.full(stages.count, len(stage.flights) - 1)
        if not math.isfinite(stage.memory_bytes):
            return found
        for position in range(len(stage.flights) - 1, -1, -1):
            flight = stage.flights[position]
            versions = max(flight.versions, self.problem.versions(self.first, flight.units))
            held = stages.once_bytes + (stage.copies + versions) * stages.parameters
            over = held + flight.kept * stages.kept_bytes > stage.memory_bytes * FITS
            found -= over & (found == position)
        return found


def _most_behind(lattice: Lattice, stages: Stages, last: _Move | None) -> tuple[Vector, Vector]:
    """What the stages laid so far may wait for from some on, and past them, [p]."""
    most, past = np.full((2, stages.count), math.inf)
    if last is not None:
        most, past = last.most[0][stages.kind], last.most[1][stages.kind]
        for user, allowed in last.users:
            has = lattice.column(user)[stages.above]
            most = np.where(has, np.minimum(most, allowed), most)
    return most, past


def _ways_to(stages: Stages, last: _Move | None) -> tuple[Vector, Vector]:
    """What the ways to some stages take from the last one laid, and past it, [p]."""
    if last is None:
        return np.zeros(stages.count), np.full(stages.count, NEVER)
    return last.ways[0][stages.kind], np.full(stages.count, last.ways[1])


def _nexts(links: _Links, steps: Sequence[CycleStep]) -> list[list[_Link]]:
    """Per stage, which later ones gradients come back from, and what a message takes both ways."""
    found: list[list[_Link]] = [[] for _ in steps]
    for (s, t), (there_s, back_s, returns) in links.items():
        wires = steps[s].place.wires
        speed = wires.slowest if t == s + 1 and wires.apart else 1.0
        if returns:
            found[s].append((t, there_s / speed, back_s / speed))
    return found


def _with_enough(
    program: CriticalCycles, steps: list[CycleStep], period_s: float
) -> tuple[list[CycleStep], float]:
    """A cut with as much in flight as its shortest period within the memory takes, and that:
    tables don't know of all messages, so that it may need more than they said."""

    def holding(flights: Sequence[Flight]) -> list[CycleStep]:
        mine = zip(steps, flights, strict=True)
        return [step._replace(flight=flight) for step, flight in mine]

    n, latency_s = program.problem.micro_batches, 2 * program.problem.latency_s
    timed, nexts = program._timed(steps), _nexts(program._links(steps), steps)
    turns = [
        Turn(
            float(timed[s].own[0]),
            float(timed[s].update[0]) if n == 1 else 0.0,
            [(t, there_s + back_s + latency_s) for t, there_s, back_s in nexts[s]],
            step.place.stage.flights,
        )
        for s, step in enumerate(steps)
    ]
    _, flights = least_turning(turns, n, period_s, lambda some: program._fits(holding(some)))
    others = steps if flights is None else holding(flights)
    found_s = program.period_s(others)
    return (others, found_s) if found_s < period_s else (steps, period_s)


_TINY = 1e-15
"""Seconds that make no difference."""
