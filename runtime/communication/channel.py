"""What every transport is to a worker (`Channels`), and messages within one process.

A message is named by its route (which tensor, from which worker to which) and its kind, forward or
gradient. Messages of one route and kind arrive in the sequence they were sent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor

from ...profiles.errors import RunError
from ..prepare.messages import MessageRoute, MessageSeries
from ..records.status import Status
from .posts import Post, Posts, no_posts

START_S = 60.0
"""Shortest bound of a wait for the other workers to start, whatever the bound for a message is."""

_POLL_S = 20e-6
"""Between two looks at what a GPU has under way."""


class PeerError(RunError):
    """A wait on another worker failed: it is gone, or the bound was reached."""


def lost(peer: str, error: BaseException, timeout: timedelta) -> PeerError:
    """The error of a wait that failed. `peer`: the name of whoever was waited for."""
    return PeerError(f"waiting for {peer}: {why_lost(error, timeout)}")


def why_lost(error: BaseException, timeout: timedelta, option: str = " (--timeout)") -> str:
    """What a failed wait means, in a few words. `option`: how to change the bound."""
    text = " ".join(str(error).split())
    late = "timed out" in text.lower() or "timeout" in text.lower()
    if late or isinstance(error, TimeoutError):
        return f"nothing came for {timeout.total_seconds():g} s{option}"
    if "closed" in text or "reset" in text or "Broken pipe" in text:
        return "it is gone"
    return text[:200]


def wait_until(done: Callable[[], bool], timeout: timedelta) -> None:
    """Poll until something that a GPU has under way is done. Raises TimeoutError.

    The waits of NCCL are the device's: the host's thread has no bound there.
    """
    end = time.monotonic() + timeout.total_seconds()
    while not done():
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(_POLL_S)


class Channels(Protocol):
    """A worker's messages to and from the others."""

    def open(self, series: Sequence[MessageSeries], posts: Posts = no_posts) -> None:
        """Announce all messages that this worker is going to take.

        Args:
            posts: when each is posted, for those that go by that.
        """
        return

    def advance(self) -> None:
        """This worker has handed in the next one of its operations."""
        return

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Start sending; never waits for the receiver. The tensor must not change any more.

        `kept`: its memory is held for the backward anyway, and doesn't count here.
        """

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        """The next message, waiting for it no longer than the bound. Raises PeerError."""

    def throttle(self, most: int) -> None:
        """Wait, within the bound, until no peer has more than `most` messages still to take:
        training is held back by its in-flight limits, forwards alone by this. Raises PeerError."""
        return

    def close(self) -> None:
        """Wait, within the bound, until all that was sent has gone. Raises PeerError."""
        self.throttle(0)

    def end(self) -> None:
        """End their threads and close their sockets, after the last `close`.

        Not where a run fails: processes end at once then, so that none waits for another.
        """
        return

    @property
    def held_bytes(self) -> int:
        """Bytes of posted receive buffers and of messages still being sent."""


class PeerChannels(Channels):
    """Base of those that say whom they wait for, and who is lost where a message fails."""

    def __init__(
        self, names: Sequence[str], timeout_s: float, status: Status | None = None
    ) -> None:
        """`names`: of all workers, by rank, for errors; `status`: is told whom this one waits
        for."""
        self.names = names
        self.status = status or Status()
        self.timeout = timedelta(seconds=timeout_s)

    @contextmanager
    def talking_to(self, peer: int) -> Iterator[None]:
        """Raises PeerError where something inside fails, or takes too long."""
        try:
            yield
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            # Who finds out when it sends can go on no more than who waits.
            self.status.wait((peer,))
            raise lost(self.names[peer], error, self.timeout) from error


class SendingThread:
    """Waits for sends under way, one after another, so that computing doesn't.

    Attributes:
        error: of the first that failed, with which it has ended.
        pending_bytes: of those that haven't gone.
        count: of those.
    """

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: longest wait for it."""
        self.error: BaseException | None = None
        self.pending_bytes = 0
        self._timeout_s = timeout_s
        self._idle = threading.Condition()
        self.count = 0
        self._queue: queue.SimpleQueue[tuple[Callable[[], None], int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, send: Callable[[], None], counted_bytes: int) -> None:
        """Have it wait for this send too, and hold until then whatever that holds."""
        with self._idle:
            self.count += 1
            self.pending_bytes += counted_bytes
        self._queue.put((send, counted_bytes))

    def wait_for(self, most: int) -> bool:
        """Wait until at most so many sends are left; False after a failure or the bound."""
        with self._idle:
            few = self._idle.wait_for(
                lambda: self.count <= most or self.error is not None, self._timeout_s
            )
            return few and self.error is None

    def end(self) -> None:
        """Let the thread run dry and end. One that is still there when the interpreter ends may
        take the process down with it."""
        self._queue.put(None)
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            send, counted_bytes = item
            try:
                send()
            except BaseException as error:
                with self._idle:
                    self.error = error
                    self._idle.notify_all()
                return
            with self._idle:
                self.count -= 1
                self.pending_bytes -= counted_bytes
                self._idle.notify_all()
            del item, send


class Mailbox:
    """What waits within one process to be received; shared by all its workers."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, str], deque[tuple[Tensor, int]]] = {}
        self.waiting_bytes: dict[int, int] = {}


class LocalChannels(Channels):
    """Queues within one process: between the workers of an inline run, and between the stages of
    a worker. One object for each worker."""

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self.rank = rank
        self._mailbox = mailbox

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Hand it over to a stage of the same worker, which copies what it changes in place.

        For another worker copy it, as between processes; and lay it out anew: dropout takes random
        numbers in the sequence in memory.
        """
        counted = tensor.nbytes
        if not route.handed_over:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        elif kept:
            counted = 0
        waiting = self._mailbox.queues.setdefault((route.number, kind), deque())
        waiting.append((tensor, counted))
        self._count(route.ends(kind)[1], counted)

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        """Raises PeerError when nothing was sent: the sequence is wrong."""
        waiting = self._mailbox.queues.get((route.number, kind))
        if not waiting:
            raise PeerError(f"no {kind} message of {route.spec.name!r} has been sent")
        tensor, counted = waiting.popleft()
        self._count(self.rank, -counted)
        return tensor

    def _count(self, rank: int, change: int) -> None:
        counts = self._mailbox.waiting_bytes
        counts[rank] = counts.get(rank, 0) + change

    @property
    def held_bytes(self) -> int:
        """Messages that wait for this worker, but for what its stages keep anyway."""
        return self._mailbox.waiting_bytes.get(self.rank, 0)


class TwoKindsOfChannels(Channels):
    """Channels of one kind for messages of some routes (within a worker, within a host), and of
    another for those of all others."""

    def __init__(self, near: Channels, others: Channels, routes: Iterable[MessageRoute]) -> None:
        """`routes`: those of `near`."""
        self._near, self._others = near, others
        self._numbers = {route.number for route in routes}

    def _of(self, route: MessageRoute) -> Channels:
        return self._near if route.number in self._numbers else self._others

    def open(self, series: Sequence[MessageSeries], posts: Posts = no_posts) -> None:
        """A tensor may come by both kinds: each knows the routes of its own."""

        def far(rank: int) -> list[Post]:
            return [post for post in posts(rank) if post.route.number not in self._numbers]

        self._near.open(series)
        self._others.open([c for c in series if not c.routes[0].handed_over], far)

    def advance(self) -> None:
        self._others.advance()

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        self._of(route).send(route, kind, tensor, kept=kept)

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        return self._of(route).receive(route, kind)

    def throttle(self, most: int) -> None:
        self._near.throttle(most)
        self._others.throttle(most)

    def end(self) -> None:
        self._near.end()
        self._others.end()

    @property
    def held_bytes(self) -> int:
        return self._near.held_bytes + self._others.held_bytes
