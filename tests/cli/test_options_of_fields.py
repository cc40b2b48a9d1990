"""Options, keys of --config, Python's arguments and checks are made of a record's fields alone."""

from __future__ import annotations

import inspect
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

import click
import pytest
from click.testing import CliRunner
from msgspec import Meta
from timeprest.cli.options import config_options
from timeprest.cli.options.command import GroupedCommand
from timeprest.cli.options.fields import options_of
from timeprest.profiles.errors import UserError
from timeprest.profiles.files import Count, Factor
from timeprest.profiles.options import (
    Option,
    auto_or_whole,
    flags_of,
    given,
    marked,
    option_fields,
    read_record,
    taking,
    taking_more,
)


@dataclass(frozen=True)
class Cake:
    """Of each kind of field one."""

    name: str
    _: KW_ONLY
    layers: Annotated[
        int | Literal["auto"] | None, Option("Shape", metavar="N", read=auto_or_whole)
    ] = "auto"
    """How many; auto: the best."""
    eggs: Annotated[Count | None, Option("Dough", usual="as in the book")] = None
    """Of hens."""
    sugar: Annotated[Factor, Option("Dough", marks=("sweet",))] = 1.0
    """In cups;
    see --eggs."""
    ripe: Annotated[float, Meta(gt=0, lt=1), Option("Dough")] = 0.5
    """Share of ripe fruit."""
    filling: Annotated[Literal["none", "jam"], Option("Shape")] = "none"
    """Between layers."""
    icing: Annotated[bool, Option("Shape")] = True
    """Ice it."""
    candles: Annotated[bool, Option("Shape", help="Put candles on it.")] = False
    guests: Annotated[tuple[str, ...], Option("Party", flags=("--guest",), several=True)] = ()
    """Who is asked."""


@click.command(cls=GroupedCommand)
@options_of(Cake)
@config_options
def bake(**asked):
    """Bake."""
    try:
        found = read_record(Cake("x", **asked), flags_of(Cake))
    except UserError as error:
        raise click.UsageError(str(error)) from None
    click.echo(repr(found))


def call(*words, code=0):
    done = CliRunner().invoke(bake, words)
    assert done.exit_code == code, done.output
    return done.output


def test_a_field_is_an_option():
    usual = {
        "layers": None,
        "eggs": None,
        "sugar": 1.0,
        "ripe": 0.5,
        "filling": "none",
        "icing": True,
        "candles": False,
        "guests": (),
    }
    assert call() == f"{usual}\n"
    words = "--layers 3 --eggs 4 --filling jam --no-icing --candles --guest a --guest b"
    others = {"layers": 3, "eggs": 4, "filling": "jam", "icing": False, "candles": True}
    assert call(*words.split()) == f"{ {**usual, **others, 'guests': ('a', 'b')} }\n"
    text = call("--help")
    assert text.index("Shape:") < text.index("--layers N") < text.index("--icing / --no-icing")
    assert text.index("--candles") < text.index("Dough:") < text.index("[default: as in the book]")
    for words, why in (
        ("--layers many", "--layers 'many': give auto or a whole number from 1"),
        ("--eggs 0", "0 is less than 1"),
        ("--ripe 1", "is not in the range 0<x<1"),
        ("--filling mud", "'mud' is not one of"),
    ):
        assert why in call(*words.split(), code=2)


def test_a_field_is_a_key_of_a_file(tmp_path):
    path = tmp_path / "cake.toml"
    path.write_text('layers = 2\nno-icing = true\nguest = "a"\n')
    found = call("--config", str(path))
    for part in ("'layers': 2", "'icing': False", "'guests': ('a',)"):
        assert part in found
    path.write_text("no_icing = false\n")
    assert "'icing': True" in call("--config", str(path))
    path.write_text("no-icing = 1\n")
    assert "no-icing: 1: give true or false" in call("--config", str(path), code=2)
    path.write_text("no-candles = true\n")
    assert "no-candles: bake has no such option" in call("--config", str(path), code=2)


@taking(Cake)
def price(cake: Cake) -> float:
    """Ask for the price.

    Args:
        name: of the cake.

    Raises UserError.
    """
    return read_record(cake)["sugar"]


def test_a_field_is_an_argument():
    assert price("sponge", sugar=2) == 2.0
    signature = inspect.signature(price)
    assert list(signature.parameters) == ["name", *option_fields(Cake)]
    assert signature.parameters["eggs"].default is None
    lines = [line.strip() for line in inspect.getdoc(price).splitlines()]
    assert lines[3:6] == [
        "name: of the cake.",
        "layers: How many; auto: the best.",
        "eggs: Of hens. By default as in the book.",
    ]
    assert "sugar: In cups; see eggs." in lines
    assert lines[-1] == "Raises UserError."
    with pytest.raises(UserError, match="salt: there is no such argument; known: name, layers"):
        price("sponge", salt=1)
    for wrong, why in (
        ({"layers": 0}, "layers 0: give auto or a whole number from 1"),
        ({"eggs": 0}, "eggs 0: give a whole number from 1"),
        ({"sugar": None}, "sugar None: give a number from 0"),
        ({"sugar": 1e10}, "sugar 1.*: give a number from 0 to 1e"),
        ({"ripe": 1}, "ripe 1: give a number above 0 and below 1"),
        ({"filling": "mud"}, "filling 'mud': give one of none, jam"),
        ({"filling": 3}, "filling: give a name in quotes, not 3"),
        ({"icing": "no"}, "icing: give True or False, not 'no'"),
    ):
        with pytest.raises(UserError, match=why):
            price("sponge", **wrong)


@taking_more(Cake)
def bill(name: str, icing: bool = False, **more) -> str:
    """Make it out.

    Args:
        name: of the cake.
        icing: whether that is extra.
    """
    return f"{name}, {sorted(more)}"


def test_fields_are_listed_where_a_function_takes_some_more():
    assert bill("sponge", eggs=3) == "sponge, ['eggs']"
    signature = inspect.signature(bill)
    names = list(signature.parameters)
    assert names[:2] == ["name", "icing"]
    assert {*names[2:-1]} == {*option_fields(Cake)} - {"icing"}
    assert names[-1] == "more"
    assert signature.parameters["eggs"].default is None
    assert signature.parameters["sugar"].default == 1.0
    text = inspect.getdoc(bill)
    assert text.count("icing:") == text.count("eggs:") == 1


def test_fields_are_asked_for_by_mark_and_by_difference():
    assert marked(Cake, "sweet") == ("sugar",)
    assert given(Cake("x", sugar=2.0), ("sugar", "eggs")) == {"sugar": 2.0}
