"""Times of operations on the CPU and on a GPU's stream, and notes of operations once a device is
done.

On the CPU an operation is done when it returns. A GPU works off what the host hands it, and a host
that waited for each operation would hand over the next one late. So the host runs ahead: it marks
moments in the stream of work (CUDA events), and whatever is noted of an operation (its times, its
loss, its line in the log) is noted when its last mark is through, operation by operation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor

AHEAD = 4
"""Operations that may be handed to a device and not be noted yet. Few keep it busy; what they hold
besides the account (copies on their way) stays small."""

_ANCHOR_S = 1.0
"""CUDA tells the time between events in float32: over longer ones by steps above 0.1 µs."""

_BLAMED_S = 1.0

Mark = Any
"""A moment in what a device has to do: a time, or a CUDA event."""


class StreamClock:
    """The host's clock: work is done when the call returns.

    Attributes:
        late: marks may be through later than they are made.
    """

    late = False

    def start(self) -> None:
        """Set the clock by the host's, where nothing is under way."""

    mark: Callable[[], Mark] = staticmethod(time.perf_counter)
    """A mark behind all that has been handed in so far."""

    def through(self, mark: Mark) -> bool:
        """Whether the device has come past it."""
        return True

    def wait(self, mark: Mark) -> None:
        """Wait until it has."""

    time_s: Callable[[Mark], float] = staticmethod(float)
    """When that was, of a mark that is through; by the host's clock (`time.perf_counter`)."""

    def now(self) -> float:
        """The time when all is done that has been handed in so far."""
        mark = self.mark()
        self.wait(mark)
        return self.time_s(mark)


class CudaStreamClock(StreamClock):
    """The clock of the GPU stream that computes, by CUDA events.

    Between events the device measures; one of them, whose time by the host's clock is known, says
    which time that is there.
    """

    late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor: tuple[torch.cuda.Event, float] | None = None
        # Torch keeps what was pinned once; to pin more later, CUDA may wait for the whole device.
        for dtype in (torch.float32, torch.float64):
            _ = [torch.empty((), dtype=dtype, pin_memory=True) for _ in range(4 * AHEAD)]

    def start(self) -> None:
        """Wait for the stream, and begin with the host's time now."""
        torch.cuda.current_stream(self._device).synchronize()
        event = self.mark()
        event.synchronize()
        self._anchor = event, time.perf_counter()

    def mark(self) -> torch.cuda.Event:
        """An event. Who waits for it sleeps."""
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def through(self, mark: Mark) -> bool:
        return bool(mark.query())

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def time_s(self, mark: Mark) -> float:
        """The times of marks are asked for about in the sequence in which they were made."""
        if self._anchor is None:
            self.start()
        assert self._anchor is not None
        anchor, anchor_s = self._anchor
        since_s = float(anchor.elapsed_time(mark)) * 1e-3
        if since_s > _ANCHOR_S:
            self._anchor = mark, anchor_s + since_s
        return anchor_s + since_s


def clock_of(device: torch.device) -> StreamClock:
    """The clock for a device: the host's, or its stream's."""
    return CudaStreamClock(device) if device.type == "cuda" else StreamClock()


# Numbers that are read late ---------------------------------------------------------------------


class _LateNumber:
    """A number on its way from a GPU; who asks for it waits for it, and not for what comes after.

    It is there when a mark that is made later is through.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor.detach().reshape(()), non_blocking=True)
        self._landed = torch.cuda.current_stream(tensor.device).record_event()

    def __float__(self) -> float:
        self._landed.synchronize()
        return float(self._host)


def number(tensor: Tensor) -> SupportsFloat:
    """The value of a one-element tensor, read now on the CPU, and of a GPU when it is asked for.

    The tensor may be changed and let go.
    """
    return _LateNumber(tensor) if tensor.is_cuda else float(tensor)


# Operations under way ---------------------------------------------------------------------------


class OperationTimes(NamedTuple):
    """Start and end of an operation's parts, in seconds.

    Attributes:
        begin_s: it was at hand, and loaded its samples, if any.
        start_s, end_s: it computed; before that it waited for messages.
        sent_s: its messages were under way.
        compute_s, communication_s, loading_s: how much of the time from begin_s to sent_s was
            which.
    """

    begin_s: float
    start_s: float
    end_s: float
    sent_s: float
    compute_s: float
    communication_s: float
    loading_s: float


class Spans(NamedTuple):
    """The same by marks on a stream, which may be still to come.

    Attributes:
        loaded: of a forward, when it had its samples.
        looked: of what communicates before it computes, start and end of what it computes between.
    """

    begin: Mark
    start: Mark
    end: Mark
    sent: Mark
    loaded: Mark = None
    looked: tuple[Mark, Mark] | None = None

    def times(self, clock: StreamClock) -> OperationTimes:
        """By a clock that has come past all of them."""
        at = clock.time_s
        begin, start, end, sent = at(self.begin), at(self.start), at(self.end), at(self.sent)
        compute, communication, loading = end - start, sent - end, 0.0
        if self.loaded is not None:
            loading = at(self.loaded) - begin
        if self.looked is not None:
            first, last = map(at, self.looked)
            compute += last - first
            communication += (first - begin) + (start - last)
        return OperationTimes(begin, start, end, sent, compute, communication, loading)


class UnderWay:
    """Notes of operations that a device has been handed, made in sequence when it is done with
    them."""

    def __init__(self, clock: StreamClock) -> None:
        self._clock = clock
        self._waiting: deque[
            tuple[Mark, Callable[[], None], Callable[[], AbstractContextManager[None]]]
        ] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        mark: Mark,
        note: Callable[[], None],
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Call `note` when the device has come past the mark, which is no earlier than those
        before. Waits where more than `AHEAD` would be under way. Raises what they raise.

        Args:
            within: what it is called in.
        """
        self._waiting.append((mark, note, within))
        self.note(AHEAD)

    def note(self, most: int = 0) -> None:
        """Note all that is through, and wait until no more than so many are left."""
        while self._waiting:
            mark, note, within = self._waiting[0]
            if len(self._waiting) > most:
                self._clock.wait(mark)
            elif not self._clock.through(mark):
                return
            self._waiting.popleft()
            try:
                with within():
                    note()
            except BaseException:
                # What failed first is told.
                self._waiting.clear()
                raise

    def blame(self) -> None:
        """Something failed, of which what is under way may be the cause: raise its error if so."""
        end = time.monotonic() + _BLAMED_S
        # The device itself may be what fails.
        with suppress(RuntimeError):
            while self._waiting and time.monotonic() < end:
                self.note(len(self._waiting))
                time.sleep(1e-3)
