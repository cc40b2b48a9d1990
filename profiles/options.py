"""Options, each said once: as the field of a record, with its type, default and help.

Commands' options, the keys of ``--config`` and Python's keyword arguments, with their checks and
help, are made of these fields (`cli.options.fields`, `taking`).
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from itertools import pairwise
from math import inf, nan
from os import PathLike, fspath
from typing import (
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from .errors import UserError
from .plugins import Kind as PluginKind
from .units import real_number, shown, truth, whole, words

P = ParamSpec("P")
Q = TypeVar("Q")
R = TypeVar("R")

Spelled = Callable[[str], str]
"""What messages call a field: its name, or the option's."""


@dataclass(frozen=True)
class Option:
    """What is said of a field in its `Annotated` type, besides its type and default. What it does
    is said in the text below it, with options named as on the command line.

    Attributes:
        group: the heading that it has in commands' help.
        usual: the default in words, where None, or nothing given, is some other value.
        flags: on the command line; by default the field's name. Ways to switch off begin with
            ``--no-``.
        metavar: what help calls the value.
        names: what a text is the name of.
        values: words to choose from on the command line, where the type has others.
        plugins: the kind of plugins whose names are such words, too.
        several: it may be given several times.
        read: makes what is meant of what is given and of what messages call it. A lambda knows no
            names of its module: annotations are evaluated in their class.
        marks: what else holds of it, for those who ask (`marked`). Of a run's settings: "free": it
            changes nothing of what is trained, so checkpoints go on with any value; "adjustable":
            a resumed run takes another one; "later": checkpoints of before don't know it, whose
            checksum is without it while it is the default; "delay": it says what a stage makes of
            its version difference.
        help: instead of that text, where it has to be made.
    """

    group: str = ""
    usual: str | None = None
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    names: Literal["file", "folder", "target", "system"] | None = None
    values: tuple[str, ...] = ()
    plugins: PluginKind | None = None
    several: bool = False
    read: Callable[[Any, str], Any] | None = None
    marks: tuple[str, ...] = ()
    help: str = ""


@dataclass(frozen=True)
class Kind:
    """A type as options have it: `base` is bool, int, float, str, or the words to choose from;
    None is any other. `least` and `most` are numbers' bounds, which `above` and `below` exclude."""

    base: type | tuple[str, ...] | None
    least: float | None = None
    most: float | None = None
    above: bool = False
    below: bool = False


@dataclass(frozen=True)
class OptionField:
    """A field of a record that is an option. `default` is `dataclasses.MISSING` where there is
    none; `help` has it in words."""

    name: str
    kind: Kind
    default: Any
    option: Option
    help: str

    @property
    def flags(self) -> tuple[str, ...]:
        """On the command line."""
        flag = self.name.replace("_", "-")
        both = self.kind.base is bool and self.default is True
        return self.option.flags or ((f"--{flag}/--no-{flag}",) if both else (f"--{flag}",))

    @property
    def flag(self) -> str:
        """What messages of commands call it."""
        return self.flags[-1].split("/")[0]


_KNOWN: dict[type, Mapping[str, OptionField]] = {}


def option_fields(record: Any) -> Mapping[str, OptionField]:
    """Those of a dataclass, or of a msgspec struct, by name; its own before those of its base."""
    if record not in _KNOWN:
        _KNOWN[record] = _fields(record)
    return _KNOWN[record]


def _fields(record: Any) -> Mapping[str, OptionField]:
    if issubclass(record, msgspec.Struct):
        defaults = {
            f.name: dataclasses.MISSING if f.default is msgspec.NODEFAULT else f.default
            for f in msgspec.structs.fields(record)
        }
    else:
        defaults = {f.name: f.default for f in dataclasses.fields(record)}
    hints = _hints_of(record)
    options = {
        name: option
        for name in defaults
        for option in getattr(hints[name], "__metadata__", ())
        if isinstance(option, Option)
    }
    texts: dict[str, str] = {}
    for cls in reversed(record.__mro__):
        if options.keys() & inspect.get_annotations(cls).keys():
            texts |= _texts_below(cls)
    own = inspect.get_annotations(record)
    return {
        name: OptionField(
            name, kind_of(hints[name]), defaults[name], option, option.help or texts.get(name, "")
        )
        for name, option in sorted(options.items(), key=lambda each: each[0] not in own)
    }


