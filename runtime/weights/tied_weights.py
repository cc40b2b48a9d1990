"""Parameters that several stages of one worker use: their versions and gradients, once.

The first of the stages updates them. The backwards of a mini-batch on the other stages come before
its own, and where no pipeline flushes those of later mini-batches may come before it too. So
gradients are kept apart by the update that they belong to.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...planner.systems.hooks import StageHooks
from ...planner.systems.operations import Op
from ...planner.systems.versions import SharedWalk
from ..prepare.devices import dense_bytes
from .policy import WeightPolicy
from .stash import WeightVersions


class TiedWeights:
    """Such parameters, of the same stages.

    Attributes:
        stages: ascending; the first one updates.
        parameters: one tensor each.
        versions: of them; their number is that of their updates.
        walk: over the operations of all the stages in the segment at hand.
        policies: by stage, what its operations use.
    """

    def __init__(
        self,
        stages: Sequence[int],
        parameters: Sequence[nn.Parameter],
        together: int,
    ) -> None:
        """
        Args:
            together: consecutive mini-batches whose gradients may be added up as they come.
        """
        self.stages = tuple(stages)
        self.parameters = list(parameters)
        self.versions = WeightVersions(parameters)
        self.policies: dict[int, WeightPolicy] = {}
        self._together = together
        self.walk = SharedWalk({})
        self._aside: dict[int, list[Tensor | None]] = {}
        self._weights_bytes = sum(map(dense_bytes, self.parameters))

    # Gradients -------------------------------------------------------------------------------

    def take_up(self, mini_batch: int) -> None:
        """Gradients of this mini-batch are going to be added to those that there are of its
        update."""
        found = self._aside.pop(mini_batch // self._together, None)
        for p, grad in zip(self.parameters, found or (), strict=bool(found)):
            p.grad = grad

    def put_aside(self, mini_batch: int) -> None:
        """They were added."""
        self._aside[mini_batch // self._together] = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None

    def gather(self, mini_batch: int) -> None:
        """The stages' gradients up to this mini-batch become the parameters' own."""
        last = mini_batch // self._together
        for number in sorted(n for n in self._aside if n <= last):
            for p, grad in zip(self.parameters, self._aside.pop(number), strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad.add_(grad)

    # Updates ---------------------------------------------------------------------------------

    def held(self) -> tuple[int, ...]:
        """Bytes by kind (`recording.ACCOUNTED_KINDS`); the optimizer's state is the owner's."""
        own = [p.grad for p in self.parameters]
        gradients = [own, *self._aside.values()]
        gradient_bytes = sum(dense_bytes(g) for grads in gradients for g in grads if g is not None)
        return (self._weights_bytes, self.versions.older_bytes, gradient_bytes, 0, 0, 0, 0)


class StageTies(StageHooks):
    """What a stage has of such parameters: their gradients, and the versions of those it updates.

    Attributes:
        updated: those that it updates.
        used: those that its operations use.
    """

    def __init__(self, stage: int, updated: Sequence[TiedWeights]) -> None:
        self.stage = stage
        self.updated = list(updated)
        self.used: list[TiedWeights] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that it updates."""
        return [p for tied in self.updated for p in tied.parameters]

    def use(self, tied: TiedWeights, policy: WeightPolicy) -> None:
        """Have the stage's operations use these, too."""
        self.used.append(tied)
        tied.policies[self.stage] = policy

    def begin(self, first: int, mini_batches: int) -> None:
        for tied in self.used:
            # For one of its stages; for all of them before one goes on.
            tied.walk = SharedWalk({s: policy.walk for s, policy in tied.policies.items()})

    def before_backward(self, op: Op) -> None:
        """Gradients are going to be made for an operation's mini-batch (`TiedWeights.take_up`)."""
        for tied in self.used:
            tied.take_up(op.mini_batch)

    def after_backward(self, op: Op) -> None:
        for tied in self.used:
            tied.put_aside(op.mini_batch)

    def due(self, mini_batch: int) -> None:
        """What is updated here gets all gradients up to a mini-batch."""
        for tied in self.updated:
            tied.gather(mini_batch)

    def before_update(self) -> None:
        for tied in self.updated:
            tied.versions.keep_needed(tied.walk)

    def after_update(self) -> None:
        for tied in self.updated:
            tied.versions.update(tied.walk)

    def drop(self) -> None:
        """Let go of versions that no stage needs any more."""
        for tied in self.used:
            tied.versions.drop(tied.walk.needed())
