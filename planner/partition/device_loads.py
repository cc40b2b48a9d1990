"""Cuts whose devices have several stages, listed by what the busiest device has to do.

A cut is a chain of downsets as in `problem`; a placement says which device runs which of its S
stages. A device's load is the sum of its stages', which lie apart in the chain: no program over the
chain alone finds the best. So cuts are listed: stage by stage, none that can't stay below a target
any more, on the stage's device, on the wires between it and the device of the stage before, or on
all devices together that are still to get stages.

Index letters: D downsets; S stages; s stage; d device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import inf
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from .dp.lattice import Lattice, Positions, joined
from .problem import FITS, StageProblem, Vector, members

MOST_STEPS = 60_000
"""Stages that are begun while cuts below one target are listed; with more, not all are."""

_ROUNDING = 1 + 1e-12

_Wires = dict[tuple[int, int], float]
"""Seconds for which messages keep the wire from one device to another, per period."""


@dataclass(frozen=True, eq=False)
class DeviceCount:
    """What layers add to the device they are on, whichever stage; one of several ways to count.

    Attributes:
        each: per layer, [n]: in s on a device of speed 1, or in bytes.
        fixed: for each stage with parameters.
        before: of layers before the first stage of a device, what runs besides all its work, in s;
            [n].
        after: the same of layers behind its last one.
        in_bytes: held against devices' memory; else against their speed times a target.
    """

    each: Vector
    fixed: float = 0.0
    before: Vector | None = None
    after: Vector | None = None
    in_bytes: bool = False


@dataclass(frozen=True)
class SentOn:
    """A tensor that goes from the device of one stage to that of the next.

    Attributes:
        maker: the layer that makes it.
        users: bit mask of those that use it.
        there_s, back_s: of it, and of its gradients, on the fastest wire.
    """

    maker: int
    users: int
    there_s: float
    back_s: float


class _Sums:
    """A `DeviceCount` over each downset, [D]; and `alone`, what the largest group of layers is on
    the device that it is on, without any other."""

    def __init__(self, places: StageEnds, count: DeviceCount) -> None:
        self.fixed, self.in_bytes = count.fixed, count.in_bytes
        self.inside = places.sums(count.each)
        rows = [list(members(group)) for group in places.groups]
        self.alone = max(
            float(count.each[row].sum() + count.fixed * places.parameter_bytes[row].any())
            for row in rows
        )
        none = np.zeros(places.lattice.size)
        self.before = none if count.before is None else places.sums(count.before)
        self.after = none
        if count.after is not None:
            below = places.sums(count.after)
            self.after = below[-1] - below


@dataclass(frozen=True)
class PlacedCut:
    """Attributes:
    downsets: bit masks of the S + 1 downsets, the empty one first.
    load_s: of the busiest device, or wire.
    """

    downsets: tuple[int, ...]
    load_s: float


class StageEnds:
    """The downsets of a graph between which stages lie.

    Attributes:
        lattice: those there are, or some of them.
        groups: bit masks of layers that no downset takes apart, in topological order.
    """

    def __init__(self, problem: StageProblem, lattice: Lattice) -> None:
        self.lattice, self.groups = lattice, joined(problem)
        self.layers, self._needs = problem.layers, problem.needs
        self.parameter_bytes = problem.parameter_bytes
        self.parameters = self.sums(problem.parameter_bytes)
        heads = np.zeros(problem.layers)
        heads[[next(members(group)) for group in self.groups]] = 1.0
        self.ranks = self.sums(heads)
        self.above = lru_cache(maxsize=4096)(self._above)
        self.holding = lru_cache(maxsize=4096)(self._holding)

    @property
    def top(self) -> int:
        """Position of the full downset."""
        return self.lattice.size - 1

    def sums(self, values: Vector) -> Vector:
        """Of a value for each layer, over each downset, [D]."""
        total = np.zeros(self.lattice.size)
        for layer in np.flatnonzero(values).tolist():
            total += self.lattice.column(layer) * values[layer]
        return total

    def _above(self, below: int) -> Positions:
        """The downsets that hold this one and more, by position."""
        words = self.lattice.words
        holds = (words & words[below] == words[below]).all(axis=1)
        holds[below] = False
        return np.flatnonzero(holds)

    def _holding(self, layers: int) -> NDArray[np.bool_]:
        """Which downsets hold some of these layers, [D]."""
        found = np.zeros(self.lattice.size, dtype=bool)
        for layer in members(layers):
            found |= self.lattice.column(layer)
        return found


class Counted:
    """Where stages may end, with what layers add to devices, made once for all placements."""

    def __init__(
        self, places: StageEnds, counts: Sequence[DeviceCount], sent: Sequence[SentOn] = ()
    ) -> None:
        """`counts`: the first is that of shares of the work."""
        self.places, self._sent = places, sent
        self.sums = tuple(_Sums(places, count) for count in counts)
        self.sent_s = sum(tensor.there_s + tensor.back_s for tensor in sent)
        self.sent_on = lru_cache(maxsize=4096)(self._sent_on)

    def _sent_on(self, position: int) -> list[SentOn]:
        """The tensors that are made in a downset and used beyond it, there alone."""
        inside = self.places.lattice.masks[position]
        return [
            replace(tensor, users=tensor.users & ~inside)
            for tensor in self._sent
            if inside >> tensor.maker & 1 and tensor.users & ~inside
        ]

    def least_s(self, speeds: Sequence[float]) -> float:
        """No cut over these devices has a smaller load, whatever the placement."""
        return max(
            max(float(c.inside[-1]) / sum(speeds), c.alone / max(speeds), float(c.before[-1]))
            for c in self.sums
            if not c.in_bytes
        )


class PlacedCuts:
    """The cuts of a graph into stages with a given placement.

    Args:
        speeds: of the devices.
        placement: per stage, its device.
        pins: (layer, stage).
        memory: of the devices, in bytes; None: not limited.
        pace: of the wire from one device to another, the time over the fastest wire's.
        ties: bit masks of layers that must be on one device.
    """

    def __init__(
        self,
        counted: Counted,
        speeds: Sequence[float],
        placement: Sequence[int],
        pins: Sequence[tuple[int, int]] = (),
        memory: Sequence[int | None] = (),
        pace: Callable[[int, int], float] = lambda a, b: 1.0,
        ties: Sequence[int] = (),
    ) -> None:
        limits = memory or [None] * len(speeds)
        # A byte for what is rounded.
        self._memory = [inf if m is None else m * FITS + len(placement) for m in limits]
        self.places, self.counts = counted.places, counted.sums
        self._counted, self._pace = counted, pace
        self.speeds, self.placement, self._pins = speeds, tuple(placement), tuple(pins)
        self.least_s, self.stages = counted.least_s(speeds), len(self.placement)
        self._opens = [d not in self.placement[:s] for s, d in enumerate(self.placement)]
        self._open_after = [tuple(sorted(set(self.placement[s + 1 :]))) for s in range(self.stages)]
        # Of each tie, how many of its layers each downset has.
        self._tied: list[NDArray[np.int64]] = []
        for tie in ties:
            columns = [counted.places.lattice.column(layer) for layer in members(tie)]
            self._tied.append(np.sum(columns, axis=0, dtype=np.int64))

    @cached_property
    def most_s(self) -> float:
        """No load is larger."""
        busiest_s = max(
            float(c.inside[-1] + self.stages * c.fixed) / min(self.speeds)
            + float(c.before[-1] + c.after[0])
            for c in self.counts
            if not c.in_bytes
        )
        paces = (self._pace(a, b) for a in set(self.placement) for b in set(self.placement))
        return max(busiest_s, self._counted.sent_s * max(paces))

    @cached_property
    def _allowed(self) -> list[NDArray[np.bool_]]:
        """Per stage, the downsets that it may end at: layers are left for what comes behind."""
        places, found = self.places, []
        for s in range(self.stages):
            behind = self.stages - 1 - s
            allowed = places.ranks[-1] - places.ranks >= behind
            if not behind:
                allowed &= places.ranks == places.ranks[-1]
            for layer, stage in self._pins:
                column = places.lattice.column(layer)
                allowed &= column if stage <= s else ~column
            found.append(allowed)
        return found

    def below(
        self,
        target_s: float,
        over_s: float = -1.0,
        deadline: float | None = None,
        most_steps: int | None = None,
    ) -> tuple[list[PlacedCut], bool, int]:
        """Cuts with loads up to a target and over another one, by ascending load.

        Args:
            deadline: on the clock of `time.monotonic`.
            most_steps: stages that may be begun.

        Returns:
            The cuts, whether they are all there are, and stages that were begun.
        """
        found: list[PlacedCut] = []
        room = [
            self._memory if c.in_bytes else [target_s * speed for speed in self.speeds]
            for c in self.counts
        ]
        used = [[0.0] * len(self.speeds) for _ in self.counts]
        most = MOST_STEPS if most_steps is None else min(MOST_STEPS, most_steps)
        steps = [most]

        def extend(s: int, chain: tuple[int, ...], used: list[list[float]], wires: _Wires) -> bool:
            steps[0] -= 1
            if steps[0] < 0 or (deadline is not None and monotonic() > deadline):
                return False
            d = self.placement[s]
            positions, loads = self._ends(s, chain, used, room)
            carried = self._carried(s, chain, positions, wires)
            for k, position in enumerate(positions.tolist()):
                busy = wires | {wire: float(seconds[k]) for wire, seconds in carried.items()}
                if any(busy[wire] > target_s for wire in carried):
                    continue
                mine = [list(row) for row in used]
                for row, load in zip(mine, loads, strict=True):
                    row[d] = float(load[k])
                if s == self.stages - 1:
                    load_s = max(self._load_s(mine), *busy.values(), 0.0)
                    if load_s > over_s:
                        masks = self.places.lattice.masks
                        downsets = tuple(masks[p] for p in (*chain, position))
                        found.append(PlacedCut(downsets, load_s))
                elif not extend(s + 1, (*chain, position), mine, busy):
                    return False
            return True

        complete = extend(0, (0,), used, {})
        found.sort(key=lambda cut: (cut.load_s, cut.downsets))
        return found, complete, most - max(steps[0], 0)

    def _ends(
        self, s: int, chain: Sequence[int], used: list[list[float]], room: list[list[float]]
    ) -> tuple[Positions, list[Vector]]:
        """The downsets at which stage s may end, and what its device then has, by each count.

        Args:
            chain: positions of the downsets at which the stages below it end, the empty one first.
        """
        places, d, below = self.places, self.placement[s], chain[-1]
        ends = places.above(below)
        ends = ends[self._allowed[s][ends]]
        ends = ends[self._keeps_ties(s, chain, ends)]
        has = places.parameters[ends] > places.parameters[below]
        open_after, keep, loads = self._open_after[s], np.ones(len(ends), dtype=bool), []
        for count, row, most in zip(self.counts, used, room, strict=True):
            load = row[d] + count.inside[ends] - count.inside[below] + count.fixed * has
            if self._opens[s]:
                load += count.before[below] * self.speeds[d]
            if d not in open_after:
                load += count.after[ends] * self.speeds[d]
            keep &= load <= most[d]
            left = sum(most[e] - row[e] for e in open_after if e != d)
            rest = (count.inside[-1] - count.inside[ends]) / _ROUNDING
            keep &= rest <= left + (most[d] - load if d in open_after else 0.0)
            loads.append(load)
        return ends[keep], [load[keep] for load in loads]

    def _carried(
        self, s: int, chain: Sequence[int], ends: Positions, wires: _Wires
    ) -> dict[tuple[int, int], Vector]:
        """What wires carry that stage s and the one before it exchange messages over, in s, for
        each of the downsets at which stage s may end. What passes stages by isn't counted.

        Args:
            chain: positions of the downsets below stage s, the empty one first.
            wires: what they carry besides.
        """
        if not s or self.placement[s] == self.placement[s - 1]:
            return {}
        a, b = self.placement[s - 1], self.placement[s]
        before = self.places.lattice.masks[chain[-2]]
        there, back = (np.full(len(ends), wires.get(wire, 0.0)) for wire in ((a, b), (b, a)))
        for tensor in self._counted.sent_on(chain[-1]):
            if not before >> tensor.maker & 1:
                used = self.places.holding(tensor.users)[ends]
                there += used * (tensor.there_s * self._pace(a, b))
                back += used * (tensor.back_s * self._pace(b, a))
        return {(a, b): there, (b, a): back}

    def _keeps_ties(self, s: int, chain: Sequence[int], ends: Positions) -> NDArray[np.bool_]:
        """At which of these downsets stage s may end, so that tied layers can share a device."""
        keep, below = np.ones(len(ends), dtype=bool), chain[-1]
        for inside in self._tied:
            # The device that has some already.
            first = next((t for t in range(s) if inside[chain[t + 1]]), None)
            has = inside[ends] > inside[below]
            left = inside[ends] < inside[-1]
            d = self.placement[s]
            if first is None:
                keep &= ~(has & left) | (d in self._open_after[s])
            else:
                on = self.placement[first]
                keep &= ~has | (on == d)
                keep &= ~left | (on in self._open_after[s])
        return keep

    def _load_s(self, used: list[list[float]]) -> float:
        return max(
            max(load / speed for load, speed in zip(row, self.speeds, strict=True))
            for count, row in zip(self.counts, used, strict=True)
            if not count.in_bytes
        )

    def even(self) -> tuple[int, ...] | None:
        """A cut with about as much work for each stage as its device has time for; None where none
        is found: a pin may be in its way."""
        shares = [self.speeds[d] / self.placement.count(d) for d in self.placement]
        inside = self.counts[0].inside
        downsets, wanted, at = [0], 0.0, 0
        for s in range(self.stages - 1):
            wanted += shares[s] / sum(shares) * float(inside[-1])
            ends = self.places.above(at)
            ends = ends[self._allowed[s][ends]]
            if not len(ends):
                return None
            at = int(ends[np.argmin(np.abs(inside[ends] - wanted))])
            downsets.append(self.places.lattice.masks[at])
        top = self.places.top
        if top not in self.places.above(at) or not self._allowed[-1][top]:
            return None
        return (*downsets, self.places.lattice.masks[top])
