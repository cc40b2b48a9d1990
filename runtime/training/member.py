"""One worker of a run that torchrun or srun started, possibly on many hosts."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ... import __version__
from ...planner.plan import Plan
from ...profiles.autograd.allocator import keep_freed_memory
from ..checkpoint.start import (
    check_logs,
    check_start,
    rewind_logs,
    settings_to_resume,
    telling_worker,
)
from ..prepare.devices import check_kind, device_kind, gpu_count, own_device
from ..prepare.prepare import Prepared, prepare
from ..prepare.workers import workers_of
from ..processes import watchdog
from ..processes.interface import use_interface
from ..processes.locks import alone, as_worker
from ..processes.rendezvous import ENDING_S, Meeting
from ..records.metrics import RunSummary, StageReport, decode
from ..records.progress import Observer, Silent, read_epochs
from ..records.run_dir import RunDir
from ..records.status import StatusFile
from ..run import check_settings, check_unfinished, summarize
from ..settings import RunSettings
from ..verify.hooks import check_updates, warn_of_hooks
from .worker import take_part


def run_member(
    plan: Plan, settings: RunSettings, run_dir: str, meeting: Meeting, observer: Observer
) -> RunSummary | None:
    """Train as the worker that this process was started as.

    Args:
        run_dir: of this host; hosts may share it.

    Returns:
        The summary, on the worker that tells of progress.

    Raises: as `run`, and PeerError when another worker is gone or stuck.
    """
    settings = check_settings(settings)
    where = RunDir(run_dir)
    where.check_new()
    _check_same(plan, settings, meeting)
    prepared = _prepare(plan, settings, meeting, observer)
    where.make()
    with _alone(where, meeting):
        if meeting.rank == 0:
            where.create(plan, settings)
        meeting.gather("directory")
        where.join(plan, settings)
        return _train(prepared, where, meeting, observer)


def resume_member(
    run_dir: str,
    changes: Mapping[str, Any],
    meeting: Meeting,
    observer: Observer,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    at: int | None = None,
) -> RunSummary | None:
    """Go on with a run from the newest checkpoint that this host has, which must be everybody's.

    Args as of `resume`. Returns and raises as `run_member`.
    """
    where = RunDir(run_dir)
    plan, settings = where.read()
    settings = msgspec.structs.replace(settings, **changes)
    settings = settings_to_resume(where, plan, settings, epochs=epochs, steps=steps, at=at)
    check_logs(where, plan, settings, [workers_of(plan.stages)[meeting.rank]])
    _check_same(plan, settings, meeting)
    prepared = _prepare(plan, settings, meeting, observer)
    check_unfinished(prepared, where)
    with _alone(where, meeting):
        where.reopen(settings)
        meeting.gather("directory")
        if workers_of(plan.stages)[meeting.rank] == telling_worker(plan):
            rewind_logs(where, plan, settings, telling_worker(plan))
        return _train(prepared, where, meeting, observer)


@contextmanager
def _alone(where: RunDir, meeting: Meeting) -> Iterator[None]:
    """Of the workers that share a directory, the first holds its lock, for all of them."""
    with alone(where.path, meeting.share("lock", uuid.uuid4().hex)):
        meeting.gather("locked")
        with as_worker(where.path):
            yield


def _check_same(plan: Plan, settings: RunSettings, meeting: Meeting) -> None:
    meeting.check_same(
        {
            "plan": _digest(plan),
            "checkpoint": str(settings.resume_at),
            "settings": _digest(settings),
            "version of timeprest": __version__,
            "version of torch": torch.__version__,
        }
    )


def _prepare(plan: Plan, settings: RunSettings, meeting: Meeting, observer: Observer) -> Prepared:
    keep_freed_memory()
    use_interface(meeting.launched)
    check_kind(device_kind(plan, settings), settings, gpu_count())
    tells = workers_of(plan.stages)[meeting.rank] == telling_worker(plan)
    prepared = prepare(plan, settings, observer.starting if tells else Silent().starting)
    check_updates(prepared)
    if settings.start_from is not None:
        check_start(prepared, Path(settings.start_from))
    meeting.gather("ready")
    return prepared


def _train(
    prepared: Prepared, where: RunDir, meeting: Meeting, observer: Observer
) -> RunSummary | None:
    begin = time.perf_counter()
    if not meeting.launched.one_host:
        watchdog.watch(prepared.settings.timeout_s + watchdog.SLACK_S)
    worker = prepared.workers[meeting.rank]
    status = StatusFile(where.status(worker), worker.rank, worker.name)
    # Who waits for a message finds out first.
    patience_s = prepared.settings.timeout_s + ENDING_S
    meeting.begin(lambda: status.now, where.statuses, patience_s)
    tells = worker == telling_worker(prepared.plan)
    if tells:
        warn_of_hooks(prepared)
        observer.begin()
    store = dist.PrefixStore("gloo", meeting.store)  # type: ignore[attr-defined]
    device = own_device(prepared.plan, prepared.settings, meeting.launched.local_rank)
    exchange = partial(meeting.gather, "places")
    one_host = meeting.launched.one_host
    report = take_part(
        where, store, worker, prepared, status, device, exchange, observer, one_host=one_host
    )
    found = meeting.gather("reports", msgspec.json.encode(report))
    if not tells:
        return None
    reports = [decode(text, StageReport) for text in found]
    seconds = time.perf_counter() - begin
    epochs = read_epochs(where.metrics)
    summary = summarize(prepared, epochs, reports, seconds, inline=False)
    where.write_summary(summary)
    return summary


def _digest(value: msgspec.Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
