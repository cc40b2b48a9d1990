"""The local launcher: starts the worker processes of a run on this machine, as torchrun does.

Each process runs the same entry with the same environment variables as under torchrun, and meets
the others at a store which the launcher holds (`store`); it listens on the loopback device
alone. When one worker fails, the launcher ends the others within seconds; when the launcher dies,
the system ends them.
"""

from __future__ import annotations

import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ...profiles.errors import FileError, RunError, StoppedError, TimeprestError, UserError
from ..records.progress import Observer, Tail
from ..records.run_dir import RunDir
from ..records.status import WorkerStatus, read_statuses
from .environment import LOOPBACK, Launched, take_signals, variables_of
from .failures import GRACE_S, circumstances, how_it_ended, last_words, limit_reached, settled
from .secret import SECRET_VARIABLE
from .start import WORKER, WorkerProcess, end_processes, start_process
from .store import Failure, Going, LocalStore

LOOK_S = 0.1
"""Between two looks at the workers."""


def launch(
    run_dir: RunDir,
    labels: Sequence[str],
    observer: Observer,
    task: bytes | None = None,
    libraries: Sequence[str] = (),
) -> None:
    """Run all workers of a prepared run directory and wait for their end.

    Args:
        labels: how each is named in messages, by rank.
        observer: is told of progress. Where it is waited for, workers ask it whether to go on.
        task, libraries: as of `run_workers`.

    Raises:
        RunError: a worker failed; the message says which one, at which operation and why.
            UserError where the user's input is the cause.
        StoppedError: a signal ended the run.
        KeyboardInterrupt: the user stopped the run; all workers have ended.
    """
    tail, start = Tail(run_dir.metrics, observer), _StartProgress(run_dir, len(labels), observer)

    def poll() -> None:
        start.over |= tail.poll()
        start.poll()

    def going(mini_batches: int, checkpoint: bool) -> bool:
        # What it is to decide by was written before.
        tail.poll()
        return observer.drained(mini_batches, checkpoint=checkpoint)

    asked = going if observer.waited_for else None
    run_workers(WORKER, run_dir, labels, poll, asked, task=task, libraries=libraries)


class _StartProgress:
    """How far the workers have come, until they train."""

    def __init__(self, run_dir: RunDir, count: int, observer: Observer) -> None:
        self.run_dir = run_dir
        self.count = count
        self.observer = observer
        self.begin = time.time()
        self.said = ""
        self.over = False

    def poll(self) -> None:
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


def run_workers(
    module: str,
    where: RunDir,
    labels: Sequence[str],
    poll: Callable[[], None],
    going: Going | None = None,
    *,
    task: bytes | None = None,
    libraries: Sequence[str] = (),
    logs_kept: bool = True,
) -> None:
    """Start workers on this machine and wait for their end, calling `poll` a few times a second.

    Args:
        module: what each one runs; its arguments are the directory and the number of the process
            that started it, with which it is to end.
        where: their directory, with their statuses and logs.
        labels: how each is named in messages, by rank.
        going: answers whether to go on where the pipeline has drained; None: workers don't ask.
        task: bytes of a task that no file has (`profiles.tasks.objects`); None: each finds it by
            its name.
        libraries: modules that all of them will need (`start.slow_libraries`).
        logs_kept: the directory stays, so that a message may send the user to the logs; where
            it doesn't, the last line of a log stands in the message.

    Raises as `launch`, and what `poll` raises; all workers have ended then.
    """
    store, failure = LocalStore(), None
    processes: list[WorkerProcess] = []
    variables = {SECRET_VARIABLE: store.secret}
    if going is not None:
        store.be_asked()
    if task is not None:
        store.give_task(task)

    def start(launched: Launched, out: IO[bytes], err: IO[bytes]) -> None:
        own = {**variables_of(launched), **variables}
        found = start_process(module, [str(where.path)], own, out, err, libraries)
        processes.append(found)

    with _signals() as arrived:
        try:
            logs = _start(start, where, len(labels), store.port)
            while True:
                codes = [process.poll() for process in processes]
                failed = [rank for rank, code in enumerate(codes) if code]
                if failed or arrived or None not in codes:
                    break
                poll()
                if going is not None:
                    store.answer(going)
                time.sleep(LOOK_S)
            if failed:
                # Before the others are ended: what they wait for tells where the run was.
                failure = store.failure() or _of_its_end(codes, labels, where, logs, kept=logs_kept)
        finally:
            end_processes(processes, GRACE_S)
        poll()
    if arrived:
        name = signal.Signals(arrived[0]).name
        raise KeyboardInterrupt if name == "SIGINT" else StoppedError(f"stopped by {name}")
    if failure is not None:
        printed = f". What the workers printed is in {logs}" if failure.waited else ""
        kind: type[TimeprestError] = UserError if failure.exit_code == 2 else RunError
        raise kind(failure.message + (printed if logs_kept else ""))


def _start(
    start: Callable[[Launched, IO[bytes], IO[bytes]], None], where: RunDir, count: int, port: int
) -> Path:
    """Start all processes (`start`: one). Returns the folder of their logs. Raises FileError."""
    logs = where.path / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        # A run that is started again keeps the logs of before.
        logs = Path(tempfile.mkdtemp(prefix="timeprest_", dir=logs))
        for rank in range(count):
            launched = Launched(
                "torchrun", rank, count, LOOPBACK, port, agent_store=True, local_rank=rank
            )
            with (
                _log(logs, rank, "stdout").open("wb") as out,
                _log(logs, rank, "stderr").open("wb") as err,
            ):
                start(launched, out, err)
    except OSError as error:
        what = f"{error.filename}: can't be written" if error.filename else "the workers' files"
        raise FileError(f"{what}: {error.strerror}") from None
    return logs


def _log(logs: Path, rank: int, stream: str) -> Path:
    return logs / f"rank{rank}.{stream}"


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Numbers of the signals that arrived of those that would end this process.

    Afterwards all is as it was.
    """
    arrived: list[int] = []
    before = take_signals(lambda number, _: arrived.append(number))
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _of_its_end(
    codes: Sequence[int | None], labels: Sequence[str], where: RunDir, logs: Path, *, kept: bool
) -> Failure:
    """Of a worker that couldn't say itself why it failed. `kept`: the user has the logs, too."""
    code, rank = min((code, rank) for rank, code in enumerate(codes) if code)
    around = circumstances(settled(lambda: read_statuses(where.statuses), rank), rank)
    last = last_words(_log(logs, rank, "stderr"))
    around += limit_reached(last)
    printed = f". Its output is in {logs}"
    if not kept:
        printed = last and f". Its last words: {last}"
    return Failure(f"{labels[rank]} {how_it_ended(code)}{around}{printed}")
