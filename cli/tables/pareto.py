"""Tables of tp-plan solve --variant all: each system's best plan, and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Group
from rich.text import Text

from ...planner.comparison.pareto import ParetoPoint, beaten
from ...planner.plan import Plan, StagePrediction
from ...profiles.units import format_bytes, format_seconds
from ..errors import printable
from .layout import counted, fitted, fixed, words
from .plan import bare_rate, gap
from .stages import device_count, on_devices


def comparison(
    plans: Mapping[str, Plan], failed: Mapping[str, str], points: Sequence[ParetoPoint], width: int
) -> Group:
    """Table of each system's best plan, and why others have none.

    Args:
        points: of the Pareto front; systems whose best plan is on it are marked.
    """
    found = list(plans.values())
    stages = [plan.predicted.stages for plan in found]
    periods = [plan.predicted.period_s for plan in found]
    devices = [[device.predicted for device in on_devices(plan)] for plan in found]
    memory = [max(device.memory_bytes for device in each) for each in devices]
    apart = [max(stage.version_difference for stage in each) for each in stages]
    marks = [
        Text("" if beaten(prices, (point.prices for point in points)) else "●", style="green")
        for prices in zip(periods, memory, apart, strict=True)
    ]
    columns = [
        fixed("", marks, left=True),
        fixed("S", [str(len(plan.stages)) for plan in found]),
        fixed("devices", [str(device_count(plan.stages)) for plan in found]),
        fixed("N", [str(plan.micro_batches) for plan in found]),
        fixed("period", marked_least(periods, format_seconds)),
        fixed("samples/s", [bare_rate(plan.predicted.samples_per_s) for plan in found]),
        fixed("memory", marked_least(memory, format_bytes)),
        fixed("ver", marked_least([_most(each, "versions_held") for each in stages], _whole)),
        fixed("d", marked_least(apart, _whole)),
        fixed("v", [_or_dash(plan.predicted.sequence_distance) for plan in found]),
        fixed("idle", [f"{min(device.idle_share for device in each):.0%}" for each in devices]),
        fixed("gap", [gap(plan) for plan in found]),
    ]
    table = fitted("the best plan of each system", words("system", plans, 12), columns, width)
    note = Text(
        "●: on the Pareto front of period, memory and d. *: the best. S: stages. N: micro-batches. "
        "memory, ver, d: of the stage with most. v: mini-batches from one to the next of the same "
        "sequence of updates. idle: of the busiest stage.",
        style="dim",
    )
    return Group(table, note, *_why(failed))


def _why(failed: Mapping[str, str]) -> list[Text]:
    """Reasons; systems that fail for the same one share a line."""
    systems: dict[str, list[str]] = {}
    for name, why in failed.items():
        systems.setdefault(why, []).append(name)
    return [
        Text(f"{', '.join(names)}: {printable(why)}", style="dim") for why, names in systems.items()
    ]


def pareto_table(points: Iterable[ParetoPoint], width: int) -> Group:
    """Table of the plans that none beats in period, memory and version difference at once."""
    shown = list(points)
    found = [point.evaluation for point in shown]
    columns = [
        fixed("period", [format_seconds(point.period_s) for point in shown]),
        fixed("memory", [format_bytes(point.memory_bytes) for point in shown]),
        fixed("d", [str(point.version_difference) for point in shown]),
        fixed("v", [_or_dash(each.prediction.sequence_distance) for each in found]),
        fixed("S", [str(len(each.stages)) for each in found]),
        fixed("devices", [str(device_count(each.stages)) for each in found]),
        fixed("N", [str(each.micro_batches) for each in found]),
        fixed("L", [limits_text([stage.in_flight for stage in each.stages]) for each in found]),
    ]
    systems = sorted({point.variant for point in shown})
    title = (
        "Pareto front of period, memory per device and version difference, of all plans seen: "
        f"{counted(len(shown), 'plan')} of {counted(len(systems), 'system')}"
    )
    return fitted(title, words("system", [point.variant for point in shown], 12), columns, width)


def marked_least(values: Sequence[float], text: Callable[[float], str]) -> list[Text]:
    """Figures, the least of them with a star where they aren't all the same."""
    shown = [text(value) for value in values]
    least = text(min(values))
    if len(set(shown)) == 1:
        return [Text(word) for word in shown]
    return [
        Text(f"{word} *", style="bold green") if word == least else Text(f"{word}  ")
        for word in shown
    ]


def _most(stages: Sequence[StagePrediction], field: str) -> int:
    return max(int(getattr(stage, field)) for stage in stages)


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)


def _whole(value: float) -> str:
    return f"{value:.0f}"


def limits_text(limits: Sequence[int]) -> str:
    """In-flight limits of a plan's stages."""
    if len(limits) <= 6:
        return " ".join(map(str, limits))
    return f"{limits[0]} … {limits[-1]}"
