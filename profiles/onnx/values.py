"""The values of an ONNX graph while it is imported.

Three kinds: constants; tensors on the model's device; and shape arithmetic (sizes read from
tensors while the model runs, and what is computed from them), which stays on the CPU because
torch needs it as Python numbers. The last is called "host" here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from ..tracing.pieces import tensors_in

# Where the batch lies in a tensor ---------------------------------------------------------------
# Many ONNX files fix the batch size, mostly to 1, and with it the targets of their reshapes.
# A reshape keeps the order of elements. So if the batch is the factor between `outer` slower and
# `inner` faster elements before a reshape, it is so after it, and this tells which dimension of
# the target is to follow the actual batch: the one with the same count of slower elements
# before it and of faster ones after it, up to factors that this dimension holds itself.


@dataclass(frozen=True)
class BatchAxis:
    """Dimension `dim` has ``outer * batch * inner`` entries, `outer` the slowest.

    ``[batch * heads, time]`` is ``BatchAxis(0, 1, heads)``.
    """

    dim: int
    outer: int = 1
    inner: int = 1


def find_batch(
    small: Sequence[int],
    large: Sequence[int],
    sizes: tuple[int, int],
    origins: Sequence[BatchAxis],
) -> BatchAxis | None:
    """The batch's place in the result of an operation that isn't a reshape.

    Args:
        small, large: shapes of the result for the two batch `sizes`.
        origins: its place in the operation's operands; consulted where a dimension holds
            the batch and something else, since the shape doesn't tell their order.

    Returns:
        None where no place explains the shapes.
    """
    if len(small) != len(large):
        return None
    dims = [k for k in range(len(small)) if small[k] != large[k]]
    if len(dims) != 1:
        return None
    dim = dims[0]
    factor = small[dim] // sizes[0]
    if small[dim] != factor * sizes[0] or large[dim] != factor * sizes[1]:
        return None
    if factor == 1:
        return BatchAxis(dim)
    orders = {(a.outer, a.inner) for a in origins if a.outer * a.inner == factor}
    return BatchAxis(dim, *orders.pop()) if len(orders) == 1 else None


def follow_batch(
    shape: Sequence[int],
    axis: BatchAxis,
    target: Sequence[int],
    batch: int,
    places: Sequence[int] | None = None,
) -> BatchAxis | None:
    """The batch's place after a reshape, or None where it can't be told.

    Args:
        shape: before the reshape, with `batch` samples.
        axis: the batch's place in it.
        target: all sizes after the reshape, as the file has them for `batch` samples.
        batch: the file's batch size.
        places: dimensions of the target in which it may be; None: in any.

    With a batch of 1 several dimensions may fit. A dimension that is the batch and nothing
    else is preferred, of several the first (the batch comes first). Without such a one, a
    lone candidate is taken, unless elements slower than the batch would share its dimension
    while the target has another dimension of the batch's size: the file then may use the
    reshape as a transposition, which works for its own batch size only.
    """
    outer = prod(shape[: axis.dim]) * axis.outer
    inner = prod(shape[axis.dim + 1 :]) * axis.inner
    found = []
    for k in range(len(target)) if places is None else places:
        before, after = prod(target[:k]), prod(target[k + 1 :])
        if not before or not after or outer % before or inner % after:
            continue
        candidate = BatchAxis(k, outer // before, inner // after)
        if target[k] == candidate.outer * batch * candidate.inner:
            found.append(candidate)
    alone = [c for c in found if c.outer == c.inner == 1]
    if alone:
        return alone[0]
    if len(found) != 1 or (places is None and found[0].outer > 1 and batch in target):
        return None
    return found[0]


# The values -------------------------------------------------------------------------------------


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
        return not any(isinstance(x, FakeTensor) for x in tensors_in(self.probes))

    @property
    def carries_batch(self) -> bool:
        """Whether its shape depends on the batch; never so for shape arithmetic."""
        small, large = self.probes
        return not self.host and small.shape != large.shape

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
