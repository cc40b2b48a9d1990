"""Channels between processes of one host, through shared memory.

Workers meet over Unix sockets in a directory of their own, which is gone as soon as they have met.
The memory has no name: it goes with the last process that has it.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from ...profiles.errors import RunError
from ...profiles.units import format_bytes
from ..prepare.messages import Crossing, Lane
from ..records.status import Status, Untold
from .peers import PeerError, why_lost
from .shared_slots import Box, GoneError, Inbox, Key, Outbox, boxes

MEETING_S = 60.0
"""Longest wait for the others to call."""

_RANK = struct.Struct("<I")


def can_share_memory() -> bool:
    """Whether this system has what it takes: Linux."""
    return hasattr(os, "memfd_create") and hasattr(socket, "send_fds")


class SharedChannels:
    """Messages through shared memory; one object for each worker (`Channels`)."""

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        inboxes: Mapping[int, Inbox],
        outboxes: Mapping[int, Outbox],
        timeout_s: float,
        status: Status | None = None,
    ) -> None:
        """
        Args:
            names: of all workers, by rank; for messages.
            inboxes, outboxes: by the other's rank.
            status: is told whom this worker waits for.
        """
        self.rank = rank
        self.names = names
        self.status = status or Untold()
        self._timeout_s = timeout_s
        self._inboxes = inboxes
        self._outboxes = outboxes
        self._posted_bytes = 0
        self._upcoming: dict[Key, Iterator[Crossing]] = {}

    def open(self, lanes: Sequence[Lane]) -> None:
        """Count the slots that stand for receives posted ahead."""
        self._posted_bytes = 0
        self._upcoming = {}
        for lane in lanes:
            upcoming = islice(cycle(lane.crossings), lane.count)
            for crossing in lane.crossings:
                self._upcoming[crossing.number, lane.kind] = upcoming
            for crossing in islice(upcoming, lane.ahead):
                self._posted_bytes += crossing.nbytes(lane.kind)

    def send(self, crossing: Crossing, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Copy it into shared memory, or have it copied as soon as there is room."""
        peer = crossing.ends(kind)[1]
        counted = 0 if kept else crossing.nbytes(kind)
        with self._told(peer):
            self._outboxes[peer].send((crossing.number, kind), tensor, counted)

    def receive(self, crossing: Crossing, kind: str) -> Tensor:
        """Wait for the oldest message, and copy it out."""
        key, peer = (crossing.number, kind), crossing.ends(kind)[0]
        inbox = self._inboxes[peer]
        with self._told(peer):
            if not inbox.here(key):
                self.status.wait((peer,))
                inbox.wait(key, self._timeout_s)
                self.status.go_on()
            message = inbox.take(key)
        self._posted_bytes -= crossing.nbytes(kind)
        following = next(self._upcoming[key], None)
        if following is not None:
            self._posted_bytes += following.nbytes(kind)
        return message

    def throttle(self, most: int) -> None:
        """Wait until each of the others has taken all but so many messages."""
        for peer, outbox in self._outboxes.items():
            self.status.wait((peer,))
            with self._told(peer):
                outbox.wait_for(most, self._timeout_s)
            self.status.go_on()

    def close(self) -> None:
        """Wait until all messages have been taken."""
        self.throttle(0)

    def end(self) -> None:
        """Close what goes to the others, after the last `close`."""
        for outbox in self._outboxes.values():
            outbox.close()
        for inbox in self._inboxes.values():
            inbox.close()

    @property
    def held_bytes(self) -> int:
        """Slots that stand for posted receives, and messages beyond the others' own."""
        return self._posted_bytes + sum(outbox.held_bytes for outbox in self._outboxes.values())

    @contextmanager
    def _told(self, peer: int) -> Iterator[None]:
        try:
            yield
        except (GoneError, TimeoutError) as error:
            timeout = timedelta(seconds=self._timeout_s)
            raise PeerError(
                f"waiting for {self.names[peer]}: {why_lost(error, timeout)}"
            ) from error


def meet(
    rank: int,
    names: Sequence[str],
    crossings: Sequence[Crossing],
    store: dist.Store,  # type: ignore[name-defined]
    *,
    timeout_s: float,
    status: Status | None = None,
) -> SharedChannels:
    """Connect with all workers that this one sends to or receives from; all do so together.

    Args:
        crossings: of all workers, evaluation's among them.
        store: of all workers, in which addresses are told.
        timeout_s: longest wait for a message.

    Raises PeerError, and RunError where the memory can't be had.
    """
    others = [other for other in range(len(names)) if other != rank]
    meeting_s = max(timeout_s, MEETING_S)
    incoming = {s: found for s in others if (found := boxes(crossings, s, rank))}
    outgoing = {t: found for t in others if (found := boxes(crossings, rank, t))}
    inboxes, outboxes = {}, {}
    try:
        with _listening(len(incoming), meeting_s) as (listener, address):
            store.set(f"shared memory/{rank}", address)
            calling = {t: _call(store, rank, t, meeting_s) for t in outgoing}
            for _ in incoming:
                connection, _ = listener.accept()
                connection.settimeout(meeting_s)
                source = _RANK.unpack(connection.recv(_RANK.size))[0]
                file = _memory(names[rank], _size(incoming[source]))
                socket.send_fds(connection, [b"m"], [file])
                memory = _mapped(file, incoming[source])
                inboxes[source] = Inbox(connection, memory, incoming[source])
            for target, connection in calling.items():
                _, files, _, _ = socket.recv_fds(connection, 1, 1)
                memory = _mapped(files[0], outgoing[target])
                outboxes[target] = Outbox(connection, memory, outgoing[target], timeout_s)
    except (OSError, RuntimeError, IndexError, struct.error) as error:
        raise PeerError(f"{names[rank]}: the workers didn't find each other: {error}") from error
    return SharedChannels(rank, names, inboxes, outboxes, timeout_s, status)


def _memory(name: str, nbytes: int) -> int:
    """A new piece of shared memory. Raises RunError, since it isn't another worker's fault."""
    try:
        file = os.memfd_create("timeprest")
        os.ftruncate(file, nbytes)
    except OSError as error:
        raise RunError(
            f"{name}: {format_bytes(nbytes)} of shared memory for messages: {error.strerror} (a "
            "limit on the size of files counts here, too); --transport gloo takes none"
        ) from None
    return file


@contextmanager
def _listening(count: int, timeout_s: float) -> Iterator[tuple[socket.socket, str]]:
    """A socket that this user's processes can call, and its address."""
    try:
        made = tempfile.TemporaryDirectory(prefix="timeprest-")
    except OSError as error:
        raise RunError(f"{error.filename}: can't be made: {error.strerror}") from None
    with (
        made as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        address = str(Path(folder) / "in")
        listener.settimeout(timeout_s)
        listener.bind(address)
        listener.listen(max(count, 1))
        yield listener, address


def _call(
    store: dist.Store,  # type: ignore[name-defined]
    rank: int,
    target: int,
    timeout_s: float,
) -> socket.socket:
    key = f"shared memory/{target}"
    store.wait([key], timedelta(seconds=timeout_s))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    connection.connect(bytes(store.get(key)).decode())
    connection.sendall(_RANK.pack(rank))
    return connection


def _size(layout: Sequence[Box]) -> int:
    return max(layout[-1].end, mmap.PAGESIZE)


def _mapped(file: int, layout: Sequence[Box]) -> mmap.mmap:
    try:
        return mmap.mmap(file, _size(layout))
    finally:
        os.close(file)
