"""What a search may spend: simulated operations, and time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..systems.variants import Variant

EFFORT = 1_000_000
"""Simulated operations that a search may spend; the same everywhere, so plans repeat."""

_LEAST_TRIED = 24
"""Plans that may be tried whatever they take."""

_PER_STEP = 3
"""Simulated operations that take as long as a step of listing cuts, about."""

_PER_PLACED = 250
"""What it takes to lay out a plan whose devices have several stages, and to look at its memory."""

_MINI_BATCHES = 8
"""What it takes a simulation to become steady, about."""

_FLUSHED = 3
"""The same where the pipeline runs empty after each."""

CLOSE = 1.001
"""Of a large model, cuts and bounds of the relaxed problem are found up to this factor."""

SOON_S = 1.0
"""What takes no longer may be done after the time limit."""


class OutOfBudget(Exception):  # noqa: N818 - it ends a search, nothing went wrong
    """The search has used what it was given; `args[0]` says what."""


@dataclass
class Budget:
    """What a search may still spend.

    Attributes:
        effort: simulated operations.
        deadline: by `time.monotonic`; None: no limit.
    """

    effort: int = EFFORT
    deadline: float | None = None
    tried: int = 0
    _slowest: float = 0.0

    def spend(self, operations: int, *, needed: bool = True) -> None:
        """Take so many operations. Raises OutOfBudget when the budget is used up.

        Args:
            needed: though they may take longer than there is time.
        """
        left = self.seconds_left
        if not needed and left is not None and self.expected_s(operations) > left:
            raise OutOfBudget("time limit")
        self.tried += 1
        self.effort -= operations
        if self.effort < 0 and self.tried > _LEAST_TRIED:
            raise OutOfBudget("effort")
        self.check()

    def spend_steps(self, steps: int) -> None:
        """Take what so many steps of listing cuts take. Raises OutOfBudget as `spend`."""
        self.effort -= _PER_STEP * steps
        if self.effort < 0:
            raise OutOfBudget("effort")
        self.check()

    @property
    def steps_left(self) -> int:
        """Steps of listing cuts that may still be taken."""
        return max(self.effort // _PER_STEP, 0)

    def check(self) -> None:
        """Raises OutOfBudget when the time is over."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfBudget("time limit")

    def took(self, operations: int, seconds: float) -> None:
        """So many operations were simulated in so much time."""
        self._slowest = max(self._slowest, seconds / operations)

    def expected_s(self, operations: int) -> float:
        """What so many may take, by the slowest so far."""
        return operations * self._slowest

    @property
    def seconds_left(self) -> float | None:
        """Until the deadline."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)


def operations_of(variant: Variant, stages: int, micro_batches: int) -> int:
    """What simulating a plan takes, about."""
    # Split backwards have a third operation, and three schedules are tried for them.
    each = 3 * 3 if variant.split_backward else 2
    operations = stages * (each * micro_batches + 1)
    return operations * (_FLUSHED if variant.flushes else _MINI_BATCHES)


def placed_operations(variant: Variant, stages: int, micro_batches: int) -> int:
    """The same where devices have several stages: making the schedule takes as long, more where
    several ways to place weight parts are tried."""
    each = 5 if variant.split_backward else 2
    return each * operations_of(variant, stages, micro_batches) + _PER_PLACED


def is_late(until: float | None) -> bool:
    """Whether a time, by `time.monotonic`, has passed; None never does."""
    return until is not None and time.monotonic() > until
