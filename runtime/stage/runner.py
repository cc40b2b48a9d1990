"""A stage's replica at work: receive, compute, send, operation by operation of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from ...planner.systems.operations import BACKWARD, FORWARD, WEIGHT, Op, Schedule, op_text
from ..communication.all_reduce import AllReducer
from ..communication.channel import Channels
from ..prepare.clock import Spans
from ..prepare.data import Segment
from ..prepare.prepared import Prepared
from ..records.metrics import SegmentMetrics, Updated
from ..records.operation_log import OperationLog, StageEpochFile
from .data import StageData
from .gradients import StageGradients
from .messages import StageMessages
from .micro_batch import PieceInputs, advise
from .notes import OperationNotes
from .stage import Stage
from .summed_losses import losses_of

OnMiniBatch = Callable[[Segment, int, float], None]
"""Called on the last stage with the segment, the mini-batch in it, and its mean loss, when the
mini-batch's update is due."""


class StageRunner:
    """Runs the operations of one replica of a stage, with its messages and metrics.

    Attributes:
        replica: which one.
        number: its stage's.
        device: what its stage computes on.
        stage, data, messages: what it computes; takes from the data; receives and sends.
        gradients: sums and clips them.
        notes: what is noted of its operations.
        segment: at hand.
        updated: of the last update that was noted.
        epoch_file: where the figures of each epoch go.
        on_mini_batch: is called for every mini-batch.
    """

    def __init__(
        self,
        prepared: Prepared,
        number: int,
        channels: Channels,
        all_reduce: AllReducer,
        log: OperationLog | None = None,
        epochs: StageEpochFile | None = None,
        *,
        device: torch.device,
    ) -> None:
        """
        Args:
            number: the replica's.
            channels: of its worker.
        """
        self.prepared = prepared
        self.replica = replica = prepared.replicas[number]
        self.number = replica.stage
        self.channels = channels
        self.all_reduce = all_reduce
        self.epoch_file = epochs
        self.on_mini_batch: OnMiniBatch | None = None
        self.device = device
        self.stage = stage = Stage(prepared, replica, device)
        self.data = StageData(prepared, replica, stage.piece.inputs, device)
        self.messages = StageMessages(prepared, replica, channels, log)
        account = stage.account
        self.notes = OperationNotes(prepared, replica, account, channels, device, log)
        self.gradients = StageGradients(prepared, replica, stage, all_reduce, self.notes)
        self._losses = losses_of(prepared, stage, all_reduce, self.gradients.not_finite)
        self.segment: Segment | None = None
        self.updated = Updated()

    def stand_beside(self, others: Sequence[StageRunner]) -> None:
        """The worker has these, too: what they make is handed over, what they hold counts."""
        stages = {other.number: other.stage for other in others}
        self.stage.stand_beside(stages)
        kept = {s: partial(getattr, each.piece, "kept_outputs") for s, each in stages.items()}
        piece = self.stage.piece
        piece.handed_over, piece.evaluation_handed_over = self.messages.handed_over(kept)

    # Training ------------------------------------------------------------------------------

    def begin(self, segment: Segment, schedule: Schedule) -> None:
        """Get ready for a segment, whose messages are announced then (`StageMessages.series`):
        metrics at zero.

        `schedule`: of all stages.
        """
        ops = schedule[self.number]
        self.stage.begin(segment, schedule)
        self.segment = segment
        self.notes.metrics = SegmentMetrics()
        self.notes.clock.start()
        if self.notes.log is not None:
            own = [op for op in ops if self.stage.share.has(op)]
            self.notes.log.choose(segment, own, self.prepared.segments[-1].end)
        self.data.expect(segment, ops)

    def run(self, op: Op) -> None:
        """Run one operation of the schedule. Raises RunError naming the operation."""
        for _ in self.steps(op):
            pass

    def steps(self, op: Op) -> Iterator[None]:
        """Run one operation, and pause wherever an all-reduce has been started.

        In one process all workers that an update reduces over are led to the same pause before one
        goes on. Of what another replica does, nothing is done here. Raises as `run`.
        """
        assert self.segment is not None
        notes, hooks = self.notes, self.stage.hooks
        if not self.stage.share.has(op):
            self.stage.skip(op)
            if op.kind == FORWARD:
                with notes.explained():
                    hooks.after_forward(op)
            return
        notes.begin(op_text(self.number, op, self.segment.first))
        if notes.log is not None:
            notes.log.begin(op)
        try:
            if op.kind == FORWARD:
                self._forward(op, self.segment)
                hooks.after_forward(op)
            elif op.kind == BACKWARD:
                self._backward(op)
            elif op.kind == WEIGHT:
                self._weight(op)
            else:
                yield from self._update(op, self.segment)
            self.channels.advance()
        except BaseException:
            with notes.explained():
                raise
        notes.status.done()

    def _forward(self, op: Op, segment: Segment) -> None:
        assert op.micro_batch is not None
        mark = self.notes.clock.mark
        begin = mark()
        values, target, part = self.data.of(segment, op.mini_batch, op.micro_batch)
        messages, piece = self.messages, self.stage.piece
        loaded = mark()
        values |= messages.inputs(op.micro_batch)
        start = mark()
        given = PieceInputs(values, target, part, None)
        try:
            version, outputs, loss = self.stage.forward(op, given, self.channels.held_bytes)
        except Exception as error:
            advise(self.prepared, values, error)
            raise
        check = None
        if self.data.targets:
            of_loss = self._losses.note(op.mini_batch, loss, part.share)
            mini_batch = segment.first + op.mini_batch
            check = partial(self.gradients.not_finite.check_loss, mini_batch, of_loss)
        end = mark()
        messages.send_outputs(op.micro_batch, outputs, piece.kept_outputs, piece.lasts)
        sent = mark()
        self.notes.handed_in(op, version, Spans(begin, start, end, sent, loaded), before=check)

    def _backward(self, op: Op) -> None:
        mark = self.notes.clock.mark
        begin = mark()
        mine, stage, messages = self.stage.share.of(op), self.stage, self.messages
        grads = messages.output_gradients(mine, partial(stage.made_shape, op))
        stage.hooks.before_backward(op)
        start = mark()
        version, forward_version, back = stage.backward(op, grads, self.channels.held_bytes)
        end = mark()
        messages.send_gradients(mine, back)
        sent = mark()
        seen = stage.meter.seen
        read = partial(seen.read, seen.noted)
        spans = Spans(begin, start, end, sent)
        self.notes.handed_in(op, version, spans, forward_version, before=read)

    def _weight(self, op: Op) -> None:
        mark = self.notes.clock.mark
        begin = mark()
        self.stage.hooks.before_backward(op)
        start = mark()
        version = self.stage.backward_weight(op, self.channels.held_bytes)
        end = mark()
        spans = Spans(begin, start, end, end, looked=(start, start))
        self.notes.handed_in(op, version, spans)

    def _update(self, op: Op, segment: Segment) -> Iterator[None]:
        mark, stage, notes = self.notes.clock.mark, self.stage, self.notes
        begin = mark()
        stage.hooks.due(op.mini_batch)
        due = self._losses.due(op.mini_batch)
        # Elsewhere nobody needs to know before the update is done.
        losses = self._losses.read(due) if self.gradients.asks_losses else None
        number = segment.first + op.mini_batch
        found = yield from self.gradients.complete(number, losses, counts=self._losses.counts)
        start = mark()
        version = stage.update(self.channels.held_bytes, steps=found.steps)
        if stage.updates.scheduler is not None:
            stage.updates.scheduler.after_update(ends_epoch=segment.ends_epoch(op.mini_batch))
        end = mark()
        updated = Updated(stage.updates.lr, self.gradients.norm, stage.account.peak)

        def after() -> None:
            self.updated = updated
            notes.metrics.updated(notes.clock.time_s(end))
            read = self._losses.read(due) if found.losses is None else found.losses
            for b, loss in zip(due, read, strict=True):
                weight = self._losses.weight_of(b, segment)
                notes.metrics.add_loss(loss, 0.0 if self.gradients.leaves_out(loss) else weight)
                if self.on_mini_batch:
                    self.on_mini_batch(segment, b, loss)

        spans = Spans(begin, start, end, end, looked=(found.summed, found.checked))
        # Looked at already, what isn't finite is noted once.
        notes.handed_in(op, version, spans, before=found.check, after=after)
