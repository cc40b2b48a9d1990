"""Layers on devices, contiguous or not, as an integer program.

x[u, d]     unit u is on device d; the model's result is a unit too
o[d, c]     device d is of choice c
w[u, d, c]  unit u is on device d, and that is so
T           is above each device's load, and to be small
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..problem import StageProblem
from ..stage_load import members
from .loads import SCALE, Seats, StageRows
from .placement_load import Assignment, assignment_load
from .solver import Mip, Terms, difference, total
from .units import Units, between, joined
from .variables import Slots, least_compute, least_load

ORDERED = 4
"""Devices that are alike are ordered by the first so many units per device."""


class AssignmentModel(Seats):
    """The program of a problem (`placement_load.parted`), for loads up to `limit_s`.

    Attributes:
        possible: False where no load is so small.
        unit_s: of the program's T.
    """

    def __init__(
        self,
        problem: StageProblem,
        slots: Slots,
        limit_s: float,
        forbidden: Sequence[Assignment] = (),
    ) -> None:
        self.problem, self.slots = problem, slots
        self.limit_s = limit_s * (1 + 1e-9)
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

    # Seats ------------------------------------------------------------------------------------

    def inside(self, u: int, slot: int, kind: tuple[int, ...]) -> Terms:
        """See Seats."""
        if len(kind) == len(self.slots.choices[slot]):
            return self._x[u, slot]
        return total(self._w[u, slot, c] for c in kind)

    def first(self, number: int, slot: int, kind: tuple[int, ...]) -> tuple[Terms, Terms]:
        """See Seats. It is the device with the tensor's maker."""
        here = self.inside(self.units.makers[number], slot, kind)
        return here, here

    def chosen(self, slot: int, kind: tuple[int, ...]) -> Terms:
        """See Seats."""
        return total(self._o[slot, c] for c in kind)

    def rest(self, slot: int) -> Terms:
        """See Seats. There is nothing."""
        return Terms()

    # From assignments and to assignments ------------------------------------------------------

    def values_of(self, assignment: Assignment) -> dict[int, float]:
        """Values of the assignment's binary variables; the solver finds the others."""
        values: dict[int, float] = {}
        for d, layers in enumerate(self._ordered(assignment.devices)):
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
