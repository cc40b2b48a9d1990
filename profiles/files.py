"""Files that people and other commands read: limits, reading, writing, what may be overwritten.

Profile and plan files are JSON with a format name, read strictly, written whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from . import plugins
from .errors import FileError, UserError

# Limits of the numbers in files and options -----------------------------------------------------
# Far above what any model or cluster has, and far below where sums and products cease to be finite.

MAX_FILE_BYTES = 64 * 2**20
"""A file larger than this isn't read: 64 MiB; some kinds of files have less (`TaggedFile.most`)."""
MAX_VALUES = 4 * 2**20
"""In a file of JSON, or a table: each takes some tens of bytes in memory, however short it is."""
MAX_TOML_BYTES = 2**20
MAX_TOML_DOTS, MAX_TOML_KEYS = 1000, 100_000
"""Of a line, where a key takes memory by the square of its parts; of a file, 1 KB each."""
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
MAX_SCHEDULED = 4096
"""Of what schedules list or simulate one by one: micro-batches, mini-batches until an update."""
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
ScheduleCount = Annotated[int, Meta(ge=1, le=MAX_SCHEDULED)]
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


# Reading and writing ----------------------------------------------------------------------------

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_LONG_NUMBER = re.compile(rb"\d{60}")


class TaggedFile(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="format"
):
    """A file of ours; its `tag` is the name of its format."""

    most: ClassVar[int] = 32 * 2**20
    """Bytes of a file."""
    older: ClassVar[Mapping[str, Callable[[Any], None]]] = {}
    """Formats that are still read, and what makes an object of this one of theirs; raises
    FileError where it can't."""


class Views(Protocol):
    """What shows profiles, plans and runs to people: a plugin does."""

    def html(self, shown: Any) -> str:
        """As a notebook shows it."""

    def show(self, shown: Any) -> None:
        """Print it."""

    def compare(self, shown: Sequence[Any]) -> Any:
        """Several of one kind side by side; shows itself, too."""


def _views() -> Views:
    """Raises PluginError where there are none."""
    found: Views = plugins.load("views", next(iter(plugins.names("views")), "notebook"))
    return found


class Shown:
    """Shows itself in a notebook and on a terminal, and beside others of its kind."""

    __slots__ = ()

    def show(self) -> None:
        """Print tables, as the commands do."""
        _views().show(self)

    def compare(self, *others: Any) -> Any:
        """This and others of its kind side by side: shows itself in a notebook, or by `show()`."""
        return _views().compare((self, *others))

    def _repr_html_(self) -> str:
        return _views().html(self)


T = TypeVar("T", bound=TaggedFile)
S = TypeVar("S", bound=msgspec.Struct)


def read_file(path: str | Path, kind: type[T]) -> T:
    """Read a file of the given struct type.

    Raises FileError naming the file and field: missing, unreadable, too large, not JSON, of another
    format, or a field that is unknown, missing or out of range.
    """
    path = Path(path)
    text = read_json(path, _how_to_make(kind), most=kind.most)
    try:
        have = msgspec.json.decode(text, type=_OwnWords).format or None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        have = None
        if _noun(kind) == "profile" and path.suffix.lower() == ".csv":
            made = f"tp-profile {path} --batch-size N -o FILE"
            raise FileError(f"{path}: a table becomes a profile by {made}") from None
        if not isinstance(error, msgspec.ValidationError):
            raise FileError(f"{path}: not valid JSON: {_in_lines(str(error), text)}") from None
    wanted = kind.__struct_config__.tag
    if have != wanted and have not in kind.older:
        shown = f"its format is {have!r}" if have else "it has no format name"
        raise FileError(
            f"{path}: not a {_noun(kind)} file: {shown}, expected {wanted!r}; {_how_to_make(kind)}"
        )
    try:
        if have == wanted and not _LONG_NUMBER.search(text):
            return msgspec.json.decode(text, type=kind)
        found = msgspec.json.decode(text)
        if have is not None and have != wanted:
            kind.older[have](found)
            found["format"] = wanted
        _check_digits(found, "$")
        return msgspec.convert(found, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, FileError) as error:
        raise FileError(f"{path}: {error}") from None


def _in_lines(error: str, text: bytes) -> str:
    """A decoder's error with the line and column where it says at which byte."""
    found = re.search(r" \(byte (\d+)\)$", error)
    if found is None:
        return error
    at = int(found[1])
    line, column = text.count(b"\n", 0, at) + 1, at - text.rfind(b"\n", 0, at)
    return f"{error[: found.start()]} (line {line}, column {column})"


