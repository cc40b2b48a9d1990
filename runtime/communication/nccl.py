"""Messages between workers with a GPU each, by NCCL, from device memory to device memory.

NCCL knows no tags: what one worker sends to another arrives in the sequence it was sent. So every
direction between two stages' replicas has a communicator of its own (and with it a stream), on
which messages have one sequence that both ends know. Communicators are made ahead of training, in
one sequence on all workers, so that no two wait for each other.

A send and a receive are kernels that wait for one another, and what waits for all that a GPU has
waits for them. So both ends post a message at a moment that the schedule gives (`posts`).

The host never waits inside NCCL, where a peer that is gone can't be told from a slow one: it polls
for the message, within the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..prepare.messages import MessageRoute, MessageSeries
from ..prepare.workers import Replica
from ..records.status import Status
from .channel import PeerChannels, PeerError, wait_until
from .posts import Post, Posts, no_posts

Direction = tuple[Replica, Replica]
"""A sender and a receiver."""

_SLACK_S = 30.0
"""NCCL's own watchdog kills the process: it gets so much more time than the bound."""


def directions(routes: Iterable[MessageRoute]) -> list[Direction]:
    """The directions of all messages of these routes, gradients the other way; ascending."""
    found = set()
    for route in routes:
        found.add((route.source, route.target))
        if route.spec.needs_grad:
            found.add((route.target, route.source))
    return sorted(found, key=lambda pair: (pair[0].number, pair[1].number))


class NcclPoster:
    """Posts sends and receives to NCCL, which wait for one another on the device; made by all
    workers at the same time.

    Nothing else here knows NCCL: tests have a device that stands still wherever one could.
    """

    def __init__(
        self, routes: Iterable[MessageRoute], device: torch.device, timeout_s: float
    ) -> None:
        """`routes`: all that there will be, of all workers."""
        self._groups: dict[Direction, Any] = {}
        self._behind = torch.cuda.Stream(device)
        for pair in directions(routes):
            # Every process takes part in making every group.
            self._groups[pair] = dist.new_group(
                sorted(end.rank for end in pair),
                backend="nccl",
                timeout=timedelta(seconds=timeout_s + _SLACK_S),
            )

    def ready(self, tensor: Tensor) -> torch.cuda.Event:
        """The moment at which work handed in so far is done, for `send`."""
        event: torch.cuda.Event = torch.cuda.current_stream(tensor.device).record_event()
        return event

    def send(self, tensor: Tensor, ready: torch.cuda.Event, direction: Direction) -> dist.Work:
        """Send a tensor, which is kept meanwhile, when it is ready: behind nothing that was handed
        in since."""
        self._behind.wait_event(ready)
        with torch.cuda.stream(self._behind):
            work = dist.isend(tensor, direction[1].rank, group=self._groups[direction])
        assert work is not None
        return work

    def receive(self, buffer: Tensor, direction: Direction) -> dist.Work:
        """Receive into a tensor, behind what has been handed in, which may have used its memory."""
        work = dist.irecv(buffer, direction[0].rank, group=self._groups[direction])
        assert work is not None
        return work


# The channels -----------------------------------------------------------------------------------


