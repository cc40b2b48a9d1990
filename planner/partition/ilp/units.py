"""What an integer program decides on: layers that must share a stage, taken together as units."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Shared, StageProblem, Tensor, Vector
from ..stage_load import members


@dataclass(frozen=True)
class Units:
    """Groups of layers, in topological order; tensors and the like between them.

    Bit masks are of units; bit n, of n units, is the model's result, as in `Tensor.ends`.

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
    tensors: tuple[Tensor, ...]
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

    def first(self, tensor: Tensor) -> int | None:
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
    of = joined(problem.layers, [*problem.together, *forced])
    groups = sorted(set(of))
    needs = dict.fromkeys(groups, 0)
    for layer, mask in enumerate(problem.needs):
        for other in members(mask):
            needs[of[layer]] |= 1 << of[other]
    below = _reach(needs)
    # Groups that need each other have the same closure; a longer closure comes later.
    order = sorted(set(below.values()), key=lambda m: (m.bit_count(), m & -m, m))
    number = {closure: u for u, closure in enumerate(order)}
    unit = [number[below[g]] for g in of]
    layers = [0] * len(order)
    for layer, u in enumerate(unit):
        layers[u] |= 1 << layer
    return _connected(problem, tuple(layers), tuple(unit))


def joined(count: int, groups: Iterable[int]) -> list[int]:
    """Per layer, the first layer of the group that it ends up in."""
    head = list(range(count))
    for group in groups:
        first, *rest = members(group)
        for other in rest:
            old, new = max(head[first], head[other]), min(head[first], head[other])
            if old != new:
                head = [new if h == old else h for h in head]
    return head


def _reach(needs: dict[int, int]) -> dict[int, int]:
    """Closures of `needs`, each with itself, over a graph that may have cycles."""
    below = {g: 1 << g | mask for g, mask in needs.items()}
    changed = True
    while changed:
        changed = False
        for g, mask in needs.items():
            more = below[g]
            for other in members(mask):
                more |= below[other]
            if more != below[g]:
                below[g] = more
                changed = True
    return below


def _connected(problem: StageProblem, layers: tuple[int, ...], of: tuple[int, ...]) -> Units:
    count = len(layers)
    direct = [0] * count
    for layer, mask in enumerate(problem.needs):
        for other in members(mask):
            direct[of[layer]] |= 1 << of[other]
    below, needs = [0] * count, []
    for u in range(count):
        others = list(members(direct[u] & ~(1 << u)))
        implied = 0
        for v in others:
            below[u] |= below[v]
            implied |= below[v] & ~(1 << v)
        below[u] |= 1 << u
        needs.append(tuple(v for v in others if not implied >> v & 1))
    above = [1 << u for u in range(count)]
    for u in reversed(range(count)):
        for v in needs[u]:
            above[v] |= above[u]
    tensors, makers, shared = between(problem, of, count)
    return Units(layers, of, tuple(needs), tuple(below), tuple(above), tensors, makers, shared)


def between(
    problem: StageProblem, of: tuple[int, ...], count: int
) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[Shared, ...]]:
    """Tensors, their makers and shared memory, with units for ends; see Units.

    Args:
        of: per layer, its unit.
        count: of the units.
    """
    numbers = (*of, count)
    found: dict[tuple[int, int], Tensor] = {}
    for tensor in problem.tensors:
        layers = list(members(tensor.ends))
        ends = mask_of(numbers[end] for end in layers)
        if ends & (ends - 1):
            key = ends, numbers[layers[0]]
            old = found.get(key, Tensor(ends))
            found[key] = replace(
                old,
                lower_s=old.lower_s + tensor.lower_s,
                upper_s=old.upper_s + tensor.upper_s,
                lower_bytes=old.lower_bytes + tensor.lower_bytes,
                upper_bytes=old.upper_bytes + tensor.upper_bytes,
                kept_bytes=old.kept_bytes + tensor.kept_bytes,
            )
    shared = [replace(s, ends=mask_of(of[end] for end in members(s.ends))) for s in problem.shared]
    return tuple(found.values()), tuple(maker for _, maker in found), tuple(shared)


def mask_of(numbers: Iterable[int]) -> int:
    """Bit mask of some numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask
