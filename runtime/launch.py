"""Starting the stage processes of one machine with torch.distributed's own launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from ..profiles.errors import RunError, TimeprestError, UserError
from .observer import Observer, Tail
from .run_dir import RunDir

GRACE_S = 3.0
"""After the first failure, what the other workers have to end by themselves."""


def launch(run_dir: RunDir, stages: int, observer: Observer) -> None:
    """Run all stages of a prepared run directory and wait for their end.

    When one worker dies, the launcher ends the others within seconds.

    Raises:
        RunError: a worker failed; the message says which one, at which operation and why.
        UserError: the same, where the user's input is the cause.
        KeyboardInterrupt: the user stopped the run; all workers have ended.
    """
    # Sharing a TCP store between the launcher and its workers would listen on every address.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # What it logs of failures is told by the report; each of its modules has its own logger.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)

    with tempfile.TemporaryDirectory(prefix="timeprest-") as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=stages,
            run_id="timeprest",
            # Rendezvous and store are files: nothing listens but gloo, on the loopback device.
            rdzv_backend="c10d",
            rdzv_endpoint=str(Path(folder) / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(
                log_dir=str(run_dir.path / "logs"), redirects=Std.ALL, tee=Std.NONE
            ),
        )
        command = [
            "-m",
            f"{__package__}.worker",
            str(run_dir.path),
            str(Path(folder) / "store"),
        ]
        with _Watch(run_dir, Tail(run_dir.metrics, observer)):
            try:
                elastic_launch(config, sys.executable)(*command)
            except ChildFailedError as error:
                raise _explain(run_dir, stages, error) from error
            except SignalException as stopped:
                if stopped.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from stopped
                raise RunError(f"stopped by {stopped.sigval.name}") from stopped


class _Watch:
    """Passes progress on from a thread while the launcher has the main one.

    After a failure the launcher asks the other workers to end, and waits half a minute for
    one that can't (stopped, or stuck in a call). Here it gets a few seconds.
    """

    def __init__(self, run_dir: RunDir, tail: Tail) -> None:
        self.run_dir = run_dir
        self.tail = tail
        self._failed_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._stop.wait(0.1):
            self.tail.poll()
            self._end_the_stuck()

    def _end_the_stuck(self) -> None:
        if self._failed_at is None:
            if any((self.run_dir.path / "errors").glob("stage*.json")):
                self._failed_at = time.monotonic()
        elif time.monotonic() - self._failed_at > GRACE_S:
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if str(self.run_dir.path) in child.cmdline():
                        child.kill()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.tail.poll()


def _explain(run_dir: RunDir, stages: int, error: BaseException) -> TimeprestError:
    """The first cause: a stage's own error before the errors of those who waited for it."""
    noted = run_dir.read_errors(stages)
    failures = getattr(error, "failures", {})
    silent = [
        (rank, failure)
        for rank, failure in failures.items()
        if not any(e["stage"] == rank for e in noted) and failure.exitcode != -signal.SIGTERM
    ]
    own = [e for e in noted if not e["from_peer"]]
    logs = run_dir.path / "logs"
    if own:
        kind: type[TimeprestError] = UserError if own[0]["exit_code"] == 2 else RunError
        return kind(own[0]["message"])
    if silent:
        rank, failure = min(silent, key=lambda item: item[1].timestamp)
        how = (
            f"was killed by {signal.Signals(-failure.exitcode).name}"
            if failure.exitcode < 0
            else f"ended with exit code {failure.exitcode}"
        )
        others = f"; {noted[0]['message']}" if noted else ""
        return RunError(f"stage {rank} (rank {rank}) {how}{others}. Its output is in {logs}")
    if noted:
        return RunError(f"{noted[0]['message']}. What the workers printed is in {logs}")
    return RunError(f"the run failed: {error}. What the workers printed is in {logs}")
