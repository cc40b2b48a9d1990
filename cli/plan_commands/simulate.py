"""tp-plan simulate: run a plan's schedule on the clock, and say when each operation runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.text import Text

from ...planner.plan import pipeline_of, read_plan
from ...planner.schedules.schedules import make_schedule
from ...planner.schedules.steady_state import steady_state
from ...planner.simulator.pipeline import Pipeline
from ...planner.simulator.timeline import Timeline, idle_shares, simulate, warm_mini_batches
from ...planner.systems.operations import Schedule, op_text
from ...profiles.errors import UserError
from ...profiles.units import format_seconds
from ..errors import errors_as_lines, output, print_json
from ..options import common_options, plugin_option
from ..options.command import command
from ..options.values import FileName, Whole
from ..tables.layout import devices_text, fitted, fixed
from ..tables.plan import warn_if_edited
from .engines import engine_option, in_run_of, print_elsewhere, receive_option

if TYPE_CHECKING:
    from ...planner.engine_costs import Engine

_MOST_OPERATIONS = 200_000


@command(
    "tp-plan simulate plan.json --mini-batches 12",
    "tp-plan simulate plan.json --json",
    "tp-plan simulate plan.json --engine deepspeed",
    name="simulate",
)
@click.argument("plan_path", type=FileName(), metavar="PLAN")
@click.option(
    "--mini-batches", type=Whole(), help="How many to run.  [default: enough for a steady state]"
)
@engine_option
@receive_option
@plugin_option
@common_options
@errors_as_lines
def simulate_plan(
    plan_path: str,
    mini_batches: int | None,
    engine: Engine | None,
    receive: float,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Simulate PLAN from its own stage times; with --json, every operation with its times."""
    plan = read_plan(plan_path)
    found = in_run_of(engine, plan, receive)
    pipeline = pipeline_of(found)
    count = mini_batches or warm_mini_batches(len(plan.stages), plan.micro_batches)
    if count * len(plan.stages) * (2 * plan.micro_batches + 1) > _MOST_OPERATIONS:
        raise UserError(
            f"--mini-batches {count}: would be more than {_MOST_OPERATIONS:,} operations; "
            "give a smaller number"
        )
    schedule = make_schedule(pipeline, count)
    timeline = simulate(pipeline, schedule)
    period_s = max(steady_state(pipeline).period_s, plan.predicted.loading_s or 0.0)
    if as_json:
        print_json(_json(pipeline, schedule, timeline, period_s))
    elif not quiet:
        devices = [devices_text(plan, [s]) for s in range(len(plan.stages))]
        _print(pipeline, schedule, timeline, period_s, count, devices)
        print_elsewhere(plan, found)
        warn_if_edited(plan, plan_path)


def _json(
    pipeline: Pipeline, schedule: Schedule, timeline: Timeline, period_s: float
) -> dict[str, object]:
    sequences = schedule.on_devices() if pipeline.placement else ()
    return {
        "period_s": period_s,
        "stages": [
            [
                {"operation": op_text(s, event.op), "start_s": event.start_s, "end_s": event.end_s}
                for event in events
            ]
            for s, events in enumerate(timeline.stages)
        ],
        # Where devices have several stages, what each runs after what.
        "devices": [[op_text(s, op) for s, op in ops] for ops in sequences],
    }


def _print(
    pipeline: Pipeline,
    schedule: Schedule,
    timeline: Timeline,
    period_s: float,
    count: int,
    devices: Sequence[str],
) -> None:
    """Print a row for each stage. `devices`: of each; shown where it shares them."""
    idle = idle_shares(pipeline, period_s)
    busy = [sum(event.end_s - event.start_s for event in events) for events in timeline.stages]
    columns = [fixed("device", devices, left=True)] if pipeline.placement else []
    columns += [
        fixed("operations", [str(len(ops)) for ops in schedule]),
        fixed("first start", [format_seconds(events[0].start_s) for events in timeline.stages]),
        fixed("last end", [format_seconds(max(e.end_s for e in ev)) for ev in timeline.stages]),
        fixed("busy", map(format_seconds, busy)),
        fixed("idle, steady", [f"{share:.0%}" for share in idle]),
    ]
    title = f"{count} mini-batches from the first forward to the last update"
    stages = fixed("stage", [str(s) for s in range(pipeline.stages)], left=True)
    console = output()
    console.print(fitted(title, stages, columns, console.width))
    console.print(Text(f"period {format_seconds(period_s)} per mini-batch in the steady state"))
    if pipeline.placement:
        console.print(Text("idle, steady: of the stage's device, with all its stages", "dim"))
