"""tp-plan: solve, show and check plans."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..planner.plan import read_plan
from ..planner.recordings.predicted import predicted
from ..planner.search.answer.recheck import recheck
from ..profiles.errors import UserError
from ..profiles.files import Kind, check_output, check_outputs, read_file, write_file
from ..profiles.profile import Profile, check_profile
from .errors import errors_as_lines, output, print_json
from .options import CONTEXT, common_options, plugin_option, version_option
from .options.command import CommandsAtHand, command, examples, group, refuse
from .options.values import FileName, Whole
from .pictures.chrome_trace import trace_option, write_trace
from .pictures.html.page import html_option, plans_report
from .pictures.svg.options import Figures, figure_options, write_plan_figures
from .pictures.timetable import timeline, timeline_json
from .plan_commands.compare import compare
from .plan_commands.simulate import simulate_plan
from .plan_commands.solve import solve
from .tables.plan import assumed, few_stages, print_plan, warn_if_edited

if TYPE_CHECKING:
    from typing_extensions import Unpack


@click.group(
    "plan",
    cls=CommandsAtHand,
    context_settings=CONTEXT,
    epilog=examples(
        "tp-plan solve profile.json --devices 4 -o plan.json",
        "tp-plan solve profile.json --variant all -o plan.json",
        "tp-plan show plan.json --timeline",
    ),
)
@plugin_option
@version_option
def main() -> None:
    """Decide how to cut a profiled model into pipeline stages."""


main.add_command(solve)
main.add_command(compare)
main.add_command(simulate_plan)


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
@figure_options
@group("Pages and traces", html_option, trace_option)
@plugin_option
@common_options
@errors_as_lines
def show(
    plan_path: str,
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
    plan = read_plan(plan_path)
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
        warn_if_edited(plan, plan_path)
        for picture in drawn:
            console.print(picture)
        for path in written:
            console.print(f"wrote {path}")


@command(
    "tp-plan check plan.json --profile profile.json",
    "tp-plan check plan.json --profile profile.json -o plan.json",
)
@click.argument("plan_path", type=FileName(), metavar="PLAN")
@click.option(
    "--profile",
    "profile_path",
    type=FileName(),
    required=True,
    metavar="PROFILE",
    help="What the plan was made from.",
)
@click.option(
    "-o",
    "--output",
    "path",
    type=FileName(),
    help="Write the plan with its predictions made anew.",
)
@plugin_option
@common_options
@errors_as_lines
def check(
    plan_path: str,
    profile_path: str,
    path: str | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Recompute an edited PLAN's edges, period and memory from PROFILE; say what changed.

    Ends with code 2 when the plan breaks a rule or a memory limit.
    """
    if path:
        check_output(path, Kind.PLAN)
    plan = read_plan(plan_path)
    profile = check_profile(read_file(profile_path, Profile), profile_path)
    found = recheck(plan, profile, plan_path)
    if path:
        write_file(path, found.plan)
    if as_json:
        print_json(found.plan)
    elif not quiet:
        print_plan(found.plan, 0, every=verbose)
        for note in (assumed(profile, found.plan.variant), few_stages(profile, found.plan)):
            if note:
                output().print(note)
        console = output()
        for line in found.changes:
            console.print(f"changed: {line}")
        if not found.changes:
            console.print("the plan is what its profile says")
        if path:
            console.print(f"wrote {path}")
    if found.over:
        raise UserError(f"{plan_path}: {found.over}")


main.add_command(show)
main.add_command(check)


if __name__ == "__main__":
    main()
