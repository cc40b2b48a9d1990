"""How a model is called: its inputs for one micro-batch; and a look that leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model.

    Attributes:
        tensors: each of shape ``[samples, ...]``.
        names: for each the name of the forward's argument, or None where it goes by position.
            Those by position come first.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str | None, ...]

    def of(self, model: nn.Module, tensors: Sequence[Any] | None = None) -> Any:
        """Call `model` with these tensors, or with others in their places."""
        given = self.tensors if tensors is None else tensors
        positional = [t for t, name in zip(given, self.names, strict=True) if name is None]
        named = {name: t for t, name in zip(given, self.names, strict=True) if name is not None}
        return model(*positional, **named)


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
