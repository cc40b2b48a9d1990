"""Optimizer steps in one pass over the weights, where torch has a kernel for that."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

_HAVE_ONE = (SGD, Adam, AdamW)


def fuse(optimizer: Optimizer) -> bool:
    """Let the optimizer step with torch's fused kernel on the CPU; call it before a step.

    torch's own choice there goes over the weights once for each term of the rule: up to three times
    the time. The result is the same but for rounding. What the optimizer was told about how
    to step stays, and so does one that there is no kernel for.

    Returns:
        Whether that is settled. It isn't as long as some parameter has no gradient: the kernel
        takes dense ones alone.
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


# Keeping freed memory for the next step, as PyTorch's allocator does on a GPU -------------------
# glibc maps every allocation over 32 MiB anew and hands freed memory back to the system, so each
# training step pays for page faults again: a third of a backward of a network with 500 MB of
# gradients, and more for a whole model than for its layers one by one.

# Numbers of mallopt's parameters (malloc.h); a trim threshold of -1 stands for never.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Have the C library keep what is freed, for this whole process; on Linux with glibc alone.

    For processes of our own, the commands and the stages: it is theirs to decide, not a library's
    that is called from another program.

    Returns:
        Whether that was possible.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 64 * 2**20))
    done = [mallopt(parameter, value) == 1 for parameter, value in settings]
    return all(done)
