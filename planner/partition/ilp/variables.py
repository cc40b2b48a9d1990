"""What an integer program decides on: slots for stages, units of layers, and which can be where."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..problem import CutTensor, Place, Shared, StageProblem, Vector, closures, members


@dataclass(frozen=True)
class SlotChoice:
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

    choices: tuple[tuple[SlotChoice, ...], ...]
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
    def different(self) -> set[SlotChoice]:
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

    def choices(k: int) -> tuple[SlotChoice, ...]:
        return tuple(
            SlotChoice(o, op.replicas, op.mode, places[o, k], 1 if by_stage else op.replicas)
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


# Units: layers that must share a stage ------------------------------------------------------------


@dataclass(frozen=True)
class Units:
    """Groups of layers, in topological order; tensors and the like between them.

    Bit masks are of units; bit n, of n units, is the model's result, as in `CutTensor.ends`.

    Attributes:
        layers: per unit, bit mask of its layers.
        of: per layer, its unit.
        needs: per unit, the units it needs directly, less those that others of them need.
        below, above: per unit, bit mask of all it needs and of all that need it; itself in both.
        tensors, shared: between units. Tensors with the same ends are one, those with one end
            are left out.
        makers: per tensor, the unit of its lowest end.
    """

    layers: tuple[int, ...]
    of: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    below: tuple[int, ...]
    above: tuple[int, ...]
    tensors: tuple[CutTensor, ...]
    makers: tuple[int, ...]
    shared: tuple[Shared, ...]

    @property
    def count(self) -> int:
        """n; also the number of the result."""
        return len(self.layers)

    def sums(self, values: Vector | None) -> Vector:
        """Per unit, the sum of a number per layer; zeros for None. [n]"""
        made = np.zeros(self.count)
        if values is not None:
            np.add.at(made, list(self.of), values)
        return made

    def first(self, tensor: CutTensor) -> int | None:
        """The end that all other ends need; None where there is no such end."""
        ends = [u for u in members(tensor.ends) if u < self.count]
        alone = all(self.below[u] >> ends[0] & 1 for u in ends)
        return ends[0] if alone else None

    def whole(self, layers: int) -> int | None:
        """A set of layers as a bit mask of units; None where it splits one."""
        inside = sum(1 << u for u, mask in enumerate(self.layers) if not mask & ~layers)
        taken = sum(self.layers[u] for u in members(inside))
        return inside if taken == layers else None


def make_units(problem: StageProblem, forced: Iterable[int] = ()) -> Units:
    """Units of a problem: its groups, `forced` groups, and what lies on cycles through them.

    Args:
        forced: bit masks of layers that must share a stage, besides the problem's own.
    """
    groups = [*problem.together, *forced]
    heads = mask_of(joined(problem.layers, groups))
    found = closures(problem.needs, groups)
    # A longer closure comes later, in groups as they were given.
    order = sorted(set(found), key=lambda m: ((m & heads).bit_count(), m & -m, m & heads))
    number = {closure: u for u, closure in enumerate(order)}
    unit = [number[closure] for closure in found]
    layers = [0] * len(order)
    for layer, u in enumerate(unit):
        layers[u] |= 1 << layer
    count, of = len(layers), tuple(unit)
    direct = [0] * count
    for layer, mask in enumerate(problem.needs):
        for other in members(mask):
            direct[of[layer]] |= 1 << of[other]
    direct = [mask & ~(1 << u) for u, mask in enumerate(direct)]
    below, needs = closures(direct), []
    for others in map(list, map(members, direct)):
        implied = 0
        for v in others:
            implied |= below[v] & ~(1 << v)
        needs.append(tuple(v for v in others if not implied >> v & 1))
    above = [1 << u for u in range(count)]
    for u in reversed(range(count)):
        for v in needs[u]:
            above[v] |= above[u]
    exchanged = between(problem, of, count)
    return Units(tuple(layers), of, tuple(needs), tuple(below), tuple(above), *exchanged)


def joined(count: int, groups: Iterable[int]) -> list[int]:
    """Per layer, the first layer of the group that it ends up in."""
    import networkx as nx

    graph = nx.Graph()
    graph.add_nodes_from(range(count))
    for group in groups:
        nx.add_path(graph, members(group))
    first = {k: min(inside) for inside in nx.connected_components(graph) for k in inside}
    return [first[k] for k in range(count)]


def between(
    problem: StageProblem, of: tuple[int, ...], count: int
) -> tuple[tuple[CutTensor, ...], tuple[int, ...], tuple[Shared, ...]]:
    """Tensors, their makers and shared memory, with units for ends; see Units.

    Args:
        of: per layer, its unit.
        count: of the units.
    """
    numbers = (*of, count)
    found: dict[tuple[int, int], CutTensor] = {}
    for tensor in problem.tensors:
        layers = list(members(tensor.ends))
        ends = mask_of(numbers[end] for end in layers)
        if ends & (ends - 1):
            key = ends, numbers[layers[0]]
            found[key] = found.get(key, CutTensor(ends)).with_another(tensor)
    shared = [replace(s, ends=mask_of(of[end] for end in members(s.ends))) for s in problem.shared]
    return tuple(found.values()), tuple(maker for _, maker in found), tuple(shared)


def mask_of(numbers: Iterable[int]) -> int:
    """Bit mask of some numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


# Which slots a unit can be in, if no load is to be above a limit --------------------------------


@dataclass(frozen=True)
class SlotWindows:
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


def find_windows(problem: StageProblem, units: Units, slots: Slots, limit_s: float) -> SlotWindows:
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
    return SlotWindows((*low, max([last if all_used else 0, *low])), (*high, last), open_)


def slots_are_stages(problem: StageProblem, slots: Slots) -> bool:
    """Whether the stage in slot s is stage s."""
    return slots.stages or problem.stages == slots.count
