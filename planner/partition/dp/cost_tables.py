"""Loads and bytes of the stages from one downset to many that hold it, as arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem import StageProblem, Vector
from ..stage_load import members
from .containment import Containment
from .crossing import Counted, Crossing, Flags
from .lattice import Lattice, Positions
from .places import Places

FITS = 1 + 1e-12
"""Rounding is forgiven where bytes are compared with a device's memory."""


class PairCosts:
    """What stages cost, as far as it doesn't depend on their lower downset.

    Attributes:
        inside: which downsets hold which.
        work: what the layers of a downset compute at the least, in any mode, with their serial
            work, in s at speed 1, [D]; never falls from a downset to one above it.
        before, after: what loads above and below a downset have besides, at the least, [D].
    """

    def __init__(self, problem: StageProblem, lattice: Lattice, places: Places) -> None:
        """Add up over the downsets. Bytes only where memory is limited."""
        self.problem, self.places = problem, places
        self.inside = Containment(lattice)
        modes, serial = problem.modes, problem.serial_s
        least: Vector = np.min([mode.compute_s for mode in modes], axis=0)
        self.work = self._rising(least if serial is None else least + serial)
        self.compute = self._sum(*(mode.compute_s for mode in modes))
        self.serial = None if serial is None or not serial.any() else self._sum(serial)[0]
        held = problem.parameter_bytes
        self.parameters, self.holders = self._sum(held, (held != 0).astype(np.float64))
        zeros = np.zeros(lattice.size)
        before, after = problem.before_s, problem.after_s
        self.before = zeros if before is None else self._sum(before)[0]
        self.after = zeros if after is None else after.sum() - self._sum(after)[0]
        self.wires = self._crossing([(t.ends, [t.lower_s], [t.upper_s]) for t in problem.tensors])
        if places.limited:
            self._sum_bytes()

    def _sum_bytes(self) -> None:
        problem = self.problem
        self.fixed = self._sum(*(mode.fixed_bytes for mode in problem.modes))
        self.flight = self._sum(*(mode.flight_bytes for mode in problem.modes))
        self.held = self._crossing(
            [(t.ends, [t.lower_bytes, t.kept_bytes], [t.upper_bytes]) for t in problem.tensors]
        )
        self.shared = self._crossing([(s.ends, [s.nbytes], []) for s in problem.shared])
        self.shared_in_flight = np.array([mode.shared_in_flight for mode in problem.modes])
        self.shared_once = np.array([mode.shared_once for mode in problem.modes])
        self.inputs_kept = np.array([mode.inputs_kept for mode in problem.modes])
        self.workspace: Vector | None = None
        if problem.workspace_bytes is not None:
            needed = problem.workspace_bytes
            groups = self.inside.groups
            self.workspace = np.array([max(needed[j] for j in members(g)) for g in groups])

    def _crossing(self, tensors: Sequence[Counted]) -> Crossing | None:
        costly = [t for t in tensors if any(t[1]) or any(t[2])]
        return Crossing(self.inside, costly, 1 << self.problem.layers) if costly else None

    def _sum(self, *values: Vector) -> Vector:
        return np.array([self.inside.sums(column) for column in self.grouped(*values).T])

    def summed(self, values: Vector) -> Vector:
        """Sums of layers' values, [n], over each downset, [D]."""
        sums: Vector = self._sum(values)[0]
        return sums

    def grouped(self, *values: Vector) -> Vector:
        """Sums over the layers of each group: [n] each to [G, values]."""
        groups = [list(members(mask)) for mask in self.inside.groups]
        numbers = np.array([[v[group].sum() for v in values] for group in groups])
        return numbers.reshape(len(groups), len(values))

    def _rising(self, values: Vector) -> Vector:
        """Sums in whole steps, so that no order of adding makes a larger set's sum smaller."""
        total = float(values.sum())
        step = total / 2.0**52 if total > 0 else 1.0
        return self.summed(np.rint(values / step)) * step


class Stages:
    """The stages from a downset to each of B above it.

    Methods take p of those stages, `which`, with an option and a place each, [p].
    """

    def __init__(self, costs: PairCosts, below: int, above: Positions) -> None:
        """Positions in the lattice."""
        self._costs, self._below, self._above = costs, below, above
        self._lower = self._upper = np.zeros(0)
        if costs.wires is not None:
            (self._lower,), (self._upper,) = costs.wires.between(below, above)

    def loads(self, which: Positions, option: Positions, k: Positions) -> Vector:
        """Loads in s, [p]."""
        costs, problem, below = self._costs, self._costs.problem, self._below
        places, above = costs.places, self._above[which]
        mode = places.mode[option]
        load: Vector = costs.compute[mode, above] - costs.compute[mode, below]
        load /= places.replicas[option]
        if costs.serial is not None:
            load += costs.serial[above] - costs.serial[below]
        fixed_s, sync_s = problem.serial_fixed_s, places.get("sync_s", option, k)
        holds = costs.holders[above] > costs.holders[below]
        load += fixed_s * holds
        load /= places.get("speed", option, k)
        load += sync_s * holds
        per_byte = places.get("sync_s_per_byte", option, k)
        if np.any(per_byte):
            load += per_byte * (costs.parameters[above] - costs.parameters[below])
        if costs.wires is not None:
            wire = places.get("lower_scale", option, k) * self._lower[which]
            wire += places.get("upper_scale", option, k) * self._upper[which]
            load = np.maximum(load, wire) if problem.overlap else load + wire
        if problem.before_s is not None or problem.after_s is not None:
            load += costs.before[below] + costs.after[above]
        return load

    def fit(self, which: Positions, option: Positions, k: Positions) -> Flags:
        """Whether stages are within their places' memory, [p]."""
        costs, below = self._costs, self._below
        unique, back = np.unique(which, return_inverse=True)
        places, above = costs.places, self._above[which]
        mode = places.mode[option]
        flight = costs.flight[mode, above] - costs.flight[mode, below]
        total: Vector = costs.fixed[mode, above] - costs.fixed[mode, below]
        if costs.shared is not None:
            shared = costs.shared.met_between(below, self._above[unique])[0][back]
            flight += costs.shared_in_flight[mode] * shared
            total += costs.shared_once[mode] * shared
        if costs.held is not None:
            (lower, kept), (upper,) = costs.held.between(below, self._above[unique])
            flight += costs.inputs_kept[mode] * kept[back]
            total += (lower + upper)[back]
        if costs.workspace is not None:
            total += costs.inside.largest(costs.workspace, below, self._above[unique])[back]
        held = costs.parameters[above] - costs.parameters[below]
        total += places.get("copies", option, k) * held
        total += places.get("units", option, k) * flight
        fits: Flags = total <= places.get("memory_bytes", option, k) * FITS
        return fits
