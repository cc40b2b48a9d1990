"""Tables of tp-plan solve --variant all: each system's best plan, and the Pareto front."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.console import Group
from rich.text import Text

from ...planner.plan import Plan, StagePrediction
from ...planner.study.choose import StudyFigures, TargetPoint
from ...planner.study.pareto import ParetoPoint, beaten
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
        fixed("L", [_limits([stage.in_flight for stage in each.stages]) for each in found]),
    ]
    systems = sorted({point.variant for point in shown})
    title = (
        "Pareto front of period, memory per device and version difference, of all plans seen: "
        f"{counted(len(shown), 'plan')} of {counted(len(systems), 'system')}"
    )
    return fitted(title, words("system", [point.variant for point in shown], 12), columns, width)


def target_table(points: Sequence[TargetPoint], width: int) -> Group:
    """Table of the plans that none beats in time to target and memory per device."""
    shown = [each for each in points if each.on_front]
    found = [each.point.evaluation for each in shown]
    columns = [
        fixed(
            "time to target",
            [
                f"{'' if each.foretold.exact else '≈ '}{format_seconds(each.foretold.time_s.mean)}"
                for each in shown
            ],
        ),
        fixed("overhead", [_overhead(each) for each in shown]),
        fixed("period", [format_seconds(each.point.period_s) for each in shown]),
        fixed("memory", [format_bytes(each.point.memory_bytes) for each in shown]),
        fixed("d", [str(each.point.version_difference) for each in shown]),
        fixed("S", [str(len(each.stages)) for each in found]),
        fixed("devices", [str(device_count(each.stages)) for each in found]),
        fixed("N", [str(each.micro_batches) for each in found]),
        fixed("L", [_limits([stage.in_flight for stage in each.stages]) for each in found]),
    ]
    title = (
        "Pareto front of time to target and memory per device, of all plans seen that the study "
        f"has a figure for: {counted(len(shown), 'plan')}"
    )
    names = [each.point.variant for each in shown]
    return fitted(title, words("system", names, 12), columns, width)


def target_lines(
    points: Sequence[TargetPoint], plans: Mapping[str, Plan], figures: StudyFigures
) -> list[Text]:
    """Which plan is best by a study, and what the study says nothing of."""
    lines = []
    if points:
        best = points[0]
        about = "" if best.foretold.exact else ", about: study this very plan"
        lines.append(
            Text(
                f"best by time to target: {best.point.variant}, "
                f"{format_seconds(best.foretold.time_s.mean)}{about}",
                style="bold",
            )
        )
    missing = without_figure(points, plans)
    late = [name for name in missing if figures.trained(name)]
    other = [name for name in missing if name not in late]
    if late:
        lines.append(
            Text(f"don't reach the target in the study, or with other stages: {', '.join(late)}")
        )
    if other:
        lines.append(Text(f"the study has no figure for: {', '.join(other)}"))
    if any(each.on_front and not each.foretold.exact for each in points):
        lines.append(
            Text(
                "≈: by the overhead of the nearest plan that was studied, of the same system and "
                "stages",
                style="dim",
            )
        )
    return lines


def without_figure(points: Sequence[TargetPoint], plans: Mapping[str, Plan]) -> list[str]:
    """Systems with plans that the study has no time to target for."""
    known = {each.point.variant for each in points}
    return [name for name in plans if name not in known]


def _overhead(each: TargetPoint) -> str:
    spread = each.foretold.overhead
    return "-" if spread is None else f"{spread.mean:.2f}"


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


def _limits(limits: list[int]) -> str:
    if len(limits) <= 6:
        return " ".join(map(str, limits))
    return f"{limits[0]} … {limits[-1]}"
