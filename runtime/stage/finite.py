"""Losses and gradients that aren't finite: what a run does about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ...profiles.errors import RunError

STOP, WARN, SKIP = "stop", "warn", "skip"


class NotFinite:
    """Keeps the mini-batches whose loss or gradients weren't finite, on one worker.

    Attributes:
        mini_batches: counted over the whole run, as in the operations' names.
    """

    def __init__(self, policy: str) -> None:
        """
        Args:
            policy: STOP, WARN or SKIP.
        """
        self.policy = policy
        self.mini_batches: list[int] = []

    def check_loss(self, mini_batch: int, loss: float) -> None:
        """Raise RunError where the policy says so."""
        if not math.isfinite(loss):
            self._found(mini_batch, f"the loss of mini-batch {mini_batch} is {loss}")

    def nothing_counts(self, mini_batch: int) -> None:
        """The loss of a mini-batch is 0 / 0. Raise RunError where the policy says so."""
        weights = f"the weights of mini-batch {mini_batch}'s loss sum up to 0"
        self._found(mini_batch, f"{weights}: nothing counts in it, and it has no mean")

    def check_gradients(self, mini_batch: int, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether gradients are finite. Raise RunError where they aren't and the policy says so."""
        grads = [p.grad for p in parameters if p.grad is not None and p.grad.numel()]
        if not all_finite(grads):
            self._found(mini_batch, f"gradients of mini-batch {mini_batch} aren't finite")
            return False
        return True

    def _found(self, mini_batch: int, what: str) -> None:
        if self.policy == STOP:
            raise RunError(f"{what}: stopped before the weights took it in (--on-nan)")
        if self.mini_batches[-1:] != [mini_batch]:
            self.mini_batches.append(mini_batch)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all numbers of these tensors of one device, none of them empty, are finite."""
    if not tensors:
        return True
    dense = [t.coalesce().values() if t.is_sparse else t for t in tensors]
    dense = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in dense]
    # A sum takes a tenth of the time that looking at each number does. What isn't finite stays
    # so in it; it may also overflow where all is well. On a GPU, starting a kernel for each tensor
    # takes longer than summing up: the norm has one for many.
    total = (
        nn.utils.get_total_norm(dense)
        if dense[0].is_cuda
        else torch.stack([t.sum() for t in dense]).sum()
    )
    if math.isfinite(float(total)):
        return True
    return all(bool(torch.isfinite(t).all()) for t in dense)
