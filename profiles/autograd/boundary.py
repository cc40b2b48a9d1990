"""Borders of autograd graphs: tensors that enter one, and bytes that it keeps for the backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Inlet:
    """Where a tensor from elsewhere enters a graph, and its gradient leaves it: after the backward,
    `grad` holds that for the tensor's producer. `anchor` is the leaf behind it, for backwards that
    run to some leaves alone.

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
        # Of a conjugate that isn't computed yet, the memory is another tensor's.
        # `data` isn't a view in autograd's eyes: views made here can't be changed in place.
        return tensor.resolve_conj().resolve_neg().data

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.inlet.grad = grads[0]
        return None, None, None


def give_gradients_own_memory(parameters: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Autograd lets a first gradient have the memory of another one that it is a view of, and adds
    further ones in place: the other would change with it.

    Args:
        parameters: without a gradient before the backward that was just run.
        others: gradients that went into it, or came out besides.
    """
    taken = set(map(storage_key, others))
    for p in parameters:
        grad = p.grad
        if grad is not None and not grad.is_sparse:
            if storage_key(grad) in taken:
                p.grad = grad = grad.clone()
            taken.add(storage_key(grad))


# Bytes that autograd keeps for the backward, counted by saved-tensor hooks ----------------------


def storage_key(tensor: Tensor) -> int:
    """Identifies the memory behind a tensor as long as that memory is alive."""
    return int(tensor.untyped_storage()._cdata)


def storage_bytes(tensor: Tensor) -> int:
    """Bytes of the whole storage behind a tensor, which a view keeps alive."""
    return tensor.untyped_storage().nbytes()


SavedTensor = tuple[weakref.ref[Tensor], int, int]
"""What autograd was given to keep, the key of its storage, and that one's bytes."""


def bytes_held(saved: Iterable[SavedTensor]) -> dict[int, int]:
    """Bytes by storage key of what autograd keeps still. What was saved for a result that nobody
    took, or that was cut off from gradients, has gone with it."""
    return {key: size for kept, key, size in saved if size and kept() is not None}


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Context manager that notes every storage saved for backward under it, each once.

    Storages in `ignore` (parameters, buffers) don't count: they are held anyway. The saved
    tensors themselves are left as they are.

    Attributes:
        tensors: how many were saved, ignored ones too.
    """

    def __init__(self, ignore: Iterable[Tensor] = ()) -> None:
        self.ignored = {storage_key(tensor) for tensor in ignore}
        self._saved: list[SavedTensor] = []
        self.tensors = 0
        super().__init__(self._pack, lambda kept: kept)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.tensors += 1
        # An operation's own output would keep its operation, and that the output, for good.
        kept = tensor.detach()
        if storage_key(tensor) not in self.ignored:
            self._saved.append((weakref.ref(kept), storage_key(tensor), storage_bytes(tensor)))
        return kept

    def __enter__(self) -> SavedBytes:  # type: ignore[override]
        super().__enter__()
        return self

    @property
    def storages(self) -> dict[int, int]:
        """Bytes by storage key, of graphs that are there; keys stay valid while they are."""
        return bytes_held(self._saved)

    @property
    def total(self) -> int:
        """Bytes held now."""
        return sum(self.storages.values())
