"""Stages laid over a cluster's devices: from times and tensors to a pipeline with its links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import gcd, lcm
from typing import NamedTuple

from ..cluster.cluster import Cluster
from ..simulator.pipeline import Link, Pipeline, Route
from ..systems.outside import StageContext
from ..systems.placement import numbered_devices
from ..systems.variants import Variant
from .stage_costs import Transfer


class StageTimes(NamedTuple):
    """A stage's seconds for one micro-batch, on its slowest device, and for an update.

    `weight_s`: how much of backward_s is its weight part, where the system splits backwards.
    """

    forward_s: float
    backward_s: float
    update_s: float
    all_reduce_s: float = 0.0
    weight_s: float = 0.0


def make_pipeline(
    variant: Variant,
    micro_batches: int,
    times: Sequence[StageTimes],
    transfers: Sequence[Transfer],
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
    limits: Sequence[int],
    update_every: int = 1,
) -> Pipeline:
    """A pipeline from stage times, what crosses the cuts, and each stage's devices."""
    sums = tuple(t.all_reduce_s for t in times)
    replicated = any(len(mine) > 1 for mine in devices)
    return Pipeline(
        variant=variant,
        micro_batches=micro_batches,
        forward_s=tuple(t.forward_s for t in times),
        backward_s=tuple(t.backward_s for t in times),
        update_s=tuple(t.update_s for t in times),
        links=_links(variant, transfers, cluster, devices),
        limits=tuple(limits),
        paces=tuple(cluster.paces(mine) for mine in devices) if replicated else (),
        all_reduce_s=sums if any(sums) else (),
        update_every=update_every,
        weight_s=tuple(t.weight_s for t in times) if variant.split_backward else (),
        placement=numbered_devices([tuple(mine) for mine in devices]),
    )


def _links(
    variant: Variant,
    transfers: Sequence[Transfer],
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
) -> tuple[Link, ...]:
    sent: dict[tuple[int, int], int] = {}
    returned: dict[tuple[int, int], int] = {}
    for c in transfers:
        pair = c.source, c.target
        sent[pair] = sent.get(pair, 0) + c.nbytes
        if c.needs_grad:
            returned[pair] = returned.get(pair, 0) + c.nbytes
    pairs = sorted(sent)
    routes = [
        _routes(variant, pair, sent[pair], returned.get(pair, 0), cluster, devices)
        for pair in pairs
    ]
    uses = Counter(
        wire
        for pair, mine in zip(pairs, routes, strict=True)
        for route in mine
        for wire in (route.wire, route.wire_back)[: 1 + (pair in returned)]
    )
    alone = all(len(mine) == 1 and mine[0].overlaps for mine in routes)
    lone = alone and max(uses.values(), default=1) == 1
    return tuple(
        Link(
            *pair,
            max(route.forward_s for route in mine),
            max(route.backward_s for route in mine),
            max(route.latency_s for route in mine),
            pair in returned,
            () if lone else mine,
        )
        for pair, mine in zip(pairs, routes, strict=True)
    )


def _routes(
    variant: Variant,
    pair: tuple[int, int],
    sent: int,
    returned: int,
    cluster: Cluster,
    devices: Sequence[Sequence[int]],
) -> tuple[Route, ...]:
    """Of a pair of stages, a route for each pair of replicas that need it.

    Args:
        sent, returned: bytes of activations and gradients for one micro-batch.
    """
    here, there = (devices[s] for s in pair)
    # Both deal what they share round by round: part k is replica k mod r's.
    parts = lcm(len(here), len(there)) if variant.whole_mini_batches else 1
    routes = []
    for i, a in enumerate(here):
        for j, b in enumerate(there):
            if a == b:
                # Handed over, without a copy or a wire.
                own = ("hand-over", *pair, i)
                routes.append(Route(i, j, 0.0, 0.0, 0.0, own, (*own, "back")))
            elif (i - j) % gcd(len(here), len(there)) == 0:
                network = cluster.link(a, b)
                routes.append(
                    Route(
                        source=i,
                        target=j,
                        forward_s=network.wire_s(sent / parts),
                        backward_s=network.wire_s(returned / parts),
                        latency_s=network.latency_s,
                        wire=cluster.wire(a, b),
                        wire_back=cluster.wire(b, a),
                        overlaps=network.overlap,
                    )
                )
    return tuple(routes)


def copies_beside(pipeline: Pipeline, stage: int) -> int:
    """Copies of a stage's weights besides its versions: predictions, means of changes."""
    variant = pipeline.variant
    own = variant.scratch_copies * variant.makes_weights_on(stage, pipeline.stages)
    return own + copies_from_outside(pipeline, stage)


def copies_from_outside(pipeline: Pipeline, stage: int) -> int:
    """Copies of a stage's weights that a system from outside declares."""
    outside = pipeline.variant.outside
    if outside is None:
        return 0
    replicas = pipeline.replicas(stage)
    return outside.copies_on(StageContext(stage, pipeline.stages, pipeline.micro_batches, replicas))
