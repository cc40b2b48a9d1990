"""What stages cost, as arrays: options at their places, sums over tensors, loads and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..problem import FITS, StageProblem, Vector, members
from .lattice import Containment, Flags, Lattice, Positions, Words

# What each option means at each place: asked of the problem once, when needed ---------------------


WHOLE = 40_000
"""With more options × places than this, only those that come up are asked for."""

FIELDS = (
    "speed",
    "sync_s",
    "sync_s_per_byte",
    "lower_scale",
    "upper_scale",
    "memory_bytes",
    "units",
    "copies",
)
LOADS = slice(0, 5)
"""The fields that make loads; the others make bytes."""


class Places:
    """The problem's places.

    Attributes:
        devices: K.
        replicas, mode: per option, [O].
        usable: positions of options with no more replicas than devices.
        whole: all places have been asked for.
        limited: memory may be limited.
        loads_vary, bytes_vary: loads, or what fits the memory, may depend on k.
    """

    def __init__(self, problem: StageProblem, *, every: bool = False) -> None:
        """Ask for all places where they are few, or if `every` one is wanted."""
        self._place = problem.place
        self.devices = problem.devices
        self.replicas: Positions = np.array([o.replicas for o in problem.options], dtype=np.intp)
        self.mode: Positions = np.array([o.mode for o in problem.options], dtype=np.intp)
        self.usable: Positions = np.flatnonzero(self.replicas <= self.devices)
        shape = (len(self.replicas), self.devices + 1)
        self._table: Vector = np.zeros((len(FIELDS), *shape))
        self._known = np.zeros(shape, dtype=np.bool_)
        allowed = np.arange(self.devices + 1) >= self.replicas[:, None]
        self.whole = every or int(allowed.sum()) <= WHOLE
        self._same: list[float | None] = [None] * len(FIELDS)
        self.loads_vary = self.bytes_vary = self.limited = True
        if self.whole:
            self.ask(*np.nonzero(allowed))
            self._compare(self._table[:, allowed])

    def _compare(self, places: Vector) -> None:
        """Find out what all places have in common, [8, places]."""
        for number, values in enumerate(places):
            if len(values) and bool((values == values[0]).all()):
                self._same[number] = float(values[0])
        # Where an option has more replicas than k there is no place.
        last = np.where(self._known, self._table[..., -1:], self._table)
        varies = (self._table != last).any(axis=(1, 2)).tolist()
        self.limited = bool(np.isfinite(places[FIELDS.index("memory_bytes")]).any())
        self.loads_vary = any(varies[LOADS])
        self.bytes_vary = self.limited and any(varies[LOADS.stop :])

    @property
    def same(self) -> bool:
        """Whether an option is the same at all places."""
        return not (self.loads_vary or self.bytes_vary)

    def ask(self, option: Positions, k: Positions) -> None:
        """Make options known at places, [p] each; replicas ≤ k."""
        new = ~self._known[option, k]
        for o, at in zip(option[new].tolist(), k[new].tolist(), strict=True):
            if not self._known[o, at]:
                self._known[o, at] = True
                place = self._place(o, at)
                self._table[:, o, at] = [getattr(place, field) for field in FIELDS]

    def get(self, field: str, option: Positions, k: Positions) -> Vector | float:
        """A field of `Place` of options at places that are known, [p]; a float if all have it."""
        number = FIELDS.index(field)
        same = self._same[number]
        if same is not None:
            return same
        found: Vector = self._table[number, option, k]
        return found

    def field(self, name: str, option: int) -> Vector:
        """A field of `Place` for an option, for k from its replicas to K; all must be known."""
        return self._table[FIELDS.index(name), option, self.replicas[option] :]

    @cached_property
    def fastest(self) -> float:
        """No option's place is faster: its speed is that of its slowest device, which counts for
        any smaller option on some of the same devices."""
        if not len(self.usable):
            return 1.0
        r = int(self.replicas[self.usable].min())
        k = np.arange(r, self.devices + 1)
        speeds = []
        for option in np.flatnonzero(self.replicas == r).tolist():
            self.ask(np.full(len(k), option), k)
            speeds.append(float(self.field("speed", option).max()))
        return max(speeds)

    def rates(self, target: float) -> tuple[Vector, Vector]:
        """Work, in s at speed 1, that stages with loads up to `target` can do.

        Returns:
            For each k from 0 to K: at most on the last k devices, and at most on all but those.
        """
        k = np.arange(self.devices + 1.0)
        if not self.whole:
            return k * self.fastest * target, k[::-1] * self.fastest * target
        speed = self._table[FIELDS.index("speed")]
        return self.added(self.replicas[:, None] * speed * target)

    def added(self, gains: Vector) -> tuple[Vector, Vector]:
        """The most that stages' gains can add up to, as `rates`.

        Args:
            gains: of an option with its first device the k-th from the end, [O, K + 1].
        """
        ahead, behind = np.zeros(self.devices + 1), np.zeros(self.devices + 1)
        for at in range(1, self.devices + 1):
            can = self.usable[self.replicas[self.usable] <= at]
            r = self.replicas[can]
            # `at` counts devices from the list's end for the one, from its start for the other.
            for row, first in ((ahead, at), (behind, self.devices - at + r)):
                row[at] = max(row[at - 1], (gains[can, first] + row[at - r]).max(initial=0.0))
        return ahead, behind[::-1]

    def memory(self, copies: float, units: float) -> Vector:
        """Bytes that stages can hold at most, counted with so many copies and units, [O, K + 1].

        0 where an option has more replicas than k.
        """
        table = dict(zip(FIELDS, self._table, strict=True))
        most = np.ones_like(table["units"])
        for wanted, field in ((copies, "copies"), (units, "units")):
            if wanted > 0:
                ratio = np.full_like(most, np.inf)
                np.divide(wanted, table[field], out=ratio, where=self._known & (table[field] > 0))
                most = np.maximum(most, ratio)
        known = np.where(self._known, table["memory_bytes"], 0.0)
        counted: Vector = np.multiply(known, most, out=np.zeros_like(known), where=known > 0)
        return counted


# What tensors add to a stage between two downsets, for one lower downset and many upper ones ----
# A tensor that has no end in the lower downset a, or all, adds to a stage a difference of sums
# over downsets: only tensors that are *open* at a, with some of their ends in it, have to be
# looked at for the pair. With E(d, t) the number of ends of t in d, and O(b) the sum over tensors
# open at b,
#
#     lower(a, b) = Σ of t open at a with E(b, t) > E(a, t)
#     upper(a, b) = O(b) − Σ of t open at a and at b
#
# and, for memory that several layers share, with Z(d) the sum over all that have an end in d,
#
#     shared(a, b) = Z(b) − Z(a) + Σ of those open at a with E(b, t) > E(a, t).

Counted = tuple[int, Sequence[float], Sequence[float]]
"""Ends of a tensor, what it adds at lower and what it adds at upper cuts."""


CHUNK = 1 << 15
"""Downsets that are counted at a time."""


class TensorSums:
    """Sums over tensors.

    Attributes:
        upper_open: over tensors open at a downset, of their upper numbers, [U, D].
        lower_due: over those that layers beyond it use, of their lower numbers, [L, D].
        met: over those with an end in it, of their lower numbers, [L, D].
    """

    def __init__(self, inside: Containment, tensors: Sequence[Counted], result: int) -> None:
        """Count ends.

        Args:
            inside: of the lattice.
            tensors: at least one, all with as many numbers.
            result: the bit of their ends that lies beyond all downsets but the full one.
        """
        merged = merged_tensors(inside, tensors, result)
        numbers = np.array(list(merged.values()))
        self._lower, self._upper = np.split(numbers, [len(tensors[0][1])], axis=1)
        used = np.array([len(groups) for groups, _ in merged])
        counts = used + [beyond for _, beyond in merged]
        kind = np.uint8 if counts.max() < 256 else np.uint16
        self._all = counts.astype(kind)
        size = inside.member.shape[1]
        self._full = size - 1
        self._ends = np.empty((size, len(merged)), dtype=kind)
        self.upper_open = np.zeros((self._upper.shape[1], size))
        self.lower_due, self.met = np.zeros((2, self._lower.shape[1], size))
        for at in range(0, size, CHUNK):
            part = slice(at, at + CHUNK)
            ends = np.zeros((len(merged), min(CHUNK, size - at)), dtype=kind)
            for row, (groups, _) in zip(ends, merged, strict=True):
                for group in groups:
                    row += inside.member[group, part].view(np.uint8)
            _add(self.upper_open[:, part], (ends > 0) & (ends < self._all[:, None]), self._upper)
            _add(self.lower_due[:, part], (ends > 0) & (ends < used[:, None]), self._lower)
            _add(self.met[:, part], ends > 0, self._lower)
            self._ends[part] = ends.T
        self.upper_open[:, self._full] = 0.0

    def between(self, below: int, above: Positions) -> tuple[Vector, Vector]:
        """lower, [L, B], and upper, [U, B], of the stages from `below` to each of `above`."""
        row = self._ends[below]
        at = ((row > 0) & (row < self._all)).nonzero()[0]
        upper: Vector = self.upper_open[:, above]
        if not len(at):
            return np.zeros((self._lower.shape[1], len(above))), upper
        ends = self._ends.take(at[:, None] + above * self._ends.shape[1])
        lower: Vector = self._lower[at].T @ (ends > row[at][:, None])
        passed: Vector = self._upper[at].T @ (ends < self._all[at][:, None])
        return lower, np.where(above == self._full, 0.0, upper - passed)

    def met_between(self, below: int, above: Positions) -> Vector:
        """Numbers of what has an end in the stage, whether elsewhere too or not, [L, B]."""
        fresh: Vector = self.met[:, above] - self.met[:, below, None]
        return fresh + self.between(below, above)[0]


def _add(total: Vector, flags: Flags, numbers: Vector) -> None:
    """Add Σ over tensors of flags times numbers: [T, D] and [T, U] to [U, D]."""
    # Row by row: a product of matrices would make floats of all flags first.
    for row, of_row in zip(flags, numbers.tolist(), strict=True):
        for sums, number in zip(total, of_row, strict=True):
            if number:
                sums += number * row


def merged_tensors(
    inside: Containment, tensors: Iterable[Counted], result: int
) -> dict[tuple[tuple[int, ...], bool], Vector]:
    """Numbers by the groups that a tensor has ends in, and whether the result is another."""
    group_of = {layer: g for g, mask in enumerate(inside.groups) for layer in members(mask)}
    merged: dict[tuple[tuple[int, ...], bool], Vector] = {}
    for ends, lower, upper in tensors:
        numbers = np.array([*lower, *upper], dtype=np.float64)
        groups = tuple(sorted({group_of[layer] for layer in members(ends & (result - 1))}))
        key = (groups, bool(ends & result))
        merged[key] = merged[key] + numbers if key in merged else numbers
    return merged


# Loads and bytes of the stages from one downset to many that hold it ------------------------------


class PairCosts:
    """What stages cost, as far as it doesn't depend on their lower downset.

    Attributes:
        inside: which downsets hold which.
        limited: bytes are counted, too.
        work: what the layers of a downset compute at the least, in any mode, with their serial
            work, in s at speed 1, [D]; never falls from a downset to one above it.
        before, after: what loads above and below a downset have besides, at the least, [D].
        nothing_beside: those are all 0.
    """

    def __init__(self, problem: StageProblem, lattice: Lattice, *, limited: bool) -> None:
        self.problem, self.limited = problem, limited
        self.inside = Containment(lattice)
        modes, serial = problem.modes, problem.serial_s
        least: Vector = np.min([mode.compute_s for mode in modes], axis=0)
        self.work = self._never_falling(least if serial is None else least + serial)
        self.compute = self._sum(*(mode.compute_s for mode in modes))
        self.serial = None if serial is None or not serial.any() else self._sum(serial)[0]
        held = problem.parameter_bytes
        self.parameters, self.holders = self._sum(held, (held != 0).astype(np.float64))
        zeros = np.zeros(lattice.size)
        before, after = problem.before_s, problem.after_s
        self.nothing_beside = before is None and after is None
        self.before = zeros if before is None else self._sum(before)[0]
        self.after = zeros if after is None else after.sum() - self._sum(after)[0]
        self.wires = self._sums_of([(t.ends, [t.lower_s], [t.upper_s]) for t in problem.tensors])
        if limited:
            self._sum_bytes()

    def above(self, below: int) -> Flags:
        """Which downsets hold this one and more, [D]."""
        holds = self.inside.holding(below, self._guarded)
        holds[below] = False
        return holds

    def serial_between(self, below: int, above: Positions) -> Vector | None:
        """Serial work of stages from one downset, in s at speed 1, [B]; None: no layer has any."""
        return None if self.serial is None else self.serial[above] - self.serial[below]

    def load_parts(
        self,
        mode: Positions | int,
        below: int,
        above: Positions,
        wires: tuple[Vector, Vector] | None,
    ) -> LoadParts:
        """What makes the loads of stages from one downset, [p].

        Args:
            wires: as `wires_between`; None: there are none.
        """
        return LoadParts(
            self.compute[mode, above] - self.compute[mode, below],
            self.serial_between(below, above),
            self.holders[above] > self.holders[below],
            lambda: self.parameters[above] - self.parameters[below],
            wires,
            None if self.nothing_beside else self.before[below] + self.after[above],
        )

    @cached_property
    def _guarded(self) -> Words:
        return self.inside.counts | self.inside.guards[:, None]

    def wires_between(self, below: int, above: Positions) -> tuple[Vector, Vector]:
        """Of stages from one downset, in s at their lower and their upper cuts, [B] each."""
        if self.wires is None:
            return np.zeros(len(above)), np.zeros(len(above))
        (lower,), (upper,) = self.wires.between(below, above)
        return lower, upper

    def bytes_between(self, below: int, above: Positions) -> tuple[Vector, Vector]:
        """Held in any case, parameters left out, and per unit in flight, [M, B] each."""
        once: Vector = self.fixed[:, above] - self.fixed[:, below, None]
        flight: Vector = self.flight[:, above] - self.flight[:, below, None]
        if self.shared is not None:
            shared = self.shared.met_between(below, above)[0]
            flight += np.outer(self.shared_in_flight, shared)
            once += np.outer(self.shared_once, shared)
        if self.held is not None:
            (lower, kept, *remade), (upper,) = self.held.between(below, above)
            flight += np.outer(self.inputs_kept, kept)
            for number, row in enumerate(remade):
                flight += np.outer(self.remade[0, :, number], row)
                once -= np.outer(self.remade[1, :, number], row)
            once += lower + upper
        return once + self.workspace_between(below, above), flight

    def workspace_between(self, below: int, above: Positions) -> Vector:
        """The largest working set of a layer, in bytes, [B]; 0 where none is known."""
        if self._workspace is None:
            return np.zeros(len(above))
        return self.inside.largest(self._workspace, below, above)

    @cached_property
    def _workspace(self) -> Vector | None:
        """Of each group of layers, [G]."""
        needed, groups = self.problem.workspace_bytes, self.inside.groups
        if needed is None:
            return None
        return np.array([max(needed[j] for j in members(g)) for g in groups])

    def _sum_bytes(self) -> None:
        problem = self.problem
        self.fixed = self._sum(*(mode.fixed_bytes for mode in problem.modes))
        self.flight = self._sum(*(mode.flight_bytes for mode in problem.modes))
        remade = max((len(t.remade_bytes) for t in problem.tensors), default=0)
        self.held = self._sums_of(
            [
                (
                    t.ends,
                    [t.lower_bytes, t.kept_bytes, *(t.remade_bytes or [0.0] * remade)],
                    [t.upper_bytes],
                )
                for t in problem.tensors
            ]
        )
        self.shared = self._sums_of([(s.ends, [s.nbytes], []) for s in problem.shared])
        self.shared_in_flight = np.array([mode.shared_in_flight for mode in problem.modes])
        self.shared_once = np.array([mode.shared_once for mode in problem.modes])
        self.inputs_kept = np.array([mode.inputs_kept for mode in problem.modes])
        # Of what is made anew, which a mode keeps for each unit, and less once, [2, M, _].
        numbers = [-1 if mode.remade is None else mode.remade for mode in problem.modes]
        own = (np.array(numbers)[:, None] == np.arange(remade)).astype(np.float64)
        once = np.array([mode.remade_once for mode in problem.modes])
        self.remade = np.array([own, own * once[:, None]])

    def _sums_of(self, tensors: Sequence[Counted]) -> TensorSums | None:
        costly = [t for t in tensors if any(t[1]) or any(t[2])]
        return TensorSums(self.inside, costly, 1 << self.problem.layers) if costly else None

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

    def _never_falling(self, values: Vector) -> Vector:
        """Sums in whole steps, so that no order of adding makes a larger set's sum smaller."""
        total = float(values.sum())
        step = total / 2.0**52 if total > 0 else 1.0
        return self.summed(np.rint(values / step)) * step


