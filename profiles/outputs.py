"""What a command may write over: files of the kind that it writes, known by their content."""

from __future__ import annotations

import json
import os
import re
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from .errors import FileError, UserError
from .files import MAX_FILE_BYTES, check_writable, is_stream, read_toml

GENERATOR = "TiMePReSt"
"""Pages name it in a meta element."""
MADE_BY = ("made_by", "timeprest")
"""An entry of the metadata of safetensors files that are written for users."""


class Kind(Enum):
    """Kinds of output, each as messages name it."""

    PROFILE = "a profile"
    PLAN = "a plan"
    CLUSTER = "a cluster file"
    PAGE = "a page (HTML) of ours"
    FIGURE = "a figure (SVG) of ours"
    TRACE = "a Chrome trace of ours"
    MODEL = "an exported model"


RUN_FILES = (
    *("plan.json", "settings.json", "metrics.jsonl", "summary.json", "lock", "lock.workers"),
)
RUN_FOLDERS = (
    *("stages", "operations", "recorded", "gradients", "checkpoints", "weights", "reports"),
    *("errors", "status", "logs"),
)
RUN_OWN = RUN_FILES + RUN_FOLDERS
"""What a run directory holds (`runtime.records.run_dir`)."""

_HEAD = 1 << 16
_TAG = re.compile(rb'\s*\{\s*"format"\s*:\s*"timeprest-([a-z-]+)/')
_SVG = re.compile(
    rb'<\?xml[^>]*>\s*<svg xmlns="http://www\.w3\.org/2000/svg" width="[\d.]+mm" '
    rb'height="[\d.]+mm" viewBox="[^"]*" role="img" font-family='
)
_PAGE = re.compile(rb'<meta name="generator" content="' + GENERATOR.encode() + rb'">')
_TRACE = re.compile(rb'\{"otherData":\{"made_by":"timeprest ')
_TAGGED: dict[str, Kind | str] = {
    "profile": Kind.PROFILE,
    "plan": Kind.PLAN,
    "run": "the settings of a run",
    "checkpoint": "the list of a checkpoint's files",
    "worker-state": "a worker's state in a checkpoint",
}
_SUFFIXES = {
    ".py": "a Python file",
    ".toml": "a TOML file",
    ".json": "a JSON file of another kind",
    ".jsonl": "a log",
    ".md": "a text",
    ".txt": "a text",
    ".onnx": "an ONNX model",
}


def check_output(path: str | Path, kind: Kind) -> None:
    """Refuse a place where an output can't be written, or something else would be lost.

    What isn't a file, like /dev/stdout, is written to, whatever it is.

    Raises FileError: a file of another kind stands there, or a file of a run's own; or as
    `check_writable`.
    """
    path = Path(path)
    check_writable(path)
    run = run_above(path)
    if run is not None:
        raise FileError(
            f"{path}: belongs to the run in {run}, which needs it as it is; give another name"
        )
    if not path.is_file() or is_stream(path):
        return
    found = standing(path)
    if found not in (None, kind):
        noun = found.value if isinstance(found, Kind) else found
        raise FileError(
            f"{path}: isn't overwritten: {noun} stands there, and this would be {kind.value}; "
            "give another name, or remove it first"
        )


def check_outputs(*wanted: tuple[str, str | Path | None, Kind]) -> None:
    """The same for all outputs of a command, before it writes the first one.

    Args:
        wanted: each with its option; None: it isn't asked for.

    Raises as `check_output`; UserError: two of them would go to one file.
    """
    taken: dict[str, str] = {}
    for option, path, kind in wanted:
        if path is None:
            continue
        check_output(path, kind)
        place = os.path.realpath(path)
        if place in taken and not is_stream(Path(path)):
            raise UserError(f"{taken[place]}, {option}: both name {path}; give each its own file")
        taken[place] = option


def standing(path: Path) -> Kind | str | None:
    """What a file is: a kind of ours, words for another one, or None where it is empty.

    Raises FileError where it can't be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise FileError(
            f"{path}: isn't overwritten: what stands there can't be read: {error.strerror}"
        ) from None
    if not head:
        return None
    for pattern, kind in ((_SVG, Kind.FIGURE), (_TRACE, Kind.TRACE)):
        if pattern.match(head):
            return kind
    if _PAGE.search(head):
        return Kind.PAGE
    tag = _TAG.match(head)
    name = tag[1].decode() if tag else _tag_within(path, head, size)
    if name is not None:
        return _TAGGED.get(name, f"timeprest's file of the kind {name!r}")
    metadata = _safetensors_metadata(path, head)
    if metadata is not None:
        ours = metadata.get(MADE_BY[0]) == MADE_BY[1]
        return Kind.MODEL if ours else "a file of tensors (safetensors) of another origin"
    suffix = path.suffix.lower()
    if suffix == ".toml" and _is_cluster(path):
        return Kind.CLUSTER
    if head.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
        return "a page (HTML) of another origin"
    if b"<svg" in head:
        return "a figure (SVG) of another origin"
    return _SUFFIXES.get(suffix, "a file of another kind")


def run_above(path: Path) -> Path | None:
    """The run directory to whose own files a path belongs; None: it is none of them."""
    inside = Path(os.path.abspath(path))
    for folder in inside.parents:
        if inside.relative_to(folder).parts[0] in RUN_OWN and holds_settings(folder):
            return folder
    return None


def holds_settings(folder: Path) -> bool:
    """Whether a folder has a run's settings in it."""
    settings = folder / "settings.json"
    try:
        if not settings.is_file():
            return False
        with settings.open("rb") as file:
            tag = _TAG.match(file.read(256))
    except (OSError, ValueError):
        return False
    return tag is not None and tag[1] == b"run"


def _tag_within(path: Path, head: bytes, size: int) -> str | None:
    """The kind in a file of ours that was written anew with its fields in another sequence."""
    if head.lstrip()[:1] != b"{" or size > MAX_FILE_BYTES:
        return None
    try:
        found = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    name = found.get("format") if isinstance(found, dict) else None
    match = re.match(r"timeprest-([a-z-]+)/", name) if isinstance(name, str) else None
    return match[1] if match else None


def _safetensors_metadata(path: Path, head: bytes) -> dict[str, Any] | None:
    """A safetensors file's metadata; None: it is no such file."""
    length = int.from_bytes(head[:8], "little")
    if head[8:9] != b"{" or length > MAX_FILE_BYTES:
        return None
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(8 + length)[8:])
    except (OSError, ValueError, RecursionError):
        return None
    metadata = found.get("__metadata__", {}) if isinstance(found, dict) else None
    return metadata if isinstance(metadata, dict) else None


def _is_cluster(path: Path) -> bool:
    try:
        found = read_toml(path, "")
    except FileError:
        return False
    return isinstance(found.get("devices"), list)
