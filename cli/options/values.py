"""Kinds of values that options and arguments take: how they are read, and completed by a shell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem

from ...planner.systems.variants import VARIANTS
from ...profiles import plugins
from ...profiles.files import MAX_COUNT
from ..errors import errors_as_lines


class Whole(click.types.IntParamType):
    """A whole number that files can hold too; help says nothing of its limits."""

    def __init__(self, least: int = 1, most: int = MAX_COUNT) -> None:
        self.least, self.most = least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's. Raises click.BadParameter."""
        found = super().convert(value, param, ctx)
        if found < self.least:
            self.fail(f"{found} is less than {self.least}.", param, ctx)
        if found > self.most:
            self.fail(f"{found} is more than {self.most}.", param, ctx)
        return found


class Number(click.types.FloatParamType):
    """A finite number from `least` to `most`, or above `least`; None is no limit. Help says nothing
    of these."""

    name = "number"

    def __init__(self, least: float | None, most: float | None, *, above: bool = False) -> None:
        self.least = -math.inf if least is None else least
        self.most, self.above = math.inf if most is None else most, above

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's, which lets nan and inf pass. Raises click.BadParameter."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} isn't a finite number.", param, ctx)
        if self.above and found <= self.least:
            self.fail(f"{found:g} isn't above {self.least:g}.", param, ctx)
        if found < self.least:
            self.fail(f"{found:g} is less than {self.least:g}.", param, ctx)
        if found > self.most:
            self.fail(f"{found:g} is more than {self.most:g}.", param, ctx)
        return found


class Fraction(click.FloatRange):
    """A number from 0 to 1; help says which of the two it may be."""

    name = "number"

    def __init__(self, *, min_open: bool = False, max_open: bool = False) -> None:
        super().__init__(0, 1, min_open=min_open, max_open=max_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's, which lets nan pass. Raises click.BadParameter."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value!r} isn't a finite number.", param, ctx)
        return found


class WordOrPlugin(click.Choice[str]):
    """One of a few words, or a name of a kind of plugins (`profiles.plugins`), which are looked for
    when they are asked for."""

    def __init__(self, words: Iterable[str], kind: plugins.Kind) -> None:
        self.words, self.kind = tuple(words), kind
        self.case_sensitive = True

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """All that there are."""
        return (*self.words, *errors_as_lines(plugins.names)(self.kind))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value in self.words else super().convert(value, param, ctx)


class Name(click.types.StringParamType):
    """A name that a shell completes; whoever uses it checks it."""

    completes = ""
    """"file" or "dir": the shell knows them."""

    def words(self) -> Iterable[str]:
        """Names that it may be besides."""
        return ()

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        known = [CompletionItem(incomplete, type=self.completes)] if self.completes else []
        return known + [CompletionItem(w) for w in self.words() if w.startswith(incomplete)]


class FileName(Name):
    """A file's name, or a file.py:NAME."""

    name = completes = "file"


class FigureName(FileName):
    """The name of a figure's file: SVG, or PDF where it ends so."""

    _OTHERS = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".eps", ".ps")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As click's. Raises click.BadParameter for names of pictures that aren't drawn."""
        found = super().convert(value, param, ctx)
        if str(found).lower().endswith(self._OTHERS):
            self.fail(
                f"{found!r}: figures are SVG or PDF; end the name in .svg or .pdf", param, ctx
            )
        return found


class FolderName(Name):
    """A folder's name, such as a run's."""

    name, completes = "folder", "dir"


class SystemName(Name):
    """A training system's name, or ``all``."""

    name = "system"

    def words(self) -> Iterable[str]:
        """The systems of the table."""
        return (*VARIANTS, "all")


class TargetName(FileName):
    """What `tp-profile` measures: a built-in name, or a file's."""

    name = "target"

    def words(self) -> Iterable[str]:
        """Built-in tasks and networks."""
        return sorted(plugins.names("tasks"))
