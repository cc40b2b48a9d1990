"""The values of an ONNX graph while it is imported.

Three kinds: constants; tensors on the model's device; and shape arithmetic (sizes read from
tensors while the model runs, and what is computed from them), which stays on the CPU because
torch needs it as Python numbers. The last is called "host" here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from .batch import BatchAxis, carries_batch

_NO_WEIGHT = 1e30
"""Constants this large are masks, not something to train."""


@dataclass
class Constant:
    """A value known from the file.

    Attributes:
        trainable: it becomes a parameter where an operator takes it as data.
        shared: several operators use it, so that all must see the same parameter.
    """

    tensor: Tensor
    trainable: bool
    shared: bool
    name: str
    _parameter: nn.Parameter | None = None

    @property
    def state(self) -> Tensor:
        """What a module holds: the parameter, always the same, or the tensor as a buffer."""
        if not self.trainable:
            return self.tensor
        if self._parameter is None:
            self._parameter = nn.Parameter(self.tensor)
        return self._parameter


@dataclass(frozen=True)
class Dynamic:
    """A value computed by an fx node; `probes` are its results for the two batch sizes."""

    node: fx.Node
    probes: tuple[Any, Any]
    batch: BatchAxis | None

    @property
    def host(self) -> bool:
        return not any(isinstance(x, FakeTensor) for x in _tensors(self.probes))

    @property
    def carries_batch(self) -> bool:
        """Whether its shape depends on the batch; never so for shape arithmetic."""
        small, large = self.probes
        return not self.host and carries_batch(small.shape, large.shape)

    @property
    def fixed(self) -> Tensor | None:
        """The value, where it is shape arithmetic and the same for both batch sizes."""
        small, large = self.probes
        same = self.host and small.shape == large.shape and torch.equal(small, large)
        return small if same else None


@dataclass(frozen=True)
class Setting:
    """Marks shape arithmetic that an operator takes as a setting, not as data."""

    value: Dynamic


Operand: TypeAlias = "Constant | Dynamic"


def can_train(tensor: Tensor) -> bool:
    """Whether it may be a weight: a float tensor with dimensions, and no mask."""
    if not tensor.is_floating_point() or tensor.dim() == 0 or tensor.numel() == 0:
        return False
    limit = min(_NO_WEIGHT, torch.finfo(tensor.dtype).max / 2)
    return bool((tensor.abs() < limit).all())


def operands_in(value: Any) -> Iterator[Any]:
    """The operands and settings in a nest of tuples."""
    if isinstance(value, (Constant, Dynamic, Setting)):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from operands_in(item)


def map_operands(value: Any, change: Callable[[Any], Any]) -> Any:
    """The nest of tuples with every operand changed."""
    if isinstance(value, (Constant, Dynamic, Setting)):
        return change(value)
    if isinstance(value, (list, tuple)):
        return tuple(map_operands(item, change) for item in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
