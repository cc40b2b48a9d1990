"""tp-plan show: a plan's tables, pictures and pages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...planner.plan import read_plan
from ...planner.recordings.predicted import predicted
from ...profiles.errors import UserError
from ...profiles.files import Kind, check_outputs
from ..errors import errors_as_lines, output, print_json
from ..options import common_options, plugin_option
from ..options.command import command, group, refuse
from ..options.values import FileName, Whole
from ..pictures.chrome_trace import trace_option, write_trace
from ..pictures.html.page import html_option, plans_report
from ..pictures.svg.options import Figures, figure_options, write_plan_figures
from ..pictures.timetable import timeline, timeline_json
from ..tables.plan import print_plan, warn_if_edited
from .engines import engine_option, in_run_of, print_elsewhere, receive_option

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...planner.engine_costs import Engine


@command(
    "tp-plan show plan.json",
    "tp-plan show plan.json --timeline --mini-batches 8",
    "tp-plan show plan.json --svg timeline.svg --svg-width 85mm --html plan.html",
)
@click.argument("plan_path", type=FileName(), metavar="PLAN")
@group(
    "The order of operations",
    click.option(
        "--operations",
        "count",
        type=Whole(0, 10_000),
        help="How many operations of each stage's order to print.  "
        "[default: 16, or 0 with --timeline]",
    ),
    click.option(
        "--timeline",
        "with_timeline",
        is_flag=True,
        help="Draw the order over time: how the pipeline fills, and its steady state.",
    ),
    click.option(
        "--from-mini-batch",
        "first",
        type=Whole(0),
        help="With --timeline and figures: begin there; 0 is the first.",
    ),
    click.option(
        "--mini-batches", type=Whole(), help="With --timeline and figures: how many to draw."
    ),
)
@group("In another engine", engine_option, receive_option)
@figure_options
@group("Pages and traces", html_option, trace_option)
@plugin_option
@common_options
@errors_as_lines
def show(
    plan_path: str,
    engine: Engine | None,
    receive: float,
    count: int | None,
    with_timeline: bool,
    first: int | None,
    mini_batches: int | None,
    html: str | None,
    trace_path: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    **figures: Unpack[Figures],
) -> None:
    """Show PLAN: its stages, what they should cost, and the order's first operations."""
    ours = read_plan(plan_path)
    plan = in_run_of(engine, ours, receive)
    check_outputs(
        ("--svg", figures["svg"], Kind.FIGURE),
        ("--svg-memory", figures["svg_memory"], Kind.FIGURE),
        ("--html", html, Kind.PAGE),
        ("--trace", trace_path, Kind.TRACE),
    )
    drawing = with_timeline or figures["svg"] or figures["svg_memory"]
    if not drawing and (first, mini_batches) != (None, None):
        raise UserError("--from-mini-batch, --mini-batches: go with --timeline or --svg")
    if as_json:
        refuse(("count",), "isn't for --json, where --timeline has all operations")
    written = write_plan_figures({"": plan}, first, mini_batches, figures)
    if html:
        plans_report({Path(plan_path).name: plan}, html)
        written = [*written, html]
    if trace_path:
        write_trace(trace_path, [("", predicted(plan))])
        written = [*written, trace_path]
    if as_json:
        found = timeline_json(plan, first, mini_batches) if with_timeline else plan
        print_json(found)
    elif not quiet:
        console = output()
        drawn = []
        if with_timeline:
            drawn.append(timeline(console, plan, first, mini_batches, every=verbose))
        if count is None:
            count = 0 if with_timeline else 16
        print_plan(plan, count, every=verbose)
        print_elsewhere(ours, plan, with_table=False)
        warn_if_edited(ours, plan_path)
        for picture in drawn:
            console.print(picture)
        for path in written:
            console.print(f"wrote {path}")
