"""--config FILE and --print-config: a command's options from a TOML file, and as one."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from ...planner.cluster.cluster import EqualDevices
from ...profiles.errors import FileError
from ...profiles.files import read_toml
from ...profiles.options import option_fields

CONFIG, PRINT = "config_path", "print_config"

INSTEAD: Mapping[str, Collection[str]] = {
    "epochs": ("steps",),
    "steps": ("epochs",),
    "target_loss": ("target_accuracy",),
    "target_accuracy": ("target_loss",),
    "cluster": tuple(option_fields(EqualDevices)),
    "devices": ("cluster",),
}
"""Options of a file that one of the command line leaves out."""


def keys_of(command: click.Command) -> dict[str, click.Option]:
    """The options that a file may set, by their long names without dashes before them."""
    return {
        max(option.opts, key=len).lstrip("-"): option
        for option in command.params
        if isinstance(option, click.Option) and option.expose_value
    }


def read_config(context: click.Context, path: str, given: Collection[str]) -> dict[str, Any]:
    """What the file says, by parameter, but for those that the command line has (`given`).

    Raises click.UsageError: the file can't be read, an unknown key, or a value of another type;
    the message names file and key.
    """
    try:
        table = read_toml(Path(path), f"{context.command_path} --print-config prints one")
    except FileError as error:
        raise click.UsageError(str(error), context) from None
    keys, found = keys_of(context.command), dict[str, Any]()
    for written, value in table.items():
        key = written.replace("_", "-")
        if key.startswith("no-") and f"--{key}" in getattr(keys.get(key[3:]), "secondary_opts", ()):
            key, value = key[3:], not value if isinstance(value, bool) else value
        key = next((name for name, option in keys.items() if f"--{key}" in option.opts), key)
        if key not in keys:
            close = get_close_matches(key, keys, 1)
            more = f"; did you mean {close[0]}?" if close else ""
            raise click.UsageError(
                f"{path}: {written}: {context.command_path} has no such option{more}", context
            )
        option = keys[key]
        if option.name in found:
            raise click.UsageError(f"{path}: {written}: is there twice", context)
        found[str(option.name)] = _checked(context, option, value, f"{path}: {written}")
    without = {name for asked in given for name in INSTEAD.get(asked, ())}
    return {name: value for name, value in found.items() if name not in without}


def _checked(context: click.Context, option: click.Option, value: Any, where: str) -> Any:
    """The value as a default of the option. Raises click.UsageError."""
    if option.multiple:
        # One alone, as on the command line.
        several = value if isinstance(value, list) else [value]
        items = [_as_given(context, option, item, where) for item in several]
    else:
        items = [_as_given(context, option, value, where)]
    try:
        for item in items:
            option.type.convert(item, option, context)
    except click.BadParameter as error:
        raise click.UsageError(f"{where}: {error.message}", context) from None
    return items if option.multiple else items[0]


def _as_given(context: click.Context, option: click.Option, value: Any, where: str) -> Any:
    kind: tuple[type, ...]
    if option.is_flag:
        kind, name = (bool,), "true or false"
    elif isinstance(option.type, click.types.IntParamType):
        kind, name = (int,), "a whole number"
    elif isinstance(option.type, click.types.FloatParamType):
        kind, name = (int, float), "a number"
    elif isinstance(option.type, click.Choice):
        kind, name = (str,), f"one of {', '.join(map(repr, option.type.choices))}"
    else:
        kind, name = (str, int, float), "text or a number"
    if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
        raise click.UsageError(f"{where}: {value!r}: give {name}", context)
    # Words such as auto, or a number: --stages 4.
    return str(value) if str in kind else value


def config_text(context: click.Context, groups: Mapping[str, list[click.Option]]) -> str:
    """The options of a context, by their headings in help, as a file that `read_config` takes;
    those without a value are comments."""
    keys = {option.name: key for key, option in keys_of(context.command).items()}
    lines = [f"# {context.command_path}"]
    for heading, options in groups.items():
        shown = [o for o in options if o.name in keys and o.name in context.params]
        lines += ["", f"# {heading}"] if shown else []
        for option in shown:
            value = context.params[option.name]
            if value is None:
                told = re.search(r"\[default: (.*)\]", option.help or "")
                lines.append(f"# {keys[option.name]}: {told[1] if told else 'none'}")
            else:
                lines.append(f"{keys[option.name]} = {_toml(value)}")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON's texts, numbers and truths are TOML's too, but for one character and for pairs of \u.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
