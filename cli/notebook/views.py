"""How profiles, plans and runs show themselves: in a notebook, on a terminal, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...planner.plan import Plan
from ...profiles.errors import ScheduleError, UserError
from ...profiles.profile import Profile
from ...profiles.units import format_bytes, format_seconds
from ...runtime.records.run import Run
from ..errors import output
from ..pictures.svg.frame import FigureSettings
from ..pictures.svg.options import plans_svg
from ..tables.layout import counted, devices_text, first_to_last
from ..tables.names import numbered
from ..tables.plan import print_plan, rate
from ..tables.plans import IN_ROWS, figure_text
from ..tables.profile import print_profile
from .runs import run_sheet, runs_sheet, show_run
from .sheet import Sheet

# What `profiles.files.Views` asks for -----------------------------------------------------------


def html(shown: Any) -> str:
    """As a notebook shows it."""
    if isinstance(shown, Profile):
        return _profile_sheet(shown)._repr_html_()
    if isinstance(shown, Plan):
        return _plan_sheet(shown)._repr_html_()
    return run_sheet(shown)._repr_html_()


def show(shown: Any) -> None:
    """Print it, as the commands do."""
    if isinstance(shown, Profile):
        print_profile(output(), shown, verbose=False)
    elif isinstance(shown, Plan):
        print_plan(shown, 16)
    else:
        show_run(shown)


def compare(shown: Sequence[Any]) -> Sheet:
    """Side by side. Raises UserError for things of different kinds."""
    for kind, sheet in ((Profile, _profiles_sheet), (Plan, _plans_sheet), (Run, runs_sheet)):
        if all(isinstance(each, kind) for each in shown):
            return sheet(shown)
    kinds = ", ".join(dict.fromkeys(type(each).__name__ for each in shown))
    raise UserError(f"compare: give profiles, plans or runs alone, not {kinds}")


# Profiles ---------------------------------------------------------------------------------------


def _profile_sheet(profile: Profile) -> Sheet:
    size, whole = profile.micro_batch_sizes[-1], profile.whole_model[-1]
    rows = []
    for layer in profile.layers:
        found = layer.measurements[-1]
        times = format_seconds(found.forward_s), format_seconds(found.backward_s)
        cost = format_bytes(layer.parameter_bytes), *times, format_bytes(found.saved_bytes)
        rows.append((layer.name, layer.kind, *cost))
    total = format_bytes(sum(layer.parameter_bytes for layer in profile.layers))
    frozen = sum(layer.frozen_bytes or 0 for layer in profile.layers)
    more = f" that are trained, {format_bytes(frozen)} that are frozen" if frozen else ""
    times = format_seconds(whole.forward_s), format_seconds(whole.backward_s)
    return Sheet(
        f"{profile.target}: {counted(len(profile.layers), 'layer')}",
        ("layer", "kind", "parameters", "forward", "backward", "saved"),
        tuple(rows),
        words=2,
        facts=(
            f"on {profile.device}, micro-batch of {size}; the whole model: {total} of "
            f"parameters{more}, forward {times[0]}, backward {times[1]}",
        ),
    )


def _profiles_sheet(profiles: Sequence[Profile]) -> Sheet:
    """Times of the layers that have the same names; of each the largest micro-batch."""
    each = [
        {layer.name: _passes_s(layer.measurements[-1]) for layer in profile.layers}
        for profile in profiles
    ]
    names = list(dict.fromkeys(name for found in each for name in found))
    whole = [_passes_s(profile.whole_model[-1]) for profile in profiles]
    rows = [(name, *_times([found.get(name) for found in each])) for name in names]
    titles = [f"{p.target} on {p.device}, {p.micro_batch_sizes[-1]}" for p in profiles]
    return Sheet(
        "forward and backward of each layer",
        ("layer", *numbered(titles)),
        (("whole model", *_times(whole)), *rows),
    )


def _passes_s(found: Any) -> float:
    return float(found.forward_s + found.backward_s)


def _times(seconds: Sequence[float | None]) -> list[str]:
    """The first as it is, the others with how many times as long they take."""
    first, found = seconds[0], []
    for k, each in enumerate(seconds):
        ratio = f" ({each / first:.2f} ×)" if k and each is not None and first else ""
        found.append("-" if each is None else f"{format_seconds(each)}{ratio}")
    return found


# Plans ------------------------------------------------------------------------------------------


def _plan_sheet(plan: Plan) -> Sheet:
    rows = []
    for s, (stage, found) in enumerate(zip(plan.stages, plan.predicted.stages, strict=True)):
        devices = devices_text(plan, [s])
        times = format_seconds(found.forward_s), format_seconds(found.backward_s)
        held = str(found.version_difference), str(found.versions_held)
        memory = format_bytes(found.memory_bytes)
        layers = first_to_last(stage.nodes, 36)
        rows.append((str(s), layers, devices, *times, f"{found.idle_share:.0%}", *held, memory))
    return Sheet(
        f"{plan.variant}: {counted(len(plan.stages), 'stage')} on "
        f"{counted(IN_ROWS['devices'].value(plan), 'device')}, mini-batch of "
        f"{plan.mini_batch} in {counted(plan.micro_batches, 'micro-batch')}",
        ("stage", "layers", "device", "forward", "backward", "idle", "d", "versions", "memory"),
        tuple(rows),
        words=3,
        facts=(f"period {format_seconds(plan.predicted.period_s)}: {rate(plan)}",),
        figure=_plan_figure([("", plan)]),
    )


def _plans_sheet(plans: Sequence[Plan]) -> Sheet:
    names = numbered([plan.variant for plan in plans])
    keys = (
        *("stages", "devices", "micro_batches", "period_s", "samples_per_s", "memory_bytes"),
        *("versions_held", "version_difference", "least_idle_share", "gap"),
    )
    found = [IN_ROWS[key] for key in keys]
    return Sheet(
        f"{len(plans)} plans",
        ("system", *(figure.name for figure in found)),
        tuple(
            (name, *(figure_text(figure, plan) for figure in found))
            for name, plan in zip(names, plans, strict=True)
        ),
        facts=("most: of the stage or device with most; idle: of the busiest",),
        figure=_plan_figure(list(zip(names, plans, strict=True))),
    )


def _plan_figure(plans: Sequence[tuple[str, Plan]]) -> str:
    """As `plans_svg`; empty for a schedule that can't be drawn."""
    try:
        return plans_svg(plans, FigureSettings())
    except ScheduleError:
        return ""
