"""Messages between processes of one host, through shared memory.

gloo serves one host, too. But its threads, and the ones that wait for its sends, take the core and
the interpreter's lock from the stage that computes. With slots in shared memory a message is two
copies and two small writes to a socket, made by the threads that compute: a small network's period
falls by a fifth to nearly a half, as measured when they came. ``tp-run --transport gloo`` has the
other way.

Every direction between two processes has its own memory and socket. The sender copies a message
into a free slot and names the slot over the socket; the receiver copies it out and names it back.
What finds no free slot waits on the sender's side, and a thread puts it into the next slot that
comes back, so that computing never waits for a receiver.

Workers connect over Unix sockets in a directory of their own, which is gone as soon as they are
connected. The memory has no name: it goes with the last process that has it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...profiles.errors import RunError
from ...profiles.units import format_bytes
from ..prepare.messages import MessageRoute, MessageSeries
from ..records.status import Status
from .channel import START_S, PeerChannels, PeerError
from .posts import Posts, no_posts
from .signed_store import SignedStore
from .slots import SLOT_BYTES, Box, HostSlots, Key, Part, SlotsFrom, SlotsTo, boxes

Begun = TypeVar("Begun")

# One direction: its slots, and the socket -------------------------------------------------------

_MOMENT_S = 10.0
"""Longest wait for the system to take a record."""

_SHARED_WAIT_S = 0.05
"""Longest wait for a record where another thread may take it instead."""

_RECORD = struct.Struct("<HH")
_READ = 1024 * _RECORD.size


class GoneError(ConnectionError):
    """The process at the other end is gone."""

    def __init__(self) -> None:
        super().__init__("closed by the other process")


def _records(connection: socket.socket) -> list[tuple[int, int]] | None:
    """Records that have come over a socket that doesn't block; None: none. Raises GoneError."""
    try:
        text = connection.recv(_READ)
    except BlockingIOError:
        return None
    except OSError as error:
        raise GoneError from error
    if not text:
        raise GoneError
    while len(text) % _RECORD.size:
        # Records are written whole, so the rest of this one is there.
        with contextlib.suppress(BlockingIOError):
            rest = connection.recv(_RECORD.size - len(text) % _RECORD.size)
            if not rest:
                raise GoneError
            text += rest
    return list(_RECORD.iter_unpack(text))


def _notify(connection: socket.socket, box: int, slot: int) -> None:
    record = _RECORD.pack(box, slot)
    try:
        connection.send(record)
    except BlockingIOError:
        # There are fewer slots (`MOST_RECORDS`) than records that the socket holds: only a moment's
        # want of memory.
        connection.settimeout(_MOMENT_S)
        try:
            connection.sendall(record)
        except OSError as error:
            raise GoneError from error
        finally:
            connection.setblocking(False)
    except OSError as error:
        raise GoneError from error


def _wait(connection: socket.socket, deadline: float) -> None:
    """Wait until something has come. Raises TimeoutError."""
    left = deadline - time.monotonic()
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    # The system counts milliseconds in 31 bits.
    if left <= 0 or not poll.poll(min(1000 * left, 1 << 30)):
        raise TimeoutError("nothing came")


class Inbox:
    """The receiver's end of one direction."""

    def __init__(self, connection: socket.socket, slots: SlotsFrom, layout: Sequence[Box]) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._index = {box.key: k for k, box in enumerate(layout)}
        self._layout = layout
        self._slots = slots
        self._come: list[deque[int]] = [deque() for _ in layout]

    def here(self, key: Key) -> bool:
        """Whether a message is there. Raises GoneError."""
        if self._come[self._index[key]]:
            return True
        for k, slot in _records(self._connection) or ():
            self._come[k].append(slot)
        return bool(self._come[self._index[key]])

    def wait(self, key: Key, timeout_s: float) -> None:
        """Wait until a message is there. Raises GoneError, TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not self.here(key):
            _wait(self._connection, deadline)

    def take(self, key: Key, timeout_s: float) -> Tensor:
        """The message that came first, copied out. Of one in several slots the others are waited
        for. Raises GoneError, TimeoutError."""
        k = self._index[key]
        if self._layout[k].varying:
            return self._taken_together(k, timeout_s)
        slot = self._come[k].popleft()
        message = self._slots.take(k, slot)
        self._give_back(k, slot)
        return message

    def _taken_together(self, k: int, timeout_s: float) -> Tensor:
        box = self._layout[k]
        message, begin = None, box.said_bytes
        while True:
            slot = self._come[k].popleft()
            part = self._slots.bytes_of(k, slot)
            if message is None:
                message = box.room(part)
                left = message.reshape(-1).view(torch.uint8)
            count = min(len(left), len(part) - begin)
            left[:count] = part[begin : begin + count]
            left, begin = left[count:], 0
            self._give_back(k, slot)
            if not len(left):
                return message
            self.wait(box.key, timeout_s)

    def _give_back(self, k: int, slot: int) -> None:
        # The message is here; that its sender has gone will show when the next one doesn't come.
        with contextlib.suppress(GoneError):
            _notify(self._connection, k, slot)

    def close(self) -> None:
        """Close the socket; where its memory is the sender's too, when that has done so."""
        with contextlib.suppress(GoneError, TimeoutError):
            deadline = time.monotonic() + _MOMENT_S
            while self._slots.lent:
                _wait(self._connection, deadline)
                _records(self._connection)
        self._connection.close()
        self._slots.close()