class LoadParts(NamedTuple):
    """What makes the loads of stages, [p].

    Attributes:
        compute, serial: in s, summed over their layers; `stage_loads` changes `compute` in place.
        holds: whether they have parameters.
        parameters: bytes of them.
        wires: in s, at lower and upper cuts.
        others: in s, what loads below and above have besides.
    """

    compute: Vector
    serial: Vector | None
    holds: Flags
    parameters: Callable[[], Vector]
    wires: tuple[Vector, Vector] | None
    others: Vector | None


def stage_loads(
    problem: StageProblem,
    place: Callable[[str], Vector | float],
    replicas: Positions | int,
    parts: LoadParts,
) -> Vector:
    """Loads in s of stages, [p], as `StageProblem` defines them.

    Args:
        place: field of `Place` → its value for each stage, or for all.
    """
    load, serial, holds, parameters, wires, others = parts
    load /= replicas
    if serial is not None:
        load += serial
    load += problem.serial_fixed_s * holds
    load /= place("speed")
    load += place("sync_s") * holds
    per_byte = place("sync_s_per_byte")
    # Most problems have none: asking a number is quicker than adding.
    if isinstance(per_byte, np.ndarray) or per_byte:
        load += per_byte * parameters()
    if wires is not None:
        wire = place("lower_scale") * wires[0]
        wire += place("upper_scale") * wires[1]
        load = np.maximum(load, wire) if problem.overlap else load + wire
    if others is not None:
        load += others
    return load


