"""The view of a stage that its hooks are made with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from ...planner.systems.variants import Variant
from ..prepare.prepared import Prepared
from ..settings import RunSettings
from .stash import WeightVersions
from .tied_weights import StageTies


@dataclass(frozen=True)
class HookedStage:
    """What hooks of a stage are made from (`planner.systems.hooks`).

    Attributes:
        number: the stage's.
        module: its piece of the model.
        updated: parameters that its updates step.
        weights: versions of those of them that no other stage uses.
        ties: those that several stages of the worker use.
        optimizer: steps them; None: there is nothing to train.
        rate: factor on the learning rate of the next update.
    """

    prepared: Prepared
    number: int
    module: nn.Module
    updated: Sequence[nn.Parameter]
    weights: WeightVersions
    ties: StageTies
    optimizer: Optimizer | None
    rate: Callable[[], float]

    @property
    def variant(self) -> Variant:
        """The training system."""
        return self.prepared.pipeline.variant

    @property
    def settings(self) -> RunSettings:
        """Those of the run."""
        return self.prepared.settings
