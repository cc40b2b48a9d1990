"""Which slots a unit can be in, if no load is to be above a limit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..problem import StageProblem
from ..stage_load import members
from .units import Units
from .variables import Slots, least_compute


@dataclass(frozen=True)
class Windows:
    """Per unit, and for the model's result as the last of them:

    Attributes:
        low, high: its first and its last slot.
        open: (unit, slot) → the slot's choices that a stage with the unit can be.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    open: dict[tuple[int, int], tuple[int, ...]]

    @property
    def possible(self) -> bool:
        """Whether there is a slot for everything."""
        return all(a <= b for a, b in zip(self.low, self.high, strict=True))


def inseparable(problem: StageProblem, slots: Slots, limit_s: float) -> list[int]:
    """Ends of tensors that cost more than the limit wherever they are parted.

    Where they are, the first stage sends the tensor, and others receive it.
    """
    places = [choice.place for choice in slots.different]
    lower = min(place.lower_scale for place in places)
    upper = min(place.upper_scale for place in places)
    return [
        tensor.ends & problem.full
        for tensor in problem.tensors
        if max(lower * tensor.lower_s, upper * tensor.upper_s) > limit_s
    ]


def find_windows(problem: StageProblem, units: Units, slots: Slots, limit_s: float) -> Windows:
    """Where units can be.

    All that a unit needs takes part of the work that the stages up to its own can do, and all that
    needs it takes part of that of the stages from its own on.
    """
    work = units.sums(least_compute(problem, slots))
    below = [float(np.sum(work[list(members(mask))])) for mask in units.below]
    above = [float(np.sum(work[list(members(mask))])) for mask in units.above]
    open_: dict[tuple[int, int], tuple[int, ...]] = {}
    for s, choices in enumerate(slots.choices):
        until = [(slots.capacity_before[s] + c.capacity) * limit_s for c in choices]
        onward = [(slots.capacity_from[s + c.width] + c.capacity) * limit_s for c in choices]
        every = range(len(choices))
        for u in range(units.count):
            open_[u, s] = tuple(o for o in every if below[u] <= until[o] and above[u] <= onward[o])
        open_[units.count, s] = tuple(every)
    possible = [[s for s in range(slots.count) if open_[u, s]] for u in range(units.count)]
    low = [min(at, default=slots.count) for at in possible]
    high = [max(at, default=-1) for at in possible]
    if slots_are_stages(problem, slots):
        for layer, stage in problem.pins:
            u = units.of[layer]
            low[u], high[u] = max(low[u], stage), min(high[u], stage)
    for u in range(units.count):
        low[u] = max([low[u], *(low[v] for v in units.needs[u])])
    for u in reversed(range(units.count)):
        for v in units.needs[u]:
            high[v] = min(high[v], high[u])
    last = slots.count - 1
    all_used = slots_are_stages(problem, slots) and problem.stages is not None
    return Windows((*low, max([last if all_used else 0, *low])), (*high, last), open_)


def slots_are_stages(problem: StageProblem, slots: Slots) -> bool:
    """Whether the stage in slot s is stage s."""
    return slots.stages or problem.stages == slots.count
