"""The lines of PipeDream's graph.txt, read into nodes in topological order."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import FileError
from .cost_graph import MAX_BYTES, MAX_SECONDS
from .foreign_nodes import readable, topological_order, unique

_NODE_LINE = (
    "nodeID -- description -- forward_compute_time=ms, backward_compute_time=ms, "
    "activation_size=bytes, parameter_size=bytes"
)
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_NUMBER = re.compile(r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
_TAKES_ELEMENT = re.compile(r"__getitem__\((-?\d{1,9})\)", re.ASCII)


@dataclass(frozen=True)
class Node:
    """A line of the file.

    Attributes:
        name: the node's id and the first word of its description, for plans to show.
        outputs: bytes of what it makes; several for a tuple.
    """

    name: str
    description: str
    forward_s: float
    backward_s: float
    outputs: tuple[float, ...]
    parameter_bytes: int

    @property
    def is_size(self) -> bool:
        """Makes an integer: it has no gradient, and doesn't grow with the samples."""
        return self.description.startswith("Size(")

    @property
    def element(self) -> int | None:
        """Which element of a tuple it takes out; None where it does something else."""
        match = _TAKES_ELEMENT.fullmatch(self.description)
        return int(match.group(1)) if match else None


@dataclass(frozen=True)
class Graph:
    """A file's graph.

    Attributes:
        nodes: in topological order.
        sources: for each node, the positions of what it uses.
        inputs: positions of nodes that only load data.
        unwanted: how many lines were left out: they take an element that nobody uses.
    """

    nodes: tuple[Node, ...]
    sources: tuple[tuple[int, ...], ...]
    inputs: frozenset[int]
    unwanted: int


def read_graph(where: str, text: str) -> Graph:
    """Read the file's text. Raises FileError naming the line and what is expected there."""
    nodes: list[Node] = []
    position: dict[str, int] = {}
    edge_lines: list[tuple[str, str, str]] = []
    taken: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        at = f"{where}:{number}"
        if not line.strip():
            continue
        if line[0] in "\t ":
            source, separator, target = line.strip().partition(" -- ")
            if not separator or not source.strip() or not target.strip():
                raise FileError(f"{at}: expected an edge, nodeA -- nodeB")
            edge_lines.append((at, source.strip(), target.strip()))
            continue
        name, node = _read_node(at, line.strip(), taken)
        if name in position:
            raise FileError(f"{at}: {readable(name)} has a line already; names must be unique")
        position[name] = len(nodes)
        nodes.append(node)
    if not nodes:
        raise FileError(f"{where}: has no node; expected lines like {_NODE_LINE}")
    edges = []
    for at, source, target in edge_lines:
        for name in (source, target):
            if name not in position:
                raise FileError(f"{at}: no node is named {readable(name)}")
        edges.append((position[source], position[target]))
    return _sorted(where, nodes, list(position), edges)


def _read_node(at: str, line: str, taken: dict[str, int]) -> tuple[str, Node]:
    body, _, costs = line.rpartition(" -- ")
    if costs.startswith("stage_id="):
        # Their optimizer adds its own cut to the file.
        body, _, costs = body.rpartition(" -- ")
    name, separator, description = body.partition(" -- ")
    parts = [part.partition("=") for part in costs.split(", ")]
    if not separator or not name.strip() or tuple(key for key, _, _ in parts) != _FIELDS:
        raise FileError(f"{at}: expected {_NODE_LINE}")
    values = {key: value.strip() for key, _, value in parts}
    times = [
        _number(at, key, values[key], "milliseconds", MAX_SECONDS * 1e3) / 1e3
        for key in _FIELDS[:2]
    ]
    outputs = values["activation_size"]
    is_list = outputs.startswith("[") and outputs.endswith("]")
    sizes = outputs[1:-1].split(";") if is_list else [outputs]
    description = " ".join(description.split())
    shown = re.sub(r"[^\w.]", "", description.partition("(")[0])[:24]
    return name.strip(), Node(
        name=unique(readable(f"{name.strip()}:{shown}" if shown else name.strip()), taken),
        description=description,
        forward_s=times[0],
        backward_s=times[1],
        outputs=tuple(_number(at, "activation_size", size, "bytes", MAX_BYTES) for size in sizes),
        parameter_bytes=round(
            _number(at, "parameter_size", values["parameter_size"], "bytes", MAX_BYTES)
        ),
    )


def _number(at: str, field: str, text: str, unit: str, most: float) -> float:
    text = text.strip()
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not 0 <= value <= most:
        raise FileError(
            f"{at}: {field}={readable(text, 24)}: expected {unit}, a number from 0 to {most:.4g}"
        )
    return value


def _sorted(
    where: str, nodes: Sequence[Node], ids: Sequence[str], edges: Sequence[tuple[int, int]]
) -> Graph:
    def number(k: int) -> tuple[int, int]:
        digits = re.search(r"\d{1,18}$", ids[k], re.ASCII)
        return (int(digits.group()) if digits else 0, k)

    order = topological_order(where, ids, edges, [number(k) for k in range(len(ids))])
    wanted = _wanted(nodes, edges)
    order = [k for k in order if k in wanted]
    place = {k: position for position, k in enumerate(order)}
    sources: list[set[int]] = [set() for _ in order]
    for a, b in edges:
        if b in place:
            sources[place[b]].add(place[a])
    found = tuple(nodes[k] for k in order)
    inputs = frozenset(
        k
        for k, node in enumerate(found)
        if not sources[k] and re.fullmatch(r"Input\d*", node.description, re.ASCII)
    )
    if len(inputs) == len(found):
        raise FileError(f"{where}: has input nodes only; there is no layer to plan")
    return Graph(found, tuple(tuple(sorted(s)) for s in sources), inputs, len(nodes) - len(found))


def _wanted(nodes: Sequence[Node], edges: Sequence[tuple[int, int]]) -> set[int]:
    """All nodes but those that take out an element which nobody uses, at no cost.

    Each of them would double the places to cut. Where the model ends in nothing else, they are
    its result, and stay.
    """
    ends = set(range(len(nodes))) - {a for a, _ in edges}
    fed = {b for _, b in edges}
    idle = {
        k
        for k in ends & fed
        if nodes[k].element is not None
        and not (nodes[k].forward_s or nodes[k].backward_s or nodes[k].parameter_bytes)
    }
    return set(range(len(nodes))) - (idle if idle != ends else set())
