"""What is noted of a replica's operations: in status, metrics and log; and in errors, who failed at
what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from ...planner.systems.operations import Op
from ...profiles.errors import RunError, TimeprestError
from ...profiles.tasks.hooks import describe_error, from_users_code, is_ctrl_c
from ..communication.channel import Channels
from ..prepare.clock import Spans, UnderWay, clock_of
from ..prepare.prepared import Prepared
from ..prepare.workers import Replica
from ..records.metrics import SegmentMetrics
from ..records.operation_log import OperationLog
from ..records.status import Status
from .memory import MemoryAccount, out_of_memory


class OperationNotes:
    """Writes a replica's operations to status, metrics and log, and names them in errors.

    Attributes:
        clock: of what its stage computes on.
        under_way: operations that the device has been handed and that haven't been noted yet.
        metrics: times, losses and update times of the segment at hand.
        status: is sent every operation.
        log: None: nothing is written of operations.
        last_op: text of the operation at hand.
    """

    def __init__(
        self,
        prepared: Prepared,
        replica: Replica,
        account: MemoryAccount,
        channels: Channels,
        device: torch.device,
        log: OperationLog | None,
    ) -> None:
        """
        Args:
            account: what its stage holds.
            channels: of its worker.
        """
        self._plan, self._replica, self._device = prepared.plan, replica, device
        self._name = replica.name
        self._account, self._channels = account, channels
        self.clock = clock_of(device)
        self.under_way = UnderWay(self.clock)
        self.metrics = SegmentMetrics()
        self.status = Status()
        self.log = log
        if log is not None:
            log.clock = self.clock
        self.last_op = "start"

    def begin(self, what: str) -> None:
        """Something begins: an operation, or something besides."""
        self.last_op = what
        self.status.begin(what, self._name)

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Something besides the operations of the schedule."""
        self.begin(what)
        with self.explained():
            yield

    def handed_in(
        self,
        op: Op,
        version: int,
        spans: Spans,
        forward_version: int | None = None,
        before: Callable[[], object] | None = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """All work of an operation was launched: note it as soon as the device has done it.

        Args:
            version: that it used; of a backward, `forward_version` is its forward's.
            before, after: what is to be done then, besides the metrics and the log.
        """
        text, log = self.last_op, self.log if self.log is not None and self.log.on else None
        if log is not None:
            held = self._account.last
            left, messages = self._account.held(self._channels.held_bytes), log.end(op)

        def note() -> None:
            if before is not None:
                before()
            at = spans.times(self.clock)
            self.metrics.add(at)
            if after is not None:
                after()
            if log is not None:
                log.write(op, text, version, forward_version, at, messages, held, left)

        if self.clock.late:
            self.under_way.add(spans.sent, note, partial(self.explained, text))
        else:
            note()

    def finish(self) -> None:
        """A segment's operations are handed in: wait for them, and let the last messages go."""
        with self.explained():
            self.under_way.note()
            self._channels.close()

    @contextmanager
    def explained(self, at: str | None = None) -> Iterator[None]:
        """Turns whatever is raised into an error that says who failed, and at what.

        `at`: an operation, which has been handed in; None: the one at hand.
        """
        try:
            try:
                yield
            except Exception:
                if at is None:
                    self.under_way.blame()
                raise
        except BaseException as error:
            # Mostly an operation is given up at a pause since another worker's has failed.
            given_up = isinstance(error, GeneratorExit) and not from_users_code(error)
            ours = isinstance(error, TimeprestError)
            if given_up or is_ctrl_c(error) or (ours and str(error).startswith("stage ")):
                raise
            held = self._account.held(self._channels.held_bytes)
            line = out_of_memory(error, self._plan, self._replica, self._device, held)
            if line is not None:
                raise RunError(f"{self._replica.name}, at {self.last_op}: {line}") from error
            who = f"{self._replica.name}, at {at or self.last_op}"
            if isinstance(error, TimeprestError):
                raise type(error)(f"{who}: {error}") from error
            raise RunError(f"{who}: {describe_error(error)}") from error
