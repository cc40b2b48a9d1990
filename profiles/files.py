"""Profile and plan files: JSON with a format name, read strictly, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .errors import FileError

MAX_FILE_BYTES = 256 * 2**20
"""A profile or plan larger than this isn't read: 256 MiB."""

T = TypeVar("T", bound=msgspec.Struct)


def read_file(path: str | Path, kind: type[T]) -> T:
    """Read a file of the given struct type.

    Raises:
        FileError: missing, unreadable, too large, not JSON, of another format, or a field
            that is unknown, missing or out of range; the message names the file and field.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FileError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB; not read")
        text = path.read_bytes()
    except FileNotFoundError:
        raise FileError(f"{path}: no such file; {_how_to_make(kind)}") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path}: can't be read: {reason}") from None
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON: {error}") from None
    wanted = _format_of(kind)
    have = found.get("format") if isinstance(found, dict) else None
    if have != wanted:
        shown = f"its format is {have!r}" if isinstance(have, str) else "it has no format name"
        raise FileError(
            f"{path}: not a {_noun(kind)} file: {shown}, expected {wanted!r}; {_how_to_make(kind)}"
        )
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FileError(f"{path}: {error}") from None


def write_file(path: str | Path, value: msgspec.Struct) -> None:
    """Write a struct as indented JSON. Raises FileError when the path can't be written."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1)
    write_bytes(path, text + b"\n")


def check_writable(path: str | Path) -> None:
    """Raise FileError now if `path` couldn't be written at the end of long work."""
    path = Path(path)
    folder = path.parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if path.is_dir():
        raise FileError(f"{path}: is a folder; give the name of a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileError(f"{path}: can't be written: {folder} isn't a folder one can write to")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to a temporary file beside `path`, then rename it there."""
    path = Path(path)
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes files that only their owner can read; these are meant to be shared.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except OSError as error:
        raise FileError(f"{path}: can't be written: {error.strerror or error}") from None
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _format_of(kind: type[msgspec.Struct]) -> Any:
    return kind.__struct_config__.tag


def _noun(kind: type[msgspec.Struct]) -> str:
    return str(_format_of(kind)).split("/")[0].removeprefix("timeprest-")


def _how_to_make(kind: type[msgspec.Struct]) -> str:
    made_by = {"profile": "tp-profile TARGET -o FILE", "plan": "tp-plan solve PROFILE -o FILE"}
    command = made_by.get(_noun(kind))
    return f"make one with {command}" if command else "check the path"
