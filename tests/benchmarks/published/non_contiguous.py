"""Layers on devices, contiguous or not, as an integer program.

x[u, d]     unit u is on device d; the model's result is a unit too
o[d, c]     device d is of choice c
w[u, d, c]  unit u is on device d, and that is so
T           is above each device's load, and to be small
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from timeprest.planner.partition.ilp.loads import (
    SCALE,
    IntegerProgram,
    Linear,
    StageRows,
    busy_of,
    bytes_of,
    wire_of,
)
from timeprest.planner.partition.ilp.mip import Mip, Terms, difference, total
from timeprest.planner.partition.ilp.search import Search
from timeprest.planner.partition.ilp.variables import (
    SlotChoice,
    Slots,
    Units,
    between,
    joined,
    least_compute,
    least_load,
)
from timeprest.planner.partition.problem import FITS, SAME, Cut, CutTensor, StageProblem, members

# What a device's load is where its layers need not be contiguous, straight from the
# definition -------------------------------------------------------------------------------------
#
# It is that of `problem`, with sets of layers for stages and these differences:
#
# - A tensor's maker is the layer among its ends that all others of them need. The device with the
#   maker counts the tensor as its upper cut's, unless it has all ends; others that have an end
#   count it as their lower cut's. For the stages of a cut that is the same. A tensor without a
#   maker counts as the smaller of its sides, at the smaller of wires' scales: no more than for a
#   cut.
# - The model's result is on whichever device suits best.
# - There is no before and after. Stage counts and pins aren't kept, but devices that are all alike
#   are no more than the stages asked for.
# - Only options with one replica count; each device takes the one that suits it best.


@dataclass(frozen=True)
class Assignment:
    """Bit masks of layers per device, and their largest load in s."""

    devices: tuple[int, ...]
    objective_s: float


def device_slots(problem: StageProblem) -> Slots:
    """Devices as slots, with the options of one replica as choices; none without such options."""
    options = [(o, op.mode) for o, op in enumerate(problem.options) if op.replicas == 1]
    each = tuple(
        tuple(SlotChoice(o, 1, mode, problem.place(o, k), 1) for o, mode in options)
        for k in range(problem.devices, 0, -1)
    )
    alike = len(set(each)) == 1
    if alike:
        each = each[: min(problem.layers, problem.stages or problem.devices)]
    return Slots(each if options else (), True, alike, problem.devices)


def parted(problem: StageProblem) -> StageProblem:
    """The problem with tensors that count as they do here: the lowest end is the maker."""
    places = [choice.place for choice in device_slots(problem).different]
    scales = [(place.lower_scale, place.upper_scale) for place in places]
    ratio = min((min(pair) / max(pair) for pair in scales if max(pair)), default=1.0)
    below: list[int] = []
    for j, mask in enumerate(problem.needs):
        below.append(1 << j)
        for other in members(mask):
            below[j] |= below[other]
    tensors = []
    for tensor in problem.tensors:
        ends = list(members(tensor.ends & problem.full))
        if any(not below[j] >> ends[0] & 1 for j in ends):
            even_s = min(tensor.lower_s, tensor.upper_s) * ratio
            even_bytes = min(tensor.lower_bytes, tensor.upper_bytes)
            tensors.append(CutTensor(tensor.ends, even_s, even_s, even_bytes, even_bytes))
        elif ends:
            tensors.append(tensor)
    return replace(problem, tensors=tuple(tensors), before_s=None, after_s=None, pins=())


def assignment_load(problem: StageProblem, slots: Slots, devices: Sequence[int]) -> float:
    """Largest load in s of layers on devices; infinite where one doesn't fit.

    Args:
        problem: as `parted` makes it.
        slots: as `device_slots` makes them; one for each of `devices`.
    """
    best = math.inf
    for result in range(slots.count):
        loads = [
            _device_load(problem, choices, layers, d == result)
            for d, (layers, choices) in enumerate(zip(devices, slots.choices, strict=True))
            if layers
        ]
        best = min(best, max(loads, default=math.inf))
    return best


def _device_load(
    problem: StageProblem, choices: Sequence[SlotChoice], layers: int, result: bool
) -> float:
    sums = _sums(problem, layers, layers | result << problem.layers)

    def value(linear: Linear) -> float:
        return sum(c * sums.get(name, 0.0) for name, c in linear.of)

    best = math.inf
    for choice in choices:
        if value(bytes_of(problem, choice)) <= choice.place.memory_bytes * FITS:
            busy, wire = value(busy_of(problem, choice)), value(wire_of(choice))
            best = min(best, max(busy, wire) if problem.overlap else busy + wire)
    return best


def _sums(problem: StageProblem, layers: int, held: int) -> dict[str, float]:
    """The sums of `loads` over a set of layers; `held` has the result besides, if it does."""
    inside = list(members(layers))
    parameters = float(np.sum(problem.parameter_bytes[inside]))
    sums = {
        "parameters": parameters,
        "has parameters": float(parameters > 0),
        "shared": sum(item.nbytes for item in problem.shared if item.ends & layers),
    }
    if problem.serial_s is not None:
        sums["serial"] = float(np.sum(problem.serial_s[inside]))
    if problem.workspace_bytes is not None:
        sums["workspace"] = float(np.max(problem.workspace_bytes[inside]))
    for number, mode in enumerate(problem.modes):
        sums[f"compute {number}"] = float(np.sum(mode.compute_s[inside]))
        sums[f"fixed {number}"] = float(np.sum(mode.fixed_bytes[inside]))
        sums[f"flight {number}"] = float(np.sum(mode.flight_bytes[inside]))
    crossing = [t for t in problem.tensors if t.ends & layers and t.ends & ~held]
    lower = [t for t in crossing if not t.ends & -t.ends & layers]
    upper = [t for t in crossing if t.ends & -t.ends & layers]
    sums["lower wire"] = sum(t.lower_s for t in lower)
    sums["upper wire"] = sum(t.upper_s for t in upper)
    sums["lower bytes"] = sum(t.lower_bytes for t in lower)
    sums["upper bytes"] = sum(t.upper_bytes for t in upper)
    sums["kept"] = sum(t.kept_bytes for t in lower)
    return sums


# Layers on devices, contiguous or not, as an integer program ------------------------------------

ORDERED = 4
"""Devices that are alike are ordered by the first so many units per device."""


class AssignmentModel(IntegerProgram[Assignment]):
    """The program of a problem (as `parted` makes it), for loads up to `limit_s`."""

    def __init__(
        self,
        problem: StageProblem,
        slots: Slots,
        limit_s: float,
        forbidden: Sequence[Assignment] = (),
    ) -> None:
        self.problem, self.slots = problem, slots
        self.limit_s = limit_s * SAME
        least_s = least_load(problem, slots)
        self.possible = slots.count > 0 and least_s <= self.limit_s
        if not self.possible:
            return
        self.unit_s = (least_s or max((t.lower_s for t in problem.tensors), default=0) or 1) / SCALE
        self.mip = Mip()
        self._group()
        most = self.limit_s / self.unit_s
        longest = self.mip.variable(least_s / self.unit_s, most if np.isfinite(most) else None)
        self.mip.minimise(longest)
        self._x: dict[tuple[int, int], Terms] = {}
        self._o: dict[tuple[int, int], Terms] = {}
        self._w: dict[tuple[int, int, int], Terms] = {}
        self._write()
        StageRows(self, longest, self.unit_s, self.limit_s).add()
        for assignment in forbidden:
            self._forbid(assignment)

    def _group(self) -> None:
        """Layers that must share a device as units; heavier ones first in `_order`."""
        problem = self.problem
        heads = joined(problem.layers, problem.together)
        number = {head: u for u, head in enumerate(sorted(set(heads)))}
        of = tuple(number[head] for head in heads)
        layers = [0] * len(number)
        for layer, u in enumerate(of):
            layers[u] |= 1 << layer
        self.units = Units(tuple(layers), of, (), (), (), *between(problem, of, len(number)))
        work = self.units.sums(least_compute(problem, self.slots))
        self._order = sorted(range(len(layers)), key=lambda u: (-work[u], u))

    def _write(self) -> None:
        mip, slots = self.mip, self.slots
        result = any(t.ends >> self.units.count & 1 for t in self.units.tensors)
        for u in range(self.units.count + 1):
            for d in range(slots.count):
                there = u < self.units.count or result
                self._x[u, d] = mip.binary() if there else Terms(float(d == 0))
            mip.equal(difference(total(self._x[u, d] for d in range(slots.count)), Terms(1.0)))
        for d, choices in enumerate(slots.choices):
            free = len(choices) == 1
            for c in range(len(choices)):
                self._o[d, c] = Terms(1.0) if free else mip.binary()
            if not free:
                mip.at_most(self.chosen(d, tuple(range(len(choices)))), 1.0)
            for u in range(self.units.count + 1):
                parts = [mip.variable(0.0, 1.0) for _ in choices] if len(choices) > 1 else []
                parts = parts or [self._x[u, d]]
                for c, part in enumerate(parts):
                    self._w[u, d, c] = part
                    # The result may lie on a device that computes nothing.
                    if u < self.units.count and not free:
                        mip.at_most(difference(part, self._o[d, c]))
                mip.equal(difference(total(parts), self._x[u, d]))
        self._write_order()

    def _write_order(self) -> None:
        """Of devices that are alike, each has a heavier unit than the next one has."""
        for d, before in enumerate(self._twins()):
            if before is None:
                continue
            for rank, u in enumerate(self._order[: ORDERED * self.slots.count]):
                heavier = total(self._x[v, before] for v in self._order[:rank])
                self.mip.at_most(difference(self._x[u, d], heavier))

    def _twins(self) -> list[int | None]:
        """Per device, the last one before it that is just like it."""
        last: dict[object, int] = {}
        twins = []
        for d, choices in enumerate(self.slots.choices):
            key = tuple((c.mode, c.place) for c in choices)
            twins.append(last.get(key))
            last[key] = d
        return twins

    def _ordered(self, devices: Sequence[int]) -> list[int]:
        """The same assignment, with devices that are alike in the order that is written down."""
        rank = {u: r for r, u in enumerate(self._order)}

        def heaviest(layers: int) -> int:
            return min((rank[self.units.of[j]] for j in members(layers)), default=len(rank))

        chains: list[list[int]] = []
        for d, before in enumerate(self._twins()):
            chain = next((c for c in chains if before in c), None)
            if chain is None:
                chains.append([d])
            else:
                chain.append(d)
        made = list(devices)
        for chain in chains:
            ordered = sorted((devices[d] for d in chain), key=heaviest)
            for d, layers in zip(chain, ordered, strict=True):
                made[d] = layers
        return made

    def _forbid(self, assignment: Assignment) -> None:
        met = Terms()
        for d, layers in enumerate(assignment.devices):
            for u in {self.units.of[j] for j in members(layers)}:
                met.add(self._x[u, d])
        self.mip.at_most(met, self.units.count - 1)

    # IntegerProgram ---------------------------------------------------------------------------

    def inside(self, u: int, slot: int, kind: tuple[int, ...]) -> Terms:
        """See IntegerProgram."""
        if len(kind) == len(self.slots.choices[slot]):
            return self._x[u, slot]
        return total(self._w[u, slot, c] for c in kind)

    def first(self, number: int, slot: int, kind: tuple[int, ...]) -> tuple[Terms, Terms]:
        """See IntegerProgram. It is the device with the tensor's maker."""
        here = self.inside(self.units.makers[number], slot, kind)
        return here, here

    def chosen(self, slot: int, kind: tuple[int, ...]) -> Terms:
        """See IntegerProgram."""
        return total(self._o[slot, c] for c in kind)

    def rest(self, slot: int) -> Terms:
        """See IntegerProgram. There is nothing."""
        return Terms()

    # From assignments and to assignments ------------------------------------------------------

    def values_of(self, found: Assignment) -> dict[int, float]:
        """Values of the assignment's binary variables; the solver finds the others."""
        values: dict[int, float] = {}
        for d, layers in enumerate(self._ordered(found.devices)):
            for u, mask in enumerate(self.units.layers):
                (number,) = self._x[u, d].of
                values[number] = float(bool(mask & layers))
        return values

    def answer_of(self, values: tuple[float, ...]) -> Assignment:
        """The assignment of a solution, with its load straight from the definition."""
        devices = tuple(
            sum(
                mask
                for u, mask in enumerate(self.units.layers)
                if self._x[u, d].value(values) > 0.5
            )
            for d in range(self.slots.count)
        )
        return Assignment(devices, assignment_load(self.problem, self.slots, devices))


