"""Options of a command, made of a record's fields (`profiles.options`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import MISSING
from typing import Any

import click

from ...profiles import plugins
from ...profiles.errors import PluginError
from ...profiles.files import MAX_COUNT
from ...profiles.imported.reader import options_of_importers
from ...profiles.options import OptionField, option_fields
from ..errors import F
from .command import GroupedCommand, group, options
from .values import (
    FileName,
    FolderName,
    Fraction,
    Number,
    SystemName,
    TargetName,
    Whole,
    WordOrPlugin,
)

_NAMES = {"file": FileName, "folder": FolderName, "target": TargetName, "system": SystemName}


def options_of(
    record: type, *groups: str, only: Collection[str] = (), without: Collection[str] = ()
) -> Callable[[F], F]:
    """The options of a record, which bear its fields' names, under their headings: of these groups
    alone, in this sequence, and of these fields (`only`, `without`); by default of all."""
    known = option_fields(record)
    fields = [known[name] for name in only or known if name not in without]
    headings = groups or tuple(dict.fromkeys(field.option.group for field in fields))
    return options(
        *(
            group(heading, *(_option(field) for field in fields if field.option.group == heading))
            for heading in headings
        )
    )


def _option(field: OptionField) -> Callable[[F], F]:
    option, flag = field.option, field.kind.base is bool
    # What isn't given and has another default than the field is None.
    plain = option.usual is None and field.default is not MISSING and not option.several
    usual = f"  [default: {option.usual}]" if option.usual else ""
    return click.option(
        *field.flags,
        field.name,
        type=None if flag else _type(field),
        is_flag=flag,
        multiple=option.several,
        default=field.default if plain else None,
        metavar=option.metavar,
        help=f"{field.help}{usual}",
    )


def _type(field: OptionField) -> click.ParamType[Any]:
    option, kind = field.option, field.kind
    words = option.values or (kind.base if isinstance(kind.base, tuple) else ())
    if option.plugins:
        return WordOrPlugin(words, option.plugins)
    if words:
        return click.Choice(words)
    if kind.base is int:
        return Whole(int(kind.least or 0), MAX_COUNT if kind.most is None else int(kind.most))
    if kind.base is float and (kind.least, kind.most) == (0, 1):
        return Fraction(min_open=kind.above, max_open=kind.below)
    if kind.base is float:
        return Number(kind.least, kind.most, above=kind.above)
    return _NAMES[option.names]() if option.names else click.STRING


class ImportingCommand(GroupedCommand):
    """A command that has the options of importers, too, where its line has a file of theirs or
    options that aren't its own; in help, and with a file of options, all of them."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> click.Context:
        command = copy(self)
        command.params = [*self.params, *self.of_importers(args)]
        return super(ImportingCommand, command).make_context(info_name, args, parent, **extra)

    def of_importers(self, args: Sequence[str]) -> list[click.Parameter]:
        """Options of importers that a command line may have."""
        context = click.Context(self, ignore_unknown_options=True, resilient_parsing=True)
        try:
            given, rest, _ = self.make_parser(context).parse_args(list(args))
            for plugin in given.get("plugins", ()):
                plugins.load_file(plugin)
            unknown = any(word.startswith("-") for word in rest)
            asked = any(re.match(r"-h$|--help$|--(print-)?config", word) for word in args)
            files = (given.get(p.name) for p in self.params if isinstance(p, click.Argument))
            words = [*rest, *(file for file in files if isinstance(file, str))]
            if unknown or asked:
                words = [f"file{name}" for name in plugins.names("importers")]
            records = options_of_importers(words)
        except (PluginError, click.UsageError):
            return []  # said when the line is read in earnest
        own = {param.name for param in self.params}
        found: dict[str, click.Parameter] = {}
        for record in records:
            of: Any = options_of(record, only=[n for n in option_fields(record) if n not in own])
            for param in reversed(of(lambda: None).__click_params__):
                found.setdefault(param.name, param)
        return [*found.values()]
