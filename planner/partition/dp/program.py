"""One problem on one lattice, and what can be said before any chain is looked at."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..problem import FITS, StageProblem, Vector
from .cost_tables import PairCosts, Places
from .lattice import Flags, Lattice

# What memory rules out before any stage is looked at --------------------------------------------
# A stage's bytes are at least fixed + copies · parameters + units · flight, each a sum over its
# layers. Counted with some copies c and units u instead, the sum is at most max(1, c / copies,
# u / units) times that, and so at most as many times its device's memory. Sums counted so add up
# over the stages.


@dataclass(frozen=True)
class MemoryBound:
    """One way to count.

    Attributes:
        held: bytes of each downset's layers, [D].
        ahead, behind: bytes that can be held on the last k devices, and on all but those, [K + 1].
        single: bytes that one stage can hold where so many devices are needed beyond it, [K + 1].
    """

    held: Vector
    ahead: Vector
    behind: Vector
    single: Vector


def memory_bounds(costs: PairCosts, places: Places) -> list[MemoryBound]:
    """Bounds counted as at the list's last device, its middle and its first one."""
    if not (places.limited and places.whole and len(places.usable)):
        return []
    fewest = int(places.usable[places.replicas[places.usable].argmin()])
    r, devices = int(places.replicas[fewest]), places.devices
    ways: dict[tuple[float, float], MemoryBound] = {}
    for k in (r, (r + devices + 1) // 2, devices):
        copies = float(places.field("copies", fewest)[k - r])
        units = float(places.field("units", fewest)[k - r])
        if (copies, units) not in ways:
            ways[copies, units] = _bound(costs, places, copies, units)
    return list(ways.values())


def _bound(costs: PairCosts, places: Places, copies: float, units: float) -> MemoryBound:
    problem = costs.problem
    held = problem.parameter_bytes * copies
    least = np.min([m.fixed_bytes + units * m.flight_bytes for m in problem.modes], axis=0)
    most = places.memory(copies, units) * FITS
    ahead, behind = places.added(most)
    # From each k on, the most that an option can hold.
    later = np.maximum.accumulate(most[:, ::-1], axis=1)[:, ::-1]
    single = np.zeros(places.devices + 1)
    for option in places.usable.tolist():
        r = int(places.replicas[option])
        np.maximum(single[: len(single) - r], later[option, r:], out=single[: len(single) - r])
    return MemoryBound(costs.summed(least + held), ahead, behind, single)


# One problem on one lattice, and what can be said before any chain is looked at -----------------

UNBOUNDED = 1e200
"""A target that no load reaches."""

SLACK = 1e-9
"""Relative. What rules something out must do so by more; an objective is less if it is by more."""


def just_below(target: float) -> float:
    """The largest load that counts as less than a target; negative where there is none."""
    return min(target * (1 - SLACK), UNBOUNDED) if target > 0 else -1.0


class Program:
    """A problem on a lattice.

    Attributes:
        order: positions of downsets by falling work, larger sets before smaller ones.
    """

    def __init__(
        self, problem: StageProblem, lattice: Lattice, *, every_place: bool = False
    ) -> None:
        """Sum up what stages cost; ask for all places if they are few or `every_place` is set."""
        self.problem, self.lattice = problem, lattice
        self.places = Places(problem, every=every_place)
        self.costs = PairCosts(problem, lattice, limited=self.places.limited)
        self.order = np.lexsort((np.arange(lattice.size), self.costs.work))[::-1]
        self.options = self.places.usable
        self.replicas = self.places.replicas[self.options]

    @cached_property
    def memory(self) -> list[MemoryBound]:
        return memory_bounds(self.costs, self.places)

    @property
    def top(self) -> int:
        """Position of the full downset."""
        return self.lattice.size - 1

    @cached_property
    def slack(self) -> float:
        """Work, in s at speed 1, that is within rounding."""
        return SLACK * float(self.costs.work[-1])

    @cached_property
    def allowed(self) -> list[Flags]:
        """Per number of stages to go, where stages may meet, [stages + 1] of [D].

        Where any number will do, for 0 alone.
        """
        stages, every = self.problem.stages, np.ones(self.lattice.size, dtype=np.bool_)
        if stages is None:
            return [every]
        allowed = [every.copy() for _ in range(stages + 1)]
        for to_go, flags in enumerate(allowed):
            flags[0] = to_go == stages
            flags[-1] = to_go == 0
            for layer, stage in self.problem.pins:
                column = self.lattice.column(layer)
                flags &= column if stages - to_go > stage else ~column
        return allowed

    def thinned(self, count: int, each: int) -> Lattice:
        """Fewer places to cut: of `count` equal shares of the work, the `each` cheapest to cut."""
        work, wires = self.costs.work, self.costs.wires
        share = np.minimum(work / max(float(work[-1]), 1e-300) * count, count - 1).astype(np.intp)
        cost = np.zeros(len(work))
        if wires is not None:
            cost = wires.upper_open[0] + wires.lower_due[0]
        order = np.lexsort((np.arange(len(work)), cost, share))
        # Of each share, those whose place in it is below `each`.
        place = np.arange(len(work)) - np.searchsorted(share[order], share[order])
        kept = np.union1d(order[place < each], [0, self.top])
        return Lattice(self.lattice.words[kept], self.lattice.layers, complete=False)

    # Bounds ------------------------------------------------------------------------------------

    def _least_work(self, scale: str | None) -> float:
        """Work, in s at speed 1, that a stage can't do for each s of its load that isn't
        computing, at the least; or for each s that a place's scale is multiplied with."""
        places, rates = self.places, []
        for option, r in zip(self.options.tolist(), self.replicas.tolist(), strict=True):
            scales = places.field(scale, option) if scale else 1.0
            rates.append(float((r * places.field("speed", option) * scales).min()))
        return min(rates, default=0.0) if places.whole else 0.0

    @cached_property
    def wire_work(self) -> tuple[Vector, Vector]:
        """Work that devices can't do because of the wire times of tensors open at a downset.

        In s at speed 1: of the stages above it and of those below it, at the least, [D] each.
        """
        wires = self.costs.wires
        if self.problem.overlap or wires is None:
            none = np.zeros(self.lattice.size)
            return none, none
        lower, upper = self._least_work("lower_scale"), self._least_work("upper_scale")
        return lower * wires.lower_due[0], upper * wires.upper_open[0]

    @cached_property
    def potentials(self) -> tuple[Vector, Vector]:
        """Sums at a stage's lower and at its upper downset, [P, D] each.

        Their difference is no more than the work that its devices can do under a target. They are
        of its work; of its work and the wire times at its upper cut, at its lower one, or at both.
        Other loads count as work that isn't done.
        """
        work, (lower, upper) = self.costs.work, self.wire_work
        sums = work[None]
        if lower.any() or upper.any():
            sums = np.array([work, work + upper, work - lower, work + upper - lower])
        rate = self._least_work(None)
        return sums - rate * self.costs.before, sums + rate * self.costs.after

    @cached_property
    def bound_s(self) -> float:
        """A load that some stage has in any cut: all work on all devices, or a group's on most."""
        if not len(self.options):
            return UNBOUNDED
        work = float(self.costs.work[-1])
        fastest = float(self.places.rates(UNBOUNDED)[0][-1]) / UNBOUNDED
        return max(work / fastest, self._largest_group_s, self._ends_s) * (1 - SLACK)

    @property
    def _ends_s(self) -> float:
        """Load of the last or of the first stage: a layer is in it, or else adds to its load."""
        problem, places = self.problem, self.places
        modes = [problem.modes[mode] for mode in places.mode[self.options]]
        shares = [mode.compute_s / r for mode, r in zip(modes, self.replicas, strict=True)]
        least: Vector = np.min(shares, axis=0)
        if problem.serial_s is not None:
            least = least + problem.serial_s
        least = least / places.fastest
        ends = [values for values in (problem.before_s, problem.after_s) if values is not None]
        return max((float(np.minimum(values, least).sum()) for values in ends), default=0.0)

    @property
    def _largest_group_s(self) -> float:
        problem, places = self.problem, self.places
        count = len(self.options)
        speed, sync, per_byte = np.full(count, places.fastest), np.zeros(count), np.zeros(count)
        if places.whole:
            for row, option in enumerate(self.options.tolist()):
                speed[row] = places.field("speed", option).max()
                sync[row] = places.field("sync_s", option).min()
                per_byte[row] = places.field("sync_s_per_byte", option).min()
        serial = np.zeros(problem.layers) if problem.serial_s is None else problem.serial_s
        compute = self.costs.grouped(*(mode.compute_s for mode in problem.modes))
        serial, held = self.costs.grouped(serial, problem.parameter_bytes).T[..., None]
        busy = (compute[:, places.mode[self.options]] / self.replicas + serial) / speed
        busy += sync * (held > 0) + per_byte * held
        return float(busy.min(axis=1).max(initial=0.0))