class NcclChannels(PeerChannels):
    """Messages by NCCL; one object per worker. Made by all workers at the same time."""

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        routes: Sequence[MessageRoute],
        device: torch.device,
        timeout_s: float,
        status: Status | None = None,
        poster: NcclPoster | None = None,
    ) -> None:
        """
        Args:
            names, status: as of `PeerChannels`.
            routes: all that there will be, of all workers.
            poster: by default NCCL's.

        Raises PeerError.
        """
        super().__init__(names, timeout_s, status)
        self.rank = rank
        self.device = device
        self._poster = poster or NcclPoster(routes, device, timeout_s)
        self._handed_in = 0
        self._due: deque[Post] = deque()
        self._ready: dict[tuple[int, str], deque[tuple[Tensor, Any, int]]] = {}
        self._posted: dict[Direction, deque[tuple[MessageRoute, str, dist.Work, Tensor]]] = {}
        self._there: dict[tuple[int, str], deque[Tensor]] = {}
        self._going: dict[int, deque[tuple[dist.Work, Tensor, int]]] = {}
        for direction in directions(routes):
            source, target = (end.rank for end in direction)
            if rank not in (source, target):
                continue
            # The first message of a direction makes its communicator; both ends wait for that.
            greeting = torch.zeros(1, dtype=torch.float32, device=device)
            with self.talking_to(target if rank == source else source):
                posted = (
                    self._poster.send(greeting, self._poster.ready(greeting), direction)
                    if rank == source
                    else self._poster.receive(greeting, direction)
                )
                wait_until(posted.is_completed, self.timeout)

    def open(self, series: Sequence[MessageSeries], posts: Posts = no_posts) -> None:
        """Post what may be posted before the first operation."""
        self._handed_in = 0
        self._due = deque(posts(self.rank))
        self._ready, self._posted, self._there = {}, {}, {}
        self._post_due()

    def advance(self) -> None:
        """Post what this operation was the last to be ahead of."""
        self._handed_in += 1
        self._post_due()

    def _post_due(self) -> None:
        while self._due and self._due[0].after <= self._handed_in:
            _, route, kind = self._due.popleft()
            source, target = route.ends(kind)
            direction = route.between(kind)
            if source == self.rank:
                tensor, ready, nbytes = self._ready[route.number, kind].popleft()
                with self.talking_to(target):
                    posted = self._poster.send(tensor, ready, direction)
                self._going.setdefault(target, deque()).append((posted, tensor, nbytes))
                continue
            buffer = torch.empty(route.shape(kind), dtype=route.spec.dtype, device=self.device)
            with self.talking_to(source):
                posted = self._poster.receive(buffer, direction)
            self._posted.setdefault(direction, deque()).append((route, kind, posted, buffer))

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Keep the message until it is due, which it mostly is when its operation is handed in."""
        self._let_go(route.ends(kind)[1])
        kept = kept and tensor.is_contiguous()
        tensor = tensor.contiguous()
        waiting = self._ready.setdefault((route.number, kind), deque())
        waiting.append((tensor, self._poster.ready(tensor), 0 if kept else tensor.nbytes))

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        """Wait for the message, and for those that its sender sent before it."""
        source, direction = route.ends(kind)[0], route.between(kind)
        wanted = (route.number, kind)
        self.status.wait((source,))
        while not self._there.get(wanted):
            if not self._posted.get(direction):
                raise PeerError(f"{self.names[source]} sends no more {route.spec.name!r}")
            found, of_kind, posted, buffer = self._posted[direction].popleft()
            with self.talking_to(source):
                wait_until(posted.is_completed, self.timeout)
                # Nothing is left to wait for; what is computed now comes behind it.
                posted.wait()
            self._there.setdefault((found.number, of_kind), deque()).append(buffer)
        self.status.go_on()
        return self._there[wanted].popleft()

    def throttle(self, most: int) -> None:
        for peer, going in self._going.items():
            self.status.wait((peer,))

            def few(peer: int = peer, going: deque[Any] = going) -> bool:
                self._let_go(peer)
                return len(going) <= most

            with self.talking_to(peer):
                wait_until(few, self.timeout)
            self.status.go_on()

    @property
    def held_bytes(self) -> int:
        """Posted buffers, messages that came early, and those that are still to go."""
        posted = sum(b.nbytes for waiting in self._posted.values() for *_, b in waiting)
        early = sum(b.nbytes for waiting in self._there.values() for b in waiting)
        kept = sum(n for waiting in self._ready.values() for *_, n in waiting)
        going = sum(n for waiting in self._going.values() for *_, n in waiting)
        return posted + early + kept + going

    def _let_go(self, peer: int) -> None:
        """Drop the tensors of messages that have gone."""
        going = self._going.get(peer)
        with self.talking_to(peer):
            while going and going[0][0].is_completed():
                going.popleft()
