"""One worker of a run that torchrun or srun started, possibly on many hosts."""

from __future__ import annotations

import hashlib
import time

import msgspec
import torch
import torch.distributed as dist

from .. import __version__
from ..planner.plan import Plan
from ..profiles.allocator import keep_freed_memory
from .interface import use_interface
from .meeting import Meeting
from .observer import Observer
from .prepare import prepare
from .run import check_settings, summarize
from .run_dir import RunDir
from .scores import RunSummary, StageReport, decode
from .settings import RunSettings
from .status import StatusFile
from .worker import take_part
from .workers import workers_of


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
    begin = time.perf_counter()
    check_settings(settings)
    where = RunDir(run_dir)
    where.check_new()
    meeting.check_same(
        {
            "plan": _digest(plan),
            "settings": _digest(settings),
            "version of timeprest": __version__,
            "version of torch": torch.__version__,
        }
    )
    keep_freed_memory()
    use_interface(meeting.launched)
    prepared = prepare(plan, settings)
    meeting.gather("ready")
    if meeting.rank == 0:
        where.create(plan, settings)
    meeting.gather("directory")
    where.join(plan, settings)
    worker = workers_of(plan.stages)[meeting.rank]
    status = StatusFile(where.status(worker), worker.rank, worker.name)
    meeting.status = lambda: status.now
    meeting.statuses = where.statuses
    tells = worker.leads and worker.stage == len(plan.stages) - 1
    if tells:
        observer.begin()
    store = dist.PrefixStore("gloo", meeting.store)  # type: ignore[attr-defined]
    report, course = take_part(where, store, worker, prepared, status, observer)
    found = meeting.gather("reports", msgspec.json.encode(report))
    if not tells:
        return None
    reports = [decode(text, StageReport) for text in found]
    seconds = time.perf_counter() - begin
    summary = summarize(prepared, course.epochs, reports, seconds, inline=False)
    where.write_summary(summary)
    return summary


def _digest(value: msgspec.Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:16]
