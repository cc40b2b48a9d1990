"""Where stages may stand and what they may be there: the slots of an integer program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..problem import Place, StageProblem, Vector


@dataclass(frozen=True)
class Choice:
    """What a stage in a slot may be: an option of the problem, and what it means there.

    Attributes:
        width: slots that it takes, from its own on.
    """

    option: int
    replicas: int
    mode: int
    place: Place
    width: int

    @property
    def capacity(self) -> float:
        """`Mode.compute_s` that it gets through in a second."""
        return self.replicas * self.place.speed


@dataclass(frozen=True)
class Slots:
    """Slots in the order of the stages.

    Attributes:
        choices: per slot.
        stages: slot s is stage s. Otherwise slot s is the s-th device, and a stage stands in the
            slot of its first one.
        alike: places don't depend on k.
        devices: K.
    """

    choices: tuple[tuple[Choice, ...], ...]
    stages: bool
    alike: bool
    devices: int

    @property
    def count(self) -> int:
        """S."""
        return len(self.choices)

    @cached_property
    def capacity_before(self) -> tuple[float, ...]:
        """Per slot, and for the end: the most that stages in the slots before it can compute."""
        most = [0.0] * (self.count + 1)
        for s, choices in enumerate(self.choices):
            most[s + 1] = max(most[s + 1], most[s])
            for choice in choices:
                end = s + choice.width
                most[end] = max(most[end], most[s] + choice.capacity)
        return tuple(most)

    @cached_property
    def capacity_from(self) -> tuple[float, ...]:
        """Per slot, and for the end: the most that stages from it on can compute."""
        most = [0.0] * (self.count + 1)
        for s in reversed(range(self.count)):
            ends = (choice.capacity + most[s + choice.width] for choice in self.choices[s])
            most[s] = max(most[s + 1], max(ends, default=0.0))
        return tuple(most)

    @property
    def different(self) -> set[Choice]:
        """All choices that there are."""
        return {choice for choices in self.choices for choice in choices}


def make_slots(problem: StageProblem) -> Slots:
    """Slots of a problem: stages where all options take equally many devices, and all places are
    alike; else devices."""
    devices = problem.devices
    options = [(o, op) for o, op in enumerate(problem.options) if op.replicas <= devices]
    places = {
        (o, k): problem.place(o, k)
        for o, option in options
        for k in range(option.replicas, devices + 1)
    }
    alike = all(place == places[o, devices] for (o, _), place in places.items())
    sizes = {option.replicas for _, option in options}
    by_stage = alike and len(sizes) == 1

    def choices(k: int) -> tuple[Choice, ...]:
        return tuple(
            Choice(o, op.replicas, op.mode, places[o, k], 1 if by_stage else op.replicas)
            for o, op in options
            if op.replicas <= k
        )

    if by_stage:
        most = min(problem.layers, devices // sizes.pop())
        wanted = most if problem.stages is None else problem.stages
        return Slots((choices(devices),) * min(wanted, most), True, True, devices)
    each = tuple(choices(devices - s) for s in range(devices if options else 0))
    return Slots(each, False, alike, devices)


def least_load(problem: StageProblem, slots: Slots) -> float:
    """No cut has a smaller load, in s: the work over all devices, and each layer by itself."""
    if not slots.count:
        return float("inf")
    serial = np.zeros(problem.layers) if problem.serial_s is None else problem.serial_s
    alone = np.full(problem.layers, np.inf)
    for choice in slots.different:
        place = choice.place
        busy = problem.modes[choice.mode].compute_s / choice.replicas + serial
        held = problem.parameter_bytes
        busy = busy / place.speed + place.sync_s * (held > 0) + place.sync_s_per_byte * held
        alone = np.minimum(alone, busy)
    work = float(np.sum(least_compute(problem, slots)))
    return max(work / slots.capacity_from[0], float(np.max(alone)))


def least_compute(problem: StageProblem, slots: Slots) -> Vector:
    """Per layer, what it takes at least of a device of speed 1, in s: whatever is chosen."""
    compute = np.min([problem.modes[c.mode].compute_s for c in slots.different], axis=0)
    if problem.serial_s is not None:
        compute = compute + min(c.replicas for c in slots.different) * problem.serial_s
    return np.asarray(compute, dtype=np.float64)
