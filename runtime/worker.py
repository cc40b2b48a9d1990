"""A stage process: ``python -m timeprest.runtime.worker RUN_DIR STORE``.

Started by torch.distributed's launcher, which sets RANK and WORLD_SIZE; rank s runs stage s.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..profiles.allocator import keep_freed_memory
from ..profiles.errors import TimeprestError
from ..profiles.target import describe_error
from .channels import PeerError, ProcessChannels
from .clipping import total_over_processes
from .gradient_files import keep_gradients
from .observer import MetricsFile, Observer, Silent
from .operation_log import OperationLog, StageMetrics
from .prepare import prepare
from .run_dir import RunDir
from .runner import StageRunner
from .training import Course


def main(arguments: list[str]) -> int:
    """Run one stage. Returns the exit code; why it failed stands in the run directory."""
    run_dir, store_path = RunDir(arguments[0]), arguments[1]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    keep_freed_memory()
    # Ctrl-C ends a worker at once, without a traceback; the launcher says that it was stopped.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        _work(run_dir, store_path, rank, world_size)
    except TimeprestError as error:
        from_peer = isinstance(error, PeerError)
        run_dir.write_error(rank, str(error), from_peer=from_peer, exit_code=error.exit_code)
        return _leave(error.exit_code)
    except Exception as error:
        import traceback

        traceback.print_exc()
        message = f"stage {rank}: {describe_error(error)}"
        run_dir.write_error(rank, message, from_peer=False, exit_code=1)
        return _leave(1)
    return _leave(0)


def _leave(code: int) -> int:
    """End at once: whatever still waits for a peer must not keep the process alive, nor crash
    it while the interpreter is taken down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work(run_dir: RunDir, store_path: str, rank: int, world_size: int) -> None:
    plan, settings = run_dir.read()
    prepared = prepare(plan, settings)
    timeout = timedelta(seconds=settings.timeout_s)
    # Local runs listen on the loopback device alone.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if Path("/sys/class/net/lo").exists() else "lo0"
    store = dist.FileStore(store_path, world_size)  # type: ignore[attr-defined]
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except RuntimeError as error:
        raise PeerError(f"stage {rank}: the workers didn't find each other: {error}") from error
    log = OperationLog(run_dir.operations(rank)) if settings.log_operations else None
    channels = ProcessChannels(rank, prepared.crossings, settings.timeout_s)
    own = StageMetrics(run_dir.stage_metrics(rank))
    runner = StageRunner(prepared, rank, channels, log, own)
    keep_gradients(run_dir, runner)
    metrics = MetricsFile(run_dir.metrics) if runner.is_last else None
    observer: Observer = metrics or Silent()
    course = Course([runner], observer, _barrier(rank), total_over_processes(rank))
    course.run()
    for closing in (log, own, metrics):
        if closing is not None:
            closing.close()
    run_dir.save_weights(rank, runner.stage.state())
    for report in course.reports():
        run_dir.write_report(report)
    _barrier(rank)()
    channels.end()
    dist.destroy_process_group()


def _barrier(rank: int) -> Any:
    def wait() -> None:
        try:
            dist.barrier()
        except RuntimeError as error:
            raise PeerError(f"stage {rank}: waiting for the others: {error}") from error

    return wait


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
