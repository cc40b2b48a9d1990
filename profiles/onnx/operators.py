"""All operators by their ONNX names; here those that resize and the arithmetic ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import TargetError
from . import functions as functions
from .builder import Handler, Operation
from .file import OnnxNode
from .layers import LAYERS
from .modules import Resize
from .recurrent import RECURRENT
from .shaping import SHAPING
from .values import Constant, Dynamic, Operand, Setting

# Resize and Upsample: which entries of the input each entry of the result is made of ------------

_COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
_NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    "round_prefer_floor": lambda x: (x - 0.5).ceil(),
    "round_prefer_ceil": lambda x: (x + 0.5).floor(),
    "floor": torch.floor,
    "ceil": torch.ceil,
}
_TORCH_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def upsample(op: Operation) -> Operand:
    scales = op.attribute("scales") if op.opset < 9 else op.known(1, "scales")
    return _resize(op, tuple(scales), None, "asymmetric", "floor")


def resize(op: Operation) -> Operand:
    op.require("antialias", 0)
    op.require("exclude_outside", 0)
    op.require("keep_aspect_ratio_policy", "stretch")
    op.ignore("cubic_coeff_a", "extrapolation_value")  # of modes that are refused
    if op.opset < 11:
        return _resize(op, op.known(1, "scales"), None, "asymmetric", "floor")
    coordinates = op.attribute("coordinate_transformation_mode", "half_pixel")
    nearest = op.attribute("nearest_mode", "round_prefer_floor")
    scales, sizes = op.known(2, "scales"), op.setting(3)
    if isinstance(sizes, Setting):  # computed from the shape: only the batch may vary
        sizes = sizes.value.probes[0].tolist()
    rank = len(op.shape())
    axes = [op.axis(axis) for axis in op.attribute("axes", range(rank))]
    full_scales, full_sizes = [1.0] * rank, list(op.shape())
    for k, axis in enumerate(axes):
        if scales:
            full_scales[axis] = scales[k]
        elif sizes:
            full_sizes[axis] = sizes[k]
    if not scales and not sizes:
        raise op.fail("has neither scales nor sizes")
    if scales:
        return _resize(op, tuple(full_scales), None, coordinates, nearest)
    return _resize(op, None, tuple(full_sizes), coordinates, nearest)


def _resize(
    op: Operation,
    scales: tuple[float, ...] | None,
    sizes: tuple[int, ...] | None,
    coordinates: str,
    nearest: str,
) -> Operand:
    mode = op.attribute("mode", "nearest")
    if mode not in ("nearest", "linear", "bilinear", "trilinear"):
        raise op.fail(f"its mode is {mode!r}; nearest and linear can be imported")
    if coordinates not in _COORDINATES or nearest not in _NEAREST:
        raise op.fail(f"its coordinates are {coordinates!r} and {nearest!r}, which isn't known")
    shape = op.shape()
    if sizes is None:
        assert scales is not None
        sizes = tuple(int(_single(s) * n) for n, s in zip(shape, scales, strict=True))
    else:
        scales = tuple(m / n for n, m in zip(shape, sizes, strict=True))
    changed = [k for k, scale in enumerate(scales) if scale != 1]
    if op.batch_dim() in changed:
        raise op.fail("resizes the batch dimension, which can't be imported")
    layer = _torch_layer(shape, sizes, scales, mode, coordinates, nearest)
    if layer is None:
        places = {k: _sources(shape[k], sizes[k], _single(scales[k]), coordinates) for k in changed}
        axes = [(k, *_neighbours(x, shape[k], mode, nearest)) for k, x in places.items()]
        layer = Resize(axes)
    return op.module(layer, op.input(0))


def _torch_layer(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    scales: tuple[float, ...],
    mode: str,
    coordinates: str,
    nearest: str,
) -> nn.Module | None:
    """torch's own layer where it does the same."""
    exact = all(n * s == m for n, s, m in zip(shape, scales, sizes, strict=True))
    if not exact or not 3 <= len(shape) <= 5 or shape[:2] != sizes[:2]:
        return None
    if mode == "nearest":
        whole = all(scale == int(scale) for scale in scales)
        if whole and coordinates == "asymmetric" and nearest == "floor":
            return nn.Upsample(sizes[2:], mode="nearest")
        return None
    name = _TORCH_LINEAR[len(shape) - 2]
    if coordinates == "align_corners":
        return nn.Upsample(sizes[2:], mode=name, align_corners=True)
    single = coordinates == "pytorch_half_pixel" and 1 in sizes[2:]
    if coordinates in ("half_pixel", "pytorch_half_pixel") and not single:
        return nn.Upsample(sizes[2:], mode=name, align_corners=False)
    return None


