"""Pipelines whose stages all take the same time, without transfers: what closed forms speak of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.simulator.pipeline import Link, Pipeline
from timeprest.planner.simulator.timeline import Event, Timeline
from timeprest.planner.systems.operations import FORWARD
from timeprest.planner.systems.variants import VARIANTS


def unit_pipeline(variant, stages, n, limits=None, *, backward=None):
    """f = β = 1: a mini-batch's backward takes as long as a micro-batch's forward."""
    each = 1.0 if VARIANTS[variant].backward_unit == "micro" else 1.0 / n
    return Pipeline(
        variant=VARIANTS[variant],
        micro_batches=n,
        forward_s=(1.0,) * stages,
        backward_s=(backward or each,) * stages,
        update_s=(0.0,) * stages,
        links=tuple(Link(s, s + 1, 0.0, 0.0, 0.0) for s in range(stages - 1)),
        limits=tuple(limits or usual_limits(variant, stages)),
    )


def usual_limits(variant, stages):
    """S − s, where the system leaves a choice."""
    ranges = limit_ranges(VARIANTS[variant], stages)
    return [min(most, stages - s) for s, (_, most) in enumerate(ranges)]


def steady_period_s(timeline: Timeline) -> float:
    """Seconds per mini-batch in the middle of the run, filling and draining left out.

    That of the slowest stage: one that gets no gradients back may run ahead of the others.
    Where updates come in a pattern that repeats every c mini-batches, the mean over whole
    patterns; else the mean over the middle third.
    """
    return max(_period_s(_ends(events)) for events in timeline.stages)


def _ends(events: Iterable[Event]) -> list[float]:
    """When each mini-batch had left a stage: after its last backward and, if it has one, update."""
    found: dict[int, float] = {}
    for event in events:
        if event.op.kind != FORWARD:
            found[event.op.mini_batch] = event.end_s
    return list(found.values())


def _period_s(ends: Sequence[float]) -> float:
    if len(ends) < 3:
        return ends[-1] / len(ends) if ends else 0.0
    gaps = [b - a for a, b in pairwise(ends)]
    middle = gaps[len(gaps) // 3 : max(2 * len(gaps) // 3, len(gaps) // 3 + 1)]
    scale = max(max(middle), 1e-30)
    for cycle in range(1, len(middle) // 2 + 1):
        pairs = zip(middle, middle[cycle:], strict=False)
        if all(abs(a - b) <= 1e-9 * scale for a, b in pairs):
            return sum(middle[:cycle]) / cycle
    return sum(middle) / len(middle)


def equal_stages(variant, placement, n, limits=None):
    """Forward 1, backward 2, where it is split 1 and 1; messages take no time."""
    system, stages = VARIANTS[variant], len(placement)
    ranges = limit_ranges(system, stages, several=True)
    return Pipeline(
        variant=system,
        micro_batches=n,
        forward_s=(1.0,) * stages,
        backward_s=(2.0,) * stages,
        weight_s=(1.0,) * stages if system.split_backward else (),
        update_s=(0.0,) * stages,
        links=tuple(Link(s, s + 1, 0.0, 0.0, 0.0) for s in range(stages - 1)),
        limits=limits or tuple(most for _, most in ranges),
        placement=placement,
    )
