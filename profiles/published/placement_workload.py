"""A placement workload (NeurIPS'20) as its own planner sees it: a node is what must share a
device. See `placement_file` for the file, `placement_contract` for what goes together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from .placement_contract import contract
from .placement_file import Placement, bandwidth_bytes_per_s, cost_unit_s, read_placement
from .workload import Node, Sent, Workload


def placement_workload(where: str, text: bytes) -> Workload:
    """Read the file's JSON. Raises FileError naming the place that is wrong."""
    file = read_placement(where, text)
    found = file.found
    owner, needs = contract(
        where,
        file.names,
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
        needs=tuple(tuple(sorted(before)) for before in needs),
        tensors=tuple(_tensors(file, owner)),
        devices=found.accelerators or None,
        memory_bytes=found.memory_bytes or None,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s(found.edges),
        notes=tuple(_notes(file, len(needs))),
    )


def _nodes(file: Placement, owner: Sequence[int]) -> Iterator[Node]:
    members: list[list[int]] = [[] for _ in range(max(owner) + 1)]
    for k, group in enumerate(owner):
        members[group].append(k)
    for inside in members:
        nodes = [file.found.nodes[k] for k in inside]
        # The node that does the most work says best what the group is; a forward one, if any.
        main = max(inside, key=lambda k: (file.forward[k], file.found.nodes[k].fpga_latency, k))
        yield Node(
            name=file.names[main],
            compute_s=math.fsum(node.fpga_latency for node in nodes) / 1e3,
            held_bytes=math.fsum(node.size for node in nodes),
        )


def _tensors(file: Placement, owner: Sequence[int]) -> Iterator[Sent]:
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
            yield Sent(owner[a], tuple(sorted(others)), nbytes[a, cost], cost * unit_s)


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
    if file.hosts:
        yield (
            f"{file.hosts} nodes aren't supported on accelerators; they are planned there all the "
            "same, with fpgaLatency."
        )
    yield "CPUs were left out."