# Sets of layers that need not be contiguous: each device may hold several stretches of the
# model ------------------------------------------------------------------------------------------
# An integer program over assignments, one device per set. Its best load is no more than that of
# any cut into stages of one device, and so tells what contiguity costs.


@dataclass(frozen=True)
class NoncontiguousAnswer:
    """What the program found.

    Attributes:
        devices: bit masks of layers, for the devices K, K − 1, … from the end of the list; None
            where nothing fits.
        objective_s: their largest load; infinite without any.
        bound_s: no assignment has a smaller load; infinite where nothing fits.
        optimal: the assignment is proven best, or it is proven that there is none.
        interrupted: stopped from outside.
    """

    devices: tuple[int, ...] | None
    objective_s: float
    bound_s: float
    optimal: bool
    interrupted: bool


def solve_noncontiguous(
    problem: StageProblem,
    *,
    warm: Cut | None = None,
    gap: float = 0.0,
    time_limit_s: float | None = None,
) -> NoncontiguousAnswer:
    """The assignment of layers to devices whose largest load is smallest.

    Args:
        warm: a cut to start from, if all its stages have one replica.
        gap: relative; the search may end when load and bound are no further apart.
        time_limit_s: as in `search.solve_ilp`.
    """
    made = parted(problem)
    slots = device_slots(made)
    search: Search[Assignment] = Search(
        lambda limit_s, excluded: AssignmentModel(made, slots, limit_s, excluded),
        least_load(made, slots),
        gap=gap,
        time_limit_s=time_limit_s,
    )
    if warm is not None and all(problem.options[s.option].replicas == 1 for s in warm.stages):
        devices = [0] * slots.count
        for number, stage in enumerate(warm.stages):
            devices[number if slots.alike else problem.devices - stage.k] = stage.layers
        load_s = assignment_load(made, slots, devices)
        search.offer(Assignment(tuple(devices), load_s))
    search.run()
    best = search.best
    return NoncontiguousAnswer(
        best.devices if best else None,
        best.objective_s if best else math.inf,
        search.bound_s,
        search.optimal,
        search.interrupted,
    )
