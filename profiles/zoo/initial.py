"""Layers with the papers' initial weights, drawn once.

A torch.nn layer draws its own default when it is made; drawing again over that would double
the time to build a large model. So the layer is made without memory, and given its weights then.
They are made on the default device and in the default dtype, like any module's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn


def normal(shape: Sequence[int], deviation: float) -> nn.Parameter:
    """A parameter drawn from a normal distribution around 0."""
    return nn.Parameter(torch.empty(tuple(shape)).normal_(0.0, deviation))


def linear(inputs: int, outputs: int, deviation: float | None = None) -> nn.Linear:
    """A linear layer with bias 0.

    Args:
        deviation: of the weights; None: √(2 / inputs), which keeps the variance from layer to
            layer under ReLU (He et al. 2015, section 2.2).
    """
    layer = nn.Linear(inputs, outputs, device="meta")
    layer.weight = normal((outputs, inputs), deviation or math.sqrt(2 / inputs))
    layer.bias = nn.Parameter(torch.zeros(outputs))
    return layer


def convolution(
    inputs: int,
    outputs: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    padding: int | tuple[int, int] = 0,
    *,
    bias: bool = True,
) -> nn.Conv2d:
    """A 2-d convolution with deviation √(2 / fan-in) (He et al. 2015, section 2.2), bias 0."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=bias, device="meta")
    shape = layer.weight.shape
    layer.weight = normal(shape, math.sqrt(2 / math.prod(shape[1:])))
    if bias:
        layer.bias = nn.Parameter(torch.zeros(outputs))
    return layer


def embedding(count: int, width: int, deviation: float) -> nn.Embedding:
    """`count` vectors ``[width]``."""
    layer = nn.Embedding(count, width, device="meta")
    layer.weight = normal((count, width), deviation)
    return layer
