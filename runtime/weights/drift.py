"""PipeMare's discrepancy correction (1910.05124): backwards on weights near the forward's.

A backward that comes d updates after its forward runs on W − d·δ, where δ is the moving average of
the weights' change in an update:

    δ ← γ·δ + (1 − γ)·(W_new − W_old),    γ = D^(1/τ)

with τ the stage's version difference and D how much of a change is left τ updates later. No older
weights are kept: δ is one more copy of the weights, and what is corrected another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ...planner.systems.outside import StageContext, StageRules


class Drift(StageRules):
    """Keeps the mean change of a stage's trained weights in an update.

    Attributes:
        mean: δ of each parameter, by parameter.
        decay: γ.
    """

    def __init__(
        self, context: StageContext, parameters: Sequence[nn.Parameter], decay: float
    ) -> None:
        super().__init__(context, parameters)
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
