"""PipeMare's discrepancy correction (1910.05124): backwards on weights near the forward's.

A backward that comes d updates after its forward runs on W − d·δ, where δ is the moving average of
the weights' change in an update:

    δ ← γ·δ + (1 − γ)·(W_new − W_old),    γ = D^(1/τ)

with τ the stage's version difference and D how much of a change is left τ updates later. No older
weights are kept: δ is one more copy of the weights, and what is corrected another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ...planner.systems.hooks import StageHooks
from .delays import delay_of
from .hooked import HookedStage


class Drift(StageHooks):
    """Keeps the mean change of a stage's trained weights in an update.

    Attributes:
        mean: δ of each parameter, by parameter.
        decay: γ.
    """

    makes = "corrected"

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.mean: dict[nn.Parameter, Tensor] = {
            p: torch.zeros_like(p, requires_grad=False) for p in parameters
        }
        self.decay = decay
        self.kept = {"": self.mean}

    def before_update(self) -> None:
        """The weights are about to change: take the old ones off."""
        with torch.no_grad():
            for p, mean in self.mean.items():
                mean.mul_(self.decay).sub_(p, alpha=1 - self.decay)

    def after_update(self) -> None:
        """They have changed: add the new ones."""
        with torch.no_grad():
            for p, mean in self.mean.items():
                mean.add_(p, alpha=1 - self.decay)

    def backward_weights(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights as they seem to have been so many updates ago."""
        with torch.no_grad():
            for p, target in into.items():
                torch.sub(p, self.mean[p], alpha=updates, out=target)


def drift_of(stage: HookedStage) -> Drift | None:
    """That of a stage of a system that corrects backwards; None where it has nothing to correct."""
    settings, delay = stage.settings, delay_of(stage.prepared.plan, stage.number)
    corrects = stage.variant.backward_weights == Drift.makes and settings.discrepancy_correction
    if not corrects or not delay or stage.optimizer is None:
        return None
    return Drift(stage.updated, settings.discrepancy_decay ** (1 / delay))
