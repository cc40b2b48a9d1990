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

_Direction = Callable[["Predictor", nn.Parameter, dict[str, Any]], "Tensor | None"]


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
        rules = [rule for kind, rule in _DIRECTIONS[prediction] if isinstance(optimizer, kind)]
        if not rules:
            raise TargetError(
                f"the task's optimizer is {type(optimizer).__name__}: weights can be predicted for "
                "SGD, Adam and AdamW; take one of them, or a system that predicts nothing"
            )
        self._direction = rules[0]
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
                    direction = self._direction(self, p, group) if p in left else None
                    if direction is not None:
                        torch.sub(p, direction, alpha=rate, out=left.pop(p))
            for p, target in left.items():
                target.copy_(p)

    # Directions ------------------------------------------------------------------------------

    def _momentum(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        found = self.optimizer.state.get(p, {}).get("momentum_buffer")
        return found if found is not None else self.last.get(p)

    def _first_moment(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        found: Tensor | None = self.optimizer.state.get(p, {}).get("exp_avg")
        return found

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

    def _moments(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        found = Predictor._momentum if is_muons(group) else Predictor._first_moment
        return found(self, p, group)

    def _muon_or_adam(self, p: nn.Parameter, group: dict[str, Any]) -> Tensor | None:
        if not is_muons(group):
            return self._adam(p, group)
        momentum = self._momentum(p, group)
        if momentum is None:
            return None
        decay = group["weight_decay"]
        return orthogonal_step(momentum, group).add_(p.detach(), alpha=decay)


_DIRECTIONS: dict[Prediction, tuple[tuple[type[Optimizer], _Direction], ...]] = {
    "smoothed-gradient": (
        (SGD, Predictor._momentum),
        (Adam, Predictor._first_moment),
        (MuonWithAdamW, Predictor._moments),
    ),
    "optimizer-step": (
        (SGD, Predictor._momentum),
        (Adam, Predictor._adam),
        (MuonWithAdamW, Predictor._muon_or_adam),
    ),
}
"""AdamW is one of Adam's kinds."""


def predictor_of(stage: HookedStage) -> Predictor | None:
    """That of a stage of a system that predicts; None where it has nothing to train."""
    prediction, optimizer = stage.variant.prediction, stage.optimizer
    return Predictor(prediction, optimizer, stage.rate) if prediction and optimizer else None
