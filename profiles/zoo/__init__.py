"""Built-in tasks: real data that needs no download.

Adding one: a module here with a class that follows `profiles.task.Task`, and a line in BUILT_IN.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import TargetError
from ..task import Task


def _digits(argument: str | None) -> Task:
    from .digits import Digits

    if argument is not None:
        raise TargetError("digits takes no argument: write just `digits`")
    return Digits()


def _text(argument: str | None) -> Task:
    from .text import Text

    return Text(argument)


BUILT_IN: dict[str, Callable[[str | None], Task]] = {"digits": _digits, "text": _text}
"""Maker of each built-in task; it gets what stands behind the colon of the target, if anything."""
