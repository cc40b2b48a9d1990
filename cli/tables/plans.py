"""Figures of plans, and the tables of several plans that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.text import Text

from ...planner.comparison.pareto import ParetoPoint, beaten
from ...planner.plan import Plan
from ...planner.schedules.schedules import PAPER_STALENESS, limit_ranges
from ...profiles.units import format_bytes, format_seconds, short_bytes
from ..errors import printable
from .layout import Column, counted, fitted, fixed, words
from .plan import bare_rate, gap
from .stages import memory_limit, on_devices, placement_name

# Figures of a plan as a whole ---------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A figure of a plan as a whole.

    Attributes:
        value: what is compared; None: the plan has none.
        text: how it is shown.
        better: -1 where the least is best, 1 where the most is; 0: neither.
        key: its name in JSON.
    """

    name: str
    key: str
    value: Callable[[Plan], Any]
    text: Callable[[Any], str] = str
    better: int = 0


def _idle(plan: Plan) -> list[float]:
    return [device.predicted.idle_share for device in on_devices(plan)]


def _most(field: str) -> Callable[[Plan], int]:
    return lambda plan: max(int(getattr(stage, field)) for stage in plan.predicted.stages)


def yes(value: object) -> str:
    """Of what holds or doesn't."""
    return "yes" if value else "no"


def share_of_limit(plan: Plan) -> float | None:
    """The largest share of its limit that a device needs."""
    shares = [
        device.predicted.memory_bytes / limit
        for device in on_devices(plan)
        if (limit := memory_limit(plan, device.stages[0]))
    ]
    return max(shares, default=None)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share < 100 else f"{share * 100:.3g}%"


FIGURES: tuple[Figure, ...] = (
    Figure("system", "variant", lambda p: p.variant),
    Figure("mini-batch", "mini_batch", lambda p: p.mini_batch),
    Figure("micro-batches", "micro_batches", lambda p: p.micro_batches),
    Figure("update every", "update_every", lambda p: p.update_every),
    Figure("stages", "stages", lambda p: len(p.stages)),
    Figure("devices", "devices", lambda p: p.workers),
    Figure("placement", "placement", placement_name),
    Figure("recomputed", "recomputed_stages", lambda p: sum(bool(s.recompute) for s in p.stages)),
    Figure("period", "period_s", lambda p: p.predicted.period_s, format_seconds, -1),
    Figure("samples/s", "samples_per_s", lambda p: p.predicted.samples_per_s, bare_rate, 1),
    Figure("speed-up", "speedup", lambda p: p.predicted.speedup, lambda v: f"{v:.2f} ×", 1),
    Figure("most memory", "memory_bytes", lambda p: p.predicted.most_bytes, short_bytes, -1),
    Figure("most of a limit", "memory_share", share_of_limit, _percent, -1),
    Figure("most versions", "versions_held", _most("versions_held"), str, -1),
    Figure("most d", "version_difference", _most("version_difference"), str, -1),
    Figure("delay", "delay", lambda p: p.predicted.delay, str, -1),
    Figure("v", "sequence_distance", lambda p: p.predicted.sequence_distance, str, -1),
    Figure("mean idle", "idle_share", lambda p: fmean(_idle(p)), _percent, -1),
    Figure("solver", "method", lambda p: p.solver.method),
    Figure(
        "bound", "bound_s", lambda p: p.solver.bound_s, lambda v: format_seconds(v) if v else "-"
    ),
    Figure("gap", "gap", gap),
    Figure("proven", "optimal", lambda p: p.solver.optimal, yes),
)
"""Those that plans are compared by."""


def figures_of(plans: Iterable[Plan]) -> list[Figure]:
    """Those that tables show: of straight plans, their placement says nothing."""
    placed = any(plan.placement for plan in plans)
    return [figure for figure in FIGURES if placed or figure.key != "placement"]


def figure_text(figure: Figure, plan: Plan) -> str:
    """The figure as text; ``-`` where the plan has none."""
    value = figure.value(plan)
    return "-" if value is None else figure.text(value)


