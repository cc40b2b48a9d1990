"""tp-plan: solve, show and check plans."""

from __future__ import annotations

import click

from ..planner.plan import read_plan
from ..planner.search.answer.recheck import recheck
from ..profiles.errors import UserError
from ..profiles.files import Kind, check_output, read_file, write_file
from ..profiles.profile import Profile, check_profile
from .errors import errors_as_lines, output, print_json
from .options import CONTEXT, common_options, plugin_option, version_option
from .options.command import CommandsAtHand, command, examples
from .options.values import FileName
from .plan_commands.compare import compare
from .plan_commands.show import show
from .plan_commands.simulate import simulate_plan
from .plan_commands.solve import solve
from .tables.plan import assumed, few_stages, print_plan


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
    "-o", "--output", "path", type=FileName(), help="Write the plan with its predictions made anew."
)
@plugin_option
@common_options
@errors_as_lines
def check(
    plan_path: str, profile_path: str, path: str | None, as_json: bool, quiet: bool, verbose: bool
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


for each in (solve, compare, show, simulate_plan, check):
    main.add_command(each)


if __name__ == "__main__":
    main()
