"""Messages between processes by gloo, from host memory to host memory."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import cycle, islice
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.systems.operations import BACKWARD
from ..prepare.messages import MessageRoute, MessageSeries
from ..records.status import Status
from .channel import PeerError, ProcessChannels, lost


class GlooChannels(ProcessChannels):
    """Messages between processes by torch.distributed; one object per worker.

    Receives are posted ahead; where messages have shapes of their own, those of the shapes. Sends
    are waited for by a thread of their own for each peer, so that a tensor is let go as soon as it
    is gone, and computing never waits for a receiver.
    """

    def __init__(
        self,
        names: Sequence[str],
        timeout_s: float,
        status: Status | None = None,
        room: Callable[[Sequence[int], torch.dtype], Tensor] | None = None,
        *,
        varying: bool = False,
    ) -> None:
        """
        Args:
            names: of all workers, by rank; for messages.
            status: is told whom this worker waits for.
            room: makes the tensors, by shape and dtype, that messages are received into.
            varying: messages have shapes of their own, and each comes behind one that says it.
        """
        self._room = room or _room
        self._varying = varying
        self.names = names
        self.status = status or Status()
        self.timeout = timedelta(seconds=timeout_s)
        self._posted: dict[tuple[int, str], deque[tuple[dist.Work, Tensor]]] = {}
        self._to_post: dict[tuple[int, str], Iterator[MessageRoute]] = {}
        self._senders: dict[int, _Sender] = {}

    def open(self, series: Sequence[MessageSeries]) -> None:
        """Post the first receives."""
        self._to_post = {}
        for each in series:
            upcoming = islice(cycle(each.routes), each.count)
            for route in each.routes:
                self._to_post[route.number, each.kind] = upcoming
                self._posted[route.number, each.kind] = deque()
            for _ in range(each.ahead):
                self._post_next(upcoming, each.kind)

    def _post_next(self, upcoming: Iterator[MessageRoute], kind: str) -> bool:
        """Post the receive that comes next in its series. Returns whether there is one."""
        route = next(upcoming, None)
        if route is None:
            return False
        buffer = (
            _shape_of(torch.empty(route.shape(kind), device="meta"))
            if self._varying
            else self._room(route.shape(kind), route.spec.dtype)
        )
        posted = self._receive_into(buffer, route, kind, of_shape=self._varying)
        self._posted[route.number, kind].append((posted, buffer))
        return True

    def _receive_into(
        self, buffer: Tensor, route: MessageRoute, kind: str, *, of_shape: bool = False
    ) -> dist.Work:
        """Post a receive. `of_shape`: not of a message, but of the shape that it has."""
        peer = route.ends(kind)[0]
        try:
            work = dist.irecv(buffer, peer, tag=_tag(route, kind, of_shape=of_shape))
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        assert work is not None
        return work

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Hand the message to gloo and its thread."""
        peer = route.ends(kind)[1]
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = _Sender(self.timeout)
        if sender.error is not None:
            raise self._lost(peer, sender.error)
        kept = kept and tensor.is_contiguous()
        tensor = tensor.contiguous()
        work: dist.Work | _BehindItsShape | None
        try:
            if self._varying:
                shape = _shape_of(tensor)
                first = dist.isend(shape, peer, tag=_tag(route, kind, of_shape=True))
            work = dist.isend(tensor, peer, tag=_tag(route, kind))
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        assert work is not None
        if self._varying:
            assert first is not None
            work = _BehindItsShape(first, shape, work)
        sender.put(work, tensor, 0 if kept else tensor.nbytes)

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        """Wait for the oldest posted receive, and post another one."""
        key = route.number, kind
        posted, upcoming = self._posted[key], self._to_post[key]
        while not posted and self._post_next(upcoming, kind):
            pass
        work, buffer = posted.popleft()
        peer = route.ends(kind)[0]
        self.status.wait((peer,))
        try:
            work.wait(self.timeout)
            if self._varying:
                buffer = self._room(buffer[1:].tolist(), route.spec.dtype)
                self._receive_into(buffer, route, kind).wait(self.timeout)
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        self.status.go_on()
        self._post_next(upcoming, kind)
        return buffer

    def throttle(self, most: int) -> None:
        """Wait for the sending threads to come down to so many messages each."""
        for peer, sender in self._senders.items():
            self.status.wait((peer,))
            if not sender.wait_for(most, self.timeout):
                raise self._lost(peer, sender.error or TimeoutError("the messages didn't go"))
            self.status.go_on()

    def end(self) -> None:
        """End the sending threads, after the last `close`. A thread that is still there when
        the interpreter ends may take the process down with it."""
        for sender in self._senders.values():
            sender.end(self.timeout)

    @property
    def held_bytes(self) -> int:
        """Posted buffers and messages still being sent."""
        posted = sum(b.nbytes for waiting in self._posted.values() for _, b in waiting)
        return posted + sum(s.pending_bytes for s in list(self._senders.values()))

    def _lost(self, peer: int, error: BaseException) -> PeerError:
        # Who finds out when it sends can go on no more than who waits.
        self.status.wait((peer,))
        return lost(self.names[peer], error, self.timeout)


class _BehindItsShape(NamedTuple):
    """Two sends under way: of a message's shape, and of the message."""

    of_shape: dist.Work
    shape: Tensor
    of_message: dist.Work

    def wait(self, timeout: timedelta) -> None:
        """Wait for both."""
        self.of_shape.wait(timeout)
        self.of_message.wait(timeout)


_Sent = tuple[dist.Work | _BehindItsShape, Tensor, int]
"""A send, its tensor, and how many bytes count."""


class _Sender:
    """A thread that waits for the sends to one peer, in their sequence."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.error: BaseException | None = None
        self.pending_bytes = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._count = 0
        self._queue: queue.SimpleQueue[_Sent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, work: dist.Work | _BehindItsShape, tensor: Tensor, counted_bytes: int) -> None:
        """Wait for this send too; hold its tensor until then."""
        with self._lock:
            self._count += 1
            self.pending_bytes += counted_bytes
        self._queue.put((work, tensor, counted_bytes))

    def wait_for(self, most: int, timeout: timedelta) -> bool:
        """Wait until at most so many sends are left; False after a failure or the bound."""
        with self._idle:
            return (
                self._idle.wait_for(
                    lambda: self._count <= most or self.error is not None, timeout.total_seconds()
                )
                and self.error is None
            )

    def end(self, timeout: timedelta) -> None:
        """Let the thread run dry and end."""
        self._queue.put(None)
        self._thread.join(timeout.total_seconds())

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            work, tensor, counted_bytes = item
            try:
                work.wait(self.timeout)
            except BaseException as error:
                with self._idle:
                    self.error = error
                    self._idle.notify_all()
                return
            with self._idle:
                self._count -= 1
                self.pending_bytes -= counted_bytes
                self._idle.notify_all()
            del item, work, tensor


def _room(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def _shape_of(tensor: Tensor) -> Tensor:
    """Its number of dimensions, and their sizes: of a number too there is something to send."""
    return torch.tensor([tensor.dim(), *tensor.shape], dtype=torch.int64)


def _tag(route: MessageRoute, kind: str, *, of_shape: bool = False) -> int:
    return 4 * route.number + 2 * of_shape + (kind == BACKWARD)
