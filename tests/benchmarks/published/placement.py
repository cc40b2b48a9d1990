"""Workloads of the NeurIPS'20 placement paper (Tarnawski, Phanishayee, Devanur, Mahajan, Nina
Paravecino: Efficient Algorithms for Device Placement of DNN Graph Operators).

Forward and backward nodes with latencies in ms, `colorClass` (nodes that must share a device) and
`size` (bytes held); "FPGA" stands for any accelerator. A layer of ours is what must share a stage:
the forward nodes of a class, with its backward nodes. Their "mini-batch" is one sample here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta
from timeprest.profiles.errors import FileError
from timeprest.profiles.files import MAX_SECONDS
from timeprest.profiles.imported.cost_graph import (
    MAX_BYTES,
    Cost,
    Tensor,
    choose_sizes,
    costs_of,
    make_profile,
)
from timeprest.profiles.profile import Profile
from timeprest.tests.benchmarks.published.file_graph import FileGraph, tensors_by_size
from timeprest.tests.benchmarks.published.placement_groups import contract, group
from timeprest.tests.benchmarks.published.workload import Node, Workload, WorkloadTensor

# The file as it is written ----------------------------------------------------------------------

_Bytes = Annotated[float, Meta(ge=0, le=MAX_BYTES)]
_Amount = Annotated[float, Meta(ge=0)]

_THEIR_BYTES_PER_S = 2**31
"""Where an edge's cost is size / 2**31, it is in seconds; in ms it would be 2 TB/s."""


class PlacementNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node of the file; "FPGA" stands for any accelerator."""

    id: int
    fpga_latency: Annotated[float, Meta(ge=0, le=MAX_SECONDS * 1e3)]
    """In ms, on an accelerator."""
    size: _Bytes = 0.0
    name: str = ""
    supported_on_fpga: bool | int = True
    is_backward_node: bool | int = False
    color_class: int | str | None = None


class PlacementEdge(msgspec.Struct, frozen=True, rename="camel"):
    """An edge of the file."""

    source_id: int
    dest_id: int
    size: _Bytes
    cost: _Amount = 0.0


class PlacementFile(msgspec.Struct, frozen=True):
    """The file's top level."""

    nodes: Annotated[list[PlacementNode], Meta(min_length=1)]
    edges: list[PlacementEdge]
    accelerators: Annotated[int, Meta(ge=0)] | None = msgspec.field(name="maxFPGAs", default=None)
    memory_bytes: _Amount | None = msgspec.field(name="maxSizePerFPGA", default=None)


class Placement(FileGraph[PlacementFile]):
    """A file that was read and found to be in order; some nodes belong to the forward."""

    @cached_property
    def forward(self) -> list[bool]:
        """For each node, whether it belongs to the forward."""
        return [not node.is_backward_node for node in self.found.nodes]

    @property
    def classes(self) -> list[int | str | None]:
        """For each node, its class of nodes that must share a device."""
        return [node.color_class for node in self.found.nodes]


def read_placement(where: str, text: bytes) -> Placement:
    """Read the file's JSON. Raises FileError naming the place that is wrong."""
    file = Placement.read(where, text, PlacementFile)
    if not any(file.forward):
        raise FileError(f"{where}: $.nodes: every node is a backward node; nothing can be planned")
    return file


def cost_unit_s(edges: Sequence[PlacementEdge]) -> float:
    """Seconds in a unit of the edges' costs: 1e-3, but 1 where they are size / 2**31.

    The published layer graphs have the latter, beside latencies in ms.
    """
    costs = [e.cost / e.size for e in edges if e.size > 0 and e.cost > 0]
    cost = statistics.median(costs) if costs else 0.0
    return 1.0 if math.isclose(cost * _THEIR_BYTES_PER_S, 1, rel_tol=0.01) else 1e-3


def bandwidth_bytes_per_s(edges: Sequence[PlacementEdge]) -> float | None:
    """At which most tensors move in the file; None where none costs anything."""
    costs = [e.cost / e.size for e in edges if e.size > 0 and e.cost > 0]
    cost = statistics.median(costs) * cost_unit_s(edges) if costs else 0.0
    return 1 / cost if 0 < cost < math.inf else None


