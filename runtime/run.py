"""Running a plan: workers in processes of this machine, inline, or started by torchrun or srun."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import msgspec
import torch

from .. import __version__
from ..planner.plan import Plan
from ..profiles.errors import TaskWarning
from ..profiles.measuring.process_settings import keep_freed_memory
from ..profiles.tasks.objects import as_bytes
from .checkpoint.start import (
    check_logs,
    check_rates,
    check_settings,
    check_start,
    check_unfinished,
    left_out,
    noted_sizes,
    rewind_logs,
    settings_to_resume,
    source,
)
from .checkpoint.trial import try_kept
from .prepare.devices import device_kind, devices_here
from .prepare.prepare import Prepared, prepare
from .prepare.workers import workers_of
from .processes.environment import use_interface
from .processes.launcher import launch
from .processes.locks import alone, as_worker
from .processes.rendezvous import Rendezvous
from .processes.start import WORKER, load_ahead, slow_libraries
from .records.callbacks import ToldBefore
from .records.events import EvaluationDone, RunBegun, Stop
from .records.metric_logs import check_logs_at_hand
from .records.metrics import RunSummary, StageReport, decode, summarize
from .records.progress import Observer, read_epochs
from .records.run_dir import RunDir
from .settings import RunSettings, changed, without_effect
from .stage.optimizer import hook_warnings
from .training.inline import run_inline
from .training.worker import status_for, train_worker
from .weights.delays import check_delays


def run(
    plan: Plan,
    settings: RunSettings,
    run_dir: str | Path,
    *,
    inline: bool = False,
    observer: Observer | None = None,
    rendezvous: Rendezvous | None = None,
) -> RunSummary:
    """Train by the plan and write everything to the run directory.

    Args:
        run_dir: a new directory, or one without a run in it. Hosts may share it.
        inline: all workers in this process, in simulated order, with the same versions.
        rendezvous: of the workers, where torchrun or srun has started this process as one.

    Returns:
        The summary. Of hosts that don't share the directory, that of the last stage alone has
        the epochs' records in it.

    Raises:
        TargetError, TraceError, PlanError, FileError: found before anything starts.
        RunError: training failed; the message says which stage, at which operation and why.
        PeerError: another worker is gone or stuck, where this process is one.
    """
    where = RunDir(Path(run_dir).absolute())
    settings = check_settings(settings)
    check_delays(plan, settings)
    where.check_new()
    if settings.start_from is not None:
        found = source(Path(settings.start_from))
        if found is not None:
            # A run that is going on writes newer ones, and all workers must start from the same.
            settings = msgspec.structs.replace(settings, start_from=str(found.path))
    return _run(where, plan, settings, observer or Observer(), rendezvous, inline=inline)


def resume(
    run_dir: str | Path,
    changes: Mapping[str, Any] | None = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    at: int | None = None,
    inline: bool = False,
    observer: Observer | None = None,
    rendezvous: Rendezvous | None = None,
) -> RunSummary:
    """Go on with a run from its newest checkpoint; from its beginning, where it has none yet.

    The summary has the losses and figures of all epochs, and what the stages measured of
    themselves. Under torchrun or srun the checkpoint is the newest one that this
    host has, which must be everybody's.

    Args:
        changes: of settings that a resumed run may have otherwise (`ADJUSTABLE`), by name.
        epochs, steps: in all, where there are to be more than before.
        at: mini-batches done at another checkpoint of the run.

    Returns and raises as `run`; and
        FileError: the directory holds no run, or the checkpoint is broken: the message names the
            file, and the newest checkpoint before it that is whole.
        UserError: the run has ended, or is going on, its plan or settings have been changed, or
            a change can't be.
    """
    where = RunDir(Path(run_dir).absolute())
    plan, settings = where.read()
    observer = observer or Observer()
    if rendezvous is None:
        # One that is going on writes checkpoints, and removes them.
        with alone(where.path):
            observer.starting("reading the checkpoint")
    settings = check_settings(changed(settings, changes or {}))
    settings = settings_to_resume(where, plan, settings, epochs=epochs, steps=steps, at=at)
    return _run(where, plan, settings, observer, rendezvous, inline=inline)


def _run(
    where: RunDir,
    plan: Plan,
    settings: RunSettings,
    observer: Observer,
    rendezvous: Rendezvous | None,
    *,
    inline: bool,
) -> RunSummary:
    """Check whatever can be checked before training, get the directory ready, and train."""
    here, folder = workers_of(plan), os.getcwd()
    if rendezvous is not None:
        here = here[rendezvous.rank : rendezvous.rank + 1]
        keep_freed_memory()
        use_interface(rendezvous.launched)
        rendezvous.check_same(_versions(plan, settings))
    reports = any(worker.is_reporter for worker in here)
    observer = observer if reports else Observer()
    devices_here(plan, settings)
    if rendezvous is None and not inline:
        load_ahead(WORKER, _libraries(plan, settings))
    if reports:
        check_logs_at_hand(settings)
    if settings.resumed:
        check_logs(where, settings, [replica for worker in here for replica in worker.replicas])
    prepared, lines = _prepared(where, plan, settings, observer)
    _warn(lines if reports else ())
    if rendezvous is not None:
        rendezvous.gather("ready")
    where.make()
    with _lock(where, rendezvous):
        if settings.resumed:
            _warn(_lost(where, settings) if reports else ())
            where.reopen(settings)
        elif here[0].rank == 0:
            where.check_new()
            where.join(plan, settings)
        if rendezvous is not None:
            rendezvous.gather("directory")
            # Each host may have one of its own.
            where.join(plan, settings)
        if reports:
            _warn(hook_warnings(prepared))
            _warn(_cautions(prepared, rendezvous, inline=inline))
            observer.begin(_begun(prepared, where))
        begin = time.perf_counter()
        if rendezvous is None and not inline:
            # Workers begin where this process has begun, whatever the task's code did here.
            os.chdir(folder)
        found = _train(prepared, where, observer, rendezvous, inline=inline)
        seconds, epochs = time.perf_counter() - begin, read_epochs(where.metrics)
        trained = sum(record.mini_batches for record in epochs)
        stop: Stop | None = getattr(observer, "stop", None)
        whole_run = stop is None or trained == prepared.segments[-1].end
        stopped = None if stop is None or whole_run else stop.why
        done = [s for s in prepared.segments if stopped is None or s.end <= trained]
        at = settings.resume_at or 0
        summary = summarize(plan, done, epochs, found, seconds, at, inline=inline, stopped=stopped)
        if reports:
            where.write_summary(summary)
        return summary


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        warnings.warn(line, TaskWarning, stacklevel=3)


def _prepared(
    where: RunDir, plan: Plan, settings: RunSettings, observer: Observer
) -> tuple[Prepared, list[str]]:
    """The run made ready, and lines to warn of. Raises for what makes it impossible."""
    prepared = prepare(plan, settings, observer.starting)
    lines = try_kept(prepared)
    if settings.resumed:
        check_unfinished(prepared, where)
        lines += check_rates(prepared, where)
    if settings.start_from is not None and not settings.resume_at:
        lines += check_start(prepared, Path(settings.start_from))
    return prepared, lines


def _lost(where: RunDir, settings: RunSettings) -> Iterator[str]:
    """Lines on what a run that is resumed doesn't keep."""
    if later := where.checkpoints.later(settings):
        yield (
            f"{where.path}: the run goes on after mini-batch {settings.resume_at}; later "
            f"checkpoints are removed: {', '.join(map(str, later))}"
        )
    if names := left_out(where, settings):
        yield (
            f"{shorten(', '.join(names), 300, placeholder=' …')}: changed in training and "
            "begins anew: checkpoints have what the model, the optimizer and the scheduler "
            "keep as their state alone (docs/checkpoints.md)"
        )


