"""How a model is called: its inputs for one micro-batch, by position or by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
