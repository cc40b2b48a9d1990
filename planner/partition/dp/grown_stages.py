"""Targets where stages' loads are sums: stages are grown layer by layer, not looked at in pairs.

The dearer transfers are, the further the best cut's load is above all work on all devices, and so
the more downsets lie within reach of each: on a large lattice too many to look at. Where a load
adds up, of computing and of transfers at both cuts, that isn't needed. With f(b) what downset b
computes and what tensors open at it take at an upper cut, and g(a) what a computes less what
tensors open at it take at a lower cut, the stage between them has

    load(a, b) = f(b) − g(a) − upper times of tensors open at a and at b
                             − lower times of tensors open at a that have no end between them.

What is taken off are *credits* that a has. While a stage grows, by one group of layers at a time,
credits only end: no more than those left at b has to be known of a. A state is a downset b with
credits that it may have from one below it. With F the downsets from which few enough devices do the
rest,

    least(b, credits) = min(f(b) − credits, if b is in F;
                            least(b and a group, credits left then), for groups that may be next)

takes a look at a few other states each; and a stage within the target leads from a to some downset
of F where least(a, all credits that a has) − g(a) is within it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ..problem import Cut, Deadline, Step, Vector, check_time, cut_of
from .cost_tables import Stages, merged_tensors
from .lattice import Positions
from .program import SLACK, Program

MOST_STEPS = 40_000_000
"""States × chains of layers: 4 bytes each, and 16 for each state."""

MOST_SLOTS = 20
"""Credits' slots; three times as many bits make a word."""

ROUNDING = 1e-12
"""Relative to the largest sum."""

Labels = NDArray[np.int32]


class GrownStages:
    """What answers for single targets."""

    def __init__(self, program: Program, credits: tuple[Labels, Vector], ups: Positions) -> None:
        """Make the states.

        Args:
            credits: in slots: which one a downset's tensors give, 0 for none, and its s, [S, D].
            ups: as `Containment.with_one_more`.
        """
        self._program, costs = program, program.costs
        mode, place = program.problem.options[0].mode, program.problem.place(0, 1)
        assert costs.wires is not None, "transfers take time"
        work = costs.compute[mode] + (0.0 if costs.serial is None else costs.serial)
        work = work / place.speed
        upper = work + place.upper_scale * costs.wires.upper_open[0] + costs.after
        self._lower = work - place.lower_scale * costs.wires.lower_due[0] - costs.before
        self._rounding = ROUNDING * float(np.abs([upper, self._lower]).max())
        self._fastest = place.speed
        labels, seconds = credits
        # Of a downset's states, the credits of the n-th are the set bits of n among its slots.
        patterns = _bits(labels > 0)
        self._count = np.int64(1) << (labels > 0).sum(axis=0)
        self._first = np.concatenate([[0], np.cumsum(self._count)])
        self._alone = np.empty(self._first[-1])
        for pattern, at in _alike(patterns):
            slots = _set_bits(pattern)
            has = np.arange(1 << len(slots))[:, None] >> np.arange(len(slots)) & 1
            where = self._first[at][:, None] + np.arange(len(has))
            self._alone[where] = upper[at][:, None] - seconds[slots][:, at].T @ has.T
        self._next = np.array([self._following(labels, patterns, up) for up in ups])
        # Downsets of one size after another.
        sizes = costs.inside.sums(np.array([g.bit_count() for g in costs.inside.groups], float))
        self._levels = np.flatnonzero(np.diff(sizes, prepend=-1.0, append=np.inf))

    def _following(self, labels: Labels, patterns: Positions, up: Positions) -> Labels:
        """The states that states become with one group more of a chain; where there is none, the
        number of all states, which is one that leads nowhere."""
        found = np.full(len(self._alone), len(self._alone), dtype=np.int32)
        below = np.flatnonzero(up >= 0)
        above = up[below]
        left = _bits((labels[:, below] == labels[:, above]) & (labels[:, below] > 0))
        keys = (patterns[below] << MOST_SLOTS | left) << MOST_SLOTS | patterns[above]
        for key, at in _alike(keys):
            old, lasting, new = (_set_bits(key >> n * MOST_SLOTS) for n in (2, 1, 0))
            state = np.arange(1 << len(old))
            to = np.zeros(len(state), dtype=np.intp)
            for slot in lasting:
                to += (state >> old.index(slot) & 1) << new.index(slot)
            where = self._first[below[at]][:, None] + state
            found[where] = self._first[above[at]][:, None] + to
        return found

    def under(self, target: float, deadline: Deadline = None) -> Cut | None:
        """A cut with loads up to a target, and rounding, on the fewest devices that have such a cut
        without memory limits; in memory where that is soon seen. None: there is none. Raises
        OutOfTime."""
        program, needed = self._program, self._needed(target, deadline)
        if needed[0] > program.problem.devices:
            return None
        # The first devices, where it makes no difference which.
        unused = program.problem.devices - needed[0] if program.places.same else 0
        steps: list[Step] = []
        below = 0
        while below != program.top:
            above = np.flatnonzero(program.costs.above(below) & (needed < needed[below]))
            stages = Stages(program.costs, program.places, below, above)
            every, option = np.arange(len(above)), np.zeros(len(above), dtype=np.intp)
            k = int(needed[below] + unused)
            load = stages.loads(every, option, option + k)
            good = np.flatnonzero(load <= target + 2 * self._rounding)
            if program.places.limited:
                fits = stages.fit(good, option[good], option[good] + k)
                good = good[fits] if fits.any() else good
            best = int(above[good[np.lexsort((load[good], needed[above[good]]))[0]]])
            steps.append((below, best, 0, k))
            below = best
        return cut_of(program.problem, program.lattice.masks, steps)

    def _needed(self, target: float, deadline: Deadline) -> Positions:
        """Devices that do what follows downsets, [D]; one more than there are if they can't."""
        program, work = self._program, self._program.costs.work
        devices, most = program.problem.devices, target + self._rounding
        needed = np.full(len(work), devices + 1)
        needed[-1] = 0
        least = np.full(len(self._alone) + 1, np.inf)
        for k in range(1, devices + 1):
            fresh = needed == k - 1
            if needed[0] <= devices or not fresh.any():
                break
            states = np.repeat(fresh, self._count).nonzero()[0]
            least[states] = np.minimum(least[states], self._alone[states])
            # Above the last fresh one nothing changes; what one more device can't do is left out.
            span = k * self._fastest * target * (1 + SLACK) + program.slack
            reach = np.flatnonzero(work[-1] - work <= span)[0]
            low, high = np.searchsorted(self._levels, [reach, fresh.nonzero()[0][-1]], "right")
            for level in range(high, low - 1, -1):
                check_time(deadline)
                here = slice(*self._first[self._levels[level - 1 : level + 1]])
                for following in self._next:
                    np.minimum(least[here], least.take(following[here]), out=least[here])
            part = slice(self._levels[low - 1], self._levels[high])
            # The last of a downset's states has all its credits.
            grown = least[self._first[1:][part] - 1] - self._lower[part] <= most
            needed[part][grown & (needed[part] > devices)] = k
        return needed


