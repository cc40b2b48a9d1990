"""The training loop: segments of an epoch, each drained; evaluation and checkpoints.

The same loop is run by a worker in its own process (`worker`) and by all workers in one
(`train`).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ...profiles.autograd.dropout import WithoutDropout
from ..checkpoint.checkpoint import Agree, CheckpointWriter
from ..checkpoint.start import restore_worker
from ..prepare.data import Segment
from ..prepare.devices import peak_bytes, random_state, set_random_state
from ..records.metrics import EpochSums, EvaluationRecord, SegmentMetrics
from ..records.progress import Observer
from ..stage.runner import StageRunner
from .evaluation import evaluate
from .operation_loop import OperationLoop
from .runners import beside
from .same_data import compare_lengths, compare_training


class Course:
    """Takes the runners of this process, a worker's or all, through the whole training.

    Attributes:
        sums: of each runner's epoch so far.
        done: mini-batches.
        periods_s: of each runner, one for each segment that has a period.
    """

    def __init__(
        self,
        runners: Sequence[StageRunner],
        observer: Observer,
        agree: Agree = bool,
        replicas_agree: Agree = bool,
        checkpoints: CheckpointWriter | None = None,
    ) -> None:
        """
        Args:
            agree: whether all workers say yes, waited for; `replicas_agree`: the other replicas of
                this process's stages; by default, this process has all of them.
            checkpoints: writes those that the segments ask for; None: there are none.

        Raises FileError when the run starts from a checkpoint or weights that can't be used.
        """
        self.runners = runners
        self.prepared = runners[0].prepared
        self.observer = observer
        self.periods_s = [array("d") for _ in runners]
        self.sums = [EpochSums() for _ in runners]
        self.done = 0
        self._checkpoints = checkpoints
        self._agree = agree
        self._replicas_agree = replicas_agree
        self._figures = StepFigures()
        self._beside = beside(runners)
        self._operations = OperationLoop(runners)
        if checkpoints is not None:
            settings, random = self.prepared.settings, self._operations.random
            self.done = settings.resume_at or 0
            for position, runner in enumerate(runners):
                found = restore_worker(checkpoints.where, settings, runner)
                if found is not None:
                    random[position], self.sums[position] = found
            if len(runners) == 1:
                set_random_state(random[0], runners[0].device)
            checkpoints.begin([runner.stage for runner in runners])
        for runner in runners:
            if runner.replica.is_reporter:
                runner.on_mini_batch = partial(self._report, runner)

    def run(self) -> None:
        """Train all segments and evaluate after each epoch; fewer, where the observer says so."""
        try:
            with ExitStack() as stack:
                if not self.prepared.settings.dropout:
                    stack.enter_context(WithoutDropout())
                if self._operations.numbers is not None:
                    stack.enter_context(self._operations.numbers)
                self._run()
        finally:
            for runner in self.runners:
                runner.data.close()

    def _run(self) -> None:
        compare_lengths(self.runners)
        compared: int | None = None
        # Before the other segments, all wait for each other to hear whether to go on.
        self._agree(True)
        for segment in self.prepared.segments:
            if segment.first < self.done:
                continue
            if segment.epoch != compared:
                compare_training(self.runners, segment)
                compared = segment.epoch
            self._operations.train(segment, self.sums)
            for position, (runner, sums) in enumerate(zip(self.runners, self.sums, strict=True)):
                found = runner.notes.metrics
                period_s = found.period_s(segment)
                if period_s is not None:
                    self.periods_s[position].append(period_s)
                beside = [other.notes.metrics for other in self._beside[position]]
                sums.add(segment, found, runner.stage.meter.seen, beside)
            test: dict[str, float] | None = None
            if not segment.rest:
                self._end_epoch(segment)
            elif segment.evaluation:
                test = evaluate(self.runners, self._replicas_agree)
                for runner, sums in zip(self.runners, self.sums, strict=True):
                    if runner.replica.is_reporter:
                        record = EvaluationRecord(
                            epoch=segment.epoch,
                            mini_batches=segment.offset + segment.mini_batches,
                            seconds=sums.wall_s,
                            test=test,
                        )
                        self.observer.evaluation(record)
            self.done = segment.end
            if segment.checkpoint:
                self._write_checkpoint(segment)
            going = self._drained(segment)
            if segment is not self.prepared.segments[-1] and not self._agree(going):
                self._end_early(segment, test)
                break

    def _drained(self, segment: Segment, *, checkpoint: bool = False) -> bool:
        """Tell of a segment's end, or of a checkpoint after it. Returns whether to go on."""
        if not any(runner.replica.is_reporter for runner in self.runners):
            return True
        written = self._checkpoints is not None and (segment.checkpoint or checkpoint)
        return self.observer.drained(segment.end, checkpoint=written)

    def _end_early(self, segment: Segment, test: dict[str, float] | None) -> None:
        """End the run after this segment as after its last: checkpoint, evaluation, record."""
        if not segment.checkpoint and self.prepared.settings.checkpoint_every != 0:
            # Before the epoch's figures are closed: a run that is resumed goes on with them.
            self._write_checkpoint(segment)
            self._drained(segment, checkpoint=True)
        if segment.rest:
            self._end_epoch(replace(segment, rest=0), test)

    def _end_epoch(self, segment: Segment, test: dict[str, float] | None = None) -> None:
        """Evaluate, where that hasn't been done, and tell of the epoch that this segment ends."""
        if test is None:
            evaluates = self.prepared.settings.evaluate
            test = evaluate(self.runners, self._replicas_agree) if evaluates else {}
        for position, runner in enumerate(self.runners):
            sums, self.sums[position] = self.sums[position], EpochSums()
            if runner.epoch_file is not None:
                runner.epoch_file.epoch(sums.stage_epoch(segment.epoch))
            if runner.replica.is_reporter:
                self.observer.epoch(sums.record(segment, test, runner.stage.updates.lr))

    def _write_checkpoint(self, segment: Segment) -> None:
        if self._checkpoints is None:
            return
        random = self._operations.random
        if len(self.runners) == 1:
            random[0] = random_state(self.runners[0].device)
        together = zip(self.runners, random, self.sums, strict=True)
        self._checkpoints.write(segment, list(together))

    def _report(self, runner: StageRunner, segment: Segment, mini_batch: int, loss: float) -> None:
        done = segment.offset + mini_batch + 1
        logs = self.prepared.settings.log
        figures = self._figures(runner, segment, mini_batch) if logs else {}
        of = segment.offset + segment.mini_batches + segment.rest
        self.observer.mini_batch(segment.epoch, done, of, loss, figures)


