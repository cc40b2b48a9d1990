"""Profile and plan files: JSON with a format name, read strictly, written whole or not at all."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from .errors import FileError

# How large numbers in files and options may be: sums and products of them stay finite -----------
# Far above what any model or cluster has, and far below where arithmetic ends.

MAX_FILE_BYTES = 256 * 2**20
"""A file larger than this isn't read: 256 MiB."""
MAX_TOML_BYTES = 4 * 2**20
"""TOML takes a hundred times as long to read."""
MAX_LOG_BYTES = 2**31
"""A run writes logs line by line; larger ones aren't read: 2 GiB."""
MAX_BYTES = 2**50
"""Of one layer, tensor or device: 1 PiB."""
MAX_SECONDS = 1e9
"""Of one layer or message: 30 years."""
MIN_SECONDS = 1e-30
"""What is shorter and not 0 has too few digits left to reckon with."""
MAX_COUNT = 2**40
"""Of samples, mini-batches, updates."""
MAX_THREADS = 1024
"""Torch starts as many as it is told, however few cores there are."""
MAX_FACTOR = 1e9
"""Of ratios: a device's speed, an optimizer's state."""
MAX_PREDICTED = 1e60
"""Of what is computed from all of these."""

Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
Bytes = Annotated[int, Meta(ge=0, le=MAX_BYTES)]
BytesPerSample = Annotated[float, Meta(ge=0, le=MAX_BYTES)]
Count = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Tally = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Threads = Annotated[int, Meta(ge=1, le=MAX_THREADS)]
Factor = Annotated[float, Meta(ge=0, le=MAX_FACTOR)]
Bandwidth = Annotated[float, Meta(ge=1, le=float(2**62))]
"""In bytes per second."""
TotalBytes = Annotated[int, Meta(ge=0)]
"""Over layers and micro-batches: more than one layer's limit. `read_file` limits the digits."""
Predicted = Annotated[float, Meta(ge=0, le=MAX_PREDICTED)]


def ratio(amount: float, per: float) -> float:
    """amount / per; 0 where that says nothing, `per` being 0 or next to it."""
    found = amount / per if per else 0.0
    return found if found <= MAX_PREDICTED else 0.0


# Profile and plan files: JSON with a format name, read strictly, written whole or not at all ----

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LONG_NUMBER = re.compile(rb"\d{60}")

T = TypeVar("T", bound=msgspec.Struct)


def read_file(path: str | Path, kind: type[T]) -> T:
    """Read a file of the given struct type.

    Raises:
        FileError: missing, unreadable, too large, not JSON, of another format, or a field
            that is unknown, missing or out of range; the message names the file and field.
    """
    path = Path(path)
    text = read_limited(path, _how_to_make(kind))
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
    if _LONG_NUMBER.search(text):
        _check_digits(path, found, "$")
    try:
        return msgspec.convert(found, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise FileError(f"{path}: {error}") from None


def read_limited(path: Path, hint: str, *, most: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a file that is no larger than `most`.

    Args:
        hint: where there is no such file, what to do about it.

    Raises FileError: missing, unreadable, too large, or no file: a pipe or device has no end.
    """
    check_regular(path, hint)
    try:
        with path.open("rb") as file:
            # One byte more than may be: some files, like those of /proc, don't tell their size.
            too_large = os.fstat(file.fileno()).st_size > most
            text = b"" if too_large else file.read(most + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path}: can't be read: {reason}") from None
    if too_large or len(text) > most:
        raise FileError(f"{path}: larger than {most >> 20} MiB; not read")
    return text


def check_regular(path: Path, hint: str = "") -> None:
    """Raise FileError unless there is such a file, and no folder, pipe or device."""
    more = f"; {hint}" if hint else ""
    try:
        if not path.exists():
            raise FileError(f"{path}: no such file{more}")
        if not path.is_file():
            raise FileError(f"{path}: isn't a file{more}")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path}: can't be read: {reason}") from None


def read_lines(path: Path, size: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a log that are whole, each a JSON object, counted from 1.

    Args:
        size: of its beginning alone, so many bytes.

    A log that isn't there has none; of one that is being written, the last line may be a part.

    Raises FileError as `read_limited`; for what is no such line, with its number.
    """
    if not os.path.lexists(path):
        return
    text = read_limited(path, "", most=MAX_LOG_BYTES)
    lines = text[:size].splitlines()
    if size is None and lines and text[-1:] != b"\n" and lines[-1].startswith(b"{"):
        del lines[-1]
    for number, line in enumerate(lines, start=1):
        try:
            found = msgspec.json.decode(line)
            if not isinstance(found, dict):
                raise ValueError("isn't a JSON object")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise FileError(f"{path}: line {number}: {error}") from None
        yield number, found


def read_toml(path: Path, hint: str) -> dict[str, Any]:
    """The tables of a TOML file of 4 MiB at most. Raises FileError like `read_limited`."""
    text = read_limited(path, hint, most=MAX_TOML_BYTES)
    try:
        found: dict[str, Any] = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid TOML: {error}") from None
    return found


def is_file(path: str | Path) -> bool:
    """Whether there is such a file; what can't be a file's name is none."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def is_stream(path: Path) -> bool:
    """Whether what is written there goes on to somebody: a pipe, a device, or a name for one."""
    absolute = os.path.abspath(path)
    if absolute.startswith(("/dev/", "/proc/")) and not absolute.startswith("/dev/shm/"):
        # /dev/stdout may lead to a file, and is no file itself.
        return not path.is_dir()
    return path.exists() and not path.is_file() and not path.is_dir()


def _check_digits(path: Path, value: Any, where: str) -> None:
    """Whole numbers have no limit in JSON, and can't all become floats."""
    if isinstance(value, int) and abs(value) > MAX_PREDICTED:
        raise FileError(f"{path}: number out of range - at `{where}`")
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            step = f".{key}" if isinstance(value, dict) else f"[{key}]"
            _check_digits(path, item, where + step)


def write_file(path: str | Path, value: msgspec.Struct) -> None:
    """Write a struct as indented JSON. Raises FileError when the path can't be written."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1)
    write_bytes(path, text + b"\n")


def check_writable(path: str | Path) -> None:
    """Raise FileError now if `path` couldn't be written at the end of long work."""
    path = Path(path)
    folder = path.parent
    try:
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if path.is_dir():
            raise FileError(f"{path}: is a folder; give the name of a file")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise FileError(f"{path}: can't be written: {reason}") from None
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileError(f"{path}: can't be written: {folder} isn't a folder one can write to")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to a temporary file beside `path`, then rename it there.

    What is there and isn't a file, like /dev/stdout, is written to and stays what it is.
    """
    path = Path(path)
    temporary: str | None = None
    try:
        if is_stream(path):
            path.write_bytes(data)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes files that only their owner can read; these are meant to be shared.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise FileError(f"{path}: can't be written: {reason or error}") from None
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
