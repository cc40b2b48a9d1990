"""Leaving a model as it was: buffers and the random state are put back after a look at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Put every buffer and the random state back: a look must not count as a training step."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.random.fork_rng(devices=_devices(model)):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def _devices(model: nn.Module) -> list[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return sorted({t.device.index or 0 for t in tensors if t.device.type == "cuda"})
