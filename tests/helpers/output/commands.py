"""The three commands, in this process."""

from __future__ import annotations

from importlib import import_module

import click
from click.testing import CliRunner


def commands_below(command):
    """The commands of one that has others, by their names."""
    if not hasattr(command, "list_commands"):
        return {}
    context = click.Context(command)
    return {name: command.get_command(context, name) for name in command.list_commands(context)}


def called(tool, *words, code=0, width=None):
    """What a command prints, as ``called("tp-plan", "show", path)``; it has to end with `code`."""
    main = import_module(f"timeprest.cli.{tool.removeprefix('tp-')}").main
    columns = {"COLUMNS": str(width)} if width else None
    done = CliRunner().invoke(main, [str(word) for word in words], prog_name=tool, env=columns)
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done.output
