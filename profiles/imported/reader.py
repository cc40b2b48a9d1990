"""Profiles that are read instead of measured: tables of costs, and files that plugins import."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import plugins
from ..errors import FileError, PluginError, TargetError
from ..files import read_json
from ..profile import Profile
from .table import EXPECTED, import_table

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
    if not suffix or (suffix != _TABLE and suffix not in plugins.names("importers")):
        return False
    try:
        if path.is_file():
            with path.open("rb") as file:
                return not _OURS.match(file.read(256))
    except (OSError, ValueError):
        pass
    return ":" not in str(path)


def import_profile(
    path: str | Path,
    *,
    batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    edges: str | Path | None = None,
) -> Profile:
    """Read a table of costs, or a file that a plugin imports.

    Args:
        batch_size: samples in a mini-batch; a table's numbers are for so many.
        micro_batch_sizes: sizes to list besides the file's own, with costs in proportion.
        edges: with a table of costs, the table of its edges; None: each layer feeds the next.

    Raises:
        FileError: no such file, of another kind, or malformed; names the line or the place.
        TargetError: a batch size is missing, or the sizes contradict each other.
        PluginError: a plugin gives something else than a profile.
    """
    where, suffix = str(path), Path(path).suffix.lower()
    if suffix == _TABLE:
        return import_table(where, read_text(where, EXPECTED), batch_size, micro_batch_sizes, edges)
    if edges is not None:
        raise TargetError(f"{edges}: edges go with a table of costs (.csv); {where} has its own")
    found: Any = plugins.load("importers", suffix)(where, batch_size, micro_batch_sizes)
    if not isinstance(found, Profile):
        raise PluginError(f"importer {suffix}: gives a {type(found).__name__}; give a Profile")
    return found


def read_text(where: str, expected: str) -> str:
    """A text file of moderate size. Raises FileError saying what was expected."""
    try:
        return read_json(Path(where), expected).decode("utf-8")
    except UnicodeDecodeError as error:
        raise FileError(f"{where}: isn't text: {error}; {expected}") from None
