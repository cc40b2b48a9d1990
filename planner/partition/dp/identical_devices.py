"""Identical devices: what an option means at a place, and what stages cost whatever theirs is.

Where devices are identical, a stage's load is the same wherever it stands, and what it holds rises
with the devices behind it: fewer of them for what follows are never worse.

Index letters: k devices from a stage's first one to the end; m modes; p stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..problem import Option, Place, StageProblem, Vector
from ..waits import Waits
from .cost_tables import PairCosts, stage_loads
from .lattice import Flags, Positions

# Places of identical devices, where only what is in flight depends on the place -------------------


class IdenticalPlaces:
    """`StageProblem.place` where a stage of r replicas has ⌈k / r⌉ units in flight, or a most.

    So its load is the same wherever it stands, and what it holds rises with the devices from its
    first one to the end.

    Attributes:
        with_one: per option, its place with 1 unit in flight.
        copies_per_unit: of the parameters, that each further unit in flight needs.
        most: per option, units in flight at the most.
        waits: what stages wait for, by the devices beyond them; None: it isn't counted.
    """

    def __init__(
        self,
        options: Sequence[Option],
        place: Callable[[int], Place],
        *,
        copies_per_unit: float = 0.0,
        most: Callable[[int], float] = lambda r: float("inf"),
        waits: Waits | None = None,
    ) -> None:
        """Options with r replicas mean `place(r)`, with its units and copies for 1 in flight."""
        made = {r: place(r) for r in {option.replicas for option in options}}
        self.with_one = tuple(made[option.replicas] for option in options)
        self.copies_per_unit = copies_per_unit
        self.waits = waits
        self.most = tuple(most(option.replicas) for option in options)
        self._replicas = tuple(option.replicas for option in options)
        self._made: dict[tuple[int, float], Place] = {}

    def __call__(self, option: int, k: int) -> Place:
        """See `StageProblem.place`."""
        r = self._replicas[option]
        key = (r, min(-(-k // r), self.most[option]))
        found = self._made.get(key)
        if found is None:
            place, units = self.with_one[option], key[1]
            copies = place.copies + self.copies_per_unit * (units - 1)
            found = replace(place, units=place.units * units, copies=copies)
            self._made[key] = found
        return found

    def changed(
        self, options: Sequence[Option], change: Callable[[Place, int], Place]
    ) -> IdenticalPlaces:
        """Places that are each changed by a function of theirs and of r.

        Args:
            options: those that these places were made for.
            change: leaves units and copies as they are.
        """
        pairs = zip(options, self.with_one, self.most, strict=True)
        found = {o.replicas: (change(place, o.replicas), most) for o, place, most in pairs}
        return IdenticalPlaces(
            options,
            lambda r: found[r][0],
            copies_per_unit=self.copies_per_unit,
            most=lambda r: found[r][1],
            waits=self.waits,
        )

    def with_waits(self, waits: Waits | None) -> IdenticalPlaces:
        """The same where what stages wait for counts."""
        other = copy(self)
        other.waits = waits
        return other


# What stages cost there, for one lower downset and all upper ones at a time -----------------------


class ModeCosts(NamedTuple):
    """What stages from one downset cost whatever their places, [p], or in each mode, [m, p].

    Attributes:
        above: position of the downset they end at.
        compute, serial: seconds at speed 1.
        once, flight: bytes held in any case, parameters left out, and for each unit.
        parameters: bytes.
        lower_s, upper_s: on the wire.
        beside: of other layers that come on top, in s.
    """

    above: Positions
    compute: Vector
    once: Vector
    flight: Vector
    parameters: Vector
    serial: Vector
    lower_s: Vector
    upper_s: Vector
    beside: Vector

    def those(self, which: Flags | Positions) -> ModeCosts:
        """Of some of the stages."""
        return ModeCosts._make(numbers[..., which] for numbers in self)

    def loads(self, problem: StageProblem, mode: int, replicas: int, place: Place) -> Vector:
        """Loads in s of stages that all have this mode, so many replicas and this place, [p]; of
        their layers and cuts alone, without `beside`."""
        return stage_loads(
            problem,
            lambda field: float(getattr(place, field)),
            replicas,
            self.compute[mode].copy(),
            self.serial,
            self.parameters > 0,
            lambda: self.parameters,
            (self.lower_s, self.upper_s),
            None,
        )


def mode_costs(costs: PairCosts, below: int) -> ModeCosts:
    """What stages from a downset cost in each mode."""
    above = np.flatnonzero(costs.above(below))
    serial = np.zeros(len(above))
    if costs.serial is not None:
        serial = costs.serial[above] - costs.serial[below]
    return ModeCosts(
        above,
        costs.compute[:, above] - costs.compute[:, below, None],
        *costs.bytes_between(below, above),
        costs.parameters[above] - costs.parameters[below],
        serial,
        *costs.wires_between(below, above),
        costs.before[below] + costs.after[above],
    )
