"""Where the batch lies in a tensor, and how a reshape to fixed sizes follows it.

Many ONNX files fix the batch size, mostly to 1, and with it the targets of their reshapes.
A reshape keeps the order of elements. So if the batch is the factor between `outer` slower and
`inner` faster elements before a reshape, it is so after it, and this tells which dimension of
the target is to follow the actual batch: the one with the same count of slower elements
before it and of faster ones after it, up to factors that this dimension holds itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class BatchAxis:
    """Dimension `dim` has ``outer * batch * inner`` entries, `outer` the slowest.

    ``[batch * heads, time]`` is ``BatchAxis(0, 1, heads)``.
    """

    dim: int
    outer: int = 1
    inner: int = 1


def carries_batch(small: Sequence[int], large: Sequence[int]) -> bool:
    """Whether a tensor's shape, known for two batch sizes, depends on the batch."""
    return tuple(small) != tuple(large)


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
    shape: Sequence[int], axis: BatchAxis, target: Sequence[int], batch: int
) -> BatchAxis | None:
    """The batch's place after a reshape, or None where it can't be told.

    Args:
        shape: before the reshape, with `batch` samples.
        axis: the batch's place in it.
        target: all sizes after the reshape, as the file has them for `batch` samples.
        batch: the file's batch size.

    With a batch of 1 several dimensions may fit. A dimension that is the batch and nothing
    else is preferred, of several the first (the batch comes first). Without such a one, a
    lone candidate is taken, unless elements slower than the batch would share its dimension
    while the target has another dimension of the batch's size: the file then may use the
    reshape as a transposition, which works for its own batch size only.
    """
    outer = prod(shape[: axis.dim]) * axis.outer
    inner = prod(shape[axis.dim + 1 :]) * axis.inner
    found = []
    for k in range(len(target)):
        before, after = prod(target[:k]), prod(target[k + 1 :])
        if not before or not after or outer % before or inner % after:
            continue
        candidate = BatchAxis(k, outer // before, inner // after)
        if target[k] == candidate.outer * batch * candidate.inner:
            found.append(candidate)
    alone = [c for c in found if c.outer == c.inner == 1]
    if alone:
        return alone[0]
    if len(found) != 1 or (found[0].outer > 1 and batch in target):
        return None
    return found[0]
