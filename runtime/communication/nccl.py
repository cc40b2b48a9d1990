"""Messages between workers with a GPU each, by NCCL, from device memory to device memory.

NCCL knows no tags: what one worker sends to another arrives in the sequence it was sent. So every
direction between two stages' replicas has a communicator of its own (and with it a stream), on
which messages have one sequence that both ends know. Communicators are made ahead of training, in
one sequence on all workers, so that no two wait for each other.

The host never waits inside NCCL, where a peer that is gone can't be told from a slow one: it polls
for the message, within the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain, islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..prepare.messages import MessageRoute, MessageSeries
from ..prepare.workers import Replica
from ..records.status import Status
from .channel import PeerChannels, PeerError, wait_until

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


def sequence(
    series: Iterable[MessageSeries], direction: Direction
) -> Iterator[tuple[MessageRoute, str]]:
    """The messages of one direction, in the sequence in which they are sent.

    Micro-batch by micro-batch, as both schedules have them, and for each by the routes' numbers.
    """
    once: list[tuple[int, int, MessageRoute, str]] = []
    rounds = 0
    for each in series:
        seen: dict[int, int] = {}
        for route in each.routes:
            if route.between(each.kind) != direction:
                continue
            k = seen[route.number] = seen.get(route.number, -1) + 1
            once.append((route.micro_batches[k], route.number, route, each.kind))
            rounds = each.count // len(each.routes)
    once.sort(key=lambda each: each[:2])
    of_round = [(route, kind) for _, _, route, kind in once]
    return chain.from_iterable(repeat(of_round, rounds))


class NcclChannels(PeerChannels):
    """Messages by NCCL; one object per worker. Made by all workers at the same time."""

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        routes: Iterable[MessageRoute],
        device: torch.device,
        timeout_s: float,
        status: Status | None = None,
    ) -> None:
        """Make the communicators.

        Args:
            names, status: as of `PeerChannels`.
            routes: all that there will be, of all workers.

        Raises PeerError.
        """
        super().__init__(names, timeout_s, status)
        self.rank = rank
        self.device = device
        self._groups: dict[Direction, Any] = {}
        self._coming: dict[Direction, Iterator[tuple[MessageRoute, str]]] = {}
        self._posted: dict[Direction, deque[tuple[MessageRoute, str, dist.Work, Tensor]]] = {}
        self._there: dict[tuple[int, str], deque[Tensor]] = {}
        self._going: dict[int, deque[tuple[dist.Work, Tensor, int]]] = {}
        everywhere = directions(routes)
        for pair in everywhere:
            # Every process takes part in making every group.
            self._groups[pair] = dist.new_group(
                sorted(end.rank for end in pair),
                backend="nccl",
                timeout=timedelta(seconds=timeout_s + _SLACK_S),
            )
        for pair in everywhere:
            if rank in (end.rank for end in pair):
                self._greet(pair)

    def _greet(self, direction: Direction) -> None:
        """The first message of a direction makes its communicator; both ends wait for that."""
        greeting = torch.zeros(1, device=self.device)
        group = self._groups[direction]
        source, target = (end.rank for end in direction)
        peer = target if self.rank == source else source
        with self.talking_to(peer):
            work = (
                dist.isend(greeting, target, group=group)
                if self.rank == source
                else dist.irecv(greeting, source, group=group)
            )
            assert work is not None
            wait_until(work.is_completed, self.timeout)

    def open(self, series: Sequence[MessageSeries]) -> None:
        """Post the first receives."""
        ahead: dict[Direction, int] = {}
        for each in series:
            pairs = [route.between(each.kind) for route in each.routes]
            for pair in set(pairs):
                mine = -(-each.ahead * pairs.count(pair) // len(pairs))
                ahead[pair] = ahead.get(pair, 0) + mine
        self._there = {}
        self._coming = {pair: sequence(series, pair) for pair in ahead}
        self._posted = {pair: deque() for pair in ahead}
        for pair, most in ahead.items():
            self._post(pair, most)

    def _post(self, direction: Direction, count: int) -> None:
        source = direction[0].rank
        for route, kind in islice(self._coming[direction], count):
            buffer = torch.empty(route.shape(kind), dtype=route.spec.dtype, device=self.device)
            with self.talking_to(source):
                work = dist.irecv(buffer, source, group=self._groups[direction])
            assert work is not None
            self._posted[direction].append((route, kind, work, buffer))

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Hand the message to NCCL, behind what the current stream has to do."""
        peer = route.ends(kind)[1]
        self._let_go(peer)
        kept = kept and tensor.is_contiguous()
        tensor = tensor.contiguous()
        with self.talking_to(peer):
            work = dist.isend(tensor, peer, group=self._groups[route.between(kind)])
        assert work is not None
        nbytes = 0 if kept else tensor.nbytes
        self._going.setdefault(peer, deque()).append((work, tensor, nbytes))

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        """Wait for the message, and for those that its sender sent before it."""
        source, direction = route.ends(kind)[0], route.between(kind)
        wanted = (route.number, kind)
        self.status.wait((source,))
        while not self._there.get(wanted):
            if not self._posted[direction]:
                self._post(direction, 1)
            if not self._posted[direction]:
                raise PeerError(f"{self.names[source]} sends no more {route.spec.name!r}")
            found, of_kind, work, buffer = self._posted[direction].popleft()
            with self.talking_to(source):
                wait_until(work.is_completed, self.timeout)
                # Nothing is left to wait for; what is computed now comes behind it.
                work.wait()
            self._there.setdefault((found.number, of_kind), deque()).append(buffer)
            self._post(direction, 1)
        self.status.go_on()
        return self._there[wanted].popleft()

    def throttle(self, most: int) -> None:
        """Wait until so many messages to each peer are left."""
        for peer, going in self._going.items():
            self.status.wait((peer,))

            def few(peer: int = peer, going: deque[Any] = going) -> bool:
                self._let_go(peer)
                return len(going) <= most

            with self.talking_to(peer):
                wait_until(few, self.timeout)
            self.status.go_on()

    def end(self) -> None:
        """There are no threads."""

    @property
    def held_bytes(self) -> int:
        """Posted buffers, and messages still being sent."""
        posted = sum(b.nbytes for waiting in self._posted.values() for *_, b in waiting)
        early = sum(b.nbytes for waiting in self._there.values() for b in waiting)
        going = sum(n for waiting in self._going.values() for _, _, n in waiting)
        return posted + early + going

    def _let_go(self, peer: int) -> None:
        """Drop the tensors of messages that have gone."""
        going = self._going.get(peer)
        with self.talking_to(peer):
            while going and going[0][0].is_completed():
                going.popleft()