def read_json(path: Path, hint: str, *, most: int = MAX_FILE_BYTES) -> bytes:
    """As `read_limited`, of a file of JSON or a table: of `MAX_VALUES` values at most. The mark
    that some editors begin files with is left out."""
    text = read_limited(path, hint, most=most).removeprefix(BOM_UTF8)
    # What begins a value, or comes between two; in a table a line, too.
    count = sum(map(text.count, (b",", b"[", b"{"))) + text.count(b"\n") * (b"{" not in text)
    if count > MAX_VALUES:
        raise FileError(f"{path}: has more than {MAX_VALUES >> 20} million values; not read")
    return text


def read_limited(path: Path, hint: str, *, most: int = MAX_FILE_BYTES) -> bytes:
    """The bytes of a file that is no larger than `most`.

    Raises FileError: missing, with a hint what to do about it, unreadable, too large, or no file: a
    pipe or device has no end.
    """
    check_regular(path, hint)
    with file_errors(path, "read"), path.open("rb") as file:
        # Reading takes as much memory as is asked for; files as in /proc tell no size.
        size = os.fstat(file.fileno()).st_size
        text = file.read(size or min(most, 1 << 20)) if size <= most else b""
    if size > most:
        raise FileError(f"{path}: larger than {most >> 20} MiB; not read")
    return text


def check_regular(path: Path, hint: str = "") -> None:
    """Raise FileError unless there is such a file, and no folder, pipe or device."""
    more = f"; {hint}" if hint else ""
    with file_errors(path, "read"):
        if not path.exists():
            raise FileError(f"{path}: no such file{more}")
        if not path.is_file():
            raise FileError(f"{path}: isn't a file{more}")


