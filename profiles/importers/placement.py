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
from typing import Annotated

import msgspec
from msgspec import Meta

from ..errors import FileError
from ..profile import Profile
from .foreign_graph import MAX_BYTES, MAX_SECONDS, Cost, Tensor, choose_sizes, make_profile
from .foreign_nodes import (
    edge_positions,
    node_names,
    node_positions,
    tensors_by_size,
    topological_order,
)
from .placement_groups import Edges, group

_Bytes = Annotated[float, Meta(ge=0, le=MAX_BYTES)]
_Amount = Annotated[float, Meta(ge=0)]

_THEIR_BYTES_PER_S = 2**31
"""Where an edge's cost is size / 2**31, it is in seconds; in ms it would be 2 TB/s."""


class _Node(msgspec.Struct, frozen=True, rename="camel"):
    id: int
    fpga_latency: Annotated[float, Meta(ge=0, le=MAX_SECONDS * 1e3)]
    """In ms, on an accelerator."""
    size: _Bytes = 0.0
    name: str = ""
    supported_on_fpga: bool | int = True
    is_backward_node: bool | int = False
    color_class: int | str | None = None


class _Edge(msgspec.Struct, frozen=True, rename="camel"):
    source_id: int
    dest_id: int
    size: _Bytes
    cost: _Amount = 0.0


class _Workload(msgspec.Struct, frozen=True):
    nodes: Annotated[list[_Node], Meta(min_length=1)]
    edges: list[_Edge]
    accelerators: Annotated[int, Meta(ge=0)] | None = msgspec.field(name="maxFPGAs", default=None)
    memory_bytes: _Amount | None = msgspec.field(name="maxSizePerFPGA", default=None)


def import_placement(
    where: str, text: bytes, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    """A profile from the file's JSON.

    Args:
        where: the file's path.
        batch_size: mini-batches of the file in one of the profile's; 1 by default.
        micro_batch_sizes: other sizes to list, in mini-batches of the file.

    Raises:
        FileError: the file is malformed; names the place.
        TargetError: sizes that contradict each other.
    """
    try:
        found = msgspec.json.decode(text, type=_Workload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{where}: {error}") from None
    sizes = choose_sizes(where, 1, batch_size, micro_batch_sizes)
    position = node_positions(where, [node.id for node in found.nodes])
    edges = edge_positions(where, [(e.source_id, e.dest_id) for e in found.edges], position)
    names = node_names((node.name, node.id) for node in found.nodes)
    topological_order(where, names, edges, range(len(names)))
    forward = [not node.is_backward_node for node in found.nodes]
    if not any(forward):
        raise FileError(f"{where}: $.nodes: every node is a backward node; nothing can be planned")
    owner, adopted = group(where, names, forward, [n.color_class for n in found.nodes], edges)
    costs = _costs(found, names, owner)
    uses, back_only = _uses(found, names, [c.name for c in costs], forward, owner, edges)
    return make_profile(
        where,
        "placement",
        sizes,
        costs,
        uses,
        assumptions=_assumptions(found, forward, adopted, back_only),
    )


def _costs(found: _Workload, names: Sequence[str], owner: Sequence[int]) -> list[Cost]:
    members: list[list[int]] = [[] for _ in range(max(owner) + 1)]
    for k, layer in enumerate(owner):
        members[layer].append(k)
    costs = []
    for inside in members:
        ahead = [k for k in inside if not found.nodes[k].is_backward_node]
        behind = [k for k in inside if found.nodes[k].is_backward_node]
        # The node that does the most work says best what the layer is.
        main = max(ahead, key=lambda k: (found.nodes[k].fpga_latency, k))
        costs.append(
            Cost(
                name=names[main],
                kind=f"{len(ahead)} forward + {len(behind)} backward",
                forward_s=math.fsum(found.nodes[k].fpga_latency for k in ahead) / 1e3,
                backward_s=math.fsum(found.nodes[k].fpga_latency for k in behind) / 1e3,
                buffer_bytes=round(math.fsum(found.nodes[k].size for k in inside)),
            )
        )
    return costs


def _uses(
    found: _Workload,
    names: Sequence[str],
    layers: Sequence[str],
    forward: Sequence[bool],
    owner: Sequence[int],
    edges: Edges,
) -> tuple[list[tuple[str, str, Tensor]], int]:
    """(producer, consumer, tensor) between layers; and how many pass in the backward alone.

    What a forward node makes goes on to later layers, also where only their backward uses it.
    An edge from a backward node, in either direction, is the gradient of what its two layers
    exchange; layers that exchange nothing else are given it as a tensor of its own.
    """
    tensor_of = tensors_by_size(
        names, [(a, e.size) for (a, _), e in zip(edges, found.edges, strict=True)]
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


def _assumptions(
    found: _Workload, forward: Sequence[bool], adopted: int, back_only: int
) -> Iterator[str]:
    yield "A sample is one mini-batch of the file."
    yield (
        "Each node's size is held once, as a buffer, whatever is in flight; nothing else is kept "
        "for the backward."
    )
    if all(forward):
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
    hosts = sum(1 for node in found.nodes if not node.supported_on_fpga)
    if hosts:
        yield (
            f"{hosts} nodes aren't supported on accelerators; they are planned there all the same, "
            "with fpgaLatency."
        )
    yield from _network(found)
    options = []
    if found.accelerators:
        options.append(f"--devices {found.accelerators}")
    if found.memory_bytes:
        options.append(f"--memory {found.memory_bytes:.0f}")
    if options:
        yield f"The file's own cluster is {' '.join(options)}; CPUs were left out."


def _network(found: _Workload) -> Iterator[str]:
    costs = [e.cost / e.size for e in found.edges if e.size > 0 and e.cost > 0]
    cost = statistics.median(costs) if costs else 0.0
    if not 0 < cost < math.inf:
        return
    in_seconds = math.isclose(cost * _THEIR_BYTES_PER_S, 1, rel_tol=0.01)
    bandwidth = 1 / cost if in_seconds else 1e3 / cost
    if in_seconds:
        yield "Edge costs are size / 2^31: they were taken to be seconds, beside latencies in ms."
    yield (
        f"Tensors move at {bandwidth / 1e9:.4g} GB/s in this file: plan with --bandwidth "
        f"{bandwidth / 1e9:.4g}GB/s --latency 0s."
    )