class Stages:
    """The stages from a downset to each of B above it.

    Methods take p of those stages, `which`, with an option and a place each, [p].
    """

    def __init__(self, costs: PairCosts, places: Places, below: int, above: Positions) -> None:
        self._costs, self._places, self._below, self._above = costs, places, below, above
        self._lower, self._upper = costs.wires_between(below, above)

    def loads(self, which: Positions, option: Positions, k: Positions) -> Vector:
        """Loads in s, [p]."""
        costs, places = self._costs, self._places
        wires = None if costs.wires is None else (self._lower[which], self._upper[which])
        return stage_loads(
            costs.problem,
            lambda field: places.get(field, option, k),
            places.replicas[option],
            costs.load_parts(places.mode[option], self._below, self._above[which], wires),
        )

    def fit(self, which: Positions, option: Positions, k: Positions) -> Flags:
        """Whether stages are within their places' memory, [p]."""
        costs, places = self._costs, self._places
        unique, back = np.unique(which, return_inverse=True)
        above, mode = self._above[unique], places.mode[option]
        once, flight = costs.bytes_between(self._below, above)
        held = costs.parameters[above] - costs.parameters[self._below]
        total: Vector = once[mode, back]
        total += places.get("copies", option, k) * held[back]
        total += places.get("units", option, k) * flight[mode, back]
        return total <= places.get("memory_bytes", option, k) * FITS
