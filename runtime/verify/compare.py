"""Comparison of two trainings: where losses, gradients and weights differ most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from ..checkpoint.gradients import gradients_in

TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest difference that passes for rounding, over the largest number of the same tensor."""

FLOOR = 1e-2
"""Of the tolerance: what passes over the largest gradient of any parameter. Some gradients are 0
but for rounding (a bias ahead of a batch norm, the keys' part of an attention's): of them nothing
is left to compare with, and weights that had such aren't compared."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The largest difference of one kind of figure."""

    what: str
    """"loss", "gradient" or "weight"."""
    absolute: float
    relative: float
    """Over the largest finite number of the same tensor (for a loss, over the loss)."""
    allowed: float
    """As absolute, of the same tensor."""
    name: str | None = None
    """Of the parameter or buffer."""
    mini_batch: int | None = None
    """Counted from 0; for a gradient, the last one before the update. None: at the end."""
    missing: tuple[str, ...] = ()
    """Parameters that only one of the two has a gradient for."""
    counts: bool = True
    """For the verdict."""

    @property
    def same(self) -> bool:
        """Whether all differences of this kind pass for rounding."""
        return self.absolute <= self.allowed and not self.missing


@dataclass(frozen=True)
class TrainingResults:
    """The results of a training.

    Attributes:
        losses: of each mini-batch.
        gradients: folders of gradient files.
        state: parameters and buffers.
        updates: the mini-batch before each update.
    """

    losses: Sequence[float]
    gradients: Sequence[Path]
    state: Mapping[str, Tensor]
    updates: Sequence[int]


def compare(
    found: TrainingResults,
    wanted: TrainingResults,
    tolerance: float,
    *,
    drifts: bool = False,
    spread: Mapping[str, float] | None = None,
) -> tuple[Difference, Difference, Difference]:
    """The largest differences of losses, gradients and weights.

    Largest is what is furthest beyond what passes for rounding, or nearest to it.

    Args:
        tolerance: of `TOLERANCES`.
        drifts: the two round otherwise, and updates may make that larger: only the first gradient
            counts, and weights don't.
        spread: by parameter, what else its final weights may differ by.
    """
    state = dict(found.state)
    gradients, rounded = _gradients(found, wanted, tolerance, 1 if drifts else len(wanted.updates))
    for name, alone in rounded.items():
        if name in state and name in wanted.state:
            state[name] = torch.where(alone, wanted.state[name], state[name])
    weights = _weights(state, wanted.state, tolerance, spread or {})
    return (
        _losses(found.losses, wanted.losses, tolerance),
        gradients,
        msgspec.structs.replace(weights, counts=not drifts),
    )


def weight_spread(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, the largest difference of two states; what is counted has no rounding errors."""
    return {
        name: _apart(a[name], b[name])
        for name in a
        if name in b and (a[name].is_floating_point() or a[name].is_complex())
    }


def _losses(found: Sequence[float], wanted: Sequence[float], tolerance: float) -> Difference:
    differences = []
    for b, (f, w) in enumerate(zip(found, wanted, strict=True)):
        scale = abs(w) if math.isfinite(w) else 0.0
        off = 0.0 if f == w else abs(f - w)
        differences.append(_difference("loss", off, scale, tolerance * scale, mini_batch=b))
    return _worst("loss", differences)


def _gradients(
    found: TrainingResults, wanted: TrainingResults, tolerance: float, counted: int
) -> tuple[Difference, dict[str, Tensor]]:
    """The largest difference, over the first `counted` updates; and by parameter, of which numbers
    some gradient was so small that rounding errors changed it: what updates made of it is no more
    than those, however far Adam's go."""
    missing: set[str] = set()
    differences, rounded = [], dict[str, Tensor]()
    for k, b in enumerate(wanted.updates):
        scales = {name: largest(g) for name, g in gradients_in(wanted.gradients, k)}
        floor = FLOOR * tolerance * max(scales.values(), default=0.0)
        mine = dict(gradients_in(found.gradients, k))
        odd = {name for name in mine if name not in scales and mine[name].any()}
        for name, gradient in gradients_in(wanted.gradients, k):
            if name not in mine:
                odd |= {name} if gradient.any() else set()
                continue
            off = (_wide(mine[name]) - _wide(gradient)).abs()
            now = (off > tolerance * _wide(gradient).abs()) & (off <= floor)
            rounded[name] = rounded[name] | now if name in rounded else now
            if k < counted:
                most, allowed = _apart(mine[name], gradient), tolerance * scales[name] + floor
                differences.append(_difference("gradient", most, scales[name], allowed, name, b))
        missing |= odd if k < counted else set()
    result = _worst("gradient", differences)
    return msgspec.structs.replace(result, missing=tuple(sorted(missing))), rounded


def _weights(
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    tolerance: float,
    spread: Mapping[str, float],
) -> Difference:
    differences = []
    for name, tensor in wanted.items():
        if name in found:
            off, scale = _apart(found[name], tensor), largest(tensor)
            allowed = tolerance * scale + spread.get(name, 0.0)
            differences.append(_difference("weight", off, scale, allowed, name))
    return _worst("weight", differences)


def _difference(
    what: str,
    off: float,
    scale: float,
    allowed: float,
    name: str | None = None,
    mini_batch: int | None = None,
) -> Difference:
    # Not a number in one of two is a difference beyond any other.
    off = float("inf") if off != off else off
    relative = off / scale if scale else (0.0 if not off else float("inf"))
    return Difference(
        what=what,
        absolute=off,
        relative=relative,
        allowed=allowed,
        name=name,
        mini_batch=mini_batch,
    )


def _worst(what: str, differences: Iterable[Difference]) -> Difference:
    def beyond(d: Difference) -> tuple[bool, float, float]:
        over = d.absolute / d.allowed if d.allowed else (float("inf") if d.absolute else 0.0)
        return not d.same, over, d.absolute

    none = Difference(what=what, absolute=0.0, relative=0.0, allowed=0.0)
    return max(differences, key=beyond, default=none)


def _apart(found: Tensor, wanted: Tensor) -> float:
    """The largest difference; none where both have the same infinity, NaN where one has NaN."""
    a, b = _wide(found), _wide(wanted)
    off = torch.where(a == b, 0.0, (a - b).abs())
    return float(off.max()) if off.numel() else 0.0


def largest(tensor: Tensor) -> float:
    """Largest finite absolute value: a mask's infinity is no measure of its other numbers. Of
    booleans, 1 or 0."""
    sizes = _wide(tensor).abs()
    return float(sizes.where(sizes.isfinite(), 0.0).max()) if sizes.numel() else 0.0


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
