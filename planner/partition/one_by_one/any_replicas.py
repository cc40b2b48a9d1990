"""Identical devices, 1F1B over micro-batches, any replicas: a period that is kept to.

A pipeline keeps to a period of N·τ where every stage runs micro-batch i forward at c + i·τ and
backward at d + i·τ, c and d its own: earliest starts are never later. A stage of r replicas, u
micro-batches in flight on each, runs F^(u-1) (F B)...: the forward of micro-batch i + (u-1)·r
comes before the backward of i on its replica, that of i + u·r after it. Let y be the time from a
micro-batch's coming to a stage until its gradient leaves it, y' that of the next stage, w = f + b.
There are such c and d where, from the last stage on,

    y = max((u - 1)·r·τ, y') + w  ≤  u·r·τ.

So stages with different replicas needn't wait for one another: where r doesn't divide the devices
beyond, u is rounded up, and what the stage beyond waits for in vain is what counts. Under a target
the least y is best, by downset and devices beyond it, which say what is in flight. Where the
pipeline drains, a mini-batch takes N - 1 times τ, and y of the first stage. Where it doesn't, all
replicas of a stage wait for the last of them before each update: if they differ from stage to
stage, that takes about (r - 1)·τ more, for the largest r.

Index letters: k devices; p pairs of a downset and a larger one.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite
from time import monotonic

import numpy as np

from ..dp.identical_devices import IdenticalPlaces, ModeCosts, StageTable
from ..dp.lattice import Lattice, Positions
from ..problem import Cut, Deadline, StageProblem, Vector, cut_on_last_devices
from .equal_replicas import mixed

_CLOSE = 1.003
"""Targets are halved until they are so close."""

_WIDER = 1.1
"""Targets rise by so much until one can be kept to."""

_ROUNDING = 1 + 1e-9


def least_kept_period(
    problem: StageProblem,
    lattice: Lattice,
    *,
    micro_batches: int,
    flushes: bool,
    below_s: float = inf,
    deadline: Deadline = None,
) -> Cut | None:
    """The cut that keeps to the least period, which is its objective.

    Args:
        problem: whose places are `IdenticalPlaces`.
        micro_batches: N.
        flushes: the pipeline drains after each mini-batch.
        below_s: longer periods are of no use.

    Returns None where nothing keeps to any.
    """
    search = _AnyReplicas(problem, lattice, micro_batches, flushes)
    low, high, best, longest = search.least, below_s / micro_batches, None, None
    if not isfinite(high):
        high = search.most
        longest = search.under(high)
        if longest is None:
            return None
    while high > low * _CLOSE:
        target = (low * high) ** 0.5 if best else min(low * _WIDER, high)
        if deadline is not None and monotonic() > deadline:
            break
        found = search.under(target)
        if found is None:
            low = target
        else:
            high = target
            if best is None or found.objective_s < best.objective_s:
                best = found
    return best or longest


class _AnyReplicas:
    def __init__(
        self, problem: StageProblem, lattice: Lattice, micro_batches: int, flushes: bool
    ) -> None:
        places = problem.place
        assert isinstance(places, IdenticalPlaces)
        self._problem, self._lattice = problem, lattice
        self._n, self._flushes = micro_batches, flushes
        self._replicas = sorted({option.replicas for option in problem.options})
        self._option = {(o.replicas, o.mode): k for k, o in enumerate(problem.options)}
        modes = {option.mode for option in problem.options}
        self._order = sorted(modes, key=lambda m: float(problem.modes[m].compute_s.sum()))
        self._places = {o.replicas: places.with_one[k] for k, o in enumerate(problem.options)}
        self._table = StageTable(problem, lattice, places)
        most = -(-problem.devices // self._replicas[0])
        self._units = np.arange(1, most + 1)
        self._costs: dict[int, tuple[ModeCosts, dict[int, Vector], Vector, Positions]] = {}

    @property
    def least(self) -> float:
        """All layers' work for a micro-batch, shared out over all devices: no τ is less."""
        plain = self._problem.modes[self._order[0]].compute_s.sum() / self._n
        fastest = max(place.speed for place in self._places.values())
        return float(plain) / self._problem.devices / fastest

    @property
    def most(self) -> float:
        """As many stages as there may be, one after another, each the slowest that fits: what
        can't be kept to then, can't be at any τ."""
        slowest = 0.0
        for below in range(self._lattice.size - 1):
            _, plain, recompute_s, _ = self._of(below)
            most_s = recompute_s[np.isfinite(recompute_s)].max(initial=0.0)
            slowest = max(slowest, *(s.max(initial=0.0) + most_s for s in plain.values()))
        return float(slowest) * len(self._units)

    def under(self, tau: float) -> Cut | None:
        """Stages that keep to N·τ."""
        top, most = self._lattice.size - 1, self._problem.devices
        least = np.full((top + 1, most + 1), inf)
        least[top, 0] = 0.0
        how: dict[int, tuple[Positions, Positions]] = {}
        for below in range(top - 1, -1, -1):
            costs, plain, recompute_s, _ = self._of(below)
            which = np.zeros(most + 1, dtype=np.intp)
            taken = np.zeros(most + 1, dtype=np.intp)
            for r in self._replicas:
                mine = np.flatnonzero(plain[r] <= r * tau)
                if not len(mine):
                    continue
                rest = least[costs.above[mine], : most + 1 - r]
                u = np.minimum(-(-np.arange(r, most + 1) // r), self._n // r)
                work = plain[r][mine][:, None] + recompute_s[np.ix_(mine, u - 1)]
                y = np.maximum((u - 1) * r * tau, rest) + work
                y[y > u * r * tau * _ROUNDING] = inf
                at = y.argmin(axis=0)
                found = y[at, np.arange(y.shape[1])]
                better = found < least[below, r:]
                least[below, r:][better] = found[better]
                which[r:][better], taken[r:][better] = mine[at[better]], r
            how[below] = which, taken
        k = int(least[0].argmin())
        if not np.isfinite(least[0, k]):
            return None
        return self._guessed(how, k, tau, float(least[0, k]))

    def _guessed(
        self, how: dict[int, tuple[Positions, Positions]], k: int, tau: float, y: float
    ) -> Cut:
        steps, below, used = [], 0, set[int]()
        while k:
            costs, _, _, modes = self._costs[below]
            at, r = int(how[below][0][k]), int(how[below][1][k])
            u = min(-(-k // r), self._n // r)
            mode = int(modes[at, u - 1])
            steps.append((below, int(costs.above[at]), self._option[r, mode]))
            below, k = int(costs.above[at]), k - r
            used.add(r)
        cut = cut_on_last_devices(self._problem, self._lattice.masks, steps)
        period_s = tau * self._n
        if self._flushes:
            period_s += y - tau
        elif len(used) > 1:
            period_s += (max(used) - 1) * tau
        return replace(cut, objective_s=period_s)

    def _of(self, below: int) -> tuple[ModeCosts, dict[int, Vector], Vector, Positions]:
        """The stages from a downset: costs, by replicas what a micro-batch takes, [p], and by what
        is in flight what is computed again for it, in which mode, [p, U] each."""
        if below not in self._costs:
            costs = self._table.of_modes(below)
            problem, plainest = self._problem, self._order[0]
            # A replica has n // r of the micro-batches.
            plain = {
                r: costs.loads(problem, plainest, r, place) / (self._n // r)
                for r, place in self._places.items()
            }
            place = self._places[self._replicas[0]]
            recompute_s, modes = mixed(
                problem, below, costs, self._order, place, self._n, self._units
            )
            some = np.isfinite(recompute_s[:, 0])
            costs = costs.those(some)
            plain = {r: seconds[some] for r, seconds in plain.items()}
            self._costs[below] = costs, plain, recompute_s[some], modes[some]
        return self._costs[below]
