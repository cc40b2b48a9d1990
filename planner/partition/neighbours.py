"""Downsets reached one group of layers at a time: near a cut, or cheap to cut at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from .problem import Cut
from .warm_start import Groups


@dataclass(frozen=True)
class Edge:
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

    def more(self, groups: Groups) -> Iterator[Edge]:
        """With one group more."""
        for g in sorted(self.ready):
            mask = self.mask | groups.masks[g]
            fresh = {user for user in groups.users[g] if not groups.needed[user] & ~mask}
            last = self.last - groups.needs[g] | {g}
            yield Edge(mask, self._cost(groups, g, mask), self.ready - {g} | fresh, last)

    def less(self, groups: Groups) -> Iterator[Edge]:
        """With one group less."""
        for g in sorted(self.last):
            mask = self.mask & ~groups.masks[g]
            fresh = {need for need in groups.needs[g] if not groups.used[need] & mask}
            ready = self.ready - groups.users[g] | {g}
            yield Edge(mask, self._cost(groups, g, mask), ready, self.last - {g} | fresh)

    def _cost(self, groups: Groups, moved: int, mask: int) -> float:
        cost = self.cost
        for t in groups.tensors_of[moved]:
            ends = groups.ends[t]
            is_open, was_open = ends & mask not in (0, ends), ends & self.mask not in (0, ends)
            cost += groups.weights[t] * (is_open - was_open)
        return cost


def edge_of(groups: Groups, mask: int) -> Edge:
    """A downset, to search from."""
    inside = {g for g, group in enumerate(groups.masks) if group & mask}
    ready = {g for g, needs in enumerate(groups.needs) if g not in inside and needs <= inside}
    last = {g for g in inside if not groups.users[g] & inside}
    return Edge(mask, 0.0, frozenset(ready), frozenset(last))


def cheapest(groups: Groups, most: int) -> set[int]:
    """The cheapest downsets to cut at of each size, out of those that grow from such.

    Args:
        most: how many, give or take one of each size.
    """
    each = max(most // len(groups.masks), 2)
    found: set[int] = set()
    level = [edge_of(groups, 0)]
    while level:
        grown = {edge.mask: edge for old in level for edge in old.more(groups)}
        level = sorted(grown.values(), key=lambda edge: edge.cost)[:each]
        found |= {edge.mask for edge in level}
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
        centre, near = edge_of(groups, below), most // len(cut.stages)
        ball = _ball(groups, centre, near // 2, by_cost=False)
        found |= ball | _ball(groups, centre, near // 2, by_cost=True)
    return found


def _ball(groups: Groups, centre: Edge, most: int, *, by_cost: bool) -> set[int]:
    seen, queue = {centre.mask}, [(0.0, 0, centre)]
    while queue and len(seen) < most:
        _, number, edge = heappop(queue)
        for near in (*edge.more(groups), *edge.less(groups)):
            if near.mask not in seen:
                # Of equal ones those met first are looked at first.
                key = near.cost if by_cost else float(number)
                heappush(queue, (key, len(seen), near))
                seen.add(near.mask)
    return seen
