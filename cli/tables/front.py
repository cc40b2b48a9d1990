"""Table of tp-plan solve --front: periods of one system, and how stale weights become for them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from ...planner.plan import Plan
from ...profiles.units import format_bytes, format_seconds
from .layout import fitted, fixed, words
from .plan import bare_rate, gap
from .stages import device_count, on_devices


def front_table(plans: Sequence[Plan], paths: Sequence[str], width: int) -> Group:
    """Table of a front's plans with their files, the least stale first."""
    fastest = max(plan.predicted.samples_per_s for plan in plans)
    rates = [plan.predicted.samples_per_s for plan in plans]
    memory = [max(d.predicted.memory_bytes for d in on_devices(plan)) for plan in plans]
    columns = [
        fixed("d", [str(plan.predicted.version_difference) for plan in plans]),
        fixed("period", [format_seconds(plan.predicted.period_s) for plan in plans]),
        fixed("samples/s", [bare_rate(rate) for rate in rates]),
        # With times of 0 alone there is no rate.
        fixed("ratio", [f"{rate / fastest:.2f}" if fastest else "-" for rate in rates]),
        fixed("S", [str(len(plan.stages)) for plan in plans]),
        fixed("devices", [str(device_count(plan.stages)) for plan in plans]),
        fixed("N", [str(plan.micro_batches) for plan in plans]),
        fixed("L", [str(max(stage.in_flight for stage in plan.stages)) for plan in plans]),
        fixed("memory", [format_bytes(each) for each in memory]),
        fixed("gap", [gap(plan) for plan in plans]),
    ]
    title = f"front of period and version difference, {plans[0].variant}"
    note = Text(
        "d: largest version difference of a stage. ratio: samples/s over the most. S: stages. N: "
        "micro-batches. L: most mini-batches in flight. memory: of the device with most. gap: to "
        "the best plan with no larger d.",
        style="dim",
    )
    return Group(fitted(title, words("plan", list(paths), 12), columns, width), note)
