"""What published cost models share: parts of a `StageProblem`, made of a workload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

import numpy as np

from ..profiles.published.workload import Node, Workload
from .partition.problem import Mode, Tensor, Vector

MAX_MODES = 64
"""Problems with more take longer than that is worth."""


def needs_of(workload: Workload) -> tuple[int, ...]:
    """`StageProblem.needs`."""
    return tuple(sum(1 << a for a in before) for before in workload.needs)


def tensors_of(workload: Workload, wire_s: Iterable[tuple[float, float]]) -> tuple[Tensor, ...]:
    """Tensors with the same ends as one; their times at a lower and an upper cut added up."""
    total: dict[int, tuple[float, float]] = {}
    for tensor, (lower, upper) in zip(workload.tensors, wire_s, strict=True):
        ends = sum(1 << k for k in {tensor.producer, *tensor.consumers})
        before = total.get(ends, (0.0, 0.0))
        if ends.bit_count() > 1 and (lower or upper):
            total[ends] = (before[0] + lower, before[1] + upper)
    return tuple(
        Tensor(ends, lower_s=lower, upper_s=upper) for ends, (lower, upper) in total.items()
    )


def recompute_modes(nodes: Sequence[Node]) -> list[Mode]:
    """Modes that compute more and more layers again, the cheapest per byte in flight first.

    Of any stage's layers each mode then has the best first ones; one of them has as many as the
    stage needs. With many layers not every length of the list is a mode.
    """
    gains = []
    for k, node in enumerate(nodes):
        if node.again is not None:
            freed = node.flight_bytes - node.again.flight_bytes
            lost = node.again.compute_s - node.compute_s
            if freed > 0:
                gains.append((lost / freed, k))
    order = [k for _, k in sorted(gains)]
    lengths = {round(len(order) * j / MAX_MODES) for j in range(MAX_MODES + 1)}
    return [mode_of(nodes, set(order[:length])) for length in sorted(lengths)]


def mode_of(nodes: Sequence[Node], again: Set[int] = frozenset()) -> Mode:
    """The nodes `again` compute their activations again, where they can; the others don't."""
    ways = [
        node.again if k in again and node.again is not None else node
        for k, node in enumerate(nodes)
    ]
    return Mode(
        name="recompute" if again else "plain",
        compute_s=vector(way.compute_s for way in ways),
        fixed_bytes=vector(way.held_bytes for way in ways),
        flight_bytes=vector(way.flight_bytes for way in ways),
    )


def vector(values: Iterable[float]) -> Vector:
    """Numbers as an array."""
    return np.fromiter(values, dtype=np.float64)
