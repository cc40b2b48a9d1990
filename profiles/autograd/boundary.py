"""Where a tensor from elsewhere enters a graph of its own, and where its gradient leaves it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Inlet:
    """One entry of a tensor; after the backward, `grad` holds the gradient for its producer.

    `anchor` is the leaf behind it, for backwards that run to some leaves alone.

    Unlike a leaf that requires grad, the tensor isn't kept alive unless some operation saves
    it, and a first operation that works in place may overwrite it.
    """

    def __init__(self) -> None:
        self.grad: Tensor | None = None
        self.anchor: Tensor | None = None

    def admit(self, tensor: Tensor) -> Tensor:
        """The same memory as a tensor of the graph that requires grad."""
        self.anchor = torch.empty(0, dtype=tensor.dtype, device=tensor.device, requires_grad=True)
        admitted: Tensor = _Admit.apply(self.anchor, tensor, self)
        return admitted


class _Admit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, inlet: Inlet) -> Tensor:
        ctx.inlet = inlet
        # Not a view of `tensor` in autograd's eyes: views made here can't be changed in place.
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return alias

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.inlet.grad = grads[0]
        return None, None, None
