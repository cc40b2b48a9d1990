"""Drawn pipelines: chains, and pipelines laid over clusters of every kind.

The latter have replicas, machines, shared wires. All times are sums of a few powers of two, so that
what happens at the same time does so to the last bit.
"""

from __future__ import annotations

from math import lcm

from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import Cluster, Device
from timeprest.planner.cluster.links import Network
from timeprest.planner.costs.layout import LinkMaker, StageTimes, make_pipeline
from timeprest.planner.costs.stage_costs import Transfer
from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.simulator.pipeline import Link, Pipeline
from timeprest.planner.systems.placement import numbered_devices
from timeprest.planner.systems.variants import VARIANTS

ALL = tuple(sorted(name for name, variant in VARIANTS.items() if variant.placement == "any"))
"""Systems that run with a device for each stage."""


def seconds(least, most):
    return st.integers(round(least * 1024), most * 1024).map(lambda k: k / 1024)


times = seconds(0.01, 10)


@st.composite
def pipelines(draw, variants=ALL, most_stages=6, most_micro_batches=8, *, placed=False):
    """Chains, and some links that skip stages. `placed`: devices have several; with systems that
    place their stages themselves they have wherever there are several: no plan has others."""
    variant = VARIANTS[draw(st.sampled_from(variants))]
    stages, placement = draw(st.integers(1, most_stages)), ()
    if placed or (variant.placement != "any" and stages > 1):
        placement = draw(placements(variant.placement))
        stages = len(placement)
    least = variant.least_micro_batches(stages)
    n = (
        1
        if variant.whole_mini_batches
        else draw(st.integers(least, max(least, most_micro_batches)))
    )
    links = {(s, s + 1) for s in range(stages - 1)}
    for _ in range(draw(st.integers(0, 3)) if stages > 2 else 0):
        a = draw(st.integers(0, stages - 2))
        links.add((a, draw(st.integers(a + 1, stages - 1))))
    limits = []
    for least, most in reversed(limit_ranges(variant, stages, several=bool(placement))):
        low = max(least, limits[0]) if limits else least
        limits.insert(0, draw(st.integers(low, most)))
    backward_s = tuple(draw(times) for _ in range(stages))
    shares = [draw(st.floats(0, 1)) for _ in range(stages)] if variant.split_backward else []
    return Pipeline(
        variant=variant,
        micro_batches=n,
        forward_s=tuple(draw(times) for _ in range(stages)),
        backward_s=backward_s,
        weight_s=tuple(share * whole for share, whole in zip(shares, backward_s, strict=False)),
        update_s=tuple(draw(st.sampled_from([0.0, 0.5])) for _ in range(stages)),
        links=tuple(
            Link(a, b, draw(seconds(0, 5)), draw(seconds(0, 5)), 0.125, draw(st.booleans()))
            for a, b in sorted(links)
        ),
        limits=tuple(limits),
        placement=placement,
    )


@st.composite
def placements(draw, kind="any"):
    """Of more stages than devices; `kind`: as a system's `Variant.placement`."""
    # Of one device's two stages a V would be a loop.
    devices = tuple(range(draw(st.integers(2 if kind == "v" else 1, 3))))
    if kind == "v":
        return devices + devices[::-1]
    if kind == "loop" or draw(st.booleans()):
        return devices * draw(st.integers(2, 3))
    if draw(st.booleans()):
        return devices + devices[::-1][draw(st.integers(0, len(devices) > 1)) :]
    more = draw(st.lists(st.sampled_from(devices), min_size=1, max_size=4))
    return numbered_devices(draw(st.permutations([*devices, *more])))


@st.composite
def clusters(draw, count):
    """Devices of one or two machines, of one or two speeds, with links of every kind."""
    machines = draw(st.sampled_from([[None], ["a", "b"]]))
    devices = tuple(
        Device(
            name=f"d{k}",
            machine=draw(st.sampled_from(machines)),
            speed=draw(st.sampled_from([1.0, 1.0, 2.0])),
        )
        for k in range(count)
    )

    def network():
        return Network(
            bandwidth_bytes_per_s=draw(st.sampled_from([8.0, 32.0, 1024.0])),
            latency_s=draw(st.sampled_from([0.0, 0.5])),
            half_duplex=draw(st.booleans()),
            overlap=draw(st.booleans()),
        )

    between = network() if len(machines) > 1 else None
    return Cluster(devices=devices, network=network(), between_machines=between)


@st.composite
def laid_out(draw, most_stages=4, variants=ALL):
    """A pipeline over a drawn cluster, most with some replicated stage."""
    variant = VARIANTS[draw(st.sampled_from(variants))]
    stages = draw(st.integers(1, most_stages))
    replicas = [draw(st.sampled_from([1, 1, 2, 3])) for _ in range(stages)]
    n = 1
    if not variant.whole_mini_batches:
        n = lcm(*replicas) * draw(st.integers(1, 2))
        n *= -(-variant.least_micro_batches(stages) // n)
    order = draw(st.permutations(range(sum(replicas))))
    devices = [tuple(order[sum(replicas[:s]) : sum(replicas[: s + 1])]) for s in range(stages)]
    pairs = [(s, s + 1) for s in range(stages - 1)]
    if stages > 2 and draw(st.booleans()):
        pairs.append((0, stages - 1))
    limits = []
    for least, most in reversed(limit_ranges(variant, stages)):
        limits.insert(0, draw(st.integers(max(least, limits[0] if limits else 1), most)))
    seconds = st.sampled_from([0.5, 1.0, 1.25, 3.0])
    return make_pipeline(
        LinkMaker(variant, draw(clusters(sum(replicas)))),
        n,
        [
            StageTimes(
                draw(seconds),
                2 * draw(seconds),
                draw(seconds),
                r > 1 and draw(seconds),
                draw(st.sampled_from([0.0, 0.5, 1.0])),
            )
            for r in replicas
        ],
        [
            Transfer(f"t{a}{b}", a, b, draw(st.sampled_from([12, 48])), draw(st.integers(0, 5)) > 0)
            for a, b in pairs
        ],
        devices,
        limits,
    )
