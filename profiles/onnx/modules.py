"""Layers of ONNX for which torch.nn has no exact equivalent.

Each prints its settings (extra_repr), since a graph's fingerprint is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor

import torch
from torch import Tensor, nn
from torch.nn import functional

from .functions import gemm, torch_pads

_POOLS = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)


class Padded(nn.Module):
    """A layer on its input padded with `value`; `pads`: starts, then ends, of spatial axes."""

    def __init__(self, inner: nn.Module, pads: Sequence[int], value: float = 0.0) -> None:
        super().__init__()
        self.inner, self.pads, self.value = inner, torch_pads(pads), value

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(  # type: ignore[no-any-return]
            functional.pad(x, self.pads, value=self.value)
        )

    def extra_repr(self) -> str:
        return f"pads={self.pads}, value={self.value}, inner={self.inner!r}"


class Cropped(nn.Module):
    """A layer whose result is cropped; `crops`: at starts, then ends, of spatial axes."""

    def __init__(self, inner: nn.Module, crops: Sequence[int]) -> None:
        super().__init__()
        self.inner, self.pads = inner, [-c for c in torch_pads(crops)]

    def forward(self, x: Tensor) -> Tensor:
        return functional.pad(self.inner(x), self.pads)

    def extra_repr(self) -> str:
        return f"pads={self.pads}, inner={self.inner!r}"


class AveragePool(nn.Module):
    """Average pooling with padding of any shape. x: ``[N, C, *spatial]``.

    Args:
        pads: real padding: starts, then ends, of the spatial axes.
        tails: what rounding the result's size up adds at the ends; never counted in a mean.
        count_pads: whether the mean's divisor counts the real padding.
    """

    def __init__(
        self,
        kernel: Sequence[int],
        strides: Sequence[int],
        pads: Sequence[int],
        tails: Sequence[int],
        count_pads: bool,
    ) -> None:
        super().__init__()
        self.kernel, self.strides = tuple(kernel), tuple(strides)
        self.pads, self.tails = torch_pads(pads), torch_pads([*(0 for _ in tails), *tails])
        self.count_pads = count_pads

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
        counted = functional.pad(ones, self.pads, value=1.0 if self.count_pads else 0.0)
        return self._pool(functional.pad(x, self.pads)) / self._pool(counted)

    def _pool(self, x: Tensor) -> Tensor:
        x = functional.pad(x, self.tails)
        return _POOLS[len(self.kernel) - 1](x, self.kernel, self.strides)

    def extra_repr(self) -> str:
        return (
            f"kernel={self.kernel}, strides={self.strides}, pads={self.pads}, "
            f"tails={self.tails}, count_pads={self.count_pads}"
        )


class ChannelNorm(nn.Module):
    """Local response normalization over an even number of channels, as ONNX places it.

    ``y = x / (bias + alpha / size * sum of x² over channels c - ⌊(size-1)/2⌋ …
    c + ⌈(size-1)/2⌉)^beta`` (ONNX operator LRN); torch.nn has the larger half first.
    """

    def __init__(self, size: int, alpha: float, beta: float, bias: float) -> None:
        super().__init__()
        self.size, self.alpha, self.beta, self.bias = size, alpha, beta, bias

    def forward(self, x: Tensor) -> Tensor:
        half = (self.size - 1) / 2
        squares = (x * x).flatten(2).transpose(1, 2)
        padded = functional.pad(squares, (floor(half), ceil(half)))
        means = functional.avg_pool1d(padded, self.size, 1).transpose(1, 2).reshape(x.shape)
        return x / torch.pow(self.bias + self.alpha * means, self.beta)

    def extra_repr(self) -> str:
        return f"{self.size}, alpha={self.alpha}, beta={self.beta}, bias={self.bias}"


class FlatSoftmax(nn.Module):
    """Softmax over all dimensions from `axis` on together (ONNX before opset 13)."""

    def __init__(self, axis: int, log: bool) -> None:
        super().__init__()
        self.axis, self.log = axis, log

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(self.axis)
        y = torch.log_softmax(flat, -1) if self.log else torch.softmax(flat, -1)
        return y.reshape(x.shape)

    def extra_repr(self) -> str:
        return f"axis={self.axis}, log={self.log}"


class MatMul(nn.Module):
    """A product with a weight: ``[..., k]`` @ ``[k, n]``. The weight is set from outside."""

    weight: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.weight)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}"


class Gemm(nn.Module):
    """``alpha * x @ weight + beta * bias`` where nn.Linear doesn't do: other factors or layout.

    The weight and the bias, which broadcasts, are set from outside.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, alpha: float, beta: float, transpose_x: bool, transpose_w: bool) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, beta
        self.transpose_x, self.transpose_w = transpose_x, transpose_w

    def forward(self, x: Tensor) -> Tensor:
        return gemm(
            x, self.weight, self.bias, self.alpha, self.beta, self.transpose_x, self.transpose_w
        )

    def extra_repr(self) -> str:
        return (
            f"{tuple(self.weight.shape)}, alpha={self.alpha}, beta={self.beta}, "
            f"transpose_x={self.transpose_x}, transpose_w={self.transpose_w}"
        )


class Resize(nn.Module):
    """Interpolation along each axis in turn: between two neighbours, or the nearest one.

    Args:
        axes: for each axis to resize: the axis, each output's lower and upper neighbour, and the
            upper one's weight; without weights the lower neighbour is taken.
    """

    def __init__(self, axes: Sequence[tuple[int, Tensor, Tensor, Tensor | None]]) -> None:
        super().__init__()
        self.axes = tuple(axis for axis, *_ in axes)
        for axis, low, high, weight in axes:
            # Not in the state: they follow from the settings.
            self.register_buffer(f"low{axis}", low, persistent=False)
            self.register_buffer(f"high{axis}", high, persistent=False)
            self.register_buffer(f"weight{axis}", weight, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for axis in self.axes:
            low = x.index_select(axis, self.get_buffer(f"low{axis}"))
            weight = self._buffers[f"weight{axis}"]
            if weight is None:
                x = low
                continue
            high = x.index_select(axis, self.get_buffer(f"high{axis}"))
            sizes = [-1 if k == axis else 1 for k in range(x.dim())]
            x = torch.lerp(low, high, weight.to(x.dtype).reshape(sizes))
        return x

    def extra_repr(self) -> str:
        sizes = {axis: len(self.get_buffer(f"low{axis}")) for axis in self.axes}
        linear = any(self._buffers[f"weight{axis}"] is not None for axis in self.axes)
        return f"sizes={sizes}, linear={linear}"
