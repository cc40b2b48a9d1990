"""One clock for all: when an operation can start, when it ends, when its messages arrive.

Messages of a pair of stages follow each other on the wire; the two directions don't disturb
each other (full duplex), and sending overlaps computing.
"""

from __future__ import annotations

from .operations import BACKWARD, FORWARD, Op
from .pipeline import Link, Pipeline


class Clock:
    """Runs operations one by one, in any order that respects their messages.

    Attributes:
        free_s: per stage, when it has finished what it was given so far.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        stages = range(pipeline.stages)
        self.free_s = [0.0 for _ in stages]
        self.successors: list[list[Link]] = [
            [link for link in pipeline.links if link.source == s] for s in stages
        ]
        self.predecessors: list[list[Link]] = [
            [link for link in pipeline.links if link.target == s] for s in stages
        ]
        self._inputs_due = [len(self.predecessors[s]) for s in stages]
        self._grads_due = [
            sum(1 for link in self.successors[s] if link.has_gradient) for s in stages
        ]
        self._wire_free: dict[tuple[int, int], float] = {}
        # Per stage: (kind, mini-batch, micro-batch) → messages arrived, and when the last did.
        self._arrived: list[dict[Op, tuple[int, float]]] = [{} for _ in stages]

    def ready_s(self, stage: int, op: Op) -> float | None:
        """When the operation's messages are all there; None while some aren't even sent."""
        if op.kind == FORWARD:
            due = self._inputs_due[stage]
        elif op.kind == BACKWARD:
            due = self._grads_due[stage]
        else:
            return 0.0
        if not due:
            return 0.0
        count, last_s = self._arrived[stage].get(op, (0, 0.0))
        return last_s if count == due else None

    def run(self, stage: int, op: Op) -> tuple[float, float]:
        """Run an operation whose messages are there. Returns its start and end in seconds."""
        ready = self.ready_s(stage, op)
        assert ready is not None
        start = max(self.free_s[stage], ready)
        end = start + self.duration_s(stage, op)
        self.free_s[stage] = end
        self._arrived[stage].pop(op, None)
        if op.kind == FORWARD:
            for link in self.successors[stage]:
                self._send(stage, link.target, op, end, link.forward_s, link.latency_s)
        elif op.kind == BACKWARD:
            each = self.pipeline.micro_batches_per_backward
            for link in self.predecessors[stage]:
                if link.has_gradient:
                    wire_s = link.backward_s * each
                    self._send(stage, link.source, op, end, wire_s, link.latency_s)
        return start, end

    def duration_s(self, stage: int, op: Op) -> float:
        """How long an operation takes."""
        if op.kind == FORWARD:
            return self.pipeline.forward_s[stage]
        if op.kind == BACKWARD:
            return self.pipeline.backward_op_s(stage)
        return self.pipeline.update_s[stage]

    def _send(
        self, source: int, target: int, op: Op, now: float, wire_s: float, latency_s: float
    ) -> None:
        begin = max(now, self._wire_free.get((source, target), 0.0))
        self._wire_free[source, target] = begin + wire_s
        arrival = begin + wire_s + latency_s
        count, last_s = self._arrived[target].get(op, (0, 0.0))
        self._arrived[target][op] = (count + 1, max(last_s, arrival))
