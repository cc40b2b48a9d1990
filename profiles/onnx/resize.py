"""Resize and Upsample: which entries of the input each entry of the result is made of."""

from __future__ import annotations

from math import ceil, floor

import torch
from torch import Tensor, nn

from .modules import Resize
from .operation import Handler, Operation
from .values import Operand, Setting

_COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
_NEAREST = {
    "round_prefer_floor": lambda x: ceil(x - 0.5),
    "round_prefer_ceil": lambda x: floor(x + 0.5),
    "floor": floor,
    "ceil": ceil,
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
        sizes = tuple(floor(n * s) for n, s in zip(shape, scales, strict=True))
    else:
        scales = tuple(m / n for n, m in zip(shape, sizes, strict=True))
    changed = [k for k, scale in enumerate(scales) if scale != 1]
    if op.batch_dim() in changed:
        raise op.fail("resizes the batch dimension, which can't be imported")
    layer = _torch_layer(shape, sizes, scales, mode, coordinates, nearest)
    if layer is None:
        places = {
            k: [_source(i, shape[k], sizes[k], scales[k], coordinates) for i in range(sizes[k])]
            for k in changed
        }
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


def _source(i: int, size: int, result: int, scale: float, coordinates: str) -> float:
    """Where the result's i-th entry lies in the input (ONNX operator Resize)."""
    if coordinates == "asymmetric":
        return i / scale
    if coordinates == "align_corners":
        return i * (size - 1) / (result - 1) if result > 1 else 0.0
    if coordinates == "pytorch_half_pixel" and result == 1:
        return 0.0
    return (i + 0.5) / scale - 0.5


def _neighbours(
    places: list[float], size: int, mode: str, nearest: str
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Lower and upper neighbour of each place, and the upper one's weight."""
    if mode == "nearest":
        low = torch.tensor([_NEAREST[nearest](x) for x in places]).clamp(0, size - 1)
        return low, low, None
    inside = [min(max(x, 0.0), size - 1.0) for x in places]
    low = torch.tensor([floor(x) for x in inside])
    weight = torch.tensor([x - floor(x) for x in inside])
    return low, (low + 1).clamp(max=size - 1), weight


RESIZING: dict[str, Handler] = {"Resize": resize, "Upsample": upsample}
