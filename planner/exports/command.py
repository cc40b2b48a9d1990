"""tp-plan export: a plan as files that another engine reads."""

from __future__ import annotations

import click

from ...cli.errors import errors_as_lines, naming, output, print_json
from ...cli.options import common_options, plugin_option
from ...cli.options.command import command, refuse
from ...cli.options.values import FileName, FolderName, WordOrPlugin
from ...cli.plan_commands.engines import print_elsewhere, receive_option
from ...cli.tables.plan import warn_if_edited
from ..engine_costs import ENGINE_COSTS
from ..engine_runs import run_by
from ..plan import read_plan
from .export import write_export


@command(
    "tp-plan export plan.json --to torch -o exported",
    "tp-plan export plan.json --to torchtitan -o exported",
    "tp-plan export plan.json --to megatron -o exported",
    name="export",
)
@click.argument("plan_path", type=FileName(), metavar="PLAN")
@click.option(
    "--to",
    "engine",
    type=WordOrPlugin((), "engines"),
    required=True,
    help="torch: split points, schedule and a script for torch.distributed.pipelining. torchtitan: "
    "settings and schedule. megatron: arguments with the layout. deepspeed: a PipelineModule.",
)
@click.option(
    "-o", "--output", "folder", type=FolderName(), required=True, help="The new folder to write."
)
@receive_option
@plugin_option
@common_options
@errors_as_lines
def export_plan(
    plan_path: str,
    engine: str,
    folder: str,
    receive: float,
    as_json: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Write PLAN as another engine reads it: its cuts, and its schedule where that takes one.

    What the engine can't express is refused. What runs should cost there is said beside what they
    cost with tp-run.
    """
    plan = read_plan(plan_path)
    known = next((each for each in ENGINE_COSTS if each == engine), None)
    if known is None:
        refuse(("receive",), f"isn't for {engine}, of which no costs are known")
    with naming(plan_path):
        written, notes = write_export(plan, engine, folder)
    found = plan if known is None else run_by(plan, known, receive)
    if as_json:
        said = {} if known is None else {"predicted": found.predicted}
        print_json({"engine": engine, "files": written, **said})
    elif not quiet:
        for path in written:
            output().print(f"wrote {path}")
        for note in notes:
            output().print(note)
        print_elsewhere(plan, found)
        warn_if_edited(plan, plan_path)
