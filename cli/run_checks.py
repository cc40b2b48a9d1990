"""What tp-run does instead of training: --check and --dry-run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from ..profiles.errors import UserError
from .common import output

if TYPE_CHECKING:
    from ..planner.plan import Plan
    from ..runtime.meeting import Meeting
    from ..runtime.settings import RunSettings


def show_dry_run(
    plan: Plan,
    settings: RunSettings,
    run_dir: str,
    meeting: Meeting | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what a run needs. Ends with code 2 when there is a problem."""
    from ..runtime.dry_run import dry_run
    from .dry_run_tables import cut_table, dry_run_lines, worker_table

    found = dry_run(plan, settings, run_dir, meeting)
    if found is None:
        return
    if as_json:
        click.echo(msgspec.json.encode(found))
    elif not quiet:
        console = output()
        console.print(worker_table(found))
        if found.cuts:
            console.print(cut_table(found))
        for line in dry_run_lines(found):
            console.print(line, markup=False)
    if found.problems:
        raise UserError(f"not ready: {'; '.join(found.problems)}")


def show_check(
    plan: Plan,
    settings: RunSettings,
    run_dir: str | None,
    *,
    inline: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Hold the run against plain training. Ends with code 1 when something differs."""
    from ..runtime.check import check
    from .check_tables import check_lines, check_table

    report = check(plan, settings, run_dir=run_dir, inline=inline)
    if as_json:
        click.echo(msgspec.json.encode(report))
    elif not quiet:
        console = output()
        console.print(check_table(report))
        for line in check_lines(report):
            console.print(line, markup=False)
    if report.verdict != "same":
        sys.exit(1)
