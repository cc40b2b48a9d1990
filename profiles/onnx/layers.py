"""Operators that become layers: convolutions, pooling, products with weights, norms, dropout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor, nn

from . import functions as functions
from .builder import Handler, Operation
from .modules import AveragePool, ChannelNorm, Cropped, FlatSoftmax, Gemm, MatMul, Padded
from .values import Constant, Operand

# Windows that slide over an image, and pooling --------------------------------------------------

Layers: TypeAlias = "tuple[Callable[..., nn.Module], ...]"

_MAX_POOLS: Layers = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_AVERAGE_POOLS: Layers = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)


@dataclass(frozen=True)
class KernelWindow:
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
    def of(op: Operation, kernel: Sequence[int]) -> KernelWindow:
        """The window of a convolution or a pool, automatic padding worked out.

        SAME_*: the result has ``ceil(size / stride)`` entries (ONNX operator Conv, auto_pad).
        """
        window = KernelWindow._plain(op, kernel)
        mode = op.attribute("auto_pad", "NOTSET")
        if mode in ("NOTSET", "VALID"):
            return window
        if mode not in ("SAME_UPPER", "SAME_LOWER"):
            raise op.fail(f"its auto_pad is {mode!r}, which isn't known")
        totals = []
        for size, span, stride in zip(op.shape()[2:], window.spans, window.strides, strict=True):
            totals.append(max((-(-size // stride) - 1) * stride + span - size, 0))
        return window._padded(totals, mode)

    @staticmethod
    def of_transposed(op: Operation, kernel: Sequence[int], extra: Sequence[int]) -> KernelWindow:
        """The window of a transposed convolution; its padding is cut off the result.

        With SAME_* or an output_shape the cut is what is over (ONNX operator ConvTranspose);
        its odd entry is at the end only for SAME_UPPER.
        """
        window = KernelWindow._plain(op, kernel)
        mode = op.attribute("auto_pad", "NOTSET")
        wanted = op.attribute("output_shape")
        sizes = op.shape()[2:]
        if wanted is None and mode in ("NOTSET", "VALID"):
            return window
        if mode not in ("NOTSET", "SAME_UPPER", "SAME_LOWER"):
            raise op.fail(f"its auto_pad is {mode!r} with an output_shape, which isn't known")
        wanted = wanted or [n * s for n, s in zip(sizes, window.strides, strict=True)]
        totals = []
        for k, size in enumerate(sizes):
            full = window.strides[k] * (size - 1) + extra[k] + window.spans[k]
            total = full - wanted[-len(sizes) :][k]
            if total < 0:
                raise op.fail("its result would be larger than the convolution's, unknown here")
            totals.append(total)
        return window._padded(totals, mode)

    def _padded(self, totals: Sequence[int], mode: str) -> KernelWindow:
        """With so much padding in all along each axis; what is odd is at the end for SAME_UPPER."""
        small, large = (tuple(t // 2 for t in totals), tuple(t - t // 2 for t in totals))
        begins, ends = (small, large) if mode == "SAME_UPPER" else (large, small)
        return replace(self, begins=begins, ends=ends)

    @staticmethod
    def _plain(op: Operation, kernel: Sequence[int]) -> KernelWindow:
        rank = len(kernel)
        op.ignore("kernel_shape")
        pads = tuple(op.attribute("pads", [0] * (2 * rank)))
        return KernelWindow(
            tuple(kernel),
            tuple(op.attribute("strides", [1] * rank)),
            tuple(op.attribute("dilations", [1] * rank)),
            pads[:rank],
            pads[rank:],
        )


def _tails(op: Operation, window: KernelWindow) -> tuple[int, ...]:
    """How far the last windows stick out at the ends where sizes are rounded up; one that would
    begin beyond the image and its padding at the beginning is left out."""
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


def _pool_window(op: Operation) -> KernelWindow:
    rank = _spatial(op, len(op.shape()))
    window = KernelWindow.of(op, op.attribute("kernel_shape"))
    if len(window.kernel) != rank:
        raise op.fail(f"its kernel_shape has {len(window.kernel)} entries, its input {rank}")
    return window


def _within_torch(window: KernelWindow) -> bool:
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


# Convolutions, products with weights, norms, dropout --------------------------------------------

_CONVOLUTIONS: Layers = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED: Layers = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS: Layers = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_INSTANCE_NORMS: Layers = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_AVERAGES: Layers = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_MAXIMA: Layers = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)


def _constants(op: Operation, first: int, end: int) -> list[Constant] | None:
    """Inputs first … end (those that are given), where all are constants."""
    found = [op.optional(k) for k in range(first, end)]
    constants = [x for x in found if isinstance(x, Constant)]
    return constants if len(constants) == sum(x is not None for x in found) else None


def _spatial(op: Operation, dims: int) -> int:
    """Spatial dimensions of so many. Raises TargetError unless they are 1 to 3."""
    if not 3 <= dims <= 5:
        raise op.fail(f"has {dims - 2} spatial dimensions; 1 to 3 can be imported")
    return dims - 2


def _with_weights(
    op: Operation, layer: nn.Module, weights: Sequence[Constant], around: nn.Module | None = None
) -> Operand:
    """A layer with its weight and, if there is one, its bias; `around`: what it is within."""
    op.assign(layer, "weight", weights[0])
    op.assign(layer, "bias", weights[1] if len(weights) > 1 else None)
    return op.module(around or layer, op.input(0))


def activation(make: Callable[[Operation], nn.Module]) -> Handler:
    """A layer of one input and no weights."""

    def handle(op: Operation) -> Operand:
        module = make(op)
        x = op.input(0)
        if isinstance(x, Constant) and not x.trainable:
            return op.call(module, x)  # no layer: it is folded
        return op.module(module, op.input(0))

    return handle


def convolution(op: Operation) -> Operand:
    weights = _constants(op, 1, 3)
    shape = op.shape(1)
    rank = _spatial(op, len(shape))
    window = KernelWindow.of(op, shape[2:])
    groups = op.attribute("group", 1)
    if weights is None:
        settings = (window.pads, window.strides, window.dilations, groups)
        return op.call(functions.convolve, op.input(0), op.input(1), op.optional(2), *settings)
    layer = _CONVOLUTIONS[rank - 1](
        shape[1] * groups,
        shape[0],
        window.kernel,
        window.strides,
        window.begins if window.symmetric else 0,
        window.dilations,
        groups,
        bias=len(weights) > 1,
        device="meta",
    )
    padded = None if window.symmetric else Padded(layer, window.pads, 0.0)
    return _with_weights(op, layer, weights, padded)


def transposed_convolution(op: Operation) -> Operand:
    weights = _constants(op, 1, 3)
    if weights is None:
        raise op.fail("its weight isn't a constant, which can't be imported")
    shape = op.shape(1)
    rank = _spatial(op, len(shape))
    extra = tuple(op.attribute("output_padding", [0] * rank))
    window = KernelWindow.of_transposed(op, shape[2:], extra)
    groups = op.attribute("group", 1)
    layer = _TRANSPOSED[rank - 1](
        shape[0],
        shape[1] * groups,
        window.kernel,
        window.strides,
        window.begins if window.symmetric else 0,
        extra,
        groups,
        bias=len(weights) > 1,
        dilation=window.dilations,
        device="meta",
    )
    cropped = None if window.symmetric else Cropped(layer, window.pads)
    return _with_weights(op, layer, weights, cropped)


def global_pool(layers: Layers, largest: bool) -> Handler:
    """A pool over all spatial dimensions."""

    def handle(op: Operation) -> Operand:
        rank = len(op.shape()) - 2
        if 1 <= rank <= 3:
            return op.module(layers[rank - 1](1), op.input(0))
        return op.call(functions.global_pool, op.input(0), largest)

    return handle


def gemm(op: Operation) -> Operand:
    alpha, beta = op.attribute("alpha", 1.0), op.attribute("beta", 1.0)
    transpose_a, transpose_b = bool(op.attribute("transA", 0)), bool(op.attribute("transB", 0))
    op.ignore("broadcast")  # before opset 7: what is now always so
    weights = _constants(op, 1, 3)
    if weights is None or isinstance(op.input(0), Constant):
        settings = (alpha, beta, transpose_a, transpose_b)
        return op.call(functions.gemm, op.input(0), op.input(1), op.optional(2), *settings)
    bias = weights[1] if len(weights) > 1 else None
    rows, columns = op.shape(1)
    plain = alpha == 1 and not transpose_a and transpose_b
    layer: nn.Module
    if plain and (bias is None or (beta == 1 and tuple(bias.tensor.shape) == (rows,))):
        layer = nn.Linear(columns, rows, bias=bias is not None, device="meta")
    else:
        layer = Gemm(alpha, beta, transpose_a, transpose_b)
    return _with_weights(op, layer, weights)


def matrix_product(op: Operation) -> Operand:
    x, weight = op.input(0), op.input(1)
    if isinstance(weight, Constant) and weight.trainable and not isinstance(x, Constant):
        layer = MatMul()
        op.assign(layer, "weight", weight)
        return op.module(layer, x)
    return op.call(_matmul, x, weight)


def _matmul(x: Tensor, y: Tensor) -> Tensor:
    return x @ y


def batch_norm(op: Operation) -> Operand:
    eps = op.attribute("epsilon", 1e-5)
    op.require("spatial", 1)
    op.ignore("is_test", "training_mode")  # the module's own mode decides
    momentum = 1 - op.attribute("momentum", 0.9)
    constants = _constants(op, 1, 5)
    rank = len(op.shape())
    if constants is None:
        return op.call(functions.normalize_batch, *(op.input(k) for k in range(5)), eps)
    if not 2 <= rank <= 5 or len(constants) < 4:
        raise op.fail(f"its input has {rank} dimensions; 2 to 5 can be imported")
    *weights, mean, variance = constants
    layer = _BATCH_NORMS[rank - 2](len(mean.tensor), eps, momentum)
    # Copies: training changes them in place, each layer its own.
    layer.register_buffer("running_mean", mean.tensor.clone())
    layer.register_buffer("running_var", variance.tensor.clone())
    return _with_weights(op, layer, weights)


def layer_norm(op: Operation) -> Operand:
    shape = op.shape()
    axis = op.axis(op.attribute("axis", -1))
    eps = op.attribute("epsilon", 1e-5)
    op.ignore("stash_type")  # the precision of inner sums
    batch = op.batch_dim()
    if batch is not None and batch >= axis:
        raise op.fail("normalizes over the batch dimension, which can't be imported")
    constants = _constants(op, 1, 3)
    if constants is None or any(tuple(x.tensor.shape) != shape[axis:] for x in constants):
        operands = (op.input(0), op.input(1), op.optional(2))
        return op.call(functions.normalize_layer, *operands, axis, eps)
    layer = nn.LayerNorm(shape[axis:], eps, bias=len(constants) > 1, device="meta")
    return _with_weights(op, layer, constants)


def instance_norm(op: Operation) -> Operand:
    eps = op.attribute("epsilon", 1e-5)
    constants = _constants(op, 1, 3)
    rank = len(op.shape())
    if constants is None or len(constants) != 2 or not 3 <= rank <= 5:
        raise op.fail("needs constant weights and 1 to 3 spatial dimensions to be imported")
    layer = _INSTANCE_NORMS[rank - 3](op.shape()[1], eps, affine=True)
    return _with_weights(op, layer, constants)


def group_norm(op: Operation) -> Operand:
    eps, groups = op.attribute("epsilon", 1e-5), op.attribute("num_groups")
    op.ignore("stash_type")
    constants = _constants(op, 1, 3)
    channels = op.shape()[1]
    if constants is None or any(len(x.tensor) != channels for x in constants):
        operands = (op.input(0), op.input(1), op.input(2))
        return op.call(functions.normalize_groups, *operands, groups, eps)
    layer = nn.GroupNorm(groups, channels, eps, device="meta")
    return _with_weights(op, layer, constants)


def channel_norm(op: Operation) -> Operand:
    size = op.attribute("size")
    alpha, beta = op.attribute("alpha", 1e-4), op.attribute("beta", 0.75)
    bias = op.attribute("bias", 1.0)
    layer = nn.LocalResponseNorm if size % 2 else ChannelNorm
    return op.module(layer(size, alpha, beta, bias), op.input(0))


def softmax(log: bool) -> Handler:
    """Softmax or its logarithm, over one dimension or (before opset 13) all from one on."""

    def handle(op: Operation) -> Operand:
        old = op.opset < 13
        shape = op.shape()
        axis = op.axis(op.attribute("axis", 1 if old else -1))
        if op.builder.fixed and op.batch_dim() == axis:
            raise op.fail(f"its axis {axis} is the batch, so that it mixes samples")
        flat = old and any(size != 1 for size in shape[axis + 1 :])
        layer: nn.Module
        if flat:
            layer = FlatSoftmax(axis, log)
        else:
            layer = nn.LogSoftmax(axis) if log else nn.Softmax(axis)
        return op.module(layer, op.input(0))

    return handle


def dropout(op: Operation) -> Operand:
    op.ignore("seed", "is_test")
    ratio = op.known(1, "ratio") if op.opset >= 12 else op.attribute("ratio", 0.5)
    return op.module(nn.Dropout(0.5 if ratio is None else ratio), op.input(0))


def _gelu(op: Operation) -> nn.Module:
    return nn.GELU(op.attribute("approximate", "none"))


LAYERS: dict[str, Handler] = {
    "AveragePool": average_pool,
    "BatchNormalization": batch_norm,
    "Celu": activation(lambda op: nn.CELU(op.attribute("alpha", 1.0))),
    "Conv": convolution,
    "ConvTranspose": transposed_convolution,
    "Dropout": dropout,
    "Elu": activation(lambda op: nn.ELU(op.attribute("alpha", 1.0))),
    "Gelu": activation(_gelu),
    "Gemm": gemm,
    "GlobalAveragePool": global_pool(_AVERAGES, False),
    "GlobalMaxPool": global_pool(_MAXIMA, True),
    "GroupNormalization": group_norm,
    "HardSwish": activation(lambda op: nn.Hardswish()),
    "InstanceNormalization": instance_norm,
    "LRN": channel_norm,
    "LayerNormalization": layer_norm,
    "LeakyRelu": activation(lambda op: nn.LeakyReLU(op.attribute("alpha", 0.01))),
    "LogSoftmax": softmax(True),
    "MatMul": matrix_product,
    "MaxPool": max_pool,
    "Mish": activation(lambda op: nn.Mish()),
    "Relu": activation(lambda op: nn.ReLU()),
    "Sigmoid": activation(lambda op: nn.Sigmoid()),
    "Softmax": softmax(False),
    "Softplus": activation(lambda op: nn.Softplus()),
    "Softsign": activation(lambda op: nn.Softsign()),
    "Tanh": activation(lambda op: nn.Tanh()),
}
