"""Options of figures, --svg and those that go with it, and the files that they write."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import click

from ....planner.plan import Plan
from ....planner.recordings.predicted import default_mini_batches, predicted
from ....planner.recordings.recording import Recording
from ....profiles.errors import UserError
from ....profiles.files import MAX_COUNT, PDF_MARK, write_bytes
from ...options.command import group, refuse
from ...options.values import FigureName, Whole
from ..curves import CurveTarget, RunCurve, as_csv, is_table
from ..timetable import refuse_too_many
from .curves import curves_svg
from .frame import FigureSettings, window_of
from .memory import memory_svg
from .svg import POINTS_PER_MM
from .timeline import timelines_svg

if TYPE_CHECKING:
    from typing_extensions import NotRequired

_UNITS = {"mm": POINTS_PER_MM, "cm": 10 * POINTS_PER_MM, "pt": 1.0, "in": 72.0}

_SIZE = re.compile(r'width="[^"]*" height="[^"]*" viewBox="0 0 ([\d.]+) ([\d.]+)"')

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


_marks = (
    click.option(
        "--svg-messages", is_flag=True, help="With --svg: draw what stages send as lines."
    ),
    click.option(
        "--svg-versions",
        is_flag=True,
        help="With --svg: say which weight version each operation had.",
    ),
)

figure_options = group(
    "Figures",
    click.option(
        "--svg",
        type=FigureName(),
        help="Write the timeline as a figure: SVG, or PDF where FILE ends in .pdf.",
    ),
    click.option(
        "--svg-memory",
        type=FigureName(),
        help="Write memory over time, on the same scale, as a figure (SVG or PDF).",
    ),
    width_option,
    *_marks,
)
"""--svg and those that go with it; they come as `Figures`."""

stacked_options = group(
    "Figures",
    click.option(
        "--svg",
        type=FigureName(),
        help="Write the timelines of all plans, one above the other on one axis, as a figure: "
        "SVG, or PDF where FILE ends in .pdf.",
    ),
    width_option,
    *_marks,
    click.option(
        "--from-mini-batch", "first", type=Whole(0), help="With --svg: begin there; 0 is the first."
    ),
    click.option(
        "--mini-batches",
        type=Whole(),
        help="With --svg: how many to draw.  [default: the first plan's filling and two more]",
    ),
)
"""The same of several plans."""


class Figures(TypedDict):
    """Values of `figure_options` and `stacked_options`, but for the mini-batches."""

    svg: str | None
    svg_width: float
    svg_messages: bool
    svg_versions: bool
    svg_memory: NotRequired[str | None]


def write_plan_figures(
    plans: Mapping[str, Plan], first: int | None, mini_batches: int | None, figures: Figures
) -> list[str]:
    """Write the figures of plans that are asked for, each below its words; of one alone where
    memory is asked for. Returns the files' names.

    Raises FileError where a file can't be written, UserError for options that nothing comes of and
    for too many mini-batches, ScheduleError as `recording.predicted`.
    """
    svg, svg_memory = figures["svg"], figures.get("svg_memory")
    if not svg:
        refuse(("svg_messages", "svg_versions"), "goes with --svg FILE")
    if not svg and not svg_memory:
        refuse(("svg_width",), "goes with a figure, as of --svg FILE")
        return []
    for plan in plans.values() if first or mini_batches else ():
        refuse_too_many(
            plan, (first or 0) + (mini_batches or 1), "--svg" if svg else "--svg-memory"
        )
    settings = FigureSettings(
        width=figures["svg_width"],
        first=first or 0,
        mini_batches=mini_batches,
        messages=figures["svg_messages"],
        versions=figures["svg_versions"],
    )
    texts = []
    if svg:
        texts.append((svg, plans_svg(list(plans.items()), settings)))
    if svg_memory:
        (plan,) = plans.values()
        recording = recorded(plan, settings)
        if not recording.memory:
            raise UserError(
                "--svg-memory: the plan doesn't say what its stages hold over time; solve again, "
                "or write it anew with tp-plan check PLAN --profile PROFILE -o PLAN"
            )
        texts.append((svg_memory, memory_svg(recording, limits(plan, recording), settings)))
    for path, text in texts:
        write_figure(path, text)
    return [path for path, _ in texts]


def plans_svg(plans: Sequence[tuple[str, Plan]], settings: FigureSettings) -> str:
    """What plans predict, one above the other on one axis, each below its words, as SVG text.
    Raises ScheduleError as `recording.predicted`."""
    first = recorded(plans[0][1], settings)
    shown = window_of(first, settings)
    # The others' recordings have to be as long as what is drawn of the first.
    wanted = replace(settings, first=shown.first, mini_batches=shown.last - shown.first + 1)
    others = [recorded(plan, wanted) for _, plan in plans[1:]]
    names = [name for name, _ in plans]
    return timelines_svg(list(zip(names, [first, *others], strict=True)), wanted)


def write_run_figure(recordings: Sequence[tuple[str, Recording]], svg: str, width: float) -> None:
    """Write timelines one above the other, all that the first one has recorded, `width` points
    wide: of a run what was measured, then what was predicted; of several what was measured. Raises
    FileError."""
    settings = FigureSettings(width=width, mini_batches=MAX_COUNT)
    write_figure(svg, timelines_svg(recordings, settings))


def write_curves(
    path: str,
    curves: Sequence[RunCurve],
    axes: Sequence[str],
    width: float,
    target: CurveTarget | None = None,
) -> None:
    """Write curves of runs as what the file's name says: a figure or a table.

    Raises FileError, and UserError where there is nothing to draw yet.
    """
    if not curves:
        raise UserError(f"--curves {path}: no mini-batch is done yet")
    if is_table(path):
        write_bytes(path, as_csv(curves).encode())
    else:
        write_figure(path, curves_svg(curves, axes, width, target))


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


def write_figure(path: str, svg: str) -> None:
    """Write a figure as what its name says: SVG, or PDF, where lines and text stay what they are
    and fonts are within. The same drawing gives the same bytes on the same machine.

    Raises FileError, and UserError where PDF takes what isn't installed.
    """
    if Path(path).suffix.lower() != ".pdf":
        write_bytes(path, svg.encode())
        return
    try:
        import vl_convert
    except ImportError:
        raise UserError(
            f"{path}: PDF takes the package vl-convert-python: in the checkout, "
            "pip install -e '.[pdf]'; or let the name end in .svg"
        ) from None
    # It makes a point of each pixel, and a drawing's own unit is the point.
    in_points = _SIZE.sub(r'width="\1" height="\2" viewBox="0 0 \1 \2"', svg, count=1)
    pdf: bytes = vl_convert.svg_to_pdf(in_points)
    # What stands behind the end is a comment; by it the file is known as ours.
    write_bytes(path, pdf.rstrip() + b"\n" + PDF_MARK + b"\n")
