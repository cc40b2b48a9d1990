"""Good topological orders of the layers, for when there are too many downsets to list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .dp.lattice import joined
from .problem import StageProblem
from .stage_load import members


@dataclass(frozen=True)
class Groups:
    """Layers that go together, as nodes of a graph.

    Attributes:
        masks: of layers, in topological order.
        needs, users: per group, positions of groups.
        needed, used: the same as masks of layers.
        ends, counts, results, weights: per tensor, its ends as in `Tensor`, in how many groups
            they are, whether the result is one, and what it costs a cut that it is open at.
        tensors_of: per group, positions of its tensors.
    """

    masks: list[int]
    needs: list[set[int]]
    users: list[set[int]]
    needed: list[int]
    used: list[int]
    ends: list[int]
    counts: list[int]
    results: list[bool]
    weights: list[float]
    tensors_of: list[list[int]]


def groups_of(problem: StageProblem) -> Groups:
    """The groups of a problem's layers."""
    masks = joined(problem)
    of = {layer: g for g, mask in enumerate(masks) for layer in members(mask)}
    needs: list[set[int]] = [set() for _ in masks]
    users: list[set[int]] = [set() for _ in masks]
    for layer, mask in enumerate(problem.needs):
        for other in members(mask):
            if of[other] != of[layer]:
                needs[of[layer]].add(of[other])
                users[of[other]].add(of[layer])
    of_ends = [{of[layer] for layer in members(t.ends & problem.full)} for t in problem.tensors]
    tensors_of: list[list[int]] = [[] for _ in masks]
    for t, inside in enumerate(of_ends):
        for g in inside:
            tensors_of[g].append(t)
    return Groups(
        masks,
        needs,
        users,
        needed=[sum(masks[other] for other in others) for others in needs],
        used=[sum(masks[other] for other in others) for others in users],
        ends=[tensor.ends for tensor in problem.tensors],
        counts=[len(inside) for inside in of_ends],
        results=[bool(tensor.ends & ~problem.full) for tensor in problem.tensors],
        weights=_weights(problem),
        tensors_of=tensors_of,
    )


def _weights(problem: StageProblem) -> list[float]:
    """What each tensor costs a cut that it is open at: time, or else bytes, or else 1."""
    wires = [tensor.lower_s + tensor.upper_s for tensor in problem.tensors]
    held = [t.lower_bytes + t.upper_bytes + t.kept_bytes for t in problem.tensors]
    return wires if any(wires) else held if any(held) else [1.0] * len(held)


def good_orders(problem: StageProblem) -> Iterator[list[int]]:
    """Topological orders of the groups of layers that go together, as bit masks.

    The profile's own; those that finish a branch before the next; and those that keep what is
    open at each cut cheap. The latter two from both ends.
    """
    groups = groups_of(problem)
    yield groups.masks
    for deep in (True, False):
        for backward in (False, True):
            walk = _Walk(groups, backward=backward)
            masks = [groups.masks[g] for g in (walk.deepest() if deep else walk.narrowest())]
            yield masks[::-1] if backward else masks


class _Walk:
    """An order as it grows, from the inputs on or from the results back."""

    def __init__(self, groups: Groups, *, backward: bool) -> None:
        self._groups = groups
        before, self._after = groups.needs, groups.users
        if backward:
            before, self._after = self._after, before
        self._waits = [len(others) for others in before]
        self._ready = [g for g, count in enumerate(self._waits) if not count]
        # Starting points are taken in the profile's order, from whichever end.
        self._ready.sort(reverse=not backward)
        pairs = zip(groups.counts, groups.results, strict=True)
        self._ends = [count + result for count, result in pairs]
        self._inside = [int(result and backward) for result in groups.results]

    def deepest(self) -> Iterator[int]:
        """Always what got ready last."""
        while self._ready:
            yield self._take(len(self._ready) - 1)

    def narrowest(self) -> Iterator[int]:
        """Always what leaves the least open; of such what got ready last."""
        while self._ready:
            rises = [self._rise(g) for g in self._ready]
            least = min(rises)
            yield self._take(max(at for at, rise in enumerate(rises) if rise == least))

    def _rise(self, group: int) -> float:
        """By how much a group raises the cost of what is open."""
        rise = 0.0
        for t in self._groups.tensors_of[group]:
            inside, ends, weight = self._inside[t], self._ends[t], self._groups.weights[t]
            rise += weight * ((inside + 1 < ends) - (0 < inside < ends))
        return rise

    def _take(self, at: int) -> int:
        group = self._ready.pop(at)
        for t in self._groups.tensors_of[group]:
            self._inside[t] += 1
        for other in sorted(self._after[group]):
            self._waits[other] -= 1
            if not self._waits[other]:
                self._ready.append(other)
        return group