def best(figure: Figure, plans: Sequence[Plan]) -> set[int]:
    """Positions of the plans that are best in it; none where all are, or nothing is."""
    values = [figure.value(plan) for plan in plans]
    known = [value for value in values if value is not None]
    if not figure.better or len(known) < 2:
        return set()
    top = (max if figure.better > 0 else min)(known)
    # What reads the same is the same.
    found = {
        k for k, v in enumerate(values) if v is not None and figure.text(v) == figure.text(top)
    }
    return found if len(found) < len(values) else set()


def marked(text: str, is_best: bool) -> Text:
    """Figures stay under each other, starred or not."""
    return Text(f"{text} *", style="bold green") if is_best else Text(f"{text}  ")


# Tables with a row for each plan ------------------------------------------------------------------

IN_ROWS = {
    figure.key: figure
    for figure in (
        *FIGURES,
        Figure("L", "in_flight", lambda p: max(stage.in_flight for stage in p.stages)),
        Figure("idle", "least_idle_share", lambda p: min(_idle(p)), _percent),
    )
}
"""Figures that rows of plans may have, by their keys."""

_SHORT = {
    "stages": "S",
    "micro_batches": "N",
    "memory_bytes": "memory",
    "versions_held": "ver",
    "version_difference": "d",
}
"""What columns are called, where that isn't the figure's name."""


def plan_columns(
    plans: Sequence[Plan], keys: Iterable[str], starred: Collection[str] = ()
) -> list[Column]:
    """Columns of figures, by their keys; of those that are starred, the best are marked."""
    columns = []
    for figure in map(IN_ROWS.__getitem__, keys):
        texts = [figure_text(figure, plan) for plan in plans]
        tops = best(figure, plans) if figure.key in starred else set()
        cells = [marked(text, k in tops) for k, text in enumerate(texts)]
        columns.append(fixed(_SHORT.get(figure.key, figure.name), cells if tops else texts))
    return columns


def _ratios(plans: Sequence[Plan], whole: float) -> Column:
    """Rates over another one. With times of 0 alone there is none."""
    rates = [plan.predicted.samples_per_s for plan in plans]
    return fixed("ratio", [f"{rate / whole:.2f}" if whole else "-" for rate in rates])


def front_table(plans: Sequence[Plan], paths: Sequence[str], width: int) -> Group:
    """Of tp-plan solve --front: periods, and how late gradients are for them; with the plans'
    files, each system's the least late first."""
    fastest = max(plan.predicted.samples_per_s for plan in plans)
    columns = [
        *plan_columns(plans, ("delay", "period_s", "samples_per_s")),
        _ratios(plans, fastest),
        *plan_columns(plans, ("stages", "devices", "micro_batches", "in_flight")),
        *plan_columns(plans, ("memory_bytes", "gap")),
    ]
    systems = dict.fromkeys(plan.variant for plan in plans)
    title = f"front of period and delay, {', '.join(systems)}"
    note = (
        "delay: the largest of a stage, in updates. ratio: samples/s over the most. S: stages. N: "
        "micro-batches. L: most mini-batches in flight. memory: of the device with most. gap: to "
        "the best plan of the system with no larger delay."
    )
    return Group(fitted(title, words("plan", list(paths), 12), columns, width), _dim(note))


def what_if_table(
    asked: Plan, plans: Mapping[str, Plan], failed: Mapping[str, str], width: int
) -> Group:
    """Of tp-plan solve --what-if: the plan asked for, the best ones after changes of devices and
    links, by the change as it was given, and why there is none after others."""
    rows = {"as it is": asked, **plans}
    found = list(rows.values())
    columns = [
        *plan_columns(found, ("period_s", "samples_per_s")),
        _ratios(found, asked.predicted.samples_per_s),
        *plan_columns(found, ("stages", "devices", "micro_batches", "memory_bytes", "gap")),
    ]
    note = (
        "ratio: samples/s over those of the plan as it is. S: stages. N: micro-batches. memory: of "
        "the device with most."
    )
    why = [f"{change}: {printable(each)}" for change, each in failed.items()]
    table = fitted("what if", words("change", list(rows), 12), columns, width)
    return Group(table, *map(_dim, (note, *why)))


