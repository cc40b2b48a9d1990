"""A device that isn't there: torch's meta device in a GPU's place.

Tensors on it have shapes and no numbers. Every operation that is called is looked at first: one
that mixes tensors on it with the CPU's fails here as it would on a GPU. Where a number is read from
it, it is 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE = torch.device("meta")
aten = torch.ops.aten
MOVES = {aten._to_copy, aten.copy_}


class MixedDevicesError(AssertionError):
    """An operation took tensors from both."""


class Elsewhere(TorchDispatchMode):
    """Refuses what a GPU would refuse.

    Attributes:
        computed: operations that ran on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.computed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [t for t in tensors if t.device == DEVICE]
        here = [t for t in tensors if t.device != DEVICE and t.dim()]
        if not there:
            return func(*args, **kwargs)
        self.computed += 1
        kind = func.overloadpacket
        if kind is aten._local_scalar_dense:
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1
        if kind is aten.equal:
            return True
        if kind is aten.copy_ and args[0].device != DEVICE:
            return args[0].fill_(1)
        if kind is aten._to_copy and torch.device(kwargs.get("device", DEVICE)) != DEVICE:
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if here and kind not in MOVES:
            raise MixedDevicesError(f"{func} took tensors from the CPU and from the device")
        return func(*args, **kwargs)
