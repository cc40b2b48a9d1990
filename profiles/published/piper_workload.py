"""A Piper workload (NeurIPS'21) as its own planner sees it. See `piper_file` for the file.

Of the tensor-parallel degrees only 1 is read.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import FileError
from .piper_file import FileNode, Piper, plain_of, read_piper
from .workload import Again, Node, Sent, Workload


def piper_workload(where: str, text: bytes) -> Workload:
    """Read the file's JSON. Raises FileError naming the place that is wrong."""
    file = read_piper(where, text)
    found = file.found
    place = {k: position for position, k in enumerate(file.order)}
    edges = [(place[a], place[b]) for a, b in file.edges]
    needs: list[set[int]] = [set() for _ in found.nodes]
    for a, b in edges:
        needs[b].add(a)
    return Workload(
        where=where,
        cost_model="piper",
        unit="micro-batch",
        listed=len(found.nodes),
        nodes=tuple(_node(where, file, k) for k in file.order),
        needs=tuple(tuple(sorted(before)) for before in needs),
        # Their planner counts every edge that crosses, also where several carry one tensor.
        tensors=tuple(
            Sent(a, (b,), edge.communication_cost)
            for (a, b), edge in zip(edges, found.edges, strict=True)
        ),
        devices=found.max_devices,
        memory_bytes=found.max_memory_per_device,
        bandwidth_bytes_per_s=found.bandwidth,
        micro_batches=found.mbs_in_batch,
        notes=tuple(_notes(found.nodes)),
    )


def _node(where: str, file: Piper, k: int) -> Node:
    node = file.found.nodes[k]
    plain = plain_of(where, k, node)
    others = [c for c in node.configurations["1"] if c is not plain]
    if len(others) > 1:
        raise FileError(
            f'{where}: $.nodes[{k}].TMPCs["1"]: expected one entry besides "vanilla", not '
            f"{len(others)}"
        )
    again = [Again(c.time_per_sample, c.memory_usage_b, c.memory_usage_a) for c in others]
    return Node(
        name=file.names[k],
        compute_s=plain.time_per_sample,
        parameter_bytes=plain.parameter_size,
        held_bytes=plain.memory_usage_b,
        flight_bytes=plain.memory_usage_a,
        again=again[0] if again else None,
    )


def _notes(nodes: list[FileNode]) -> Iterator[str]:
    left_out = sum(
        len(listed)
        for node in nodes
        for degree, listed in node.configurations.items()
        if degree != "1"
    )
    if left_out:
        yield f"Left out: {left_out} node configurations with tensor parallelism."
