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

from ..prepare.devices import dense_bytes


class Drift:
    """The mean change of a stage's trained weights in an update.

    Attributes:
        mean: δ of each parameter that is trained, by parameter.
        decay: γ.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.mean: dict[nn.Parameter, Tensor] = {
            p: torch.zeros_like(p, requires_grad=False) for p in parameters if p.requires_grad
        }
        self.decay = decay

    @property
    def kept(self) -> dict[str, dict[nn.Parameter, Tensor]]:
        """Its state, by name and parameter."""
        return {"": self.mean}

    @property
    def nbytes(self) -> int:
        """Bytes of δ."""
        return sum(map(dense_bytes, self.mean.values()))

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

    def correct(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights as they seem to have been so many updates ago.

        Args:
            into: a tensor for each parameter.
        """
        with torch.no_grad():
            for p, target in into.items():
                if p in self.mean:
                    torch.sub(p, self.mean[p], alpha=updates, out=target)
                else:
                    target.copy_(p)
