"""Pipelines that drain, on devices of any kinds: cuts by what the stages beyond them answer.

Of the stages beyond a cut those before it see one thing alone: when gradients come back to the
activations that were sent. Each does some time after one of these, whichever makes it the latest:
so what they answer is a matrix, the longest way from each micro-batch that was sent to each that
comes back, and a stage before them makes another one of it (`_run`). Of chains with the same
devices none is better than one whose matrix is nowhere above its own. Of each downset and vector of
devices a few matrices are kept, and the least of all others', number by number, which is above none
of them. What is before a cut is a matrix too: when activations are sent, and when all is over, by
the gradients that come back; of that the least of all chains', by the devices beyond the cut. Of
both together there is a period (`_closed`): where that is above a target, no chain keeps to it. A
chain of which nothing was lost has the period of its plan, but for messages beside the path
(`waits.Ways`).

Index letters: R rows, E entries; n micro-batches; S sources, which times count from; D downsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ..dp.kinds import NEAR, KindCut, Kinds, KindStage
from ..dp.kinds_waiting import WaitingProgram
from ..dp.lattice import Flags, Lattice, Positions
from ..dp.program import SLACK
from ..problem import Vector
from ..waits import Ways

_MOST_MICRO_BATCHES = 32
"""With more, matrices are too large."""

_MOST_STEPS, _MOST_BEFORE = 100_000_000_000, 1_000_000_000
"""Vectors × stages × the numbers of a matrix, and devices × stages × those: with more, going
through all takes too long."""

_NUMBERS = 1_280_000
"""Of the matrices that are kept with as many devices, about."""

_FEWEST, _MOST = 4, 200
"""Matrices of a downset and a vector of devices that are kept at the most, where there are many of
those and where there are few."""

_BEAM_NUMBERS, _BEAM = 20_000, 60
"""Of those that are kept at first, however many are possible; and as many matrices at the least."""

_TRIED = 8
"""Cuts for one target at the most."""

_CHUNK = 2_000_000
"""Numbers of matrices that are made together."""

_HELD = 50_000_000
"""Numbers of matrices that are made before those worth keeping are chosen."""

_ROUNDING = 1e-12
"""Of a target; less than what loads must be below it by (`just_below`)."""

Times = NDArray[np.float64]
"""When something is over, at the least, from each source on, [R, S]."""

Turns = Sequence[tuple[bool, int]]
"""What a stage runs of a mini-batch: whether it is a forward, and of which micro-batch."""


@cache
def _turns(n: int, ahead: int) -> Turns:
    """With so many forwards before the first backward's own."""
    first = [(True, i) for i in range(ahead)]
    pairs = [(kind, i + ahead * kind) for i in range(n - ahead) for kind in (True, False)]
    return [*first, *pairs, *((False, i) for i in range(n - ahead, n))]


def _run(
    turns: Turns,
    r: int,
    seconds: tuple[Vector, Vector],
    came: Callable[[int], Times],
    returned: Callable[[int], Times],
    ended: tuple[list[Times], list[Times]],
) -> None:
    """Run stages with r replicas, each its own micro-batches.

    Args:
        seconds: of a forward and of a backward, [R].
        came, returned: when a micro-batch's activations are there, when its gradients.
        ended: forwards and backwards, to which they are added.
    """
    free: dict[int, Times] = {}
    for forward, i in turns:
        start = came(i) if forward else returned(i)
        if i % r in free:
            start = np.maximum(start, free[i % r])
        free[i % r] = end = start + seconds[not forward][:, None]
        ended[not forward].append(end)


@dataclass
class _Wire:
    """What messages take, one after another if `serial`; [R] each."""

    wire_s: Vector
    latency_s: Vector
    serial: bool
    _free: Times | None = None

    def sent(self, made: Times) -> Times:
        """When the next message is there."""
        if self._free is not None and self.serial:
            made = np.maximum(made, self._free)
        self._free = made + self.wire_s[:, None]
        there: Times = self._free + self.latency_s[:, None]
        return there


