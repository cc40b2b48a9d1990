"""What ONNX's function-like operators do where torch has no function that does exactly this.

The functions run inside the imported graph. Arguments called `shape`, `axes`, `starts` and the
like are Python integers, or int64 tensors on the CPU where they are computed from sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

Integers: TypeAlias = "Sequence[int] | Tensor"
Axes: TypeAlias = "tuple[int, ...] | None"

_CONVOLUTIONS = (functional.conv1d, functional.conv2d, functional.conv3d)


def integers(values: Integers) -> list[int]:
    """Python integers, one or many."""
    if isinstance(values, Tensor):
        return [int(v) for v in values.reshape(-1).tolist()]
    return [int(v) for v in values]


def beside(x: Tensor, other: Tensor) -> Tensor:
    """`x` on the device of `other`."""
    return x.to(other.device)


def shape_of(x: Tensor, start: int, end: int | None) -> Tensor:
    """Sizes of dimensions start … end, on the CPU."""
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


def size_of(x: Tensor) -> Tensor:
    """The number of elements, on the CPU."""
    return torch.tensor(x.numel(), dtype=torch.int64)


def reshape(x: Tensor, shape: Integers, allow_zero: bool) -> Tensor:
    """Reshape; 0 keeps a dimension's size unless `allow_zero`."""
    sizes = integers(shape)
    if not allow_zero:
        sizes = [x.shape[k] if size == 0 else size for k, size in enumerate(sizes)]
    return x.reshape(sizes)


def expand(x: Tensor, shape: Integers) -> Tensor:
    """Broadcast both ways: a size of 1 in `shape` leaves the tensor's own."""
    return x.expand(torch.broadcast_shapes(x.shape, tuple(integers(shape))))


def expand_as(x: Tensor, dim: int, other: Tensor) -> Tensor:
    """Expand one dimension of size 1 to the other tensor's size of it."""
    sizes = list(x.shape)
    sizes[dim] = other.shape[dim]
    return x.expand(sizes)


