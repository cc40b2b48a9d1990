"""Self-attention of several heads (Vaswani et al. 2017, section 3.2)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from .arguments import linear


class SelfAttention(nn.Module):
    """``[m, length, width]`` → the same.

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
