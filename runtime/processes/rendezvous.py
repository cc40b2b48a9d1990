"""Rendezvous of a run's workers: barriers and gathers over a store, and how each worker ends.

Every worker has a thread that posts twice a second what it is at, and that ends the process when
another worker has failed, or when the launcher asks it to end. Of all workers one says why the run
failed: the one that knows the cause, or, where all have only waited in vain, the first of them,
which follows the waits to the culprit (`failures.blame`). A store behind a broken network answers
nothing and fails nothing, for a quarter of an hour: no end of a worker waits for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from ...profiles.errors import RunError, TimeprestError, UserError
from ...profiles.measuring.process_settings import end_with_parent
from ...profiles.tasks.hooks import describe_error
from ..communication.channel import PeerError
from ..communication.signed_store import ForeignEntryError, Secret
from ..records.status import WorkerStatus
from .environment import Launched, launched_by, take_signals
from .failures import GRACE_S, line_alone, line_of_all, line_when_asked, stopped_ranks
from .secret import OPEN_TO_ALL, take_secret
from .store import ARRIVAL_S, POLL_S, Failure, Membership, connect, status_in

SILENCE_S = 30.0
"""Longest time that a worker that has come may be silent while the others wait for it."""

BEAT_S = 0.5
ENDING_S = 5.0
"""Longest way from a wait in vain to the end of the process."""

STORE_S = 3.0
"""What the store gets to answer a worker that ends, beside `GRACE_S`."""

T = TypeVar("T")


class Rendezvous:
    """One worker's place among the workers of a run.

    Attributes:
        launched: how this worker was started.
        open_to_all: a line that nobody has given the workers a secret; empty where somebody has.
        silence_s: longest silence of the store that a run over several hosts bears.
    """

    def __init__(self, launched: Launched, say: Callable[[str], None], name: str = "rank") -> None:
        """Join.

        Args:
            say: prints a line for the user.
            name: what a process is called in messages until `begin`, its rank left out.

        Raises UserError when the address isn't one, or the secret can't be had; PeerError when
        nobody is there.
        """
        self.launched = launched
        secret = take_secret(launched, os.environ)
        self.open_to_all = OPEN_TO_ALL if secret is None else ""
        self._say = say
        self.rank = launched.rank
        self.silence_s = SILENCE_S
        self._began = self._answered = time.monotonic()
        self._leaving = threading.Event()
        self._failing = threading.Event()
        self._lost = threading.Event()
        self._saying = threading.Lock()
        self._printing, self._said = threading.Lock(), False
        serves, secret = not launched.agent_store and self.rank == 0, secret or Secret(b"")
        self.store = connect(launched, secret, serve=serves)
        # A wait of one thread on a store keeps the others from it.
        self._own = connect(launched, secret, serve=False)
        self._membership = Membership(self._own, launched, f"{name} {self.rank}")
        self._membership.beat()
        threading.Thread(target=self._watch, daemon=True).start()
        if not launched.one_host:
            threading.Thread(target=self._end_when_alone, daemon=True).start()

    def end_when_asked(self) -> None:
        """Have signals from torchrun or srun end this process, one worker saying why."""
        self._asked, asked = os.pipe()
        os.set_blocking(asked, False)
        signal.set_wakeup_fd(asked)
        take_signals(_wake)
        threading.Thread(target=self._end_when_asked, daemon=True).start()

    def run(self, work: Callable[[], object]) -> NoReturn:
        """Do this worker's work, and end the process with its exit code. Of the errors of all
        workers, one is told, by one of them."""
        try:
            work()
        except TimeprestError as error:
            self.fail(error)
            self.leave(error.exit_code)
        except BaseException as error:  # the user's code runs here, too
            if isinstance(error, Exception):
                with contextlib.suppress(OSError):
                    traceback.print_exc()
            self.fail(RunError(f"{self._membership.status().name}: {describe_error(error)}"))
            self.leave(1)
        self.leave(0)

    def begin(self, status: Callable[[], WorkerStatus], statuses: Path, silence_s: float) -> None:
        """Training begins; the others are told at once who this worker is.

        Args:
            status: what it is at; `statuses`: folder of all statuses of this host.
            silence_s: longest silence of the store.
        """
        self._membership.status, self._membership.statuses = status, statuses
        self.silence_s = max(SILENCE_S, silence_s)
        with contextlib.suppress(RuntimeError):
            self._membership.beat()

    def gather(self, what: str, mine: bytes = b"") -> list[bytes]:
        """What each worker says to `what`, by rank; waits for all. Raises PeerError."""
        keys = [f"{what}/{rank}" for rank in range(self.launched.world_size)]
        beats: dict[int, tuple[bytes, float]] = {}
        try:
            self.store.set(keys[self.rank], mine)
            # Asked again and again: torch prints a warning when a wait takes too long.
            while not self.store.check(keys):
                time.sleep(POLL_S)
                for rank, key in enumerate(keys):
                    if not self.store.check([key]):
                        self._check_alive(rank, beats, what)
            return [self.store.get(key) for key in keys]
        except RuntimeError as error:
            raise PeerError(f"rank {self.rank}: the store of rank 0 is gone") from error

    def _check_alive(self, rank: int, beats: dict[int, tuple[bytes, float]], what: str) -> None:
        now = time.monotonic()
        if not self.store.check([f"beat/{rank}"]):
            if now - self._began > ARRIVAL_S:
                raise PeerError(f"rank {rank} didn't come within {ARRIVAL_S:g} s")
            return
        beat = self.store.get(f"beat/{rank}")
        seen, since = beats.setdefault(rank, (beat, now))
        if seen != beat:
            beats[rank] = (beat, now)
        elif now - since > SILENCE_S:
            host = status_in(beat).host
            raise PeerError(
                f"rank {rank} on {host}: nothing came for {SILENCE_S:g} s while waiting for "
                f"{what!r}"
            )

    def share(self, what: str, mine: str) -> str:
        """What rank 0 says to `what`, for all. Raises PeerError."""
        return self.gather(what, mine.encode())[0].decode()

    def check_same(self, what: dict[str, str]) -> None:
        """Raise UserError, on all workers, when they don't agree on all of this."""
        found = [json.loads(text) for text in self.gather("same", json.dumps(what).encode())]
        for rank, other in enumerate(found):
            for name, wanted in found[0].items():
                if other.get(name) != wanted:
                    raise UserError(
                        f"rank {rank} has another {name} than rank 0: {other.get(name)} and "
                        f"{wanted}: start the same command with the same files on all hosts"
                    )

    # Failures --------------------------------------------------------------------------------

    def fail(self, error: TimeprestError) -> None:
        """Let all workers know, and tell the user if this one is to: one line from one of all."""
        self._failing.set()
        try:
            line = self._within(GRACE_S + STORE_S, lambda: line_of_all(self._membership, error))
        except RuntimeError:
            # Better said on every host than not at all.
            line = f"rank {self.rank}: {line_alone(self._membership, error)}; {self._no_store()}"
        if line is not None:
            _note_for_torchrun(line)
            self.say(Failure(line, error.exit_code, isinstance(error, PeerError)))
            self._end_the_stopped()

    def say(self, failure: Failure) -> None:
        """Tell the launcher, and print a line for the user; where that can't be, it is left to
        the others again. Once: where the store can't be reached, several threads may want to."""
        with self._printing:
            if self._said:
                return
            self._said = True
            with contextlib.suppress(RuntimeError):
                self._within(STORE_S, lambda: self._own.set("said", msgspec.json.encode(failure)))
            try:
                self._say(failure.message)
            except OSError:
                with contextlib.suppress(RuntimeError):
                    self._within(STORE_S, lambda: self._own.add("told", -1))

    def _no_store(self) -> str:
        at = f"{self.launched.address}:{self.launched.port}"
        return f"rank 0's store at {at} doesn't answer: is its host there, and the network to it?"

    def _within(self, seconds: float, ask: Callable[[], T]) -> T:
        """What the store answers. Raises RuntimeError where it is gone, or silent for so long."""
        found: list[T] = []

        def asked() -> None:
            with contextlib.suppress(RuntimeError, ForeignEntryError):
                found.append(ask())

        if not self._lost.is_set():
            asking = threading.Thread(target=asked, daemon=True)
            asking.start()
            asking.join(seconds)
        if not found:
            # Not to be waited for again.
            self._lost.set()
            raise RuntimeError(self._no_store())
        return found[0]

    def _end_the_stopped(self) -> None:
        """A worker of this host that stands still can't end when asked, and keeps the rest."""
        try:
            here = self._within(STORE_S, lambda: self._membership.here(self._membership.known()))
        except RuntimeError:
            return
        for rank in stopped_ranks(here) - {self.rank}:
            with contextlib.suppress(OSError):
                os.kill(here[rank].pid, signal.SIGKILL)

    def leave(self, code: int) -> NoReturn:
        """End this process at once: whatever waits for another worker mustn't keep it alive, nor
        crash it while the interpreter is taken down. Where all went well, a rank 0 that has the
        store stays until all have gone."""
        self._leaving.set()
        # Another thread may be about to say why the run failed.
        self._saying.acquire(timeout=2 * STORE_S)
        serves = self.rank == 0 and not self.launched.agent_store
        patience_s = (GRACE_S if code else SILENCE_S) if serves else 0.0
        with contextlib.suppress(RuntimeError):
            self._within(patience_s + STORE_S, lambda: self._say_goodbye(patience_s))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)

    def _say_goodbye(self, patience_s: float) -> None:
        self._own.set(f"left/{self.rank}", b"")
        keys = [f"left/{rank}" for rank in range(self.launched.world_size)]
        end = time.monotonic() + patience_s
        while time.monotonic() < end and not self._own.check(keys):
            time.sleep(POLL_S)

    # Threads ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._leaving.wait(BEAT_S):
            try:
                self._membership.beat()
                failed = self._own.add("failed", 0) > 0
                self._answered = time.monotonic()
            except RuntimeError:
                return
            if failed and self._knows_nothing() and not self._leaving.is_set():
                # Still computing, or waiting for somebody who has gone.
                self.leave(1)

    def _knows_nothing(self) -> bool:
        """Whether this worker hasn't noticed that another one has failed, a moment after somebody
        has said why; or, while nobody has, at the end of what it gets to notice."""
        end = time.monotonic() + 2 * GRACE_S
        while time.monotonic() < end:
            if self._failing.wait(POLL_S):
                return False
            try:
                if self._own.check(["said"]):
                    end = min(end, time.monotonic() + BEAT_S)
            except RuntimeError:
                # The store has gone with rank 0: that is what there is to say, if anything.
                return not self._failing.wait(max(0.0, end - time.monotonic()))
        return True

    def _end_when_asked(self) -> None:
        """SIGTERM comes from the launcher, mostly because another worker has died. Others that
        were sent to the launcher are passed on by it."""
        # Others are of handlers that the user's code has set.
        while signal.getsignal(asked := os.read(self._asked, 1)[0]) is not _wake:
            pass
        how = f"stopped by {signal.Signals(asked).name}"
        if self._leaving.is_set():
            return
        failing = self._failing.is_set()
        self._failing.set()
        with self._saying:
            try:
                line = self._within(STORE_S, lambda: line_when_asked(self._membership, how))
            except RuntimeError:
                if failing:
                    # Another thread knows why, and ends the process.
                    return
                line = f"rank {self.rank}: {how}; {self._no_store()}"
            if line is not None:
                self.say(Failure(line))
        self.leave(1)

    def _end_when_alone(self) -> None:
        """A worker that waits for nobody wouldn't find out that the network is gone."""
        while not self._leaving.wait(BEAT_S):
            silent_s = time.monotonic() - self._answered
            if silent_s > self.silence_s and not self._failing.is_set():
                self._failing.set()
                self._lost.set()
                line = f"rank {self.rank}: {self._no_store()} Silent for {silent_s:.0f} s"
                self.say(Failure(line))
                self.leave(1)


def join(launcher: int, name: str = "rank") -> Rendezvous:
    """Join the processes that our own launcher has started.

    Args:
        launcher: its process, with which this one ends.
        name: what these processes are called in messages.
    """
    end_with_parent(launcher)
    # The launcher says that a worker was killed, and by which signal.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    launched = launched_by(os.environ)
    assert launched is not None
    return Rendezvous(launched, _log, name)


def _log(line: str) -> None:
    """Of a full disk the launcher is told all the same."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr)


def _wake(*_: object) -> None:
    """The number of the signal has been written into the pipe."""


def _note_for_torchrun(message: str) -> None:
    """torchrun shows at its end what lies in this file."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
