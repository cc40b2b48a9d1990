"""The weight policy of a stage: which version, mixture or prediction each forward and backward runs
on.

`planner.systems.versions` numbers the versions; here they become tensors. None stands for the
parameters as they are, the latest version.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from ...planner.schedules.prediction import Distances, prediction_distances
from ...planner.systems.hooks import StageHooks
from ...planner.systems.operations import BACKWARD, FORWARD, Op, Schedule
from ...planner.systems.variants import Variant
from ...planner.systems.versions import VersionWalk, entry_versions
from ..settings import RunSettings
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
        variant: the training system.
        stages: those that use the weights; none: the one stage alone.
        walk: which version each operation uses; begun anew for each segment of the run.
        by_forward: which weights a backward runs on goes by its forward's.
        distances: how many updates ahead predictions aim in that segment.
    """

    def __init__(
        self,
        variant: Variant,
        weights: WeightVersions,
        making: Callable[[str], StageHooks | None],
        settings: RunSettings,
        *,
        micro_batches: int = 1,
        recompute: bool = False,
        stages: Sequence[int] = (),
    ) -> None:
        """
        Args:
            making: who writes the weights of passes that run on no version, by the row's word for
                them (`HookChain.making`); None: nobody, where nothing is trained.
            micro_batches: N.
            recompute: forwards are computed a second time before their backward.
        """
        self.stages = tuple(stages)
        self.weights = weights
        self.distances = Distances((), ())
        self._walk_from = partial(VersionWalk, variant, micro_batches, recompute=recompute)
        self.walk = self._walk_from()
        self._decay = partial(DECAYS[settings.decay], settings.decay_rate)
        self._ahead = making(variant.forward_weights)
        self._back = making(variant.backward_weights)
        self.variant = variant
        makes = variant.backward_weights not in _BACKWARDS and self._back is not None
        self.by_forward = variant.stashes or makes

    def begin(self, entries: Sequence[int], distances: Distances) -> None:
        """Get ready for a segment.

        Args:
            entries: per micro-batch, the version of stage 0 that it uses (`VersionWalk`).
        """
        self.walk = self._walk_from(entries, latest=self.weights.latest)
        self.distances = distances

    def forward(self, op: Op, version: int) -> list[Tensor] | None:
        """Weights of a forward, which the walk has just taken."""
        if self.variant.forward_weights in _VERSIONS:
            return self.weights.at(version)
        return self._aimed(self._ahead, self.distances.of_forward(op, self.walk.micro_batches))

    def used(self, op: Op, micro_batch: int) -> int:
        """The version that the forward of a micro-batch ran on; 0 where that doesn't matter to its
        backward, so that all run in one pass."""
        return self.walk.version_of(op.mini_batch, micro_batch) if self.by_forward else 0

    def backward(self, op: Op, used: int, mine: tuple[int, ...], *, last: bool) -> BackwardPass:
        """Weights of a backward of micro-batches whose forwards used the same version.

        Args:
            last: the forward's weights aren't asked for again.
        """
        kind, latest = self.variant.backward_weights, self.walk.latest
        if kind == "forward":
            return BackwardPass(mine, used, self.weights.at(used))
        if kind == "predicted":
            updates = self.distances.of_backward(op, self.walk.micro_batches)
            return BackwardPass(mine, latest, self._aimed(self._back, updates))
        if kind == "latest" or used == latest:
            return BackwardPass(mine, latest, None)
        if kind == "intermediate":
            reuse = last and self.walk.last_use(op, used)
            tensors = self.weights.between(used, self._decay(latest - used), reuse=reuse)
            return BackwardPass(mine, latest, tensors)
        return BackwardPass(mine, latest, self._corrected(latest - used))

    def recompute(self, op: Op, micro_batch: int) -> list[Tensor] | None:
        """Weights of a recomputation: those that the micro-batch's forward used."""
        return self.weights.at(self.walk.version_of(op.mini_batch, micro_batch))

    def _aimed(self, maker: StageHooks | None, updates: int) -> list[Tensor] | None:
        """Weights so many updates ahead of the latest."""
        if not updates or maker is None:
            return None
        maker.forward_weights(updates, self._scratch())
        return self.weights.scratch()

    def _corrected(self, updates: int) -> list[Tensor] | None:
        """Weights that hooks make of the latest, so many updates after the forward."""
        if self._back is None:
            return None
        wanted, there = (self.walk.latest, updates), self.weights.corrected
        into = self._scratch()
        # The other micro-batches of a mini-batch mostly need the same.
        if there != wanted:
            self._back.backward_weights(updates, into)
        self.weights.corrected = wanted
        return list(into.values())

    def _scratch(self) -> dict[nn.Parameter, Tensor]:
        return dict(zip(self.weights.parameters, self.weights.scratch(), strict=True))


_VERSIONS = ("latest", "micro-batch-entry", "mini-batch-entry")
"""Forwards that run on a version, by the row's word for it; others aim ahead of the latest."""

_BACKWARDS = ("latest", "forward", "predicted", "intermediate")
"""Backwards by the row's word for their weights; others are made from the latest by hooks."""


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
        if not self.shared and not self.own.by_forward:
            yield self.own.backward(op, 0, tuple(micro_batches), last=True)
            return
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
        return [
            t
            for policy, mine in zip(self.every, found, strict=True)
            for t in mine or [p.detach() for p in policy.weights.parameters]
        ]

    # Steps of their walks ----------------------------------------------------------------------

    @property
    def walk(self) -> VersionWalk:
        """That of the stage's own weights over the segment at hand."""
        return self.own.walk

    def begin(self, schedule: Schedule, stage: int) -> None:
        """Get ready for a segment of this stage. `schedule`: of all stages."""
        variant, micro_batches = self.own.variant, self.walk.micro_batches
        entries = entry_versions(variant, micro_batches, schedule[0], self.own.weights.latest)
        for policy in self.every:
            tied = policy.stages
            by = [tied[0] if s in tied else s for s in range(len(schedule))]
            policy.begin(entries, prediction_distances(variant, schedule, by)[stage])

    def take_backward(self, op: Op) -> int:
        """Take a backward. Returns the version that it uses of the stage's own weights."""
        for policy in self.shared:
            policy.walk.backward(op)
        return self.own.walk.backward(op)

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
