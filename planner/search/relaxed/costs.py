"""Seconds of a relaxed problem: what layers take at the least, and what no period is below.

Index letters: N micro-batches; r replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import fsum

import msgspec
import numpy as np

from ...costs.layer_graph import LayerVectors, capped, forward_share
from ...partition.problem import Vector, members
from .scope import Reading, Scope


@dataclass(frozen=True)
class Work:
    """What a stage's load has of each layer.

    Attributes:
        costs: by replicas.
        forwards, backwards: shares of them that count, [n] each.
        inputs_only: of backwards, what gives the gradients of inputs.
        before, after: beside it, what runs before a stage's first work and after its last, [n].
        forward_share: of a layer's work, what forwards are at the most that may run beside the
            others; None: none do.
    """

    costs: Mapping[int, LayerVectors]
    forwards: Vector
    backwards: Vector
    inputs_only: bool
    before: Vector | None
    after: Vector | None
    forward_share: float | None


class LeastSeconds(Scope):
    """What layers take, as fast as can be."""

    def work(self, read: Reading) -> Work:
        """What counts of layers, by how plans are read."""
        before, after, costs, share = None, None, read.costs, None
        if read.drains:
            # 1F1B with equal stages takes as long as if both counted in full.
            before, after = self.heads(costs[1], both=read.guess or read.returns)
            if read.bounds_replicas:
                # Replicas wait for one another, so that it drains, before updates alone.
                before /= self.question.update_every
                after = None if after is None else after / self.question.update_every
        if read.returns or (after is not None and read.bounds_replicas):
            # A handful of additions whose backward takes nothing must not make the share 1.
            share = forward_share(costs[1])
            costs = {r: capped(found, share) for r, found in costs.items()}
        every = np.ones(len(self.graph.names))
        # Those that don't wait may run beside what comes on top.
        waiting = self.graph.drained.waiting if read.bounds_drained else every
        # Weight parts may run while the next mini-batch fills the pipeline behind the stage.
        inputs_only = read.bounds_drained and self.variant.split_backward
        forwards = every if after is None else waiting
        return Work(costs, forwards, waiting, inputs_only, before, after, share)

    def once(self, costs: LayerVectors) -> tuple[Vector, Vector]:
        """Each layer's forward of a micro-batch, and the least of its backward, as fast as can
        be, [n] each."""
        fastest = max(device.speed for device in self.question.cluster.devices)
        backward = costs.input_s if self.variant.split_backward else costs.backward_s
        return costs.forward_s / fastest, backward / fastest

    def forward_s(self, micro_batches: int) -> Vector:
        """Each layer's forward of a micro-batch, [n], as fast as can be."""
        return self.once(self.graph.costs(self.size(micro_batches, 1)))[0]

    def way_s(self, micro_batches: int) -> Vector:
        """The same of its forward and its backward, [n]."""
        both: Vector = np.add(*self.once(self.graph.costs(self.size(micro_batches, 1))))
        return both

    def recompute_s(self, micro_batches: int) -> Callable[[frozenset[str]], float]:
        """What computing a set of layers again takes for a micro-batch."""
        times = dict(zip(self.graph.names, self.forward_s(micro_batches).tolist(), strict=True))
        # Not by rounding either does it depend on the sequence that a set is gone through in.
        return lambda layers: fsum(times[name] for name in layers)

    def work_s(self, micro_batches: int) -> float:
        """All layers' work for one micro-batch, on one of the fastest devices."""
        return self._work_s(self.size(micro_batches, 1))

    def _work_s(self, size: int) -> float:
        return float(np.add(*self.once(self.graph.costs(size))).sum())

    def shared_out_s(self, micro_batches: int) -> float:
        """All layers' work for a mini-batch, shared out over all devices: no period is less."""
        speeds = [device.speed for device in self.question.cluster.devices]
        devices = sum(speed / max(speeds) for speed in speeds)
        whole = self.variant.whole_mini_batches
        shares = {r if whole else 1 for r in self.replica_counts(micro_batches)}
        least_s = min(s * self._work_s(self.size(micro_batches, s)) for s in shares or {1})
        return least_s * micro_batches / devices

    def least_s(self, micro_batches: int) -> float:
        """Lower bound on periods, in s: `shared_out_s`, and without replicas the longest layer or
        inseparable group (`together`) on the fastest device."""
        least_s, n = self.shared_out_s(micro_batches), micro_batches
        if self.replica_counts(n) != [1]:
            return least_s
        costs, steps_s = self.graph.costs(self.size(n, 1)), self.serial(n, 1)[0]
        fastest = max(device.speed for device in self.question.cluster.devices)
        each = ((costs.forward_s + costs.backward_s) * n + steps_s) / fastest
        whole = (float(each[[*members(group)]].sum()) for group in self.graph.together)
        return max(least_s, float(each.max(initial=0.0)), *whole)

    def round_trip_s(self, micro_batches: int) -> float:
        """No period is shorter where at most N micro-batches are in flight; else 0.

        In `pipedream-2bw` every stage runs a micro-batch forward after the backward of the N-th
        one before it at the latest. So a period takes at least as long as one micro-batch needs
        from a stage to the end and back; of that only layers count that all paths go through, and
        that gradients come back along. Where a user limits mini-batches in flight to L, a period
        takes 1 / L of that of one.
        """
        n, asked = micro_batches, self.freedom.staleness
        if self.variant.schedule == "1f1b-micro":
            return self._way_s(n)
        bounds = (asked.max_in_flight, asked.max_difference, asked.max_delay)
        if self.variant.flushes or not any(most is not None for most in bounds):
            return 0.0
        (_, limit), *_ = self.limit_ranges(len(self.graph.names))
        replicas = max(self.replica_counts(n), default=1)
        if self.variant.backward_unit == "micro":
            return self._way_s(n) * n / ((limit - 1) * n + replicas)
        return self._way_s(n, replicas, -(-n // replicas)) / limit

    def way_and_back_s(self, micro_batches: int) -> float:
        """As `round_trip_s`, for systems that flush too: they have no more in flight either."""
        if self.variant.flushes:
            return self._way_s(micro_batches)
        return self.round_trip_s(micro_batches)

    def _way_s(self, micro_batches: int, replicas: int = 1, backwards: int = 1) -> float:
        """Of a micro-batch as small as so many replicas make it, there and as often back."""
        forward, backward = self.once(self.graph.costs(self.size(micro_batches, replicas)))
        work = forward + backward * backwards
        return max((sum(work[row].tolist()) for row in self.graph.returning_rows), default=0.0)

    def heads(self, costs: LayerVectors, *, both: bool) -> tuple[Vector, Vector | None]:
        """What runs before a stage's first work and after its last, in systems that flush.

        The layers that every path goes through, the spine, run one after another, once in
        each direction for some micro-batch, however the rest is cut. In GPipe's schedule those
        behind a stage come on top: its backwards begin when all forwards are through.
        Only as far as gradients come back (`LayerGraph.drained`).

        Args:
            both: those behind it come on top, whatever the schedule.
        """
        forward, backward = self.once(costs)
        found = self.graph.drained
        before = forward * found.before_forward + backward * found.before_backward
        if not (self.variant.forwards_first or both):
            return before, None
        return before, forward * found.after_forward + backward * found.after_backward

    def serial(self, micro_batches: int, replicas: int) -> tuple[Vector, float]:
        """Seconds at speed 1 that replicas don't share: updates per layer, [n]; and once per stage.

        While the pipeline drains, a stage's update runs beside others' backwards instead.
        """
        optimizer, operation = self.question.profile.optimizer, self.question.profile.operation
        every = self.question.update_every
        fixed_s = optimizer.update_fixed_s / every
        per_byte_s = optimizer.update_s_per_byte / every
        if operation is not None:
            own = 1 if self.variant.whole_mini_batches else max(1, micro_batches // replicas)
            fixed_s += own * operation.forward_s + operation.mini_batch_s
            per_byte_s += operation.update_s_per_byte / every
        steps_s = per_byte_s * self.graph.parameter_bytes
        for k, layer in enumerate(self.question.profile.layers):
            if layer.update_s is not msgspec.UNSET:
                by_bytes_s = optimizer.update_s_per_byte * layer.parameter_bytes
                steps_s[k] += (layer.update_s - by_bytes_s) / every
        return steps_s, fixed_s
