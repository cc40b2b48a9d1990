"""Loads and bytes of stages as rows of an integer program.

All is said in terms of whether unit u is in slot s and the stage there is of a given kind, so
that stages, and sets of layers that aren't contiguous, share these rows. A row of a kind that
isn't chosen is about nothing: no constant stands for "off".
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ..problem import CutTensor, StageProblem, Vector, members
from .mip import Mip, Terms, difference, total
from .variables import SlotChoice, Slots, Units

SCALE = 1000.0
"""Of loads and bytes in the program, where 1 would be the least load, and the limit."""
TIE = 1e-9
"""Relative; so that what fits exactly is sure to fit."""

TENSOR_SUMS = {
    "wire": ("both", "lower_s", "upper_s"),
    "lower wire": ("lower", "lower_s", "upper_s"),
    "upper wire": ("upper", "lower_s", "upper_s"),
    "border bytes": ("both", "lower_bytes", "upper_bytes"),
    "lower bytes": ("lower", "lower_bytes", "upper_bytes"),
    "upper bytes": ("upper", "lower_bytes", "upper_bytes"),
    "kept": ("lower", "kept_bytes", ""),
}
"""Side of the stage, and a tensor's numbers below and above it. Tensors that count the same on
both sides are in the first of the sums, and not in the next two."""

REMADE = "remade "
"""Of what one set of layers that are computed again makes, whose number follows, below stages."""


class Loaded(Protocol):
    """An answer with a largest load, in s."""

    @property
    def objective_s(self) -> float: ...


Found = TypeVar("Found", bound=Loaded)


class IntegerProgram(ABC, Generic[Found]):
    """An integer program for answers with no load above a limit: which layer is on which stage.

    Attributes:
        possible: False where it is plain that there is none; then there is nothing to solve.
        unit_s: of the program's objective.
    """

    possible: bool
    unit_s: float
    mip: Mip
    problem: StageProblem
    units: Units
    slots: Slots

    @abstractmethod
    def values_of(self, found: Found) -> dict[int, float]:
        """Values of the binary variables for an answer within the limit."""

    @abstractmethod
    def answer_of(self, values: tuple[float, ...]) -> Found:
        """The answer that these values stand for; its load infinite where it doesn't fit."""

    @abstractmethod
    def inside(self, u: int, slot: int, kind: tuple[int, ...]) -> Terms:
        """Whether a unit is in a slot whose stage is of this kind. Unit n is the result."""

    @abstractmethod
    def first(self, number: int, slot: int, kind: tuple[int, ...]) -> tuple[Terms, Terms]:
        """Whether a stage is the first that has an end of the units' tensor of this number.

        Returns two expressions: no less than that if the stage is of this kind; and no more.
        """

    @abstractmethod
    def chosen(self, slot: int, kind: tuple[int, ...]) -> Terms:
        """Whether a stage of this kind is in a slot. Kinds are positions of a slot's choices."""

    @abstractmethod
    def rest(self, slot: int) -> Terms:
        """What loads in a slot have besides busy and wire time, in s; not above 0 without one."""


@dataclass(frozen=True)
class Linear:
    """A number of a stage: coefficients by the name of a sum over it."""

    of: tuple[tuple[str, float], ...]
    limit: float = 0.0


