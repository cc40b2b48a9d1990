"""Weight prediction k updates ahead, from momentum (SpecTrain) or the optimizer's rule (PipeOptim).

A prediction is W − k·η·Δ: k updates ahead, η the learning rate of the parameter's group, Δ a
direction read from the optimizer's state. Which direction is the system's choice
(`Variant.prediction`):

- "smoothed-gradient": SpecTrain's v (1809.02839): the momentum buffer of SGD and Muon, the first
  moment of Adam and AdamW.
- "optimizer-step": what the optimizer's own rule would step along (PipeOptim, 2312.00839): the
  momentum buffer of SGD; m̂ / (√v̂ + ε) of Adam, the orthogonalised momentum of Muon in its scale,
  and the decoupled weight decay of AdamW and Muon on top.

SGD without momentum has no state: there the last gradient is kept, as it was stepped along.
Optimizers that maximize keep states of negated gradients, so a prediction is the same there.
Before the first update nothing is known, and the weights themselves are the prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from ...planner.systems.hooks import StageHooks
from ...planner.systems.variants import Prediction
from ...profiles.errors import TargetError
from .hooked import HookedStage
from .muon import MuonWithAdamW, is_muons, orthogonal_step

LAST = "last gradients"
"""What is kept for predictions where the optimizer has no state."""


class Predictor(StageHooks):
    """Predicts one stage's weights from its optimizer.

    Attributes:
        last: gradients kept because the optimizer has no state, by parameter.
    """

    makes = "predicted"

    def __init__(
        self,
        prediction: Prediction,
        optimizer: Optimizer,
        share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """
        Args:
            share: of the optimizer's learning rates, what the next update has.

        Raises TargetError for an optimizer whose rule isn't known.
        """
        self.optimizer = optimizer
        self._share = share
        # AdamW is one of Adam's kinds.
        if not isinstance(optimizer, SGD | Adam | MuonWithAdamW):
            raise TargetError(
                f"the task's optimizer is {type(optimizer).__name__}: weights can be predicted for "
                "SGD, Adam and AdamW; take one of them, or a system that predicts nothing"
            )
        self._by_step = prediction == "optimizer-step"
        self.last: dict[nn.Parameter, Tensor] = {}
        self.kept = {LAST: self.last}

    def before_update(self) -> None:
        """The optimizer is about to step: keep what its state won't tell afterwards."""
        for group in self.optimizer.param_groups:
            if not isinstance(self.optimizer, SGD) or group["momentum"]:
                continue
            decay = group["weight_decay"]
            for p in group["params"]:
                if p.grad is not None:
                    grad = p.grad.neg() if group["maximize"] else p.grad
                    self.last[p] = grad.add(p.detach(), alpha=decay) if decay else grad

    def forward_weights(self, updates: int, into: Mapping[nn.Parameter, Tensor]) -> None:
        """Write the weights so many updates ahead. `into`: a tensor for each of some parameters."""
        left = dict(into)
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                rate = float(group["lr"]) * updates * self._share()
                for p in group["params"]:
                    direction = self._direction(p, group) if p in left else None
                    if direction is not None:
                        torch.sub(p, direction, alpha=rate, out=left.pop(p))
            for p, target in left.items():
                target.copy_(p)

    # Directions ------------------------------------------------------------------------------

    def _direction(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        """What a parameter moves along in an update; None: it isn't known yet."""
        state, by_sgd = self.optimizer.state.get(p, {}), isinstance(self.optimizer, SGD)
        found: Tensor | None
        if not by_sgd and not is_muons(group):
            found = self._adam(p, group) if self._by_step else state.get("exp_avg")
            return found
        found = state.get("momentum_buffer")
        if found is None:
            found = self.last.get(p)
        if found is None or by_sgd or not self._by_step:
            return found
        return orthogonal_step(found, group).add_(p.detach(), alpha=group["weight_decay"])

    def _adam(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        state = self.optimizer.state.get(p)
        if not state:
            return None
        beta1, beta2 = group["betas"]
        step = float(state["step"])
        second = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        denominator = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction: Tensor = state["exp_avg"] / (1 - beta1**step) / denominator
        if group.get("decoupled_weight_decay"):
            direction = direction.add_(p.detach(), alpha=group["weight_decay"])
        return direction


def predictor_of(stage: HookedStage) -> Predictor | None:
    """That of a stage of a system that predicts; None where it has nothing to train."""
    prediction, optimizer = stage.variant.prediction, stage.optimizer
    return Predictor(prediction, optimizer, stage.rate) if prediction and optimizer else None
