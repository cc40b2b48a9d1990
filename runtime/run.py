"""Running a plan: in a process for each worker, or inline; the end summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec
import torch

from ..planner.plan import Plan
from ..profiles.errors import RunError, StoppedError, UserError
from .checkpoint.checkpoint import CheckpointWriter
from .checkpoint.gradients import keep_gradients
from .checkpoint.start import (
    check_logs,
    check_start,
    rewind_logs,
    settings_to_resume,
    telling_worker,
)
from .communication.all_reduce import LocalAllReduce, Pool, reduce_groups
from .communication.channel import LocalChannels, Mailbox
from .prepare.devices import check_kind, device_kind, gpu_count, own_device
from .prepare.prepare import Prepared, prepare, with_own_weights
from .prepare.workers import workers_of
from .processes.launcher import launch
from .processes.locks import alone
from .records.metrics import EpochRecord, RunSummary, StageReport, training_times
from .records.operation_log import StageEpochFile, operation_log, record_named
from .records.progress import Both, MetricsFile, Observer, Silent, read_epochs
from .records.run_dir import RunDir
from .settings import RunSettings
from .stage.optimizer import check_choice, check_updates, warn_of_hooks
from .stage.runner import StageRunner
from .training.loop import Course


def run(
    plan: Plan,
    settings: RunSettings,
    run_dir: str | Path,
    *,
    inline: bool = False,
    observer: Observer | None = None,
) -> RunSummary:
    """Train by the plan and write everything to the run directory.

    Args:
        run_dir: a new directory, or one without a run in it.
        inline: all workers in this process, in simulated order, with the same versions.

    Raises:
        TargetError, TraceError, PlanError, FileError: found before anything starts.
        RunError: training failed; the message says which stage, at which operation and why.
    """
    settings = check_settings(settings)
    check_device(plan, settings)
    observer = observer or Silent()
    prepared = prepare(plan, settings, observer.starting)
    check_updates(prepared)
    if settings.start_from is not None:
        check_start(prepared, Path(settings.start_from))
    where = RunDir(run_dir)
    where.check_new()
    where.make()
    with alone(where.path):
        where.create(plan, settings)
        return _train(prepared, where, observer, inline=inline)


def resume(
    run_dir: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    at: int | None = None,
    inline: bool = False,
    observer: Observer | None = None,
) -> RunSummary:
    """Go on with a run from its newest checkpoint; from its beginning, where it has none yet.

    The summary has the losses and figures of all epochs; what the stages measured of themselves
    is of the part from here on.

    Args:
        changes: of settings that don't change what is trained (`checkpoint.FREE`), by name.
        epochs, steps: in all, where there are to be more than before.
        at: mini-batches done at another checkpoint of the run.

    Raises as `run`; and
        FileError: the directory holds no run, or the checkpoint is broken: the message names the
            file, and the newest checkpoint before it that is whole.
        UserError: the run has ended, or is going on, or its plan or settings have been changed.
    """
    where, observer = RunDir(run_dir), observer or Silent()
    plan, settings = where.read()
    observer.starting("reading the checkpoint")
    settings = msgspec.structs.replace(settings, **(changes or {}))
    settings = settings_to_resume(where, plan, settings, epochs=epochs, steps=steps, at=at)
    check_device(plan, settings)
    check_logs(where, plan, settings, workers_of(plan.stages))
    prepared = prepare(plan, settings, observer.starting)
    check_updates(prepared)
    check_unfinished(prepared, where)
    with alone(where.path):
        where.reopen(settings)
        rewind_logs(where, plan, settings, telling_worker(plan))
        return _train(prepared, where, observer, inline=inline)


def _train(prepared: Prepared, where: RunDir, observer: Observer, *, inline: bool) -> RunSummary:
    """Train, in a run directory that is ready."""
    warn_of_hooks(prepared)
    collector = _Collector(observer, read_epochs(where.metrics))
    collector.begin()
    begin = time.perf_counter()
    if inline:
        reports = _run_inline(prepared, where, collector)
    else:
        launch(where, [worker.label for worker in prepared.workers], collector)
        reports = where.read_reports(prepared.workers)
    seconds = time.perf_counter() - begin
    summary = summarize(prepared, collector.epochs, reports, seconds, inline=inline)
    where.write_summary(summary)
    return summary


def check_settings(settings: RunSettings) -> RunSettings:
    """The same, with paths made absolute. Raises UserError when they contradict each other."""
    if settings.optimizer is not None:
        check_choice(settings.optimizer)
    record_named(settings.record)
    if settings.warmup and settings.lr_schedule is None:
        raise UserError("--warmup: goes with an --lr-schedule")
    if settings.start_from is not None:
        start = Path(settings.start_from).absolute()
        settings = msgspec.structs.replace(settings, start_from=str(start))
    return settings


def check_device(plan: Plan, settings: RunSettings) -> None:
    """Raise UserError where this host can't train on what the run is to be trained on."""
    check_kind(device_kind(plan, settings), settings, gpu_count())


