"""Good cuts to start from, where there are too many downsets to list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import or_

from .dp.lattice import Lattice, joined, lattice_of
from .dp.minimax import minimax_with_bound
from .problem import Cut, Deadline, StageProblem, members


@dataclass(frozen=True)
class Groups:
    """Layers that go together, as nodes of a graph.

    Attributes:
        masks: of layers, in topological order.
        needs, users: per group, positions of groups.
        needed, used: the same as masks of layers.
        ends, counts, results, weights: per tensor, its ends as in `CutTensor`, in how many groups
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
            walk = _GrowingOrder(groups, backward=backward)
            masks = [groups.masks[g] for g in (walk.deepest() if deep else walk.narrowest())]
            yield masks[::-1] if backward else masks


class _GrowingOrder:
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


# Good cuts, first along a few topological orders of the layers ------------------------------------
# The first layers of any topological order are a downset. A few orders, each good for a reason of
# its own, give a lattice of a few thousand; the best cut on it is then made better on lattices of
# what is cheap to cut at, and of what lies around its own downsets, as long as that helps.

NEAR = 3000
"""Downsets to look at, besides those along orders, and each time around a cut's own."""


def good_cut(problem: StageProblem, *, deadline: Deadline = None) -> Cut | None:
    """A cut that is good, if not the best; None where none was found."""
    groups, along = groups_of(problem), prefix_lattice(problem)
    best = minimax_with_bound(problem, along, deadline=deadline).cut
    wider = lattice_of(problem, {*along.masks, *cheapest(groups, NEAR)})
    best = _better(problem, wider, best, deadline) or best
    better = best
    while better is not None:
        best = better
        nearby = lattice_of(problem, around(groups, best, NEAR))
        better = _better(problem, nearby, best, deadline)
    return best


def _better(
    problem: StageProblem, lattice: Lattice, best: Cut | None, deadline: Deadline
) -> Cut | None:
    below = float("inf") if best is None else best.objective_s
    return minimax_with_bound(problem, lattice, below=below, deadline=deadline).cut


def prefix_lattice(problem: StageProblem) -> Lattice:
    """The downsets along good orders."""
    masks: set[int] = set()
    for order in good_orders(problem):
        masks.update(accumulate(order, or_))
    return lattice_of(problem, masks)


# Downsets reached one group of layers at a time: near a cut, or cheap to cut at -----------------


@dataclass(frozen=True)
class Frontier:
    """A downset with the groups that may be added to it or taken from it.

    Attributes:
        mask: of layers.
        cost: of the tensors open at it, less that at the downset the search began from.
        ready, last: positions of groups that may be added, and taken away.
    """

    mask: int
    cost: float
    ready: frozenset[int]
    last: frozenset[int]

    def more(self, groups: Groups) -> Iterator[Frontier]:
        for g in sorted(self.ready):
            mask = self.mask | groups.masks[g]
            fresh = {user for user in groups.users[g] if not groups.needed[user] & ~mask}
            last = self.last - groups.needs[g] | {g}
            yield Frontier(mask, self._cost(groups, g, mask), self.ready - {g} | fresh, last)

    def less(self, groups: Groups) -> Iterator[Frontier]:
        for g in sorted(self.last):
            mask = self.mask & ~groups.masks[g]
            fresh = {need for need in groups.needs[g] if not groups.used[need] & mask}
            ready = self.ready - groups.users[g] | {g}
            yield Frontier(mask, self._cost(groups, g, mask), ready, self.last - {g} | fresh)

    def _cost(self, groups: Groups, moved: int, mask: int) -> float:
        cost = self.cost
        for t in groups.tensors_of[moved]:
            ends = groups.ends[t]
            is_open, was_open = ends & mask not in (0, ends), ends & self.mask not in (0, ends)
            cost += groups.weights[t] * (is_open - was_open)
        return cost


def frontier_of(groups: Groups, mask: int) -> Frontier:
    """A downset, to search from."""
    inside = {g for g, group in enumerate(groups.masks) if group & mask}
    ready = {g for g, needs in enumerate(groups.needs) if g not in inside and needs <= inside}
    last = {g for g in inside if not groups.users[g] & inside}
    return Frontier(mask, 0.0, frozenset(ready), frozenset(last))


def cheapest(groups: Groups, most: int) -> set[int]:
    """The cheapest downsets to cut at of each size, out of those that grow from such.

    Args:
        most: how many, give or take one of each size.
    """
    each = max(most // len(groups.masks), 2)
    found: set[int] = set()
    level = [frontier_of(groups, 0)]
    while level:
        grown = {frontier.mask: frontier for old in level for frontier in old.more(groups)}
        level = sorted(grown.values(), key=lambda frontier: frontier.cost)[:each]
        found |= {frontier.mask for frontier in level}
    return found


def around(groups: Groups, cut: Cut, most: int) -> set[int]:
    """A cut's downsets, and those that few groups more or less lead to.

    Half of them are the nearest, half the cheapest to cut at.

    Args:
        most: how many, give or take a step's.
    """
    found: set[int] = set()
    below = 0
    for stage in cut.stages[:-1]:
        below |= stage.layers
        centre, near = frontier_of(groups, below), most // len(cut.stages)
        ball = _ball(groups, centre, near // 2, by_cost=False)
        found |= ball | _ball(groups, centre, near // 2, by_cost=True)
    return found


def _ball(groups: Groups, centre: Frontier, most: int, *, by_cost: bool) -> set[int]:
    seen, queue = {centre.mask}, [(0.0, 0, centre)]
    while queue and len(seen) < most:
        _, number, frontier = heappop(queue)
        for near in (*frontier.more(groups), *frontier.less(groups)):
            if near.mask not in seen:
                # Of equal ones those met first are looked at first.
                key = near.cost if by_cost else float(number)
                heappush(queue, (key, len(seen), near))
                seen.add(near.mask)
    return seen