def squeeze(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Remove dimensions, which must have size 1."""
    for axis in axes:
        if x.shape[axis] != 1:
            raise ValueError(f"dimension {axis} has size {x.shape[axis]}; only 1 can be squeezed")
    return torch.squeeze(x, axes)


def unsqueeze(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Insert dimensions of size 1 at these places of the result."""
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def slice_axes(
    x: Tensor, starts: Integers, ends: Integers, axes: Sequence[int], steps: Integers
) -> Tensor:
    """``x[start:end:step]`` along each of the axes, with Python's rules; steps may be negative."""
    for start, end, axis, step in zip(
        integers(starts), integers(ends), axes, integers(steps), strict=True
    ):
        places = range(*slice(start, end, step).indices(x.shape[axis]))
        if step == 1:
            x = x.narrow(axis, places.start, len(places))
        else:
            x = x.index_select(axis, torch.tensor(list(places), device=x.device))
    return x


def gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Entries along one axis, in the shape of `indices`; negative ones count from the end."""
    axis %= x.dim()
    places = torch.where(indices < 0, indices + x.shape[axis], indices).long()
    picked = x.index_select(axis, places.reshape(-1))
    return picked.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def gather_elements(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """One entry along `axis` for each index; negative ones count from the end."""
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


def concatenate(tensors: tuple[Tensor, ...], axis: int) -> Tensor:
    """torch.cat, for the call's graph to hold a tuple."""
    return torch.cat(tensors, axis)


def tile(x: Tensor, repeats: Integers) -> Tensor:
    """Repeat along every dimension."""
    return x.repeat(integers(repeats))


def constant_of_shape(shape: Integers, value: float | bool, dtype: torch.dtype) -> Tensor:
    """A tensor filled with one value."""
    return torch.full(integers(shape), value, dtype=dtype)


def counting(start: Tensor, limit: Tensor, delta: Tensor) -> Tensor:
    """start, start + delta, … below limit."""
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor with another dtype."""
    return x.to(dtype)


def divide(x: Tensor, y: Tensor | float) -> Tensor:
    """Division; of integers towards zero."""
    if x.is_floating_point():
        return torch.div(x, y)
    return torch.div(x, y, rounding_mode="trunc")


def power(x: Tensor, y: Tensor | float) -> Tensor:
    """x to the power of y, with the dtype of x."""
    return torch.pow(x, y).to(x.dtype)


def total(*tensors: Tensor) -> Tensor:
    """The sum of tensors that broadcast."""
    return reduce(torch.add, tensors)


def average(*tensors: Tensor) -> Tensor:
    """The mean of tensors that broadcast."""
    return reduce(torch.add, tensors) / len(tensors)


def maximum(*tensors: Tensor) -> Tensor:
    """The largest, elementwise."""
    return reduce(torch.maximum, tensors)


def minimum(*tensors: Tensor) -> Tensor:
    """The smallest, elementwise."""
    return reduce(torch.minimum, tensors)


def _all(x: Tensor, axes: Axes) -> tuple[int, ...]:
    return tuple(range(x.dim())) if axes is None else axes


def reduce_mean(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The mean over axes (None: over all), as all reductions here."""
    return torch.mean(x, _all(x, axes), keepdim=keep)


def reduce_sum(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The sum, with the dtype of x."""
    return torch.sum(x, _all(x, axes), keepdim=keep, dtype=x.dtype)


def reduce_max(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The largest element."""
    return torch.amax(x, _all(x, axes), keepdim=keep)


def reduce_min(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The smallest element."""
    return torch.amin(x, _all(x, axes), keepdim=keep)


def reduce_prod(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The product, with the dtype of x."""
    # From the last axis on, so that those still to come keep their places.
    for axis in sorted((axis % x.dim() for axis in _all(x, axes)), reverse=True):
        x = torch.prod(x, axis, keepdim=keep, dtype=x.dtype)
    return x


def reduce_l1(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The sum of absolute values."""
    return reduce_sum(x.abs(), axes, keep)


def reduce_l2(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The Euclidean norm; its gradient at zero is zero."""
    norm: Tensor = torch.linalg.vector_norm(x, 2, _all(x, axes), keepdim=keep)
    return norm


def reduce_sum_square(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The sum of squares."""
    return reduce_sum(x * x, axes, keep)


def reduce_log_sum(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The logarithm of the sum."""
    return reduce_sum(x, axes, keep).log()


def reduce_log_sum_exp(x: Tensor, axes: Axes, keep: bool) -> Tensor:
    """The logarithm of the sum of exponentials."""
    return torch.logsumexp(x, _all(x, axes), keepdim=keep)


def cumulative_sum(x: Tensor, axis: int, exclusive: bool, reverse: bool) -> Tensor:
    """Running sums; `exclusive` leaves out the element itself, `reverse` starts at the end."""
    y = x.flip(axis) if reverse else x
    sums = torch.cumsum(y, axis, dtype=x.dtype)
    if exclusive:
        sums = sums - y
    return sums.flip(axis) if reverse else sums


def pad(x: Tensor, pads: Sequence[int], mode: str, value: float) -> Tensor:
    """Pad; `pads` has all dimensions' starts, then their ends. Negative ones crop."""
    return functional.pad(x, torch_pads(pads), mode, value if mode == "constant" else None)


def torch_pads(pads: Sequence[int]) -> list[int]:
    """From ONNX's order (starts, then ends) to torch's: pairs, the last dimension first."""
    half = len(pads) // 2
    return [p for k in reversed(range(half)) for p in (pads[k], pads[half + k])]


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    alpha: float,
    beta: float,
    transpose_a: bool,
    transpose_b: bool,
) -> Tensor:
    """``alpha * a @ b + beta * c``, with a and b transposed first where asked."""
    product = (a.t() if transpose_a else a) @ (b.t() if transpose_b else b)
    if alpha != 1:
        product = alpha * product
    if c is None:
        return product
    return product + (c if beta == 1 else beta * c)


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pads: Sequence[int],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    groups: int,
) -> Tensor:
    """A convolution whose weight is computed by the model itself."""
    padded = functional.pad(x, torch_pads(pads)) if any(pads) else x
    result: Tensor = _CONVOLUTIONS[x.dim() - 3](padded, weight, bias, strides, 0, dilations, groups)
    return result


def normalize_batch(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Batch normalization with statistics or scales that the model itself computes."""
    return functional.batch_norm(x, mean, variance, scale, bias, False, 0.0, eps)


def normalize_layer(x: Tensor, scale: Tensor, bias: Tensor | None, axis: int, eps: float) -> Tensor:
    """Layer normalization over all dimensions from `axis` on; scale and bias broadcast."""
    y = functional.layer_norm(x, x.shape[axis:], eps=eps) * scale
    return y if bias is None else y + bias


def normalize_groups(x: Tensor, scale: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """Group normalization, scaled per channel, or per group where there are as many scales."""
    repeats = x.shape[1] // scale.shape[0]
    scale, bias = (v.repeat_interleave(repeats) for v in (scale, bias))
    return functional.group_norm(x, groups, scale, bias, eps)


def parametric_relu(x: Tensor, slope: Tensor) -> Tensor:
    """x where positive, slope * x elsewhere; the slope broadcasts."""
    return torch.where(x < 0, slope * x, x)


def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    """``max(0, min(1, alpha * x + beta))``."""
    return torch.clamp(alpha * x + beta, 0.0, 1.0)


def scaled_elu(x: Tensor, alpha: float, gamma: float) -> Tensor:
    """``gamma * elu(x, alpha)``."""
    return gamma * functional.elu(x, alpha)


def global_pool(x: Tensor, largest: bool) -> Tensor:
    """Mean or maximum over all dimensions but the first two, which stay with size 1."""
    dims = tuple(range(2, x.dim()))
    return torch.amax(x, dims, keepdim=True) if largest else torch.mean(x, dims, keepdim=True)


def depth_to_space(x: Tensor, block: int, column_major: bool) -> Tensor:
    """Move channels into blocks of ``block × block`` pixels. x: ``[N, C, H, W]``."""
    n, c, h, w = x.shape
    if column_major:  # ONNX's CRD, as torch's pixel_shuffle
        return functional.pixel_shuffle(x, block)
    y = x.reshape(n, block, block, c // block**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return y.reshape(n, c // block**2, h * block, w * block)


def space_to_depth(x: Tensor, block: int) -> Tensor:
    """Move blocks of ``block × block`` pixels into channels. x: ``[N, C, H, W]``."""
    n, c, h, w = x.shape
    y = x.reshape(n, c, h // block, block, w // block, block).permute(0, 3, 5, 1, 2, 4)
    return y.reshape(n, c * block**2, h // block, w // block)
