"""`--trace` of a plan: what it predicts, as a Chrome trace."""

from __future__ import annotations

import click

from ...planner.plan import Plan
from ...planner.recording import predicted
from .chrome_trace import write_trace

trace_option = click.option(
    "--trace",
    "trace_path",
    metavar="FILE",
    help="Write the predicted order as a Chrome trace, for Perfetto and chrome://tracing.",
)


def write_plan_trace(plan: Plan, path: str) -> None:
    """Write it. Raises FileError, OrderError."""
    write_trace(path, [("", predicted(plan))])
