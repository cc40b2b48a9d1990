"""A stage's replica at work: it follows its schedule, receives, computes, sends, keeps metrics."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from msgspec import UNSET
from torch import Tensor

from ...planner.recordings.recording import by_kind
from ...planner.systems.operations import BACKWARD, FORWARD, WEIGHT, Op, Schedule, op_text
from ...planner.systems.prediction import Distances, prediction_distances
from ...planner.systems.versions import entry_versions
from ...profiles.errors import RunError, TimeprestError
from ...profiles.tasks.hooks import describe_error, from_users_code, is_ctrl_c
from ...profiles.tasks.parts import ALL, INPUTS, TARGET, Parts
from ..communication.all_reduce import ALL_WORKERS, AllReducer
from ..communication.channel import Channels, LoggedChannels
from ..prepare.clock import Spans, UnderWay, clock_of
from ..prepare.data import NO_EVALUATION, Segment, part_of, real_part, real_samples
from ..prepare.devices import CPU, forward_context, put
from ..prepare.messages import MessageRoute, MessageSeries, by_name, join, message_series
from ..prepare.prepare import Prepared
from ..prepare.samples import Samples
from ..prepare.tied_parameters import same_tensors
from ..records.metrics import EvaluationMetrics, SegmentMetrics, Updated
from ..records.operation_log import OperationLog, StageEpochFile, Use
from ..records.status import Status
from .gradients import SKIP, NotFinite, StageGradients, finite_gradients
from .handed_over import HandedOver
from .memory import out_of_memory
from .micro_batch import PieceInputs, advised
from .stage import Stage
from .summed_losses import LossWeights, MiniBatchLosses

OnMiniBatch = Callable[[Segment, int, float], None]
"""Called on the last stage with the segment, the mini-batch in it, and its mean loss, when the
mini-batch's update is due."""


