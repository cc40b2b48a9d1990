"""The file of a Piper workload (NeurIPS'21), as it is written: nodes with `TMPCs`, and edges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import FileError
from .cost_graph import MAX_BYTES, MAX_SECONDS
from .foreign_nodes import edge_positions, node_names, node_positions, topological_order

_Bytes = Annotated[float, Meta(ge=0, le=MAX_BYTES)]


class FileConfiguration(msgspec.Struct, frozen=True, rename="camel"):
    """What a node costs, run in one of its ways."""

    id: str
    time_per_sample: Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
    """Forward and backward of one micro-batch, in s."""
    parameter_size: _Bytes
    memory_usage_a: _Bytes
    """For each micro-batch in flight."""
    memory_usage_b: _Bytes
    """Whatever is in flight."""


class FileNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node of the file."""

    id: int
    configurations: dict[str, list[FileConfiguration]] = msgspec.field(name="TMPCs")
    """By tensor-parallel degree."""
    name: str = ""


class FileEdge(msgspec.Struct, frozen=True, rename="camel"):
    """An edge of the file."""

    source_id: int
    dest_id: int
    communication_cost: _Bytes


class FileWorkload(msgspec.Struct, frozen=True, rename="camel"):
    """The file's top level."""

    nodes: Annotated[list[FileNode], Meta(min_length=1)]
    edges: list[FileEdge]
    max_devices: Annotated[int, Meta(ge=1)] | None = None
    max_memory_per_device: Annotated[float, Meta(gt=0)] | None = None
    bandwidth: Annotated[float, Meta(gt=0)] | None = None
    mbs_in_batch: Annotated[int, Meta(ge=1)] | None = None


@dataclass(frozen=True)
class Piper:
    """A file that was read and found to be in order.

    Attributes:
        found: what it says.
        names: of its nodes, each once.
        edges: as positions of nodes.
        order: positions of the nodes in topological order.
    """

    found: FileWorkload
    names: list[str]
    edges: list[tuple[int, int]]
    order: list[int]


def read_piper(where: str, text: bytes) -> Piper:
    """Read the file's JSON. Raises FileError naming the place that is wrong."""
    try:
        found = msgspec.json.decode(text, type=FileWorkload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{where}: {error}") from None
    position = node_positions(where, [node.id for node in found.nodes])
    edges = edge_positions(where, [(e.source_id, e.dest_id) for e in found.edges], position)
    names = node_names((node.name, node.id) for node in found.nodes)
    order = topological_order(where, names, edges, range(len(names)))
    return Piper(found, names, edges, order)


def plain_of(where: str, k: int, node: FileNode) -> FileConfiguration:
    """The node on one device, nothing computed again. Raises FileError where there is no such."""
    found = [c for c in node.configurations.get("1", ()) if c.id == "vanilla"]
    if len(found) != 1:
        raise FileError(
            f'{where}: $.nodes[{k}].TMPCs["1"]: expected one entry with the id "vanilla", not '
            f"{len(found)}"
        )
    return found[0]
