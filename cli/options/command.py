"""Commands whose help has its options in groups, and ends with examples."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy
from typing import Any

import click
from click.core import ParameterSource

from ...profiles import plugins
from ...profiles.errors import PluginError, UserError
from ..errors import CONFIG_FILE, F, OneLineCommand, errors_as_lines, printable
from .config import CONFIG, PRINT, config_text, read_config

_GROUPS: dict[click.Parameter, str] = {}
"""What help calls the group that an option is in."""

CONTEXT = {"help_option_names": ["-h", "--help"], "show_default": True}
"""Settings of every command."""

_GENERAL = "General options"
_LONE = "Options"
"""Where a command has no groups."""


def options(*found: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the sequence in which the help has them."""

    def decorated(function: F) -> F:
        for option in reversed(found):
            function = option(function)
        return function

    return decorated


def group(name: str, *found: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, under a heading of their own in the help."""

    def decorated(function: F) -> F:
        before = len(getattr(function, "__click_params__", ()))
        function = options(*found)(function)
        for option in function.__click_params__[before:]:  # type: ignore[attr-defined]
            _GROUPS[option] = name
        return function

    return decorated


def examples(*lines: str, more: str = "") -> str:
    """The epilog of a command's help: `more`, and then examples, each in its own line."""
    text = "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
    return f"{more}\n\n{text}" if more else text


def command(
    *lines: str, more: str = "", name: str | None = None, cls: type[click.Command] | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """A command with these `examples`; by default a `GroupedCommand` that is called as the
    function."""
    epilog = examples(*lines, more=more)
    return click.command(name, cls or GroupedCommand, context_settings=CONTEXT, epilog=epilog)


def grouped(command: click.Command, context: click.Context) -> dict[str, list[click.Option]]:
    """Options by the heading that they have in help; those of all commands come last."""
    found: dict[str, list[click.Option]] = {}
    rest: list[click.Option] = []
    for option in command.get_params(context):
        if isinstance(option, click.Option):
            name = _GROUPS.get(option)
            (rest if name is None else found.setdefault(name, [])).append(option)
    return {**found, (_GENERAL if found else _LONE): rest}


def refuse(names: Collection[str], why: str) -> None:
    """Raise UserError where one of these parameters of the command at hand is on the command line,
    and nothing would come of it. A file of --config may have all."""
    context = click.get_current_context()
    for option in context.command.params:
        source = context.get_parameter_source(str(option.name))
        if option.name in names and source is ParameterSource.COMMANDLINE:
            raise UserError(f"{max(option.opts, key=len)}: {why}")


class GroupedCommand(OneLineCommand):
    """A command whose help has its options in groups; with `config_options`, they may be in a
    file."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; what a file says is the default of what the command line doesn't."""
        given: dict[str, Any] = {}
        command = self
        if not ctx.resilient_parsing and any(option.name == CONFIG for option in self.params):
            given, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            if CONFIG in given:
                ctx.default_map = read_config(ctx, given[CONFIG], given)
                ctx.meta[CONFIG_FILE] = given[CONFIG]
        if given.get(PRINT):
            # A file of options says nothing of what the command is for.
            command = copy(self)
            command.params = [copy(param) for param in self.params]
            for param in command.params:
                param.required = False
        rest = super(GroupedCommand, command).parse_args(ctx, args)
        if given.get(PRINT):
            self.print_config(ctx)
            ctx.exit()
        return rest

    def print_config(self, ctx: click.Context) -> None:
        """Print all options as a file for --config."""
        for line in config_text(ctx, grouped(self, ctx)).splitlines():
            click.echo(printable(line))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, group by group."""
        for name, found in grouped(self, ctx).items():
            records = [option.get_help_record(ctx) for option in found]
            shown = [record for record in records if record is not None]
            if shown:
                with formatter.section(name):
                    formatter.write_dl(shown)


class CommandsAtHand(OneLineCommand, click.Group):
    """Several commands: its own, and those that plugins have for it ("plan.NAME" for tp-plan)."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """As click's, and those of plugins."""
        return [*super().list_commands(ctx), *errors_as_lines(commands_of)(str(self.name))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """As click's, or a plugin's."""
        own = super().get_command(ctx, cmd_name)
        return own or errors_as_lines(command_of)(str(self.name), cmd_name)


def commands_of(program: str) -> list[str]:
    """Names of the commands that plugins have for `tp-PROGRAM`. Raises PluginError."""
    begin = f"{program}."
    return [n.removeprefix(begin) for n in plugins.names("commands") if n.startswith(begin)]


def command_of(program: str, name: str) -> click.Command | None:
    """A plugin's command; None where none has this name. Raises PluginError."""
    if name not in commands_of(program):
        return None
    found = plugins.load("commands", f"{program}.{name}")
    if not isinstance(found, click.Command):
        what = f"command {program}.{name}: is a {type(found).__name__}"
        raise PluginError(f"{what}; give a click.Command")
    return found
