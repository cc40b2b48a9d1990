"""Clipping gradients by their norm, over a model whose parameters lie on several stages."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

_EPSILON = 1e-6
"""As in torch.nn.utils.clip_grad_norm_."""


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
