"""PipeDream's graph.txt as its own planner sees it. See `pipedream_text` for the file."""

from __future__ import annotations

from collections.abc import Iterator

from .pipedream_text import Graph, read_graph
from .workload import Node, Sent, Workload


def pipedream_workload(where: str, text: str) -> Workload:
    """Read the file's text. Raises FileError naming the line that is wrong.

    Inputs are left out, with their loading times; so are nodes that take an element of a tuple
    that nobody uses. What a node sends is all that it makes, also where an element is used alone.
    """
    graph = read_graph(where, text)
    kept = [k for k in range(len(graph.nodes)) if k not in graph.inputs]
    place = {k: position for position, k in enumerate(kept)}
    return Workload(
        where=where,
        cost_model="pipedream",
        unit="mini-batch",
        listed=len(graph.nodes) + graph.unwanted,
        nodes=tuple(
            Node(
                name=graph.nodes[k].name,
                compute_s=graph.nodes[k].forward_s + graph.nodes[k].backward_s,
                parameter_bytes=float(graph.nodes[k].parameter_bytes),
                flight_bytes=sum(graph.nodes[k].outputs),
            )
            for k in kept
        ),
        needs=tuple(tuple(place[a] for a in graph.sources[k] if a in place) for k in kept),
        tensors=tuple(_tensors(graph, place)),
        notes=(
            f"Left out: {len(graph.inputs)} inputs, and {graph.unwanted} nodes that take an "
            "element of a tuple that nobody uses.",
        ),
    )


def _tensors(graph: Graph, place: dict[int, int]) -> Iterator[Sent]:
    users: dict[int, list[int]] = {}
    for k, sources in enumerate(graph.sources):
        for a in sources:
            users.setdefault(a, []).append(k)
    for k, position in place.items():
        if k in users:
            consumers = tuple(sorted(place[b] for b in users[k]))
            yield Sent(position, consumers, sum(graph.nodes[k].outputs))