class StageRunner:
    """A stage of a prepared plan, or one replica of it.

    Attributes:
        replica: which one.
        number: its stage's.
        device: what its stage computes on.
        transport, not_by_ipc: how its messages go, and why not from GPU to GPU; for the report.
        tells: the one that tells of progress.
        metrics: times, losses and update times of the segment at hand.
        last_op: text of the operation at hand, for reports.
        status: is told of every operation.
        not_finite: mini-batches with losses or gradients that weren't.
        larger: mini-batches larger than any that was profiled, where this is who tells.
        updated: of the last update that was noted.
        clock: of what its stage computes on.
        under_way: operations that haven't been noted yet.
    """

    def __init__(
        self,
        prepared: Prepared,
        number: int,
        channels: Channels,
        all_reduce: AllReducer,
        log: OperationLog | None = None,
        epochs: StageEpochFile | None = None,
        on_mini_batch: OnMiniBatch | None = None,
        device: torch.device = CPU,
    ) -> None:
        """
        Args:
            number: the replica's.
            channels: of its worker.
        """
        plan, settings = prepared.plan, prepared.settings
        self.prepared = prepared
        self.replica = replica = prepared.replicas[number]
        self.number = s = replica.stage
        self.share = prepared.distribution.shares[number]
        self.channels = channels if log is None else LoggedChannels(channels, log)
        self.all_reduce = all_reduce
        self.log = log
        self.epoch_file = epochs
        self.on_mini_batch = on_mini_batch
        self.device = device
        self.transport = self.not_by_ipc = ""
        self.clock = clock = clock_of(device)
        self.under_way = UnderWay(clock)
        if log is not None:
            log.clock = clock
        self.is_last = s == len(plan.stages) - 1
        self.tells = replica.tells
        self.stage = Stage(prepared, replica, device)
        self.own_inputs = [n for n in self.stage.piece.inputs if n in prepared.model.inputs]
        routes = prepared.distribution.routes
        self.incoming = by_name(c for c in routes if c.target == replica)
        self.outgoing = [c for c in routes if c.source == replica]
        returning = Counter(c.spec.name for c in self.outgoing if c.spec.needs_grad)
        self._summed = {name for name, count in returning.items() if count > 1}
        self._gradients = StageGradients(prepared, replica, self.stage, all_reduce)
        self._samples: dict[str, Samples] = {}
        self.metrics = SegmentMetrics()
        self.segment: Segment | None = None
        self.last_op = "start"
        self.status = Status()
        self.not_finite = NotFinite(settings.on_nan, late=clock.late)
        self.updated = Updated()
        self.larger: list[int] = []
        self._loss_weights = (
            LossWeights(self.stage, all_reduce, self.not_finite, plan)
            if prepared.model.loss.weighted and s in prepared.reached
            else None
        )
        if self._loss_weights is not None:
            # Before ties, whose gradients are divided mini-batch by mini-batch.
            self.stage.hooks.insert(self._loss_weights)
        self._losses = MiniBatchLosses(self._loss_weights)

    def stand_beside(self, others: Sequence[StageRunner]) -> None:
        """The worker has these, too: what they make is handed over, what they hold counts."""
        stages = {other.number: other.stage for other in others}
        self.stage.stand_beside(stages)

        def makers(routes: Iterable[MessageRoute]) -> HandedOver:
            found = {c.spec.name: stages[c.source.stage] for c in routes if c.handed_over}
            return HandedOver(
                {n: partial(getattr, s.piece, "kept_outputs") for n, s in found.items()}
            )

        self.stage.piece.handed_over = makers(
            c for routes in self.incoming.values() for c in routes
        )
        self.stage.piece.evaluation_handed_over = makers(self._evaluated())

    # Training ------------------------------------------------------------------------------

    def begin(self, segment: Segment, schedule: Schedule) -> None:
        """Get ready for a segment, whose messages are announced then (`series`): metrics at zero.

        `schedule`: of all stages.
        """
        variant = self.prepared.pipeline.variant
        latest = self.stage.weights.latest
        entries = entry_versions(variant, self.prepared.plan.micro_batches, schedule[0], latest)

        def ahead(tied: Sequence[int]) -> Distances:
            by = [tied[0] if s in tied else s for s in range(len(schedule))]
            return prediction_distances(variant, schedule, by)[self.number]

        self.stage.begin(segment, entries, ahead)
        self.segment = segment
        self.metrics = SegmentMetrics()
        self.clock.start()
        if self.log is not None:
            own = [op for op in schedule[self.number] if self.share.has(op)]
            self.log.choose(segment, own, self.prepared.segments[-1].end)
        if self.loads:
            self.samples("train").expect(
                (
                    segment.epoch,
                    real_samples(segment, op.mini_batch, op.micro_batch, self.share.dealt),
                    self.share.samples,
                )
                for op in schedule[self.number]
                if op.kind == FORWARD and op.micro_batch is not None and self.share.of(op)
            )

    def series(self, mini_batches: int) -> list[MessageSeries]:
        """All messages that come in a segment."""
        mine = self.share.micro_batches
        series = []
        for routes in self.incoming.values():
            steps = [[c for c in routes if i in c.micro_batches] for i in mine]
            series.append(message_series(FORWARD, steps, mini_batches))
        back: dict[tuple[str, int], list[MessageRoute]] = {}
        for c in self.outgoing:
            if c.spec.needs_grad:
                back.setdefault((c.spec.name, c.target.stage), []).append(c)
        for routes in back.values():
            steps = [[c for c in routes if i in c.micro_batches] for i in mine]
            if self.prepared.pipeline.variant.backward_unit == "mini":
                steps = [routes]
            series.append(message_series(BACKWARD, steps, mini_batches))
        return series

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
        if not self.share.has(op):
            self.stage.skip(op)
            if op.kind == FORWARD:
                with self._explained():
                    self.stage.hooks.after_forward(op)
            return
        self.last_op = op_text(
            self.number, Op(op.kind, self.segment.first + op.mini_batch, op.micro_batch)
        )
        self.status.begin(self.last_op, self.replica.name)
        if self.log is not None:
            self.log.begin(op)
        with self._explained():
            if op.kind == FORWARD:
                self._forward(op)
                self.stage.hooks.after_forward(op)
            elif op.kind == BACKWARD:
                self._backward(op)
            elif op.kind == WEIGHT:
                self._weight(op)
            else:
                yield from self._update(op)
            self.channels.advance()
        self.status.done()

    def state(self) -> dict[str, Tensor]:
        """The stage's parameters and buffers under the names of the model's state_dict; the first
        stage's with those that no stage uses."""
        model = self.prepared.model
        return model.as_written({**self.stage.state(), **({} if self.number else model.unused)})

    def tied_names(self) -> dict[str, str]:
        """Of the names in `state`, those that stand for what an earlier name of the model does, and
        that name; none where hooks change names, since safetensors knows nothing of these."""
        model = self.prepared.model
        if model.first_written.keys() != model.names.keys():
            return {}
        return same_tensors(self.state(), model.names)

    def finish(self) -> None:
        """The segment's operations are handed in: wait for them, and let the last messages go."""
        with self._explained():
            self.under_way.note()
            self.channels.close()

    def _forward(self, op: Op) -> None:
        segment = self.segment
        assert segment is not None
        assert op.micro_batch is not None
        mark = self.clock.mark
        begin = mark()
        values, target = self._own(segment, op.mini_batch, op.micro_batch)
        share = self.share
        part = part_of(segment, op.mini_batch, op.micro_batch, share.samples, share.dealt)
        loaded = mark()
        for name, routes in self.incoming.items():
            parts = [
                (c, self.channels.receive(c, FORWARD))
                for c in routes
                if op.micro_batch in c.micro_batches
            ]
            values[name] = join(parts)
        values.update(self.prepared.distribution.known[self.number])
        start = mark()
        held_bytes = self.channels.held_bytes
        with advised(self.prepared, values):
            given = PieceInputs(values, target, part, None)
            version, outputs, loss = self.stage.forward(op, given, held_bytes)
        of_loss = self._losses.note(op.mini_batch, loss, part.share) if self.is_last else 0.0
        end = mark()
        for c in self.outgoing:
            if op.micro_batch in c.micro_batches:
                name = c.spec.name
                kept = name in self.stage.piece.kept_outputs
                part_sent = c.part(outputs[name])
                if self.stage.piece.lasts(part_sent):
                    part_sent = part_sent.clone()
                self.channels.send(c, FORWARD, part_sent, kept=kept)
                self.metrics.sent_bytes += 0 if c.handed_over else part_sent.nbytes
        sent = mark()
        spans = Spans(begin, start, end, sent, [(start, end)], [(end, sent)], [(begin, loaded)])
        mini_batch = segment.first + op.mini_batch
        check = partial(self.not_finite.check_loss, mini_batch, of_loss)
        self._handed_in(op, version, None, spans, before=check)

    def _backward(self, op: Op) -> None:
        mark = self.clock.mark
        begin = mark()
        mine = self.share.of(op)
        grads: dict[str, Tensor] = {}
        for c in self.outgoing:
            if c.spec.needs_grad and not set(mine).isdisjoint(c.micro_batches):
                name = c.spec.name
                message = self.channels.receive(c, BACKWARD)
                if c.handed_over and name in self._summed:
                    # Others may have the same memory, and this is going to be added to.
                    message = message.clone()
                shape = self.stage.made_shape(op, name)
                grads[name] = c.add_gradient(grads.get(name), message, mine, shape)
        self.stage.hooks.before_backward(op)
        start = mark()
        version, forward_version, back = self.stage.backward(op, grads, self.channels.held_bytes)
        end = mark()
        for routes in self.incoming.values():
            for c in routes:
                if c.spec.needs_grad and not set(mine).isdisjoint(c.micro_batches):
                    part = c.gradient_part(back[c.spec.name], mine)
                    self.channels.send(c, BACKWARD, part)
                    self.metrics.sent_bytes += 0 if c.handed_over else part.nbytes
        sent = mark()
        spans = Spans(begin, start, end, sent, [(start, end)], [(end, sent)])
        staleness = self.stage.meter.seen
        read = partial(staleness.read, staleness.noted)
        self._handed_in(op, version, forward_version, spans, before=read)

    def _weight(self, op: Op) -> None:
        begin = self.clock.mark()
        self.stage.hooks.before_backward(op)
        start = self.clock.mark()
        version = self.stage.backward_weight(op, self.channels.held_bytes)
        end = self.clock.mark()
        spans = Spans(begin, start, end, end, [(start, end)], [(begin, start)])
        self._handed_in(op, version, None, spans)

    def _update(self, op: Op) -> Iterator[None]:
        mark = self.clock.mark
        begin = mark()
        self.stage.hooks.due(op.mini_batch)
        counts = self._loss_weights is None or self._loss_weights.counts
        due = self._losses.due(op.mini_batch)
        skips = self.not_finite.policy == SKIP
        # Elsewhere nobody needs to know before the update is done.
        losses = self._losses.read(due) if skips or self.replica.count > 1 else None
        shared = torch.tensor(losses, dtype=torch.float64) if self.replica.count > 1 else None
        started = self._gradients.start_sums(shared)
        agrees = skips and self.prepared.pipeline.variant.flushes
        if started or agrees or self.prepared.settings.clip_norm is not None:
            # In one process, those that reduce over all workers pause as often as the others.
            yield
        for pending in started:
            pending.wait()
        if shared is not None:
            losses = shared.tolist()
        assert self.segment is not None
        number = self.segment.first + op.mini_batch
        summed = mark()
        gradients = finite_gradients(self.stage.updated)
        check, finite = partial(self.not_finite.check_gradients, number, gradients), True
        if skips or not self.clock.late:
            # What was noted of operations before is known before.
            self.under_way.note()
            finite = check()
        if skips:
            # Summed over replicas, so that all of them decide alike.
            finite = finite and counts and all(map(math.isfinite, losses or ()))
        checked = mark()
        if agrees:
            # The update is left out everywhere or nowhere.
            bad = torch.tensor([0.0 if finite else 1.0], dtype=torch.float32)
            agreeing = self.all_reduce.start(ALL_WORKERS, [bad])
            yield
            agreeing.wait()
            finite = not float(bad)
        if self.prepared.settings.clip_norm is not None:
            yield from self._gradients.clip()
        start = mark()
        version = self.stage.update(self.channels.held_bytes, steps=finite or not skips)
        if self.stage.updates.scheduler is not None:
            self.stage.updates.scheduler.after_update(
                ends_epoch=self.segment.ends_epoch(op.mini_batch)
            )
        end = mark()
        computing, waiting = [(summed, checked), (start, end)], [(begin, summed), (checked, start)]
        spans = Spans(begin, start, end, end, computing, waiting)
        updated = Updated(self.stage.updates.lr, self._gradients.norm, self.stage.account.peak)

        def after() -> None:
            self.updated = updated
            self.metrics.updated(self.clock.time_s(end))
            found = self._losses.read(due) if losses is None else losses
            for b, loss in zip(due, found, strict=True):
                self._tell_loss(b, loss)

        # Looked at already, what isn't finite is noted once.
        self._handed_in(op, version, None, spans, before=check, after=after)

    def _tell_loss(self, mini_batch: int, loss: float) -> None:
        assert self.segment is not None
        weight = float(self.segment.samples_of(mini_batch))
        if self._loss_weights is not None:
            weight = self._loss_weights.weights.pop(mini_batch)
        left_out = self.not_finite.policy == SKIP and not math.isfinite(loss)
        self.metrics.tell(loss, 0.0 if left_out else weight)
        if self.on_mini_batch:
            self.on_mini_batch(self.segment, mini_batch, loss)

    def _handed_in(
        self,
        op: Op,
        version: int,
        forward_version: int | None,
        spans: Spans,
        before: Callable[[], object] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """The device has all of an operation: note it when it is through.

        Args:
            before, after: what is to be done then, besides the metrics and the log.
        """
        text, log = self.last_op, self.log if self.log is not None and self.log.on else None
        if log is not None:
            now = self.stage.account.now
            held = None if now is None else by_kind(now)
            left, messages = self.stage.account.held(self.channels.held_bytes), log.end(op)

        def note() -> None:
            if before is not None:
                before()
            at = spans.times(self.clock)
            self.metrics.add(at)
            if after is not None:
                after()
            if log is not None:
                log.write(op, text, Use(version, forward_version, at), messages, held, left)

        self.under_way.add(spans.sent, note, partial(self._explained, text))

    # Evaluation ----------------------------------------------------------------------------

    @property
    def evaluations(self) -> int:
        """Micro-batches in one evaluation."""
        return self.samples("test").evaluations

    def begin_evaluation(self) -> list[MessageSeries]:
        """Get ready for one pass over the test data. Returns all messages that come in it."""
        with self.doing(f"{self.number} evaluation"):
            count = self.evaluations
            return [message_series(FORWARD, [[c]], count) for c in self._evaluated()]

    def _evaluated(self, *, outgoing: bool = False) -> list[MessageRoute]:
        """Routes to this replica in evaluation, or from it."""
        return [
            c
            for c in self.prepared.distribution.evaluation_routes
            if (c.source if outgoing else c.target) == self.replica
        ]

    def evaluate(self, k: int, metrics: EvaluationMetrics, ahead: int) -> None:
        """Forward of the k-th test micro-batch; the last stage adds its metrics.

        Args:
            ahead: messages that may be under way to each peer.
        """
        with self.doing(f"{self.number} evaluation {k}"):
            values: dict[str, Tensor] = {}
            target: Any = None
            real = 0
            if self.loads:
                inputs, target, real = self.samples("test").evaluation(k)
                values, target = self._named(inputs), self._target(target)
            for c in self._evaluated():
                values[c.spec.name] = self.channels.receive(c, FORWARD)
            self.channels.throttle(ahead)
            with advised(self.prepared, values):
                outputs, result = self.stage.piece.evaluate(values)
            for c in self._evaluated(outgoing=True):
                self.channels.send(c, FORWARD, outputs[c.spec.name])
            if self.is_last:
                size = self.prepared.distribution.evaluation_samples
                if real < size:
                    result = real_part(result, real, size, NO_EVALUATION)
                with forward_context(self.prepared.model.autocast, self.device.type):
                    metrics.add(self.prepared.task, result, target, real)
            self.channels.advance()

    # Data ----------------------------------------------------------------------------------

    @property
    def loads(self) -> bool:
        """Whether this worker takes inputs or targets from data of its own."""
        return self.is_last or bool(self.own_inputs)

    @property
    def parts(self) -> Parts:
        """What this worker needs of a sample; who tells of shapes looks at all of it."""
        varies = self.tells and self.prepared.plan.profile.varying is not UNSET
        needs = [part for part, some in ((INPUTS, self.own_inputs), (TARGET, self.is_last)) if some]
        return ALL if varies else Parts(needs) or ALL

    def load_samples(self) -> None:
        """Load now what data this worker is going to need."""
        if self.loads:
            self.samples("train")
        if self.prepared.settings.evaluate:
            self.samples("test")

    def samples(self, split: Any) -> Samples:
        """The samples of a split, loaded on first use."""
        if split not in self._samples:
            plan, settings = self.prepared.plan, self.prepared.settings
            size = (
                plan.micro_batch
                if split == "train"
                else self.prepared.distribution.evaluation_samples
            )
            self._samples[split] = Samples(
                self.prepared.task,
                split,
                size,
                settings.seed,
                self.prepared.model.arguments,
                plan.mini_batch,
                settings.timeout_s,
                self.parts,
            )
        return self._samples[split]

    def end_loading(self) -> None:
        """End what loads in the background."""
        for samples in self._samples.values():
            samples.close()

    def _own(
        self, segment: Segment, mini_batch: int, micro_batch: int
    ) -> tuple[dict[str, Tensor], Any]:
        if not self.loads:
            return {}, None
        positions = real_samples(segment, mini_batch, micro_batch, self.share.dealt)
        samples = self.samples("train")
        inputs, target = samples.take(segment.epoch, positions, self.share.samples)
        if self.tells and micro_batch == self.share.micro_batches[0]:
            varying = self.prepared.plan.profile.varying
            if varying is not UNSET and varying.beyond([t.shape[1:] for t in inputs]):
                self.larger.append(segment.first + mini_batch)
        return self._named(inputs), self._target(target)

    def _named(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        named = dict(zip(self.prepared.model.inputs, inputs, strict=False))
        return {name: put(named[name], self.device) for name in self.own_inputs}

    def _target(self, target: Any) -> Any:
        return put(target, self.device) if self.is_last else None

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something besides the operations of the schedule, for reports and errors."""
        self.last_op = what
        self.status.begin(what, self.replica.name)
        with self._explained():
            yield

    @contextmanager
    def _explained(self, at: str | None = None) -> Iterator[None]:
        """Turns whatever is raised into an error that says who failed, and at what.

        `at`: an operation, which has been handed in; None: the one at hand.
        """
        try:
            try:
                yield
            except Exception:
                if at is None:
                    self.under_way.blame()
                raise
        except TimeprestError as error:
            if str(error).startswith("stage "):
                raise
            self._check_memory(error)
            who = f"{self.replica.name}, at {at or self.last_op}"
            raise type(error)(f"{who}: {error}") from error
        except BaseException as error:
            # Mostly an operation is given up at a pause since another worker's has failed.
            given_up = isinstance(error, GeneratorExit) and not from_users_code(error)
            if given_up or is_ctrl_c(error):
                raise
            self._check_memory(error)
            who = f"{self.replica.name}, at {at or self.last_op}"
            raise RunError(f"{who}: {describe_error(error)}") from error

    def _check_memory(self, error: BaseException) -> None:
        """Raise RunError where it is memory that isn't there."""
        held = self.stage.account.held(self.channels.held_bytes)
        line = out_of_memory(error, self.prepared.plan, self.replica, self.device, held)
        if line is not None:
            raise RunError(f"{self.replica.name}, at {self.last_op}: {line}") from error
