"""A worker process: ``python -m timeprest.runtime.training.worker RUN_DIR STORE LAUNCHER``.

Started by torch.distributed's launcher, which sets RANK and WORLD_SIZE; which stage and replica a
rank is, `workers` says.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ... import __version__
from ...planner.plan import Plan
from ...profiles.errors import FileError, TimeprestError
from ...profiles.measuring.process import end_with_parent, keep_freed_memory
from ...profiles.tasks.hooks import describe_error
from ..checkpoint.checkpoint import Agree, CheckpointWriter
from ..checkpoint.gradients import keep_gradients
from ..checkpoint.start import (
    check_logs,
    check_start,
    rewind_logs,
    settings_to_resume,
    telling_worker,
)
from ..communication.all_reduce import ALL_WORKERS, ProcessAllReduce, stage_group
from ..communication.channel import START_S, PeerError
from ..communication.transport import (
    Exchange,
    agree_on_transport,
    between_processes,
    exchange_over,
    open_transport,
    place_of,
)
from ..prepare.devices import check_kind, device_kind, gpu_count, own_device
from ..prepare.prepare import Prepared, prepare
from ..prepare.workers import Worker, workers_of
from ..processes import watchdog
from ..processes.environment import use_interface, use_loopback
from ..processes.locks import alone, as_worker
from ..processes.rendezvous import ENDING_S, Meeting
from ..records.metrics import RunSummary, StageReport, decode
from ..records.operation_log import StageEpochFile, operation_log
from ..records.progress import Both, MetricsFile, Observer, Silent, read_epochs
from ..records.run_dir import RunDir
from ..records.status import Failure, StatusFile
from ..run import check_settings, check_unfinished, summarize
from ..settings import RunSettings
from ..stage.optimizer import check_updates, warn_of_hooks
from ..stage.runner import StageRunner
from .loop import Barrier, Course

LOADING = "loading its data"


def main(arguments: list[str]) -> int:
    """Run one worker. Returns the exit code; why it failed stands in the run directory."""
    run_dir, store_path = RunDir(arguments[0]), arguments[1]
    end_with_parent(int(arguments[2]))
    rank = int(os.environ["RANK"])
    keep_freed_memory()
    # Ctrl-C ends a worker at once, without a traceback; the launcher says that it was stopped.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    worker = Worker(rank, rank)
    status: StatusFile | None = None
    try:
        plan, settings = run_dir.read()
        worker = workers_of(plan.stages)[rank]
        status = StatusFile(run_dir.status(worker), rank, worker.name)
        prepared = prepare(plan, settings)
        use_loopback()
        store = dist.FileStore(store_path, len(prepared.workers))  # type: ignore[attr-defined]
        device = own_device(plan, settings, int(os.environ["LOCAL_RANK"]))
        bound = timedelta(seconds=max(settings.timeout_s, START_S))
        exchange = exchange_over(store, rank, len(prepared.workers), bound)
        with as_worker(run_dir.path):
            take_part(run_dir, store, worker, prepared, status, device, exchange)
    except BaseException as error:  # the user's code runs here: SystemExit may come out of it
        return leave(note_failure(error, run_dir, worker.rank, worker.name, worker.file, status))
    return leave(0)


def note_failure(
    error: BaseException,
    run_dir: RunDir,
    rank: int,
    name: str,
    file: str | None = None,
    status: StatusFile | None = None,
) -> int:
    """Note why a worker failed, for its launcher. Returns the exit code."""
    known = isinstance(error, TimeprestError)
    failure = Failure(
        rank=rank,
        message=str(error) if known else f"{name}: {describe_error(error)}",
        from_peer=isinstance(error, PeerError),
        exit_code=error.exit_code if isinstance(error, TimeprestError) else 1,
        time=time.time(),
    )
    try:
        run_dir.write_error(failure, file)
    except FileError:
        # A full disk, which may be what failed. The status has its room there already.
        if status is not None:
            status.fail(failure)
    # What the worker prints goes to a file, too.
    with contextlib.suppress(OSError):
        if known:
            print(failure.message, file=sys.stderr)
        else:
            traceback.print_exception(error)
    return failure.exit_code


def leave(code: int) -> int:
    """End at once: whatever still waits for a peer must not keep the process alive, nor crash
    it while the interpreter is taken down."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def take_part(
    run_dir: RunDir,
    store: dist.Store,  # type: ignore[name-defined]
    worker: Worker,
    prepared: Prepared,
    status: StatusFile,
    device: torch.device,
    exchange: Exchange,
    observer: Observer | None = None,
    *,
    one_host: bool = True,
) -> StageReport:
    """Train as one worker of many; gloo listens where its environment variable says.

    Args:
        device: what this worker computes on.
        exchange: tells the others where this worker is.
        observer: is told of progress, where this is the worker that tells.
        one_host: all workers were started on this host.

    Raises:
        RunError: training failed here.
        UserError: there isn't memory enough.
        PeerError: another worker is gone, or didn't answer in time.
    """
    rank, timeout_s = worker.rank, prepared.settings.timeout_s
    names = [other.name for other in prepared.workers]
    others = [other for other in range(len(names)) if other != rank]
    status.begin("meeting the others")
    status.wait(others)
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=len(names),
            timeout=timedelta(seconds=max(timeout_s, START_S)),
        )
        place = place_of(prepared.plan, worker, device)
        wanted = prepared.settings.transport
        transport = between_processes(
            agree_on_transport(place, exchange), wanted, one_host=one_host
        )
        channels, sums = open_transport(transport, prepared, worker, device, status, store)
    except RuntimeError as error:
        raise PeerError(f"{worker.name}: the workers didn't find each other: {error}") from error
    status.go_on()
    rewind_logs(run_dir, prepared.plan, prepared.settings, worker)
    more = prepared.settings.resumed
    log = operation_log(run_dir, worker, prepared.settings)
    own = StageEpochFile(run_dir.stage_metrics(worker), more=more)
    runner = StageRunner(prepared, rank, channels, sums, log, own, device=device)
    runner.status, runner.transport = status, transport
    status.begin(LOADING)
    runner.load_samples()
    status.begin("meeting the others")
    status.wait(others)
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=max(timeout_s, START_S)))
    except RuntimeError as error:
        raise PeerError(f"{worker.name}: waiting for the others to load: {error}") from error
    status.go_on()
    keep_gradients(run_dir, runner)
    metrics = MetricsFile(run_dir.metrics, more=more) if runner.tells else None
    told: Observer = metrics or Silent()
    if metrics is not None and observer is not None:
        told = Both(metrics, observer)
    meet = _barrier(worker, sums, ALL_WORKERS)
    files = [file for file in (log, own, metrics) if file is not None]
    checkpoints = CheckpointWriter(
        run_dir, prepared.plan, prepared.settings, _agree(worker, sums), {rank: files}
    )
    of_stage = _barrier(worker, sums, stage_group(worker.stage))
    course = Course([runner], told, meet, of_stage, checkpoints)
    course.run()
    for file in files:
        file.close()
    if worker.leads:
        run_dir.save_weights(worker.stage, runner.state(), runner.tied_names())
    report = course.reports()[0]
    run_dir.write_report(worker, report)
    status.begin("the end")
    meet()
    channels.end()
    dist.destroy_process_group()
    return report


def _barrier(worker: Worker, sums: ProcessAllReduce, group: str) -> Barrier:
    return lambda: _sum(worker, sums, group, torch.zeros(1))


def _agree(worker: Worker, sums: ProcessAllReduce) -> Agree:
    def agree(yes: bool) -> bool:
        against = torch.tensor([float(not yes)])
        _sum(worker, sums, ALL_WORKERS, against)
        return not against.item()

    return agree


def _sum(worker: Worker, sums: ProcessAllReduce, group: str, tensor: torch.Tensor) -> None:
    try:
        sums.start(group, [tensor]).wait()
    except PeerError as error:
        raise PeerError(f"{worker.name}: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))


# One worker of a run that torchrun or srun started, possibly on many hosts ----------------------


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
