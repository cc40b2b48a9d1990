"""Nodes and edges as the files of published planners list them: ids, names, and an order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from timeprest.profiles.errors import FileError
from timeprest.profiles.imported.cost_graph import readable, topological_order

if TYPE_CHECKING:
    import networkx as nx
    from typing_extensions import Self

File = TypeVar("File", bound=msgspec.Struct)


@dataclass(frozen=True)
class FileGraph(Generic[File]):
    """A JSON file with nodes and edges that was read and found to be in order.

    Attributes:
        found: what it says.
        edges: as positions of nodes, in the file's sequence; several may have the same ends.
        graph: the same; names of nodes are unique.
        order: positions of the nodes in topological order.
    """

    found: File
    edges: list[tuple[int, int]]
    graph: nx.DiGraph
    order: list[int]

    @classmethod
    def read(cls, where: str, text: bytes, kind: type[File]) -> Self:
        """Read the file.

        Args:
            kind: its struct, with `nodes` that have an `id` and a `name`, and `edges` that have a
                `source_id` and a `dest_id`.

        Raises FileError naming the place that is wrong.
        """
        import networkx as nx

        try:
            found: Any = msgspec.json.decode(text, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise FileError(f"{where}: {error}") from None
        position = _positions(where, [node.id for node in found.nodes])
        edges = []
        for k, edge in enumerate(found.edges):
            for field, node_id in (("sourceId", edge.source_id), ("destId", edge.dest_id)):
                if node_id not in position:
                    raise FileError(f"{where}: $.edges[{k}].{field}: no node has the id {node_id}")
            edges.append((position[edge.source_id], position[edge.dest_id]))
        graph = nx.DiGraph()
        for k, name in enumerate(_names((node.name, node.id) for node in found.nodes)):
            graph.add_node(k, name=name)
        graph.add_edges_from(edges)
        return cls(found, edges, graph, topological_order(where, graph))

    @cached_property
    def names(self) -> list[str]:
        """Of the nodes."""
        return [name for _, name in self.graph.nodes(data="name")]


def _positions(where: str, ids: Sequence[int]) -> dict[int, int]:
    """Where each node of a JSON file stands. Raises FileError for an id that is there twice."""
    position: dict[int, int] = {}
    for k, node_id in enumerate(ids):
        if position.setdefault(node_id, k) != k:
            raise FileError(
                f"{where}: $.nodes[{k}].id: {node_id} is the id of $.nodes[{position[node_id]}] "
                "already; ids must be unique"
            )
    return position


def _names(found: Iterable[tuple[str, int]]) -> list[str]:
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
