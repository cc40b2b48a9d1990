"""Which nodes of a placement workload make one layer: those that must share a stage."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .cost_graph import topological_order

Edges = Sequence[tuple[int, int]]


def group(
    where: str,
    names: Sequence[str],
    forward: Sequence[bool],
    classes: Sequence[Hashable],
    edges: Edges,
) -> tuple[list[int], int]:
    """Give every node a layer; layers count from 0 in topological order of the forward.

    Nodes of one class are a unit; a node without class is a unit of its own. Units with forward
    nodes are layers. Where units need each other in a circle, all of them must share a stage, as
    stages follow one another: they are one layer. Units of backward nodes alone, like losses and
    sums of gradients, join a layer (`_adopt`).

    Args:
        forward: for each node, whether it belongs to the forward.
        classes: for each node, its class, or None.
        edges: of an acyclic graph, as positions of nodes.

    Returns:
        Each node's layer, and how many nodes were in units of backward nodes alone.
    """
    unit, count = units_of(classes)
    between = {(unit[a], unit[b]) for a, b in edges if forward[a] and forward[b]}
    circle = circles_of(count, between)
    last: dict[int, int] = {}
    for k, ahead in enumerate(forward):
        if ahead:
            last[circle[unit[k]]] = k
    circles = list(last)
    place = {c: k for k, c in enumerate(circles)}
    order = topological_order(
        where,
        [names[last[c]] for c in circles],
        {(place[circle[a]], place[circle[b]]) for a, b in between if circle[a] != circle[b]},
        [last[c] for c in circles],
    )
    layer = {circles[k]: position for position, k in enumerate(order)}
    home = [layer.get(circle[u]) for u in range(count)]
    adopted = sum(1 for u in unit if home[u] is None)
    owners = _adopt(home, [(unit[a], unit[b]) for a, b in edges], len(order))
    return [owners[u] for u in unit], adopted


def units_of(classes: Sequence[Hashable]) -> tuple[list[int], int]:
    """For each node the number of its unit, and how many there are: a class, or a node without."""
    ids: dict[Hashable, int] = {}
    unit = [
        ids.setdefault(("node", k) if c is None else ("class", c), len(ids))
        for k, c in enumerate(classes)
    ]
    return unit, len(ids)


def _adopt(home: Sequence[int | None], edges: Edges, layers: int) -> list[int]:
    """A layer for the units that have none.

    It is the last layer that gets the unit's results, directly or through other such units:
    the sum of a tensor's gradients goes to the layer that made the tensor, a loss to the layer
    it is the loss of. Units whose results go to no layer take the last layer that they get
    theirs from; units that no layer is in touch with, the last of all.
    """
    found = list(home)
    for towards in ([(b, a) for a, b in edges], edges):
        neighbours: dict[int, list[int]] = {}
        for a, b in towards:
            neighbours.setdefault(a, []).append(b)
        settled = sorted(((at, u) for u, at in enumerate(found) if at is not None), reverse=True)
        for at, start in settled:
            stack = [start]
            while stack:
                for u in neighbours.get(stack.pop(), ()):
                    if found[u] is None:
                        found[u] = at
                        stack.append(u)
    return [layers - 1 if at is None else at for at in found]


def circles_of(count: int, edges: set[tuple[int, int]]) -> list[int]:
    """For each unit the number of its strongly connected component (Kosaraju's algorithm)."""
    after: list[list[int]] = [[] for _ in range(count)]
    before: list[list[int]] = [[] for _ in range(count)]
    for a, b in sorted(edges):
        after[a].append(b)
        before[b].append(a)
    finished: list[int] = []
    seen = [False] * count
    for root in range(count):
        stack = [(root, 0)]
        while stack:
            k, done = stack.pop()
            if not done and seen[k]:
                continue
            seen[k] = True
            if done < len(after[k]):
                stack += [(k, done + 1), (after[k][done], 0)]
            else:
                finished.append(k)
    circle = [-1] * count
    for root in reversed(finished):
        todo = [root]
        while todo:
            k = todo.pop()
            if circle[k] < 0:
                circle[k] = root
                todo += before[k]
    return circle


# Nodes of a placement workload put together as its own planner does, so that no cut is lost -----
# That planner (dnn-partitioning's throughput-dp) cuts the forward graph of classes; their backward
# nodes follow. Three rules besides, all kept here:
#
# - A class of backward nodes alone, like a loss, is a node of that graph that costs no forward;
# an edge between backward nodes one of which is of such a class binds its classes the other way
# round. - Classes that need each other in a circle are one. - A class that takes no time and
# touches just one other goes with it: parting them never helps, and each such class would double
# the number of cuts.

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