# As a profile -----------------------------------------------------------------------------------


def import_placement(
    where: str, text: bytes, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    """A profile from the file's JSON; arguments and errors as of `reader.import_profile`."""
    file = read_placement(where, text)
    sizes = choose_sizes(where, 1, batch_size, micro_batch_sizes)
    owner, adopted = group(file.forward, file.classes, file.edges)
    costs = _costs(file, owner)
    uses, back_only = _uses(file, [c.name for c in costs], owner)
    return make_profile(
        where,
        "placement",
        sizes,
        costs,
        uses,
        assumptions=_assumptions(file, adopted, back_only),
    )


def _costs(file: Placement, owner: Sequence[int]) -> list[Cost]:
    found, names = file.found, file.names
    costs = []

    def latency_s(nodes: Sequence[int]) -> float:
        return math.fsum(found.nodes[k].fpga_latency for k in nodes) / 1e3

    for inside in _members(owner):
        ahead = [k for k in inside if not found.nodes[k].is_backward_node]
        behind = [k for k in inside if found.nodes[k].is_backward_node]
        # The node that does the most work says best what the layer is.
        main = max(ahead, key=lambda k: (found.nodes[k].fpga_latency, k))
        costs.append(
            Cost(
                name=names[main],
                kind=f"{len(ahead)} forward + {len(behind)} backward",
                measured=(costs_of(1, latency_s(ahead), latency_s(behind)),),
                # Rounded down, and the limit up: what fits there must fit here.
                buffer_bytes=math.floor(math.fsum(found.nodes[k].size for k in inside)),
            )
        )
    return costs


def _members(owner: Sequence[int]) -> list[list[int]]:
    """Nodes by what they go to."""
    members: list[list[int]] = [[] for _ in range(max(owner) + 1)]
    for k, at in enumerate(owner):
        members[at].append(k)
    return members


def _uses(
    file: Placement, layers: Sequence[str], owner: Sequence[int]
) -> tuple[list[tuple[str, str, Tensor]], int]:
    """(producer, consumer, tensor) between layers; and how many pass in the backward alone.

    What a forward node makes goes on to later layers, also where only their backward uses it.
    An edge from a backward node, in either direction, is the gradient of what its two layers
    exchange; layers that exchange nothing else are given it as a tensor of its own.
    """
    found, edges, forward = file.found, file.edges, file.forward
    tensor_of = tensors_by_size(
        file.names, [(a, e.size) for (a, _), e in zip(edges, found.edges, strict=True)]
    )
    ahead: list[tuple[int, int, tuple[int, float]]] = []
    behind: list[tuple[int, int, tuple[int, float]]] = []
    for (a, b), edge in zip(edges, found.edges, strict=True):
        low, high = sorted((owner[a], owner[b]))
        if low != high:
            goes_on = forward[a] and owner[a] < owner[b]
            (ahead if goes_on else behind).append((low, high, (a, edge.size)))
    linked = {(low, high) for low, high, _ in ahead}
    returns = {(low, high) for low, high, _ in behind}
    alone = [use for use in behind if use[:2] not in linked]
    gradient = {key for low, high, key in (*ahead, *alone) if (low, high) in returns}
    uses = [
        (
            layers[low],
            layers[high],
            Tensor(tensor_of[key], tensor_of[key], key[1], needs_grad=key in gradient),
        )
        for low, high, key in dict.fromkeys((*ahead, *alone))
    ]
    return uses, len(set(alone))


def _assumptions(file: Placement, adopted: int, back_only: int) -> Iterator[str]:
    found = file.found
    yield "A sample is one mini-batch of the file."
    yield (
        "Each node's size is held once, as a buffer, whatever is in flight; nothing else is kept "
        "for the backward."
    )
    if any(node.size % 1 for node in found.nodes):
        yield "Sizes that aren't whole bytes were rounded down, and the file's memory limit up."
    if all(file.forward):
        yield "The file has no backward nodes: backward passes cost nothing, no gradient is sent."
    else:
        yield "Gradients are as large as the tensors they belong to."
    if adopted:
        yield (
            f"{adopted} backward nodes have no forward node in their class: each was given to the "
            "last layer that gets its result, be it through others of them, or that it gets its "
            "own from."
        )
    if back_only:
        yield (
            f"{back_only} tensors pass between layers in the backward alone; they're counted in "
            "the forward too."
        )
    yield from _hosts(file)
    yield from _network(file)
    options = []
    if found.accelerators:
        options.append(f"--devices {found.accelerators}")
    if found.memory_bytes:
        options.append(f"--memory {math.ceil(found.memory_bytes)}")
    if options:
        yield f"The file's own cluster is {' '.join(options)}; CPUs were left out."


def _hosts(file: Placement) -> Iterator[str]:
    hosts = sum(1 for node in file.found.nodes if not node.supported_on_fpga)
    if hosts:
        yield (
            f"{hosts} nodes aren't supported on accelerators; they are planned there all the "
            "same, with fpgaLatency."
        )


def _network(file: Placement) -> Iterator[str]:
    bandwidth = bandwidth_bytes_per_s(file.found.edges)
    if bandwidth is None:
        return
    if cost_unit_s(file.found.edges) == 1.0:
        yield "Edge costs are size / 2^31: they were taken to be seconds, beside latencies in ms."
    yield (
        f"Tensors move at {bandwidth / 1e9:.4g} GB/s in this file: plan with --bandwidth "
        f"{bandwidth / 1e9:.4g}GB/s --latency 0s."
    )


# As its own planner sees it: a node is what must share a device ---------------------------------


def placement_workload(where: str, text: bytes) -> Workload:
    """Read the file's JSON. Raises FileError naming the place that is wrong."""
    file = read_placement(where, text)
    found = file.found
    owner, graph = contract(
        file.forward,
        file.classes,
        [node.fpga_latency / 1e3 for node in found.nodes],
        file.edges,
    )
    return Workload(
        where=where,
        cost_model="placement",
        unit="mini-batch",
        listed=len(found.nodes),
        nodes=tuple(_nodes(file, owner)),
        graph=graph,
        tensors=tuple(_tensors(file, owner)),
        devices=found.accelerators or None,
        memory_bytes=found.memory_bytes or None,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s(found.edges),
        notes=tuple(_notes(file, len(graph))),
    )


def _nodes(file: Placement, owner: Sequence[int]) -> Iterator[Node]:
    for inside in _members(owner):
        nodes = [file.found.nodes[k] for k in inside]
        # The node that does the most work says best what the group is; a forward one, if any.
        main = max(inside, key=lambda k: (file.forward[k], file.found.nodes[k].fpga_latency, k))
        yield Node(
            name=file.names[main],
            compute_s=math.fsum(node.fpga_latency for node in nodes) / 1e3,
            held_bytes=math.fsum(node.size for node in nodes),
        )


def _tensors(file: Placement, owner: Sequence[int]) -> Iterator[WorkloadTensor]:
    """One for each node and cost, with all groups that use it; forward and backward alike."""
    unit_s = cost_unit_s(file.found.edges)
    users: dict[tuple[int, float], set[int]] = {}
    nbytes: dict[tuple[int, float], float] = {}
    for (a, b), edge in zip(file.edges, file.found.edges, strict=True):
        key = (a, edge.cost)
        users.setdefault(key, set()).add(owner[b])
        nbytes[key] = max(nbytes.get(key, 0.0), edge.size)
    for (a, cost), groups in users.items():
        others = groups - {owner[a]}
        if others:
            yield WorkloadTensor(owner[a], tuple(sorted(others)), nbytes[a, cost], cost * unit_s)


def _notes(file: Placement, groups: int) -> Iterator[str]:
    yield (
        f"{len(file.names)} nodes became {groups}: classes, circles of them, and what takes no "
        "time and touches one other alone."
    )
    if cost_unit_s(file.found.edges) == 1.0:
        yield (
            "Edge costs are size / 2^31: they were taken to be seconds, beside latencies in ms. "
            "The published planner takes them for ms, a thousandth."
        )
    yield from _hosts(file)
    yield "CPUs were left out."
