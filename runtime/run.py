"""Running a plan: in a process for each worker, or inline; the end summary."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

from ..planner.plan import Plan
from ..profiles.errors import FileError, UserError
from .channels import LocalChannels, Mailbox
from .gradient_files import keep_gradients
from .launch import launch
from .observer import Both, MetricsFile, Observer, Silent
from .operation_log import OperationLog, StageMetrics
from .optimizers import check_choice
from .prepare import Prepared, prepare, with_own_weights
from .run_dir import RunDir
from .runner import StageRunner
from .scores import EpochRecord, RunSummary, StageReport
from .settings import RunSettings
from .sums import LocalSums, Pool, sum_groups
from .training import Course


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
    check_settings(settings)
    prepared = prepare(plan, settings)
    where = RunDir(run_dir)
    where.create(plan, settings)
    collector = _Collector(observer or Silent())
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


def check_settings(settings: RunSettings) -> None:
    """Raise UserError for settings that contradict each other."""
    if settings.optimizer is not None:
        check_choice(settings.optimizer)
    if settings.warmup and settings.lr_schedule is None:
        raise UserError("--warmup: goes with an --lr-schedule")


class _Collector:
    """Passes progress on and keeps the epochs' records."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.epochs: list[EpochRecord] = []

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
    mailbox, pool = Mailbox(), Pool(sum_groups(prepared.workers, prepared.tied))
    logs = [
        OperationLog(where.operations(worker)) if prepared.settings.log_operations else None
        for worker in prepared.workers
    ]
    own = [StageMetrics(where.stage_metrics(worker)) for worker in prepared.workers]
    runners = [
        StageRunner(
            with_own_weights(prepared, worker),
            worker.rank,
            LocalChannels(worker.rank, mailbox),
            LocalSums(worker.rank, pool),
            log,
            mine,
        )
        for worker, log, mine in zip(prepared.workers, logs, own, strict=True)
    ]
    for runner in runners:
        keep_gradients(where, runner)
    try:
        metrics = MetricsFile(where.metrics)
    except OSError as error:
        raise FileError(f"{where.metrics}: can't be written: {error.strerror}") from None
    course = Course(runners, Both(metrics, collector), lambda: None, lambda: None)
    try:
        course.run()
    finally:
        for closing in (*logs, *own, metrics):
            if closing is not None:
                closing.close()
    for runner in runners:
        if runner.worker.leads:
            where.save_weights(runner.number, runner.stage.state())
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
        stages=reports,
    )
