"""Learning-rate rescheduling (PipeMare's T1) and stage-wise momentum, by the version difference
that the plan predicts.

- Learning-rate rescheduling (PipeMare's T1, 1910.05124): the rate of update t, counted from 0, is
  divided by d^(1 − min(t/T, 1)); d of 0 or 1 leaves it as it is. Unless a run says T, it is a
  quarter of its updates in systems whose paper has it so, else 0.
- Stage-wise momentum (the code of 2505.01099): m + d·(0.99 − m)/S instead of m.

Both are for systems without a flush: in others no stage has a delay.
"""

from __future__ import annotations

from torch.optim import SGD, Adam, NAdam, Optimizer

from ...planner.plan import Plan
from ...planner.systems.hooks import StageHooks
from ...planner.systems.variants import variant_named
from ...profiles.errors import TargetError, UserError
from ..settings import RunSettings
from .hooked import HookedStage


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


USUAL_PART = 4
"""T is so large a part of a run: PipeMare's for its ResNets, of the time before the rate falls."""


class Rescheduling(StageHooks):
    """A stage's learning rate while its delay is being got used to."""

    def __init__(self, delay: int, updates: int) -> None:
        """`delay`: d of the stage; `updates`: T, where 0 has the rate stay."""
        self.delay, self.updates = delay, updates

    def rate(self, update: int) -> float:
        if self.delay < 2 or update >= self.updates:
            return 1.0
        return float(self.delay ** (update / self.updates - 1))


def rescheduling_of(stage: HookedStage) -> Rescheduling | None:
    """That of a stage where it is asked for."""
    prepared, updates = stage.prepared, stage.settings.lr_rescheduling
    if updates is None:
        usual = prepared.pipeline.variant.rescheduled
        updates = max(prepared.length.steps // USUAL_PART, 1) if usual else 0
    return Rescheduling(delay_of(prepared.plan, stage.number), updates) if updates else None


MOST_MOMENTUM = 0.99
"""What stage-wise momentum comes near to as the delay grows."""


def raise_momentum(optimizer: Optimizer, delay: int, stages: int) -> None:
    """Give the optimizer (SGD's momentum; the first β of Adam, AdamW and NAdam) the momentum of a
    stage with `delay` d of S `stages`: m + d·(0.99 − m)/S, never more than for d = S.

    That is the rule in the code of 2505.01099, where d is S − 1 − s. Raises TargetError for an
    optimizer without momentum, or with another rule.
    """

    def raised(momentum: float) -> float:
        return momentum + min(delay, stages) * (MOST_MOMENTUM - momentum) / stages

    for group in optimizer.param_groups:
        if isinstance(optimizer, SGD) and group["momentum"]:
            group["momentum"] = raised(group["momentum"])
        elif isinstance(optimizer, Adam | NAdam):
            group["betas"] = (raised(group["betas"][0]), group["betas"][1])
        else:
            without = " without momentum" if isinstance(optimizer, SGD) else ""
            raise TargetError(
                f"--stagewise-momentum: the optimizer is {type(optimizer).__name__}{without}; it "
                "is there for SGD with momentum, Adam, AdamW and NAdam"
            )