@dataclass
class StageSums:
    """Sums over the units and tensors of a slot, by name."""

    seats: IntegerProgram[Any]
    _known_parted: dict[tuple[int, str, int, tuple[int, ...]], Terms] = field(default_factory=dict)

    def value(self, linear: Linear, slot: int, kind: tuple[int, ...]) -> Terms:
        """A number of the stage, if it is of this kind; zero otherwise."""
        made = Terms()
        for name, coefficient in linear.of:
            made.add(self._sum(name, slot, kind), coefficient)
        return made

    def most(self, name: str) -> float:
        """What a sum is at most, over any stage."""
        problem, units = self.seats.problem, self.seats.units
        if name == "has parameters":
            return float(np.any(problem.parameter_bytes != 0))
        if name == "workspace":
            values = problem.workspace_bytes
            return 0.0 if values is None else float(np.max(values))
        if name == "shared":
            return sum(item.nbytes for item in problem.shared)
        if name in TENSOR_SUMS or name.startswith(REMADE):
            return sum(self._amount(name, tensor) for tensor in units.tensors)
        return float(np.sum(units.sums(self._values(name))))

    def _sum(self, name: str, slot: int, kind: tuple[int, ...]) -> Terms:
        units = self.seats.units
        made = Terms()
        if name == "has parameters":
            has = np.flatnonzero(units.sums(self.seats.problem.parameter_bytes))
            return self._any([self.seats.inside(int(u), slot, kind) for u in has])
        if name == "workspace":
            return self._workspace(slot, kind)
        if name == "shared":
            for item in units.shared:
                ends = [self.seats.inside(u, slot, kind) for u in members(item.ends)]
                made.add(self._any(ends) if len(ends) > 1 else ends[0], item.nbytes)
        elif name in TENSOR_SUMS or name.startswith(REMADE):
            side = "lower" if name.startswith(REMADE) else TENSOR_SUMS[name][0]
            for number, tensor in enumerate(units.tensors):
                if amount := self._amount(name, tensor):
                    made.add(self._parted(number, side, slot, kind), amount)
        else:
            for u, value in enumerate(units.sums(self._values(name))):
                if value:
                    made.add(self.seats.inside(u, slot, kind), float(value))
        return made

    def _values(self, name: str) -> Vector | None:
        problem = self.seats.problem
        what, _, mode = name.partition(" ")
        if what == "compute":
            return problem.modes[int(mode)].compute_s
        if what == "fixed":
            return problem.modes[int(mode)].fixed_bytes
        if what == "flight":
            return problem.modes[int(mode)].flight_bytes
        return problem.serial_s if what == "serial" else problem.parameter_bytes

    def _amount(self, name: str, tensor: CutTensor) -> float:
        """What a tensor adds to a sum."""
        if name.startswith(REMADE):
            number = int(name.removeprefix(REMADE))
            return tensor.remade_bytes[number] if tensor.remade_bytes else 0.0
        side, lower, upper = TENSOR_SUMS[name]
        below = float(getattr(tensor, lower))
        if not upper:
            return below
        over = float(getattr(tensor, upper))
        same = below == over and (self._even or lower == "lower_bytes")
        if side == "both":
            return below if same else 0.0
        return 0.0 if same else below if side == "lower" else over

    @cached_property
    def _even(self) -> bool:
        """Whether wires are as slow below stages as above them."""
        places = [choice.place for choice in self.seats.slots.different]
        return all(place.lower_scale == place.upper_scale for place in places)

    def _parted(self, number: int, side: str, slot: int, kind: tuple[int, ...]) -> Terms:
        """Whether the stage has a tensor's end, but not all: the first, others, or any."""
        key = (number, side, slot, kind)
        if key not in self._known_parted:
            self._known_parted[key] = self._any(self._gaps(number, side, slot, kind))
        return self._known_parted[key]

    def _gaps(self, number: int, side: str, slot: int, kind: tuple[int, ...]) -> list[Terms]:
        seats = self.seats
        tensor = seats.units.tensors[number]
        if side == "both":
            # Any end will do to compare the others with.
            least = most = seats.inside(next(members(tensor.ends)), slot, kind)
        else:
            least, most = seats.first(number, slot, kind)
        gaps = []
        for end in members(tensor.ends):
            here = seats.inside(end, slot, kind)
            if side != "lower":
                gaps.append(difference(least, here))
            # The result is nowhere but with the last layers: they don't get it from others.
            if side != "upper" and end != seats.units.count:
                gaps.append(difference(here, most))
        return gaps

    def _any(self, cases: list[Terms]) -> Terms:
        """At least the largest of some expressions and zero, and equal to it where it costs."""
        least = max((case.constant for case in cases if not case.of), default=0.0)
        cases = [case for case in cases if case.of]
        if least >= 1.0 or not cases:
            return Terms(max(least, 0.0))
        made = self.seats.mip.variable(0.0, 1.0)
        for case in cases:
            self.seats.mip.at_most(difference(case, made))
        return made

    def _workspace(self, slot: int, kind: tuple[int, ...]) -> Terms:
        values = self.seats.problem.workspace_bytes
        size = self.most("workspace")
        largest = np.zeros(self.seats.units.count)
        if values is not None:
            np.maximum.at(largest, list(self.seats.units.of), values)
        made = self.seats.mip.variable()
        for u in np.flatnonzero(largest):
            row = Terms().add(self.seats.inside(int(u), slot, kind), float(largest[u]) / size)
            self.seats.mip.at_most(row.add(made, -1.0))
        return Terms().add(made, size)


