"""Identical devices, as many for every stage, 1F1B that flushes: the least period by formula.

The schedule says what each stage has in flight, and so what it waits for (`waits` has the
formulas; where all stages have as many replicas a simulation takes hardly longer). A stage that
needs memory computes something again, as much as what it has in flight makes it: of two modes that
follow one another a mixture, as stages later take back what memory has room for. What the stages
beyond compute again, a stage waits for.

Index letters: u in flight on a replica, which is the stages from the stage on; n micro-batches of
a replica; p pairs of a downset and a larger one; m modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from time import monotonic

import numpy as np

from ..dp.identical_devices import IdenticalPlaces, ModeCosts, StageTable
from ..dp.lattice import Lattice, Positions
from ..problem import FITS, Cut, Deadline, Place, StageProblem, Vector, cut_on_last_devices

_CLOSE = 1.004
"""Targets are halved until they are so close."""

_PARTS, _MOST_PARTS = 2000, 12
"""Parts that a time is counted in, and layers of a stage that are told apart."""

_TARGETS, _STEP = 6, 1.008
"""Targets from the least on, each so many times the one before."""


@dataclass(frozen=True)
class _Stages:
    """Those from one downset, by u − 1, [p, U].

    Attributes:
        above: positions of the downsets that they end at, [p].
        recompute_s: for a micro-batch; infinite where nothing fits.
        mode: by position, of those that are mixed the one that computes more again.
        alone_s: what the period takes at least by the stage, but for what others compute again.
    """

    above: Positions
    recompute_s: Vector
    mode: Positions
    alone_s: Vector


def least_period(
    problem: StageProblem,
    lattice: Lattice,
    forward_s: Vector,
    beyond_s: Vector,
    *,
    each: int,
    below_s: float = inf,
    deadline: Deadline = None,
) -> Cut | None:
    """The cut whose period is the least, about; that is its objective.

    Args:
        problem: whose places are `IdenticalPlaces`, and whose options have as many replicas.
        forward_s, beyond_s: per layer, [n]: of one micro-batch, its forward, and its way in both
            directions.
        each: n.
        below_s: longer periods are of no use.

    Returns None where nothing fits.
    """
    return _EqualReplicas(problem, lattice, forward_s, beyond_s, each, deadline).best(below_s)


class _EqualReplicas:
    def __init__(
        self,
        problem: StageProblem,
        lattice: Lattice,
        forward_s: Vector,
        beyond_s: Vector,
        each: int,
        deadline: Deadline,
    ) -> None:
        self._problem, self._lattice = problem, lattice
        self._each, self._deadline = each, deadline
        places = problem.place
        assert isinstance(places, IdenticalPlaces)
        (self._r,) = {option.replicas for option in problem.options}
        self._place = places.with_one[0]
        self._most = min(problem.devices // self._r, lattice.layers)
        self._u = np.arange(1, self._most + 1)
        self._table = StageTable(problem, lattice, places)
        columns = np.array([lattice.column(layer) for layer in range(lattice.layers)])
        columns = columns.reshape(lattice.layers, lattice.size)
        self._forward, self._way = forward_s @ columns, beyond_s @ columns
        modes = {option.mode for option in problem.options}
        self._order = sorted(modes, key=lambda m: float(problem.modes[m].compute_s.sum()))
        self._stages: list[_Stages] = []

    def best(self, below_s: float) -> Cut | None:
        self._stages = [self._of(below, below_s) for below in range(self._lattice.size - 1)]
        low, high = float(self._way[-1]), min(below_s, self._longest_s)
        best = self._under(high)
        if best is None:
            return None
        found = best
        while high > low * _CLOSE and not self._late:
            target = (low * high) ** 0.5
            now = self._under(target)
            if now is None:
                low = target
            else:
                high, found = target, now
        best = min(best, found, key=lambda cut: cut.objective_s)
        for step in range(1, _TARGETS):
            target = high * _STEP**step
            if self._late or target >= best.objective_s:
                break
            now = self._under(target)
            if now is not None and now.objective_s < best.objective_s:
                best = now
        return best

    @property
    def _late(self) -> bool:
        return self._deadline is not None and monotonic() > self._deadline

    @property
    def _longest_s(self) -> float:
        """No stage takes longer by itself, but for what others compute again."""
        parts = (stages.alone_s[np.isfinite(stages.alone_s)] for stages in self._stages)
        largest = max((float(part.max(initial=0.0)) for part in parts), default=0.0)
        return largest + float(self._way[-1])

    # What stages cost ------------------------------------------------------------------------

    def _of(self, below: int, below_s: float) -> _Stages:
        """The stages from a downset that may be worth having."""
        costs = self._table.of_modes(below)
        plain = costs.loads(self._problem, self._order[0], self._r, self._place) + costs.beside
        some = plain < below_s
        costs = costs.those(some)
        plain, above = plain[some], costs.above
        units = np.minimum(self._u, self._each)
        count = self._each * self._r
        recompute_s, mode = mixed(
            self._problem, below, costs, self._order, self._place, count, units
        )
        n, u = self._each, np.minimum(self._u, self._each)
        fits = np.isfinite(recompute_s)
        recompute_s = np.where(fits, recompute_s, 0.0)
        load = np.where(fits, plain[:, None] + n * recompute_s, inf)
        work_s = (costs.compute[self._order[0]] / (n * self._r * self._place.speed))[:, None]
        forward_s = (self._forward[above] - self._forward[below])[:, None]
        beyond_s = (self._way[-1] - self._way[above])[:, None]
        # One stage's part of what is computed again on one way is its own.
        alone_s = load - recompute_s - (u - 1) * (work_s + recompute_s) + beyond_s
        full = (
            load - recompute_s - (n - 1) * np.minimum(forward_s, work_s - forward_s + recompute_s)
        )
        alone_s = np.where(u < n, alone_s, full)
        return _Stages(above, recompute_s, mode, alone_s)

    # Chains ----------------------------------------------------------------------------------

    def _under(self, target: float) -> Cut | None:
        """Stages that keep to a target, but for what all compute again, with the least of that."""
        top, most = self._lattice.size - 1, self._most
        # Computed again beyond a downset, by the stages there, [D, U + 1].
        beyond = np.full((top + 1, most + 1), inf)
        beyond[top, 0] = 0.0
        chosen = np.zeros((top + 1, most + 1), dtype=np.intp)
        few = 1e-9 * float(self._way[-1])
        units = np.minimum(self._u, self._each)
        for below in range(top - 1, -1, -1):
            stages = self._stages[below]
            if not len(stages.above):
                continue
            rest = beyond[stages.above, :-1]
            period = stages.alone_s + np.where(units < self._each, rest, 0.0)
            total = np.where(period <= target, stages.recompute_s + rest + few, inf)
            at = total.argmin(axis=0)
            chosen[below, 1:] = at
            beyond[below, 1:] = total[at, np.arange(most)]
        count = int(beyond[0].argmin())
        if not np.isfinite(beyond[0, count]):
            return None
        return self._guessed(chosen, count, target + beyond[0, count])

    def _guessed(self, chosen: Positions, count: int, period_s: float) -> Cut:
        steps, below = [], 0
        option_of = {option.mode: o for o, option in enumerate(self._problem.options)}
        while count:
            stages, at = self._stages[below], int(chosen[below, count])
            above, mode = int(stages.above[at]), int(stages.mode[at, count - 1])
            steps.append((below, above, option_of[mode]))
            below, count = above, count - 1
        cut = cut_on_last_devices(self._problem, self._lattice.masks, steps)
        return replace(cut, objective_s=period_s)


def mixed(
    problem: StageProblem,
    below: int,
    costs: ModeCosts,
    order: Sequence[int],
    place: Place,
    micro_batches: int,
    units: Positions,
) -> tuple[Vector, Positions]:
    """What stages compute again for a micro-batch, in s, infinite where nothing fits, and in which
    mode, [p, U] each. Of what a mode computes again besides the one before, as few layers as do.

    Args:
        problem: a chain of layers.
        below: layers before the stages.
        order: of modes, by what they compute.
        micro_batches: N.
        units: in flight, [U].
    """
    limit, shape = place.memory_bytes * FITS, (len(costs.above), len(units))
    recompute_s, mode = np.full(shape, inf), np.zeros(shape, dtype=np.intp)
    held = place.copies * costs.parameters
    last_s, last_bytes, last_times = np.zeros(shape[0]), np.full(shape, inf), None
    for m in order:
        times = problem.modes[m].recompute_s
        seconds = (costs.compute[m] - costs.compute[order[0]]) / (micro_batches * place.speed)
        nbytes = (costs.once[m] + held)[:, None]
        nbytes = nbytes + place.units * units * costs.flight[m][:, None]
        share = np.ones(shape)
        if problem.modes[m].recompute is not True and times is not None and limit < inf:
            needed, freed = last_bytes - limit, last_bytes - nbytes
            np.divide(needed, freed, out=share, where=np.isfinite(freed) & (freed > 0))
            share = np.clip(share, 0.0, 1.0)
            more = times if last_times is None else times - last_times
            for row in np.flatnonzero(((share > 0) & (share < 1)).any(axis=1)).tolist():
                share[row] = _rounded_up(share[row], more[below : int(costs.above[row])])
        found = last_s[:, None] + share * (seconds - last_s)[:, None]
        better = (nbytes <= limit) & (found < recompute_s)
        recompute_s[better], mode[better] = found[better], m
        last_s, last_bytes, last_times = seconds, nbytes, times
    return recompute_s, mode


def _rounded_up(shares: Vector, times: Vector) -> Vector:
    """Shares of the time that some of these layers take, at least those given."""
    total = float(times.sum())
    if not total:
        return shares
    parts = np.rint(times / total * _PARTS)
    sums = _sums(tuple(sorted(parts[parts > 0].tolist(), reverse=True)))
    at = np.searchsorted(sums, shares - 1.0 / _PARTS)
    return np.asarray(sums[np.minimum(at, len(sums) - 1)])


@lru_cache(maxsize=4096)
def _sums(parts: tuple[float, ...]) -> Vector:
    """What some of these parts add up to, in shares of all, ascending; the smallest as one."""
    many, few = parts[:_MOST_PARTS], sum(parts[_MOST_PARTS:])
    found = np.zeros(1)
    for part in (*many, few):
        found = np.unique(np.concatenate([found, found + part]))
    return found / (found[-1] or 1.0)
