"""Moving tensors between workers: within one process, or between processes over gloo.

A message is named by its crossing (which tensor, from which worker to which) and its kind,
forward or gradient. Messages of one crossing and kind arrive in the sequence they were sent.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import cycle, islice
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.systems.operations import BACKWARD
from ...profiles.errors import RunError
from ..prepare.messages import Crossing, Lane
from ..records.operation_log import OperationLog
from ..records.status import Status, Untold

# When another worker is gone, or doesn't answer in time -----------------------------------------


class PeerError(RunError):
    """A wait on another worker failed: it is gone, or the bound was reached."""


def why_lost(error: BaseException, timeout: timedelta) -> str:
    """What a failed wait means, in a few words."""
    text = str(error)
    late = "timed out" in text.lower() or "timeout" in text
    if late or isinstance(error, TimeoutError):
        return f"nothing came for {timeout.total_seconds():g} s (--timeout)"
    if "closed" in text or "reset" in text or "Broken pipe" in text:
        return "it is gone"
    return " ".join(text.split())[:200]


# Moving tensors between workers: within one process, or between processes over gloo -------------


class Channels(Protocol):
    """What a worker needs to talk to the others."""

    def open(self, lanes: Sequence[Lane]) -> None:
        """Announce all messages that this worker is going to take."""

    def send(self, crossing: Crossing, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Start sending; never waits for the receiver. The tensor must not change any more.

        `kept`: its memory is held for the backward anyway, and doesn't count here.
        """

    def receive(self, crossing: Crossing, kind: str) -> Tensor:
        """The next message, waiting for it no longer than the bound. Raises PeerError."""

    def throttle(self, most: int) -> None:
        """Wait, within the bound, until no peer has more than `most` messages still to take.

        Training is held back by its in-flight limits; a pass of forwards alone by this.
        Raises PeerError.
        """

    def close(self) -> None:
        """Wait, within the bound, until all that was sent has gone. Raises PeerError."""

    @property
    def held_bytes(self) -> int:
        """Bytes of posted receive buffers and of messages still being sent."""


