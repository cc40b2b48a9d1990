"""Profiles that are read instead of measured: tables of costs, and files that plugins import."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import plugins
from ..errors import TargetError
from ..options import OptionField, Spelled, option_fields, read_record
from ..profile import Profile
from .table import EXPECTED, import_table, read_text

_OURS = re.compile(rb'\s*\{\s*"format"\s*:\s*"timeprest-')
_TABLE = ".csv"


def is_foreign(path: str | Path) -> bool:
    """Whether `import_profile` is the one to read this, or to say what is wrong with it.

    True for tables (.csv) and files with a suffix that a plugin imports, but our own, which begin
    with their format's name. What can't be read counts by its suffix, unless it has a colon, as
    ``text:FILE`` has.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if not suffix or (suffix != _TABLE and not _names(suffix)):
        return False
    try:
        if path.is_file():
            with path.open("rb") as file:
                return not _OURS.match(file.read(256))
    except (OSError, ValueError):
        pass
    return ":" not in str(path)


def _names(suffix: str) -> list[str]:
    """Of importers of files with a suffix: that itself, or with their format before it."""
    return [name for name in plugins.names("importers") if name.endswith(suffix)]


def import_profile(
    path: str | Path,
    *,
    batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    edges: str | Path | None = None,
    spelled: Spelled = str,
    **options: Any,
) -> Profile:
    """Read a table of costs, or a file that a plugin imports.

    Args:
        batch_size: samples in a mini-batch; a table's numbers are for so many.
        micro_batch_sizes: sizes to list besides the file's own, with costs in proportion.
        edges: with a table of costs, the table of its edges; None: each layer feeds the next.
        spelled: what messages call an option.
        options: of the file's importer (`options_of_importers`).

    Raises:
        FileError: no such file, of another kind, or malformed; names the line or the place.
        TargetError: a batch size is missing, or the sizes contradict each other.
        PluginError: a plugin gives something else than a profile.
    """
    where, suffix = str(path), Path(path).suffix.lower()
    if edges is not None and suffix != _TABLE:
        raise TargetError(f"{edges}: edges go with a table of costs (.csv); {where} has its own")
    given = {name: value for name, value in options.items() if value is not None}
    importer = None if suffix == _TABLE else _importer(suffix, given)
    known = _options(importer)
    for name in given:
        if name not in known:
            more = f"; it has {', '.join(map(spelled, known))}" if known else ""
            raise TargetError(f"{spelled(name)}: {where} has no such option{more}")
    if importer is None:
        return import_table(where, read_text(where, EXPECTED), batch_size, micro_batch_sizes, edges)
    if known:
        importer = importer(**read_record(importer(**given), spelled))
    sizes = batch_size, micro_batch_sizes
    found: Profile = plugins.made(f"importer {suffix}", importer, where, *sizes, gives=Profile)
    return found


def options_of_importers(paths: Iterable[str]) -> list[type]:
    """Records of the options that importers of such files have. Raises PluginError."""
    suffixes = {Path(path).suffix.lower() for path in paths} - {"", _TABLE}
    found = [plugins.load("importers", n) for suffix in suffixes for n in _names(suffix)]
    return [importer for importer in found if _options(importer)]


def _options(importer: Any) -> Mapping[str, OptionField]:
    return option_fields(importer) if dataclasses.is_dataclass(importer) else {}


def _importer(suffix: str, given: Collection[str]) -> Any:
    """The first that has the options given, of those without options first: a file's own options
    say what it is. Raises PluginError where none is there."""
    found = [plugins.load("importers", name) for name in _names(suffix) or [suffix]]
    found.sort(key=lambda importer: len(_options(importer)))
    having = (importer for importer in found if set(given) <= set(_options(importer)))
    return next(having, found[-1])
