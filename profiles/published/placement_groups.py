"""Which nodes of a placement workload make one layer: those that must share a stage."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .foreign_nodes import topological_order

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