def comparison(
    plans: Mapping[str, Plan], failed: Mapping[str, str], points: Sequence[ParetoPoint], width: int
) -> Group:
    """Of tp-plan solve --variant all: each system's best plan, marked where it is on the Pareto
    front of these points, and why others have none."""
    found = list(plans.values())
    prices = ("period_s", "memory_bytes", "delay")
    own = [tuple(IN_ROWS[key].value(plan) for key in prices) for plan in found]
    on_front = [not beaten(each, (point.prices for point in points)) for each in own]
    columns = [
        fixed("", [Text("●" * each, style="green") for each in on_front], left=True),
        *plan_columns(
            found,
            (
                *("stages", "devices", "micro_batches", "period_s", "samples_per_s"),
                *("memory_bytes", "versions_held", "version_difference", "delay"),
                *("sequence_distance", "least_idle_share", "gap"),
            ),
            starred=(*prices, "versions_held"),
        ),
    ]
    note = (
        "●: on the Pareto front of period, memory and delay. *: the best. S: stages. N: "
        "micro-batches. memory, ver, d, delay: of the stage with most. delay: updates that a "
        "gradient is late by. v: mini-batches from one to the next of the same sequence of "
        "updates. idle: of the busiest stage."
    )
    table = fitted("the best plan of each system", words("system", plans, 12), columns, width)
    return Group(table, _dim(note), *why_none(failed))


def why_none(failed: Mapping[str, str]) -> list[Text]:
    """Why systems have no plan; those that fail for the same reason share a line."""
    systems: dict[str, list[str]] = {}
    for name, why in failed.items():
        systems.setdefault(why, []).append(name)
    return [_dim(f"{', '.join(names)}: {printable(why)}") for why, names in systems.items()]


def periods_alone(plans: Mapping[str, Plan]) -> Text:
    """That plans side by side are compared by periods, and which of them go beyond their papers."""
    beyond = [name for name, plan in plans.items() if _beyond_its_paper(plan)]
    return Text(
        "periods alone are compared: what training needs besides, tp-run study finds and --study "
        "plans by; "
        + (
            f"beyond their papers' limits, and so version differences: {', '.join(beyond)}"
            if beyond
            else "none has more in flight, or larger version differences, than its paper"
        )
    )


def _beyond_its_paper(plan: Plan) -> bool:
    several, stages = bool(plan.placement), len(plan.stages)
    paper = limit_ranges(plan.system, stages, several=several, within=PAPER_STALENESS)
    limits = (stage.in_flight for stage in plan.stages)
    return any(limit > most for limit, (_, most) in zip(limits, paper, strict=True))


def _dim(text: str) -> Text:
    return Text(text, style="dim")


def pareto_table(points: Sequence[ParetoPoint], width: int) -> Group:
    """Of the plans that none beats in period, memory and delay at once: their prices
    and sizes."""
    found = [point.evaluation for point in points]
    distances = [each.prediction.sequence_distance for each in found]
    devices = [{d for stage in each.stages for d in stage.devices} for each in found]
    columns = [
        fixed("period", [format_seconds(point.period_s) for point in points]),
        fixed("memory", [format_bytes(point.memory_bytes) for point in points]),
        fixed("delay", [str(point.delay) for point in points]),
        fixed("v", ["-" if v is None else str(v) for v in distances]),
        fixed("S", [str(len(each.stages)) for each in found]),
        fixed("devices", [str(len(each)) for each in devices]),
        fixed("N", [str(each.micro_batches) for each in found]),
        fixed("L", [_limits([stage.in_flight for stage in each.stages]) for each in found]),
    ]
    systems = [point.variant for point in points]
    title = (
        "Pareto front of period, memory per device and delay, of all plans seen: "
        f"{counted(len(points), 'plan')} of {counted(len(set(systems)), 'system')}"
    )
    return fitted(title, words("system", systems, 12), columns, width)


def _limits(limits: Sequence[int]) -> str:
    return " ".join(map(str, limits)) if len(limits) <= 6 else f"{limits[0]} … {limits[-1]}"
