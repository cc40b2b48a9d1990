"""Messages between processes by gloo, from host memory to host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.systems.operations import BACKWARD
from ..prepare.messages import MessageRoute, MessageSeries
from ..records.status import Status
from .channel import PeerChannels, SendingThread
from .posts import Posts, no_posts


class GlooChannels(PeerChannels):
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
            names, status: as of `PeerChannels`.
            room: makes the tensors, by shape and dtype, that messages are received into.
            varying: messages have shapes of their own, and each comes behind one that says it.
        """
        super().__init__(names, timeout_s, status)
        self._room = room or (lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
        self._varying = varying
        self._posted: dict[tuple[int, str], deque[tuple[dist.Work, Tensor]]] = {}
        self._to_post: dict[tuple[int, str], Iterator[MessageRoute]] = {}
        self._senders: dict[int, SendingThread] = {}

    def open(self, series: Sequence[MessageSeries], posts: Posts = no_posts) -> None:
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
        with self.talking_to(peer):
            work = dist.irecv(buffer, peer, tag=_tag(route, kind, of_shape=of_shape))
        assert work is not None
        return work

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Hand the message to gloo and its thread."""
        peer = route.ends(kind)[1]
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = SendingThread(self.timeout.total_seconds())
        message = tensor.contiguous().resolve_conj()
        kept = kept and message is tensor
        going = [(message, _tag(route, kind))]
        if self._varying:
            going.insert(0, (_shape_of(message), _tag(route, kind, of_shape=True)))
        with self.talking_to(peer):
            if sender.error is not None:
                raise sender.error
            works = [(dist.isend(each, peer, tag=tag), each) for each, tag in going]
        sender.put(partial(_wait_for, works, self.timeout), 0 if kept else message.nbytes)

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        """Wait for the oldest posted receive, and post another one."""
        key = route.number, kind
        posted, upcoming = self._posted[key], self._to_post[key]
        while not posted and self._post_next(upcoming, kind):
            pass
        work, buffer = posted.popleft()
        peer = route.ends(kind)[0]
        self.status.wait((peer,))
        with self.talking_to(peer):
            work.wait(self.timeout)
            if self._varying:
                buffer = self._room(buffer[1:].tolist(), route.spec.dtype)
                self._receive_into(buffer, route, kind).wait(self.timeout)
        self.status.go_on()
        self._post_next(upcoming, kind)
        return buffer

    def throttle(self, most: int) -> None:
        for peer, sender in self._senders.items():
            self.status.wait((peer,))
            with self.talking_to(peer):
                if not sender.wait_for(most):
                    raise sender.error or TimeoutError("the messages didn't go")
            self.status.go_on()

    def end(self) -> None:
        for sender in self._senders.values():
            sender.end()

    @property
    def held_bytes(self) -> int:
        """Posted buffers and messages still being sent."""
        posted = sum(b.nbytes for waiting in self._posted.values() for _, b in waiting)
        return posted + sum(s.pending_bytes for s in list(self._senders.values()))


def _wait_for(works: Sequence[tuple[dist.Work | None, Tensor]], timeout: timedelta) -> None:
    for work, _ in works:
        assert work is not None
        work.wait(timeout)


def _shape_of(tensor: Tensor) -> Tensor:
    """Its number of dimensions, and their sizes: of a number too there is something to send."""
    return torch.tensor([tensor.dim(), *tensor.shape], dtype=torch.int64)


def _tag(route: MessageRoute, kind: str, *, of_shape: bool = False) -> int:
    return 4 * route.number + 2 * of_shape + (kind == BACKWARD)