def check_unfinished(prepared: Prepared, where: RunDir) -> None:
    """Raise UserError when a run that is to be resumed has nothing left to do."""
    settings = prepared.settings
    done = settings.resume_at or 0
    # One that was killed after its last checkpoint still has its weights and summary to write.
    if prepared.segments[-1].end <= done and where.summary.exists():
        raise UserError(
            f"{where.path}: this run has ended, after {done} mini-batches"
            + "; for more, give "
            + (f"--steps above {done}" if settings.steps else f"--epochs above {settings.epochs}")
        )


class _Collector:
    """Passes progress on and keeps the epochs' records."""

    def __init__(self, observer: Observer, epochs: list[EpochRecord]) -> None:
        """`epochs`: those done before the run was resumed."""
        self.observer = observer
        self.epochs = epochs

    def starting(self, what: str) -> None:
        """Pass on."""
        self.observer.starting(what)

    def begin(self) -> None:
        """Pass on."""
        self.observer.begin()

    def mini_batch(self, epoch: int, done: int, of: int, loss: float) -> None:
        """Pass on."""
        self.observer.mini_batch(epoch, done, of, loss)

    def epoch(self, record: EpochRecord) -> None:
        """Keep and pass on."""
        self.epochs.append(record)
        self.observer.epoch(record)


def _run_inline(prepared: Prepared, where: RunDir, collector: _Collector) -> list[StageReport]:
    collector.starting("loading the data")
    mailbox, pool = Mailbox(), Pool(reduce_groups(prepared.workers, prepared.model.tied))
    workers, settings = prepared.workers, prepared.settings
    device = own_device(prepared.plan, settings, 0)
    for worker in workers:
        rewind_logs(where, prepared.plan, settings, worker)
    more = settings.resumed
    logs = [operation_log(where, worker, settings) for worker in workers]
    own = [StageEpochFile(where.stage_metrics(worker), more=more) for worker in workers]
    runners = [
        StageRunner(
            with_own_weights(prepared, worker),
            worker.rank,
            LocalChannels(worker.rank, mailbox),
            LocalAllReduce(worker.rank, pool),
            log,
            mine,
            device=device,
        )
        for worker, log, mine in zip(prepared.workers, logs, own, strict=True)
    ]
    for runner in runners:
        keep_gradients(where, runner)
    before = torch.get_rng_state()
    for runner in runners:
        # As in processes, where each has drawn as much before.
        torch.set_rng_state(before)
        runner.load_samples()
    metrics = MetricsFile(where.metrics, more=more)
    told = [metrics if runner.tells else None for runner in runners]
    files = {
        runner.worker.rank: [file for file in mine if file is not None]
        for runner, *mine in zip(runners, logs, own, told, strict=True)
    }
    checkpoints = CheckpointWriter(where, prepared.plan, settings, logs=files)
    try:
        both = Both(metrics, collector)
        course = Course(runners, both, lambda: None, lambda: None, checkpoints)
        course.run()
    finally:
        for of_worker in files.values():
            for file in of_worker:
                file.close()
    for runner in runners:
        if runner.worker.leads:
            where.save_weights(runner.number, runner.state(), runner.tied_names())
    reports = course.reports()
    for runner, report in zip(runners, reports, strict=True):
        where.write_report(runner.worker, report)
    return reports


def summarize(
    prepared: Prepared,
    epochs: list[EpochRecord],
    reports: list[StageReport],
    seconds: float,
    *,
    inline: bool,
) -> RunSummary:
    """Put the stages' figures together."""
    plan = prepared.plan
    mini_batches = sum(segment.mini_batches for segment in prepared.segments)
    samples = sum(segment.samples for segment in prepared.segments)
    # Like the prediction, the measured period is the slowest stage's. Inline, stages take
    # turns in one process: a period there says nothing about the pipeline.
    periods = [] if inline else [median(r.periods_s) for r in reports if r.periods_s]
    trained_s = sum(record.seconds for record in epochs)
    return RunSummary(
        variant=plan.variant,
        mode="inline" if inline else "processes",
        mini_batch=plan.mini_batch,
        micro_batches=plan.micro_batches,
        mini_batches=mini_batches,
        samples_per_s=samples / trained_s if trained_s else 0.0,
        seconds=seconds,
        predicted_period_s=plan.predicted.period_s,
        measured_period_s=max(periods, default=None),
        epochs=epochs,
        stages=[
            msgspec.structs.replace(
                report, idle_share=None if inline else training_times(report.epochs).idle_share
            )
            for report in reports
        ],
    )


# Starting a run again after a failure, from its newest checkpoint -------------------------------

T = TypeVar("T")


def with_restarts(
    first: Callable[[], T], again: Callable[[], T], most: int, tell: Callable[[str], None]
) -> T:
    """Call `first`, and after a failure of the run `again`, `most` times at most.

    Args:
        tell: is told of each failure that is followed by a restart.

    Raises RunError: the last failure. What the user's input is the cause of isn't tried again,
    nor what a signal has stopped.
    """
    attempt = first
    for restart in range(1, most + 1):
        try:
            return attempt()
        except StoppedError:
            raise
        except RunError as error:
            tell(f"{error}; restart {restart} of {most}")
        attempt = again
    return attempt()