class StepFigures:
    """Makes figures for dashboards (--log), of one mini-batch after the other of a runner."""

    def __init__(self) -> None:
        self._metrics: SegmentMetrics | None = None
        self._loading_s = 0.0

    def __call__(self, runner: StageRunner, segment: Segment, mini_batch: int) -> dict[str, float]:
        """What is known of a mini-batch whose update is done.

        - ``seconds``: of its update, since the one before it in the segment, or since that began;
          of an update after several mini-batches, shared out among them.
        - ``samples``; ``counted``: what counts in its loss, where the task says (tokens, say).
        - ``flops``: of its forwards and backwards, which take twice as many; what is computed again
          doesn't count (PaLM, 2204.02311, appendix B). Where they are known.
        - ``lr``: of the last stage's first parameter group.
        - ``gradient_norm``: of the whole model before clipping, where that is computed anyway.
        - ``memory_bytes``: most that the worker has held so far; of its GPU, all tensors.
        - ``loading_s``: for which the worker has waited for data since the last one.

        Args:
            mini_batch: in the segment.
        """
        metrics, updated = runner.notes.metrics, runner.updated
        together = segment.together(mini_batch)
        found = {
            "seconds": metrics.step_s / together,
            "samples": float(segment.samples_of(mini_batch)),
        }
        if runner.prepared.flops_per_sample is not None:
            found["flops"] = 3 * runner.prepared.flops_per_sample * found["samples"]
        if runner.prepared.model.loss.weighted:
            found["counted"] = metrics.counted
        if updated.lr is not None:
            found["lr"] = updated.lr
        if updated.gradient_norm is not None:
            found["gradient_norm"] = updated.gradient_norm
        on_device, peak = peak_bytes(runner.device), updated.peak
        if on_device is not None or peak is not None:
            found["memory_bytes"] = float(on_device or (peak.total if peak else 0))
        found["loading_s"] = metrics.loading_s
        if metrics is self._metrics:
            found["loading_s"] -= self._loading_s
        self._metrics, self._loading_s = metrics, metrics.loading_s
        return found
