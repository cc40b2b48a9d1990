"""Messages of a relaxed problem: what wires carry, what stages hold, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...costs.layer_graph import LayerVectors
from ...costs.stage_costs import RECEIVES_AHEAD, sized
from ...partition.problem import CutTensor
from ...partition.waits import Waits
from .costs import LeastSeconds
from .memory import LeastBytes
from .scope import Reading


def waits(seconds: LeastSeconds, costs: LayerVectors, micro_batches: int) -> Waits:
    """What stages wait for in 1F1B over micro-batches, where devices are identical."""
    before, beyond = seconds.heads(costs, both=True)
    assert beyond is not None
    if not seconds.variant.flushes:
        # Stages that no gradients come back to wait for nothing.
        beyond = beyond * bool(seconds.graph.drained.waiting.all())
        work, before = np.add(*seconds.once(costs)), np.zeros(len(costs.forward_s))
        rows = seconds.graph.returning_rows
        row = max(rows, key=lambda row: float(work[row].sum()), default=[])
        before[row] = work[row]
    speed = seconds.question.cluster.devices[0].speed
    return Waits(micro_batches, seconds.variant.flushes, speed, before, beyond)


def tensors(read: Reading, kept: LeastBytes) -> Iterator[CutTensor]:
    """What layers exchange; and copies of parameters that they share, as if these were sent."""
    cluster, graph, limited = kept.question.cluster, kept.graph, kept.limited
    n, overlap = read.micro_batches, cluster.overlap
    # What a stage gets may come over several links side by side, one for each stage below.
    every = read.guess or not overlap or len(cluster.devices) <= 2
    fastest = cluster.fastest_bytes_per_s
    # Wires carry whole micro-batches; a replica holds messages of its share at the least.
    size = kept.size(n, 1)
    held_size = kept.size(n, read.most)
    unit = kept.unit(n, read.most)
    # Both directions take turns on every link, or keep its devices busy in turn.
    both = all(link.half_duplex or not link.overlap for link in cluster.networks)
    # A backward has a gradient at hand; a weight part, when the gradients of weights are there
    # at last, hasn't.
    at_hand = 0 if kept.variant.split_backward else 1
    remade = kept.remade(sure=not read.guess)
    wires = frozenset(range(len(graph.tensors)))
    if read.bounds_drained:
        # Messages that other work comes on top of: none that may pass beside it.
        wires = graph.direct_tensors if graph.drained.waiting.all() else frozenset()
    for number, tensor in enumerate(graph.tensors):
        edge = tensor.edge
        sent = sized(edge.fixed_bytes, edge.bytes_per_sample, size)
        returned = sent if edge.needs_grad else 0
        wire_s = n * (sent + returned if both else sent) / fastest
        wire_s *= number in wires
        waits = edge.needs_grad or not read.bounds_drained
        nbytes = sized(edge.fixed_bytes, edge.bytes_per_sample, held_size)
        gradient = unit * nbytes if edge.needs_grad else 0.0
        yield CutTensor(
            ends=tensor.ends,
            lower_s=wire_s if every or number in graph.lone_tensors else 0.0,
            upper_s=0.0 if overlap else wire_s * waits,
            lower_bytes=(
                RECEIVES_AHEAD["F"] * nbytes + (1 + at_hand) * gradient if limited else 0.0
            ),
            upper_bytes=((RECEIVES_AHEAD["B"] + at_hand) * gradient if limited else 0.0),
            kept_bytes=nbytes if limited else 0.0,
            remade_bytes=tuple(nbytes * (edge.storage in names) for names in remade),
        )
    for ends, nbytes in graph.copies if limited else ():
        # The weights, their gradient and the optimizer's state.
        yield CutTensor(ends, lower_bytes=(2.0 + kept.question.least_state_factor) * nbytes)
