"""Workloads of the NeurIPS'21 planner (Piper: Tarnawski, Narayanan, Phanishayee).

Nodes with `TMPCs` (tensor-model-parallel configurations): for each tensor-parallel degree, what
a node costs plainly ("vanilla") and with its activations computed again. Planned here is degree 1,
vanilla. Their "sample" is one micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
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
    numbered,
    readable,
)
from timeprest.profiles.profile import Profile
from timeprest.profiles.units import format_bytes
from timeprest.tests.benchmarks.published.file_graph import FileGraph, tensors_by_size
from timeprest.tests.benchmarks.published.workload import (
    Node,
    RecomputedNode,
    Workload,
    WorkloadTensor,
)

# The file as it is written ----------------------------------------------------------------------

_Bytes = Annotated[float, Meta(ge=0, le=MAX_BYTES)]


class PiperConfiguration(msgspec.Struct, frozen=True, rename="camel"):
    """What a node costs, run in one of its ways."""

    id: str
    time_per_sample: Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
    """Forward and backward of one micro-batch, in s."""
    parameter_size: _Bytes
    memory_usage_a: _Bytes
    """For each micro-batch in flight."""
    memory_usage_b: _Bytes
    """Whatever is in flight."""


class PiperNode(msgspec.Struct, frozen=True, rename="camel"):
    """A node of the file."""

    id: int
    configurations: dict[str, list[PiperConfiguration]] = msgspec.field(name="TMPCs")
    """By tensor-parallel degree."""
    name: str = ""


class PiperEdge(msgspec.Struct, frozen=True, rename="camel"):
    """An edge of the file."""

    source_id: int
    dest_id: int
    communication_cost: _Bytes


class PiperFile(msgspec.Struct, frozen=True, rename="camel"):
    """The file's top level."""

    nodes: Annotated[list[PiperNode], Meta(min_length=1)]
    edges: list[PiperEdge]
    max_devices: Annotated[int, Meta(ge=1)] | None = None
    max_memory_per_device: Annotated[float, Meta(gt=0)] | None = None
    bandwidth: Annotated[float, Meta(gt=0)] | None = None
    mbs_in_batch: Annotated[int, Meta(ge=1)] | None = None


def plain_of(where: str, k: int, node: PiperNode) -> PiperConfiguration:
    """The node on one device, nothing computed again. Raises FileError where there is no such."""
    found = [c for c in node.configurations.get("1", ()) if c.id == "vanilla"]
    if len(found) != 1:
        raise FileError(
            f'{where}: $.nodes[{k}].TMPCs["1"]: expected one entry with the id "vanilla", not '
            f"{len(found)}"
        )
    return found[0]


# As a profile -----------------------------------------------------------------------------------