def _closed(turns: Turns, before: Vector, beyond: Vector) -> Vector:
    """Periods of what is before cuts, [R, n + 1, n + 1], with what is beyond them, [R, n, n]."""
    n = beyond.shape[1]
    sent, back = np.full((2, *beyond.shape[:2]), -np.inf)
    for forward, i in turns:
        if forward:
            sent[:, i] = np.maximum(before[:, i, 0], (before[:, i, 1:] + back).max(axis=1))
        else:
            back[:, i] = (beyond[:, i] + sent).max(axis=1)
    period_s: Vector = np.maximum(before[:, n, 0], (before[:, n, 1:] + back).max(axis=1))
    return period_s


@dataclass(frozen=True)
class _StagesOf:
    """Stages of the same kind, replicas and option, by their upper downset, [p].

    Attributes:
        below, above: positions of downsets.
        forward_s, backward_s: of a micro-batch.
        units: in flight at the most.
        on_path: some of the layers are on the path.
    """

    below: Positions
    above: Positions
    forward_s: Vector
    backward_s: Vector
    units: NDArray[np.int16]
    on_path: Flags

    def those(self, which: Positions) -> _StagesOf:
        """Some of them."""
        return _StagesOf(*(column[which] for column in vars(self).values()))


@dataclass
class _Level:
    """What is reached with so many devices, [E].

    Attributes:
        vector, below: of devices, and the downset, by position.
        beyond: matrices, [E, n, n].
        period_s: with what is before, at the least.
        parent, key, above: the entry that it is made of, with a stage before it: that one's
            position in the list of keys, and its upper downset.
    """

    vector: Positions
    below: Positions
    beyond: Vector
    period_s: Vector
    parent: Positions
    key: Positions
    above: Positions

    def those(self, which: Positions) -> _Level:
        """Some of them."""
        return _Level(*(column[which] for column in vars(self).values()))


