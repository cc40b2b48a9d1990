"""Windows that slide over an image: their padding, and the pooling operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from .modules import AveragePool, Cropped, Padded
from .operation import Operation
from .values import Operand

Layers: TypeAlias = "tuple[Callable[..., nn.Module], ...]"

_MAX_POOLS: Layers = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGE_POOLS: Layers = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


@dataclass(frozen=True)
class Window:
    """Kernel, strides, dilations and padding along each spatial axis."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begins: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def pads(self) -> tuple[int, ...]:
        """In ONNX's order: all begins, then all ends."""
        return self.begins + self.ends

    @property
    def symmetric(self) -> bool:
        return self.begins == self.ends

    @property
    def spans(self) -> tuple[int, ...]:
        """Entries from a window's first to its last."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @staticmethod
    def of(op: Operation, kernel: Sequence[int]) -> Window:
        """The window of a convolution or a pool, automatic padding worked out.

        SAME_*: the result has ``ceil(size / stride)`` entries (ONNX operator Conv, auto_pad).
        """
        window = Window._plain(op, kernel)
        mode = op.attribute("auto_pad", "NOTSET")
        if mode in ("NOTSET", "VALID"):
            return window
        if mode not in ("SAME_UPPER", "SAME_LOWER"):
            raise op.fail(f"its auto_pad is {mode!r}, which isn't known")
        begins, ends = [], []
        for size, span, stride in zip(op.shape()[2:], window.spans, window.strides, strict=True):
            total = max((-(-size // stride) - 1) * stride + span - size, 0)
            small, large = total // 2, total - total // 2
            begins.append(small if mode == "SAME_UPPER" else large)
            ends.append(large if mode == "SAME_UPPER" else small)
        return Window(window.kernel, window.strides, window.dilations, tuple(begins), tuple(ends))

    @staticmethod
    def of_transposed(op: Operation, kernel: Sequence[int], extra: Sequence[int]) -> Window:
        """The window of a transposed convolution; its padding is cut off the result.

        With SAME_* or an output_shape the cut is what is over (ONNX operator ConvTranspose);
        its odd entry is at the end only for SAME_UPPER.
        """
        window = Window._plain(op, kernel)
        mode = op.attribute("auto_pad", "NOTSET")
        wanted = op.attribute("output_shape")
        sizes = op.shape()[2:]
        if wanted is None and mode in ("NOTSET", "VALID"):
            return window
        if mode not in ("NOTSET", "SAME_UPPER", "SAME_LOWER"):
            raise op.fail(f"its auto_pad is {mode!r} with an output_shape, which isn't known")
        wanted = wanted or [n * s for n, s in zip(sizes, window.strides, strict=True)]
        begins, ends = [], []
        for k, size in enumerate(sizes):
            full = window.strides[k] * (size - 1) + extra[k] + window.spans[k]
            total = full - wanted[-len(sizes) :][k]
            if total < 0:
                raise op.fail("its result would be larger than the convolution's, unknown here")
            small, large = total // 2, total - total // 2
            begins.append(small if mode == "SAME_UPPER" else large)
            ends.append(large if mode == "SAME_UPPER" else small)
        return Window(window.kernel, window.strides, window.dilations, tuple(begins), tuple(ends))

    @staticmethod
    def _plain(op: Operation, kernel: Sequence[int]) -> Window:
        rank = len(kernel)
        op.ignore("kernel_shape")
        pads = tuple(op.attribute("pads", [0] * (2 * rank)))
        return Window(
            tuple(kernel),
            tuple(op.attribute("strides", [1] * rank)),
            tuple(op.attribute("dilations", [1] * rank)),
            pads[:rank],
            pads[rank:],
        )


def padded(layer: nn.Module, window: Window, value: float) -> nn.Module:
    """The layer after the window's padding."""
    return Padded(layer, window.pads, value)


def crop(layer: nn.Module, window: Window) -> nn.Module:
    """The layer with the window's padding cut off its result."""
    return Cropped(layer, window.pads)


def _tails(op: Operation, window: Window) -> tuple[int, ...]:
    """How far the last windows stick out at the ends where sizes are rounded up.

    A window that would begin beyond the image and its padding at the beginning is left out.
    """
    if not op.attribute("ceil_mode", 0):
        return (0,) * len(window.kernel)
    tails = []
    for k, size in enumerate(op.shape()[2:]):
        stride, span = window.strides[k], window.spans[k]
        whole = size + window.begins[k] + window.ends[k]
        count = -(-(whole - span) // stride) + 1
        if (count - 1) * stride >= size + window.begins[k]:
            count -= 1
        tails.append(max((count - 1) * stride + span - whole, 0))
    return tuple(tails)


def _pool_window(op: Operation) -> Window:
    rank = len(op.shape()) - 2
    if not 1 <= rank <= 3:
        raise op.fail(f"has {rank} spatial dimensions; 1 to 3 can be imported")
    window = Window.of(op, op.attribute("kernel_shape"))
    if len(window.kernel) != rank:
        raise op.fail(f"its kernel_shape has {len(window.kernel)} entries, its input {rank}")
    return window


def _within_torch(window: Window) -> bool:
    """Whether torch's own pools take this padding."""
    pairs = zip(window.begins, window.kernel, strict=True)
    return window.symmetric and all(begin <= k // 2 for begin, k in pairs)


def max_pool(op: Operation) -> Operand:
    window = _pool_window(op)
    tails = _tails(op, window)
    op.ignore("storage_order")  # of the second output, which isn't made
    make = _MAX_POOLS[len(window.kernel) - 1]
    if _within_torch(window) and not any(tails):
        layer: nn.Module = make(window.kernel, window.strides, window.begins, window.dilations)
        return op.module(layer, op.input(0))
    dtype = op.tensor(0).dtype
    lowest = float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
    ends = [e + t for e, t in zip(window.ends, tails, strict=True)]
    inner = make(window.kernel, window.strides, 0, window.dilations)
    return op.module(Padded(inner, [*window.begins, *ends], lowest), op.input(0))


def average_pool(op: Operation) -> Operand:
    window = _pool_window(op)
    if any(d != 1 for d in window.dilations):
        raise op.fail(f"its dilations are {list(window.dilations)}; only 1 can be imported")
    tails = _tails(op, window)
    count_pads = bool(op.attribute("count_include_pad", 0))
    if _within_torch(window) and not any(tails):
        make = _AVERAGE_POOLS[len(window.kernel) - 1]
        settings = (window.kernel, window.strides, window.begins, False, count_pads)
        return op.module(make(*settings), op.input(0))
    layer = AveragePool(window.kernel, window.strides, window.pads, tails, count_pads)
    return op.module(layer, op.input(0))
