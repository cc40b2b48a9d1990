"""Nodes of a placement workload put together as its own planner does, so that no cut is lost.

That planner (dnn-partitioning's throughput-dp) cuts the forward graph of classes; their backward
nodes follow. Three rules besides, all kept here:

- A class of backward nodes alone, like a loss, is a node of that graph that costs no forward; an
  edge between backward nodes one of which is of such a class binds its classes the other way round.
- Classes that need each other in a circle are one.
- A class that takes no time and touches just one other goes with it: parting them never helps, and
  each such class would double the number of cuts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .foreign_nodes import topological_order
from .placement_groups import Edges, circles_of, units_of

IDLE_S = 1e-9
"""Their planner takes a thousandth of a microsecond for no time."""


def contract(
    where: str,
    names: Sequence[str],
    forward: Sequence[bool],
    classes: Sequence[Hashable],
    seconds: Sequence[float],
    edges: Edges,
) -> tuple[list[int], list[set[int]]]:
    """Which nodes go together, and which of these groups may not stand behind which.

    Args:
        forward: for each node, whether it belongs to the forward.
        classes: for each node, its class, or None.
        seconds: for each node.
        edges: of an acyclic graph, as positions of nodes.

    Returns:
        Each node's group, counted in a topological order; for each group those it needs.
    """
    unit, count = units_of(classes)
    needs = _needs(unit, forward, edges)
    circle = circles_of(count, needs)
    group = [circle[u] for u in unit]
    needs = {(circle[a], circle[b]) for a, b in needs if circle[a] != circle[b]}
    joined = _join_idle(group, seconds, {*needs, *((group[a], group[b]) for a, b in edges)})
    group = [joined[g] for g in group]
    needs = {(joined[a], joined[b]) for a, b in needs if joined[a] != joined[b]}
    return _number(where, names, group, needs)


def _needs(unit: Sequence[int], forward: Sequence[bool], edges: Edges) -> set[tuple[int, int]]:
    ahead = {u for u, is_forward in zip(unit, forward, strict=True) if is_forward}
    needs = {(unit[a], unit[b]) for a, b in edges if forward[a] and forward[b]}
    for a, b in edges:
        if not (forward[a] or forward[b]) and not {unit[a], unit[b]} <= ahead:
            needs.add((unit[b], unit[a]))
    return {(a, b) for a, b in needs if a != b}


def _join_idle(
    group: Sequence[int], seconds: Sequence[float], touching: set[tuple[int, int]]
) -> dict[int, int]:
    """For each group the one it goes with in the end: itself, but for idle ones with one other."""
    neighbours: dict[int, set[int]] = {g: set() for g in group}
    for a, b in touching:
        if a != b:
            neighbours[a].add(b)
            neighbours[b].add(a)
    total = dict.fromkeys(group, 0.0)
    for g, s in zip(group, seconds, strict=True):
        total[g] += s
    joined = {g: g for g in total}
    todo = sorted(total, reverse=True)
    while todo:
        g = todo.pop()
        if total[g] <= IDLE_S and len(neighbours[g]) == 1:
            (other,) = neighbours[g]
            joined[g] = other
            total[other] += total[g]
            neighbours[g].clear()
            neighbours[other].discard(g)
            todo.append(other)

    def end(g: int) -> int:
        while joined[g] != g:
            g = joined[g]
        return g

    return {g: end(g) for g in joined}


def _number(
    where: str, names: Sequence[str], group: Sequence[int], needs: set[tuple[int, int]]
) -> tuple[list[int], list[set[int]]]:
    """Groups by their place in a topological order, the one with the earliest last node first."""
    last = {g: k for k, g in enumerate(group)}
    groups = list(last)
    place = {g: k for k, g in enumerate(groups)}
    order = topological_order(
        where,
        [names[last[g]] for g in groups],
        {(place[a], place[b]) for a, b in needs},
        [last[g] for g in groups],
    )
    number = {groups[k]: position for position, k in enumerate(order)}
    needed: list[set[int]] = [set() for _ in groups]
    for a, b in needs:
        needed[number[b]].add(number[a])
    return [number[g] for g in group], needed
