"""Clipping gradients by their norm, over a model whose parameters lie on several stages."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from .channels import PeerError

_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""

Total = Callable[[float], float]
"""From the squared norm of a stage's own gradients to that of all stages'."""


def squared_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Of all gradients there are."""
    grads = [p.grad for p in parameters if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads)) ** 2 if grads else 0.0


def clip(parameters: Iterable[nn.Parameter], norm: float, most: float) -> None:
    """Scale gradients in place, so that what has this norm has `most` at most.

    As torch.nn.utils.clip_grad_norm_ does it, which also scales by NaN where the norm is NaN.
    """
    scale = most / (norm + _EPSILON)
    if scale >= 1:
        return
    for p in parameters:
        if p.grad is not None:
            p.grad.mul_(scale)


class Clipping:
    """Clips one stage's gradients before its update.

    Attributes:
        most: the norm that gradients may have: of the whole model where `total` tells it, else
            of this stage's own part.
        total: sums squared norms over the stages, in systems that flush; None: this stage
            clips its own.
        waited_s: for the others' norms, at the last update.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], most: float, total: Total | None
    ) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.most = most
        self.total = total
        self.waited_s = 0.0

    def __call__(self) -> None:
        """Clip. Raises PeerError when the other stages' norms don't come."""
        squared = squared_norm(self.parameters)
        if self.total is not None:
            begin = time.perf_counter()
            squared = self.total(squared)
            self.waited_s = time.perf_counter() - begin
        clip(self.parameters, math.sqrt(squared), self.most)


def trained(parameters: Iterable[nn.Parameter]) -> int:
    """How many numbers are trained; tied ones count once."""
    return sum({id(p): p.numel() for p in parameters if p.requires_grad}.values())


def own_part(most: float, own: int, every: int) -> float:
    """The norm that a stage's gradients may have where stages don't wait for each other.

    Args:
        most: for the whole model; it has that at most when all stages keep to their parts.
        own, every: numbers that are trained on the stage, and on all stages.
    """
    return most * math.sqrt(own / every) if every else most


def total_over_processes(s: int) -> Total:
    """Sum over the processes of a run, one for each stage. All must ask at the same update."""

    def total(own: float) -> float:
        found = torch.tensor(own, dtype=torch.float64)
        try:
            dist.all_reduce(found)
        except RuntimeError as error:
            raise PeerError(f"stage {s}: waiting for the norms of the others: {error}") from error
        return float(found)

    return total


class TotalInline:
    """Sum over the stages of one process, which update one after another.

    When the first of them asks, the gradients of all must be ready and not yet clipped.
    """

    def __init__(self, stages: Sequence[Sequence[nn.Parameter]]) -> None:
        self._stages = stages
        self._found = 0.0
        self._asked = 0

    def __call__(self, own: float) -> float:
        """The sum, found once for each update of all stages."""
        if not self._asked:
            self._found = sum(squared_norm(parameters) for parameters in self._stages)
        self._asked = (self._asked + 1) % len(self._stages)
        return self._found
