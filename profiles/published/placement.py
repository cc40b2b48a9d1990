"""Workloads of the NeurIPS'20 placement paper (Tarnawski, Phanishayee, Devanur, Mahajan, Nina
Paravecino: Efficient Algorithms for Device Placement of DNN Graph Operators).

Forward and backward nodes with latencies in ms, `colorClass` (nodes that must share a device) and
`size` (bytes held); "FPGA" stands for any accelerator. A layer of ours is what must share a stage:
the forward nodes of a class, with its backward nodes. Their "mini-batch" is one sample here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ..profile import Profile
from .cost_graph import Cost, Tensor, choose_sizes, make_profile
from .foreign_nodes import tensors_by_size
from .placement_file import Placement, bandwidth_bytes_per_s, cost_unit_s, read_placement
from .placement_groups import group


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
    file = read_placement(where, text)
    sizes = choose_sizes(where, 1, batch_size, micro_batch_sizes)
    owner, adopted = group(where, file.names, file.forward, file.classes, file.edges)
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
                # Rounded down, and the limit up: what fits there must fit here.
                buffer_bytes=math.floor(math.fsum(found.nodes[k].size for k in inside)),
            )
        )
    return costs


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
    if file.hosts:
        yield (
            f"{file.hosts} nodes aren't supported on accelerators; they are planned there all the "
            "same, with fpgaLatency."
        )
    yield from _network(file)
    options = []
    if found.accelerators:
        options.append(f"--devices {found.accelerators}")
    if found.memory_bytes:
        options.append(f"--memory {math.ceil(found.memory_bytes)}")
    if options:
        yield f"The file's own cluster is {' '.join(options)}; CPUs were left out."


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