def import_piper(
    where: str, text: bytes, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    """A profile from the file's JSON; arguments and errors as of `reader.import_profile`."""
    file = FileGraph.read(where, text, PiperFile)
    found, names, edges = file.found, file.names, file.edges
    sizes = choose_sizes(where, 1, batch_size, micro_batch_sizes)
    plain = [plain_of(where, k, node) for k, node in enumerate(found.nodes)]
    sent = [(a, e.communication_cost) for (a, _), e in zip(edges, found.edges, strict=True)]
    tensor = {
        key: Tensor(name, name, key[1], needs_grad=True)
        for key, name in tensors_by_size(names, sent).items()
    }
    return make_profile(
        where,
        "piper",
        sizes,
        [_cost(names[k], found.nodes[k], plain[k]) for k in file.order],
        [(names[a], names[b], tensor[key]) for (a, b), key in zip(edges, sent, strict=True)],
        assumptions=_assumptions(found, plain),
    )


def _cost(name: str, node: PiperNode, plain: PiperConfiguration) -> Cost:
    return Cost(
        name=name,
        kind=readable(node.name) or "node",
        measured=(
            costs_of(
                1,
                plain.time_per_sample / 3,
                plain.time_per_sample - plain.time_per_sample / 3,
                plain.memory_usage_a,
            ),
        ),
        parameter_bytes=round(plain.parameter_size),
        buffer_bytes=_constant_bytes(plain),
    )


def _constant_bytes(plain: PiperConfiguration) -> int:
    """What memoryUsageB holds besides the parameters and their gradient."""
    return max(round(plain.memory_usage_b - 2 * plain.parameter_size), 0)


def _assumptions(found: PiperFile, plain: Sequence[PiperConfiguration]) -> Iterator[str]:
    yield (
        "A sample is one micro-batch of the file; its times, for forward and backward together, "
        "were taken to be 1 part forward and 2 parts backward."
    )
    left_over = format_bytes(sum(_constant_bytes(c) for c in plain))
    yield (
        "memoryUsageA is kept for each micro-batch in flight; memoryUsageB is the parameters, a "
        f"gradient as large, and what is left over ({left_over} in all) as buffers."
    )
    less = sum(1 for c in plain if c.memory_usage_b < 2 * c.parameter_size)
    if less:
        yield (
            f"{less} nodes have a memoryUsageB below their parameters and gradient; more than the "
            "file says is counted for them."
        )
    yield "A node's edges with the same bytes carry one tensor, with a gradient as large."
    for what, count in sorted(_left_out(found).items()):
        yield f"Left out: {count} node configurations with {what}."
    yield from _cluster(found)


def _left_out(found: PiperFile) -> Counter[str]:
    """Configurations besides the plain ones, by what they have."""
    return Counter(
        "recomputation" if degree == "1" else "tensor parallelism"
        for node in found.nodes
        for degree, listed in node.configurations.items()
        for c in listed
        if degree != "1" or c.id != "vanilla"
    )


def _cluster(found: PiperFile) -> Iterator[str]:
    options = [
        (found.max_devices, lambda v: f"--devices {v}"),
        (found.max_memory_per_device, lambda v: f"--memory {v:.0f}"),
        (found.bandwidth, lambda v: f"--bandwidth {v / 1e9:.4g}GB/s"),
    ]
    given = [show(value) for value, show in options if value is not None]
    if given:
        yield f"The file's own cluster is {' '.join(given)}."
    if found.mbs_in_batch is not None:
        yield (
            f"The file's mini-batch has {found.mbs_in_batch} micro-batches: --mini-batch "
            f"{found.mbs_in_batch}."
        )


# As its own planner sees it; of the tensor-parallel degrees only 1 is read ----------------------


def piper_workload(where: str, text: bytes) -> Workload:
    """Read the file's JSON. Raises FileError naming the place that is wrong."""
    file = FileGraph.read(where, text, PiperFile)
    found, names = file.found, file.names
    place = {k: position for position, k in enumerate(file.order)}
    return Workload(
        where=where,
        cost_model="piper",
        unit="micro-batch",
        listed=len(found.nodes),
        nodes=tuple(_node(where, names[k], k, found.nodes[k]) for k in file.order),
        graph=numbered(file.graph, file.order),
        # Their planner counts every edge that crosses, also where several carry one tensor.
        tensors=tuple(
            WorkloadTensor(place[a], (place[b],), edge.communication_cost)
            for (a, b), edge in zip(file.edges, found.edges, strict=True)
        ),
        devices=found.max_devices,
        memory_bytes=found.max_memory_per_device,
        bandwidth_bytes_per_s=found.bandwidth,
        micro_batches=found.mbs_in_batch,
        notes=tuple(
            f"Left out: {count} node configurations with {what}."
            for what, count in _left_out(found).items()
            if what == "tensor parallelism"
        ),
    )


def _node(where: str, name: str, k: int, node: PiperNode) -> Node:
    plain = plain_of(where, k, node)
    others = [c for c in node.configurations["1"] if c is not plain]
    if len(others) > 1:
        raise FileError(
            f'{where}: $.nodes[{k}].TMPCs["1"]: expected one entry besides "vanilla", not '
            f"{len(others)}"
        )
    recomputed = [
        RecomputedNode(c.time_per_sample, c.memory_usage_b, c.memory_usage_a) for c in others
    ]
    return Node(
        name=name,
        compute_s=plain.time_per_sample,
        parameter_bytes=plain.parameter_size,
        held_bytes=plain.memory_usage_b,
        flight_bytes=plain.memory_usage_a,
        recomputed=recomputed[0] if recomputed else None,
    )
