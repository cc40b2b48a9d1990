"""What torch's optimizers do beside their rule: steps in one pass, and what they load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

_HAVE_ONE = (SGD, Adam, AdamW)

_COMPILER, _CHOSEN = "torch._dynamo", "__dynamo_disable"
"""What torch loads when an optimizer is made, and where it keeps what it calls from then on."""


def fuse(optimizer: Optimizer) -> bool:
    """Let the optimizer step with torch's fused kernel on the CPU; call it before a step. Returns
    whether that is settled: it isn't as long as some parameter has no gradient, since the kernel
    takes dense ones alone.

    torch's own choice there goes over the weights once for each term of the rule: up to three times
    the time. The result is the same but for rounding. What the optimizer was told about how
    to step stays, and so does one that there is no kernel for.
    """
    if type(optimizer) not in _HAVE_ONE:
        return True
    groups = optimizer.param_groups
    if any(_chosen(group) for group in groups):
        return True
    parameters = [p for group in groups for p in group["params"]]
    if any(p.grad is None for p in parameters):
        return False
    if all(_suits(p) and _suits(p.grad) for p in parameters):
        for group in groups:
            group["fused"] = True
    return True


def _chosen(group: dict[str, Any]) -> bool:
    """Whether the user has said how to step."""
    told = any(group.get(name) is not None for name in ("foreach", "fused"))
    return told or any(group.get(name) for name in ("differentiable", "capturable"))


def _suits(tensor: torch.Tensor) -> bool:
    """The kernel takes tensors as they lie in memory, whatever their strides."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in (torch.float32, torch.float64)
        and tensor.is_contiguous()
    )


@contextmanager
def made_without_compiler() -> Iterator[None]:
    """Optimizers that are made here to be looked at don't load torch's compiler: two to three
    seconds, and it comes with a step at the latest.

    It would only be told not to look into the adding of parameters, which it can't while it isn't
    there. Where torch keeps that otherwise, it is loaded as ever.
    """
    adds = getattr(Optimizer.add_param_group, "__wrapped__", None)
    if adds is None or _COMPILER in sys.modules or hasattr(adds, _CHOSEN):
        yield
        return
    setattr(adds, _CHOSEN, adds)
    try:
        yield
    finally:
        delattr(adds, _CHOSEN)
