"""Where a study's trainings are done: in processes that stay, one thread each, or in this one."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from ....profiles.errors import RunError, TimeprestError, UserError
from ...processes.failures import how_it_ended, last_words
from ..figures.study import Curve
from .training import train_one
from .work import Asked, StudyWork
from .worker import Said

_LOOK_S = 0.2
_END_S = 5.0
"""What a process has to end, when it is asked to."""
_MODULE = f"{__package__}.worker"
_MOST_BYTES = 1 << 20


class Given(NamedTuple):
    """A training that is done."""

    asked: Asked
    curve: Curve
    seconds: float


class TrainingPool(Protocol):
    """Does trainings."""

    @property
    def free(self) -> int:
        """How many more it can begin now."""

    def give(self, asked: Asked) -> None:
        """Begin a training."""

    def wait(self) -> list[Given]:
        """What has been done since, after a while. Raises what ended a training."""

    @property
    def under_way(self) -> int:
        """Mini-batches done of trainings that aren't."""

    def close(self) -> None:
        """End it all."""


class ThisProcess:
    """Trains here, one at a time."""

    def __init__(self, work: StudyWork, progress: Callable[[], None]) -> None:
        self._work = work
        self._progress = progress
        self._asked: Asked | None = None
        self.under_way = 0

    @property
    def free(self) -> int:
        """1, or 0 until `wait`."""
        return int(self._asked is None)

    def give(self, asked: Asked) -> None:
        """Note it."""
        self._asked = asked

    def wait(self) -> list[Given]:
        """Train it. Raises as `train_one`, naming the training."""
        asked = self._asked
        assert asked is not None
        begin = time.monotonic()
        try:
            curve = train_one(self._work, asked, self._tell)
        except TimeprestError as error:
            raise failed(self._work, asked, str(error), error.exit_code) from error
        self._asked, self.under_way = None, 0
        return [Given(asked, curve, time.monotonic() - begin)]

    def _tell(self, done: int) -> None:
        self.under_way = done
        self._progress()

    def close(self) -> None:
        """Nothing is open."""


def failed(work: StudyWork, asked: Asked, why: str, exit_code: int) -> TimeprestError:
    """The error of a training that failed."""
    kind: type[TimeprestError] = UserError if exit_code == 2 else RunError
    return kind(f"training {work.label(asked)}: {why}")


class _Process:
    """A process that trains, and what is known of it."""

    def __init__(self, number: int, work: bytes, logs: Path) -> None:
        self.number = number
        self.log = logs / f"worker{number}.stderr"
        self.asked: Asked | None = None
        self.done = 0
        self.heard = time.monotonic()
        self._rest = b""
        with self.log.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=err,
                # Ctrl-C in the terminal is for the parent.
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        self.out = self.process.stdout
        os.set_blocking(self.out.fileno(), False)
        self.send(work)

    def send(self, text: bytes) -> None:
        """Write it a line; one that has died is found out by what it doesn't say."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text + b"\n")
            self.process.stdin.flush()

    def read(self) -> tuple[list[Said], bool]:
        """What it has said since, and whether its output has ended."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            while True:
                text = os.read(self.out.fileno(), _MOST_BYTES)
                if not text:
                    ended = True
                    break
                self._rest += text
        *lines, self._rest = self._rest.split(b"\n")
        if lines:
            self.heard = time.monotonic()
        return [msgspec.json.decode(line, type=Said) for line in lines], ended


class Processes:
    """Trains in processes that stay.

    Args:
        count: how many.
        timeout_s: longest time that one may say nothing while it trains.
    """

    def __init__(self, work: StudyWork, count: int, timeout_s: float) -> None:
        self._work = work
        self._timeout_s = timeout_s
        self._selector = selectors.DefaultSelector()
        self._logs = tempfile.TemporaryDirectory(prefix="timeprest-study-")
        self._all: list[_Process] = []
        encoded = msgspec.json.encode(work)
        try:
            for number in range(count):
                process = _Process(number, encoded, Path(self._logs.name))
                self._all.append(process)
                self._selector.register(process.out, selectors.EVENT_READ, process)
        except BaseException:
            self.close()
            raise

    @property
    def free(self) -> int:
        """Processes that have nothing to do."""
        return sum(process.asked is None for process in self._all)

    @property
    def under_way(self) -> int:
        """Mini-batches done of trainings that aren't."""
        return sum(process.done for process in self._all)

    def give(self, asked: Asked) -> None:
        """Begin a training."""
        process = next(process for process in self._all if process.asked is None)
        process.asked, process.done, process.heard = asked, 0, time.monotonic()
        process.send(msgspec.json.encode(asked))

    def wait(self) -> list[Given]:
        """What is done by now, or in a moment.

        Raises:
            RunError: a process has died, or says nothing for too long; the message names it and
                its training.
            As `train_one`, naming the training.
        """
        found = []
        for key, _ in self._selector.select(_LOOK_S):
            process: _Process = key.data
            said, ended = process.read()
            for line in said:
                asked = process.asked
                process.done = line.done
                if asked is not None and line.error:
                    raise failed(self._work, asked, line.error, line.exit_code)
                if asked is not None and line.curve is not None:
                    found.append(Given(asked, line.curve, line.seconds))
                    process.asked = None
            if ended:
                raise self._died(process)
        now = time.monotonic()
        for process in self._all:
            if process.asked is not None and now - process.heard > self._timeout_s:
                raise RunError(
                    f"worker {process.number} (process {process.process.pid}) has said nothing for "
                    f"{self._timeout_s:g} s, training {self._work.label(process.asked)}: it may be "
                    "stuck, or slow (--timeout)"
                )
        return found

    def _died(self, process: _Process) -> RunError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.process.wait(_END_S)
        code, last = process.process.returncode, last_words(process.log)
        how = "closed its output" if code is None else how_it_ended(code)
        at = "" if process.asked is None else f", training {self._work.label(process.asked)}"
        return RunError(
            f"worker {process.number} (process {process.process.pid}) {how}{at}"
            + (last and f"; its last words: {last}")
        )

    def close(self) -> None:
        """End all processes: those that don't, by force."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            end = time.monotonic() + _END_S
            for process in self._all:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if process.process.poll() is None:
                        os.killpg(process.process.pid, how)
            for process in self._all:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.process.wait(max(0.0, end - time.monotonic()))
        for process in self._all:
            process.out.close()
            if process.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.process.stdin.close()
        self._selector.close()
        self._logs.cleanup()
