"""Which nodes of a placement workload must share a stage: as a layer of ours, and as its own
planner has it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from timeprest.profiles.imported.cost_graph import numbered

if TYPE_CHECKING:
    import networkx as nx

Edges = Sequence[tuple[int, int]]


def group(
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
    import networkx as nx

    unit, count = units_of(classes)
    ahead = {u: k for k, u in enumerate(unit) if forward[k]}
    between = nx.DiGraph()
    between.add_nodes_from(ahead)
    between.add_edges_from((unit[a], unit[b]) for a, b in edges if forward[a] and forward[b])
    layer = _numbered_circles(between, ahead)
    home = [layer.get(u) for u in range(count)]
    adopted = sum(1 for u in unit if home[u] is None)
    owners = _adopt(home, [(unit[a], unit[b]) for a, b in edges])
    return [owners[u] for u in unit], adopted


def units_of(classes: Sequence[Hashable]) -> tuple[list[int], int]:
    """For each node the number of its unit, and how many there are: a class, or a node without."""
    ids: dict[Hashable, int] = {}
    unit = [
        ids.setdefault(("node", k) if c is None else ("class", c), len(ids))
        for k, c in enumerate(classes)
    ]
    return unit, len(ids)


def _adopt(home: Sequence[int | None], edges: Edges) -> list[int]:
    """A layer for the units that have none.

    It is the last layer that gets the unit's results, directly or through other such units:
    the sum of a tensor's gradients goes to the layer that made the tensor, a loss to the layer
    it is the loss of. Units whose results go to no layer take the last layer that they get
    theirs from; units that no layer is in touch with, the last of all.
    """
    import networkx as nx

    found = list(home)
    graph = nx.DiGraph(edges)
    for towards in (graph.reverse(copy=False), graph):
        settled = sorted(((at, u) for u, at in enumerate(found) if at is not None), reverse=True)
        for at, start in settled:
            stack = [start]
            while stack:
                for u in towards.adj.get(stack.pop(), ()):
                    if found[u] is None:
                        found[u] = at
                        stack.append(u)
    last = max(at for at in home if at is not None)
    return [last if at is None else at for at in found]


def _numbered_circles(graph: nx.DiGraph, rank: Mapping[int, int]) -> dict[int, int]:
    """Nodes by their circles' place in topological order, that of the lowest last rank first."""
    import networkx as nx

    circles = nx.condensation(graph)
    last = {c: max(rank[u] for u in inside) for c, inside in circles.nodes(data="members")}
    order = nx.lexicographical_topological_sort(circles, last.__getitem__)
    return {u: place for place, c in enumerate(order) for u in circles.nodes[c]["members"]}


# What goes together in the file's own planner, so that no cut is lost ---------------------------
# That planner (dnn-partitioning's throughput-dp) cuts the forward graph of classes; their backward
# nodes follow. Three rules besides, all kept here:
#
# - A class of backward nodes alone, like a loss, is a node of that graph that costs no forward; an
#   edge between backward nodes one of which is of such a class binds its classes the other way
#   round.
# - Classes that need each other in a circle are one.
# - A class that takes no time and touches just one other goes with it: parting them never helps,
#   and each such class would double the number of cuts.

IDLE_S = 1e-9
"""Their planner takes a thousandth of a microsecond for no time."""


def contract(
    forward: Sequence[bool],
    classes: Sequence[Hashable],
    seconds: Sequence[float],
    edges: Edges,
) -> tuple[list[int], nx.DiGraph]:
    """Which nodes go together, and which of these groups may not stand behind which.

    Args:
        forward: for each node, whether it belongs to the forward.
        classes: for each node, its class, or None.
        seconds: for each node.
        edges: of an acyclic graph, as positions of nodes.

    Returns:
        Each node's group, counted in a topological order; and the graph of the groups.
    """
    import networkx as nx

    unit, count = units_of(classes)
    needs = nx.DiGraph()
    needs.add_nodes_from(range(count))
    needs.add_edges_from(_needs(unit, forward, edges))
    circles = nx.strongly_connected_components(needs)
    circle = {u: min(inside) for inside in circles for u in inside}
    needs = _contracted(needs, circle)
    group = [circle[u] for u in unit]
    touching = nx.Graph(needs)
    touching.add_edges_from((group[a], group[b]) for a, b in edges if group[a] != group[b])
    joined = _join_idle(group, seconds, touching)
    needs = _contracted(needs, joined)
    group = [joined[g] for g in group]
    place = _numbered_circles(needs, {g: k for k, g in enumerate(group)})
    return [place[g] for g in group], numbered(needs, sorted(place, key=place.__getitem__))


def _needs(unit: Sequence[int], forward: Sequence[bool], edges: Edges) -> Iterator[tuple[int, int]]:
    ahead = {u for u, is_forward in zip(unit, forward, strict=True) if is_forward}
    for a, b in edges:
        if forward[a] and forward[b]:
            yield unit[a], unit[b]
        elif not (forward[a] or forward[b]) and not {unit[a], unit[b]} <= ahead:
            yield unit[b], unit[a]


def _contracted(graph: nx.DiGraph, into: Mapping[int, int]) -> nx.DiGraph:
    """The graph of what nodes go into; what goes into one needs nothing of itself."""
    made = graph.__class__()
    made.add_nodes_from(into.values())
    made.add_edges_from((into[a], into[b]) for a, b in graph.edges if into[a] != into[b])
    return made


def _join_idle(
    group: Sequence[int], seconds: Sequence[float], touching: nx.Graph
) -> dict[int, int]:
    """For each group the one it goes with in the end: itself, but for idle ones with one other."""
    total = dict.fromkeys(group, 0.0)
    for g, s in zip(group, seconds, strict=True):
        total[g] += s
    joined = {g: g for g in total}
    todo = sorted(total, reverse=True)
    while todo:
        g = todo.pop()
        if total[g] <= IDLE_S and len(touching[g]) == 1:
            (other,) = touching[g]
            joined[g] = other
            total[other] += total[g]
            touching.remove_edge(g, other)
            todo.append(other)

    def end(g: int) -> int:
        while joined[g] != g:
            g = joined[g]
        return g

    return {g: end(g) for g in joined}