def grown_stages(program: Program) -> GrownStages | None:
    """None where this isn't the way: loads are no sums, the number of stages is given, they may be
    on several devices, loads depend on which, or there are too many states."""
    problem, places, costs = program.problem, program.places, program.costs
    if problem.overlap or problem.stages is not None or not program.lattice.complete:
        return None
    if costs.wires is None or not places.whole or places.loads_vary:
        return None
    if len(problem.options) != 1 or problem.options[0].replicas != 1:
        return None
    place = problem.place(0, 1)
    if problem.serial_fixed_s or place.sync_s or place.sync_s_per_byte:
        return None
    ups = costs.inside.with_one_more()
    credits = _credits(program, place.lower_scale, place.upper_scale)
    if ups is None or credits is None:
        return None
    if len(ups) * float((2.0 ** (credits[0] > 0).sum(axis=0)).sum()) > MOST_STEPS:
        return None
    return GrownStages(program, credits, ups)


def _credits(
    program: Program, lower_scale: float, upper_scale: float
) -> tuple[Labels, Vector] | None:
    """Slots with the credits that a downset's open tensors give to stages from it, [S, D] each;
    None where they take more than MOST_SLOTS.

    One that has the same label at a downset and at one above it is still there: of a tensor's
    upper time while it is open, of its lower time while no more of its ends are in the downset.
    """
    inside, problem = program.costs.inside, program.problem
    tensors = [(t.ends, [t.lower_s], [t.upper_s]) for t in problem.tensors]
    labels: list[Labels] = []
    seconds: list[Vector] = []
    size, label = program.lattice.size, 1
    for (groups, beyond), times in merged_tensors(inside, tensors, 1 << problem.layers).items():
        lower, upper = float(times[0]) * lower_scale, float(times[1]) * upper_scale
        ends = inside.member[list(groups)].sum(axis=0, dtype=np.int32)
        still = (ends > 0) & (ends < len(groups) + beyond)
        still[-1] = False
        if len(groups) == 2 and not beyond:
            found = [(still, 0 * ends, lower + upper)]
        else:
            found = [(still, 0 * ends, upper), ((ends > 0) & (ends < len(groups)), ends, lower)]
        for there, number, worth in found:
            if not worth or not there.any():
                continue
            free = (slot for slot, row in enumerate(labels) if not row[there].any())
            slot = next(free, len(labels))
            if slot == MOST_SLOTS:
                return None
            if slot == len(labels):
                labels.append(np.zeros(size, dtype=np.int32))
                seconds.append(np.zeros(size))
            labels[slot][there] = label + number[there]
            seconds[slot][there] = worth
        label += len(groups) + 1
    return np.array(labels).reshape(-1, size), np.array(seconds).reshape(-1, size)


def _bits(flags: NDArray[np.bool_]) -> Positions:
    """Numbers whose n-th bits are the n-th row, [S, D] to [D]."""
    return np.array([1 << slot for slot in range(len(flags))], dtype=np.int64) @ flags


def _set_bits(number: int) -> list[int]:
    """Those below MOST_SLOTS."""
    return [slot for slot in range(MOST_SLOTS) if number >> slot & 1]


def _alike(numbers: Positions) -> Iterator[tuple[int, Positions]]:
    """Each number with where it is."""
    found, which = np.unique(numbers, return_inverse=True)
    for at, number in enumerate(found.tolist()):
        yield number, np.flatnonzero(which == at)
