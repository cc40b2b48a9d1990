"""Nodes and edges as the files of published planners list them: ids, names, and an order."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import FileError


def topological_order(
    where: str, names: Sequence[str], edges: Iterable[tuple[int, int]], rank: Sequence[Any]
) -> list[int]:
    """Positions of the nodes in an order that the edges allow, the lowest rank first.

    Args:
        names: of the nodes, for the message.
        edges: (from, to), as positions.
        rank: what decides among nodes that could come next; all different.

    Raises FileError naming the nodes of a cycle.
    """
    after: list[set[int]] = [set() for _ in names]
    before: list[set[int]] = [set() for _ in names]
    for a, b in edges:
        after[a].add(b)
        before[b].add(a)
    missing = [len(nodes) for nodes in before]
    ready = [(rank[k], k) for k, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, k = heapq.heappop(ready)
        order.append(k)
        for b in after[k]:
            missing[b] -= 1
            if not missing[b]:
                heapq.heappush(ready, (rank[b], b))
    if len(order) < len(names):
        cycle = _some_cycle(before, missing)
        shown = [names[k] for k in (cycle if len(cycle) <= 8 else [*cycle[:7], cycle[-1]])]
        raise FileError(
            f"{where}: edges: {' → '.join(shown)} is a cycle; a model's graph must have none"
        )
    return order


def _some_cycle(before: Sequence[set[int]], missing: Sequence[int]) -> list[int]:
    """Nodes of a cycle in the edges' direction, the first again at the end."""
    # What was never ready waits for something that was never ready either: go up till it repeats.
    k = next(k for k, count in enumerate(missing) if count)
    path: dict[int, None] = {}
    while k not in path:
        path[k] = None
        k = min(p for p in before[k] if missing[p])
    nodes = list(path)
    cycle = nodes[nodes.index(k) :]
    return [k, *reversed(cycle[1:]), k]


def readable(text: str, most: int = 48) -> str:
    """Text from a file for people: on one line, not long, and nothing that a table would act on."""
    clean = "".join(c if c.isprintable() else " " for c in text)
    clean = " ".join(clean.replace("[", "(").replace("]", ")").split())
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def unique(name: str, taken: dict[str, int]) -> str:
    """The name, or the name with a number where it is taken already.

    Args:
        taken: names given so far, each with the last number tried behind it; kept up here.
    """
    candidate, k = name, taken.get(name, 1)
    while candidate in taken or candidate in ("", "output"):
        k += 1
        candidate = f"{name}@{k}"
    taken[name] = k
    taken[candidate] = taken.get(candidate, 1)
    return candidate


def node_positions(where: str, ids: Sequence[int]) -> dict[int, int]:
    """Where each node of a JSON file stands. Raises FileError for an id that is there twice."""
    position: dict[int, int] = {}
    for k, node_id in enumerate(ids):
        if position.setdefault(node_id, k) != k:
            raise FileError(
                f"{where}: $.nodes[{k}].id: {node_id} is the id of $.nodes[{position[node_id]}] "
                "already; ids must be unique"
            )
    return position


def edge_positions(
    where: str, ends: Iterable[tuple[int, int]], position: dict[int, int]
) -> list[tuple[int, int]]:
    """Edges as positions of nodes. Raises FileError for an id that no node has."""
    found = []
    for k, (source, target) in enumerate(ends):
        for field, node_id in (("sourceId", source), ("destId", target)):
            if node_id not in position:
                raise FileError(f"{where}: $.edges[{k}].{field}: no node has the id {node_id}")
        found.append((position[source], position[target]))
    return found


def node_names(found: Iterable[tuple[str, int]]) -> list[str]:
    """Unique names for nodes: their own, with the id behind it where several have the same.

    Args:
        found: (name, id) of each node.
    """
    pairs = [(readable(name), node_id) for name, node_id in found]
    often = Counter(name for name, _ in pairs)
    taken: dict[str, int] = {}
    return [
        unique(name if name and often[name] == 1 else f"{name or 'node'}.{node_id}", taken)
        for name, node_id in pairs
    ]


def tensors_by_size(
    names: Sequence[str], sent: Iterable[tuple[int, float]]
) -> dict[tuple[int, float], str]:
    """Names of tensors, where a file gives bytes with each edge: one for each node and size.

    No node's name has a bracket (`readable`), so that no two tensors get the same name.

    Args:
        sent: (node, bytes) of each edge.
    """
    sizes: dict[int, list[float]] = {}
    for pair in dict.fromkeys(sent):
        sizes.setdefault(pair[0], []).append(pair[1])
    return {
        (node, nbytes): names[node] if len(several) == 1 else f"{names[node]}[{k}]"
        for node, several in sizes.items()
        for k, nbytes in enumerate(several)
    }
