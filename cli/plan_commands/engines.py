"""Runs of plans in other engines: the options that say which, and what they cost there."""

from __future__ import annotations

from math import inf
from typing import Any

import click

from ...planner.engine_costs import (
    ENGINE_COSTS,
    EnginePrediction,
    beyond_memory,
    engine_pipeline,
    predicted_on,
)
from ...planner.plan import Plan, pipeline_of
from ...planner.simulator.pipeline import Pipeline
from ...profiles.errors import UserError
from ...profiles.units import format_bytes, format_seconds, parse_bandwidth
from ..errors import log, output
from ..options.command import refuse


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
    help="As that engine runs the plan: when it sends, what keeps devices busy.  [default: tp-run]",
)

receive_option = click.option(
    "--receive",
    type=BandwidthValue(),
    default=inf,
    help="At which a device of the other engine takes in what it received, like 10GB/s: copies, "
    "and what its ranks put together.  [default: at once]",
)


def pipeline_in(plan: Plan, engine: str | None, receive_bytes_per_s: float) -> Pipeline:
    """A plan's pipeline as an engine runs it, or tp-run does. Raises as `engine_pipeline`."""
    if engine is None:
        refuse(("receive",), "goes with --engine")
        return pipeline_of(plan)
    return engine_pipeline(plan, ENGINE_COSTS[engine], receive_bytes_per_s)


def print_elsewhere(plan: Plan, engine: str, found: EnginePrediction) -> None:
    """Period and memory of another engine's run, beside those of tp-run; and a warning where the
    devices haven't got that memory."""
    title, lacking = ENGINE_COSTS[engine].title, beyond_memory(plan, found)
    ours_s, s = plan.predicted.period_s, found.fullest
    change = found.period_s / ours_s - 1 if ours_s else 0.0
    apart = f"{abs(change):.1%} {'longer' if change > 0 else 'shorter'} than with tp-run"
    held = plan.predicted.device_of(s).memory_bytes
    output().print(
        f"in {title}: {format_seconds(found.period_s)} per mini-batch, "
        f"{apart if abs(change) >= 5e-4 else 'as with tp-run'}; at most "
        f"{format_bytes(found.memory_bytes[s])} (stage {s}), {format_bytes(held)} with tp-run"
    )
    if lacking is not None:
        s, more = lacking
        log(
            f"warning: in {title} stage {s} needs {format_bytes(found.memory_bytes[s])}, "
            f"{format_bytes(more)} more than its devices have for stages; plan with --headroom "
            "larger by as much"
        )


def elsewhere(plan: Plan, engine: str, receive_bytes_per_s: float) -> EnginePrediction | None:
    """The plan in that engine's run; None where what runs cost there isn't known."""
    costs = ENGINE_COSTS.get(engine)
    return None if costs is None else predicted_on(plan, costs, receive_bytes_per_s)
