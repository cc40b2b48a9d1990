"""tp-plan export: a plan as files that another engine reads."""

from __future__ import annotations

import click

from ...planner.exports.export import ENGINES, EngineName, write_export
from ...planner.exports.torch_pipelining import ModelFacts
from ...planner.plan import Plan, read_plan
from ..errors import errors_as_lines, naming, output, print_json
from ..options import common_options, plugin_option
from ..options.command import GroupedCommand, examples
from ..options.values import FileName, FolderName
from ..tables.plan import tell_edited


@click.command(
    name="export",
    cls=GroupedCommand,
    epilog=examples(
        "tp-plan export plan.json --to torch -o exported",
        "tp-plan export plan.json --to torchtitan -o exported",
        "tp-plan export plan.json --to megatron -o exported",
    ),
)
@click.argument("plan_path", type=FileName(), metavar="PLAN")
@click.option(
    "--to",
    "engine",
    type=click.Choice(ENGINES),
    required=True,
    help="torch: split points, schedule and a script for torch.distributed.pipelining. torchtitan: "
    "settings and schedule. megatron: arguments with the layout. deepspeed: a PipelineModule.",
)
@click.option(
    "-o", "--output", "folder", type=FolderName(), required=True, help="The new folder to write."
)
@plugin_option
@common_options
@errors_as_lines
def export_plan(
    plan_path: str, engine: EngineName, folder: str, as_json: bool, quiet: bool, verbose: bool
) -> None:
    """Write PLAN as another engine reads it: its cuts, and its schedule where that takes one.

    What the engine can't express is refused.
    """
    plan = read_plan(plan_path)
    with naming(plan_path):
        written, notes = write_export(plan, engine, folder, _facts)
    if as_json:
        print_json({"engine": engine, "files": written})
    elif not quiet:
        for path in written:
            output().print(f"wrote {path}")
        for note in notes:
            output().print(note)
        tell_edited(plan, plan_path)


def _facts(plan: Plan) -> ModelFacts:
    from ...runtime.prepare.export_facts import facts_of  # loads torch

    return facts_of(plan)