def _cautions(prepared: Prepared, rendezvous: Rendezvous | None, *, inline: bool) -> Iterator[str]:
    """Lines on what may be otherwise than was meant, when training begins."""
    if prepared.model.loss.apart:
        yield prepared.model.loss.apart
    if rendezvous is not None and rendezvous.open_to_all:
        yield rendezvous.open_to_all
    settings, model = prepared.settings, prepared.model
    yield from without_effect(settings, prepared.plan, prepared.length.steps, inline=inline)
    if settings.deferred_batch_norm and not model.has_statistics:
        yield (
            "--deferred-batch-norm: does nothing in this model, which has no running statistics "
            "(BatchNorm)"
        )


def _begun(prepared: Prepared, where: RunDir) -> RunBegun:
    """What observers are told when training begins, where one reports. Raises FileError."""
    settings, last = prepared.settings, prepared.segments[-1]
    reporter = next(replica for replica in prepared.replicas if replica.is_reporter)
    # What came after the checkpoint is cut off, and may be damaged.
    size = noted_sizes(where, settings, reporter).get(where.metrics.name, 0)
    told = ToldBefore(where.metrics, size, last.whole_epoch)
    return RunBegun(
        plan=prepared.plan,
        settings=settings,
        run_dir=where.path,
        mini_batches=last.end,
        epoch_mini_batches=last.whole_epoch,
        resumed_at=settings.resume_at or 0,
        before=tuple(event for event in told if isinstance(event, EvaluationDone)),
        told_before=told,
    )


def _train(
    prepared: Prepared,
    where: RunDir,
    observer: Observer,
    rendezvous: Rendezvous | None,
    *,
    inline: bool,
) -> list[StageReport]:
    """Train, in a run directory that is ready. Returns the reports of all replicas, by number."""
    settings, workers = prepared.settings, prepared.workers
    if rendezvous is not None:
        status = status_for(where, workers[rendezvous.rank], settings, rendezvous)
        reports = train_worker(prepared, where, rendezvous, status, observer)
        found = rendezvous.gather("reports", msgspec.json.encode(reports))
        every = [report for text in found for report in decode(text, list[StageReport])]
        return sorted(every, key=lambda report: (report.stage, report.replica))
    if inline:
        return run_inline(prepared, where, observer)
    # What is told of progress is read from its end on.
    for replica in prepared.replicas:
        if replica.is_reporter:
            rewind_logs(where, settings, replica)
    labels = [worker.label for worker in workers]
    libraries = _libraries(prepared.plan, settings)
    launch(where, labels, observer, as_bytes(settings.task), libraries)
    return where.read_reports(prepared.replicas)


def _libraries(plan: Plan, settings: RunSettings) -> Sequence[str]:
    """Libraries of this process that all workers will load, where they are loaded once for all."""
    # A GPU's driver, which some of them look for, can't be forked.
    return slow_libraries() if device_kind(plan, settings) == "cpu" else ()


@contextmanager
def _lock(where: RunDir, rendezvous: Rendezvous | None) -> Iterator[None]:
    """Have the directory for this run; of workers that share it, the first holds its lock."""
    if rendezvous is None:
        with alone(where.path):
            yield
        return
    with alone(where.path, rendezvous.share("lock", uuid.uuid4().hex)):
        rendezvous.gather("locked")
        with as_worker(where.path):
            yield


def _versions(plan: Plan, settings: RunSettings) -> dict[str, str]:
    """What must be the same on all hosts, by its name in messages."""
    return {
        "plan": _digest(plan),
        "checkpoint": str(settings.resume_at),
        "settings": _digest(settings),
        "version of timeprest": __version__,
        "version of torch": torch.__version__,
    }


def _digest(value: msgspec.Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
