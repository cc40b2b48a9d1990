"""A published workload: a model's costs as another planner's authors list them. Data only.

What such a file says of a model, before anybody's cost model makes loads of it
(`cost_models`). Numbers are for one unit: a mini-batch or micro-batch of the
file's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class RecomputedNode:
    """A node whose activations are computed again in the backward.

    Attributes:
        compute_s: forward, forward again, and backward.
        held_bytes: whatever is in flight.
        flight_bytes: for each unit in flight.
    """

    compute_s: float
    held_bytes: float
    flight_bytes: float


@dataclass(frozen=True)
class Node:
    """What must share a stage: a node of the file, or several that may not be parted.

    Attributes:
        compute_s: forward and backward together.
        parameter_bytes: what replicas exchange gradients of.
        held_bytes: memory it takes, whatever is in flight.
        flight_bytes: memory it takes for each unit in flight.
        recomputed: how it runs when its activations are computed again; None where the file has
            no such way.
    """

    name: str
    compute_s: float
    parameter_bytes: float = 0.0
    held_bytes: float = 0.0
    flight_bytes: float = 0.0
    recomputed: RecomputedNode | None = None


@dataclass(frozen=True)
class WorkloadTensor:
    """A tensor between nodes.

    Attributes:
        producer: position of the node that makes it; in a backward it may come after its users.
        consumers: positions of those that use it.
        nbytes: its size.
        cost_s: what the file says moving it once takes; None where it leaves that to a bandwidth.
    """

    producer: int
    consumers: tuple[int, ...]
    nbytes: float
    cost_s: float | None = None


@dataclass(frozen=True)
class Workload:
    """A file's model, and the machines it names.

    Attributes:
        where: the file.
        cost_model: name of the cost model that its numbers are for.
        unit: what they count: "mini-batch" or "micro-batch".
        listed: how many nodes the file lists.
        nodes: in topological order.
        graph: of the nodes' positions, in that order; an edge leads from a node to one that may
            not be on an earlier stage. Nodes and edges have no attributes.
        tensors: what nodes exchange.
        devices, memory_bytes, bandwidth_bytes_per_s, micro_batches: the file's own machines and
            micro-batches in a mini-batch; None where it doesn't say.
        notes: sentences for people: what was read in which way, and what was left out.
    """

    where: str
    cost_model: str
    unit: str
    listed: int
    nodes: tuple[Node, ...]
    graph: nx.DiGraph
    tensors: tuple[WorkloadTensor, ...]
    devices: int | None = None
    memory_bytes: float | None = None
    bandwidth_bytes_per_s: float | None = None
    micro_batches: int | None = None
    notes: tuple[str, ...] = ()
