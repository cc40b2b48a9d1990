"""A stage's load and bytes, straight from the definition: slow, for checks and for answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from .problem import Cut, StageProblem, Tensor, Vector


def members(mask: int) -> Iterator[int]:
    """Positions of the layers in a bit mask, rising."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def is_downset(problem: StageProblem, mask: int) -> bool:
    """Whether a set of layers holds all that its layers need, and no group in part."""
    return all(not problem.needs[k] & ~mask for k in members(mask)) and all(
        mask & group in (0, group) for group in problem.together
    )


def stage_load(problem: StageProblem, below: int, layers: int, option: int, k: int) -> float:
    """Load in s of the stage with these `layers` above the downset `below`."""
    chosen = problem.options[option]
    mode, place = problem.modes[chosen.mode], problem.place(option, k)
    inside = list(members(layers))
    parameters = _total(problem.parameter_bytes, inside)
    busy = _total(mode.compute_s, inside) / chosen.replicas + _total(problem.serial_s, inside)
    busy += problem.serial_fixed_s if parameters else 0.0
    busy = busy / place.speed + (place.sync_s if parameters else 0.0)
    busy += place.sync_s_per_byte * parameters
    lower = upper = 0.0
    for side, tensor in _crossing(problem, below, layers):
        if side == "lower":
            lower += tensor.lower_s
        else:
            upper += tensor.upper_s
    wire = place.lower_scale * lower + place.upper_scale * upper
    load = max(busy, wire) if problem.overlap else busy + wire
    load += _total(problem.before_s, members(below))
    return load + _total(problem.after_s, members(problem.full & ~(below | layers)))


def stage_bytes(problem: StageProblem, below: int, layers: int, option: int, k: int) -> float:
    """Bytes that the stage with these `layers` above the downset `below` holds at its peak."""
    chosen = problem.options[option]
    mode, place = problem.modes[chosen.mode], problem.place(option, k)
    inside = list(members(layers))
    shared = sum(item.nbytes for item in problem.shared if item.ends & layers)
    total = _total(mode.fixed_bytes, inside)
    total += place.copies * _total(problem.parameter_bytes, inside)
    flight = _total(mode.flight_bytes, inside) + mode.shared_in_flight * shared
    for side, tensor in _crossing(problem, below, layers):
        if side == "lower":
            total += tensor.lower_bytes
            flight += mode.inputs_kept * tensor.kept_bytes
        else:
            total += tensor.upper_bytes
    total += place.units * flight + mode.shared_once * shared
    if problem.workspace_bytes is not None:
        total += max(float(problem.workspace_bytes[j]) for j in inside)
    return total


def fits(problem: StageProblem, below: int, layers: int, option: int, k: int) -> bool:
    """Whether the stage is within its devices' memory; rounding is forgiven."""
    limit = problem.place(option, k).memory_bytes
    return stage_bytes(problem, below, layers, option, k) <= limit * (1 + 1e-12)


def cut_load(problem: StageProblem, cut: Cut) -> float:
    """The largest load of an answer's stages; infinite where one doesn't fit its devices."""
    below, worst = 0, 0.0
    for stage in cut.stages:
        if not fits(problem, below, stage.layers, stage.option, stage.k):
            return float("inf")
        load = stage_load(problem, below, stage.layers, stage.option, stage.k)
        worst = max(worst, load)
        below |= stage.layers
    return worst


def _crossing(problem: StageProblem, below: int, layers: int) -> Iterator[tuple[str, Tensor]]:
    beyond = ~(below | layers)
    if below | layers == problem.full:
        beyond = 0
    for tensor in problem.tensors:
        if tensor.ends & layers:
            if tensor.ends & below:
                yield "lower", tensor
            elif tensor.ends & beyond:
                yield "upper", tensor


def _total(values: Vector | None, inside: Iterable[int]) -> float:
    if values is None:
        return 0.0
    return float(np.sum(values[list(inside)]))
