"""Starting the worker processes of one machine with torch.distributed's own launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...profiles.errors import FileError, RunError, StoppedError, TimeprestError, UserError
from ..records.progress import Observer, Tail
from ..records.run_dir import RunDir
from ..records.status import WorkerStatus, read_statuses
from .environment import ENDING_SIGNALS
from .rendezvous import blame, circumstances, stopped_ranks

GRACE_S = 3.0
"""After the first failure, what the other workers have to end by themselves."""
WORKER = f"{__package__.rpartition('.')[0]}.training.worker"
"""The module that a worker's process runs."""
WORKER = f"{__package__.rpartition('.')[0]}.training.worker"
"""The module that a worker's process runs."""


@dataclass(frozen=True)
class Workers:
    """Local processes that are started together.

    Attributes:
        module: what each one runs; its arguments are the directory, the store's file, and the
            number of this process, with which it is to end.
        where: their directory, with what they note of failures, and their logs.
        labels: how each is named in messages, by rank.
        logs_kept: the directory stays, so that a message may send the user to the logs; where
            it doesn't, the last line of a log stands in the message.
    """

    module: str
    where: RunDir
    labels: tuple[str, ...]
    logs_kept: bool = True


def launch(run_dir: RunDir, labels: Sequence[str], observer: Observer) -> None:
    """Run all workers of a prepared run directory and wait for their end.

    Args:
        labels: how each is named in messages, by rank.

    Raises:
        RunError: a worker failed; the message says which one, at which operation and why.
        StoppedError: a signal ended the run.
        UserError: the same, where the user's input is the cause.
        KeyboardInterrupt: the user stopped the run; all workers have ended.
    """
    workers = Workers(module=WORKER, where=run_dir, labels=tuple(labels))
    tail, coming = Tail(run_dir.metrics, observer), _Coming(run_dir, len(labels), observer)

    def poll() -> None:
        coming.over |= tail.poll()
        coming.poll()

    run_workers(workers, poll)


class _Coming:
    """Says how far the workers have come, until they train."""

    def __init__(self, run_dir: RunDir, count: int, observer: Observer) -> None:
        self.run_dir = run_dir
        self.count = count
        self.observer = observer
        self.begin = time.time()
        self.said = ""
        self.over = False

    def poll(self) -> None:
        """Say it where it has changed."""
        if self.over:
            return
        # A run that is resumed finds what the workers before were at.
        known = [
            status
            for status in read_statuses(self.run_dir.statuses).values()
            if status.at == "start" or status.since >= self.begin
        ]
        self.over = any(_OPERATION.match(status.at + status.finished) for status in known)
        text = "waiting for the first mini-batch" if self.over else self._text(known)
        if text != self.said:
            self.said = text
            self.observer.starting(text)

    def _text(self, known: Sequence[WorkerStatus]) -> str:
        at = Counter("building the model" if s.at == "start" else s.at for s in known)
        missing = self.count - len(known)
        parts = [f"{number} {what}" for what, number in sorted(at.items())]
        parts += [f"{missing} starting"] if missing else []
        processes = "process" if self.count == 1 else "processes"
        return f"starting {self.count} {processes}: {', '.join(parts)}"


_OPERATION = re.compile(r"\d+[FBWU]\d")


