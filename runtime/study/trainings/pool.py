"""Where a study's trainings are done: each in a process of its own, one thread each, or in this
one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from ....profiles.errors import FileError, RunError, TimeprestError, UserError
from ...processes.failures import how_it_ended, last_words
from ...processes.start import WorkerProcess, end_processes, slow_libraries, start_process
from ...records.growing_file import new_lines
from ..figures.study import Curve
from .training import train_one
from .work import Asked, StudyWork
from .worker import WORK, Said

_LOOK_S = 0.05
_END_S = 5.0
"""What a process has to end, when it is asked to."""
_MODULE = f"{__package__}.worker"


class Trained(NamedTuple):
    """A training that is done."""

    asked: Asked
    curve: Curve
    seconds: float


class ThisProcess:
    """Trains here, one at a time."""

    def __init__(self, work: StudyWork, progress: Callable[[], None]) -> None:
        self._work = work
        self._progress = progress
        self._asked: Asked | None = None
        self.under_way = 0

    @property
    def free(self) -> int:
        """How many more trainings may begin: 1, or 0 until `wait`."""
        return int(self._asked is None)

    def give(self, asked: Asked) -> None:
        """Note it."""
        self._asked = asked

    def wait(self) -> list[Trained]:
        """Train it. Raises as `train_one`, naming the training."""
        asked = self._asked
        assert asked is not None
        begin = time.monotonic()
        try:
            curve = train_one(self._work, asked, self._note)
        except TimeprestError as error:
            raise failed(self._work, asked, str(error), error.exit_code) from error
        self._asked, self.under_way = None, 0
        return [Trained(asked, curve, time.monotonic() - begin)]

    def _note(self, done: int) -> None:
        self.under_way = done
        self._progress()

    def close(self) -> None:
        """Nothing is open."""


def failed(work: StudyWork, asked: Asked, why: str, exit_code: int) -> TimeprestError:
    """The error of a training that failed."""
    kind: type[TimeprestError] = UserError if exit_code == 2 else RunError
    return kind(f"training {work.label(asked)}: {why}")


class _Training:
    """One under way, and what its process has said."""

    def __init__(self, asked: Asked, process: WorkerProcess, said: Path, log: Path) -> None:
        self.asked, self.process, self.log = asked, process, log
        self.done = 0
        self.heard = time.monotonic()
        self._said, self._position = said, 0

    def read(self) -> list[Said]:
        """What it has said since."""
        lines, self._position = new_lines(self._said, self._position)
        if lines:
            self.heard = time.monotonic()
        return [msgspec.json.decode(line, type=Said) for line in lines]


class Processes:
    """Trains in processes, one for each training.

    Args:
        count: how many at once.
        timeout_s: longest time that one may say nothing.
    """

    def __init__(self, work: StudyWork, count: int, timeout_s: float) -> None:
        self._work = work
        self._count, self._given = count, 0
        self._timeout_s = timeout_s
        self._running: list[_Training] = []
        self._temporary = tempfile.TemporaryDirectory(prefix="timeprest-study-")
        self._folder = Path(self._temporary.name)
        (self._folder / WORK).write_bytes(msgspec.json.encode(work))

    @property
    def free(self) -> int:
        """How many more there may be at once."""
        return self._count - len(self._running)

    @property
    def under_way(self) -> int:
        """Mini-batches done of trainings that aren't."""
        return sum(training.done for training in self._running)

    def give(self, asked: Asked) -> None:
        """Begin a training. Raises FileError where no process can be started."""
        said, log = (self._folder / f"{self._given}.{kind}" for kind in ("jsonl", "log"))
        self._given += 1
        arguments = [str(self._folder / WORK), str(said), msgspec.json.encode(asked).decode()]
        try:
            with log.open("wb") as out:
                one_thread = {"OMP_NUM_THREADS": "1"}
                libraries = slow_libraries()
                process = start_process(_MODULE, arguments, one_thread, out, out, libraries)
        except OSError as error:
            raise FileError(f"{log}: a training's process: {error.strerror}") from None
        self._running.append(_Training(asked, process, said, log))

    def wait(self) -> list[Trained]:
        """What is done by now, or in a moment.

        Raises:
            RunError: a process has died, or says nothing for too long; the message names its
                training.
            As `train_one`, naming the training.
        """
        time.sleep(_LOOK_S)
        found: list[Trained] = []
        for training in self._running:
            code = training.process.poll()
            for line in training.read():
                training.done = line.done
                if line.error:
                    raise failed(self._work, training.asked, line.error, line.exit_code)
                if line.curve is not None:
                    found.append(Trained(training.asked, line.curve, line.seconds))
                    end_processes([training.process], _END_S)
                    break
            else:
                self._check(training, code)
        done = [each.asked for each in found]
        self._running = [each for each in self._running if each.asked not in done]
        return found

    def _check(self, training: _Training, code: int | None) -> None:
        """Raise RunError where a process that hasn't trained has ended, or is silent for long."""
        why = ""
        if code is not None:
            last = last_words(training.log)
            why = f"its process {how_it_ended(code)}" + (last and f"; its last words: {last}")
        elif time.monotonic() - training.heard > self._timeout_s:
            why = (
                f"its process has said nothing for {self._timeout_s:g} s: it may be stuck, or slow "
                "(--timeout)"
            )
        if why:
            raise failed(self._work, training.asked, why, 1)

    def close(self) -> None:
        """End all processes: those that don't, by force."""
        end_processes([training.process for training in self._running], _END_S)
        self._temporary.cleanup()
