"""Pipelines whose stages all take the same time, without transfers: what closed forms speak of."""

from __future__ import annotations

from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.simulator.pipeline import Link, Pipeline
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
