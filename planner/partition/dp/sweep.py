"""The dynamic program over downsets: how good the best chain from each of them to the top is.

A state is a downset a with k devices left for the layers beyond it. As devices may be left out,
k devices do whatever fewer do. Under a target for the largest load, work that is too much for
the devices left, or for those already used, rules a state out before any stage is looked at.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np

from ..problem import Deadline, Vector, check_time
from .cost_tables import Stages
from .lattice import Flags, Positions
from .program import SLACK, Program

# Where a stage may end: the downsets that it can reach, found without looking at its costs ------


class Limits:
    """What keeps a stage from reaching from one downset to another, whatever lies between.

    A sum may rise over the stage by no more than it can take: work by what the devices do that
    aren't needed beyond it, bytes by what one stage can hold.

    Attributes:
        lower, upper: the sums at the stage's lower and upper downset, [J, D].
        left: what is added to a lower sum, by devices left there, [J, K + 1].
        needed: what is added to an upper sum, by devices needed there, [J, K + 1].
        potentials: how many of the sums are of work; the others are of bytes.
        rate, span: work that a device and that a stage can do at most.
    """

    def __init__(self, program: Program, target: float) -> None:
        places, memory = program.places, program.memory
        self.rate = places.fastest * target * (1 + SLACK)
        self.span = self.rate * int(program.replicas.max(initial=0)) + program.slack
        held = [bound.held for bound in memory]
        below, above = program.potentials
        self.potentials = len(below)
        self.lower, self.upper = np.array([*below, *held]), np.array([*above, *held])
        work = np.tile(self.rate * np.arange(places.devices + 1), (len(below), 1))
        slack = [np.full(places.devices + 1, SLACK * total[-1]) for total in held]
        self.left = np.array([*(work + program.slack), *slack])
        self.needed = np.array([*work, *(-bound.single for bound in memory)])


class Targets:
    """Downsets that stages may end at, by falling work, each with the devices it needs to go.

    Attributes:
        count: how many there are.
        position, need: of each; the first `count` entries.
    """

    def __init__(self, program: Program, limits: Limits) -> None:
        self._program, self._limits = program, limits
        size, words = program.lattice.size, len(program.costs.inside.guards)
        self.count = 0
        self.position = np.empty(size, dtype=np.intp)
        self.need = np.empty(size, dtype=np.intp)
        self._fall = np.empty(size)
        self._keys = np.empty((len(limits.upper), size))
        self._guarded = np.empty((words, size), dtype=np.uint64)

    def add(self, position: int, need: int) -> None:
        """Let stages end at a downset. Its work is at most that of those added before."""
        at, limits, inside = self.count, self._limits, self._program.costs.inside
        self.position[at], self.need[at] = position, need
        self._fall[at] = -self._program.costs.work[position]
        self._keys[:, at] = limits.upper[:, position] + limits.needed[:, need]
        self._guarded[:, at] = inside.counts[:, position] | inside.guards
        self.count += 1

    def beyond_reach(self, below: int) -> bool:
        """Whether each of them has more work than a stage from a downset can take."""
        most = self._program.costs.work[below] + self._limits.span
        return bool(-self._fall[self.count - 1] > most) if self.count else True

    def above(self, below: int, devices: int) -> Positions:
        """Which of them, as places in this list, hold a downset and may end a stage from it.

        Args:
            below: position of the downset.
            devices: left at it.
        """
        program, limits, end = self._program, self._limits, self.count
        most = -(program.costs.work[below] + limits.span)
        start = int(np.searchsorted(self._fall[:end], most))
        fine = program.costs.inside.holding(below, self._guarded[:, start:end])
        reach = limits.lower[:, below] + limits.left[:, devices]
        for keys, limit in zip(self._keys, reach, strict=True):
            fine &= keys[start:end] <= limit
        at: Positions = fine.nonzero()[0] + start
        at = at[(self.need[at] < devices) & (self.position[at] != below)]
        for sums, lower in zip(limits.upper[: limits.potentials], limits.lower, strict=False):
            # One stage does it all.
            at = at[sums[self.position[at]] <= lower[below] + limits.span]
        return at


# The dynamic program over downsets: how good the best chain from each of them to the top is -----

CLOCK = 32
"""Sources between two looks at the clock."""


@dataclass(frozen=True)
class Grid:
    """Stages from one downset, and what they would be with k devices left.

    Attributes:
        above, option, replicas: of each stage, [p]; `above` is a position in the lattice.
        k: devices, ascending, [m].
        load: in s, infinite where a stage isn't allowed or is over the target, [p, m]; or
            [p, 1] where k makes no difference.
    """

    above: Positions
    option: Positions
    replicas: Positions
    k: Positions
    load: Vector


class Sweep:
    """The program under a target.

    Attributes:
        target: loads up to it are allowed.
        values: the largest load to go at the best, in s, per number of stages to go (0 alone
            where any number will do), downset and devices left, [L, D, K + 2]: infinite where
            it can't be within the target, and in the last column, so that −1 devices find it.
        least, most: devices that must be, and that can be, left at each downset, [D].
    """

    def __init__(self, program: Program, target: float, deadline: Deadline = None) -> None:
        """Go over all states. Raises OutOfTime."""
        self.program, self._deadline = program, deadline
        size, levels = program.lattice.size, program.problem.stages or 0
        self.target, self._limits = target, Limits(program, target)
        self.least, self.most = self._windows()
        self.values = np.full((levels + 1, size, program.problem.devices + 2), np.inf)
        self.values[0, program.top, :-1] = 0.0
        self._targets = [Targets(program, self._limits) for _ in range(levels + 1)]
        self._targets[0].add(program.top, 0)
        for level in range(min(levels, 1), levels + 1):
            self._fill(level)

    @property
    def start(self) -> int:
        """Stages to go at the empty downset; 0 where any number will do."""
        return len(self.values) - 1

    @property
    def best_s(self) -> float:
        """Objective of the best cut; infinite where none is within the target."""
        return float(self.values[self.start, 0, self.program.problem.devices])

    def narrowed(self, target: float) -> Sweep:
        """The same for a lower target, as far as values within it go."""
        other = copy(self)
        other.target, other._limits = target, Limits(self.program, target)
        other._targets = []
        for values in self.values:
            targets = Targets(self.program, other._limits)
            within = values[:, :-1] <= target
            need = np.where(within.any(axis=1), within.argmax(axis=1), -1)
            for position in self.program.order[need[self.program.order] >= 0].tolist():
                targets.add(position, int(need[position]))
            other._targets.append(targets)
        return other

    # States ----------------------------------------------------------------------------------

    def _windows(self) -> tuple[Positions, Positions]:
        program, costs, target = self.program, self.program.costs, self.target
        ahead, behind = program.places.rates(target)
        above, below = program.wire_work
        to_go = _alone(costs.work[-1] - costs.work + above, costs.before, target)
        done = _alone(costs.work + below, costs.after, target)
        least = np.searchsorted(ahead, to_go - program.slack)
        unused = np.searchsorted(behind[::-1], done - program.slack)
        for bound in program.memory:
            total = bound.held[-1]
            to_go, done = total - bound.held, bound.held - SLACK * total
            least = np.maximum(least, np.searchsorted(bound.ahead, to_go - SLACK * total))
            unused = np.maximum(unused, np.searchsorted(bound.behind[::-1], done))
        return np.maximum(least, 1), program.problem.devices - unused

    def _sources(self, level: int) -> list[tuple[int, int, int]]:
        """Downsets with the least and the most devices left, in the order to look at them."""
        program, stages = self.program, self.program.problem.stages
        least, most = self.least, self.most
        if stages is not None:
            r = int(program.replicas.min(initial=1))
            least = np.maximum(least, level * r)
            most = np.minimum(most, program.problem.devices - (stages - level) * r)
        alive = program.allowed[level] & (least <= most)
        alive[program.top] = False
        order = program.order[alive[program.order]]
        return list(zip(order.tolist(), least[order].tolist(), most[order].tolist(), strict=True))

    def _fill(self, level: int) -> None:
        beyond = max(level - 1, 0)
        for number, (below, least, most) in enumerate(self._sources(level)):
            if number % CLOCK == 0:
                check_time(self._deadline)
            if self._targets[beyond].beyond_reach(below):
                # The more so of all that follow, which have less work.
                break
            grid = self.stages(below, beyond, least, most)
            if grid is None:
                continue
            values = np.minimum.accumulate(self.reached(grid, beyond).min(axis=0))
            if values[-1] < np.inf:
                self.values[level, below, grid.k] = values
                need = int(grid.k[int(np.isfinite(values).argmax())])
                self._targets[level].add(below, need)

    def reached(self, grid: Grid, beyond: int) -> Vector:
        """The largest load from each stage of a grid on, [p, m].

        Args:
            beyond: stages to go above them; 0 where any number will do.
        """
        left = np.maximum(grid.k - grid.replicas[:, None], -1)
        worst: Vector = np.maximum(grid.load, self.values[beyond][grid.above[:, None], left])
        return worst

    # Stages ----------------------------------------------------------------------------------

    def stages(self, below: int, beyond: int, least: int, most: int) -> Grid | None:
        """All stages from a downset with so many devices left that can lead to the top.

        Args:
            below: position of the downset.
            beyond: stages to go above them; 0 where any number will do.
            least, most: devices left.
        """
        program, targets = self.program, self._targets[beyond]
        at = targets.above(below, most)
        if not len(at):
            return None
        above, need, places = targets.position[at], targets.need[at], program.places
        work = program.costs.work[above] - program.costs.work[below]
        which, number = self._choices(work, most - need)
        option, first = program.options[number], need[which] + program.replicas[number]
        stages, load = Stages(program.costs, program.places, below, above), np.empty(0)
        if not places.loads_vary:
            last = np.full(len(which), program.problem.devices)
            load, good = self._allowed(stages, which, option, last, memory=not places.bytes_vary)
            which, option, first, load = which[good], option[good], first[good], load[good]
        if not len(which):
            return None
        k = np.arange(max(least, int(first.min())), most + 1)
        if places.loads_vary or places.bytes_vary:
            row, column = np.nonzero(k >= first[:, None])
            found, good = self._allowed(stages, which[row], option[row], k[column])
            load = np.full((len(which), len(k)), np.inf)
            load[row[good], column[good]] = found[good]
        else:
            load = load[:, None]
        return Grid(above[which], option, places.replicas[option], k, load)

    def _choices(self, work: Vector, devices: Positions) -> tuple[Positions, Positions]:
        """Upper downsets with options, by number, that can do the work on so few devices."""
        program = self.program
        if len(program.options) == 1 and program.replicas[0] == 1:
            return np.arange(len(work)), np.zeros(len(work), dtype=np.intp)
        r = program.replicas[:, None]
        number, which = np.nonzero((r <= devices) & (work <= r * self._limits.rate + program.slack))
        return which, number

    def _allowed(
        self,
        stages: Stages,
        which: Positions,
        option: Positions,
        k: Positions,
        *,
        memory: bool = True,
    ) -> tuple[Vector, Flags]:
        """Loads, and whether they are within the target and what they hold within memory."""
        places = self.program.places
        if not places.whole:
            places.ask(option, k)
        load = stages.loads(which, option, k)
        good: Flags = load <= self.target
        if memory and places.limited and good.any():
            good[good] = stages.fit(which[good], option[good], k[good])
        return load, good


def _alone(work: Vector, others: Vector, target: float) -> Vector:
    """Work times target / (target − others): what takes the same rate without the others, [D]."""
    scale = np.full(len(work), np.inf)
    np.divide(target, target - others, out=scale, where=others < target)
    alone: Vector = np.multiply(work, scale, out=np.zeros(len(work)), where=work > 0)
    return alone
