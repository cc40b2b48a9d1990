"""How busy a plan keeps the cores that its devices take turns on."""

from __future__ import annotations

import msgspec

from ...planner.plan import Plan, pipeline_of
from ...planner.simulator.timeline import idle_cores


class CoreUse(msgspec.Struct, frozen=True, kw_only=True):
    """Of all machines together."""

    cores: int
    devices: int
    """That take turns on them."""
    idle_share: float
    """Of the cores' time in a steady period."""


def core_use(plan: Plan) -> CoreUse | None:
    """None where every device has a core of its own."""
    pipeline = pipeline_of(plan)
    idle = idle_cores(pipeline, plan.predicted.period_s)
    if not idle:
        return None
    cores = sum(pipeline.cores)
    return CoreUse(
        cores=cores,
        devices=sum(map(len, pipeline.pools)),
        idle_share=sum(i * count for i, count in zip(idle, pipeline.cores, strict=True)) / cores,
    )
