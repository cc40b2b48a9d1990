"""The store at which the processes of a run meet: how they reach it, the workers' heartbeats, and
what a launcher and its workers say to each other there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch.distributed as dist

from ...profiles.errors import RunError, UserError
from ..communication.channel import PeerError
from ..communication.signed_store import Secret, SignedStore
from ..records.progress import Observer
from ..records.status import WorkerStatus, read_statuses
from .environment import LOOPBACK, Launched
from .failures import GRACE_S, Statuses, limit_reached
from .secret import SECRET_VARIABLE, new_secret, take_secret

ARRIVAL_S = 120.0
"""Longest wait for a worker to come at all: hosts may start one after another."""

AGENT_S = 10.0
"""Longest wait for torchrun's own store: it was there before any worker was started."""

POLL_S = 0.05

NAME = "timeprest"

_ASKED, _GO_ON, _TASK = "asked", b"go on", "task"


Going = Callable[[int, bool], bool]
"""Whether to go on where the pipeline has drained, after so many mini-batches of the run, and
whether a checkpoint has been written there."""


class Failure(NamedTuple):
    """Why a run failed, as the worker that reports says it.

    Attributes:
        waited: it only waited for another worker in vain.
    """

    message: str
    exit_code: int = 1
    waited: bool = False


class Membership:
    """Who is in a run and what each is at, and whether it has failed, as workers tell each other.

    Attributes:
        store: counts in "failed" and "told" how many workers know that the run has failed, and were
            about to tell the user why; "failing/1" is there when rank 1 knows.
        status: what this worker is at.
        statuses: folder of the workers' statuses on this host, once there is one.
    """

    def __init__(self, store: SignedStore, launched: Launched, name: str) -> None:
        """`name`: of this worker until training begins."""
        self.store = store
        self.launched = launched
        first = WorkerStatus(
            rank=launched.rank, name=name, host=socket.gethostname(), pid=os.getpid()
        )
        self.status: Callable[[], WorkerStatus] = lambda: first
        self.statuses: Path | None = None
        self._count = 0

    def beat(self) -> None:
        """Tell the others. Raises RuntimeError where the store is gone, as all of these."""
        self._count += 1
        text = msgspec.json.encode(self.status())
        self.store.set(f"beat/{self.launched.rank}", f"{self._count} ".encode() + text)

    def beats(self) -> dict[int, bytes]:
        """The last of each worker that has come, by rank: they differ while it lives."""
        keys = {rank: f"beat/{rank}" for rank in range(self.launched.world_size)}
        return {rank: self.store.get(key) for rank, key in keys.items() if self.store.check([key])}

    def known(self) -> dict[int, WorkerStatus]:
        """What is known of all: exactly on this host, of the others as last told."""
        return {rank: status_in(beat) for rank, beat in self.beats().items()} | self.in_files()

    def in_files(self) -> dict[int, WorkerStatus]:
        """What is known of this host's workers where the store doesn't answer."""
        return self.here({} if self.statuses is None else read_statuses(self.statuses))

    def here(self, statuses: Statuses) -> dict[int, WorkerStatus]:
        """Those of this host."""
        host = self.status().host
        return {rank: status for rank, status in statuses.items() if status.host == host}

    def fail(self) -> None:
        """Let all know that the run has failed, and that this worker knows it."""
        self.store.set(f"failing/{self.launched.rank}", b"")
        self.store.add("failed", 1)

    def reports(self) -> bool:
        """Whether this worker is the one of all that tells the user why."""
        return self.store.add("told", 1) <= 1


def status_in(beat: bytes) -> WorkerStatus:
    """What a heartbeat says."""
    return msgspec.json.decode(beat.split(b" ", 1)[1], type=WorkerStatus)


class LocalStore:
    """The store of a local run, which its launcher holds; nothing beyond this host reaches it.

    Attributes:
        port: where it listens on the loopback device.
        secret: that the workers must have, as their environment says it.
    """

    def __init__(self) -> None:
        self._server = _serve(LOOPBACK, 0)
        self.port = self._server.port
        self.secret = new_secret()
        launched = Launched("torchrun", 0, 1, LOOPBACK, self.port, agent_store=True)
        secret = take_secret(launched, {SECRET_VARIABLE: self.secret})
        assert secret is not None
        self._space = _name_space(self._server, secret, launched.attempt)
        self._answered = 0

    def be_asked(self) -> None:
        """Have the workers ask where the pipeline drains (`LaunchingProcess.drained`)."""
        self._space.set(_ASKED, b"")

    def give_task(self, content: bytes) -> None:
        """Have the workers take this for the task (`LaunchingProcess.task`)."""
        self._space.set(_TASK, content)

    def answer(self, going: Going) -> None:
        """Answer a worker's question, if there is one."""
        if self._space.check([f"question/{self._answered}"]):
            text = self._space.get(f"question/{self._answered}")
            going_on = going(*msgspec.json.decode(text, type=tuple[int, bool]))
            self._space.set(f"answer/{self._answered}", _GO_ON if going_on else b"")
            self._answered += 1

    def failure(self) -> Failure | None:
        """Why the run failed, as a worker says; None: none does, and from now on none will."""
        told_before = self._space.add("told", 1) > 1
        end = time.monotonic() + GRACE_S
        while told_before and time.monotonic() < end:
            if self._space.check(["said"]):
                return msgspec.json.decode(self._space.get("said"), type=Failure)
            time.sleep(POLL_S)
        return None


