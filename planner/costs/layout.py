"""Stages laid over a cluster's devices: from times and tensors to a pipeline with its links."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
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
    links: LinkMaker,
    micro_batches: int,
    times: Sequence[StageTimes],
    transfers: Sequence[Transfer],
    devices: Sequence[tuple[int, ...]],
    limits: Sequence[int],
    update_every: int = 1,
) -> Pipeline:
    """A pipeline from stage times, what crosses the cuts, and each stage's devices."""
    variant, cluster = links.variant, links.cluster
    sums = tuple(t.all_reduce_s for t in times)
    replicated = any(len(mine) > 1 for mine in devices)
    return Pipeline(
        variant=variant,
        micro_batches=micro_batches,
        forward_s=tuple(t.forward_s for t in times),
        backward_s=tuple(t.backward_s for t in times),
        update_s=tuple(t.update_s for t in times),
        links=links.links(transfers, devices),
        limits=tuple(limits),
        paces=tuple(cluster.paces(mine) for mine in devices) if replicated else (),
        all_reduce_s=sums if any(sums) else (),
        update_every=update_every,
        weight_s=tuple(t.weight_s for t in times) if variant.split_backward else (),
        placement=numbered_devices(devices),
    )


class LinkMaker:
    """Makes the links of stages on one cluster's devices, each of them once: plans that differ
    little have most of them alike."""

    def __init__(self, variant: Variant, cluster: Cluster) -> None:
        self.variant, self.cluster = variant, cluster
        # With its routes, and without.
        self._known: dict[Hashable, tuple[Link, Link]] = {}

    def links(
        self, transfers: Sequence[Transfer], devices: Sequence[tuple[int, ...]]
    ) -> tuple[Link, ...]:
        """For each pair of stages between which something goes.

        Args:
            devices: per stage.
        """
        sent: dict[tuple[int, int], int] = {}
        returned: dict[tuple[int, int], int] = {}
        for c in transfers:
            pair = c.source, c.target
            sent[pair] = sent.get(pair, 0) + c.nbytes
            if c.needs_grad:
                returned[pair] = returned.get(pair, 0) + c.nbytes
        found = list[tuple[Link, Link]]()
        for pair in sorted(sent):
            key = pair, devices[pair[0]], devices[pair[1]], sent[pair], returned.get(pair)
            if key not in self._known:
                self._known[key] = self._link(*key)
            found.append(self._known[key])
        wires = [wire for link, _ in found for wire in link.wires]
        alone = all(len(link.routes) == 1 and link.routes[0].overlaps for link, _ in found)
        lone = alone and len({*wires}) == len(wires)
        return tuple(plain if lone else link for link, plain in found)

    def _link(
        self,
        pair: tuple[int, int],
        here: tuple[int, ...],
        there: tuple[int, ...],
        sent: int,
        returned: int | None,
    ) -> tuple[Link, Link]:
        """With a route for each pair of replicas that need it, and without.

        Args:
            here, there: devices of both stages.
            sent, returned: bytes of activations and gradients for one micro-batch; None: no
                gradient.
        """
        # Both deal what they share round by round: part k is replica k mod r's.
        parts = lcm(len(here), len(there)) if self.variant.whole_mini_batches else 1
        routes = []
        for i, a in enumerate(here):
            for j, b in enumerate(there):
                if a == b:
                    # Handed over, without a copy or a wire.
                    own = ("hand-over", *pair, i)
                    routes.append(Route(i, j, 0.0, 0.0, 0.0, own, (*own, "back")))
                elif (i - j) % gcd(len(here), len(there)) == 0:
                    network = self.cluster.link(a, b)
                    routes.append(
                        Route(
                            source=i,
                            target=j,
                            forward_s=network.wire_s(sent / parts),
                            backward_s=network.wire_s((returned or 0) / parts),
                            latency_s=network.latency_s,
                            wire=self.cluster.wire(a, b),
                            wire_back=self.cluster.wire(b, a),
                            overlaps=network.overlap,
                        )
                    )
        plain = Link(
            *pair,
            forward_s=max(route.forward_s for route in routes),
            backward_s=max(route.backward_s for route in routes),
            latency_s=max(route.latency_s for route in routes),
            has_gradient=returned is not None,
        )
        return replace(plain, routes=tuple(routes)), plain


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
