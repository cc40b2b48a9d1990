"""Making plans for tests: a given cut of a profile with given times, so that orders are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import msgspec
from helpers.by_hand.profiles import chain
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import evaluate, make_plan
from timeprest.planner.plan import PlanStage, SolverReport
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.systems.variants import VARIANTS

REPORT = SolverReport(
    method="by hand", objective_s=0, bound_s=0, gap=1, optimal=False, plans_tried=0, seconds=0
)


def with_times(profile, forward_s=1e-3, backward_s=2e-3, shares=None):
    """The profile with times that don't depend on the machine: so much for each sample.

    Args:
        shares: per layer, how many times as long; 1 by default.
    """
    shares = shares or [1] * len(profile.layers)
    layers = tuple(
        msgspec.structs.replace(
            layer,
            measurements=tuple(
                msgspec.structs.replace(
                    m,
                    forward_s=share * forward_s * m.micro_batch,
                    backward_s=share * backward_s * m.micro_batch,
                    backward_input_s=None,
                    backward_weight_s=None,
                )
                for m in layer.measurements
            ),
        )
        for layer, share in zip(profile.layers, shares, strict=True)
    )
    optimizer = msgspec.structs.replace(
        profile.optimizer, update_fixed_s=0.0, update_s_per_byte=0.0
    )
    loss = tuple(msgspec.structs.replace(m, forward_s=0.0, backward_s=0.0) for m in profile.loss)
    return msgspec.structs.replace(
        profile,
        layers=layers,
        optimizer=optimizer,
        loss=loss,
        loading_s_per_sample=msgspec.UNSET,
    )


def profiled(target, sizes=(2, 4, 8), **how):
    """A task's profile, or a `Target`'s, `with_times`, in mini-batches of the largest size. Of a
    name alone it is made once."""
    if isinstance(target, str) and not how:
        return _profiled(target, tuple(sizes))
    return _profiled.__wrapped__(target, tuple(sizes), **how)


@cache
def _profiled(target, sizes, **how):
    from timeprest.profiles.measuring.measure import measure
    from timeprest.profiles.target import resolve

    target = resolve(target) if isinstance(target, str) else target
    found = measure(target, batch_size=sizes[-1], micro_batch_sizes=sizes, seconds=0, **how)
    return with_times(found)


def split_evenly(names, stages):
    """Layer names in `stages` consecutive groups."""
    borders = [round(k * len(names) / stages) for k in range(stages + 1)]
    return [tuple(names[a:b]) for a, b in itertools.pairwise(borders)]


def plan_by_hand(
    profile,
    variant,
    stages,
    micro_batches,
    limits=None,
    mini_batch=8,
    cut=None,
    *,
    update_every=1,
    recompute=(),
    replicas=None,
    tied="together",
    placement=(),
):
    """A plan with a given cut and in-flight limits (S − s by default).

    Args:
        micro_batches: of a mini-batch, in systems that know any.
        recompute: per stage; nowhere by default.
        replicas: per stage; one each by default. Of the first stage of each device, where
            there is a placement.
        placement: per stage, the number of its device; one for each by default.
    """
    names = [layer.name for layer in profile.layers]
    groups = cut or split_evenly(names, stages)
    if VARIANTS[variant].whole_mini_batches:
        micro_batches = 1
    if limits is None:
        ranges = limit_ranges(VARIANTS[variant], stages, several=bool(placement))
        limits = [min(most, stages - s) for s, (_, most) in enumerate(ranges)]
    factor = profile.optimizer.state_bytes_per_parameter_byte
    placement = placement or range(stages)
    counts = replicas or [1] * (max(placement) + 1)
    cluster = uniform_cluster(sum(counts))
    question = Question(profile, cluster, variant, mini_batch, factor, update_every, tied)
    firsts = list(itertools.accumulate(counts, initial=0))
    stages_ = [
        msgspec.structs.replace(
            stage, recompute=again, devices=tuple(range(firsts[d], firsts[d] + counts[d]))
        )
        for stage, again, d in zip(
            lone_stages(groups, limits),
            [*recompute, *[False] * (stages - len(recompute))],
            placement,
            strict=True,
        )
    ]
    return make_plan(question, evaluate(question, stages_, micro_batches), REPORT)


ALL = sorted(name for name, variant in VARIANTS.items() if variant.placement == "any")


def chain_plan(variant, stages=3, n=4, replicas=1, placement=()):
    """Equal stages with one layer each.

    Args:
        placement: per stage, its device; replicas are of devices.
    """
    system, several = VARIANTS[variant], bool(placement)
    n = 1 if system.whole_mini_batches else n
    placement = placement or tuple(range(stages))
    stages, devices = len(placement), max(placement) + 1
    limits = [most for _, most in limit_ranges(system, stages, several=several)]
    asked = Question(chain(stages), uniform_cluster(devices * replicas), variant, 4, 1.0)
    found = lone_stages([[f"n{s}"] for s in range(stages)], limits)
    found = tuple(
        msgspec.structs.replace(one, devices=tuple(range(d * replicas, (d + 1) * replicas)))
        for d, one in zip(placement, found, strict=True)
    )
    return make_plan(asked, evaluate(asked, found, n), REPORT)


def even_stages(
    names: Sequence[str], limits: Sequence[int], replicas: int
) -> Iterator[tuple[PlanStage, ...]]:
    """Every cut of these layers into stages with so many devices each."""
    for inner in itertools.combinations(range(1, len(names)), len(limits) - 1):
        borders = itertools.pairwise((0, *inner, len(names)))
        nodes = [names[a:b] for a, b in borders]
        yield tuple(
            msgspec.structs.replace(stage, devices=tuple(range(s * replicas, (s + 1) * replicas)))
            for s, stage in enumerate(lone_stages(nodes, limits))
        )


def lone_stages(nodes: Sequence[Sequence[str]], limits: Sequence[int]) -> tuple[PlanStage, ...]:
    """Stages of these layers with one device each, in the cluster's sequence."""
    return tuple(
        PlanStage(nodes=tuple(names), devices=(s,), in_flight=limit)
        for s, (names, limit) in enumerate(zip(nodes, limits, strict=True))
    )
