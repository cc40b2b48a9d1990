"""Arguments behind a target's colon: ``key=value`` pairs, as in ``gpt2:layers=2,width=64``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

from ..errors import TargetError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Settings = TypeVar("Settings", bound="DataclassInstance")

LIMITS = {
    "size": (1, 8192),
    "layers": (1, 1000),
    "depth": (1, 1000),
    "vocabulary": (8, 2**20),
    "context": (4, 2**20),
    "length": (4, 2**20),
    "tied": (0, 1),
}
"""Least and greatest value of integers; those not named here: 1 and 2²⁰."""


def parse(target: str, argument: str | None, defaults: Settings) -> Settings:
    """The defaults with what the user wrote in their place.

    Args:
        target: name of the target, for messages.
        argument: what stands behind the colon, None for nothing.
        defaults: a dataclass; a field with a float as default is a probability (0 ≤ p < 1),
            any other an integer.

    Raises:
        TargetError: a key that isn't a field, or a value that isn't a number of its kind.
    """
    known = {field.name: getattr(defaults, field.name) for field in fields(defaults)}
    found: dict[str, int | float] = {}
    for key, text in pairs(target, argument or "", known).items():
        if key not in known:
            raise wrong(target, f"there is no {key!r}", known)
        if isinstance(known[key], float):
            found[key] = _probability(target, key, text, known)
        else:
            found[key] = _integer(target, key, text, known)
    return replace(defaults, **found)


def pairs(target: str, text: str, known: Iterable[str]) -> dict[str, str]:
    """``"a=1,b=2"`` → ``{"a": "1", "b": "2"}``. Raises TargetError for anything else."""
    found: dict[str, str] = {}
    for item in text.split(",") if text else ():
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise wrong(target, f"{item!r} isn't of the form key=value", known)
        if key in found:
            raise wrong(target, f"{key!r} is given twice", known)
        found[key] = value
    return found


def wrong(target: str, what: str, known: Iterable[str]) -> TargetError:
    """The error for an argument: what is wrong with it, and which keys there are."""
    return TargetError(f"{target}: {what}; its arguments are {', '.join(known)}")


def check(target: str, settings: DataclassInstance, holds: bool, what: str) -> None:
    """Raise TargetError, with `what` is wrong, for settings that don't go together."""
    if not holds:
        raise wrong(target, what, [field.name for field in fields(settings)])


@dataclass(frozen=True)
class TransformerSettings:
    """Shape of a transformer; `length` of the samples is the context where it is None.

    With `tied` 0 the head has weights of its own, so that it needn't share the embedding's stage.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    dropout: float = 0.1
    length: int | None = None
    tied: int = 1

    @property
    def positions(self) -> int:
        """Of a sample."""
        return self.length or self.context


def check_transformer(target: str, settings: TransformerSettings) -> None:
    """Raise TargetError for a width that can't be divided among the heads, or longer sequences
    than there are positions for."""
    width, heads, context = settings.width, settings.heads, settings.context
    length = settings.positions
    check(target, settings, width % heads == 0, f"width={width} isn't a multiple of heads={heads}")
    check(target, settings, length <= context, f"length={length} is more than context={context}")


def _integer(target: str, key: str, text: str, known: Iterable[str]) -> int:
    low, high = LIMITS.get(key, (1, 2**20))
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise wrong(target, f"{key}={text}: must be a whole number from {low} to {high}", known)
    return value


def _probability(target: str, key: str, text: str, known: Iterable[str]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise wrong(target, f"{key}={text}: must be a number from 0 to below 1", known)
    return value
