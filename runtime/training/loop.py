"""The training loop: segments of an epoch, each drained; evaluation, checkpoints, reports.

The same loop is run by a worker in its own process (`worker`) and by all workers in one
(`inline`).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from ...planner.costs.memory import MemoryByKind
from ...planner.schedules.schedules import make_schedule
from ...planner.simulator.timeline import updates_last, whole_sequence
from ...planner.systems.operations import FORWARD, UPDATE, Op, Schedule
from ...profiles.autograd.dropout import WithoutDropout
from ...profiles.autograd.random_numbers import SameNumbers, same_numbers
from ...profiles.errors import FileError, RunError
from ...profiles.tasks.optimizers import for_use
from ..checkpoint.checkpoint import Agree, CheckpointWriter
from ..checkpoint.gradients import GradientFiles
from ..checkpoint.start import restore_worker, rewind_logs
from ..communication.all_reduce import AllReducer
from ..communication.channel import Channels
from ..communication.posts import Post, Posts, Sequenced, posts
from ..prepare.data import Segment, real_samples
from ..prepare.devices import peak_bytes, random_kept, random_state, set_random_state, used_bytes
from ..prepare.messages import MessageSeries
from ..prepare.prepare import Prepared
from ..prepare.workers import Replica
from ..records.metrics import (
    EpochSums,
    EvaluationMetrics,
    EvaluationRecord,
    StageEpoch,
    StageReport,
    summed_counts,
    training_times,
    worker_epochs,
)
from ..records.operation_log import StageEpochFile, operation_log, read_stage_epochs
from ..records.progress import MetricsFile, Observer
from ..records.run_dir import RunDir, save_tensors
from ..stage.memory import out_of_memory
from ..stage.runner import StageRunner
from .dashboard_figures import StepFigures
from .same_data import compare_evaluation, compare_lengths, compare_training

EVALUATION_AHEAD = 8
"""Messages that a worker of one stage may have under way to each peer while it evaluates."""


def stage_runner(
    where: RunDir,
    prepared: Prepared,
    replica: Replica,
    channels: Channels,
    all_reduce: AllReducer,
    device: torch.device,
) -> StageRunner:
    """A replica's runner. Its logs go on where they were at the checkpoint.

    Raises FileError; RunError where there isn't memory for its weights.
    """
    settings = prepared.settings
    rewind_logs(where, settings, replica)
    log = operation_log(where, replica, settings)
    own = StageEpochFile(where.stage_metrics(replica), more=settings.resumed)
    try:
        return StageRunner(prepared, replica.number, channels, all_reduce, log, own, device=device)
    except (RuntimeError, MemoryError) as error:
        line = out_of_memory(error, prepared.plan, replica, device)
        if line is None:
            raise
        raise RunError(f"{replica.name}, at the start: {line}") from error


def load_samples(runners: Sequence[StageRunner]) -> None:
    """Have the runners of this process know those of the same worker (`introduce`), and load what
    data they need."""
    introduce(runners)
    before = torch.get_rng_state()
    for runner in runners:
        # As in processes of their own, where each has drawn as much before.
        torch.set_rng_state(before)
        runner.data.load()


def introduce(runners: Sequence[StageRunner]) -> None:
    """Have runners know those of the same worker, before anything is run."""
    for runner, others in zip(runners, _beside(runners), strict=True):
        if others:
            runner.stand_beside(others)


def _beside(runners: Sequence[StageRunner]) -> list[list[StageRunner]]:
    """For each runner, the others of its worker."""
    return [
        [r for r in runners if r is not runner and r.replica.rank == runner.replica.rank]
        for runner in runners
    ]


def train(
    where: RunDir,
    runners: Sequence[StageRunner],
    observer: Observer,
    agree: Agree = bool,
    replicas_agree: Agree = bool,
) -> list[StageReport]:
    """Take the runners of this process through the whole training, and write what they leave.

    Args:
        observer: is told of progress, where one of them is the one that reports.
        agree: whether all workers say yes, waited for; `replicas_agree`: the other replicas of this
            process's stages; by default, this process has all of them.
    """
    prepared = runners[0].prepared
    more = prepared.settings.resumed
    reporting = any(runner.replica.is_reporter for runner in runners)
    metrics = MetricsFile(where.metrics, observer, more=more) if reporting else None
    files = {}
    for runner in runners:
        if prepared.settings.keep_gradients and runner.replica.leads:
            GradientFiles(
                where.gradients(runner.number),
                runner.stage.piece.module,
                runner.stage.updates.optimizer,
                prepared.model.names,
            )
        written = (
            runner.notes.log,
            runner.epoch_file,
            metrics if runner.replica.is_reporter else None,
        )
        files[runner.replica.number] = [file for file in written if file is not None]
    checkpoints = CheckpointWriter(where, prepared.plan, prepared.settings, agree, files)
    try:
        told = metrics or Observer()
        course = Course(runners, told, agree, replicas_agree, checkpoints)
        course.run()
    except BaseException:
        for file in chain(*files.values()):
            # Why the run failed is known, and mustn't be hidden by a second error of a full disk.
            with suppress(FileError):
                file.close()
        raise
    for file in chain(*files.values()):
        file.close()
    reports = course.reports()
    for runner, report in zip(runners, reports, strict=True):
        if runner.replica.leads:
            with for_use(runner.stage.updates.optimizer):
                own = where.weights(runner.number)
                save_tensors(own, runner.state(), runner.tied_names())
        where.write_report(runner.replica, report)
    return reports


class Course:
    """Takes the runners of this process, a worker's or all, through the whole training."""

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
            agree, replicas_agree: as of `train`.
            checkpoints: writes those that the segments ask for; None: there are none.

        Raises FileError when the run starts from a checkpoint or weights that can't be used.
        """
        self.runners = runners
        self.prepared = runners[0].prepared
        self.observer = observer
        self._periods_s = [array("d") for _ in runners]
        # Of runs that write them down, they are read at the end: there may be many.
        self._stage_epochs: list[list[StageEpoch]] = [[] for _ in runners]
        self.sums = [EpochSums() for _ in runners]
        self.done = 0
        self._checkpoints = checkpoints
        self._agree = agree
        self._replicas_agree = replicas_agree
        self._orders: dict[int, Schedule] = {}
        self._posts: dict[tuple[int, int], Sequence[Post]] = {}
        replicas, shares = self.prepared.replicas, self.prepared.distribution.shares
        self._posted = partial(posts, replicas=replicas, shares=shares)
        self._figures = StepFigures()
        # Every worker draws from a random stream of its own, inline as in processes.
        self._random: list[torch.Tensor] = []
        self._beside = _beside(runners)
        self._numbers = same_numbers(self.prepared.random, self.prepared.settings.seed)
        stages = len(self.prepared.plan.stages)
        for runner in runners:
            stream = runner.number + runner.replica.index * stages
            torch.manual_seed(self.prepared.settings.seed * 1_000_003 + stream)
            self._random.append(random_state(runner.device))
        if checkpoints is not None:
            settings = self.prepared.settings
            self.done = settings.resume_at or 0
            for position, runner in enumerate(runners):
                found = restore_worker(checkpoints.where, settings, runner)
                if found is not None:
                    self._random[position], self.sums[position] = found
            if len(runners) == 1:
                set_random_state(self._random[0], runners[0].device)
            checkpoints.begin([runner.stage for runner in runners])
        for runner in runners:
            if runner.replica.is_reporter:
                runner.on_mini_batch = self._report

    def run(self) -> None:
        """Train all segments and evaluate after each epoch; fewer, where the observer says so."""
        try:
            with ExitStack() as stack:
                if not self.prepared.settings.dropout:
                    stack.enter_context(WithoutDropout())
                if self._numbers is not None:
                    stack.enter_context(self._numbers)
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
            self._train(segment)
            for position, (runner, sums) in enumerate(zip(self.runners, self.sums, strict=True)):
                found = runner.notes.metrics
                period_s = found.period_s(segment)
                if period_s is not None:
                    self._periods_s[position].append(period_s)
                beside = [other.notes.metrics for other in self._beside[position]]
                sums.add(segment, found, runner.stage.meter.seen, beside)
            test: dict[str, float] | None = None
            if not segment.rest:
                self._end_epoch(segment)
            elif segment.evaluation:
                test = self._evaluate()
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
            test = self._evaluate() if self.prepared.settings.evaluate else {}
        for position, runner in enumerate(self.runners):
            sums, self.sums[position] = self.sums[position], EpochSums()
            seen = sums.stage_epoch(segment.epoch)
            if runner.epoch_file is None:
                self._stage_epochs[position].append(seen)
            else:
                runner.epoch_file.epoch(seen)
            if runner.replica.is_reporter:
                self.observer.epoch(sums.record(segment, test, runner.stage.updates.lr))

    def _write_checkpoint(self, segment: Segment) -> None:
        if self._checkpoints is None:
            return
        if len(self.runners) == 1:
            self._random[0] = random_state(self.runners[0].device)
        together = zip(self.runners, self._random, self.sums, strict=True)
        self._checkpoints.write(segment, list(together))

    def _train(self, segment: Segment) -> None:
        if segment.mini_batches not in self._orders:
            self._orders[segment.mini_batches] = make_schedule(
                self.prepared.pipeline, segment.mini_batches
            )
        order = self._orders[segment.mini_batches]
        for runner, sums in zip(self.runners, self.sums, strict=True):
            runner.begin(segment, order)
            sums.begin(runner.notes.metrics)
        series = [runner.messages.series(segment.mini_batches) for runner in self.runners]

        def posted(rank: int) -> Sequence[Post]:
            key = rank, segment.mini_batches
            if key not in self._posts:
                sequence = whole_sequence(self.prepared.pipeline, order)
                routes = self.prepared.distribution.routes
                self._posts[key] = self._posted(rank, sequence, routes=routes)
            return self._posts[key]

        self._announce(series, posted)
        if len(self.runners) == 1:
            runner = self.runners[0]
            with self._stream(0):
                for op in order[runner.number]:
                    for _ in _steps(runner, op, self._numbers):
                        pass
        else:
            self._take_turns(order)
        for runner in self.runners:
            runner.notes.finish()

    def _announce(self, series: Sequence[Sequence[MessageSeries]], posted: Posts) -> None:
        """Tell each worker's channels of all messages to come. `series`: of each runner."""
        by_rank: dict[int, list[MessageSeries]] = {}
        for runner, mine in zip(self.runners, series, strict=True):
            by_rank.setdefault(runner.replica.rank, []).extend(mine)
        for runner in self.runners:
            coming = by_rank.pop(runner.replica.rank, None)
            if coming is not None:
                runner.channels.open(coming, posted)

    def _sequence(self, order: Schedule) -> Sequenced:
        """The operations of this process with their stages: of its worker, or in simulated
        sequence of all workers."""
        pipeline, first = self.prepared.pipeline, self.runners[0].replica
        if any(runner.replica.rank != first.rank for runner in self.runners):
            return whole_sequence(pipeline, order)
        device = pipeline.placement[first.stage] if pipeline.placement else first.stage
        return updates_last(pipeline, order.on_devices()[device])

    def _take_turns(self, order: Schedule) -> None:
        updates: list[tuple[int, Iterator[None]]] = []
        for s, op in self._sequence(order):
            if op.kind != UPDATE:
                self._advance(updates)
                updates = []
            for position, runner in enumerate(self.runners):
                if runner.number == s:
                    updates.append((position, _steps(runner, op, self._numbers)))
            if op.kind != UPDATE:
                self._advance(updates)
                updates = []
        self._advance(updates)

    def _advance(self, running: Sequence[tuple[int, Iterator[None]]]) -> None:
        """Lead operations to their ends, from pause to pause in turn."""
        while running:
            paused = []
            for position, steps in running:
                with self._stream(position):
                    for _ in steps:
                        paused.append((position, steps))
                        break
            running = paused

    def _evaluate(self) -> dict[str, float]:
        """A stage's replica 0 evaluates; the others wait for it.

        Where workers have several stages, each stage is a micro-batch behind the one before it, so
        that all of them compute at once. What evaluating draws at random leaves training as it is.
        """
        with random_kept(self.runners[0].device), ExitStack() as stack:
            for runner in self.runners:
                if runner.replica.leads:
                    stack.enter_context(for_use(runner.stage.updates.optimizer))
                    stack.enter_context(runner.stage.piece.evaluating())
            return self._evaluate_all()

    def _evaluate_all(self) -> dict[str, float]:
        metrics = EvaluationMetrics()
        evaluating = [runner for runner in self.runners if runner.replica.leads]
        routes = self.prepared.distribution.evaluation_routes
        series = []
        for runner in self.runners:
            with runner.notes.doing(f"{runner.number} evaluation"):
                series.append(runner.messages.evaluation_series(runner.data.evaluations))
        count, ahead = self.runners[0].data.evaluations, EVALUATION_AHEAD
        steps = self._evaluations(count)
        sequence = [at for step in steps for at in step]
        self._announce(series, lambda rank: self._posted(rank, sequence, routes=routes))
        compare_evaluation(self.runners)
        if self.prepared.pipeline.placement:
            # Nobody waits for room for what is taken so many steps later.
            ahead = max(ahead, sum(1 + c.target.stage - c.source.stage for c in routes))
        for k, step in enumerate(steps):
            for s, op in step:
                for runner in evaluating:
                    if runner.number == s:
                        runner.evaluate(op.mini_batch, metrics, ahead)
            if not k % EVALUATION_AHEAD:
                # So that nobody's wait is as long as the whole evaluation.
                self._replicas_agree(True)
        for runner in self.runners:
            runner.notes.finish()
        return metrics.figures(self.prepared.task) if metrics.samples else {}

    def _evaluations(self, count: int) -> list[list[tuple[int, Op]]]:
        """Step by step, which micro-batch each stage evaluates."""
        stages = range(len(self.prepared.plan.stages))
        behind = stages if self.prepared.pipeline.placement else [0 for _ in stages]
        return [
            [(s, Op(FORWARD, k - behind[s], 0)) for s in stages if 0 <= k - behind[s] < count]
            for k in range(count + behind[-1])
        ]

    @contextmanager
    def _stream(self, position: int) -> Iterator[None]:
        if len(self.runners) == 1:
            yield
            return
        device = self.runners[position].device
        set_random_state(self._random[position], device)
        yield
        self._random[position] = random_state(device)

    def _report(self, segment: Segment, mini_batch: int, loss: float) -> None:
        done = segment.offset + mini_batch + 1
        figures: dict[str, float] = {}
        if self.prepared.settings.log:
            (reporter,) = (runner for runner in self.runners if runner.replica.is_reporter)
            figures = self._figures(reporter, segment, mini_batch)
        of = segment.offset + segment.mini_batches + segment.rest
        self.observer.mini_batch(segment.epoch, done, of, loss, figures)

    def reports(self) -> list[StageReport]:
        """What each runner of this process measured. Raises FileError."""
        every = [
            own if runner.epoch_file is None else list(read_stage_epochs(runner.epoch_file.path))
            for runner, own in zip(self.runners, self._stage_epochs, strict=True)
        ]
        # Only where one can train is it there; reports of runs are read elsewhere, too.
        import resource

        rss_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = []
        for runner, periods_s, epochs in zip(self.runners, self._periods_s, every, strict=True):
            times = training_times(epochs)
            rank = runner.replica.rank
            of_rank = zip(self.runners, every, strict=True)
            together = worker_epochs([each for r, each in of_rank if r.replica.rank == rank])
            found.append(
                StageReport(
                    stage=runner.number,
                    replica=runner.replica.index,
                    worker=rank,
                    compute_s=times.compute_s,
                    communication_s=times.communication_s,
                    idle_s=times.idle_s,
                    loading_s=times.loading_s,
                    wall_s=training_times(together).wall_s,
                    sent_bytes=runner.messages.sent_bytes,
                    periods_s=list(periods_s),
                    peak=self._peak(rank),
                    rss_peak_bytes=rss_peak * (1 if sys.platform == "darwin" else 1024),
                    device=str(runner.device),
                    transport=runner.messages.transport,
                    not_by_ipc=runner.messages.not_by_ipc,
                    device_peak_bytes=peak_bytes(runner.device),
                    device_used_bytes=used_bytes(runner.device),
                    versions_held=runner.stage.account.most_versions,
                    version_differences=summed_counts(e.version_differences for e in epochs),
                    weight_distance=max((e.weight_distance for e in epochs), default=0.0),
                    not_finite=runner.gradients.not_finite.mini_batches,
                    beyond_profile=runner.data.beyond_profile,
                    not_compiled=runner.stage.piece.compute.why_not,
                    graphs=runner.stage.graphs.line,
                    epochs=epochs,
                )
            )
        return found

    def _peak(self, rank: int) -> MemoryByKind | None:
        """The most that a worker held, at moments of any of its stages."""
        peaks = [r.stage.account.peak for r in self.runners if r.replica.rank == rank]
        return max((p for p in peaks if p is not None), key=lambda peak: peak.total, default=None)


def _steps(runner: StageRunner, op: Op, numbers: SameNumbers | None) -> Iterator[None]:
    """An operation of a runner, with the same random numbers as everywhere where that is asked
    for."""
    segment = runner.segment
    if numbers is not None and segment is not None and op.micro_batch is not None:
        dealt = runner.stage.share.dealt
        samples = real_samples(segment, op.mini_batch, op.micro_batch, dealt)
        if op.kind == FORWARD:
            numbers.begin(runner.number, (segment.first + op.mini_batch,), samples)
    yield from runner.steps(op)
