"""Losses that are (sum, weight): gradients of mini-batches' means, from those of their sums.

How much counts in a mini-batch is known when its last forward is done on the last stage, and a
backward may begin before. So gradients are those of sums, and each stage divides its own by the
mini-batch's weight (all micro-batches on all replicas) when the last of them is there. A stage that
no gradients come to (of frozen layers, say) may be done with a mini-batch before, and has no part
in this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...planner.systems.operations import Op
from ...profiles.tasks.task import Loss
from ..communication.all_reduce import LOSS_WEIGHTS, AllReducer, Pending
from ..prepare.data import Segment
from ..prepare.devices import dense_bytes
from .finite import NotFinite

if TYPE_CHECKING:
    from .stage import Stage


class MiniBatchMeans:
    """Gradients of sums over mini-batches, each divided by its own weight.

    Attributes:
        aside_bytes: of gradients that are ready while those of the next mini-batch come.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._aside: dict[nn.Parameter, Tensor] = {}
        self.aside_bytes = 0

    def settle(self, weight: float, together: int) -> None:
        """A mini-batch's gradients are complete: make them its part of the update's.

        Where nothing counts, there is no gradient.

        Args:
            together: mini-batches whose mean the update goes by.
        """
        scale = 1 / (weight * together) if weight else 0.0
        for p in self._parameters:
            if p.grad is not None:
                p.grad.mul_(scale)
            before = self._aside.pop(p, None)
            if before is not None:
                p.grad = before if p.grad is None else p.grad.add_(before)
        self.aside_bytes = 0

    def set_aside(self) -> None:
        """Another mini-batch's gradients come before the update."""
        for p in self._parameters:
            if p.grad is not None:
                self._aside[p], p.grad = p.grad, None
        self.aside_bytes = sum(map(dense_bytes, self._aside.values()))


class LossWeights:
    """The weight of each mini-batch, and gradients that are means by it, on one worker.

    All stages that gradients come to sum up the weights; the last one's replicas have parts of
    them. Nobody waits for the sum before the mini-batch's gradients are all there.

    Attributes:
        weights: of the segment's mini-batches that are settled, on the last stage, until taken.
    """

    def __init__(
        self, stage: Stage, all_reduce: AllReducer, not_finite: NotFinite, *, is_last: bool
    ) -> None:
        self._stage = stage
        self._all_reduce = all_reduce
        self._not_finite = not_finite
        self._is_last = is_last
        self._means = MiniBatchMeans(stage.updated)
        self._own: dict[int, float] = {}
        self._summing: dict[int, tuple[Tensor, Pending]] = {}
        self._settled = 0
        self._empty = False
        self.weights: dict[int, float] = {}

    def begin(self, segment: Segment) -> None:
        """Get ready for a segment."""
        self._segment = segment
        self._settled = 0

    def note(self, mini_batch: int, loss: Loss | None) -> None:
        """Note the weight of a micro-batch's loss."""
        weight = 0.0 if loss is None or loss.weight is None else loss.weight
        self._own[mini_batch] = self._own.get(mini_batch, 0.0) + weight

    def forward(self, op: Op) -> None:
        """A forward is done, here or on another replica: after a mini-batch's last, sum up."""
        if op.micro_batch == self._segment.micro_batches - 1:
            own = torch.tensor([self._own.pop(op.mini_batch, 0.0)], dtype=torch.float64)
            self._summing[op.mini_batch] = own, self._all_reduce.start(LOSS_WEIGHTS, [own])

    def settle(self, until: int, *, last: bool = False) -> bool:
        """Make means of the gradients of all mini-batches before this one.

        Args:
            last: the update is due; else another mini-batch's gradients come.

        Returns:
            Whether something counts in each mini-batch since the last update; the same on all
            stages.

        Raises:
            RunError: nothing counts in one, and that ends the run.
            PeerError: another worker is gone.
        """
        while self._settled < until:
            b, self._settled = self._settled, self._settled + 1
            weight, summing = self._summing.pop(b)
            summing.wait()
            counted = float(weight)
            self._empty = self._empty or not counted
            if self._is_last:
                self.weights[b] = counted
                if not counted:
                    self._not_finite.nothing_counts(self._segment.first + b)
            self._stage.ties.gather(b)
            self._means.settle(counted, self._segment.together(b))
            if not last or self._settled < until:
                self._means.set_aside()
            self._stage.account.aside_bytes = self._means.aside_bytes
        empty = self._empty
        if last:
            self._empty = False
        return not empty

    def means(self, mini_batches: Sequence[int], sums: Sequence[float]) -> list[float]:
        """This worker's part of the mean losses of mini-batches that are settled."""
        weights = [self.weights[b] for b in mini_batches]
        return [s / w if w else math.nan for s, w in zip(sums, weights, strict=True)]
