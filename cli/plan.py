"""tp-plan: solve, show and check plans."""

from __future__ import annotations

import click
import msgspec

from ..planner.plan import read_plan
from ..planner.recheck import recheck
from ..profiles.errors import UserError
from ..profiles.files import read_file, write_file
from ..profiles.profile import Profile, check_profile
from .common import OneLineGroup, common_options, errors_as_lines, output
from .plan_tables import assumed, print_plan
from .published import published
from .simulate import simulate_plan
from .solve import solve


@click.group(cls=OneLineGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Decide how to cut a profiled model into pipeline stages."""


main.add_command(solve)
main.add_command(simulate_plan)
main.add_command(published)


@main.command()
@click.argument("plan_path", metavar="PLAN")
@click.option(
    "--operations",
    "count",
    type=click.IntRange(0, 10_000),
    default=16,
    show_default=True,
    help="How many operations of each stage's order to print.",
)
@common_options
@errors_as_lines
def show(plan_path: str, count: int, as_json: bool, quiet: bool, verbose: bool) -> None:
    """Show PLAN: its stages, what they should cost, and the order's first operations."""
    plan = read_plan(plan_path)
    if as_json:
        click.echo(msgspec.json.encode(plan))
    elif not quiet:
        print_plan(plan, count, every=verbose)


@main.command()
@click.argument("plan_path", metavar="PLAN")
@click.option("--profile", "profile_path", required=True, metavar="PROFILE")
@click.option("-o", "--output", "path", help="Write the plan with its predictions made anew.")
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
    plan = read_plan(plan_path)
    profile = check_profile(read_file(profile_path, Profile), profile_path)
    found = recheck(plan, profile, plan_path)
    if path:
        write_file(path, found.plan)
    if as_json:
        click.echo(msgspec.json.encode(found.plan))
    elif not quiet:
        print_plan(found.plan, 0, every=verbose)
        note = assumed(profile, found.plan.variant)
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


if __name__ == "__main__":
    main()
