"""Gradients of a stage's replicas: summed over them before each update."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...profiles.errors import RunError
from .all_reduce import Pending, Sums


class GradientSum:
    """A sum of parameters' gradients over a group of workers, under way.

    A parameter without a gradient counts as zero; without one on any worker it gets none, since
    optimizers leave such a parameter alone.
    """

    def __init__(
        self,
        sums: Sums,
        group: str,
        parameters: Sequence[nn.Parameter],
        others: Sequence[Tensor] = (),
    ) -> None:
        """
        Args:
            others: tensors to be summed with them, in place.

        Raises:
            RunError: a gradient is sparse.
        """
        self._parameters = [p for p in parameters if p.requires_grad]
        self._present = torch.tensor([p.grad is not None for p in self._parameters]).int()
        gradients = []
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad.layout != torch.strided:
                raise RunError(
                    "a sparse gradient can't be summed over replicas; make the embedding's "
                    "gradients dense (sparse=False), or plan with --replicas off"
                )
            gradients.append(p.grad)
        self._pending: Pending = sums.start(group, [self._present, *others, *gradients])

    def wait(self) -> None:
        """When this returns, gradients are the sums. Raises PeerError within the bound."""
        self._pending.wait()
        for p, present in zip(self._parameters, self._present.tolist(), strict=True):
            if not present:
                p.grad = None
