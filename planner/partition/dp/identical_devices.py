"""Identical devices: the cut by how few of them do the rest of the model under a target load.

Where devices are identical, a stage's load is the same wherever it stands, and what it holds rises
with the devices behind it: fewer of them for what follows are never worse. So a downset needs one
number, the fewest devices that do the layers beyond it under the target, where `minimax` keeps one
for each number of devices left. The best target is some stage's load, found by halving a sorted
list of them all. Piper's questions on 32 to 1,024 devices take 0.1 s so, and 6 to 12 s one target
at a time (`identical_devices_by_target`), which is for lattices whose table would be too large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from time import monotonic
from typing import NamedTuple

import numpy as np

from ..problem import FITS, Answer, Option, Place, StageProblem, Vector, cut_on_last_devices
from ..waits import Waits
from .cost_tables import FIELDS, LoadParts, PairCosts, stage_loads
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
        few: options × devices that count as few; FEW by default.

    Returns None where this isn't the way: places aren't `IdenticalPlaces`, the number of stages is
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
        return ModeCosts._make(numbers[..., which] for numbers in self)

    def loads(self, problem: StageProblem, mode: int, replicas: int, place: Place) -> Vector:
        """Loads in s of stages that all have this mode, so many replicas and this place, [p]; of
        their layers and cuts alone, without `beside`."""
        return stage_loads(
            problem,
            lambda field: float(getattr(place, field)),
            replicas,
            LoadParts(
                self.compute[mode].copy(),
                self.serial,
                self.parameters > 0,
                lambda: self.parameters,
                (self.lower_s, self.upper_s),
                None,
            ),
        )


class StageTable:
    """A problem whose places are `IdenticalPlaces`, on a lattice."""

    def __init__(self, problem: StageProblem, lattice: Lattice, places: IdenticalPlaces) -> None:
        self._problem = problem
        self._costs = PairCosts(problem, lattice, limited=True)
        replicas = np.array([option.replicas for option in problem.options], dtype=np.intp)
        self._usable: Positions = np.flatnonzero(replicas <= problem.devices)
        self._replicas = replicas[self._usable]
        self._mode = np.array([option.mode for option in problem.options])[self._usable]
        self._alike = [np.flatnonzero(self._replicas == r) for r in np.unique(self._replicas)]
        self._copies_per_unit = places.copies_per_unit
        self._most = np.array(places.most)[self._usable]
        self._place = {
            field: np.array([getattr(places.with_one[o], field) for o in self._usable])
            for field in FIELDS
        }

    # Stages ----------------------------------------------------------------------------------

    def of_modes(self, below: int) -> ModeCosts:
        """What stages from a downset cost in each mode."""
        costs = self._costs
        above = np.flatnonzero(costs.above(below))
        serial = costs.serial_between(below, above)
        return ModeCosts(
            above,
            costs.compute[:, above] - costs.compute[:, below, None],
            *costs.bytes_between(below, above),
            costs.parameters[above] - costs.parameters[below],
            np.zeros(len(above)) if serial is None else serial,
            *costs.wires_between(below, above),
            costs.before[below] + costs.after[above],
        )

    def stages(self, below: int) -> StagesAbove:
        """Those from the downset at this position.

        Left out: options that take more devices than there are, or more memory than a device has
        with 1 unit in flight, and modes that another one is as good as in all.
        """
        costs = self.of_modes(below)
        # Options in rows, upper downsets in columns. Only one with as many replicas may stand in.
        worth = np.zeros((len(self._mode), len(costs.above)), dtype=np.bool_)
        for alike in self._alike:
            modes = self._mode[alike]
            worth[alike] = _worth_having(
                (costs.compute[modes], self._costs.compute[:, -1].max()),
                (costs.once[modes], self._costs.fixed[:, -1].max()),
                (costs.flight[modes], self._costs.flight[:, -1].max()),
            )
        at, which = np.nonzero(worth)
        mode, mine = self._mode[at], costs.those(which)
        stage, wires = np.arange(len(at)), (mine.lower_s, mine.upper_s)
        load = stage_loads(
            self._problem,
            lambda field: self._place[field][at],
            self._replicas[at],
            self._costs.load_parts(mode, below, mine.above, wires),
        )
        units = self._units(at, mine.once[mode, stage], mine.flight[mode, stage], mine.parameters)
        good = units > 0
        at = at[good]
        return StagesAbove(
            mine.above[good], self._usable[at], self._replicas[at], load[good], units[good]
        )

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
        return np.clip(most, 0, self._problem.devices).astype(np.intp)


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
