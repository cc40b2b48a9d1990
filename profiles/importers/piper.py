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

from ..errors import FileError
from ..profile import Profile
from ..units import format_bytes
from .foreign_graph import MAX_BYTES, MAX_SECONDS, Cost, Tensor, choose_sizes, make_profile
from .foreign_nodes import (
    edge_positions,
    node_names,
    node_positions,
    readable,
    tensors_by_size,
    topological_order,
)

_Bytes = Annotated[float, Meta(ge=0, le=MAX_BYTES)]


class _Configuration(msgspec.Struct, frozen=True, rename="camel"):
    id: str
    time_per_sample: Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
    """Forward and backward of one micro-batch, in s."""
    parameter_size: _Bytes
    memory_usage_a: _Bytes
    """For each micro-batch in flight."""
    memory_usage_b: _Bytes
    """Whatever is in flight."""


class _Node(msgspec.Struct, frozen=True, rename="camel"):
    id: int
    configurations: dict[str, list[_Configuration]] = msgspec.field(name="TMPCs")
    name: str = ""


class _Edge(msgspec.Struct, frozen=True, rename="camel"):
    source_id: int
    dest_id: int
    communication_cost: _Bytes


class _Workload(msgspec.Struct, frozen=True, rename="camel"):
    nodes: Annotated[list[_Node], Meta(min_length=1)]
    edges: list[_Edge]
    max_devices: Annotated[int, Meta(ge=1)] | None = None
    max_memory_per_device: Annotated[float, Meta(gt=0)] | None = None
    bandwidth: Annotated[float, Meta(gt=0)] | None = None
    mbs_in_batch: Annotated[int, Meta(ge=1)] | None = None


def import_piper(
    where: str, text: bytes, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    """A profile from the file's JSON.

    Args:
        where: the file's path.
        batch_size: micro-batches of the file in a mini-batch; 1 by default, so that the plan's
            period is theirs: the time per micro-batch.
        micro_batch_sizes: other sizes to list, in micro-batches of the file.

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
    plain = [_plain(where, k, node) for k, node in enumerate(found.nodes)]
    names = node_names((node.name, node.id) for node in found.nodes)
    order = topological_order(where, names, edges, range(len(names)))
    sent = [(a, e.communication_cost) for (a, _), e in zip(edges, found.edges, strict=True)]
    tensor = {
        key: Tensor(name, name, key[1], needs_grad=True)
        for key, name in tensors_by_size(names, sent).items()
    }
    return make_profile(
        where,
        "piper",
        sizes,
        [_cost(names[k], found.nodes[k], plain[k]) for k in order],
        [(names[a], names[b], tensor[key]) for (a, b), key in zip(edges, sent, strict=True)],
        assumptions=_assumptions(found, plain),
    )


def _plain(where: str, k: int, node: _Node) -> _Configuration:
    """The node on one device, nothing computed again."""
    found = [c for c in node.configurations.get("1", ()) if c.id == "vanilla"]
    if len(found) != 1:
        raise FileError(
            f'{where}: $.nodes[{k}].TMPCs["1"]: expected one entry with the id "vanilla", not '
            f"{len(found)}"
        )
    return found[0]


def _cost(name: str, node: _Node, plain: _Configuration) -> Cost:
    return Cost(
        name=name,
        kind=readable(node.name) or "node",
        forward_s=plain.time_per_sample / 3,
        backward_s=plain.time_per_sample - plain.time_per_sample / 3,
        saved_bytes=round(plain.memory_usage_a),
        parameter_bytes=round(plain.parameter_size),
        buffer_bytes=_constant_bytes(plain),
    )


def _constant_bytes(plain: _Configuration) -> int:
    """What memoryUsageB holds besides the parameters and their gradient."""
    return max(round(plain.memory_usage_b - 2 * plain.parameter_size), 0)


def _assumptions(found: _Workload, plain: Sequence[_Configuration]) -> Iterator[str]:
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
    others = Counter(
        "recomputation" if degree == "1" else "tensor parallelism"
        for node in found.nodes
        for degree, listed in node.configurations.items()
        for c in listed
        if degree != "1" or c.id != "vanilla"
    )
    for what, count in sorted(others.items()):
        yield f"Left out: {count} node configurations with {what}."
    yield from _cluster(found)


def _cluster(found: _Workload) -> Iterator[str]:
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
