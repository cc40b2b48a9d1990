"""Channels whose messages are noted for the log of operations."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..prepare.messages import Crossing, Lane
from ..records.operation_log import OperationLog
from .channel import Channels


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