class AnsweringProgram(WaitingProgram):
    """Cuts on a lattice, on devices of any kinds in any sequence, by what is beyond them."""

    rises = True

    def __init__(
        self, kinds: Kinds, lattice: Lattice, ways: Ways, deadline: float | None = None
    ) -> None:
        """As `WaitingProgram`."""
        super().__init__(kinds, lattice, ways, deadline)
        self._forward = self._program.costs.summed(ways.forward_s)
        inside = (self._passed > 0) & (self._passed < len(ways.path))
        self._latency_s = np.where(inside, ways.latency_s, 0.0)
        self._wire_s = np.maximum(self._message_s / 2 - self._latency_s, 0.0)

    @property
    def quick(self) -> bool:
        """Whether all that may be reached can be gone through in seconds."""
        n = self._ways.micro_batches
        if self._kinds.mixed and len(self._kinds.counts) > 1:
            # Which of a stage's replicas is the slowest isn't known, and counts for much.
            return False
        if not self._ways.flushes or n > _MOST_MICRO_BATCHES or not super().quick:
            return False
        stages = self._steps // len(self._counts)
        few = self._devices * stages * (n + 1) ** 2 <= _MOST_BEFORE
        return few and self._steps * n * n <= _MOST_STEPS

    def under(self, target: float) -> list[KindCut]:
        """See `WaitingProgram`."""
        found = _Answers(self, target * (1 + _ROUNDING))
        return found.cuts(self.beam) or found.cuts()

    def soon(self, target: float) -> list[KindCut] | None:
        """See `WaitingProgram`."""
        found = _Answers(self, target * (1 + _ROUNDING))
        cuts = found.cuts(self.beam)
        return cuts if cuts or found.complete else None

    @property
    def beam(self) -> int:
        """Matrices with as many devices that cuts are looked for with at first."""
        return max(_BEAM_NUMBERS // self._ways.micro_batches**2, _BEAM)

    @cached_property
    def falling(self) -> bool:
        """Whether a faster device does for any."""
        memory = [problem.place(0, 1).memory_bytes for problem in self._kinds.problems]
        return all(a >= b for a, b in pairwise(memory))

    @property
    def ordered(self) -> bool:
        """Whether it does by itself: replicas may be of several kinds."""
        return self.falling and self.alone

    def of(self, used: NDArray[np.int32]) -> Positions:
        """Vectors by the devices that are at least as fast as each kind, [n, G]."""
        codes, order = self._codes
        found: Positions = np.diff(used, axis=1, prepend=0) @ self._radix[:-1]
        return order[np.searchsorted(codes, found)]

    def turns(self, k: int, r: int) -> Turns:
        """Those of a stage with r of k devices."""
        n = self._ways.micro_batches
        return _turns(n, n if self._ways.forwards_first else min((-(-k // r) - 1) * r, n - 1))

    def stages_of(self, target: float, key: tuple[int, int, int]) -> _StagesOf:
        """Those with loads up to a target. `key`: kind, replicas, and which of their options."""
        kind, r, which = key
        table, speeds, n = self._loads[kind][NEAR][r], self._kinds.speeds, self._ways.micro_batches
        above, below = np.nonzero((table.load[which] <= target).T)
        # Some replicas may be faster than the slowest, whose kind it is.
        speed = speeds[0] if self._kinds.mixed and r > 1 else speeds[kind]
        work = self._program.costs.compute[self._problem.options[table.options[which]].mode] / n
        forward = np.maximum(self._forward[above] - self._forward[below], 0.0)
        return _StagesOf(
            below,
            above,
            forward / speed,
            np.maximum(work[above] - work[below] - forward, 0.0) / speed,
            table.units[which, below, above],
            self._passed[above] > self._passed[below],
        )

    def wire(self, at: Positions) -> _Wire:
        """That of the path's messages which cross downsets."""
        return _Wire(self._wire_s[at], self._latency_s[at], self.alone)


class _Answers:
    """What is reached under a target."""

    def __init__(self, program: AnsweringProgram, target: float) -> None:
        """Go through what is before cuts. Raises OutOfTime."""
        self._program, self._target, self._n = program, target, program._ways.micro_batches
        self._keys = [
            (kind, r, which)
            for kind, links in enumerate(program._loads)
            for r, table in links[NEAR].items()
            for which in range(len(table.options))
        ]
        self._stages = [program.stages_of(target, key) for key in self._keys]
        self._unit = np.where(np.eye(self._n, dtype=np.bool_), 0.0, -np.inf)
        self._before, self._levels = self._all_before(), list[_Level]()
        self._beam: int | None = None
        self.complete = True

    def cuts(self, beam: int | None = None) -> list[KindCut]:
        """Those within the target, the best first; one at least, if any is. Raises OutOfTime.

        Args:
            beam: of matrices with as many devices so many are kept, and nothing of the others;
                `complete`: there weren't any others.
        """
        self._beam = beam
        one, top = np.zeros(1, dtype=np.intp), self._program._lattice.size - 1
        nothing = np.full((1, self._n, self._n), -np.inf)
        self._levels = [_Level(one, one + top, nothing, np.zeros(1), one, one, one)]
        for k in range(1, self._program._devices + 1):
            made = list[_Level]()
            for part in (x for at in range(len(self._keys)) for x in self._made(k, at)):
                made.append(part)
                if sum(x.beyond.size for x in made) > _HELD:
                    made = [self._kept(made)]
            self._levels.append(self._kept(made))
        whole = [
            (float(level.period_s[e]), k, e)
            for k, level in enumerate(self._levels)
            for e in np.flatnonzero(level.below == 0).tolist()
        ]
        return [KindCut(self._chain(k, e), s) for s, k, e in sorted(whole)[:_TRIED]]

    def _chain(self, k: int, e: int) -> tuple[KindStage, ...]:
        program, found = self._program, list[KindStage]()
        masks, left = program._lattice.masks, list(program._kinds.counts)
        while k:
            level = self._levels[k]
            kind, r, which = self._keys[level.key[e]]
            layers = masks[level.above[e]] & ~masks[level.below[e]]
            option = program._loads[kind][NEAR][r].options[which]
            if program.ordered:
                # There may be fewer devices than those that several chains have in common.
                kind = next(g for g in (*range(kind, len(left)), *range(kind)) if left[g] >= r)
                left[kind] -= r
            found.append(KindStage(layers, option, kind))
            k, e = k - r, int(level.parent[e])
        return tuple(found)

    def _parts(self, at: Positions) -> list[Positions]:
        """Rows to be looked at together."""
        self._program._check()
        return np.array_split(at, len(at) * (self._n + 1) ** 2 // _CHUNK + 1) if len(at) else []

    # What is before cuts -----------------------------------------------------------------------

    def _all_before(self) -> list[Vector]:
        """By devices beyond downsets, [K + 1] of [D, n + 1, n + 1]; infinite: nothing is."""
        n, devices = self._n, self._program._devices
        nothing = np.full((self._program._lattice.size, n + 1, n + 1), np.inf)
        nothing[0] = -np.inf
        nothing[0, :n, 0] = nothing[0, n, 1:] = 0.0
        found = [nothing.copy() for _ in range(devices + 1)]
        for k in range(devices, 1, -1):
            if self._goes_on(found, k):
                found[k - 1] = found[k]
                continue
            there = found[k][:, n, 1:].max(axis=1) < np.inf
            for (kind, r, _), stages in zip(self._keys, self._stages, strict=True):
                if kind and self._program.falling:
                    continue
                fits = there[stages.below] & (stages.units >= -(-k // r))
                at = np.flatnonzero(fits & (stages.above < len(there) - 1))
                for part in self._parts(at) if r < k else ():
                    some, into = stages.those(part), found[k - r]
                    made = self._extended(found[k][some.below], k, r, some)
                    starts = np.flatnonzero(np.diff(some.above, prepend=-1))
                    least = np.minimum.reduceat(made, starts, axis=0)
                    above = some.above[starts]
                    into[above] = np.minimum(into[above], least)
        return found

    def _goes_on(self, found: Sequence[Vector], k: int) -> bool:
        """Whether with a device less beyond downsets there is no other way to do without it."""
        turns, more = self._program.turns, min(k + 1, self._program._devices)
        same = self._program.alone and k < more and turns(k, 1) == turns(more, 1)
        return same and np.array_equal(found[k], found[more])

    def _extended(self, before: Vector, k: int, r: int, stages: _StagesOf) -> Vector:
        """What is before stages, and then they themselves."""
        n, rows = self._n, len(before)
        there, back = self._program.wire(stages.below), self._program.wire(stages.below)
        forwards, backwards, arrived = list[Times](), list[Times](), list[Times]()
        unit = np.concatenate([np.full((n, 1), -np.inf), self._unit], axis=1)

        def leaves(i: int) -> Times:
            arrived.extend(back.sent(times) for times in backwards[len(arrived) :])
            times = np.full((rows, n + 1), -np.inf)
            times[:, 0] = before[:, i, 0]
            for j, arrival in enumerate(arrived):
                times = np.maximum(times, before[:, i, 1 + j, None] + arrival)
            return times

        _run(
            self._program.turns(k, r),
            r,
            (stages.forward_s, stages.backward_s),
            lambda i: there.sent(leaves(i)),
            lambda j: unit[j],
            (forwards, backwards),
        )
        made = np.stack([*forwards, leaves(n)], axis=1)
        return np.where(stages.on_path[:, None, None], made, before)

    # What is beyond them -----------------------------------------------------------------------

    def _made(self, k: int, at: int) -> Iterator[_Level]:
        """What stages of a key make, with the devices beyond them, of k devices in all."""
        program, (kind, r, _), stages = self._program, self._keys[at], self._stages[at]
        if r > k:
            return
        level, n = self._levels[k - r], self._n
        vector, before = program.more(level.vector, kind, r), self._before[k]
        # For each entry all stages that end where it begins.
        first = np.searchsorted(stages.above, level.below, side="left")
        count = np.searchsorted(stages.above, level.below, side="right") - first
        count[vector < 0] = 0
        entry = np.repeat(np.arange(len(count)), count)
        p = np.arange(len(entry)) + np.repeat(first + count - np.cumsum(count), count)
        left = program._power - program._counts[vector] @ np.array(program._kinds.speeds)
        fine = stages.units[p] >= -(-k // r)
        fine &= before[stages.below[p], n, 1:].max(axis=1) < np.inf
        most = self._target * (1 + SLACK) * left / n + SLACK * program._own[-1]
        fine &= program._own[stages.below[p]] <= most[entry]
        for part in self._parts(np.flatnonzero(fine)):
            some, e = stages.those(p[part]), entry[part]
            beyond = self._prepended(level.beyond[e], k, r, some)
            period_s = _closed(program.turns(k, r), before[some.below], beyond)
            within = np.flatnonzero(period_s <= self._target)
            key = np.full(len(e), at)
            made = _Level(vector[e], some.below, beyond, period_s, e, key, some.above)
            yield made.those(within)

    def _prepended(self, beyond: Vector, k: int, r: int, stages: _StagesOf) -> Vector:
        """What stages answer that have others beyond them, with the messages to them."""
        n, forwards, backwards = self._n, list[Times](), list[Times]()

        def returned(j: int) -> Times:
            found = forwards[0] + beyond[:, j, :1]
            for i in range(1, len(forwards)):
                found = np.maximum(found, forwards[i] + beyond[:, j, i, None])
            return found

        seconds = stages.forward_s, stages.backward_s
        ended, unit = (forwards, backwards), self._unit
        _run(self._program.turns(k, r), r, seconds, lambda i: unit[i], returned, ended)
        there, back = self._program.wire(stages.below), self._program.wire(stages.below)
        made = np.stack([back.sent(times) for times in backwards], axis=1)
        # From the last on: a message is sent after those before it.
        for i in range(n - 1, -1, -1):
            made[:, :, i] = there.sent(made[:, :, i])
        return np.where(stages.on_path[:, None, None], made, beyond)

    def _kept(self, parts: Sequence[_Level]) -> _Level:
        """Of each vector and downset, the best, and the least of the others."""
        if not parts:
            return self._levels[0].those(np.arange(0))
        found = _Level(*map(np.concatenate, zip(*(vars(x).values() for x in parts), strict=True)))
        if not len(found.below):
            return found
        # Devices at least as fast as each kind: with fewer of them, more is left.
        used = np.cumsum(self._program._counts[found.vector], axis=1)
        order = np.lexsort((found.period_s, found.below, found.vector))
        same = np.stack([found.vector, found.below])
        if self._beam is not None:
            return found.those(self._likely(found, order, self._beam))
        states = int((_ranked(same[:, order])[1] == 0).sum())
        entries = _NUMBERS // self._n**2
        if states * _FEWEST > entries and self._program.ordered:
            # Of each downset alone, with as few of the faster devices as any of the others has.
            order, same = np.lexsort((found.period_s, found.below)), found.below[None]
            states = int((_ranked(same[:, order])[1] == 0).sum())
        same, most = same[:, order], min(max(entries // states, _FEWEST), _MOST)
        for place in range(most):
            first, rank = _ranked(same)
            at = np.flatnonzero(rank > place)
            best = order[first[at] + place]
            beaten = (used[best] <= used[order[at]]).all(axis=1)
            # Most are seen not to be by the first way and the whole of it.
            for i in (0, self._n - 1):
                at, best = at[beaten], best[beaten]
                beaten = found.beyond[best, i, 0] <= found.beyond[order[at], i, 0]
            at, best = at[beaten], best[beaten]
            at = at[(found.beyond[best] <= found.beyond[order[at]]).all(axis=(1, 2))]
            order, same = np.delete(order, at), np.delete(same, at, axis=1)
        kept = np.flatnonzero(_ranked(same)[1] < most)
        beyond = np.minimum.reduceat(found.beyond[order], kept, axis=0)
        vector = self._program.of(np.minimum.reduceat(used[order], kept, axis=0))
        found = found.those(order[kept])
        found.beyond, found.vector = beyond, vector
        return found

    def _likely(self, found: _Level, order: Positions, most: int) -> Positions:
        """So many that are likely to be of good cuts. `order`: by vector and downset."""
        if len(order) <= most:
            return order
        self.complete = False
        same = np.stack([found.vector, found.below])[:, order]
        order = order[_ranked(same)[1] < _FEWEST]
        # Where the devices that are left have more to do than all have, that takes longer.
        program, at = self._program, found.below[order]
        left = program._power - program._counts[found.vector[order]] @ np.array(
            program._kinds.speeds
        )
        share = program._own[at] / np.maximum(left, SLACK * program._power)
        more = np.maximum(share - program._own[-1] / program._power, 0.0)
        guess = found.period_s[order] + self._n * more
        return order[np.argsort(guess, kind="stable")[:most]]


def _ranked(same: NDArray[np.intp]) -> tuple[Positions, Positions]:
    """Where those begin that a column is the same as, and its place among them."""
    starts = np.flatnonzero((np.diff(same, axis=1, prepend=-1) != 0).any(axis=0))
    first = np.repeat(starts, np.diff(starts, append=same.shape[1]))
    return first, np.arange(same.shape[1]) - first
