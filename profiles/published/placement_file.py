"""The file of a placement workload (NeurIPS'20), as it is written: nodes, edges, accelerators."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import FileError
from .cost_graph import MAX_BYTES, MAX_SECONDS
from .foreign_nodes import edge_positions, node_names, node_positions, topological_order

_Bytes = Annotated[float, Meta(ge=0, le=MAX_BYTES)]
_Amount = Annotated[float, Meta(ge=0)]

_THEIR_BYTES_PER_S = 2**31
"""Where an edge's cost is size / 2**31, it is in seconds; in ms it would be 2 TB/s."""


class FileNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node of the file; "FPGA" stands for any accelerator."""

    id: int
    fpga_latency: Annotated[float, Meta(ge=0, le=MAX_SECONDS * 1e3)]
    """In ms, on an accelerator."""
    size: _Bytes = 0.0
    name: str = ""
    supported_on_fpga: bool | int = True
    is_backward_node: bool | int = False
    color_class: int | str | None = None


class FileEdge(msgspec.Struct, frozen=True, rename="camel"):
    """An edge of the file."""

    source_id: int
    dest_id: int
    size: _Bytes
    cost: _Amount = 0.0


class FileWorkload(msgspec.Struct, frozen=True):
    """The file's top level."""

    nodes: Annotated[list[FileNode], Meta(min_length=1)]
    edges: list[FileEdge]
    accelerators: Annotated[int, Meta(ge=0)] | None = msgspec.field(name="maxFPGAs", default=None)
    memory_bytes: _Amount | None = msgspec.field(name="maxSizePerFPGA", default=None)


@dataclass(frozen=True)
class Placement:
    """A file that was read and found to be in order.

    Attributes:
        found: what it says.
        names: of its nodes, each once.
        edges: as positions of nodes; they have no circle.
        forward: for each node, whether it belongs to the forward. Some do.
    """

    found: FileWorkload
    names: list[str]
    edges: list[tuple[int, int]]
    forward: list[bool]

    @property
    def classes(self) -> list[int | str | None]:
        """For each node, its class of nodes that must share a device."""
        return [node.color_class for node in self.found.nodes]

    @property
    def hosts(self) -> int:
        """How many nodes aren't supported on accelerators."""
        return sum(1 for node in self.found.nodes if not node.supported_on_fpga)


def read_placement(where: str, text: bytes) -> Placement:
    """Read the file's JSON. Raises FileError naming the place that is wrong."""
    try:
        found = msgspec.json.decode(text, type=FileWorkload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{where}: {error}") from None
    position = node_positions(where, [node.id for node in found.nodes])
    edges = edge_positions(where, [(e.source_id, e.dest_id) for e in found.edges], position)
    names = node_names((node.name, node.id) for node in found.nodes)
    topological_order(where, names, edges, range(len(names)))
    forward = [not node.is_backward_node for node in found.nodes]
    if not any(forward):
        raise FileError(f"{where}: $.nodes: every node is a backward node; nothing can be planned")
    return Placement(found, names, edges, forward)


def cost_unit_s(edges: Sequence[FileEdge]) -> float:
    """Seconds in a unit of the edges' costs: 1e-3, but 1 where they are size / 2**31.

    The published layer graphs have the latter, beside latencies in ms.
    """
    costs = [e.cost / e.size for e in edges if e.size > 0 and e.cost > 0]
    cost = statistics.median(costs) if costs else 0.0
    return 1.0 if math.isclose(cost * _THEIR_BYTES_PER_S, 1, rel_tol=0.01) else 1e-3


def bandwidth_bytes_per_s(edges: Sequence[FileEdge]) -> float | None:
    """At which most tensors move in the file; None where none costs anything."""
    costs = [e.cost / e.size for e in edges if e.size > 0 and e.cost > 0]
    cost = statistics.median(costs) * cost_unit_s(edges) if costs else 0.0
    return 1 / cost if 0 < cost < math.inf else None