class LaunchingProcess(Observer):
    """The launcher, which a worker asks over the store. Raises PeerError where it is gone."""

    def __init__(self, store: SignedStore, rank: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        # The other workers wait for this one, as long as that.
        self._within_s = 0.9 * timeout_s
        self._questions = 0

    def is_asked(self) -> bool:
        """Whether it wants to be asked where the pipeline drains: it tells the run's callbacks."""
        with self._there():
            return self._store.check([_ASKED])

    def drained(self, mini_batches: int, *, checkpoint: bool) -> bool:
        """Ask whether to go on. Raises PeerError when no answer comes in time."""
        end = time.monotonic() + self._within_s
        with self._there():
            question = msgspec.json.encode((mini_batches, checkpoint))
            self._store.set(f"question/{self._questions}", question)
            while not self._store.check([f"answer/{self._questions}"]):
                if time.monotonic() > end:
                    raise PeerError(
                        f"rank {self._rank}: the launching process gave no answer within "
                        f"{self._within_s:g} s after mini-batch {mini_batches}: a callback of "
                        "the run takes too long; give a longer timeout_s"
                    )
                time.sleep(POLL_S)
            answer = self._store.get(f"answer/{self._questions}")
        self._questions += 1
        return answer == _GO_ON

    def task(self) -> bytes | None:
        """A task that it sends, since no file has it; None: each finds it by its name.

        Raises ForeignEntryError where somebody else has sent one.
        """
        with self._there():
            return self._store.get(_TASK) if self._store.check([_TASK]) else None

    @contextmanager
    def _there(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerError(f"rank {self._rank}: the launcher is gone") from error


def connect(launched: Launched, secret: Secret, *, serve: bool) -> SignedStore:
    """A worker's own connection to the store; `serve`: to one that it starts for all. Raises
    PeerError when nobody is there, UserError when the address isn't one."""
    at, bound = (launched.address, launched.port), timedelta(seconds=ARRIVAL_S)
    within_s = AGENT_S if launched.agent_store else ARRIVAL_S
    try:
        if not serve:
            _wait_for_listener(at, within_s)
        store = (
            _serve(*at) if serve else dist.TCPStore(*at, None, False, bound, wait_for_workers=False)  # type: ignore[attr-defined]
        )
    except (OSError, RuntimeError) as error:
        why = f": {error.strerror}" if isinstance(error, OSError) and error.strerror else ""
        raise PeerError(
            f"rank {launched.rank}: nobody answers at {launched.address}:{launched.port} "
            f"(MASTER_ADDR, MASTER_PORT) within {within_s:g} s{why}"
        ) from error
    return _name_space(store, secret, launched.attempt)


def _wait_for_listener(at: tuple[str, int], within_s: float) -> None:
    """Raises OSError. torch waits more than twice as long as it is told to, and prints its frames
    on the way."""
    end = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(at, max(end - time.monotonic(), POLL_S)).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(4 * POLL_S)


def _name_space(store: dist.Store, secret: Secret, attempt: int) -> SignedStore:  # type: ignore[name-defined]
    return SignedStore(store, secret).below(f"{NAME}/{attempt}")


def _serve(address: str, port: int) -> dist.TCPStore:  # type: ignore[name-defined]
    """A store that listens at that address and at no other; port 0: at a free one."""
    try:
        family, _, _, _, at = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(at)
        listening.listen(2048)
    except OSError as error:
        raise UserError(
            f"rank 0 can't listen at {address}:{port} (MASTER_ADDR, MASTER_PORT): {error.strerror}"
        ) from None
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            address,
            listening.getsockname()[1],
            None,
            True,
            timedelta(seconds=ARRIVAL_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    except RuntimeError as error:
        words = " ".join(str(error).split())
        raise RunError(
            f"the store at which workers meet can't be started: {words[:200]}{limit_reached(words)}"
        ) from None
