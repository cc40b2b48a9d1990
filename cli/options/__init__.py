"""Options of the commands: those that all have, and those of clusters and runs.

Options that set a field of `RunSettings` bear its name, as `settings_of` takes them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import click

from ... import __version__
from ...planner.systems.variants import load_plugin
from ...profiles.errors import UserError
from ...profiles.options import option_fields, read_field
from ...runtime.settings import (
    CHECKPOINTS,
    DIFFERENCES,
    OPTIMIZER,
    PRECISION,
    RECORDS,
    TRAINING,
    WHERE,
    OptimizerChoice,
    RunSettings,
)
from ..errors import F, errors_as_lines
from .command import CONTEXT as CONTEXT
from .command import group, options
from .config import CONFIG, PRINT
from .fields import ImportingCommand as ImportingCommand
from .fields import options_of as options_of
from .values import FileName, FolderName, Whole

version_option = click.version_option(__version__, package_name="timeprest", message="%(version)s")
"""--version, of each command and of those that have others below them."""

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print errors only.")

common_options = options(
    click.option("-v", "--verbose", is_flag=True, help="Print more."),
    quiet_option,
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
    version_option,
)


@errors_as_lines
def _load(context: click.Context, option: click.Parameter, plugins: Sequence[str]) -> Sequence[str]:
    for plugin in () if context.resilient_parsing else plugins:
        load_plugin(plugin)
    return plugins


_plugins = click.option(
    "--plugin",
    "plugins",
    type=FileName(),
    multiple=True,
    metavar="FILE",
    is_eager=True,  # help has the commands of plugins, too
    callback=_load,
    help="A file with training systems of your own, which plans of theirs need, or with what else "
    "plugins have.",
)


def plugin_option(function: F) -> F:
    """--plugin, whose systems are there when the command begins."""

    @functools.wraps(function)
    def wrapped(*args: Any, plugins: Sequence[str], **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return cast("F", _plugins(wrapped))


config_options = group(
    "Configuration",
    click.option(
        "--config",
        CONFIG,
        type=FileName(),
        expose_value=False,
        help="Options from a TOML file, by their long names; the command line wins.",
    ),
    click.option(
        "--print-config",
        PRINT,
        is_flag=True,
        expose_value=False,
        help="Print all options as such a file, and stop.",
    ),
)


# A training run -----------------------------------------------------------------------------------

task_options = options_of(RunSettings, only=("task", "ragged"))
"""What is trained on, and how its samples are dealt."""

optimizer_options = options(
    options_of(OptimizerChoice), options_of(RunSettings, OPTIMIZER, without=("warmup",))
)
"""Of the optimizer, read by `optimizer_choice`, and of its learning rate."""

computing_options = options_of(RunSettings, PRECISION, DIFFERENCES)
"""Of how stages compute, and what their version differences do to the training."""

run_options = options(
    options_of(RunSettings, TRAINING),
    options_of(OptimizerChoice),
    options_of(RunSettings, OPTIMIZER),
    computing_options,
    options_of(RunSettings, WHERE),
    group(
        WHERE,
        click.option(
            "--inline",
            is_flag=True,
            help="All stages in this process, with the same weight versions.",
        ),
    ),
    group(
        RECORDS,
        click.option(
            "--run-dir",
            type=FolderName(),
            help="What it writes.  [default: runs/VARIANT-DATE-TIME-PID]",
        ),
    ),
    options_of(RunSettings, RECORDS, CHECKPOINTS),
    group(
        CHECKPOINTS,
        click.option(
            "--resume",
            is_flag=True,
            help="Go on with the run in --run-dir from its newest checkpoint. --epochs or --steps "
            "may grow.",
        ),
        click.option(
            "--resume-at",
            type=Whole(),
            help="The same from another checkpoint, by the mini-batches done.",
        ),
        click.option(
            "--max-restarts",
            type=Whole(0),
            default=0,
            help="After a failure start again from the newest checkpoint, so many times at most.",
        ),
    ),
    group(
        "Instead of training",
        click.option(
            "--check",
            "checks",
            is_flag=True,
            help="Train --steps mini-batches (3 by default) once more without a pipeline, and say "
            "where loss, gradients and weights differ most. Keeps nothing without --run-dir.",
        ),
        click.option(
            "--dry-run",
            is_flag=True,
            help="Check all that the run needs, send a micro-batch's shapes over every cut, and "
            "stop.",
        ),
    ),
)
"""All of tp-run. Those of how it trains are read by `settings_of`."""


def optimizer_choice(asked: dict[str, Any]) -> OptimizerChoice | None:
    """The optimizer that is named, with its own options; takes them out of `asked`.

    Raises UserError.
    """
    found = {
        name: (field, asked.pop(name)) for name, field in option_fields(OptimizerChoice).items()
    }
    given = {
        name: read_field(field, value, field.flag)
        for name, (field, value) in found.items()
        if value is not None and value is not False
    }
    name = given.get("name")
    if name is None:
        if given:
            extra = ", ".join(found[name][0].flag for name in given)
            raise UserError(f"{extra}: name the --optimizer too")
        return None
    if "lr" not in given:
        raise UserError(f"--optimizer {name}: give its --lr too")
    return OptimizerChoice(**given)
