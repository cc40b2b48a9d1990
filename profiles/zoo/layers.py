"""Layers with the papers' initial weights, drawn once; and self-attention made of them.

A torch.nn layer draws its own default when it is made; drawing again over that would double
the time to build a large model. So the layer is made without memory, and given its weights then.
They are made on the default device and in the default dtype, like any module's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


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


class SelfAttention(nn.Module):
    """Self-attention of several heads (Vaswani et al. 2017, section 3.2).

    ``[m, length, width]`` → the same.

    Args:
        dropout: share of the attention weights that training drops. It is part of the fused
            operation, so tracing fixes it to the mode that the module is in.
        causal: every position sees itself and those before it.
        deviation, out_deviation: of the initial weights of `qkv` and of `out`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        dropout: float,
        *,
        causal: bool,
        deviation: float,
        out_deviation: float,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = linear(width, 3 * width, deviation)
        self.out = linear(width, width, out_deviation)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix the positions; `mask`, ``[m, length]``, is 0 at those that none may see."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, self.head_width))
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        # Made here from the model's own input: so that no other mask travels between stages.
        seen = None if mask is None else mask[:, None, None, :].bool()
        mixed = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=seen,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        result: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result