def run_workers(workers: Workers, poll: Callable[[], None]) -> None:
    """Start workers and wait for their end, calling `poll` from a thread a few times a second.

    When one worker dies, the launcher ends the others within seconds; when the launcher dies, the
    system ends them. Raises as `launch`.
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

    watch = _Watch(workers.where, poll)
    try:
        with tempfile.TemporaryDirectory(prefix="timeprest-") as folder, _signals() as signals:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=len(workers.labels),
                run_id="timeprest",
                # Rendezvous and store are files: nothing listens but gloo, on the loopback device.
                rdzv_backend="c10d",
                rdzv_endpoint=str(Path(folder) / "rendezvous"),
                rdzv_configs={"store_type": "file"},
                local_addr="127.0.0.1",
                max_restarts=0,
                monitor_interval=0.1,
                signals_to_handle=",".join(signals),
                logs_specs=DefaultLogsSpecs(
                    log_dir=str(workers.where.path / "logs"), redirects=Std.ALL, tee=Std.NONE
                ),
            )
            where = [str(workers.where.path), str(Path(folder) / "store")]
            command = ["-m", workers.module, *where, str(os.getpid())]
            with watch:
                elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        raise watch.problem or _explain(workers, error, watch) from error
    except OSError as error:
        what = f"{error.filename}: can't be written" if error.filename else "the workers' files"
        raise FileError(f"{what}: {error.strerror}") from None
    except SignalException as stopped:
        if stopped.sigval == signal.SIGINT:
            raise KeyboardInterrupt from stopped
        raise StoppedError(f"stopped by {stopped.sigval.name}") from stopped
    if watch.problem is not None:
        raise watch.problem


@contextmanager
def _signals() -> Iterator[list[str]]:
    """Names of the signals that torch's launcher is to handle; afterwards all is as it was.

    Those that would end this process: what it ignores (nohup) or handles itself stays so.
    """
    names = [name for name in ENDING_SIGNALS if hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    ends = (signal.SIG_DFL, signal.default_int_handler)
    found = {name: handler for name, handler in before.items() if handler in ends}
    try:
        yield list(found)
    finally:
        if threading.current_thread() is threading.main_thread():
            for name, handler in found.items():
                signal.signal(getattr(signal, name), handler)


class _Watch:
    """Passes progress on from a thread while the launcher has the main one.

    After a failure the launcher asks the other workers to end, and waits half a minute for
    one that can't (stopped, or stuck in a call). Here it gets a few seconds.

    Attributes:
        killed: processes that were ended from here, which isn't a cause.
        stopped: ranks whose processes stood still (SIGSTOP) at the first failure.
        problem: what went wrong in here, so that the workers had to end.
    """

    def __init__(self, run_dir: RunDir, poll: Callable[[], None]) -> None:
        self.run_dir = run_dir
        self.poll = poll
        self.killed: set[int] = set()
        self.stopped: frozenset[int] = frozenset()
        self.problem: BaseException | None = None
        self._failed_at: float | None = None
        self._looks = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._stop.wait(0.1):
            try:
                if self.problem is None:
                    self.poll()
                    self._end_the_stuck()
                else:
                    self._kill_workers()
            except BaseException as error:  # whoever is told of progress, and a full disk below
                self.problem = error

    def _end_the_stuck(self) -> None:
        if self._failed_at is None:
            self._looks += 1
            noted = any(self.run_dir.errors.glob("*.json"))
            # Those that stand elsewhere for want of room take longer to look for.
            if noted or (not self._looks % 10 and self.run_dir.read_errors()):
                self._failed_at = time.monotonic()
                self.stopped = stopped_ranks(read_statuses(self.run_dir.statuses))
        elif time.monotonic() - self._failed_at > GRACE_S:
            self._kill_workers()

    def _kill_workers(self) -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if str(self.run_dir.path) in child.cmdline():
                    self.killed.add(child.pid)
                    child.kill()
                    found.append(child)
        return found

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        # A signal that comes while the launcher starts a worker can make it forget that one.
        psutil.wait_procs(self._kill_workers(), timeout=GRACE_S)
        if self.problem is None:
            try:
                self.poll()
            except BaseException as error:
                self.problem = error


def _explain(workers: Workers, error: BaseException, watch: _Watch) -> TimeprestError:
    """The first cause: a worker's own error before the errors of those who waited for it."""
    noted = workers.where.read_errors()
    statuses = read_statuses(workers.where.statuses)
    failures = getattr(error, "failures", {})
    silent = [
        (rank, failure)
        for rank, failure in failures.items()
        if not any(e.rank == rank for e in noted)
        and failure.exitcode != -signal.SIGTERM
        and failure.pid not in watch.killed
    ]
    own = [e for e in noted if not e.from_peer]
    if own:
        kind: type[TimeprestError] = UserError if own[0].exit_code == 2 else RunError
        return kind(own[0].message + circumstances(statuses, own[0].rank))
    if silent:
        rank, failure = min(silent, key=lambda item: item[1].timestamp)
        how = (
            f"was killed by {signal.Signals(-failure.exitcode).name}"
            if failure.exitcode < 0
            else f"ended with exit code {failure.exitcode}"
        )
        around = circumstances(statuses, rank)
        if not statuses and noted:
            around = f"; {noted[0].message}"
        return RunError(
            f"{workers.labels[rank]} {how}{around}{_printed(workers, 'Its output is', rank)}"
        )
    printed = _printed(workers, "What the workers printed is")
    if noted:
        return RunError(blame(statuses, noted[0].rank, noted[0].message, watch.stopped) + printed)
    return RunError(f"the run failed: {error}{printed}")


def _printed(workers: Workers, what: str, rank: int | None = None) -> str:
    """Where the logs are; where they aren't kept, the last line of that rank's errors."""
    logs = workers.where.path / "logs"
    if workers.logs_kept:
        return f". {what} in {logs}"
    for path in logs.rglob(f"{rank}/stderr.log"):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        last = [line for line in lines if line.strip()][-1:]
        return "".join(f". Its last words: {line.strip()[:200]}" for line in last)
    return ""