class Mailbox:
    """Messages within one process that wait to be received; shared by all its workers."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, str], deque[Tensor]] = {}
        self.waiting_bytes: dict[int, int] = {}


class LocalChannels:
    """Queues within one process, for the inline run; one object for each worker."""

    def __init__(self, rank: int, mailbox: Mailbox) -> None:
        self.rank = rank
        self._mailbox = mailbox

    def open(self, lanes: Sequence[Lane]) -> None:
        """Nothing to prepare."""

    def send(self, crossing: Crossing, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Copy, as between processes: a receiver may change what it gets.

        And lay it out anew: what is drawn at random (dropout) follows the order in memory.
        """
        copy = tensor.clone(memory_format=torch.contiguous_format)
        self._mailbox.queues.setdefault((crossing.number, kind), deque()).append(copy)
        self._count(crossing.ends(kind)[1], _nbytes(tensor))

    def receive(self, crossing: Crossing, kind: str) -> Tensor:
        """Raises PeerError when nothing was sent: the sequence is wrong."""
        waiting = self._mailbox.queues.get((crossing.number, kind))
        if not waiting:
            raise PeerError(f"no {kind} message of {crossing.spec.name!r} has been sent")
        tensor = waiting.popleft()
        self._count(self.rank, -_nbytes(tensor))
        return tensor

    def throttle(self, most: int) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is under way."""

    def _count(self, rank: int, change: int) -> None:
        counts = self._mailbox.waiting_bytes
        counts[rank] = counts.get(rank, 0) + change

    @property
    def held_bytes(self) -> int:
        """Messages that wait for this worker."""
        return self._mailbox.waiting_bytes.get(self.rank, 0)


class ProcessChannels:
    """Messages between processes by torch.distributed; one object per worker.

    Receives are posted ahead. Sends are waited for by a thread of their own for each peer, so
    that a tensor is let go as soon as it is gone, and computing never waits for a receiver.
    """

    def __init__(
        self,
        names: Sequence[str],
        timeout_s: float,
        status: Status | None = None,
        room: Callable[[Sequence[int], torch.dtype], Tensor] | None = None,
    ) -> None:
        """
        Args:
            names: of all workers, by rank; for messages.
            status: is told whom this worker waits for.
            room: makes the tensors, by shape and dtype, that messages are received into.
        """
        self._room = room or _room
        self.names = names
        self.status = status or Untold()
        self.timeout = timedelta(seconds=timeout_s)
        self._posted: dict[tuple[int, str], deque[tuple[dist.Work, Tensor]]] = {}
        self._to_post: dict[tuple[int, str], Iterator[Crossing]] = {}
        self._senders: dict[int, _Sender] = {}

    def open(self, lanes: Sequence[Lane]) -> None:
        """Post the first receives."""
        self._to_post = {}
        for lane in lanes:
            upcoming = islice(cycle(lane.crossings), lane.count)
            for crossing in lane.crossings:
                self._to_post[crossing.number, lane.kind] = upcoming
                self._posted[crossing.number, lane.kind] = deque()
            for _ in range(lane.ahead):
                self._post_next(upcoming, lane.kind)

    def _post_next(self, upcoming: Iterator[Crossing], kind: str) -> bool:
        """Post the receive that comes next in its lane. Returns whether there is one."""
        crossing = next(upcoming, None)
        if crossing is None:
            return False
        buffer = self._room(crossing.shape(kind), crossing.spec.dtype)
        try:
            work = dist.irecv(buffer, crossing.ends(kind)[0], tag=_tag(crossing, kind))
        except RuntimeError as error:
            raise self._lost(crossing.ends(kind)[0], error) from error
        assert work is not None
        self._posted[crossing.number, kind].append((work, buffer))
        return True

    def send(self, crossing: Crossing, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Hand the message to gloo and its thread."""
        peer = crossing.ends(kind)[1]
        sender = self._senders.get(peer)
        if sender is None:
            sender = self._senders[peer] = _Sender(self.timeout)
        if sender.error is not None:
            raise self._lost(peer, sender.error)
        kept = kept and tensor.is_contiguous()
        tensor = tensor.contiguous()
        try:
            work = dist.isend(tensor, peer, tag=_tag(crossing, kind))
        except RuntimeError as error:
            raise self._lost(peer, error) from error
        assert work is not None
        sender.put(work, tensor, 0 if kept else _nbytes(tensor))

    def receive(self, crossing: Crossing, kind: str) -> Tensor:
        """Wait for the oldest posted receive, and post another one."""
        key = crossing.number, kind
        posted, upcoming = self._posted[key], self._to_post[key]
        while not posted and self._post_next(upcoming, kind):
            pass
        work, buffer = posted.popleft()
        peer = crossing.ends(kind)[0]
        self.status.wait((peer,))
        try:
            work.wait(self.timeout)
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

    def close(self) -> None:
        """Wait for the sending threads to run dry."""
        self.throttle(0)

    def end(self) -> None:
        """End the sending threads, after the last `close`. A thread that is still there when
        the interpreter ends may take the process down with it."""
        for sender in self._senders.values():
            sender.end(self.timeout)

    @property
    def held_bytes(self) -> int:
        """Posted buffers and messages still being sent."""
        posted = sum(_nbytes(b) for waiting in self._posted.values() for _, b in waiting)
        return posted + sum(s.pending_bytes for s in list(self._senders.values()))

    def _lost(self, peer: int, error: BaseException) -> PeerError:
        return PeerError(f"waiting for {self.names[peer]}: {why_lost(error, self.timeout)}")


class _Sender:
    """A thread that waits for the sends to one peer, in their sequence."""

    def __init__(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self.error: BaseException | None = None
        self.pending_bytes = 0
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._count = 0
        self._queue: queue.SimpleQueue[tuple[dist.Work, Tensor, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, work: dist.Work, tensor: Tensor, counted_bytes: int) -> None:
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


def _tag(crossing: Crossing, kind: str) -> int:
    return 2 * crossing.number + (kind == BACKWARD)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


# Channels whose messages are noted for the log of operations ------------------------------------


class WatchedChannels:
    """Passes everything on, and tells the log what was sent and received, and when."""

    def __init__(self, channels: Channels, log: OperationLog) -> None:
        self._channels = channels
        self._log = log

    def open(self, lanes: Sequence[Lane]) -> None:
        """Passed on."""
        self._channels.open(lanes)

    def send(self, crossing: Crossing, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Note it when it is under way."""
        self._channels.send(crossing, kind, tensor, kept=kept)
        if self._log.on:
            self._log.sent(crossing.ends(kind)[1], crossing.spec.name, tensor)

    def receive(self, crossing: Crossing, kind: str) -> Tensor:
        """Note it when it is here."""
        tensor = self._channels.receive(crossing, kind)
        if self._log.on:
            self._log.received(crossing.ends(kind)[0], crossing.spec.name, tensor)
        return tensor

    def throttle(self, most: int) -> None:
        """Passed on."""
        self._channels.throttle(most)

    def close(self) -> None:
        """Passed on."""
        self._channels.close()

    @property
    def held_bytes(self) -> int:
        """What the channels hold."""
        return self._channels.held_bytes
