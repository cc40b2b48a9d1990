"""What plans with a given device for each stage cost at the least, as sums over their stages.

Along one path through the graph, the heaviest that gradients come back on, everything waits for
what is before, and for the gradients of what comes after. So no schedule of N micro-batches is
faster than

- a device's work of all its stages, and its updates;
- where the pipeline flushes, that behind the way of one micro-batch there and back on the path
  before its first stage; or before any of its stages, with the work of those from there on;
- a wire's messages;
- the round trips of micro-batches from a stage to the end and back, one after another as its
  schedule keeps so few at once: N / K of them, or 1 / L of one where L mini-batches are in flight.

A stage that has no layer of the path waits for none of that.

Index letters: N micro-batches; S stages; s, t stages; n layers; P places to cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from math import ceil

import numpy as np
from numpy.typing import NDArray

from ...costs.layer_graph import LayerVectors
from ...costs.memory import room_bytes
from ...evaluate import Evaluation
from ...partition.chains import Chains, Term
from ...partition.dp.lattice import Lattice
from ...partition.problem import Vector
from ...schedules.interleaved import interleaved
from ...simulator.pipeline import Pipeline
from ...systems.operations import BACKWARDS, FORWARDS
from .relaxation import Relaxation

_FORWARD, _BACKWARD, _WORK, _UPDATE, _THERE, _BACK, _BYTES, _PARAMETERS, _KEPT = range(9)
"""Measures of layers: of those that are waited for, of all work, of the path; bytes that are
always there, of parameters, and of what each micro-batch keeps, about."""

_SENT, _ONCE = range(2)
"""Measures of messages: their bytes; and 1, for the latency."""


class Rows:
    """Makes the terms of plans with any devices for their stages.

    Args:
        lattice: places to cut at.
    """

    def __init__(self, relaxation: Relaxation, lattice: Lattice, micro_batches: int) -> None:
        self.relaxation, self.variant, self._n = relaxation, relaxation.variant, micro_batches
        self.question, graph = relaxation.question, relaxation.graph
        self._path = graph.heaviest_path(relaxation.seconds.way_s(micro_batches))
        inside = np.array([lattice.column(layer) for layer in range(lattice.layers)])
        along = inside[self._path].sum(axis=0)
        order = np.lexsort((inside.sum(axis=0), along))
        self.masks = [lattice.masks[p] for p in order.tolist()]
        self._inside = inside[:, order].astype(np.float64)
        self.gaps: NDArray[np.intp] = along[order].astype(np.intp)

    @cached_property
    def _measures(self) -> Vector:
        """Over the layers before each place, [F, P]."""
        graph, seconds = self.relaxation.graph, self.relaxation.seconds
        costs = graph.costs(seconds.size(self._n, 1))
        back = costs.input_s if self.variant.split_backward else costs.backward_s
        work = costs.forward_s + costs.backward_s
        if self.relaxation.recompute == (True,):
            back, work = back + costs.forward_s, work + costs.forward_s
        waiting = graph.drained.waiting if self.variant.flushes else np.ones(len(back))
        update_s, _ = seconds.serial(self._n, 1)
        path = np.zeros(len(back))
        path[self._path] = 1.0
        always = (1 + self.question.least_state_factor) * graph.parameter_bytes
        layers = np.array(
            [
                costs.forward_s * waiting,
                back * waiting,
                work,
                update_s,
                costs.forward_s * path,
                back * path,
                always + graph.buffer_bytes,
                graph.parameter_bytes,
                self._kept_bytes(costs),
            ]
        )
        found: Vector = layers @ self._inside
        return found

    def _kept_bytes(self, costs: LayerVectors) -> Vector:
        """Of each layer, what several keep by the first of them."""
        found: Vector = costs.private_bytes.copy()
        for name, savers in self.relaxation.graph.savers.items():
            found[(savers & -savers).bit_length() - 1] += costs.storages[name]
        return found

    @cached_property
    def _messages(self) -> Vector:
        """What the path sends over each place, [2, P]."""
        size = self.relaxation.seconds.size(self._n, 1)
        sent = self.relaxation.graph.sent_along(self._path, size)
        found = np.zeros((2, len(self.masks)))
        for p, count in enumerate(self.gaps.tolist()):
            if 0 < count < len(self._path):
                found[:, p] = sent[count - 1], 1.0
        return found

    def chains(self, devices: Sequence[int]) -> Chains:
        """All cuts into stages that have these devices, by their positions in the cluster's list;
        within the memory for what is always there."""
        rows = [self._holding(devices, d, {_BYTES: [1.0] * len(devices)}) for d in {*devices}]
        return self._chains(devices, rows)

    def chains_like(self, found: Evaluation, cut: Sequence[int]) -> Chains:
        """The same within the memory for what a plan's stages have in flight: a guess.

        Args:
            cut: the plan's, as bit masks of the layers before each border.
        """
        stages, rows = found.prediction.stages, []
        devices = [stage.devices[0] for stage in found.stages]
        factor = 1 + self.question.optimizer_state_factor
        counts = {
            _PARAMETERS: [factor + stage.versions_held for stage in stages],
            _KEPT: [float(stage.micro_batches_kept) for stage in stages],
        }
        places = [self.masks.index(mask) for mask in cut]
        inside = np.diff(self._measures[:, places], axis=1)
        for d in {*devices}:
            mine = [s for s, other in enumerate(devices) if other == d]
            about = sum(row[s] * inside[k, s] for k, row in counts.items() for s in mine)
            needs = found.prediction.device_of(mine[0]).memory_bytes
            rows.append(self._holding(devices, d, counts, needs / about if about else 1.0))
        return self._chains(devices, rows)

    def _chains(self, devices: Sequence[int], memory: Sequence[Term | None]) -> Chains:
        terms = [*self._terms(tuple(devices)), *(term for term in memory if term is not None)]
        return Chains(self.masks, self._measures, self._messages, self.gaps, terms)

    # Terms ---------------------------------------------------------------------------------------

    def _terms(self, devices: tuple[int, ...]) -> Iterator[Term]:
        stages, n = len(devices), self._n
        for d in dict.fromkeys(devices):
            mine = [s for s in range(stages) if devices[s] == d]
            yield self._sum(devices, {s: {_WORK: n, _UPDATE: 1} for s in mine})
            for at, first in enumerate(mine if self.variant.flushes else ()):
                behind = {s: {_FORWARD: n, _BACKWARD: n} for s in mine[at:]}
                yield self._sum(devices, behind, fills=first)
                if self.variant.forwards_first and mine[-1] < stages - 1:
                    last = mine[-1]
                    yield self._sum(devices, behind, fills=first, trip=last, rounds=1)
        yield from self._wires(devices)
        if self.variant.order is None:
            yield from self._trips(devices)

    def _trips(self, devices: tuple[int, ...]) -> Iterator[Term]:
        """Round trips of micro-batches; of mini-batches where those are the units."""
        stages, n, variant = len(devices), self._n, self.variant
        limits = self.relaxation.limit_ranges(stages, several=True)
        for s in range(stages):
            if variant.backward_unit == "mini":
                own, limit = {s: {_FORWARD: n, _BACKWARD: n}}, limits[s][1]
                yield self._sum(devices, own, trip=s, rounds=1, backward=n, over=limit)
                continue
            own = {s: {_FORWARD: 1, _BACKWARD: 1}}
            if variant.flushes:
                kept = self._kept(devices)
                if kept is not None:
                    rounds = ceil(n / kept[s])
                    yield self._sum(devices, own, fills=s, trip=s, rounds=rounds)
                continue
            kept_s = min((limits[s][1] - 1) * n + 1, stages - s)
            yield self._sum(devices, own, trip=s, rounds=n / kept_s)
        if variant.schedule == "v-shaped":
            yield from self._slots(devices)

    def _slots(self, devices: tuple[int, ...]) -> Iterator[Term]:
        """Both stages of a device share its places for micro-batches (`schedules.v_shaped`)."""
        if self.gaps[1] != 1 or not self.relaxation.graph.spine[self._path[0]]:
            # Not all stages have something to do with each other: then there may be more places.
            return
        used = dict.fromkeys(devices)
        places = len(used) + 1 if self.variant.half_memory else 2 * len(used)
        for d in used:
            mine = [s for s, other in enumerate(devices) if other == d]
            first = self._sum(devices, {}, fills=mine[0])
            trips = [
                self._sum(
                    devices,
                    {s: {_FORWARD: 1, _BACKWARD: 1}},
                    trip=s,
                    rounds=self._n / places,
                )
                for s in mine
            ]
            yield replace(
                first,
                within=first.within + sum(t.within for t in trips),
                entering=first.entering + sum(t.entering for t in trips),
                lost=np.sum([t.lost for t in trips], axis=0),
            )

    def _kept(self, devices: tuple[int, ...]) -> list[int] | None:
        """Per stage, micro-batches that it has at once at the most; None: as many as there are."""
        variant, stages, n = self.variant, len(devices), self._n
        if variant.forwards_first or variant.schedule == "v-shaped":
            return None
        if variant.schedule != "interleaved":
            return [stages if variant.split_backward else stages - s for s in range(stages)]
        numbers = {d: k for k, d in enumerate(dict.fromkeys(devices))}
        zeros, placement = (0.0,) * stages, tuple(numbers[d] for d in devices)
        limits = (1,) * stages
        pipeline = Pipeline(variant, n, zeros, zeros, zeros, (), limits, placement=placement)
        kept, held = [1] * stages, [0] * stages
        for kinds, turns in interleaved(pipeline):
            for kind, s in zip(kinds, turns, strict=True):
                held[s] += (kind == FORWARDS) - (kind == BACKWARDS)
                kept[s] = max(kept[s], held[s])
        return kept

    def _wires(self, devices: tuple[int, ...]) -> Iterator[Term]:
        """Of each wire between two devices, in each direction."""
        stages, found = len(devices), dict[tuple[int, int], Vector]()
        for s in range(1, stages):
            a, b = devices[s - 1 : s + 1]
            if a != b:
                bandwidth = self.question.cluster.link(a, b).bandwidth_bytes_per_s
                for wire in ((a, b), (b, a)):
                    carried = found.setdefault(wire, np.zeros((stages, 2)))
                    carried[s, _SENT] += self._n / bandwidth
        none = np.zeros((stages, len(self._measures)))
        for entering in found.values():
            yield Term(none, entering, np.zeros(stages))

    def _holding(
        self,
        devices: Sequence[int],
        d: int,
        counts: Mapping[int, Sequence[float]],
        scale: float = 1.0,
    ) -> Term | None:
        """The share of a device's memory that its stages take; None where that isn't limited.

        Args:
            counts: how often measures count, per stage.
            scale: of the sum.
        """
        stages = len(devices)
        room = room_bytes(self.question.cluster.devices[d], self.question.profile)
        if room is None:
            return None
        within = np.zeros((stages, len(self._measures)))
        for measure, row in counts.items():
            for s in (s for s in range(stages) if devices[s] == d):
                # A byte for what is rounded.
                within[s, measure] = row[s] * scale / (room + stages)
        return Term(within, np.zeros((stages, 2)), np.zeros(stages), in_memory=True)

    def _sum(
        self,
        devices: tuple[int, ...],
        own: Mapping[int, Mapping[int, float]],
        *,
        fills: int = 0,
        trip: int | None = None,
        rounds: float = 1.0,
        backward: int = 1,
        over: int = 1,
    ) -> Term:
        """A term in seconds.

        Args:
            own: per stage, how often the measures of its layers count; those of the stage where
                trips begin in each of them.
            fills: the first micro-batch's way to this stage, and the last one's back, count.
            trip: those from this stage to the end and back count, the first stage's own part left
                out.
            rounds: so often.
            backward: micro-batches that come back together.
            over: in so many periods.
        """
        stages, cluster = len(devices), self.question.cluster
        within, entering = np.zeros((stages, len(self._measures))), np.zeros((stages, 2))
        ways = [(s, 1.0, 1) for s in range(fills)]
        ends = [(s, 1.0) for s in range(1, fills + 1)]
        if trip is not None:
            ways += [(s, rounds, backward) for s in range(trip + 1, stages)]
            ends += [(s, rounds) for s in range(trip + 1, stages)]
        for s, often, back in ways:
            within[s, _THERE] += often
            within[s, _BACK] += often * back
        for s, often in ends:
            a, b = devices[s - 1 : s + 1]
            if a != b:
                link = cluster.link(a, b)
                entering[s] += (
                    2 * often * np.array([1 / link.bandwidth_bytes_per_s, link.latency_s])
                )
        for s, counts in own.items():
            for measure, often in counts.items():
                within[s, measure] += often * (rounds if s == trip else 1.0)
        within /= np.array([cluster.devices[d].speed for d in devices])[:, None]
        within, entering = within / over, entering / over
        lost = np.zeros(stages)
        # What doesn't wait for the path doesn't wait for its way before the stage, either.
        for s in own if fills else ():
            lost[s] = self._most(within[:fills], entering[: fills + 1])
        if trip is not None:
            lost[trip] = self._most(within, entering)
        return Term(within, entering, lost)

    def _most(self, within: Vector, entering: Vector) -> float:
        """What no sum of these is above."""
        layers = within.max(axis=0) @ self._measures[:, -1]
        return float(layers + entering.sum(axis=0) @ self._messages.max(axis=1))