class Outbox:
    """The sender's end of one direction.

    Attributes:
        error: why a message that waited couldn't be sent.
    """

    def __init__(
        self,
        connection: socket.socket,
        slots: SlotsTo,
        layout: Sequence[Box],
        timeout_s: float,
    ) -> None:
        """`timeout_s`: longest wait of a message for a slot."""
        connection.setblocking(False)
        self.error: Exception | None = None
        self._connection = connection
        self._timeout_s = timeout_s
        self._layout = layout
        self._index: Mapping[Key, int] = {box.key: k for k, box in enumerate(layout)}
        # So many messages are within what receives are posted for, of whatever box they are.
        self._posted = min([0 if box.varying else box.ahead for box in layout], default=0)
        self._slots = slots
        # The slot given back last is taken first: those never needed take no memory.
        self._free = [list(range(box.slots))[::-1] for box in layout]
        self._counted: list[list[int]] = [[0] * box.slots for box in layout]
        # Whether what a slot has is a message's last.
        self._last: list[list[bool]] = [[True] * box.slots for box in layout]
        self._waiting: deque[tuple[int, Part, int, bool]] = deque()
        # When a slot last came back, or something began to wait for one.
        self._since = 0.0
        self._under_way = 0
        self._lock = threading.Lock()
        self._some_wait = threading.Condition(self._lock)
        self._ended = False
        self._thread: threading.Thread | None = None

    def send(self, key: Key, tensor: Tensor, counted_bytes: int) -> None:
        """Put the message on its way. Raises GoneError, and what the thread has run into."""
        k = self._index[key]
        with self._lock:
            self._check()
            self._under_way += 1
            parts = self._slots.parts(k, tensor)
            counted_bytes //= len(parts)
            for part in parts:
                last = part is parts[-1]
                if not self._free[k] or self._waiting:
                    self._take_back()
                if self._free[k] and not self._waiting:
                    self._put(k, part, counted_bytes, last=last)
                else:
                    if not self._waiting:
                        self._since = time.monotonic()
                    self._waiting.append((k, part, counted_bytes, last))
            if not self._waiting:
                return
            self._some_wait.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def wait_for(self, most: int, timeout_s: float) -> None:
        """Wait until so few messages haven't been taken. Raises GoneError, TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._check()
                self._take_back()
                if self._under_way <= most:
                    return
            # Between the lock and the wait, the thread may take the last record that comes.
            within = deadline if self._thread is None else time.monotonic() + _SHARED_WAIT_S
            try:
                _wait(self._connection, min(deadline, within))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise

    @property
    def held_bytes(self) -> int:
        """Of messages beyond those that receives are posted for."""
        if self._under_way <= self._posted:
            return 0
        with self._lock:
            # A look at the socket takes longer than all else here, and can only find less.
            if not self._held():
                return 0
            # Whoever sends or receives next will tell.
            with contextlib.suppress(GoneError):
                self._take_back()
            return self._held()

    def close(self) -> None:
        """End the thread, and close the socket."""
        with self._lock:
            self._ended = True
            self._some_wait.notify_all()
        if self._thread is not None:
            # What it may still wait for, the one that computes has taken.
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RD)
            self._thread.join(self._timeout_s)
        self._slots.close()
        self._connection.close()

    # With the lock held ------------------------------------------------------------------------

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def _held(self) -> int:
        held = sum(counted for _, _, counted, _ in self._waiting) if self._waiting else 0
        for box, free, counted in zip(self._layout, self._free, self._counted, strict=True):
            if box.slots - len(free) > box.ahead:
                held += sum(counted) - box.ahead * max(counted)
        return held

    def _put(self, k: int, part: Part, counted_bytes: int, *, last: bool) -> None:
        slot = self._free[k].pop()
        self._slots.put(k, slot, part)
        self._counted[k][slot] = counted_bytes
        self._last[k][slot] = last
        _notify(self._connection, k, slot)

    def _take_back(self) -> None:
        """See which slots have come back, and fill them with what waits."""
        while (records := _records(self._connection)) is not None:
            self._since = time.monotonic()
            for k, slot in records:
                self._free[k].append(slot)
                self._counted[k][slot] = 0
                self._under_way -= self._last[k][slot]
        left: deque[tuple[int, Part, int, bool]] = deque()
        full: set[int] = set()
        while self._waiting:
            k, part, counted, last = self._waiting.popleft()
            if k not in full and self._free[k]:
                self._put(k, part, counted, last=last)
            else:
                # Later messages of this box mustn't overtake it.
                full.add(k)
                left.append((k, part, counted, last))
        self._waiting = left

    # The thread --------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._waiting and not self._ended:
                    self._some_wait.wait()
                if self._ended:
                    return
                deadline = self._since + self._timeout_s
            try:
                with contextlib.suppress(TimeoutError):
                    _wait(self._connection, deadline)
                with self._lock:
                    self._take_back()
                    # What this thread waits for, the one that computes may have taken.
                    if self._waiting and time.monotonic() > self._since + self._timeout_s:
                        raise TimeoutError("nothing came")
            except (OSError, RuntimeError) as error:
                with self._lock:
                    self.error = error
                return


# All directions of a worker ---------------------------------------------------------------------

_MOST_OF_NAME = 80
"""Bytes that the folder of folders with sockets may take of their names, which have 107 at most."""


def can_share_memory() -> bool:
    """Whether this system has what shared memory takes: Linux has."""
    return hasattr(os, "memfd_create") and hasattr(socket, "send_fds")


class SharedMemoryChannels(PeerChannels):
    """Messages through shared memory; one object for each worker."""

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
            names, status: as of `PeerChannels`.
            inboxes, outboxes: by the other's rank.
        """
        super().__init__(names, timeout_s, status)
        self.rank = rank
        self._inboxes = inboxes
        self._outboxes = outboxes
        self._posted_bytes = 0
        self._upcoming: dict[Key, Iterator[MessageRoute]] = {}

    def open(self, series: Sequence[MessageSeries], posts: Posts = no_posts) -> None:
        """Count the slots that stand for receives posted ahead."""
        self._posted_bytes = 0
        self._upcoming = {}
        for each in series:
            upcoming = islice(cycle(each.routes), each.count)
            for route in each.routes:
                self._upcoming[route.number, each.kind] = upcoming
            for route in islice(upcoming, each.ahead):
                self._posted_bytes += route.nbytes(each.kind)

    def send(self, route: MessageRoute, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Copy it into shared memory, or have it copied as soon as there is room."""
        peer = route.ends(kind)[1]
        counted = 0 if kept else route.nbytes(kind)
        try:
            self._outboxes[peer].send((route.number, kind), tensor, counted)
        except Exception:
            with self.talking_to(peer):
                raise

    def receive(self, route: MessageRoute, kind: str) -> Tensor:
        """Wait for the oldest message, and copy it out."""
        key, peer = (route.number, kind), route.ends(kind)[0]
        inbox = self._inboxes[peer]
        try:
            if not inbox.here(key):
                self.status.wait((peer,))
                inbox.wait(key, self.timeout.total_seconds())
                self.status.go_on()
            message = inbox.take(key, self.timeout.total_seconds())
        except Exception:
            with self.talking_to(peer):
                raise
        self._posted_bytes -= route.nbytes(kind)
        following = next(self._upcoming[key], None)
        if following is not None:
            self._posted_bytes += following.nbytes(kind)
        return message

    def throttle(self, most: int) -> None:
        for peer, outbox in self._outboxes.items():
            self.status.wait((peer,))
            with self.talking_to(peer):
                outbox.wait_for(most, self.timeout.total_seconds())
            self.status.go_on()

    def end(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()
        for inbox in self._inboxes.values():
            inbox.close()

    @property
    def held_bytes(self) -> int:
        """Slots that stand for posted receives, and messages beyond the others' own."""
        held = self._posted_bytes
        for outbox in self._outboxes.values():
            held += outbox.held_bytes
        return held


class SlotEnds(Protocol[Begun]):
    """Makes slots between two processes that have a socket: in what memory, it knows.

    Attributes:
        slot_bytes: of a route's slots, where those that stand for posted receives take less.
    """

    slot_bytes: int

    def begin(self, connection: socket.socket, layout: Sequence[Box]) -> Begun:
        """What the sender makes, and tells, before it hears of the receiver."""

    def offer(self, connection: socket.socket, layout: Sequence[Box]) -> SlotsFrom:
        """The receiver's end. It tells the sender how to get there."""

    def adopt(self, connection: socket.socket, begun: Begun) -> SlotsTo:
        """The sender's end."""


class HostMemory(SlotEnds[Sequence[Box]]):
    """Memory without a name, which the receiver makes."""

    slot_bytes = SLOT_BYTES

    def __init__(self, name: str) -> None:
        """`name`: of the worker, for messages."""
        self._name = name

    def begin(self, connection: socket.socket, layout: Sequence[Box]) -> Sequence[Box]:
        """Nothing to tell."""
        return layout

    def offer(self, connection: socket.socket, layout: Sequence[Box]) -> HostSlots:
        """Hand the file over. Raises RunError, since it isn't another worker's fault."""
        nbytes = _size(layout)
        try:
            file = os.memfd_create("timeprest")
            os.ftruncate(file, nbytes)
        except OSError as error:
            raise RunError(
                f"{self._name}: {format_bytes(nbytes)} of shared memory for messages: "
                f"{error.strerror} (a limit on the size of files counts here, too); --transport "
                "gloo takes none"
            ) from None
        socket.send_fds(connection, [b"m"], [file])
        return HostSlots(_mapped(file, layout), layout)

    def adopt(self, connection: socket.socket, begun: Sequence[Box]) -> HostSlots:
        """Map the file."""
        _, files, _, _ = socket.recv_fds(connection, 1, 1)
        return HostSlots(_mapped(files[0], begun), begun)


def _size(layout: Sequence[Box]) -> int:
    return max(layout[-1].end, mmap.PAGESIZE)


def _mapped(file: int, layout: Sequence[Box]) -> mmap.mmap:
    try:
        return mmap.mmap(file, _size(layout))
    finally:
        os.close(file)


def connect(
    rank: int,
    names: Sequence[str],
    routes: Sequence[MessageRoute],
    store: SignedStore,
    *,
    timeout_s: float,
    status: Status | None = None,
    varying: bool = False,
    ends: SlotEnds[Any] | None = None,
) -> SharedMemoryChannels:
    """Connect with all workers that this one sends to or receives from; all do so together.

    Args:
        routes: of all workers, evaluation's among them.
        store: of all workers, in which addresses are told.
        timeout_s: longest wait for a message.
        varying: messages have shapes of their own.
        ends: make the slots; by default in memory of the host.

    Raises PeerError, and RunError where the memory can't be had.
    """
    others = [other for other in range(len(names)) if other != rank]
    start_s = max(timeout_s, START_S)
    ends = ends or HostMemory(names[rank])
    layout = partial(boxes, routes, varying=varying, slot_bytes=ends.slot_bytes)
    incoming = {s: found for s in others if (found := layout(s, rank))}
    outgoing = {t: found for t in others if (found := layout(rank, t))}
    inboxes: dict[int, Inbox] = {}
    outboxes: dict[int, Outbox] = {}
    try:
        with _listening(len(incoming), start_s) as (listener, address):
            store.set(f"shared memory/{rank}", address)
            calling = {t: _call(store, rank, t, start_s) for t in outgoing}
            begun = {t: ends.begin(calling[t], layout) for t, layout in outgoing.items()}
            while len(inboxes) < len(incoming):
                connection, _ = listener.accept()
                connection.settimeout(start_s)
                source = store.secret.caller(connection, rank)
                if source not in incoming or source in inboxes:
                    connection.close()
                    continue
                slots = ends.offer(connection, incoming[source])
                inboxes[source] = Inbox(connection, slots, incoming[source])
            for target, connection in calling.items():
                there = ends.adopt(connection, begun[target])
                outboxes[target] = Outbox(connection, there, outgoing[target], timeout_s)
    except (OSError, RuntimeError, IndexError, ValueError) as error:
        raise PeerError(f"{names[rank]}: the workers didn't find each other: {error}") from error
    return SharedMemoryChannels(rank, names, inboxes, outboxes, timeout_s, status)


@contextmanager
def _listening(count: int, timeout_s: float) -> Iterator[tuple[socket.socket, str]]:
    """A socket that this user's processes can call, and its address."""
    long = len(os.fsencode(tempfile.gettempdir())) > _MOST_OF_NAME
    try:
        made = tempfile.TemporaryDirectory(prefix="timeprest-", dir="/tmp" if long else None)
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


def _call(store: SignedStore, rank: int, target: int, timeout_s: float) -> socket.socket:
    key = f"shared memory/{target}"
    store.wait([key], timedelta(seconds=timeout_s))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    connection.connect(store.get(key).decode())
    store.secret.call(connection, rank, target)
    return connection