def _single(scale: float) -> Tensor:
    """Single precision, in which runtimes compute: 10 * 0.7 are 7 entries there, else 6."""
    return torch.tensor(scale, dtype=torch.float32)


def _sources(size: int, result: int, scale: Tensor, coordinates: str) -> Tensor:
    """Where the result's entries lie in the input (ONNX operator Resize)."""
    places = torch.arange(result, dtype=torch.float32)
    if coordinates == "asymmetric":
        return places / scale
    if coordinates == "align_corners":
        return places * (size - 1) / max(result - 1, 1)
    if coordinates == "pytorch_half_pixel" and result == 1:
        return places
    return (places + 0.5) / scale - 0.5


def _neighbours(
    places: Tensor, size: int, mode: str, nearest: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lower and upper neighbour of each place, and the upper one's weight."""
    if mode == "nearest":
        low = _NEAREST[nearest](places).long().clamp(0, size - 1)
        return low, low, None
    inside = places.clamp(0, size - 1)
    low = inside.long()
    return low, (low + 1).clamp(max=size - 1), inside - low


RESIZING: dict[str, Handler] = {"Resize": resize, "Upsample": upsample}


# Arithmetic, and the table of all operators -----------------------------------------------------


def elementwise(function: Callable[..., Tensor]) -> Handler:
    """A function of all the inputs."""

    def handle(op: Operation) -> Operand:
        op.require("broadcast", 0, 1)  # before opset 7: as today where 1 and no axis
        return op.call(function, *(op.input(k) for k in range(len(op.inputs))))

    return handle


def arithmetic(function: Callable[..., Tensor]) -> Handler:
    """A function of two tensors, of which a constant second one may be a Python number."""

    def handle(op: Operation) -> Operand:
        op.require("broadcast", 0, 1)
        x, y = op.input(0), op.input(1)
        if isinstance(x, Dynamic) and not x.host and _is_number(y, dims=0):
            return op.call(function, x, op.setting(1))
        return op.call(function, x, y)

    return handle


def _is_number(value: Operand, dims: int) -> bool:
    """Whether it is a constant of one element and at most so many dimensions."""
    if not isinstance(value, Constant):
        return False
    return value.tensor.numel() == 1 and value.tensor.dim() <= dims


def power(op: Operation) -> Operand:
    x, y = op.input(0), op.input(1)
    if isinstance(y, Constant):
        if isinstance(x, Dynamic) and not x.host and _is_number(y, dims=len(op.shape())):
            return op.call(functions.power, x, y.tensor.item())
        # An exponent is a setting: its gradient doesn't exist below zero.
        y = Constant(y.tensor, False, True, y.name)
    return op.call(functions.power, x, y)


def clip(op: Operation) -> Operand:
    if op.opset < 11:
        bounds: list[Any] = [op.attribute("min"), op.attribute("max")]
    else:
        bounds = [op.setting(1), op.setting(2)]
        # Scalars, but some files give them one dimension.
        bounds = [b[0] if isinstance(b, tuple) and len(b) == 1 else b for b in bounds]
    if bounds == [None, None]:
        return op.input(0)
    return op.call(torch.clamp, op.input(0), *bounds)


def modulo(op: Operation) -> Operand:
    function = torch.fmod if op.attribute("fmod", 0) else torch.remainder
    return op.call(function, op.input(0), op.input(1))


def reduction(function: Callable[..., Tensor], axes_input_since: int = 18) -> Handler:
    """Over axes that are an attribute, and since some opset an input."""

    def handle(op: Operation) -> Operand:
        keep = bool(op.attribute("keepdims", 1))
        if op.opset >= axes_input_since:
            axes = op.known(1, "axes")
        else:
            axes = op.attribute("axes")
        nothing = op.attribute("noop_with_empty_axes", 0)
        if not axes and nothing:  # each element for itself, of which the L1 norm is the amount
            alone = op.call(functions.unsqueeze, op.input(0), (-1,))
            return op.call(function, alone, (-1,), False)
        chosen = tuple(op.axis(axis) for axis in axes) if axes else None
        return op.call(function, op.input(0), chosen, keep)

    return handle


def arg_of(function: Callable[..., Tensor]) -> Handler:
    """The place of the largest or smallest entry along an axis."""

    def handle(op: Operation) -> Operand:
        op.require("select_last_index", 0)
        axis = op.axis(op.attribute("axis", 0))
        return op.call(function, op.input(0), axis, bool(op.attribute("keepdims", 1)))

    return handle


def cumulative_sum(op: Operation) -> Operand:
    exclusive, reverse = bool(op.attribute("exclusive", 0)), bool(op.attribute("reverse", 0))
    axis = op.known(1, "axis")
    axis = op.axis(axis[0] if isinstance(axis, tuple) else axis)
    return op.call(functions.cumulative_sum, op.input(0), axis, exclusive, reverse)


def einsum(op: Operation) -> Operand:
    operands = (op.input(k) for k in range(len(op.inputs)))
    return op.call(torch.einsum, op.attribute("equation"), *operands)


def hard_sigmoid(op: Operation) -> Operand:
    settings = (op.attribute("alpha", 0.2), op.attribute("beta", 0.5))
    return op.call(functions.hard_sigmoid, op.input(0), *settings)


def scaled_elu(op: Operation) -> Operand:
    # ONNX's defaults are the float32 values of Klambauer et al. 2017, equation 2.
    alpha = op.attribute("alpha", 1.6732632423543772)
    gamma = op.attribute("gamma", 1.0507009873554805)
    return op.call(functions.scaled_elu, op.input(0), alpha, gamma)


OPERATORS: dict[str, Handler] = {
    **LAYERS,
    **SHAPING,
    **RESIZING,
    **RECURRENT,
    "Abs": elementwise(torch.abs),
    "Add": arithmetic(torch.add),
    "And": elementwise(torch.logical_and),
    "ArgMax": arg_of(torch.argmax),
    "ArgMin": arg_of(torch.argmin),
    "Ceil": elementwise(torch.ceil),
    "Clip": clip,
    "Cos": elementwise(torch.cos),
    "CumSum": cumulative_sum,
    "Div": arithmetic(functions.divide),
    "Einsum": einsum,
    "Equal": arithmetic(torch.eq),
    "Erf": elementwise(torch.erf),
    "Exp": elementwise(torch.exp),
    "Floor": elementwise(torch.floor),
    "Greater": arithmetic(torch.gt),
    "GreaterOrEqual": arithmetic(torch.ge),
    "HardSigmoid": hard_sigmoid,
    "IsInf": elementwise(torch.isinf),
    "IsNaN": elementwise(torch.isnan),
    "Less": arithmetic(torch.lt),
    "LessOrEqual": arithmetic(torch.le),
    "Log": elementwise(torch.log),
    "Max": elementwise(functions.maximum),
    "Mean": elementwise(functions.average),
    "Min": elementwise(functions.minimum),
    "Mod": modulo,
    "Mul": arithmetic(torch.mul),
    "Neg": elementwise(torch.neg),
    "Not": elementwise(torch.logical_not),
    "Or": elementwise(torch.logical_or),
    "PRelu": elementwise(functions.parametric_relu),
    "Pow": power,
    "Range": elementwise(functions.counting),
    "Reciprocal": elementwise(torch.reciprocal),
    "ReduceL1": reduction(functions.reduce_l1),
    "ReduceL2": reduction(functions.reduce_l2),
    "ReduceLogSum": reduction(functions.reduce_log_sum),
    "ReduceLogSumExp": reduction(functions.reduce_log_sum_exp),
    "ReduceMax": reduction(functions.reduce_max),
    "ReduceMean": reduction(functions.reduce_mean),
    "ReduceMin": reduction(functions.reduce_min),
    "ReduceProd": reduction(functions.reduce_prod),
    "ReduceSum": reduction(functions.reduce_sum, axes_input_since=13),
    "ReduceSumSquare": reduction(functions.reduce_sum_square),
    "Round": elementwise(torch.round),
    "Selu": scaled_elu,
    "Sign": elementwise(torch.sign),
    "Sin": elementwise(torch.sin),
    "Sqrt": elementwise(torch.sqrt),
    "Sub": arithmetic(torch.sub),
    "Sum": elementwise(functions.total),
    "Where": elementwise(torch.where),
    "Xor": elementwise(torch.logical_xor),
}
"""Operators of the standard domain that can be imported."""


def handler_of(node: OnnxNode, path: str) -> Handler:
    """What imports a node of the file at this path. Raises TargetError for an unknown operator."""
    handler = OPERATORS.get(node.op_type) if node.domain == "" else None
    if handler is None:
        raise TargetError(
            f"{path}: node {node.name!r} is a {node.op_type!r} (domain "
            f"{node.domain or 'ai.onnx'}): this operator isn't known; the {len(OPERATORS)} known "
            "ones are the keys of timeprest.profiles.onnx.operators.OPERATORS"
        )
    return handler
