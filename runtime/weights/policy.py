"""The weight policy of a stage: the weights that each operation runs on, as its system says.

`planner.systems.versions` numbers the versions; here they become tensors. None stands for the
parameters as they are, the latest version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ...planner.systems.operations import BACKWARD, FORWARD, Op
from ...planner.systems.outside import StageRules
from ...planner.systems.prediction import Distances
from ...planner.systems.variants import BackwardWeights, ForwardWeights, Variant
from ...planner.systems.versions import VersionWalk
from .prediction import Predictor
from .stash import WeightVersions

DECAYS: dict[str, Callable[[float, int], float]] = {
    "exponential": lambda rate, d: math.exp(-rate * d),
    "inverse": lambda rate, d: 1 / (1 + rate * d),
    "linear": lambda rate, d: max(0.0, 1 - rate * d),
}
"""I-TiMePReSt's σ(d): how much of the forward's weights is left in a backward d updates later."""


class BackwardPass(NamedTuple):
    """The weights of a backward of some micro-batches.

    Attributes:
        micro_batches: that use the same weights.
        version: that they count as using.
        tensors: the weights; None: the parameters as they are.
    """

    micro_batches: tuple[int, ...]
    version: int
    tensors: list[Tensor] | None


class WeightPolicy:
    """Gives a stage's operations their weights, or those of what it shares with other stages.

    Attributes:
        walk: which version each operation uses; set for each segment of the run.
        distances: what predictions look ahead in that segment.
    """

    def __init__(
        self,
        variant: Variant,
        weights: WeightVersions,
        predictor: Predictor | None,
        decay: Callable[[int], float],
        rules: StageRules | None = None,
    ) -> None:
        """
        Args:
            predictor: for systems that predict; None where the stage has nothing to train.
            decay: σ of the version difference.
            rules: what weights are corrected by, or made by from outside; None: they aren't.
        """
        self.weights = weights
        self.walk = VersionWalk(variant, 1)
        self.distances = Distances((), ())
        self._predictor = predictor
        self._decay = decay
        self._rules = rules
        self._forward = _FORWARD[variant.forward_weights]
        self._backward = _BACKWARD[variant.backward_weights]
        self._by_forward = variant.stashes or rules is not None

    def forward(self, op: Op, version: int) -> list[Tensor] | None:
        """Weights of a forward, which the walk has just taken."""
        return self._forward(self, op, version)

    def used(self, op: Op, micro_batch: int) -> int:
        """The version that the forward of a micro-batch ran on; 0 where that doesn't matter to its
        backward, so that all run in one pass."""
        return self.walk.version_of(op.mini_batch, micro_batch) if self._by_forward else 0

    def backward(self, op: Op, used: int, mine: tuple[int, ...], *, last: bool) -> BackwardPass:
        """Weights of a backward of micro-batches whose forwards used the same version.

        Args:
            last: the forward's weights aren't asked for again.
        """
        return self._backward(self, op, used, mine, last)

    def recompute(self, op: Op, micro_batch: int) -> list[Tensor] | None:
        """Weights of a recomputation: those that the micro-batch's forward used."""
        return self.weights.at(self.walk.version_of(op.mini_batch, micro_batch))

    # One rule each ---------------------------------------------------------------------------

    def _at_version(self, op: Op, version: int) -> list[Tensor] | None:
        return self.weights.at(version)

    def _predicted_forward(self, op: Op, version: int) -> list[Tensor] | None:
        return self._predict(self.distances.of_forward(op, self.walk.micro_batches))

    def _latest_backward(
        self, op: Op, used: int, mine: tuple[int, ...], last: bool
    ) -> BackwardPass:
        return BackwardPass(mine, self.walk.latest, None)

    def _stashed_backward(
        self, op: Op, used: int, mine: tuple[int, ...], last: bool
    ) -> BackwardPass:
        return BackwardPass(mine, used, self.weights.at(used))

    def _predicted_backward(
        self, op: Op, used: int, mine: tuple[int, ...], last: bool
    ) -> BackwardPass:
        tensors = self._predict(self.distances.of_backward(op, self.walk.micro_batches))
        return BackwardPass(mine, self.walk.latest, tensors)

    def _outside_forward(self, op: Op, version: int) -> list[Tensor] | None:
        steps = self.distances.of_forward(op, self.walk.micro_batches)
        if not steps or self._rules is None:
            return None
        scratch = self.weights.scratch()
        self._rules.forward_weights(steps, dict(zip(self.weights.parameters, scratch, strict=True)))
        return scratch

    def _predict(self, steps: int) -> list[Tensor] | None:
        if not steps or self._predictor is None:
            return None
        scratch = self.weights.scratch()
        self._predictor.predict(steps, dict(zip(self.weights.parameters, scratch, strict=True)))
        return scratch

    def _intermediate_backward(
        self, op: Op, used: int, mine: tuple[int, ...], last: bool
    ) -> BackwardPass:
        latest = self.walk.latest
        if used == latest:
            return BackwardPass(mine, latest, None)
        share = self._decay(latest - used)
        reuse = last and self.walk.last_use(op, used)
        tensors = self.weights.between(used, share, reuse=reuse)
        return BackwardPass(mine, latest, tensors)

    def _corrected_backward(
        self, op: Op, used: int, mine: tuple[int, ...], last: bool
    ) -> BackwardPass:
        latest = self.walk.latest
        if self._rules is None or used == latest:
            return BackwardPass(mine, latest, None)
        wanted, there = (latest, latest - used), self.weights.corrected
        scratch = self.weights.scratch()
        # The other micro-batches of a mini-batch mostly need the same.
        if there != wanted:
            into = dict(zip(self.weights.parameters, scratch, strict=True))
            self._rules.backward_weights(latest - used, into)
        self.weights.corrected = wanted
        return BackwardPass(mine, latest, scratch)


