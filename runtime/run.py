"""Running a plan: workers in processes of this machine, inline, or started by torchrun or srun."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..planner.plan import Plan
from ..profiles.errors import TaskWarning
from .before_training import begun, cautions, checked, lost
from .checkpoint.initial_weights import source
from .checkpoint.start import check_settings, settings_to_resume
from .prepare.devices import devices_here
from .processes.locks import alone
from .processes.rendezvous import Rendezvous
from .records.metrics import RunSummary, summarize
from .records.progress import Observer, read_epochs
from .records.run_dir import RunDir
from .settings import RunSettings, changed
from .training.launched import LaunchedWorker
from .training.local import InlineWorkers, LocalWorkers
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
    workers: InlineWorkers | LocalWorkers | LaunchedWorker
    if rendezvous is not None:
        workers = LaunchedWorker(rendezvous, plan, settings)
    else:
        workers = (InlineWorkers if inline else LocalWorkers)(plan, settings)
    here = [replica for worker in workers.here for replica in worker.replicas]
    reports = any(replica.is_reporter for replica in here)
    observer = observer if reports else Observer()
    devices_here(plan, settings)
    workers.load_ahead()
    prepared, lines = checked(where, plan, settings, observer, here)
    _warn(lines if reports else ())
    workers.wait("ready")
    where.make()
    with workers.lock(where):
        if settings.resumed:
            _warn(lost(where, settings) if reports else ())
            where.reopen(settings)
        elif workers.here[0].rank == 0:
            where.check_new()
            where.join(plan, settings)
        workers.wait("directory")
        # Each host may have one of its own.
        where.join(plan, settings)
        if reports:
            _warn(cautions(prepared, workers.open_to_all, inline=inline))
            observer.begin(begun(prepared, where))
        begin = time.perf_counter()
        found = workers.train(prepared, where, observer)
        seconds, epochs = time.perf_counter() - begin, read_epochs(where.metrics)
        trained = sum(record.mini_batches for record in epochs)
        stop, whole_run = observer.stop, trained == prepared.segments[-1].end
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
