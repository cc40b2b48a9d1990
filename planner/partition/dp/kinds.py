"""The least load of plans on devices of several kinds in any sequence, whatever replicas they have.

How far through the layers stages on so many devices of each kind get under a target is known from
how far those get that are one stage less: replicas of several kinds run at the slowest's pace. Cuts
are told apart by the work before them alone, and of those with as much or more the least counts
that passes before a stage's first work: so no plan is below the least target under which all layers
are reached. Memory, messages and sums of gradients are left out.

Index letters: D downsets; T targets; K kinds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from ..problem import StageProblem, Vector
from .lattice import Lattice

MOST_STATES, MOST_DOWNSETS = 1_000, 20_000
"""Numbers of devices of each kind, and places to cut; of more, the program takes too long, or too
much memory: a table of targets and downsets for each rate of a stage."""

_TARGETS, _ROUNDS = 25, 2
"""Targets that are looked at together; and how often, each time between two of them."""


@dataclass(frozen=True)
class Kinds:
    """Devices that differ in speed.

    Attributes:
        speeds, counts: of each kind, [K].
    """

    speeds: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def states(self) -> int:
        """How many numbers of devices of each kind there are."""
        return prod(count + 1 for count in self.counts)

    def of_stages(self, replicas: Sequence[int]) -> Iterator[tuple[tuple[int, ...], float]]:
        """Devices of each kind that a stage may have, and how much faster than one of speed 1 they
        are together."""
        for each in product(*(range(count + 1) for count in self.counts)):
            if sum(each) in replicas:
                slowest = min(s for s, taken in zip(self.speeds, each, strict=True) if taken)
                yield each, sum(each) * slowest


def least_load_s(
    problem: StageProblem, lattice: Lattice, kinds: Kinds, low_s: float, high_s: float
) -> float:
    """No plan's busiest device has less to do, in s; from `low_s`, which is known, to `high_s`.
    Infinite, nothing more is known.

    Args:
        problem: its `place` doesn't count.
    """
    works_s, before_s = _ascending(problem, lattice)
    options = list(kinds.of_stages(sorted({option.replicas for option in problem.options})))
    for _ in range(_ROUNDS):
        if not 0 < low_s < high_s < inf:
            break
        targets_s = np.geomspace(low_s, high_s, _TARGETS)
        reached = _reached(problem, kinds, options, works_s, before_s, targets_s)
        short = np.flatnonzero(reached < len(works_s) - 1)
        if not len(short):
            break
        low_s = float(targets_s[short[-1]])
        high_s = float(targets_s[min(short[-1] + 1, _TARGETS - 1)])
    return low_s


def _ascending(problem: StageProblem, lattice: Lattice) -> tuple[Vector, Vector]:
    """The work of each downset at speed 1, ascending, and what passes at the least before a stage
    begins there or behind, [D] each."""
    each_s = np.min([mode.compute_s for mode in problem.modes], axis=0)
    if problem.serial_s is not None:
        each_s = each_s + problem.serial_s
    before = np.zeros(problem.layers) if problem.before_s is None else problem.before_s
    works_s, before_s = np.zeros(lattice.size), np.zeros(lattice.size)
    for layer in range(problem.layers):
        inside = lattice.column(layer)
        works_s += inside * each_s[layer]
        before_s += inside * before[layer]
    order = np.argsort(works_s, kind="stable")
    least_s: Vector = np.minimum.accumulate(before_s[order][::-1])[::-1]
    return works_s[order], least_s


def _reached(
    problem: StageProblem,
    kinds: Kinds,
    options: Sequence[tuple[tuple[int, ...], float]],
    works_s: Vector,
    before_s: Vector,
    targets_s: Vector,
) -> NDArray[np.intp]:
    """How far stages on all devices get, as a position in `works_s`, under each target, [T]."""
    room_s, rows = targets_s[:, None] - before_s, np.arange(len(targets_s))
    further = dict[float, NDArray[np.intp]]()
    for rate in {rate for _, rate in options}:
        # A stage may begin earlier than another got, where less passes before it.
        until_s = np.maximum.accumulate(works_s + np.maximum(room_s, 0.0) * rate, axis=1)
        ends = np.searchsorted(works_s, until_s * (1 + 1e-9), side="right") - 1
        further[rate] = np.maximum(ends, np.arange(len(works_s)))
    states = list(product(*(range(count + 1) for count in kinds.counts)))
    begun = np.zeros(len(targets_s), dtype=np.intp)
    known = {states[0]: begun}
    if problem.stages is None:
        # In this sequence those with fewer come before.
        for state in states[1:]:
            known[state] = _furthest(known, state, options, further, rows)
        return known[states[-1]]
    known = dict.fromkeys(states, begun)
    for _ in range(problem.stages):
        known = {state: _furthest(known, state, options, further, rows) for state in states}
    return known[states[-1]]


def _furthest(
    known: dict[tuple[int, ...], NDArray[np.intp]],
    state: tuple[int, ...],
    options: Sequence[tuple[tuple[int, ...], float]],
    further: dict[float, NDArray[np.intp]],
    rows: NDArray[np.intp],
) -> NDArray[np.intp]:
    """Per target, how far `state`'s devices get: with one stage more, or as far as was known."""
    found = known.get(state, np.zeros(len(rows), dtype=np.intp))
    for each, rate in options:
        before = known.get(tuple(a - b for a, b in zip(state, each, strict=True)))
        if before is not None:
            found = np.maximum(found, further[rate][rows, before])
    return found
