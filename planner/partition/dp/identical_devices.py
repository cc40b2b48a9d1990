"""Identical devices: the cut by how few of them do the rest of the model under a target load.

Where devices are identical, a stage's load is the same wherever it stands, and what it holds rises
with the devices behind it: fewer of them for what follows are never worse. So a downset needs one
number, the fewest devices that do the layers beyond it under the target, where `minimax` keeps one
for each number of devices left. The best target is some stage's load, found by halving a sorted
list of them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from time import monotonic
from typing import NamedTuple

import numpy as np

from ..problem import (
    FITS,
    Answer,
    CutTensor,
    Option,
    Place,
    StageProblem,
    Vector,
    cut_on_last_devices,
    members,
)
from ..waits import Waits
from .cost_tables import stage_loads
from .lattice import Flags, Lattice, Positions

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


# The cut, by halving the list of all stages' loads ------------------------------------------------

FEW = 2_000
"""Options × devices up to which `minimax` is as quick."""

MOST_NUMBERS = 100_000_000
"""Steps of making the table of stages: about a second."""

NEVER = 2**62
"""A cost that no chain has."""


def identical_minimax(
    problem: StageProblem,
    lattice: Lattice,
    *,
    deadline: float | None = None,
    few: int | None = None,
) -> Answer | None:
    """The cut on a lattice whose largest stage load is smallest, or what is known at the deadline.

    Among cuts with the same objective one with the fewest devices, then with the fewest stages.

    Args:
        deadline: on the clock of `time.monotonic`.
        few: options × devices that count as few; FEW by default.

    Returns:
        None where this isn't the way: places aren't `IdenticalPlaces`, the number of stages is
        given, devices are few, or there are too many stages to hold in memory.
    """
    places = problem.place
    if not isinstance(places, IdenticalPlaces) or problem.stages is not None:
        return None
    if len(problem.options) * problem.devices <= (FEW if few is None else few):
        return None
    rows = problem.layers + len(problem.tensors) + len(problem.options) + len(problem.modes) ** 2
    if lattice.size**2 // 2 * rows > MOST_NUMBERS:
        return None
    table = StageTable(problem, lattice, places)
    stages = [table.stages(below) for below in range(lattice.size - 1)]
    return _Halving(problem, lattice, stages, deadline).answer()


@dataclass(frozen=True)
class _Halving:
    problem: StageProblem
    lattice: Lattice
    stages: Sequence[StagesAbove]
    deadline: float | None

    def answer(self) -> Answer:
        loads = np.unique(np.concatenate([stages.load for stages in self.stages]))
        # No cut is below the load at `low`; the best one so far has that at `high`.
        low, high, best = 0, len(loads), None
        while low < high:
            if self.deadline is not None and monotonic() > self.deadline:
                break
            middle = (low + high) // 2 if best else high - 1
            chosen = self.choices(float(loads[middle]))
            if chosen is None:
                low = middle + 1
                continue
            best = list(self.chain(chosen))
            largest = max(self.stages[below].load[at] for below, at in best)
            high = int(np.searchsorted(loads, largest))
        cut = None
        if best:
            steps = [
                (below, int(self.stages[below].above[at]), int(self.stages[below].option[at]))
                for below, at in best
            ]
            cut = cut_on_last_devices(self.problem, self.lattice.masks, steps)
        if low < high:
            return Answer(cut, float(loads[low]), optimal=False)
        return Answer(cut, cut.objective_s if cut else float("inf"), optimal=True)

    def choices(self, target: float) -> Positions | None:
        """The stage to take from each downset, with the fewest devices; None without a cut."""
        devices, step = self.problem.devices, self.problem.layers + 1
        # Devices · step + stages, which are fewer than that.
        cost = np.full(self.lattice.size, NEVER, dtype=np.int64)
        cost[-1] = 0
        chosen = np.zeros(len(cost), dtype=np.intp)
        for below in range(len(cost) - 2, -1, -1):
            stages = self.stages[below]
            total = cost[stages.above] + (stages.replicas * step + 1)
            k = total // step
            good = (stages.load <= target) & (k <= devices)
            good &= -(-k // stages.replicas) <= stages.units
            total[~good] = NEVER
            if len(total):
                chosen[below] = total.argmin()
                cost[below] = total[chosen[below]]
        return chosen if cost[0] < NEVER else None

    def chain(self, chosen: Positions) -> Iterator[tuple[int, int]]:
        """Positions of the downsets that stages begin at, and of these in their lists."""
        below = 0
        while below != self.lattice.size - 1:
            at = int(chosen[below])
            yield below, at
            below = int(self.stages[below].above[at])


# All stages of a small lattice with the options worth having --------------------------------------
# The sums of `StageProblem`, for one lower downset, all upper ones and all options at a time.

ROUNDING = 1e-13
"""Relative to a sum over all layers: what differences of such sums may be off by."""

PLACE = ("speed", "memory_bytes", "sync_s", "sync_s_per_byte", "lower_scale", "upper_scale")
COUNTS = ("units", "copies")


@dataclass(frozen=True)
class StagesAbove:
    """The stages from one downset, each with an option, [p].

    Attributes:
        above: position of the downset they end at.
        option, replicas: which, and its r.
        load: in s.
        units: in flight at most, in their devices' memory; at least 1, and no more than devices.
    """

    above: Positions
    option: Positions
    replicas: Positions
    load: Vector
    units: Positions


class CommonCosts(NamedTuple):
    """What stages from one downset cost whatever their places, each with an option, [p].

    Attributes:
        above: position of the downset they end at.
        at: the option, by its number among those that there are devices for.
        compute, serial: seconds at speed 1.
        once, flight: bytes held in any case, parameters left out, and for each unit.
        parameters: bytes.
        lower_s, upper_s: on the wire.
        beside: of other layers that come on top, in s.
    """

    above: Positions
    at: Positions
    compute: Vector
    once: Vector
    flight: Vector
    parameters: Vector
    serial: Vector
    lower_s: Vector
    upper_s: Vector
    beside: Vector


class ModeCosts(NamedTuple):
    """As `CommonCosts`, of the stages from one downset, [p], in all modes, [m, p]."""

    above: Positions
    compute: Vector
    once: Vector
    flight: Vector
    parameters: Vector
    serial: Vector
    lower_s: Vector
    upper_s: Vector
    beside: Vector

    def those(self, which: Flags) -> ModeCosts:
        """Of some of the stages."""
        return ModeCosts(
            self.above[which],
            self.compute[:, which],
            self.once[:, which],
            self.flight[:, which],
            self.parameters[which],
            self.serial[which],
            self.lower_s[which],
            self.upper_s[which],
            self.beside[which],
        )

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


class StageTable:
    """A problem whose places are `IdenticalPlaces`, on a lattice."""

    def __init__(self, problem: StageProblem, lattice: Lattice, places: IdenticalPlaces) -> None:
        self._problem = problem
        columns = [lattice.column(layer) for layer in range(lattice.layers)]
        self._member: Flags = np.array(columns).reshape(lattice.layers, lattice.size)
        self._sum_up()
        replicas = np.array([option.replicas for option in problem.options], dtype=np.intp)
        self._usable: Positions = np.flatnonzero(replicas <= problem.devices)
        self._replicas = replicas[self._usable]
        self._mode = np.array([option.mode for option in problem.options])[self._usable]
        self._alike = [np.flatnonzero(self._replicas == r) for r in np.unique(self._replicas)]
        self._take_places(places)

    def _take_places(self, places: IdenticalPlaces) -> None:
        self._copies_per_unit = places.copies_per_unit
        self._most = np.array(places.most)[self._usable]
        self._place = {
            field: np.array([getattr(places.with_one[o], field) for o in self._usable])
            for field in (*PLACE, *COUNTS)
        }

    def _sum_up(self) -> None:
        problem = self._problem
        tensors = problem.tensors
        self._ends = self._counted([tensor.ends & problem.full for tensor in tensors])
        last = np.array([tensor.ends.bit_count() for tensor in tensors], dtype=np.intp)
        self._beyond = self._ends < last[:, None]
        self._beyond[:, -1] = False
        fields = ("lower_s", "lower_bytes", "kept_bytes", "remade_bytes")
        self._lower = _fields(tensors, fields)
        self._upper = _fields(tensors, ("upper_s", "upper_bytes"))
        self._shared = self._counted([shared.ends for shared in problem.shared])
        self._compute = self._sums(mode.compute_s for mode in problem.modes)
        self._fixed = self._sums(mode.fixed_bytes for mode in problem.modes)
        self._flight = self._sums(mode.flight_bytes for mode in problem.modes)
        others = (problem.parameter_bytes, problem.serial_s, problem.before_s, problem.after_s)
        zeros = np.zeros(problem.layers)
        self._others = self._sums(zeros if values is None else values for values in others)

    def _counted(self, masks: Sequence[int]) -> Positions:
        """How many of the layers of each mask each downset has, [masks, D]."""
        counts = np.zeros((len(masks), self._member.shape[1]), dtype=np.intp)
        for row, mask in zip(counts, masks, strict=True):
            row += self._member[list(members(mask))].sum(axis=0)
        return counts

    def _sums(self, values: Iterable[Vector]) -> Vector:
        """Over the layers of each downset, [values, D]."""
        sums: Vector = np.array(list(values)) @ self._member
        return sums

    # Stages ----------------------------------------------------------------------------------

    def stages(self, below: int) -> StagesAbove:
        """Those from the downset at this position.

        Left out: options that take more devices than there are, or more memory than a device has
        with 1 unit in flight, and modes that another one is as good as in all.
        """
        return self.stages_of(self.common(below))

    def with_places(self, problem: StageProblem, places: IdenticalPlaces) -> StageTable:
        """The same for another problem that has other places alone."""
        other = copy(self)
        other._problem = problem
        other._take_places(places)
        return other

    def of_modes(self, below: int) -> ModeCosts:
        """What stages from a downset cost in each mode."""
        member = self._member
        above = np.flatnonzero((member >= member[:, below, None]).all(axis=0))
        above = above[above != below]
        parameters, serial = _rise(self._others[:2], below, above)
        lower, upper = self._at_cuts(below, above)
        before, after = self._others[2:]
        return ModeCosts(
            above,
            _rise(self._compute, below, above),
            *self._bytes(below, above, lower[1:], upper[1]),
            parameters,
            serial,
            lower[0],
            upper[0],
            before[below] + (after[-1] - after[above]),
        )

    def common(self, below: int) -> CommonCosts:
        """What stages from a downset cost whatever their places."""
        found = self.of_modes(below)
        # Options in rows, upper downsets in columns. Only one with as many replicas may stand in.
        worth = np.zeros((len(self._mode), len(found.above)), dtype=np.bool_)
        for alike in self._alike:
            modes = self._mode[alike]
            worth[alike] = _worth_having(
                (found.compute[modes], self._compute[:, -1].max()),
                (found.once[modes], self._fixed[:, -1].max()),
                (found.flight[modes], self._flight[:, -1].max()),
            )
        at, which = np.nonzero(worth)
        mode = self._mode[at]
        return CommonCosts(
            found.above[which],
            at,
            found.compute[mode, which],
            found.once[mode, which],
            found.flight[mode, which],
            found.parameters[which],
            found.serial[which],
            found.lower_s[which],
            found.upper_s[which],
            found.beside[which],
        )

    def stages_of(self, found: CommonCosts) -> StagesAbove:
        """Those of a downset whose costs are known, as `stages`."""
        at = found.at
        load = stage_loads(
            self._problem,
            lambda field: self._place[field][at],
            self._replicas[at],
            # Changed in place; other places have it too.
            found.compute.copy(),
            found.serial,
            found.parameters > 0,
            lambda: found.parameters,
            (found.lower_s, found.upper_s),
            found.beside,
        )
        units = self._units(at, found.once, found.flight, found.parameters)
        good = units > 0
        at = at[good]
        return StagesAbove(
            found.above[good], self._usable[at], self._replicas[at], load[good], units[good]
        )

    def _at_cuts(self, below: int, above: Positions) -> tuple[Vector, Vector]:
        """Of the tensors at stages' lower and upper cuts, all that counts, [4, B] and [2, B]."""
        ends = self._ends[:, below, None]
        in_stage = self._ends[:, above] > ends
        lower: Vector = self._lower @ (in_stage & (ends > 0))
        upper: Vector = self._upper @ (in_stage & (ends == 0) & self._beyond[:, above])
        return lower, upper

    def _bytes(
        self, below: int, above: Positions, lower: Vector, upper: Vector
    ) -> tuple[Vector, Vector]:
        """Held whatever is in flight, parameters left out, and for each unit, [M, B] each.

        Args:
            lower: held, kept and remade for tensors at lower cuts, [3, B].
            upper: held for those at upper ones, [B].
        """
        problem, modes = self._problem, self._problem.modes
        sizes = np.array([shared.nbytes for shared in problem.shared])
        shared = sizes @ (self._shared[:, above] > self._shared[:, below, None])
        held, kept, remade = lower
        once = _rise(self._fixed, below, above) + held + upper
        once += np.outer([mode.shared_once for mode in modes], shared)
        flight = _rise(self._flight, below, above)
        flight += np.outer([mode.shared_in_flight for mode in modes], shared)
        flight += np.outer([mode.inputs_kept for mode in modes], kept)
        flight += np.outer([mode.remade_kept for mode in modes], remade)
        if problem.workspace_bytes is not None:
            inside = self._member[:, above] & ~self._member[:, below, None]
            once += (inside * problem.workspace_bytes[:, None]).max(axis=0, initial=0.0)
        return once, flight

    def _units(self, at: Positions, once: Vector, flight: Vector, parameters: Vector) -> Positions:
        """How many may be in flight, 0 where not even one may; as many as devices at most, [p]."""
        limit = self._place["memory_bytes"][at] * FITS
        each = self._place["units"][at] * flight + self._copies_per_unit * parameters
        once = once + (self._place["copies"][at] - self._copies_per_unit) * parameters
        # What holds nothing for a unit fits with any number of them, or with none.
        most = np.where(once <= limit, float(self._problem.devices), 0.0)
        np.divide(limit - once, each, out=most, where=(each > 0) & np.isfinite(limit))
        most = np.clip(np.floor(most), 0, self._problem.devices)
        most = np.where(once + (most + 1) * each <= limit, most + 1, most)
        most = np.where(once + most * each <= limit, most, most - 1)
        # What never has more in flight fits wherever it does with that many.
        most = np.where(most >= self._most[at], self._problem.devices, most)
        units: Positions = np.clip(most, 0, self._problem.devices).astype(np.intp)
        return units


