"""Gradients that there are none of: messages say so, and don't bring zeros in their place.

Optimizers leave a parameter without a gradient alone; with a gradient of 0 they still apply weight
decay and momentum. So what the loss doesn't depend on must not get zeros because of a cut.
Messages have fixed shapes: they tell it by a NaN that no computation makes, with bits of our own.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MARKS = {
    torch.float64: (torch.int64, 0x7FFC_A5A5_A5A5_A5A5),
    torch.float32: (torch.int32, 0x7FE5_A5A5),
    torch.float16: (torch.int16, 0x7F5A),
    torch.bfloat16: (torch.int16, 0x7FE5),
}


def fill_absent(slot: Tensor) -> None:
    """Say that there is no gradient, in one slot or several. Types that have no mark get zeros."""
    mark = _MARKS.get(slot.dtype)
    if mark is None:
        slot.zero_()
    else:
        slot.view(mark[0]).fill_(mark[1])


def absent(message: Tensor) -> list[bool]:
    """For each slot of a gradient message ``[micro-batches, samples, ...]``, whether it has none.

    Where only some samples have none (they came from several senders), theirs become zeros.
    """
    slots = len(message)
    mark = _MARKS.get(message.dtype)
    if mark is None or not message.numel():
        return [False] * slots
    bits = message.contiguous().view(mark[0]).reshape(slots, -1)
    rows = message.shape[1] if message.dim() > 1 else 1
    # The first number of each sample tells of all of it.
    if not (bits[:, :: bits.shape[1] // rows] == mark[1]).any():
        return [False] * slots
    marked = bits == mark[1]
    gone: list[bool] = marked.all(1).tolist()
    message.masked_fill_(marked.reshape(message.shape), 0.0)
    for slot, none in zip(message, gone, strict=True):
        if none:
            fill_absent(slot)
    return gone


def add_gradients(total: Tensor, more: Tensor) -> None:
    """Add a message to another one of the same tensor, in place."""
    without, also_without = absent(total), absent(more)
    if not any(without) and not any(also_without):
        total.add_(more)
        return
    for mine, other, none, other_none in zip(total, more, without, also_without, strict=True):
        if none:
            mine.copy_(other)
        elif not other_none:
            mine.add_(other)
