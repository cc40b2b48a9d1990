"""Which mini-batches' operations a run records for its report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...planner.systems.operations import Op
from ...profiles.errors import UserError
from ..prepare.data import Segment

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

    def among(
        self, segment: Segment, ops: Sequence[Op], end: int
    ) -> tuple[Op, Op] | tuple[None, None]:
        """The first and the last of a worker's operations that are recorded in a segment.

        Args:
            ops: that the worker runs in it.
            end: mini-batches of the whole run.
        """
        low, high = self._within(segment, ops, end)
        chosen = [k for k, op in enumerate(ops) if low <= op.mini_batch < high]
        return (ops[chosen[0]], ops[chosen[-1]]) if chosen else (None, None)

    def _within(self, segment: Segment, ops: Sequence[Op], end: int) -> tuple[int, int]:
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
STEADY = "steady:8"
"""What is recorded unless the user says otherwise."""

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
