"""What a device's load is where its layers need not be contiguous, straight from the definition.

It is that of `problem`, with sets of layers for stages and these differences:

- A tensor's maker is the layer among its ends that all others of them need. The device with the
  maker counts the tensor as its upper cut's, unless it has all ends; others that have an end count
  it as their lower cut's. For the stages of a cut that is the same. A tensor without a maker
  counts as the smaller of its sides, at the smaller of wires' scales: no more than for a cut.
- The model's result is on whichever device suits best.
- There is no before and after. Stage counts and pins aren't kept, but devices that are all alike
  are no more than the stages asked for.
- Only options with one replica count; each device takes the one that suits it best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import StageProblem, Tensor
from ..stage_load import members
from .loads import Linear, busy_of, bytes_of, wire_of
from .variables import Choice, Slots


@dataclass(frozen=True)
class Assignment:
    """Bit masks of layers per device, and their largest load in s."""

    devices: tuple[int, ...]
    objective_s: float


def device_slots(problem: StageProblem) -> Slots:
    """Devices as slots, with the options of one replica as choices; none without such options."""
    options = [(o, op.mode) for o, op in enumerate(problem.options) if op.replicas == 1]
    each = tuple(
        tuple(Choice(o, 1, mode, problem.place(o, k), 1) for o, mode in options)
        for k in range(problem.devices, 0, -1)
    )
    alike = len(set(each)) == 1
    if alike:
        each = each[: min(problem.layers, problem.stages or problem.devices)]
    return Slots(each if options else (), True, alike, problem.devices)


def parted(problem: StageProblem) -> StageProblem:
    """The problem with tensors that count as they do here: the lowest end is the maker."""
    places = [choice.place for choice in device_slots(problem).different]
    scales = [(place.lower_scale, place.upper_scale) for place in places]
    ratio = min((min(pair) / max(pair) for pair in scales if max(pair)), default=1.0)
    below: list[int] = []
    for j, mask in enumerate(problem.needs):
        below.append(1 << j)
        for other in members(mask):
            below[j] |= below[other]
    tensors = []
    for tensor in problem.tensors:
        ends = list(members(tensor.ends & problem.full))
        if any(not below[j] >> ends[0] & 1 for j in ends):
            even_s = min(tensor.lower_s, tensor.upper_s) * ratio
            even_bytes = min(tensor.lower_bytes, tensor.upper_bytes)
            tensors.append(Tensor(tensor.ends, even_s, even_s, even_bytes, even_bytes))
        elif ends:
            tensors.append(tensor)
    return replace(problem, tensors=tuple(tensors), before_s=None, after_s=None, pins=())


def assignment_load(problem: StageProblem, slots: Slots, devices: Sequence[int]) -> float:
    """Largest load in s of layers on devices; infinite where one doesn't fit.

    Args:
        problem: as `parted` makes it.
        slots: as `device_slots` makes them; one for each of `devices`.
    """
    best = math.inf
    for result in range(slots.count):
        loads = [
            _device_load(problem, choices, layers, d == result)
            for d, (layers, choices) in enumerate(zip(devices, slots.choices, strict=True))
            if layers
        ]
        best = min(best, max(loads, default=math.inf))
    return best


def _device_load(
    problem: StageProblem, choices: Sequence[Choice], layers: int, result: bool
) -> float:
    sums = _sums(problem, layers, layers | result << problem.layers)

    def value(linear: Linear) -> float:
        return sum(c * sums.get(name, 0.0) for name, c in linear.of)

    best = math.inf
    for choice in choices:
        if value(bytes_of(problem, choice)) <= choice.place.memory_bytes * (1 + 1e-12):
            busy, wire = value(busy_of(problem, choice)), value(wire_of(choice))
            best = min(best, max(busy, wire) if problem.overlap else busy + wire)
    return best


def _sums(problem: StageProblem, layers: int, held: int) -> dict[str, float]:
    """The sums of `loads` over a set of layers; `held` has the result besides, if it does."""
    inside = list(members(layers))
    parameters = float(np.sum(problem.parameter_bytes[inside]))
    sums = {
        "parameters": parameters,
        "has parameters": float(parameters > 0),
        "shared": sum(item.nbytes for item in problem.shared if item.ends & layers),
    }
    if problem.serial_s is not None:
        sums["serial"] = float(np.sum(problem.serial_s[inside]))
    if problem.workspace_bytes is not None:
        sums["workspace"] = float(np.max(problem.workspace_bytes[inside]))
    for number, mode in enumerate(problem.modes):
        sums[f"compute {number}"] = float(np.sum(mode.compute_s[inside]))
        sums[f"fixed {number}"] = float(np.sum(mode.fixed_bytes[inside]))
        sums[f"flight {number}"] = float(np.sum(mode.flight_bytes[inside]))
    crossing = [t for t in problem.tensors if t.ends & layers and t.ends & ~held]
    lower = [t for t in crossing if not t.ends & -t.ends & layers]
    upper = [t for t in crossing if t.ends & -t.ends & layers]
    sums["lower wire"] = sum(t.lower_s for t in lower)
    sums["upper wire"] = sum(t.upper_s for t in upper)
    sums["lower bytes"] = sum(t.lower_bytes for t in lower)
    sums["upper bytes"] = sum(t.upper_bytes for t in upper)
    sums["kept"] = sum(t.kept_bytes for t in lower)
    return sums
