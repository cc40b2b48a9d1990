"""`tp-plan show --html`: the plan's page."""

from __future__ import annotations

from pathlib import Path

import click

from ....planner.plan import Plan

html_option = click.option(
    "--html",
    "html",
    metavar="FILE",
    help="Write a page with the stages, the timeline and the memory to look at in a browser.",
)


def write_html(plan: Plan, plan_path: str, path: str) -> None:
    """Write the page. Raises FileError, OrderError."""
    from .plan_data import plan_report

    plan_report(plan, Path(plan_path).name, path)
