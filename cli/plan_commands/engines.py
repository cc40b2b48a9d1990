"""Runs of plans in other engines: the options that say which, and what they cost there."""

from __future__ import annotations

from math import inf
from typing import Any

import click
import msgspec

from ...planner.engine_costs import ENGINE_COSTS, Engine
from ...planner.engine_runs import beyond_memory, run_by
from ...planner.plan import Plan
from ...profiles.errors import UserError
from ...profiles.units import format_bytes, format_seconds, parse_bandwidth
from ..errors import log, output
from ..options.command import refuse
from ..tables.stages import memory_table


class BandwidthValue(click.types.FloatParamType):
    """Bytes per second, with a unit."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's. Raises click.BadParameter."""
        try:
            return value if isinstance(value, float) else parse_bandwidth(value, "the rate")
        except UserError as error:
            self.fail(f"{error}", param, ctx)


engine_option = click.option(
    "--engine",
    type=click.Choice(tuple(ENGINE_COSTS)),
    help="As that engine runs the plan: when it sends, what keeps devices busy, what it holds "
    "besides.  [default: tp-run]",
)

receive_option = click.option(
    "--receive",
    type=BandwidthValue(),
    default=inf,
    show_default=False,
    help="At which a device of the other engine takes in what it received, like 10GB/s: copies, "
    "and what its ranks put together.  [default: at once]",
)


def in_run_of(engine: Engine | None, plan: Plan, receive_bytes_per_s: float) -> Plan:
    """The plan as an engine runs it, or tp-run does. Raises as `run_by`."""
    if engine is None:
        refuse(("receive",), "goes with --engine")
        return plan
    return run_by(plan, engine, receive_bytes_per_s)


def print_elsewhere(plan: Plan, found: Plan, *, with_table: bool = True) -> None:
    """Period and memory of another engine's run (`found` is the plan as it runs it), beside those
    of tp-run, with a table of the memory if asked for; and a warning where the devices haven't got
    that memory."""
    if found.engine is msgspec.UNSET:
        return
    console, title = output(), ENGINE_COSTS[found.engine].title
    if with_table:
        console.print(memory_table(found, console, console.width))
    held = [found.predicted.device_of(s).memory_bytes for s in range(len(found.stages))]
    s = max(range(len(held)), key=held.__getitem__)
    ours_s, theirs_s = plan.predicted.period_s, found.predicted.period_s
    change = theirs_s / ours_s - 1 if ours_s else 0.0
    apart = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'} than with tp-run"
    console.print(
        f"in {title}: {format_seconds(theirs_s)} per mini-batch, "
        f"{apart if abs(change) >= 5e-4 else 'as with tp-run'}; at most "
        f"{format_bytes(held[s])} (stage {s}), "
        f"{format_bytes(plan.predicted.device_of(s).memory_bytes)} with tp-run"
    )
    lacking = beyond_memory(found)
    if lacking is not None:
        s, more = lacking
        log(
            f"warning: in {title} stage {s} needs {format_bytes(held[s])}, {format_bytes(more)} "
            "more than its devices have for stages; plan with --headroom larger by as much"
        )
