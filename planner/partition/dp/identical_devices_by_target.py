"""Identical devices, on a lattice too large for a table of its stages: one target at a time.

As `identical_devices`, a downset needs one number under a target: the fewest devices that do the
layers beyond it. Stages are made again for each target, the ones with the fewest devices first, and
only those that can need fewer than the best so far. Targets far below what any cut keeps to are
excluded before, with a simpler count of the devices that stages need (`excludes`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem import (
    FITS,
    Answer,
    Cut,
    Deadline,
    OutOfTime,
    StageProblem,
    Vector,
    check_time,
    cut_on_last_devices,
)
from ..waits import Waits
from .cost_tables import stage_loads
from .identical_devices import NEVER, IdenticalPlaces
from .lattice import Flags, Lattice, Positions
from .program import SLACK, UNBOUNDED, Program, just_below
from .sweep import CLOCK

MOST_PAIRS = 4_500_000
"""Stages whose costs are kept, whatever their options: some 50 bytes each."""

CLOSE = 1.001
"""Targets are halved until the best cut is so close to the bound; then lowered to just below it."""

CHUNK = 256
"""Stages to look at first; then four times as many, and so on."""


@dataclass(frozen=True)
class _Above:
    """What stages from one downset cost, whatever the target, by falling work.

    Attributes:
        above: positions of their upper downsets, [B].
        fall: those downsets' work times −1, ascending, [B].
        lower_s, upper_s: on the wire, [B].
        once, flight: bytes held in any case, parameters left out, and per unit, [M, B]; empty
            without a limit.
    """

    above: Positions
    fall: Vector
    lower_s: Vector
    upper_s: Vector
    once: Vector
    flight: Vector


class IdenticalByTargets:
    """A problem whose places are `IdenticalPlaces`, on a lattice."""

    def __init__(self, problem: StageProblem, lattice: Lattice, places: IdenticalPlaces) -> None:
        self._problem, self._lattice, self._places = problem, lattice, places
        self._program = Program(problem, lattice)
        self._costs = self._program.costs
        order = sorted(self._program.options.tolist(), key=lambda o: problem.options[o].replicas)
        self._options = [(o, problem.options[o], places.with_one[o]) for o in order]
        self._known: dict[int, _Above] = {}
        self._before = self._beyond = np.zeros(lattice.size)
        if places.waits is not None:
            self._before = self._costs.summed(places.waits.before_s)
            through = self._costs.summed(places.waits.beyond_s)
            self._beyond = through[-1] - through
        modes = sorted({problem.options[o].mode for o in self._program.options.tolist()})
        self._ways = [
            _Way(self._program, places, mode, self._before, self._beyond) for mode in modes
        ]

    @property
    def least_s(self) -> float:
        """No cut has a smaller objective, by work alone."""
        return self._program.bound_s

    def answer(self, below: float, within: float, deadline: Deadline) -> Answer:
        low, high, best = self._program.bound_s, just_below(below), None
        try:
            while high > low:
                target = high
                if best is not None:
                    close = high <= low * CLOSE
                    target = just_below(high) if close else float(np.sqrt(low * high))
                if best is not None and (high <= low * within or target <= low):
                    break
                cut = self.under(target, deadline)
                if cut is not None:
                    best, high = cut, cut.objective_s
                    continue
                low = target
                if best is None:
                    return Answer(None, below, optimal=True)
        except OutOfTime:
            return Answer(best, min(low, high), optimal=False)
        if best is None:
            # The bound alone shows that there is none.
            return Answer(None, below, optimal=True)
        return Answer(best, min(low, high), optimal=low >= just_below(high))

    def excludes(self, target: float, deadline: Deadline = None) -> bool:
        """Whether it is soon seen that no cut has loads up to a target.

        As `under`, with less to look at: tensors at cuts take no time and no memory, stages may
        lie between downsets of which none holds the other, and how many replicas are enough for a
        stage is known without trying them one by one. Raises OutOfTime.
        """
        costs, order, devices = self._costs, self._program.order, self._problem.devices
        before, after = costs.before[order], costs.after[order]
        fewest = np.full(len(order), np.inf)
        for i, below in enumerate(order.tolist()):
            if i % CLOCK == 0:
                check_time(deadline)
            if below == self._program.top:
                fewest[i] = 0.0
                continue
            at = np.flatnonzero(fewest[:i] < devices)
            rest, best = target - before[i] - after[at], devices + 1.0
            for way in self._ways:
                best = way.fewest(i, at, fewest[at], rest, target, best)
            fewest[i] = best if best <= devices else np.inf
        # The empty downset comes last.
        return not fewest[-1] <= devices

    def under(self, target: float, deadline: Deadline) -> Cut | None:
        """A cut with loads up to a target on the fewest devices; of those with the fewest stages.
        Raises OutOfTime."""
        step, devices = self._problem.layers + 1, self._problem.devices
        if self.excludes(target, deadline):
            return None
        # Devices · step + stages, which are fewer than that.
        cost = np.full(self._lattice.size, NEVER, dtype=np.int64)
        cost[self._program.top] = 0
        how: dict[int, tuple[int, int]] = {}
        work, slack = self._costs.work, self._program.slack
        for number, below in enumerate(self._program.order.tolist()):
            if number % CLOCK == 0:
                check_time(deadline)
            if below == self._program.top:
                continue
            found = self._above(below)
            beyond, best = cost[found.above], devices * step + step
            reached = beyond < NEVER
            if not reached.any():
                continue
            least = int(beyond[reached].min())
            for option, chosen, place in self._options:
                taken = chosen.replicas * step + 1
                if least + taken >= best:
                    break
                # What has more work than so many devices do in the time comes before this.
                most_work = target * place.speed * chosen.replicas * (1 + SLACK)
                start = int(np.searchsorted(found.fall, -(work[below] + most_work + slack)))
                at = np.flatnonzero(beyond[start:] < best - taken) + start
                # Where the work is most the fewest devices are needed beyond, as a rule.
                size = CHUNK
                while len(at):
                    good, costs = self._good(below, found, at[:size], option, target, beyond)
                    at, size = at[size:], 4 * size
                    if len(good) and int(costs.min()) < best - taken:
                        best = int(costs.min()) + taken
                        how[below] = int(found.above[good[int(costs.argmin())]]), option
                        at = at[beyond[at] < best - taken]
            if below in how:
                cost[below] = best
        return self._cut(how) if 0 in how else None

    def _good(
        self,
        below: int,
        found: _Above,
        at: Positions,
        option: int,
        target: float,
        beyond: Positions,
    ) -> tuple[Positions, Positions]:
        """Which of some stages have loads up to the target, and fit their devices; and what the
        devices beyond them cost then.

        Args:
            beyond: cost of the devices beyond each stage in `found`.
        """
        at = self._within(below, found, at, option, target)
        costs = beyond[at]
        if self._places.waits is not None and len(at):
            at, costs = self._waiting(self._places.waits, below, found, at, option, target, costs)
        if not len(at) or self._places.with_one[option].memory_bytes >= UNBOUNDED:
            return at, costs
        r = self._problem.options[option].replicas
        k = costs // (self._problem.layers + 1) + r
        units = np.minimum(-(-k // r), self._places.most[option])
        fits = self._fits(below, found, at, option, units)
        return at[fits], costs[fits]

    def _waiting(
        self,
        waits: Waits,
        below: int,
        found: _Above,
        at: Positions,
        option: int,
        target: float,
        costs: Positions,
    ) -> tuple[Positions, Positions]:
        """Of some stages those whose schedules may keep to the target, and what the devices beyond
        them cost: more where they need more in flight."""
        chosen, step = self._problem.options[option], self._problem.layers + 1
        compute, before, above = self._costs.compute[chosen.mode], self._before, found.above[at]
        work, first_s = compute[above] - compute[below], float(before[below])
        needed = waits.fewest_beyond(target, chosen.replicas, work, first_s, self._beyond[above])
        least = needed.astype(np.int64)
        costs = costs + np.maximum(least - costs // step, 0) * step
        good = costs // step + chosen.replicas <= self._problem.devices
        good &= waits.allowed(target, chosen.replicas, before[above], costs // step)
        return at[good], costs[good]

    def _within(
        self, below: int, found: _Above, at: Positions, option: int, target: float
    ) -> Positions:
        """Which of some stages have loads up to the target."""
        problem, costs, place = self._problem, self._costs, self._places.with_one[option]
        mode, r = problem.options[option].mode, problem.options[option].replicas
        rest = target - costs.before[below]
        compute = costs.compute[mode]
        # Most are left out by this alone.
        most = rest * place.speed * r * (1 + SLACK) + compute[below]
        at = at[compute[found.above[at]] <= most]
        above = found.above[at]
        wires = found.lower_s[at], found.upper_s[at]
        parts = costs.load_parts(mode, below, above, wires)
        load = stage_loads(problem, lambda field: getattr(place, field), r, parts)
        return at[load <= target]

    def _fits(self, below: int, found: _Above, at: Positions, option: int, units: Vector) -> Flags:
        """Which of some stages fit their devices with so many units in flight."""
        place, mode = self._places.with_one[option], self._problem.options[option].mode
        parameters = self._costs.parameters
        held = parameters[found.above[at]] - parameters[below]
        copies = place.copies + self._places.copies_per_unit * (units - 1)
        total = found.once[mode, at] + copies * held
        total += place.units * units * found.flight[mode, at]
        fits: Flags = total <= place.memory_bytes * FITS
        return fits

    def _above(self, below: int) -> _Above:
        """All stages from one downset."""
        if below not in self._known:
            costs, order = self._costs, self._program.order
            above = order[costs.above(below)[order]]
            wires = costs.wires_between(below, above)
            held = [np.zeros((len(self._problem.modes), 0))] * 2
            if costs.limited:
                held = [*costs.bytes_between(below, above)]
            self._known[below] = _Above(above, -costs.work[above], *wires, *held)
        return self._known[below]

    def _cut(self, how: dict[int, tuple[int, int]]) -> Cut:
        """A chain as an answer, on the last devices, its objective from the definition."""
        steps: list[tuple[int, int, int]] = []
        below = 0
        while below != self._program.top:
            above, option = how[below]
            steps.append((below, above, option))
            below = above
        return cut_on_last_devices(self._problem, self._lattice.masks, steps)


class _Way:
    """A mode of stages, whatever their replicas: what they need at the least.

    Downsets are counted in the program's order.
    """

    def __init__(
        self,
        program: Program,
        places: IdenticalPlaces,
        mode: int,
        before_s: Vector,
        beyond_s: Vector,
    ) -> None:
        """Of a mode that some option has.

        Args:
            before_s, beyond_s: what stages wait for below and above downsets, [D].
        """
        problem, costs, order = program.problem, program.costs, program.order
        options = [o for o in program.options.tolist() if problem.options[o].mode == mode]
        options.sort(key=lambda o: problem.options[o].replicas)
        with_one = [places.with_one[o] for o in options]
        self._replicas = np.array([float(problem.options[o].replicas) for o in options])
        self._most = np.minimum.accumulate([float(places.most[o]) for o in options])
        self._speed = max(place.speed for place in with_one)
        self._memory = max(place.memory_bytes for place in with_one) * FITS
        self._units = min(place.units for place in with_one)
        self._copies = min(place.copies for place in with_one)
        self._more = places.copies_per_unit
        self._waits = places.waits
        self._before, self._beyond = before_s[order], beyond_s[order]
        self._compute, self._serial = costs.compute[mode][order], None
        if costs.serial is not None:
            self._serial = costs.serial[order] / self._speed
        self._limited = costs.limited and self._memory < UNBOUNDED
        if self._limited:
            self._parameters = costs.parameters[order]
            self._fixed, self._flight = costs.fixed[mode][order], costs.flight[mode][order]

    def fewest(
        self, below: int, at: Positions, beyond: Vector, rest: Vector, target: float, best: float
    ) -> float:
        """Devices from a downset on, at the least, with one stage up to one of some others.

        Args:
            at: those others, [p]; `beyond`: devices beyond each; `rest`: what a stage up to there
                may compute, in s.
            best: known already; it is returned where there are no fewer.
        """
        work = self._compute[at] - self._compute[below]
        if self._serial is not None:
            rest = rest - (self._serial[at] - self._serial[below])
        rest = rest + SLACK * target
        with np.errstate(divide="ignore", invalid="ignore"):
            least = work / (rest * self._speed)
        # What has nothing to do takes no time.
        least = np.where(rest < 0, np.inf, np.fmax(least, self._replicas[0]))
        left = np.flatnonzero(beyond + least < best)
        if not len(left):
            return best
        at, beyond, work = at[left], beyond[left], work[left]
        # The first of the numbers of replicas that do.
        first = np.searchsorted(self._replicas, least[left] * (1 - SLACK))
        if self._limited:
            first = np.maximum(first, self._holding(below, at, beyond))
        last = np.full(len(at), -1)
        falling = None
        if self._waits is not None:
            before_s, beyond_s = float(self._before[below]), self._beyond[at]
            a, b = falling = self._waits.falling(target, work, before_s, beyond_s)
            even = (a - beyond) / (1 + b) * (1 - SLACK)
            enough = np.searchsorted(self._replicas, even)
            last = np.where(enough > first, enough - 1, -1)
            first = np.maximum(first, enough)
        totals = beyond + np.append(self._replicas, np.inf)[first]
        if falling is not None:
            a, b = falling
            more = np.ceil((a - b * self._replicas[last]) * (1 - SLACK) - SLACK)
            totals = np.minimum(totals, np.where(last >= 0, more, np.inf))
        return min(best, float(totals.min()))

    def _holding(self, below: int, at: Positions, beyond: Vector) -> Positions:
        """Positions of the fewest replicas whose devices can hold stages, [p]."""
        held = self._parameters[at] - self._parameters[below]
        each = self._more * held + self._units * (self._flight[at] - self._flight[below])
        room = self._memory - (self._fixed[at] - self._fixed[below])
        room -= (self._copies - self._more) * held
        with np.errstate(divide="ignore", invalid="ignore"):
            units = np.where(each > 0, room / each, np.where(room >= 0, np.inf, -1.0)) * (1 + SLACK)
            needed = np.where(units > 1, beyond / np.maximum(units - 1, 0.0), np.inf)
        # Those with the fewest in flight by what is beyond them, or by the most that there may be.
        by_beyond = np.searchsorted(self._replicas, needed * (1 - SLACK))
        by_most = np.searchsorted(-self._most, -units)
        return np.where(units >= 1, np.minimum(by_beyond, by_most), len(self._replicas))


def identical_by_targets(
    problem: StageProblem,
    lattice: Lattice,
    *,
    below: float = float("inf"),
    within: float = 1.0,
    deadline: Deadline = None,
) -> Answer | None:
    """As `identical_devices.identical_minimax`, for lattices that are too large for it; None where
    this isn't the way.

    Args:
        below: only objectives less than this, by more than rounding, count.
        within: a cut whose objective is at most so many times the bound will do.
    """
    found = targets_of(problem, lattice)
    return None if found is None else found.answer(below, within, deadline)


def targets_of(problem: StageProblem, lattice: Lattice) -> IdenticalByTargets | None:
    """What answers for single targets; None where this isn't the way."""
    places = problem.place
    if not isinstance(places, IdenticalPlaces) or problem.stages is not None:
        return None
    if not problem.options or lattice.size**2 // 2 > MOST_PAIRS:
        return None
    return IdenticalByTargets(problem, lattice, places)