def _hints_of(record: type, *, include_extras: bool = True) -> dict[str, Any]:
    """What `typing.get_type_hints` says of a class; Python 3.10 takes `KW_ONLY` for no type."""
    return get_type_hints(record, localns={"KW_ONLY": Any}, include_extras=include_extras)


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):
        return {}
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts_below(cls: type) -> dict[str, str]:
    """What stands below each field, as editors show it; nothing where the source isn't there."""
    defined = _classes(cls.__module__).get(cls.__name__)
    return {
        ast.unparse(field.target): " ".join(str(ast.literal_eval(text.value)).split())
        for field, text in pairwise([] if defined is None else defined.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def kind_of(hint: Any) -> Kind:
    """Of an annotation; None beside another type says nothing."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        found = kind_of(arguments[0])
        for note in arguments[1:]:
            if isinstance(note, Meta):
                found = dataclasses.replace(
                    found,
                    least=note.gt if note.ge is None else note.ge,
                    most=note.lt if note.le is None else note.le,
                    above=note.gt is not None,
                    below=note.lt is not None,
                )
        return found
    if origin in (Union, types.UnionType):
        some = [each for each in arguments if each is not type(None)]
        return kind_of(some[0]) if len(some) == 1 else Kind(None)
    if origin is Literal:
        return Kind(arguments)
    return Kind(hint if hint in (bool, int, float, str) else None)


def spelled_out(record: Any, values: Mapping[str, Any]) -> list[str]:
    """Options and their values, as commands take them, of those that aren't the default; `values`
    are by the fields' names, as read or as files have them."""
    found = list[str]()
    for name, field in option_fields(record).items():
        value = values.get(name, field.default)
        if value is None or value == field.default:
            continue
        found.append(field.flags[0].split("/")[-1 if value is False else 0])
        if not isinstance(value, bool):
            found.append(
                ",".join(map(str, value)) if isinstance(value, list | tuple) else f"{value}"
            )
    return found


def marked(record: type, mark: str) -> tuple[str, ...]:
    """The fields of a record that have a mark."""
    return tuple(f.name for f in option_fields(record).values() if mark in f.option.marks)


def given(record: object, names: Collection[str]) -> dict[str, Any]:
    """Of these fields, those that aren't the default, by name."""
    known = option_fields(type(record))
    found = {name: getattr(record, name) for name in names}
    return {name: value for name, value in found.items() if value != known[name].default}


# Checks -----------------------------------------------------------------------------------------


def read_field(field: OptionField, value: Any, name: str) -> Any:
    """What is meant by what was given; None stays None where it is the default.

    Raises UserError naming it for what can't be.
    """
    if value is None and field.default is None:
        return None
    if field.option.read is not None:
        return field.option.read(value, name)
    base = field.kind.base
    if base is bool:
        return truth(value, name)
    if base in (int, float):
        return _number(field.kind, value, name)
    if base is str:
        named = fspath(value) if isinstance(value, PathLike) else value
        return words(**{name: named})[name]
    if isinstance(base, tuple):
        return chosen(value, name, base)
    return value


def _number(kind: Kind, value: object, name: str) -> float:
    """Within its bounds, and of its type. Raises UserError."""
    if kind.base is int:
        found: float = whole(value, name, int(kind.least or 0))
    else:
        real = real_number(value)
        found = nan if real is None else real
    least = -inf if kind.least is None else kind.least
    most = inf if kind.most is None else kind.most
    excluded = (kind.above and found == least) or (kind.below and found == most)
    if not least <= found <= most or excluded:
        low = f" {'above' if kind.above else 'from'} {least:g}" if kind.least is not None else ""
        high = f" {'and below' if kind.below else 'to'} {most:g}" if kind.most is not None else ""
        noun = "whole number" if kind.base is int else "number"
        raise UserError(f"{name} {shown(value)}: give a {noun}{low}{high}")
    return found if kind.base is int else float(found)


def chosen(value: object, name: str, values: Collection[str]) -> str:
    """Raises UserError for what is none of these words."""
    text: str = words(**{name: value})[name]
    if text not in values:
        raise UserError(f"{name} {text!r}: give one of {', '.join(values)}")
    return text


def auto_or_whole(value: object, name: str) -> int | None:
    """``auto`` → None, ``"4"`` or 4 → 4. Raises UserError."""
    if value is None or (isinstance(value, str) and value == "auto"):
        return None
    text = value if isinstance(value, str) else ""
    plain = text.isdecimal() and text.isascii() and len(text) <= 9
    try:
        return whole(int(text) if plain else value, name)
    except UserError:
        raise UserError(f"{name} {shown(value)}: give auto or a whole number from 1") from None


def read_record(
    record: Any, spelled: Spelled = str, without: Collection[str] = ()
) -> dict[str, Any]:
    """What is meant by each option of a record, by its field's name, but for fields that others
    read (`without`). Raises UserError."""
    return {
        name: read_field(field, getattr(record, name), spelled(name))
        for name, field in option_fields(type(record)).items()
        if name not in without
    }


def flags_of(record: type) -> Spelled:
    """Have messages call fields what the command line does."""
    known = option_fields(record)
    return lambda name: known[name].flag


# Python's arguments -----------------------------------------------------------------------------


def check_names(given: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise UserError for a name that there isn't, with the one that is like it."""
    for name in given:
        if name not in known:
            like = difflib.get_close_matches(name, known, 1, 0.75)
            more = f"is {like[0]} meant?" if like else f"known: {', '.join(known)}"
            raise UserError(f"{name}: there is no such {what}; {more}")


def record_of(record: Callable[P, Q], *args: P.args, **kwargs: P.kwargs) -> Q:
    """A record of Python's arguments. Raises UserError for one that there isn't."""
    check_names(kwargs, inspect.signature(record).parameters, "argument")
    return record(*args, **kwargs)


def taking(record: Callable[P, Q]) -> Callable[[Callable[Concatenate[Q, ...], R]], Callable[P, R]]:
    """Have a function of a record take the record's fields as arguments, which its help lists.

    One with keywords besides is given those that are no fields as they are.
    """

    def decorated(function: Callable[Concatenate[Q, ...], R]) -> Callable[P, R]:
        fields, own = inspect.signature(record).parameters, inspect.signature(function).parameters
        rest = [p for p in own.values() if p.kind is inspect.Parameter.VAR_KEYWORD]

        @wraps(function)
        def taken(*args: P.args, **kwargs: P.kwargs) -> R:
            others = {n: kwargs.pop(n) for n in list(kwargs) if n not in fields} if rest else {}
            return function(record_of(record, *args, **kwargs), **others)

        _describe(taken, record, [*fields.values(), *rest])
        return taken

    return decorated


def taking_more(record: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have the help of a function list a record's options before its ``**keywords``."""

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        *own, rest = inspect.signature(function).parameters.values()
        known = {p.name for p in own}
        more = [f for f in option_fields(record).values() if f.name not in known]
        kind = inspect.Parameter.KEYWORD_ONLY
        named = [
            inspect.Parameter(f.name, kind, default=None if f.option.usual else f.default)
            for f in more
        ]
        _describe(function, record, [*own, *named, rest], [f.name for f in more])
        return function

    return decorated


def _describe(
    function: Any, record: Any, parameters: list[inspect.Parameter], names: Collection[str] = ()
) -> None:
    """Give a function that signature, and a docstring with a line for each of these options."""
    hints = {**_hints_of(record, include_extras=False), **function.__annotations__}
    function.__dict__.pop("__wrapped__", None)
    function.__signature__ = inspect.Signature(
        [p.replace(annotation=hints.get(p.name, p.annotation)) for p in parameters],
        return_annotation=function.__annotations__.get("return"),
    )
    before, _, after = inspect.cleandoc(function.__doc__).partition("Args:\n")
    own, _, rest = f"\n{after}".partition("\n\n")
    known = option_fields(record)
    lines = [_line(known[name]) for name in names or known]
    args = "\n".join(filter(None, [own.strip("\n"), textwrap.indent("\n".join(lines), "    ")]))
    function.__doc__ = f"{before}Args:\n{args}\n\n{rest}"


def _line(field: OptionField) -> str:
    """A paragraph of a docstring."""
    usual = f" By default {field.option.usual}." if field.option.usual else ""
    text = re.sub(r"--([a-z][a-z-]*)", lambda found: found[1].replace("-", "_"), field.help + usual)
    return textwrap.fill(
        f"{field.name}: {text}", 92, subsequent_indent="    ", break_on_hyphens=False
    )