def _fields(tensors: Sequence[CutTensor], names: Sequence[str]) -> Vector:
    """Of each tensor, [names, tensors]."""
    found = [[getattr(tensor, name) for tensor in tensors] for name in names]
    return np.array(found, dtype=np.float64).reshape(len(names), len(tensors))


def _rise(sums: Vector, below: int, above: Positions) -> Vector:
    """From one downset to others, [values, D] to [values, B]."""
    rise: Vector = sums[:, above] - sums[:, below, None]
    return rise


def _worth_having(*numbers: tuple[Vector, float]) -> Flags:
    """Which modes are, of each stage: no other is as good in all of these numbers, [M, B].

    Args:
        numbers: per mode and stage, [M, B], each with a sum over all layers.
    """
    count, width = numbers[0][0].shape
    as_good = np.ones((count, count, width), dtype=np.bool_)
    for values, total in numbers:
        steps = np.rint(values / (ROUNDING * float(total) or 1.0))
        as_good &= steps[:, None] <= steps
    # Of modes that are as good as each other the first stays.
    later = np.arange(count)[:, None] > np.arange(count)
    beaten = as_good & ~(as_good.swapaxes(0, 1) & later[..., None])
    beaten[np.arange(count), np.arange(count)] = False
    worth: Flags = ~beaten.any(axis=0)
    return worth
