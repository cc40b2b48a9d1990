"""A stage at work: it follows its order, takes messages, computes, sends, and keeps the score."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..planner.distances import prediction_distances
from ..planner.operations import BACKWARD, FORWARD, Op, Order, op_text
from ..planner.versions import entry_versions
from ..profiles.errors import RunError, TimeprestError
from ..profiles.target import describe_error
from .absent import add_gradients
from .channels import Channels
from .clipping import Clipping, Total, own_part, trained
from .data import Samples, Segment, part_of, real_samples, updates_of
from .operation_log import OperationLog, StageMetrics
from .padding import real_part
from .precision import forward_context
from .prepare import Prepared
from .scores import EvaluationScore, StageEpoch, StageScore
from .stage import Stage, StageWork

EVALUATION_AHEAD = 8
"""Messages that a stage may have under way to each peer while it evaluates."""

_NO_EVALUATION = "give test data that micro-batches divide, or train with --no-evaluate"

OnMiniBatch = Callable[[Segment, int, float], None]
"""Called on the last stage with the segment, the mini-batch in it, and its mean loss."""


class StageRunner:
    """One stage of a prepared plan.

    Attributes:
        score: times, losses and update times of the segment at hand.
        last_op: text of the operation at hand, for reports.
    """

    def __init__(
        self,
        prepared: Prepared,
        s: int,
        channels: Channels,
        log: OperationLog | None = None,
        metrics: StageMetrics | None = None,
        on_mini_batch: OnMiniBatch | None = None,
    ) -> None:
        plan, settings = prepared.plan, prepared.settings
        self.prepared = prepared
        self.number = s
        self.channels = channels
        self.log = log
        self.metrics = metrics
        self.on_mini_batch = on_mini_batch
        self.is_last = s == len(plan.stages) - 1
        self.stage = Stage(
            prepared.pieces[s],
            prepared.evaluation_pieces[s].module,
            prepared.specs,
            StageWork(prepared.pipeline.variant, plan.micro_batches, plan.stages[s].recompute),
            prepared.task,
            settings,
            updates_of(prepared.segments),
            prepared.autocast,
        )
        self.own_inputs = [n for n in self.stage.piece.inputs if n in prepared.inputs]
        self.incoming = [c for c in prepared.crossings if c.target == s]
        self.outgoing = [c for c in prepared.crossings if c.source == s]
        self._samples: dict[str, Samples] = {}
        self.score = StageScore()
        self.segment: Segment | None = None
        self.last_op = "start"
        self._loss = 0.0

    def clip(self, total: Total) -> None:
        """Clip gradients from now on, where the settings say so.

        Args:
            total: sums squared norms over all stages; for systems that flush.
        """
        most = self.prepared.settings.clip_norm
        if most is None:
            return
        own = list(self.stage.module.parameters())
        if not self.prepared.pipeline.variant.flushes:
            every = [p for piece in self.prepared.pieces for p in piece.module.parameters()]
            self.stage.clipping = Clipping(own, own_part(most, trained(own), trained(every)), None)
        else:
            self.stage.clipping = Clipping(own, most, total)

    # Training ------------------------------------------------------------------------------

    def begin(self, segment: Segment, order: Order) -> None:
        """Get ready for a segment: receives posted, score at zero. `order`: of all stages."""
        variant = self.prepared.pipeline.variant
        entries = entry_versions(order[0], self.stage.weights.latest)
        self.stage.begin(entries, prediction_distances(variant, order)[self.number])
        n = self.prepared.plan.micro_batches
        gradients = segment.mini_batches * self.prepared.pipeline.backwards_per_mini_batch
        self.segment = segment
        self.score = StageScore()
        self.channels.open(segment.mini_batches * n, gradients)

    def run(self, op: Op) -> None:
        """Run one operation of the order. Raises RunError naming the operation."""
        assert self.segment is not None
        self.last_op = op_text(
            self.number, Op(op.kind, self.segment.first + op.mini_batch, op.micro_batch)
        )
        with self._explained():
            if op.kind == FORWARD:
                self._forward(op)
            elif op.kind == BACKWARD:
                self._backward(op)
            else:
                self._update(op)

    def record(self, epoch: StageEpoch) -> None:
        """Write down what the stage saw in a segment."""
        if self.metrics is not None:
            self.metrics.epoch(epoch)

    def finish(self) -> None:
        """The segment's operations are done: let the last messages go."""
        with self._explained():
            self.channels.close()

    def _forward(self, op: Op) -> None:
        segment = self.segment
        assert segment is not None
        assert op.micro_batch is not None
        clock = time.perf_counter
        begin = clock()
        values, target = self._own(segment, op.mini_batch, op.micro_batch)
        part = part_of(segment, op.mini_batch, op.micro_batch)
        loaded = clock()
        for c in self.incoming:
            values[c.spec.name] = self.channels.receive(c, FORWARD)
        start = clock()
        version, outputs, loss = self.stage.forward(
            op, values, target, part, self.channels.held_bytes
        )
        if self.is_last:
            self._note_loss(op, 0.0 if loss is None else float(loss) * part.share)
        end = clock()
        for c in self.outgoing:
            name = c.spec.name
            kept = name in self.stage.kept_outputs
            self.channels.send(c, FORWARD, outputs[name], kept=kept)
        sent = clock()
        self.score.add(
            begin, sent, compute_s=end - start + loaded - begin, communication_s=sent - end
        )
        self._log(op, version, None, start, end)

    def _backward(self, op: Op) -> None:
        clock = time.perf_counter
        begin = clock()
        grads: dict[str, Tensor] = {}
        for c in self.outgoing:
            if c.spec.needs_grad:
                found = self.channels.receive(c, BACKWARD)
                name = c.spec.name
                if name in grads:
                    add_gradients(grads[name], found)
                else:
                    grads[name] = found
        start = clock()
        version, forward_version, back = self.stage.backward(op, grads, self.channels.held_bytes)
        end = clock()
        for c in self.incoming:
            if c.spec.needs_grad:
                self.channels.send(c, BACKWARD, back[c.spec.name])
        sent = clock()
        self.score.add(begin, sent, compute_s=end - start, communication_s=sent - end)
        self._log(op, version, forward_version, start, end)

    def _update(self, op: Op) -> None:
        start = time.perf_counter()
        version = self.stage.update(op.mini_batch, self.channels.held_bytes)
        end = time.perf_counter()
        waited_s = self.stage.clipping.waited_s if self.stage.clipping else 0.0
        self.score.add(start, end, compute_s=end - start - waited_s, communication_s=0.0)
        self.score.updates.append(end)
        self._log(op, version, None, start, end)

    def _note_loss(self, op: Op, share: float) -> None:
        """Add a micro-batch's share of its mini-batch's loss."""
        assert self.segment is not None
        self._loss += share
        if op.micro_batch == self.prepared.plan.micro_batches - 1:
            self.score.losses.append(self._loss)
            if self.on_mini_batch:
                self.on_mini_batch(self.segment, op.mini_batch, self._loss)
            self._loss = 0.0

    def _log(
        self, op: Op, version: int, forward_version: int | None, start: float, end: float
    ) -> None:
        if self.log is not None:
            self.log.write(self.last_op, version, forward_version, start, end)

    # Evaluation ----------------------------------------------------------------------------

    @property
    def evaluations(self) -> int:
        """Micro-batches in one evaluation."""
        return self.samples("test").evaluations

    def begin_evaluation(self) -> None:
        """Get ready for one pass over the test data."""
        self.last_op = f"{self.number} evaluation"
        with self._explained():
            self.channels.open(self.evaluations, 0)

    def evaluate(self, k: int, score: EvaluationScore) -> None:
        """Forward of the k-th test micro-batch; the last stage adds to the score."""
        self.last_op = f"{self.number} evaluation {k}"
        with self._explained():
            values: dict[str, Tensor] = {}
            target: Any = None
            real = 0
            if self.own_inputs or self.is_last:
                inputs, target, real = self.samples("test").evaluation(k)
                values = self._named(inputs)
            for c in self.incoming:
                values[c.spec.name] = self.channels.receive(c, FORWARD)
            self.channels.throttle(EVALUATION_AHEAD)
            outputs, result = self.stage.evaluate(values)
            for c in self.outgoing:
                self.channels.send(c, FORWARD, outputs[c.spec.name])
            if self.is_last:
                size = self.prepared.plan.micro_batch
                if real < size:
                    result = real_part(result, real, size, _NO_EVALUATION)
                with forward_context(self.prepared.autocast):
                    score.add(self.prepared.task, result, target, real)

    # Data ----------------------------------------------------------------------------------

    def samples(self, split: Any) -> Samples:
        """The samples of a split, loaded on first use."""
        if split not in self._samples:
            plan, settings = self.prepared.plan, self.prepared.settings
            self._samples[split] = Samples(
                self.prepared.task, split, plan.micro_batch, settings.seed
            )
        return self._samples[split]

    def _own(
        self, segment: Segment, mini_batch: int, micro_batch: int
    ) -> tuple[dict[str, Tensor], Any]:
        if not (self.own_inputs or self.is_last):
            return {}, None
        positions = real_samples(segment, mini_batch, micro_batch)
        inputs, target = self.samples("train").take(segment.epoch, positions)
        return self._named(inputs), target

    def _named(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        named = dict(zip(self.prepared.inputs, inputs, strict=False))
        return {name: named[name] for name in self.own_inputs}

    def _explained(self) -> _Explained:
        return _Explained(self)


class _Explained:
    """Turns whatever the user's code raises into a RunError that names the operation."""

    def __init__(self, runner: StageRunner) -> None:
        self.runner = runner

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        where = f"stage {self.runner.number}, at {self.runner.last_op}"
        if isinstance(error, TimeprestError):
            if not str(error).startswith("stage "):
                raise type(error)(f"{where}: {error}") from error
            return
        raise RunError(f"{where}: {describe_error(error)}") from error
