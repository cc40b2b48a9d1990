"""The longest path through the operations of a schedule whose sequence no times decide.

With each device's operations in a given sequence, an operation begins after the one before it on
its device, and after the same micro-batch's at the stage before it, or behind it, and the message
from there; a wire sends messages between two stages one after another. The period of a mini-batch
is at the least the longest path through these (critical path method), whatever the operations take.

Index letters: N micro-batches; S stages; M measures.
"""

from __future__ import annotations

from collections.abc import Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ...partition.problem import Vector
from ...systems.operations import FORWARDS


class Step(NamedTuple):
    """A part of a micro-batch's way.

    Attributes:
        where: the device, or both ends of the wire.
        factor: of the measure, which the stage has.
        latency_s: besides.
    """

    where: tuple[int, ...]
    stage: int
    measure: int
    factor: float
    latency_s: float = 0.0


class _Edge(NamedTuple):
    """What one waits for another with.

    Attributes:
        latency: of the message there, and the stage that counts it; None: there is none.
        unless: (stage, measure), each of which is 1 where nothing may be waited for.
    """

    latency: tuple[int, float] | None = None
    unless: tuple[tuple[int, int], ...] = ()


class CriticalPaths:
    """Longest paths by what stages cost.

    Attributes:
        size: operations and messages.

    Args:
        way: a micro-batch's, there and back.
        order: per device, kinds and stages of a mini-batch's operations.
        micro_batches: N.
        messages: the measure that latencies count by.
        apart, off: those that are 1 where the next stage may not wait for this one; and where this
            one isn't on the path that all others on it wait along.
        closing: measures of the first stage, with factors, that come behind its last backward and
            before the next mini-batch, where all stages wait for each other.
    """

    def __init__(
        self,
        way: Sequence[Step],
        order: Sequence[tuple[bytes, Sequence[int]]],
        micro_batches: int,
        messages: int,
        apart: int,
        off: int,
        closing: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._way, self._n, self._messages = way, micro_batches, messages
        self._apart, self._off, self._closing = apart, off, closing
        self._there, self._back = dict[int, int](), dict[int, int]()
        for at, step in enumerate(way):
            if len(step.where) == 1:
                (self._back if step.stage in self._there else self._there)[step.stage] = at
        self.size = len(way) * micro_batches
        self._kinds = [_Edge()]
        # Per step and micro-batch, what it waits for, and with which edge.
        self._before: list[list[tuple[int, int]]] = [[] for _ in range(self.size)]
        for kinds, stages in order:
            self._in_turn(kinds, stages)
        self._along(apart)
        self._past(off)
        waits = {at: [other for other, _ in row] for at, row in enumerate(self._before)}
        self._sorted = [*TopologicalSorter(waits).static_order()]

    def _in_turn(self, kinds: bytes, stages: Sequence[int]) -> None:
        """A device's operations follow each other."""
        counts, row = dict[int, int](), list[int]()
        for kind, s in zip(kinds, stages, strict=True):
            at = (self._there if kind == FORWARDS else self._back)[s]
            counts[at] = counts.get(at, -1) + 1
            row.append(at * self._n + counts[at])
        for first, then in pairwise(row):
            self._before[then].append((first, 0))

    def _along(self, apart: int) -> None:
        """Steps of a micro-batch follow each other, and messages of a wire."""
        n = self._n
        for at, (first, then) in enumerate(pairwise(self._way), 1):
            border = () if first.stage == then.stage else ((min(first.stage, then.stage), apart),)
            self._join(at - 1, at, _Edge((first.stage, first.latency_s), border))
            if len(then.where) > 1:
                for m in range(1, n):
                    self._before[at * n + m].append((at * n + m - 1, 0))

    def _past(self, off: int) -> None:
        """Edges between stages s and s + 2 that are on the path: the one between may not be."""
        for s in range(len(self._there) - 2):
            edge = _Edge(None, ((s, off), (s + 2, off)))
            self._join(self._there[s], self._there[s + 2], edge)
            self._join(self._back[s + 2], self._back[s], edge)

    def _join(self, first: int, then: int, edge: _Edge) -> None:
        """Each micro-batch's step waits for another one."""
        number, n = len(self._kinds), self._n
        self._kinds.append(edge)
        for m in range(n):
            self._before[then * n + m].append((first * n + m, number))

    def longest(self, measures: Vector, period_s: float) -> Vector:
        """How often each measure counts on the longest path, [S, M].

        Args:
            measures: of each stage, [S, M].
            period_s: that counts, once for each time, from what goes on to a stage that doesn't
                wait for it, or back: a path may as well begin there, so that no period up to this
                is shorter.
        """
        way, n = self._way, self._n
        takes = [float(measures[step.stage, step.measure]) * step.factor for step in way]
        linked, between = measures[:, self._messages].tolist(), list[float]()
        for latency, unless in self._kinds:
            least_s = 0.0 if latency is None else linked[latency[0]] * latency[1]
            for stage, measure in unless:
                least_s -= float(measures[stage, measure]) * period_s
            between.append(least_s)
        ends, via = [0.0] * self.size, [(-1, 0)] * self.size
        for node in self._sorted:
            begin = 0.0
            for waited in self._before[node]:
                end = ends[waited[0]] + between[waited[1]]
                if end > begin:
                    begin, via[node] = end, waited
            ends[node] = begin + takes[node // n]
        found = np.zeros(measures.shape)
        node = max(range(self.size), key=ends.__getitem__)
        last, closing = self.size - 1, np.zeros(measures.shape)
        for measure, factor in self._closing:
            closing[0, measure] = factor
        closing[:, [self._apart, self._off]] = -period_s
        if self._closing and ends[last] + float((closing * measures).sum()) > ends[node]:
            found, node = closing, last
        while node >= 0:
            step = way[node // n]
            found[step.stage, step.measure] += step.factor
            node, number = via[node]
            latency, unless = self._kinds[number]
            if latency is not None:
                found[latency[0], self._messages] += latency[1]
            for stage, measure in unless:
                found[stage, measure] -= period_s
        return found
