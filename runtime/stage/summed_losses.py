"""Losses of mini-batches as (sum, weight), and gradients of means made from gradients of sums.

How much counts in a mini-batch is known when its last forward is done on the last stage, and a
backward may begin before. So gradients are those of sums, and each stage divides its own by the
mini-batch's weight (all micro-batches on all replicas) when the last of them is there. A stage that
no gradients come to (of frozen layers, say) may be done with a mini-batch before, and has no part
in this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, SupportsFloat

import torch
from torch import Tensor, nn

from ...planner.plan import Plan
from ...planner.systems.hooks import StageHooks
from ...planner.systems.operations import Op
from ...profiles.tasks.task import Loss
from ..communication.all_reduce import LOSS_WEIGHTS, AllReducer, Pending
from ..prepare.clock import number
from ..prepare.data import Segment, mean_over
from ..prepare.devices import dense_bytes
from ..prepare.prepared import Prepared
from .gradients import NotFinite

if TYPE_CHECKING:
    from .stage import Stage


class MiniBatchMeans:
    """Gradients of summed losses, each mini-batch's divided by its own weight.

    Attributes:
        aside_bytes: of gradients that are ready while those of the next mini-batch come.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._aside: dict[nn.Parameter, Tensor] = {}
        self.aside_bytes = 0

    def settle(self, weight: float, together: int) -> None:
        """A mini-batch's gradients are complete: make them its part of the update's, which goes by
        the mean of so many mini-batches. Where nothing counts, there is no gradient."""
        scale = 1 / (weight * together) if weight else 0.0
        for p in self._parameters:
            if p.grad is not None:
                p.grad.mul_(scale)
            before = self._aside.pop(p, None)
            if before is not None:
                p.grad = before if p.grad is None else p.grad.add_(before)
        self.aside_bytes = 0

    def set_aside(self) -> None:
        """Keep the gradients apart: another mini-batch's are added up next, before the update."""
        for p in self._parameters:
            if p.grad is not None:
                self._aside[p], p.grad = p.grad, None
        self.aside_bytes = sum(map(dense_bytes, self._aside.values()))


class LossWeights(StageHooks):
    """Hooks that divide each mini-batch's gradients by its weight, on one worker.

    All stages that gradients come to sum up the weights; the last one's replicas have parts of
    them. Nobody waits for the sum before the mini-batch's gradients are all there.

    Attributes:
        weights: of the segment's mini-batches that are settled, on the last stage, until taken.
        counts: whether something counts in each mini-batch of the update that is due; the same on
            all stages.
    """

    def __init__(
        self, stage: Stage, all_reduce: AllReducer, not_finite: NotFinite, plan: Plan
    ) -> None:
        self._stage = stage
        self._all_reduce = all_reduce
        self._not_finite = not_finite
        self._plan = plan
        self._is_last = stage.number == len(plan.stages) - 1
        self._means = MiniBatchMeans(stage.updated)
        self._own: dict[int, float] = {}
        self._summing: dict[int, tuple[Tensor, Pending]] = {}
        self._settled = self._first = self._mini_batches = 0
        self.counts, self._empty = True, False
        self.weights: dict[int, float] = {}

    def begin(self, first: int, mini_batches: int) -> None:
        self._first, self._mini_batches, self._settled = first, mini_batches, 0

    def note(self, mini_batch: int, loss: Loss | None) -> None:
        """Note the weight of a micro-batch's loss."""
        weight = 0.0 if loss is None or loss.weight is None else loss.weight
        self._own[mini_batch] = self._own.get(mini_batch, 0.0) + weight

    def after_forward(self, op: Op) -> None:
        """A forward is done, here or on another replica: after a mini-batch's last, sum up."""
        if op.micro_batch == self._plan.micro_batches - 1:
            own = torch.tensor([self._own.pop(op.mini_batch, 0.0)], dtype=torch.float64)
            self._summing[op.mini_batch] = own, self._all_reduce.start(LOSS_WEIGHTS, [own])

    def before_backward(self, op: Op) -> None:
        self._settle(op.mini_batch)

    def due(self, mini_batch: int) -> None:
        self._settle(mini_batch + 1, last=True)
        self.counts, self._empty = not self._empty, False

    def _settle(self, until: int, *, last: bool = False) -> None:
        """Make means of the gradients of all mini-batches before this one.

        Args:
            last: the update is due; else another mini-batch's gradients come.

        Raises:
            RunError: nothing counts in one, and that ends the run.
            PeerError: another worker is gone.
        """
        every = self._plan.update_every
        while self._settled < until:
            b, self._settled = self._settled, self._settled + 1
            weight, summing = self._summing.pop(b)
            summing.wait()
            counted = float(weight)
            self._empty = self._empty or not counted
            if self._is_last:
                self.weights[b] = counted
                if not counted:
                    self._not_finite.nothing_counts(self._first + b)
            self._stage.ties.due(b)
            self._means.settle(counted, mean_over(b, every, self._mini_batches))
            if not last or self._settled < until:
                self._means.set_aside()
            self._stage.account.aside_bytes = self._means.aside_bytes


class MiniBatchLosses:
    """Losses and weights, on this worker, of mini-batches whose update is still to come.

    They are read when they are asked for: of a GPU they come late (`clock.number`).
    """

    def __init__(self, weights: LossWeights | None) -> None:
        """`weights`: of losses that are (sum, weight)."""
        self._weights = weights
        self._noted: dict[int, list[tuple[SupportsFloat, float]]] = {}

    @property
    def counts(self) -> bool:
        """Whether something counts in each mini-batch of the update that is due."""
        return self._weights is None or self._weights.counts

    def weight_of(self, mini_batch: int, segment: Segment) -> float:
        """What a mini-batch that is settled counts by in means over mini-batches; asked once."""
        if self._weights is not None:
            return self._weights.weights.pop(mini_batch)
        return float(segment.samples_of(mini_batch))

    def note(self, mini_batch: int, loss: Loss | None, share: float) -> SupportsFloat:
        """Add a micro-batch's share of its mini-batch's loss. Returns its loss."""
        value = 0.0 if loss is None else number(loss.value)
        if self._weights is not None:
            self._weights.note(mini_batch, loss)
            share = 1.0
        self._noted.setdefault(mini_batch, []).append((value, share))
        return value

    def due(self, last: int) -> dict[int, list[tuple[SupportsFloat, float]]]:
        """Take out those of all mini-batches up to this one."""
        return {b: self._noted.pop(b) for b in list(self._noted) if b <= last}

    def read(self, due: Mapping[int, Iterable[tuple[SupportsFloat, float]]]) -> list[float]:
        """This worker's part of the losses of such mini-batches, which are settled."""
        found = []
        for b, noted in due.items():
            # As `sum` of Python 3.12 doesn't: in its sequence, and without compensation.
            total = 0.0
            for value, share in noted:
                total += float(value) * share
            if self._weights is not None:
                weight = self._weights.weights[b]
                total = total / weight if weight else math.nan
            found.append(total)
        return found


def losses_of(
    prepared: Prepared, stage: Stage, all_reduce: AllReducer, not_finite: NotFinite
) -> MiniBatchLosses:
    """The losses of a replica's mini-batches; its hooks divide gradients where losses have
    weights."""
    if not prepared.model.loss.weighted or stage.number not in prepared.reached:
        return MiniBatchLosses(None)
    weights = LossWeights(stage, all_reduce, not_finite, prepared.plan)
    # Before ties, whose gradients are divided mini-batch by mini-batch.
    stage.hooks.insert(weights)
    return MiniBatchLosses(weights)
