"""Messages of stages on GPUs by way of host memory: for stages that share a GPU.

A message is copied down on a stream of its own, sent from pinned memory by channels between
processes, received into pinned memory, and copied up. Computing waits for no copy down; the copy up
it waits for on the device, behind the message itself.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol

from torch import Tensor

from ...profiles.errors import TimeprestError
from ..prepare.messages import Crossing, Lane
from .channel import Channels
from .copying import Copier, Landing
from .peers import PeerError


class EndingChannels(Channels, Protocol):
    """Channels with threads of their own."""

    def end(self) -> None:
        """End the threads, after the last `close`."""


class StagedChannels:
    """Channels for tensors in device memory, over channels for those in host memory."""

    def __init__(self, host: EndingChannels, copier: Copier, timeout_s: float) -> None:
        """
        Args:
            host: sends and receives in host memory; what it receives into comes from `copier`.
        """
        self._host = host
        self._copier = copier
        self._timeout = timedelta(seconds=timeout_s)
        self._error: BaseException | None = None
        self._waiting = 0
        self._waiting_bytes = 0
        self._idle = threading.Condition()
        self._queue: queue.SimpleQueue[_Going | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send_landed, daemon=True)
        self._thread.start()

    def open(self, lanes: Sequence[Lane]) -> None:
        """Post the first receives."""
        self._host.open(lanes)

    def send(self, crossing: Crossing, kind: str, tensor: Tensor, *, kept: bool = False) -> None:
        """Start the copy down. The thread that sends waits for it."""
        self._check()
        host, landing = self._copier.down(tensor)
        nbytes = 0 if kept else tensor.numel() * tensor.element_size()
        with self._idle:
            self._waiting += 1
            self._waiting_bytes += nbytes
        self._queue.put(_Going(crossing, kind, tensor, host, landing, nbytes))

    def receive(self, crossing: Crossing, kind: str) -> Tensor:
        """The next message, on its way up."""
        self._check()
        return self._copier.up(self._host.receive(crossing, kind))

    def throttle(self, most: int) -> None:
        """Wait for the copies, and for the channels behind them."""
        with self._idle:
            done = self._idle.wait_for(
                lambda: not self._waiting or self._error is not None, self._timeout.total_seconds()
            )
        self._check()
        if not done:
            raise PeerError(
                f"a copy from the GPU took over {self._timeout.total_seconds():g} s (--timeout)"
            )
        self._host.throttle(most)

    def close(self) -> None:
        """Wait until all has gone."""
        self.throttle(0)

    def end(self) -> None:
        """End the threads."""
        self._queue.put(None)
        self._thread.join(self._timeout.total_seconds())
        self._host.end()

    @property
    def held_bytes(self) -> int:
        """Messages on their way down, and what the channels in host memory hold."""
        return self._waiting_bytes + self._host.held_bytes

    def _check(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, TimeprestError):
            raise self._error
        raise PeerError(f"a message couldn't be copied from the GPU: {self._error}")

    def _send_landed(self) -> None:
        while (going := self._queue.get()) is not None:
            try:
                going.landing.synchronize()
                self._host.send(going.crossing, going.kind, going.host)
            except BaseException as error:
                with self._idle:
                    self._error = error
                    self._idle.notify_all()
                return
            with self._idle:
                self._waiting -= 1
                self._waiting_bytes -= going.nbytes
                self._idle.notify_all()
            del going


class _Going:
    """A message on its way down; its tensor is kept until it has landed."""

    def __init__(
        self,
        crossing: Crossing,
        kind: str,
        tensor: Tensor,
        host: Tensor,
        landing: Landing,
        nbytes: int,
    ) -> None:
        self.crossing = crossing
        self.kind = kind
        self.tensor = tensor
        self.host = host
        self.landing = landing
        self.nbytes = nbytes
