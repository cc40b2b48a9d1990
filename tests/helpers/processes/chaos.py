"""Killing workers of a run from outside, at moments that are drawn."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path

import psutil
from timeprest.planner.systems.operations import parse_op
from timeprest.profiles.errors import TimeprestError
from timeprest.runtime.records.status import read_statuses


class Killer:
    """Kills one worker of a run once it is at some operation of a mini-batch; then it is done.

    Args:
        folder: the run's statuses.
        rank: whom.
        mini_batch: not before its operations of this one.
        operations: that it may still do then; drawn.
        how: the signal.
    """

    def __init__(self, folder: Path, rank: int, mini_batch: int, wait_s: float, how: str) -> None:
        self.folder = folder
        self.rank = rank
        self.mini_batch = mini_batch
        self.wait_s = wait_s
        self.how = getattr(signal, how)
        self.killed_at: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self._stop.wait(0.005):
            status = read_statuses(self.folder).get(self.rank)
            if status is None or _mini_batch(status.at or status.finished) < self.mini_batch:
                continue
            time.sleep(self.wait_s)
            with contextlib.suppress(ProcessLookupError):
                os.kill(status.pid, self.how)
                self.killed_at = status.at or status.finished
            return

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def left_behind(
    launcher: subprocess.Popen[str], run_dir: Path, how: signal.Signals
) -> list[psutil.Process]:
    """Workers that are still there some seconds after their launcher was ended.

    It is ended once rank 1 is in the trap of `failing_tasks`, after its 5th backward.
    """
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and launcher.poll() is None:
        status = read_statuses(run_dir / "status").get(1)
        if status is not None and status.at == "1U4":
            break
        time.sleep(0.1)
    statuses = read_statuses(run_dir / "status")
    workers = [psutil.Process(status.pid) for status in statuses.values()]
    assert len(workers) == 2
    launcher.send_signal(how)
    launcher.communicate(timeout=60)
    return psutil.wait_procs(workers, timeout=10)[1]


def _mini_batch(op: str) -> int:
    try:
        return parse_op(op)[1].mini_batch
    except (ValueError, TimeprestError):
        return -1


def drawn(seed: int, ranks: int, mini_batches: int, folder: Path) -> Killer:
    """A killer of rank `seed` mod `ranks`."""
    draw = random.Random(seed)
    how = "SIGKILL" if draw.random() < 0.8 else "SIGSTOP"
    return Killer(folder, seed % ranks, draw.randrange(mini_batches), draw.random() / 50, how)