_FORWARD: dict[ForwardWeights, Callable[[WeightPolicy, Op, int], list[Tensor] | None]] = {
    "latest": WeightPolicy._at_version,
    "micro-batch-entry": WeightPolicy._at_version,
    "mini-batch-entry": WeightPolicy._at_version,
    "predicted": WeightPolicy._predicted_forward,
    "outside": WeightPolicy._outside_forward,
}

_BACKWARD: dict[
    BackwardWeights, Callable[[WeightPolicy, Op, int, tuple[int, ...], bool], BackwardPass]
]
_BACKWARD = {
    "latest": WeightPolicy._latest_backward,
    "forward": WeightPolicy._stashed_backward,
    "predicted": WeightPolicy._predicted_backward,
    "intermediate": WeightPolicy._intermediate_backward,
    "corrected": WeightPolicy._corrected_backward,
    "outside": WeightPolicy._corrected_backward,
}


class WeightPolicies:
    """The weights of a stage's operations: its own, and behind them what it shares with others.

    Attributes:
        own: of the stage's own weights.
        shared: of parameters that other stages of its worker use too.
    """

    def __init__(self, own: WeightPolicy) -> None:
        self.own = own
        self.shared: list[WeightPolicy] = []

    @property
    def every(self) -> tuple[WeightPolicy, ...]:
        """All of them, in the sequence of their tensors."""
        return (self.own, *self.shared)

    def forward(self, op: Op) -> tuple[int, list[Tensor] | None]:
        """Take a forward. Returns the version that it uses of the stage's own weights, and the
        weights."""
        version = self.own.walk.forward(op)
        tensors = self.own.forward(op, version)
        if not self.shared:
            return version, tensors
        others = [policy.forward(op, policy.walk.forward(op)) for policy in self.shared]
        return version, self._joined([tensors, *others])

    def backwards(self, op: Op, micro_batches: Sequence[int]) -> Iterator[BackwardPass]:
        """Weights of a backward of these micro-batches, which the walks have just taken.

        Each is to be run before the next one is asked for: they may be made in the same memory.
        """
        policies = self.every
        groups: dict[tuple[int, ...], list[int]] = {}
        for i in micro_batches:
            groups.setdefault(tuple(p.used(op, i) for p in policies), []).append(i)
        left = list(groups)
        for used, mine in groups.items():
            del left[0]
            passes = [
                policy.backward(
                    op, version, tuple(mine), last=all(other[k] != version for other in left)
                )
                for k, (policy, version) in enumerate(zip(policies, used, strict=True))
            ]
            yield passes[0]._replace(tensors=self._joined([one.tensors for one in passes]))

    def recompute(self, op: Op, micro_batch: int) -> list[Tensor] | None:
        """Weights of a recomputation: those that the micro-batch's forward used."""
        return self._joined([policy.recompute(op, micro_batch) for policy in self.every])

    def _joined(self, found: Sequence[list[Tensor] | None]) -> list[Tensor] | None:
        if all(tensors is None for tensors in found):
            return None
        parts = zip(self.every, found, strict=True)
        return [t for policy, mine in parts for t in mine or policy.weights.live()]

    # Steps of their walks ----------------------------------------------------------------------

    def take_backward(self, op: Op) -> int:
        """Take a backward. Returns the version that it uses of the stage's own weights."""
        for policy in self.shared:
            policy.walk.backward(op)
        return self.own.walk.backward(op)

    def drop_scratch(self) -> None:
        """Let go of memory that weights were made in."""
        for policy in self.every:
            policy.weights.drop_scratch()

    def finish(self, op: Op) -> None:
        """The backward is done."""
        for policy in self.every:
            policy.walk.finish(op)

    def skip(self, op: Op) -> None:
        """Another replica runs this: only versions go on here."""
        if op.kind == FORWARD:
            for policy in self.every:
                policy.walk.forward(op)
        elif op.kind == BACKWARD:
            self.take_backward(op)
            self.finish(op)
