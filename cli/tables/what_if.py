"""Table of tp-plan solve --what-if: what changes of the devices and links would bring."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group
from rich.text import Text

from ...planner.plan import Plan
from ...profiles.units import format_bytes, format_seconds
from ..errors import printable
from .layout import fitted, fixed, words
from .plan import bare_rate, gap
from .stages import device_count, on_devices


def what_if_table(
    asked: Plan, plans: Mapping[str, Plan], failed: Mapping[str, str], width: int
) -> Group:
    """Table of the plan asked for and the best ones after each change.

    Args:
        plans: by the change, as it was given.
        failed: why there is none after other changes.
    """
    rows = {"as it is": asked, **plans}
    found = list(rows.values())
    # With times of 0 alone there is no rate.
    own = asked.predicted.samples_per_s
    ratios = [f"{plan.predicted.samples_per_s / own:.2f}" if own else "-" for plan in found]
    memory = [max(d.predicted.memory_bytes for d in on_devices(plan)) for plan in found]
    columns = [
        fixed("period", [format_seconds(plan.predicted.period_s) for plan in found]),
        fixed("samples/s", [bare_rate(plan.predicted.samples_per_s) for plan in found]),
        fixed("ratio", ratios),
        fixed("S", [str(len(plan.stages)) for plan in found]),
        fixed("devices", [str(device_count(plan.stages)) for plan in found]),
        fixed("N", [str(plan.micro_batches) for plan in found]),
        fixed("memory", [format_bytes(each) for each in memory]),
        fixed("gap", [gap(plan) for plan in found]),
    ]
    table = fitted("what if", words("change", list(rows), 12), columns, width)
    note = Text(
        "ratio: samples/s over those of the plan as it is. S: stages. N: micro-batches. memory: of "
        "the device with most.",
        style="dim",
    )
    why = [Text(f"{change}: {printable(each)}", style="dim") for change, each in failed.items()]
    return Group(table, note, *why)
