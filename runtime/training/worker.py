"""A worker process: ``python -m timeprest.runtime.training.worker RUN_DIR STORE LAUNCHER``.

Started by torch.distributed's launcher, which sets RANK and WORLD_SIZE; which stage and replica a
rank is, `workers` says.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from ...profiles.autograd.allocator import keep_freed_memory
from ...profiles.errors import FileError, TimeprestError
from ...profiles.parent import end_with_parent
from ...profiles.target import describe_error
from ..checkpoint.checkpoint import Agree, CheckpointWriter
from ..checkpoint.gradients import keep_gradients
from ..checkpoint.start import rewind_logs
from ..communication.all_reduce import ALL, ProcessSums, stage_group
from ..communication.peers import PeerError
from ..communication.placement import Exchange, between_processes, exchange_over, place_of, settle
from ..communication.transport import open_transport
from ..prepare.devices import own_device
from ..prepare.prepare import Prepared, prepare
from ..prepare.workers import Worker, workers_of
from ..processes.interface import use_loopback
from ..processes.locks import as_worker
from ..records.metrics import StageReport
from ..records.operation_log import StageMetrics, operation_log
from ..records.progress import Both, MetricsFile, Observer, Silent
from ..records.run_dir import RunDir
from ..records.status import Failure, StatusFile
from ..stage.runner import StageRunner
from .loop import Barrier, Course

LOADING = "loading its data"
MEETING_S = 60.0
"""Longest wait for the other workers to be ready, with the model built and the data loaded."""


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
        bound = timedelta(seconds=max(settings.timeout_s, MEETING_S))
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
            timeout=timedelta(seconds=max(timeout_s, MEETING_S)),
        )
        place = place_of(prepared.plan, worker, device)
        wanted = prepared.settings.transport
        transport = between_processes(settle(place, exchange), wanted, one_host=one_host)
        channels, sums = open_transport(transport, prepared, worker, device, status, store)
    except RuntimeError as error:
        raise PeerError(f"{worker.name}: the workers didn't find each other: {error}") from error
    status.go_on()
    rewind_logs(run_dir, prepared.plan, prepared.settings, worker)
    more = prepared.settings.resumed
    log = operation_log(run_dir, worker, prepared.settings)
    own = StageMetrics(run_dir.stage_metrics(worker), more=more)
    runner = StageRunner(prepared, rank, channels, sums, log, own, device=device)
    runner.status, runner.transport = status, transport
    status.begin(LOADING)
    runner.load_samples()
    status.begin("meeting the others")
    status.wait(others)
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=max(timeout_s, MEETING_S)))
    except RuntimeError as error:
        raise PeerError(f"{worker.name}: waiting for the others to load: {error}") from error
    status.go_on()
    keep_gradients(run_dir, runner)
    metrics = MetricsFile(run_dir.metrics, more=more) if runner.tells else None
    told: Observer = metrics or Silent()
    if metrics is not None and observer is not None:
        told = Both(metrics, observer)
    meet = _barrier(worker, sums, ALL)
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


def _barrier(worker: Worker, sums: ProcessSums, group: str) -> Barrier:
    return lambda: _sum(worker, sums, group, torch.zeros(1))


def _agree(worker: Worker, sums: ProcessSums) -> Agree:
    def agree(yes: bool) -> bool:
        against = torch.tensor([float(not yes)])
        _sum(worker, sums, ALL, against)
        return not against.item()

    return agree


def _sum(worker: Worker, sums: ProcessSums, group: str, tensor: torch.Tensor) -> None:
    try:
        sums.start(group, [tensor]).wait()
    except PeerError as error:
        raise PeerError(f"{worker.name}: {error}") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