@contextmanager
def file_errors(path: Path, done: str) -> Iterator[None]:
    """Raise FileError where a file can't be `done`, as "read" or "written", or have its name."""
    try:
        yield
    except (OSError, ValueError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise FileError(f"{path}: can't be {done}: {reason or str(error) or 'no memory'}") from None


def read_lines(path: Path, size: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines of a log, or of its first `size` bytes, that are whole, each a JSON object, counted
    from 1.

    A log that isn't there has none; of one that is being written, the last line may be a part.

    Raises FileError as `read_limited`; for what is no such line, with its number.
    """
    for number, line in enumerate(raw_lines(path, size), start=1):
        try:
            found = msgspec.json.decode(line)
            if not isinstance(found, dict):
                raise ValueError("isn't a JSON object")
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise FileError(f"{path}: line {number}: {error}") from None
        yield number, found


def raw_lines(path: Path, size: int | None = None) -> Iterator[bytes]:
    """The same lines as they are, one at a time. Raises FileError."""
    if not os.path.lexists(path):
        return
    check_regular(path)
    left = MAX_LOG_BYTES if size is None else size
    with file_errors(path, "read"), path.open("rb") as file:
        while line := file.readline(min(left, MAX_FILE_BYTES)):
            left -= len(line)
            if line[-1:] != b"\n" and len(line) == MAX_FILE_BYTES:
                raise FileError(f"{path}: has a line of more than {len(line) >> 20} MiB")
            if line[-1:] == b"\n" or size is not None or line[:1] != b"{":
                yield line.rstrip(b"\r\n")
    if size is None and not left:
        raise FileError(f"{path}: larger than {MAX_LOG_BYTES >> 30} GiB; not read")


def read_toml(path: Path, hint: str) -> dict[str, Any]:
    """The tables of a TOML file of 1 MiB at most. Raises FileError like `read_limited`."""
    text = read_limited(path, hint, most=MAX_TOML_BYTES).removeprefix(BOM_UTF8)
    most = max(line.count(b".") for line in text.split(b"\n"))
    if most > MAX_TOML_DOTS or text.count(b".") + text.count(b"=") > MAX_TOML_KEYS:
        raise FileError(f"{path}: has too many keys, or a key of too many parts; not read")
    try:
        found: dict[str, Any] = tomllib.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not valid TOML: {error}") from None
    return found


_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text in quotes",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def converted(value: Any, kind: type[S], where: str) -> S:
    """Tables as a struct. Raises FileError naming where, the field, and what it may be."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        place, missing = place.strip("`."), re.fullmatch(r"Object missing.* `(.+)`", what)
        unknown = re.fullmatch(r"Object contains unknown field `(.+)`", what)
        if missing:
            place, what = f"{place}.{missing[1]}".strip("."), "is missing"
        elif unknown:
            what = f"unknown field {unknown[1]!r}; known: {', '.join(_known(kind, place))}"
        else:
            what = what.replace(" | null", "").replace("Expected", "expected")
            what = re.sub(r"`([a-z |]+)`", lambda found: _named(found[1]), what)
        raise FileError(": ".join(filter(None, (where, place, what)))) from None


def _named(types: str) -> str:
    return " or ".join(_TYPES.get(name, name) for name in types.split(" | "))


def _known(kind: type[msgspec.Struct], place: str) -> list[str]:
    """The fields of the table at a place of a struct."""
    here: Any = kind
    for name in re.findall(r"[a-z_]+", place):
        hint = get_type_hints(here)[name]
        inside = [hint, *get_args(hint)]
        here = next(t for t in inside if isinstance(t, type) and issubclass(t, msgspec.Struct))
    return list(here.__struct_fields__)


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


def _check_digits(value: Any, where: str) -> None:
    """Whole numbers have no limit in JSON, and can't all become floats. Raises FileError."""
    if isinstance(value, int) and abs(value) > MAX_PREDICTED:
        raise FileError(f"number out of range - at `{where}`")
    if isinstance(value, (dict, list)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            step = f".{key}" if isinstance(value, dict) else f"[{key}]"
            _check_digits(item, where + step)


def write_file(path: str | Path, value: msgspec.Struct) -> None:
    """Write a struct as indented JSON. Raises FileError when the path can't be written."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=1)
    write_bytes(path, text + b"\n")


def check_writable(path: str | Path) -> None:
    """Raise FileError now if `path` couldn't be written at the end of long work."""
    path = Path(path)
    folder = path.parent
    with file_errors(path, "written"):
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if path.is_dir():
            raise FileError(f"{path}: is a folder; give the name of a file")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise FileError(f"{path}: can't be written: {folder} isn't a folder one can write to")


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write `data` to a temporary file beside `path`, then rename it there.

    What is there and isn't a file, like /dev/stdout, is written to and stays what it is.
    """
    path = Path(path)
    temporary: str | None = None
    try:
        with file_errors(path, "written"):
            if is_stream(path):
                path.write_bytes(data)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            # A name's beginning, as the whole may be as long as names can be.
            handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:40]}.", dir=path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            _share(temporary, 0o666)
            os.replace(temporary, path)
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _share(path: str, mode: int) -> None:
    """Have others read what mkstemp or mkdtemp has made for its owner alone."""
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(path, mode & ~umask)


@contextmanager
def new_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write into, beside `path`; it gets that name once all is written.

    Raises FileError: it can't be written, or something stands there that isn't an empty folder.
    """
    path = Path(path)
    _check_no_runs(path)
    temporary: str | None = None
    try:
        with file_errors(path, "written"):
            if os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir())):
                raise FileError(
                    f"{path}: isn't overwritten: give a new or empty folder, or remove it first"
                )
            if not path.is_dir():
                check_writable(path)
            absolute = Path(os.path.abspath(path))
            absolute.parent.mkdir(parents=True, exist_ok=True)
            temporary = tempfile.mkdtemp(prefix=f".{absolute.name[:40]}.", dir=absolute.parent)
            yield Path(temporary)
            _share(temporary, 0o777)
            os.replace(temporary, absolute)
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _noun(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag).split("/")[0].removeprefix("timeprest-")


def _how_to_make(kind: type[msgspec.Struct]) -> str:
    made_by = {
        "profile": "tp-profile TARGET -o FILE",
        "plan": "tp-plan solve PROFILE -o FILE",
        "study": "tp-run study PLAN -o FILE",
    }
    command = made_by.get(_noun(kind))
    return f"make one with {command}" if command else "check the path"


# What a command may overwrite: files of the kind that it writes, known by their content ----------

GENERATOR = "TiMePReSt"
"""Pages name it in a meta element."""
MADE_BY = ("made_by", "timeprest")
"""An entry of the metadata of safetensors files that are written for users."""


class Kind(Enum):
    """Kinds of output, each as messages name it."""

    PROFILE = "a profile"
    PLAN = "a plan"
    STUDY = "a study"
    CLUSTER = "a cluster file"
    PAGE = "a page (HTML) of ours"
    FIGURE = "a figure of ours"
    CURVES = "a table (CSV) of curves of ours"
    TRACE = "a Chrome trace of ours"
    MODEL = "an exported model"


EXPORT_FORMATS = ("safetensors", "dcp")
"""What a run's model may be exported to; plugins have others."""

RUN_FILES = (
    *("plan.json", "settings.json", "metrics.jsonl", "summary.json", "lock", "lock.workers"),
)
RUN_FOLDERS = (
    *("stages", "operations", "recorded", "gradients", "checkpoints", "weights", "reports"),
    *("status", "logs", "dashboards"),
)
RUN_OWN = RUN_FILES + RUN_FOLDERS
"""What a run directory holds (`runtime.records.run_dir`)."""

PDF_MARK = b"% a figure of timeprest"
"""The last line of a figure in PDF."""
CURVES_HEAD = "run,system,quantity,epochs,mini_batches,seconds,value"
"""The first line of a table of curves."""

_HEAD = 1 << 16
_TAG = re.compile(rb'\s*\{\s*"format"\s*:\s*"timeprest-([a-z-]+)/')
_TAGGED = {"profile": Kind.PROFILE, "plan": Kind.PLAN, "study": Kind.STUDY}
_HEADS = (
    (
        re.compile(
            rb'\A<\?xml[^>]*>\s*<svg xmlns="http://www\.w3\.org/2000/svg" width="[\d.]+mm" '
            rb'height="[\d.]+mm" viewBox="[^"]*" role="img" font-family='
        ),
        Kind.FIGURE,
    ),
    (re.compile(rb'\A\{"otherData":\{"made_by":"timeprest '), Kind.TRACE),
    (re.compile(b'<meta name="generator" content="%b">' % GENERATOR.encode()), Kind.PAGE),
    (re.compile(rb"\A%b" % CURVES_HEAD.encode()), Kind.CURVES),
    *(
        (re.compile(rb'\A\s*\{\s*"format"\s*:\s*"timeprest-%b/' % name.encode()), kind)
        for name, kind in _TAGGED.items()
    ),
)
"""What is in a file's beginning, and the kind that it is then."""


def check_output(path: str | Path, kind: Kind) -> None:
    """Refuse a place where an output can't be written, or something else would be lost.

    What isn't a file, like /dev/stdout, is written to, whatever it is.

    Raises FileError: a file of another kind stands there, or a file of a run's own; or as
    `check_writable`.
    """
    path = Path(path)
    check_writable(path)
    _check_no_runs(path)
    if not path.is_file() or is_stream(path):
        return
    found = _standing(path)
    if found not in (None, kind):
        noun = found.value if isinstance(found, Kind) else found
        raise FileError(
            f"{path}: isn't overwritten: {noun} stands there, and this would be {kind.value}; "
            "give another name, or remove it first"
        )


def save_file(path: str | Path, value: TaggedFile) -> None:
    """Write a file of ours where nothing stands but one of its kind.

    Raises FileError as `check_output`, or when the path can't be written.
    """
    check_output(path, _TAGGED[_noun(type(value))])
    write_file(path, value)


def check_outputs(*wanted: tuple[str, str | Path | None, Kind]) -> None:
    """The same for all outputs of a command, each with its option, before it writes the first one;
    None isn't asked for.

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


def _standing(path: Path) -> Kind | str | None:
    """What a file is: a kind of ours, words for another one, None if empty. Raises FileError."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD).removeprefix(BOM_UTF8)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise FileError(
            f"{path}: isn't overwritten: what stands there can't be read: {error.strerror}"
        ) from None
    if not head:
        return None
    for pattern, kind in _HEADS:
        if pattern.search(head):
            return kind
    if head.startswith(b"%PDF-") and _ends_with(path, PDF_MARK):
        return Kind.FIGURE
    if path.suffix.lower() == ".toml" and _is_cluster(path):
        return Kind.CLUSTER
    return _said_within(path, head, size) or "a file of another kind"


def _ends_with(path: Path, mark: bytes) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(-min(len(mark) + 1, path.stat().st_size), os.SEEK_END)
        return file.read().rstrip() == mark
    return False


def _check_no_runs(path: Path) -> None:
    run = run_above(path)
    if run is not None:
        raise FileError(
            f"{path}: belongs to the run in {run}, which needs it as it is; give another name"
        )


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


class _OwnWords(msgspec.Struct):
    """What a file of ours says that it is, wherever it does so; other files say nothing."""

    format: str = ""
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def _said_within(path: Path, head: bytes, size: int) -> Kind | str | None:
    """What a JSON file says that it is, or the JSON that a safetensors file begins with."""
    begin, end = 0, size
    if head.lstrip()[:1] != b"{":
        begin, end = 8, 8 + int.from_bytes(head[:8], "little")
        if head[8:9] != b"{":
            return None
    if end > MAX_FILE_BYTES:
        return None
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(end)[begin:], type=_OwnWords)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if MADE_BY in found.metadata.items():
        return Kind.MODEL
    match = re.match(r"timeprest-([a-z-]+)/", found.format)
    if match is None:
        return None
    return _TAGGED.get(match[1], f"timeprest's file of the kind {match[1]!r}")


def _is_cluster(path: Path) -> bool:
    try:
        found = read_toml(path, "")
    except FileError:
        return False
    return isinstance(found.get("devices"), list)
