"""The weights that each operation runs on: what the variants table says, made real.

`planner.versions` numbers them; here they become tensors. None stands for the parameters as they
are, the latest version.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import Tensor

from ..planner.distances import Distances
from ..planner.operations import Op
from ..planner.variants import BackwardWeights, ForwardWeights, Variant
from ..planner.versions import VersionWalk
from .predictors import Predictor
from .weights import WeightVersions

DECAYS: dict[str, Callable[[float, int], float]] = {
    "exponential": lambda rate, d: math.exp(-rate * d),
    "inverse": lambda rate, d: 1 / (1 + rate * d),
    "linear": lambda rate, d: max(0.0, 1 - rate * d),
}
"""I-TiMePReSt's σ(d): how much of the forward's weights is left in a backward d updates later."""


class WeightRules:
    """Gives a stage's operations their weights.

    Attributes:
        walk: which version each operation uses; set anew for each segment of the run.
        distances: what predictions look ahead in that segment.
    """

    def __init__(
        self,
        variant: Variant,
        weights: WeightVersions,
        predictor: Predictor | None,
        decay: Callable[[int], float],
    ) -> None:
        """
        Args:
            predictor: for systems that predict; None where the stage has nothing to train.
            decay: σ of the version difference.
        """
        self.weights = weights
        self.walk = VersionWalk(variant, 1)
        self.distances = Distances((), ())
        self._predictor = predictor
        self._decay = decay
        self._forward = _FORWARD[variant.forward_weights]
        self._backward = _BACKWARD[variant.backward_weights]

    def forward(self, op: Op, version: int) -> list[Tensor] | None:
        """For a forward, which the walk has just taken."""
        return self._forward(self, op, version)

    def backward(self, op: Op, version: int) -> list[Tensor] | None:
        """For a backward, which the walk has just taken."""
        return self._backward(self, op, version)

    def again(self, op: Op, micro_batch: int) -> list[Tensor] | None:
        """Those that a micro-batch's forward used, to do it again."""
        return self.weights.at(self.walk.version_of(op.mini_batch, micro_batch))

    # Rules -----------------------------------------------------------------------------------

    def _at_version(self, op: Op, version: int) -> list[Tensor] | None:
        return self.weights.at(version)

    def _predicted_forward(self, op: Op, version: int) -> list[Tensor] | None:
        return self._predict(self.distances.forward[op.mini_batch])

    def _predicted_backward(self, op: Op, version: int) -> list[Tensor] | None:
        return self._predict(self.distances.backward[op.mini_batch])

    def _predict(self, steps: int) -> list[Tensor] | None:
        if not steps or self._predictor is None:
            return None
        scratch = self.weights.scratch()
        self._predictor.predict(steps, dict(zip(self.weights.parameters, scratch, strict=True)))
        return scratch

    def _between(self, op: Op, version: int) -> list[Tensor] | None:
        older = self.walk.forward_version(op)
        if older == version:
            return None
        share = self._decay(version - older)
        return self.weights.between(older, share, reuse=self.walk.last_use(op, older))


_Rule = Callable[[WeightRules, Op, int], "list[Tensor] | None"]

_FORWARD: dict[ForwardWeights, _Rule] = {
    "latest": WeightRules._at_version,
    "first-micro-batch": WeightRules._at_version,
    "entry": WeightRules._at_version,
    "predicted": WeightRules._predicted_forward,
}

_BACKWARD: dict[BackwardWeights, _Rule] = {
    "latest": WeightRules._at_version,
    "forward": WeightRules._at_version,
    "predicted": WeightRules._predicted_backward,
    "intermediate": WeightRules._between,
}
