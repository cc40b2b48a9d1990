"""A stage's weights: versions of its own, those that it shares, and which its operations run on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ...planner.systems.hooks import StageHooks
from ..prepare.prepared import Prepared
from .policy import WeightPolicies, WeightPolicy
from .stash import WeightVersions, give_own_memory
from .tied_weights import StageTies, TiedWeights


def weights_of(prepared: Prepared, s: int) -> tuple[WeightVersions, StageTies]:
    """Versions of the parameters that a stage updates and no other one uses; and those that several
    stages of its worker use."""
    model, updated = prepared.model, [p for _, p in prepared.model.updated_by(s)]
    module = model.stages[s].piece.module
    if not prepared.pipeline.variant.flushes:
        give_own_memory(updated)
    # Where losses have weights of their own, each mini-batch's gradients are divided by its.
    together = 1 if model.loss.weighted else prepared.plan.update_every
    shared = [one for one in model.ties.shared if one.owner == s]
    ties = StageTies(s, [TiedWeights(one.stages, one.of(s, module), together) for one in shared])
    tied = set(map(id, ties.parameters))
    frozen = [p for p in module.parameters() if not p.requires_grad]
    return WeightVersions([p for p in updated if id(p) not in tied], frozen), ties


class StagePolicies(WeightPolicies):
    """The weights of a stage's operations."""

    def __init__(
        self,
        prepared: Prepared,
        s: int,
        weights: WeightVersions,
        ties: StageTies,
        making: Callable[[str], StageHooks | None],
    ) -> None:
        """
        Args:
            weights, ties: as of `weights_of`.
            making: as of `WeightPolicy`.
        """
        self._policy_of = partial(
            WeightPolicy,
            prepared.pipeline.variant,
            settings=prepared.settings,
            micro_batches=prepared.plan.micro_batches,
            recompute=bool(prepared.plan.stages[s].recompute),
        )
        super().__init__(self._policy_of(weights, making))
        self._ties = ties
        self.use(ties.updated, making)

    def use(self, ties: Sequence[TiedWeights], making: Callable[[str], StageHooks | None]) -> None:
        """Run operations on these parameters too. `making`: of the stage that updates them."""
        for tied in ties:
            policy = self._policy_of(tied.versions, making, stages=tied.stages)
            self._ties.use(tied, policy)
            self.shared.append(policy)
        self.own.weights.join([tied.versions for tied in self._ties.used])
