"""Devices of several kinds in any sequence, where stages wait: for the way to the end and back.

As `kinds`, with one number more. Under a target for the period, a stage may wait for what lies
beyond it (`partition.waits.Ways`) the longer, the less it and what lies before it take. So of all
chains with the same devices beyond a downset the one with the shortest way to the end and back is
as good as any: a state has that way, in s, where `kinds` has a flag. What lies before a stage is
the rest of a micro-batch's whole way: no chain has a period within the target if none has for any
length of that, which is tried in ever shorter spans. Where the pipeline never drains, states have
how much longer ways take than their share of the period.

Index letters: D downsets; G kinds; V vectors of counts; p stages, by their two downsets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
from numpy.typing import NDArray

from ..problem import Vector
from ..waits import Ways
from .kinds import NEAR, KindCut, KindProgram, Kinds, KindStage
from .lattice import Flags, Lattice, Positions
from .program import SLACK

_MOST_STATES = 50_000_000
"""V × D: more are too many to hold; eight times that in bytes."""

_MOST_STEPS = 1_500_000_000
"""Vectors × stages: with more, going through all takes too long."""

_STEPS_EACH = 4_000_000_000
"""For one target, whose spans are as short as that allows."""

_CHUNK = 4_000_000
"""Numbers that are looked at together."""

_ROUNDING = 1e-12
"""Of a target; less than what loads must be below it by (`just_below`)."""

_SPAN = 2e-3
"""Of a target, the shortest span of ways."""


@dataclass(frozen=True)
class _StagesWithin:
    """Stages within a target with the same kind and replicas, [p].

    Attributes:
        below, above: positions of downsets; by the lower one, ascending.
        option: in the problem's.
        units: in flight at the most.
        own_s: what one micro-batch takes.
        way_s: at the least, with the message that it comes by; 0 for stages beside the path.
        on_path: some of its layers are on the path.
    """

    below: Positions
    above: Positions
    option: Positions
    units: NDArray[np.int16]
    own_s: Vector
    way_s: Vector
    on_path: Flags

    def those(self, which: Flags) -> _StagesWithin:
        """Some of them."""
        return _StagesWithin(*(column[which] for column in vars(self).values()))


class WaitingProgram(KindProgram):
    """Cuts on a lattice, on devices of several kinds in any sequence, by what stages wait for.

    Attributes:
        alone: no stage has replicas.
        rises: targets are soon excluded, unless they are near what can't be.
    """

    rises = False

    def __init__(
        self, kinds: Kinds, lattice: Lattice, ways: Ways, deadline: float | None = None
    ) -> None:
        """As `KindProgram`, of a problem whose loads are stages' own; links are all the same."""
        super().__init__(kinds, lattice, deadline)
        costs, marks = self._program.costs, np.zeros(len(ways.work_s))
        marks[list(ways.path)] = 1.0
        self._ways, self._own = ways, costs.summed(ways.work_s)
        self._along = costs.summed(ways.work_s * marks)
        self._passed = np.rint(costs.summed(marks)).astype(np.intp)
        # Of the path's message that crosses a downset.
        self._message_s = np.array([0.0, *ways.message_s, 0.0])[self._passed]
        self.alone = all(option.replicas == 1 for option in self._problem.options)

    @property
    def quick(self) -> bool:
        """Whether all states can be held, and gone through in seconds."""
        size = self._lattice.size
        few = math.prod(most + 1 for most in self._most) * size <= _MOST_STATES
        return few and self._steps <= _MOST_STEPS

    @cached_property
    def _steps(self) -> int:
        """What going through all states takes at the most."""
        tables = (table for links in self._loads for table in links[NEAR].values())
        stages = sum(int(np.isfinite(table.load).any(axis=0).sum()) for table in tables)
        return len(self._counts) * stages

    @property
    def _most(self) -> list[int]:
        """Of each kind, the devices that a vector may have: faster ones may stand in for others."""
        counts = self._kinds.counts
        return [sum(counts[: g + 1]) if self._kinds.mixed else c for g, c in enumerate(counts)]

    @cached_property
    def _counts(self) -> NDArray[np.int32]:
        """All vectors of devices, the fewest first, [V, G]."""
        ranges = [np.arange(most + 1, dtype=np.int32) for most in self._most]
        found = np.stack(np.meshgrid(*ranges, indexing="ij"), axis=-1).reshape(-1, len(ranges))
        if self._kinds.mixed:
            padded = np.concatenate([found, np.zeros((len(found), 1), dtype=np.int32)], axis=1)
            found = found[self._there(padded, 0)]
        return found[np.argsort(found.sum(axis=1), kind="stable")]

    @cached_property
    def _codes(self) -> tuple[NDArray[np.int64], Positions]:
        """Vectors as single numbers, ascending, and where each of these is in the list."""
        codes = self._counts @ self._radix[:-1]
        order = np.argsort(codes)
        return codes[order], order

    def _fewer(self, at: Positions, kind: int, r: int) -> Positions:
        """Vectors with r fewer of a kind; −1 where there are none."""
        codes, order = self._codes
        found: Positions = np.full(len(at), -1, dtype=np.intp)
        there = self._counts[at, kind] >= r
        wanted = self._counts[at[there]] @ self._radix[:-1] - r * int(self._radix[kind])
        found[there] = order[np.searchsorted(codes, wanted)]
        return found

    def more(self, at: Positions, kind: int, r: int) -> Positions:
        """Vectors with r more of a kind; −1 where there are none."""
        codes, order = self._codes
        wanted = self._counts[at] @ self._radix[:-1] + r * int(self._radix[kind])
        place = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
        # With more of a kind than there are, codes are those of other vectors.
        there = (codes[place] == wanted) & (self._counts[at, kind] + r <= self._most[kind])
        found: Positions = np.where(there, order[place], -1)
        return found

    def under(self, target: float) -> list[KindCut]:
        """Cuts that may have a period up to a target; none where none has. Raises OutOfTime."""
        keys = product(range(len(self._kinds.counts)), self._loads[0][NEAR])
        stages = {key: self._stages_within(target, *key) for key in keys}
        often = max(_STEPS_EACH // self._steps, 3)
        spans = [(float(self._along[-1]) / self._kinds.speeds[0] * (1 - SLACK), target)]
        while spans:
            low, high = spans.pop()
            found = _WaysUnder(self, target, (low, high), stages)
            vector, low = found.shortest()
            often -= 1
            if low > high * (1 + SLACK):
                continue
            cut, certain = found.cut(vector)
            # Where the pipeline never drains, a state's number isn't a whole way.
            known = not self._ways.flushes or high - low < _SPAN * target
            if certain or known or often <= 0:
                return [cut]
            middle = (low + high) / 2
            spans += [(middle, high), (low, middle)]
        return []

    def soon(self, target: float) -> list[KindCut] | None:
        """The same, or None where that takes longer to see."""
        return self.under(target)

    def _stages_within(self, target: float, kind: int, r: int) -> _StagesWithin:
        table, speeds = self._loads[kind][NEAR][r], self._kinds.speeds
        units = np.where(table.load <= target, table.units, 0)
        below, above = np.nonzero(units.max(axis=0) > 0)
        which = units.argmax(axis=0)[below, above]
        # A micro-batch's way may be by a faster replica.
        speed = speeds[0] if self._kinds.mixed and r > 1 else speeds[kind]
        on_path = self._passed[above] > self._passed[below]
        work = np.maximum(self._own[above] - self._own[below], 0.0)
        way_s = work / speed + self._message_s[below]
        return _StagesWithin(
            below,
            above,
            np.array(table.options, dtype=np.intp)[which],
            units[which, below, above],
            work / speeds[kind],
            np.where(on_path, way_s, 0.0),
            on_path,
        )


class _WaysUnder:
    """What is reached under a target by micro-batches whose whole way is in a span."""

    def __init__(
        self,
        program: WaitingProgram,
        target: float,
        span: tuple[float, float],
        stages: dict[tuple[int, int], _StagesWithin],
    ) -> None:
        """Go through all states. `stages`: by kind and replicas. Raises OutOfTime."""
        self._program, self._target, self._stages = program, target, stages
        self._whole_s, longest_s = span
        # Before a stage there is all else that is on the path, and the message to it.
        fewest = program._along / program._kinds.speeds[0] * (1 - SLACK)
        self._before_s = fewest + program._message_s
        self._most_s = longest_s * (1 + SLACK) - (self._before_s if program._ways.flushes else 0.0)
        self._way_s = np.full((len(program._counts), len(fewest)), np.inf)
        self._way_s[0, -1] = 0.0
        devices, widest = program._counts.sum(axis=1), max(len(x.below) for x in stages.values())
        for k in range(1, program._devices + 1):
            at = np.flatnonzero(devices == k)
            for part in np.array_split(at, len(at) * widest // _CHUNK + 1):
                self._fill(part, k)

    def shortest(self) -> tuple[int, float]:
        """The vector with the shortest way through the whole model, and this."""
        vector = int(self._way_s[:, 0].argmin())
        return vector, max(float(self._way_s[vector, 0]), self._whole_s)

    def _possible(self, at: Positions) -> Flags:
        """Whether the devices that are left can do the work below, [n, D]."""
        program = self._program
        left = program._power - program._counts[at] @ np.array(program._kinds.speeds)
        most = self._target * (1 + SLACK) * left[:, None] / program._ways.micro_batches
        found: Flags = program._own <= most + SLACK * program._own[-1]
        return found

    def _found(
        self, at: Positions, k: int, kind: int, r: int, wanted: Flags
    ) -> tuple[_StagesWithin, Vector]:
        """Stages that lead to vectors of k devices, and the ways with them, [n, p]."""
        program, stages = self._program, self._stages[kind, r]
        fewer = program._fewer(at, kind, r)
        way_s = self._way_s[fewer]
        way_s[fewer < 0] = np.inf
        reached = np.isfinite(way_s).any(axis=0)
        fits = stages.units >= -(-k // r)
        stages = stages.those(reached[stages.above] & wanted[stages.below] & fits)
        most = program._ways.most_beyond(
            self._target,
            (k, r),
            stages.own_s,
            self._before_s[stages.below],
            self._whole_s,
            alone=program.alone,
        )
        most[~stages.on_path] = np.inf
        most += _ROUNDING * self._target
        some = most >= way_s.min(axis=0)[stages.above]
        stages, most = stages.those(some), most[some]
        way_s = way_s[:, stages.above]
        longer_s = program._ways.longer(self._target, way_s, stages.way_s, alone=program.alone)
        return stages, np.where(way_s <= most, longer_s, np.inf)

    def _fill(self, at: Positions, k: int) -> None:
        possible = self._possible(at)
        wanted = np.asarray(possible.any(axis=0))
        found = np.full(possible.shape, np.inf)
        for kind, r in self._stages:
            self._program._check()
            stages, way_s = self._found(at, k, kind, r, wanted)
            if len(stages.below):
                starts = np.flatnonzero(np.diff(stages.below, prepend=-1))
                columns = stages.below[starts]
                least = np.minimum.reduceat(way_s, starts, axis=1)
                found[:, columns] = np.minimum(found[:, columns], least)
        self._way_s[at] = np.where(possible & (found <= self._most_s), found, np.inf)

    def cut(self, vector: int) -> tuple[KindCut, bool]:
        """The one with the shortest way, and whether its stages keep to the target by all that is
        known of waits."""
        program, below, certain = self._program, 0, True
        masks, size = program._lattice.masks, program._lattice.size
        chain, whole_s = list[KindStage](), float(self._way_s[vector, 0])
        while below != size - 1:
            at, k = np.array([vector]), int(program._counts[vector].sum())
            wanted = np.zeros(size, dtype=np.bool_)
            wanted[[below]] = True
            ways = []
            for kind, r in self._stages:
                stages, way_s = self._found(at, k, kind, r, wanted)
                if len(stages.below):
                    p = int(way_s[0].argmin())
                    ways.append((float(way_s[0, p]), kind, r, p, stages))
            way, kind, r, p, stages = min(ways, key=lambda way: way[0])
            above, own_s = int(stages.above[p]), stages.own_s[p : p + 1]
            before_s = np.array([whole_s - way]) + program._message_s[below]
            most = program._ways.most_beyond(
                self._target, (k, r), own_s, before_s, 0.0, alone=program.alone
            )
            beyond_s = way - float(stages.way_s[p])
            certain &= bool(beyond_s <= most[0] + _SPAN * self._target or not stages.on_path[p])
            chain.append(KindStage(masks[above] & ~masks[below], int(stages.option[p]), kind))
            vector, below = int(program._fewer(at, kind, r)[0]), above
        return KindCut(tuple(chain), self._target), certain