def busy_of(problem: StageProblem, choice: SlotChoice) -> Linear:
    """Busy time of a stage, in s."""
    place = choice.place
    terms = {
        f"compute {choice.mode}": 1 / (choice.replicas * place.speed),
        "serial": 1 / place.speed,
        "has parameters": problem.serial_fixed_s / place.speed + place.sync_s,
        "parameters": place.sync_s_per_byte,
    }
    return Linear(tuple(terms.items()))


def wire_of(choice: SlotChoice) -> Linear:
    """Wire time of a stage, in s."""
    lower, upper = choice.place.lower_scale, choice.place.upper_scale
    return Linear((("wire", lower), ("lower wire", lower), ("upper wire", upper)))


def bytes_of(problem: StageProblem, choice: SlotChoice) -> Linear:
    """Bytes of a stage, and their limit."""
    mode, place = problem.modes[choice.mode], choice.place
    remade = {}
    if mode.remade is not None:
        remade[f"{REMADE}{mode.remade}"] = max(place.units - mode.remade_once, 0.0)
    terms = {
        f"fixed {choice.mode}": 1.0,
        "parameters": place.copies,
        f"flight {choice.mode}": place.units,
        "shared": place.units * mode.shared_in_flight + mode.shared_once,
        "kept": place.units * mode.inputs_kept,
        **remade,
        "border bytes": 1.0,
        "lower bytes": 1.0,
        "upper bytes": 1.0,
        "workspace": 1.0,
    }
    return Linear(tuple(terms.items()), place.memory_bytes)


@dataclass
class StageRows:
    """Writes the rows of loads and bytes into a program.

    Attributes:
        longest: T, the variable that no load is above, in units of `unit_s`.
        limit_s: no load above it is wanted.
    """

    seats: IntegerProgram[Any]
    longest: Terms
    unit_s: float
    limit_s: float

    def __post_init__(self) -> None:
        self._sums = StageSums(self.seats)

    def add(self) -> None:
        problem = self.seats.problem
        for slot, choices in enumerate(self.seats.slots.choices):
            busy = [busy_of(problem, choice) for choice in choices]
            wire = [wire_of(choice) for choice in choices]
            if problem.overlap:
                self._loads(slot, busy)
                self._loads(slot, wire)
            else:
                pairs = zip(busy, wire, strict=True)
                self._loads(slot, [Linear(b.of + w.of) for b, w in pairs])
            self._bytes(slot, [bytes_of(problem, choice) for choice in choices])

    def _kinds(self, choices: list[Linear]) -> list[tuple[Linear, tuple[int, ...]]]:
        """Choices by their number, without sums that are zero for every stage."""
        kinds: dict[Linear, list[int]] = {}
        for position, linear in enumerate(choices):
            of = tuple((n, c) for n, c in linear.of if c and self._sums.most(n))
            kinds.setdefault(Linear(of, linear.limit), []).append(position)
        return [(linear, tuple(kind)) for linear, kind in kinds.items()]

    def _loads(self, slot: int, choices: list[Linear]) -> None:
        for linear, kind in self._kinds(choices):
            chosen = self.seats.chosen(slot, kind)
            load = self._sums.value(linear, slot, kind)
            rest = self.seats.rest(slot)
            if load.of or rest.of or load.constant:
                row = total([load, rest])
                self.seats.mip.at_most(Terms().add(row, 1 / self.unit_s).add(self.longest, -1.0))
            if load.of and chosen.of and np.isfinite(self.limit_s):
                # Says the same of whole numbers, and more of fractions.
                load.add(chosen, -self.limit_s)
                self.seats.mip.at_most(Terms().add(load, 1 / self.unit_s))

    def _bytes(self, slot: int, choices: list[Linear]) -> None:
        for linear, kind in self._kinds(choices):
            if sum(c * self._sums.most(name) for name, c in linear.of) <= linear.limit:
                continue
            row = self._sums.value(linear, slot, kind)
            row.add(self.seats.chosen(slot, kind), -linear.limit * (1 + TIE))
            size = linear.limit if linear.limit > 0 else 1.0
            self.seats.mip.at_most(Terms().add(row, SCALE / size))
