"""What a stage's training makes of its delay: the version difference that its plan predicts.

- Learning-rate rescheduling (PipeMare's T1, 1910.05124): the rate of update t, counted from 0, is
  divided by d^(1 − min(t/T, 1)); d of 0 or 1 leaves it as it is.
- Stage-wise momentum (the code of 2505.01099): m + d·(0.99 − m)/S instead of m.

Both are for systems without a flush: in others no stage has a delay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from ...planner.plan import Plan
from ...planner.systems.variants import variant_named
from ...profiles.errors import UserError
from ..settings import RunSettings


def delay_of(plan: Plan, stage: int) -> int:
    """d: the stage's largest version difference in the steady state."""
    return plan.predicted.stages[stage].version_difference


def check_delays(plan: Plan, settings: RunSettings) -> None:
    """Raise UserError for options about delays that the plan's system hasn't."""
    variant = variant_named(plan.variant)
    asked = {
        "--lr-rescheduling": settings.lr_rescheduling,
        "--stagewise-momentum": settings.stagewise_momentum,
    }
    for option, given in asked.items():
        if given and variant.flushes:
            raise UserError(
                f"{option}: {plan.variant} flushes before each update, so no stage has a delay; "
                "leave it out"
            )


class Rescheduling:
    """A stage's learning rate while its delay is being got used to."""

    def __init__(
        self, delay: int, updates: int, more: Callable[[int], float] | None = None
    ) -> None:
        """
        Args:
            delay: d, the stage's.
            updates: T; 0: the rate stays.
            more: of that rate, what a system from outside gives an update.
        """
        self.delay, self.updates, self._more = delay, updates, more

    def share(self, update: int) -> float:
        """Of the rate, what an update has. `update`: counted from 0."""
        more = 1.0 if self._more is None else self._more(update)
        if self.delay < 2 or update >= self.updates:
            return more
        return float(self.delay ** (update / self.updates - 1)) * more

    @contextmanager
    def at(self, update: int, optimizer: Optimizer) -> Iterator[None]:
        """Within it the optimizer has that share of its rates. What a scheduler goes by stays."""
        share = self.share(update)
        if share == 1.0:
            yield
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
