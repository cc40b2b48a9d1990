"""Workloads of the NeurIPS'21 planner (Piper: Tarnawski, Narayanan, Phanishayee).

Nodes with `TMPCs` (tensor-model-parallel configurations): for each tensor-parallel degree, what
a node costs plainly ("vanilla") and with its activations computed again. Planned here is degree 1,
vanilla. Their "sample" is one micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..profile import Profile
from ..units import format_bytes
from .cost_graph import Cost, Tensor, choose_sizes, make_profile
from .foreign_nodes import readable, tensors_by_size
from .piper_file import FileConfiguration, FileNode, FileWorkload, plain_of, read_piper


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
    file = read_piper(where, text)
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


def _cost(name: str, node: FileNode, plain: FileConfiguration) -> Cost:
    return Cost(
        name=name,
        kind=readable(node.name) or "node",
        forward_s=plain.time_per_sample / 3,
        backward_s=plain.time_per_sample - plain.time_per_sample / 3,
        saved_bytes=round(plain.memory_usage_a),
        parameter_bytes=round(plain.parameter_size),
        buffer_bytes=_constant_bytes(plain),
    )


def _constant_bytes(plain: FileConfiguration) -> int:
    """What memoryUsageB holds besides the parameters and their gradient."""
    return max(round(plain.memory_usage_b - 2 * plain.parameter_size), 0)


def _assumptions(found: FileWorkload, plain: Sequence[FileConfiguration]) -> Iterator[str]:
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


def _cluster(found: FileWorkload) -> Iterator[str]:
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
