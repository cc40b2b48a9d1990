"""Losses that are (sum, weight): the gradient of a mini-batch's mean, from those of its sums.

How much counts in a mini-batch is known when its last forward is done on the last stage, and a
backward may begin before. So gradients are those of sums, and each stage divides its own by the
mini-batch's weight (all micro-batches on all replicas) when the last of them is there.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...planner.systems.operations import Op
from ...profiles.errors import TargetError
from ...profiles.tasks.hooks import describe_error, is_ctrl_c
from ...profiles.tasks.task import Loss, Task, read_loss
from ...profiles.tracing.pieces import map_tensors
from ..communication.all_reduce import ALL, Pending, Sums
from ..prepare.data import Segment
from ..prepare.devices import forward_context
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
        self.aside_bytes = sum(g.numel() * g.element_size() for g in self._aside.values())


class Weighing:
    """How much counts in each mini-batch, and gradients that are means by it, on one worker.

    Every worker sums up the weights of all; the last stage's have parts of it. Nobody waits for
    the sum before the mini-batch's gradients are all there.

    Attributes:
        weights: of the segment's mini-batches that are settled, on the last stage, until taken.
    """

    def __init__(self, stage: Stage, sums: Sums, not_finite: NotFinite, *, is_last: bool) -> None:
        self._stage = stage
        self._sums = sums
        self._not_finite = not_finite
        self._is_last = is_last
        self._means = MiniBatchMeans(stage.weights.parameters)
        self._own: dict[int, float] = {}
        self._summing: dict[int, tuple[Tensor, Pending]] = {}
        self._settled = 0
        self.weights: dict[int, float] = {}

    def begin(self, segment: Segment) -> None:
        """Get ready for a segment."""
        self._segment = segment
        self._settled = 0

    def note(self, mini_batch: int, loss: Loss | None) -> None:
        """What a micro-batch's loss gave."""
        weight = 0.0 if loss is None or loss.weight is None else loss.weight
        self._own[mini_batch] = self._own.get(mini_batch, 0.0) + weight

    def forward(self, op: Op) -> None:
        """A forward is done, here or on another replica: after a mini-batch's last, sum up."""
        if op.micro_batch == self._segment.micro_batches - 1:
            own = torch.tensor([self._own.pop(op.mini_batch, 0.0)], dtype=torch.float64)
            self._summing[op.mini_batch] = own, self._sums.start(ALL, [own])

    def settle(self, until: int, *, last: bool = False) -> None:
        """Make means of the gradients of all mini-batches before this one.

        Args:
            last: the update is due; else another mini-batch's gradients come.

        Raises:
            RunError: nothing counts in one, and that ends the run.
            PeerError: another worker is gone.
        """
        while self._settled < until:
            b, self._settled = self._settled, self._settled + 1
            weight, summing = self._summing.pop(b)
            summing.wait()
            counted = float(weight)
            if self._is_last:
                self.weights[b] = counted
                if not counted:
                    self._not_finite.nothing_counts(self._segment.first + b)
            self._means.settle(counted, self._segment.together(b))
            if not last or self._settled < until:
                self._means.set_aside()
            self._stage.account.aside_bytes = self._means.aside_bytes

    def means(self, mini_batches: Sequence[int], sums: Sequence[float]) -> list[float]:
        """What this worker has of the losses of mini-batches that are settled."""
        weights = [self.weights[b] for b in mini_batches]
        return [s / w if w else math.nan for s, w in zip(sums, weights, strict=True)]


@dataclass(frozen=True)
class LossKind:
    """What a task's loss gives, as was found out before the run.

    Attributes:
        weighted: (sum, weight); else a mean.
        untold: why that couldn't be found out; empty: it could.
    """

    weighted: bool = False
    untold: str = ""

    def read(self, found: Any) -> Loss:
        """What the loss returned in training. Raises TargetError where it isn't what it was."""
        loss = read_loss(found)
        if (loss.weight is not None) != self.weighted:
            now, before = ("a mean", "(sum, weight)")[:: 1 if self.weighted else -1]
            why = f" (it failed then: {self.untold})" if self.untold else ""
            raise TargetError(
                f"the task's loss gives {now}, and gave {before} when it was tried before the "
                f"run{why}: it must give the same for any output and target"
            )
        return loss


def kind_of_loss(task: Task, result: Any, target: Any, autocast: torch.dtype | None) -> LossKind:
    """Whether a task's loss gives (sum, weight).

    It is asked once, of a copy of the task, with a result of the right shapes.

    Args:
        result: the model's; fake tensors (of one mode) where it wasn't computed.
    """
    with contextlib.suppress(Exception):  # the user's object
        task = copy.copy(task)
    before = torch.random.get_rng_state()
    try:
        with torch.no_grad(), forward_context(autocast):
            return LossKind(isinstance(_tried(task, result, target), tuple))
    except BaseException as error:  # the user's code
        if is_ctrl_c(error):
            raise
        return LossKind(untold=describe_error(error))
    finally:
        torch.random.set_rng_state(before)


def _tried(task: Task, result: Any, target: Any) -> Any:
    from torch._subclasses.fake_tensor import FakeTensor

    modes = []

    def note(tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            modes.append(tensor.fake_mode)
        return tensor

    map_tensors(note, result)
    if not modes:
        return task.loss(map_tensors(Tensor.detach, result), target)
    try:
        # Takes no memory.
        with modes[0]:
            return task.loss(result, target)
    except Exception:  # a loss that looks at numbers
        zeros = map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype), result)
        return task.loss(zeros, target)
