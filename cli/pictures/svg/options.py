"""Options of figures, --svg and those that go with it, and the files that they write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

import click

from ....planner.plan import Plan
from ....planner.recordings.predicted import default_mini_batches, predicted
from ....planner.recordings.recording import Recording
from ....profiles.errors import UserError
from ....profiles.files import MAX_COUNT, write_bytes
from ...options.command import group
from ...options.values import FileName
from .frame import FigureSettings
from .memory import memory_svg
from .svg import POINTS_PER_MM
from .timeline import timeline_svg, timelines_svg

_UNITS = {"mm": POINTS_PER_MM, "cm": 10 * POINTS_PER_MM, "pt": 1.0, "in": 72.0}

_NARROWEST, _WIDEST = 60 * POINTS_PER_MM, 2000 * POINTS_PER_MM


def width_in_points(text: str) -> float:
    """``"85"`` or ``"85mm"``, ``"241pt"``, ``"3.3in"`` → points. Raises click.BadParameter."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(mm|cm|pt|in)?\s*", text)
    if not match:
        raise click.BadParameter(f"{text!r}: write it like 85mm, 241pt or 3.3in")
    points = float(match[1]) * _UNITS[match[2] or "mm"]
    if not _NARROWEST <= points <= _WIDEST:
        raise click.BadParameter(f"{text!r}: from 60mm to 2000mm")
    return points


width_option = click.option(
    "--svg-width",
    callback=lambda context, option, text: width_in_points(text),
    default="178mm",
    metavar="WIDTH",
    help="Of figures: 85mm for a column, 178mm for a page of two; mm, cm, pt or in.",
)


figure_options = group(
    "Figures",
    click.option("--svg", type=FileName(), help="Write the timeline as a figure (SVG)."),
    click.option(
        "--svg-memory",
        type=FileName(),
        help="Write memory over time, on the same scale, as a figure (SVG).",
    ),
    width_option,
    click.option(
        "--svg-messages", is_flag=True, help="With --svg: draw what stages send as lines."
    ),
    click.option(
        "--svg-versions",
        is_flag=True,
        help="With --svg: say which weight version each operation had.",
    ),
)
"""--svg and those that go with it; they come as `Figures`."""


class Figures(TypedDict):
    """Values of `figure_options`."""

    svg: str | None
    svg_memory: str | None
    svg_width: float
    svg_messages: bool
    svg_versions: bool


def settings_of(first: int | None, mini_batches: int | None, figures: Figures) -> FigureSettings:
    """Settings from the options of a command."""
    return FigureSettings(
        width=figures["svg_width"],
        first=first or 0,
        mini_batches=mini_batches,
        messages=figures["svg_messages"],
        versions=figures["svg_versions"],
    )


def write_plan_figures(
    plan: Plan, first: int | None, mini_batches: int | None, figures: Figures
) -> list[str]:
    """Write the figures of a plan that are asked for. Returns the files' names.

    Raises FileError where a file can't be written, UserError for options that nothing comes of,
    ScheduleError as `recording.predicted`.
    """
    svg, svg_memory = figures["svg"], figures["svg_memory"]
    if not svg and (figures["svg_messages"] or figures["svg_versions"]):
        raise UserError("--svg-messages, --svg-versions: go with --svg FILE")
    if not svg and not svg_memory:
        return []
    settings = settings_of(first, mini_batches, figures)
    recording = recorded(plan, settings)
    if svg_memory and not recording.memory:
        raise UserError(
            "--svg-memory: the plan doesn't say what its stages hold over time; solve again, or "
            "write it anew with tp-plan check PLAN --profile PROFILE -o PLAN"
        )
    texts = []
    if svg:
        texts.append((svg, timeline_svg(recording, settings)))
    if svg_memory:
        texts.append((svg_memory, memory_svg(recording, limits(plan, recording), settings)))
    for path, text in texts:
        write_bytes(path, text.encode())
    return [path for path, _ in texts]


def write_run_figure(
    recordings: Sequence[tuple[str, Recording]], svg: str, width: float | None = None
) -> None:
    """Write timelines one above the other, all that the first one has recorded.

    Args:
        recordings: each with its name: what was measured, then what was predicted.
        width: in points; None: a page's.

    Raises FileError, and UserError where there is nothing to draw.
    """
    if not recordings:
        raise UserError("--svg: the run has recorded no operations; see tp-run --record")
    settings = FigureSettings(mini_batches=MAX_COUNT)
    if width is not None:
        settings = replace(settings, width=width)
    write_bytes(svg, timelines_svg(recordings, settings).encode())


def recorded(plan: Plan, settings: FigureSettings) -> Recording:
    """What the plan predicts, with so many mini-batches after those drawn that none is alone."""
    # What is in flight at once is at most 1 + 2·D mini-batches.
    after = 2 * len(plan.stages)
    default = default_mini_batches(plan)
    if settings.mini_batches is None and settings.first + after < default:
        return predicted(plan)
    wanted = settings.mini_batches or min(after + 1, default)
    return predicted(plan, settings.first + wanted + min(after, default))


def limits(plan: Plan, recording: Recording) -> list[int | None]:
    """Each lane's limit: its device's memory."""
    return [
        plan.cluster.devices[plan.stages[lane.stages[0]].devices[lane.replica]].memory_bytes
        for lane in recording.lanes
    ]
