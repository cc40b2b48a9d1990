"""A worker process: ``python -m timeprest.runtime.worker RUN_DIR STORE``.

Started by torch.distributed's launcher, which sets RANK and WORLD_SIZE; which stage and replica a
rank is, `workers` says.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ..profiles.allocator import keep_freed_memory
from ..profiles.errors import TimeprestError
from ..profiles.target import describe_error
from .channels import ProcessChannels
from .checkpoint import Agree, CheckpointWriter
from .gradient_files import keep_gradients
from .observer import MetricsFile, Observer, Silent
from .operation_log import OperationLog, StageMetrics
from .peers import PeerError
from .prepare import Prepared, prepare
from .run_dir import RunDir
from .runner import StageRunner
from .starting import rewind_logs
from .sums import ALL, ProcessSums, stage_group, sum_groups
from .training import Barrier, Course
from .workers import Worker, workers_of


def main(arguments: list[str]) -> int:
    """Run one worker. Returns the exit code; why it failed stands in the run directory."""
    run_dir, store_path = RunDir(arguments[0]), arguments[1]
    rank = int(os.environ["RANK"])
    keep_freed_memory()
    # Ctrl-C ends a worker at once, without a traceback; the launcher says that it was stopped.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    worker = Worker(rank, rank)

    def note(message: str, exit_code: int, *, from_peer: bool = False) -> None:
        run_dir.write_error(
            rank, message, from_peer=from_peer, exit_code=exit_code, file=worker.file
        )

    try:
        plan, settings = run_dir.read()
        worker = workers_of(plan.stages)[rank]
        _work(run_dir, store_path, worker, prepare(plan, settings))
    except TimeprestError as error:
        note(str(error), error.exit_code, from_peer=isinstance(error, PeerError))
        return _leave(error.exit_code)
    except Exception as error:
        import traceback

        traceback.print_exc()
        note(f"{worker.name}: {describe_error(error)}", 1)
        return _leave(1)
    return _leave(0)


def _leave(code: int) -> int:
    """End at once: whatever still waits for a peer must not keep the process alive, nor crash
    it while the interpreter is taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(run_dir: RunDir, store_path: str, worker: Worker, prepared: Prepared) -> None:
    rank, timeout_s = worker.rank, prepared.settings.timeout_s
    names = [other.name for other in prepared.workers]
    # Local runs listen on the loopback device alone.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if Path("/sys/class/net/lo").exists() else "lo0"
    store = dist.FileStore(store_path, len(names))  # type: ignore[attr-defined]
    groups = sum_groups(prepared.workers, prepared.tied)
    try:
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=len(names),
            timeout=timedelta(seconds=timeout_s),
        )
        sums = ProcessSums(groups, names, rank, timeout_s)
    except RuntimeError as error:
        raise PeerError(f"{worker.name}: the workers didn't find each other: {error}") from error
    log = None
    rewind_logs(run_dir, prepared.plan, prepared.settings, worker)
    more = prepared.settings.resumed
    if prepared.settings.log_operations:
        log = OperationLog(run_dir.operations(worker), more=more)
    own = StageMetrics(run_dir.stage_metrics(worker), more=more)
    channels = ProcessChannels(names, timeout_s)
    runner = StageRunner(prepared, rank, channels, sums, log, own)
    keep_gradients(run_dir, runner)
    metrics = MetricsFile(run_dir.metrics, more=more) if runner.tells else None
    observer: Observer = metrics or Silent()
    meet = _barrier(worker, sums, ALL)
    files = [file for file in (log, own, metrics) if file is not None]
    checkpoints = CheckpointWriter(
        run_dir, prepared.plan, prepared.settings, _agree(worker, sums), {rank: files}
    )
    of_stage = _barrier(worker, sums, stage_group(worker.stage))
    course = Course([runner], observer, meet, of_stage, checkpoints)
    course.run()
    for file in files:
        file.close()
    if worker.leads:
        run_dir.save_weights(worker.stage, runner.state())
    for report in course.reports():
        run_dir.write_report(worker, report)
    meet()
    channels.end()
    dist.destroy_process_group()


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
