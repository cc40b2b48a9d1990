"""A stage's own logs: operations with their weight versions, times and bytes; its epochs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
from torch import Tensor

from ...planner.systems.operations import Op
from ...profiles.errors import FileError, UserError
from ...profiles.files import read_lines
from ..prepare.clock import Mark, OperationTimes, StreamClock
from ..prepare.data import Segment
from ..prepare.workers import Replica
from ..settings import RunSettings
from .growing_file import GrowingFile
from .metrics import StageEpoch, with_nan
from .run_dir import RunDir

# Which mini-batches' operations a run records for its report ------------------------------------

Where = Literal["all", "none", "first", "steady", "last"]


@dataclass(frozen=True)
class Record:
    """Some mini-batches of a run.

    Attributes:
        where: the "first" or "last" of the run; "steady": of its first segment, once all stages
            have warmed up and the pipeline is full; "all"; "none".
        count: how many.
    """

    where: Where
    count: int = 0

    def first_and_last(
        self, segment: Segment, ops: Sequence[Op], end: int
    ) -> tuple[Op, Op] | tuple[None, None]:
        """The first and the last of a worker's operations that are recorded in a segment.

        Args:
            ops: that the worker runs in it.
            end: mini-batches of the whole run.
        """
        low, high = self._within(segment, end)
        chosen = [k for k, op in enumerate(ops) if low <= op.mini_batch < high]
        return (ops[chosen[0]], ops[chosen[-1]]) if chosen else (None, None)

    def _within(self, segment: Segment, end: int) -> tuple[int, int]:
        """Mini-batches of the segment: the first, and the one after the last."""
        if self.where == "all":
            return 0, segment.mini_batches
        if self.where == "first":
            return 0, self.count - segment.first
        if self.where == "last":
            return max(end - self.count - segment.first, 0), segment.mini_batches
        if self.where == "none" or segment.first:
            return 0, 0
        low = max(min(WARM, segment.mini_batches - self.count), 0)
        return low, low + self.count


WARM = 8
"""Mini-batches before a steady recording begins, where there are so many: the first ones pay for
allocations and caches, and fill the pipeline."""

ALL = Record("all")
NONE = Record("none")

_TEXT = re.compile(r"(first|steady|last):(\d{1,6})")


def record_named(text: str) -> Record:
    """``all``, ``none``, ``first:8``, ``steady:8`` or ``last:8``. Raises UserError."""
    if text == "all":
        return ALL
    if text == "none":
        return NONE
    match = _TEXT.fullmatch(text)
    if match is None or not int(match[2]):
        raise UserError(
            f"--record {text}: give all, none, or how many mini-batches of which part: "
            "first:8, steady:8, last:8"
        )
    where: Where = match[1]  # type: ignore[assignment]
    return Record(where, int(match[2]))


# Operations -------------------------------------------------------------------------------------


Messages = dict[str, list[tuple[int, str, int, Mark]]]
"""Those of an operation, "received" and "sent": each a replica's number, the tensor, its bytes, and
a mark."""


class OperationLog(GrowingFile):
    """Lines of JSON, one for each operation that is to be recorded (docs/run_directory.md).

    Attributes:
        on: whether the operation at hand is.
        clock: of what its stage computes on.
        messages: of the operation at hand.
    """

    def __init__(self, path: Path, record: Record = ALL, *, more: bool = False) -> None:
        """
        Args:
            record: which mini-batches.
            more: a run that is resumed goes on with the file.

        Raises FileError, here and later, where it can't be written.
        """
        super().__init__(path, more=more, buffer_bytes=1 << 16)
        self.record = record
        self.on = False
        self.clock = StreamClock()
        self._first: Op | None = None
        self._last: Op | None = None
        self._encoder = msgspec.json.Encoder()
        self.messages: Messages = {}

    def choose(self, segment: Segment, ops: Sequence[Op], end: int) -> None:
        """A segment begins: see which of its operations are to be recorded.

        Args:
            ops: that this worker runs in it.
            end: mini-batches of the whole run.
        """
        self.on = False
        self._first, self._last = self.record.first_and_last(segment, ops, end)

    def begin(self, op: Op) -> None:
        """An operation is at hand."""
        if op == self._first:
            self.on = True

    def message(self, way: str, number: int, tensor: str, message: Tensor) -> None:
        """The operation at hand got a message ("received"), or sent one ("sent").

        Args:
            number: of the replica that sent it, or that it is for.
        """
        noted = number, tensor, message.nbytes, self.clock.mark()
        self.messages.setdefault(way, []).append(noted)

    def end(self, op: Op) -> Messages:
        """The operation at hand has been handed to the device. Returns its messages."""
        if op == self._last:
            self.on = False
        found, self.messages = self.messages, {}
        return found

    def write(
        self,
        op: Op,
        text: str,
        version: int,
        forward_version: int | None,
        times: OperationTimes,
        messages: Messages,
        held: Sequence[int] | None,
        left: Sequence[int],
    ) -> None:
        """Add an operation that is done. Buffered; at the end of what is recorded, all of it is on
        disk.

        Args:
            text: its name, its mini-batch counted from the run's beginning.
            version, forward_version: of the weights that it used, and of a backward's forwards.
            times: on the worker's own clock.
            held: bytes by kind meanwhile (`recording.ACCOUNTED_KINDS`).
            left: the same after it.
        """
        line = {
            "op": text,
            "version": version,
            **times._asdict(),
            "held": held,
            "left": left,
        }
        if forward_version is not None:
            line["forward_version"] = forward_version
        for way, noted in messages.items():
            line[way] = [(*what, self.clock.time_s(mark)) for *what, mark in noted]
        self.append(self._encoder.encode(line) + b"\n")
        if op == self._last:
            self.flush()


def operation_log(where: RunDir, replica: Replica, settings: RunSettings) -> OperationLog | None:
    """A replica's log, of what the settings say; None: nothing is recorded."""
    more = settings.resumed
    if settings.log_operations:
        return OperationLog(where.operations(replica), ALL, more=more)
    record = record_named(settings.record)
    return None if record == NONE else OperationLog(where.recorded(replica), record, more=more)


# Epochs -----------------------------------------------------------------------------------------


def read_stage_epochs(path: Path, size: int | None = None) -> tuple[StageEpoch, ...]:
    """The lines of `StageEpochFile` that are whole; none where there is no file.

    Args:
        size: of its beginning alone, so many bytes.

    Raises FileError that names the line.
    """
    found = []
    for number, line in read_lines(path, size):
        try:
            found.append(msgspec.convert(with_nan(line), StageEpoch, str_keys=True))
        except (msgspec.ValidationError, RecursionError) as error:
            raise FileError(f"{path}: line {number}: isn't of this version: {error}") from None
    return tuple(found)


class StageEpochFile(GrowingFile):
    """A worker's epochs as lines of JSON (`StageEpoch`)."""

    def epoch(self, seen: StageEpoch) -> None:
        """Add an epoch."""
        self.append(msgspec.json.encode(seen) + b"\n")
        self.flush()
