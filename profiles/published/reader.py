"""Files of published planners: recognising them, and reading them as profiles or workloads."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import FileError, TargetError
from ..files import read_json
from ..profile import Profile
from .pipedream import import_pipedream, pipedream_workload
from .piper import import_piper, piper_workload
from .placement import import_placement, placement_workload
from .table import EXPECTED, import_table
from .workload import Workload

_OURS = re.compile(rb'\s*\{\s*"format"\s*:\s*"timeprest-')
_KINDS = (
    "expected PipeDream's graph.txt, or a workload of the NeurIPS'20 placement paper (nodes with "
    "fpgaLatency) or of the NeurIPS'21 planner (nodes with TMPCs)"
)
_TABLE = ".csv"


def is_foreign(path: str | Path) -> bool:
    """Whether `import_profile` is the one to read this, or to say what is wrong with it.

    True for .csv, .txt and .json files but our own, which begin with their format's name. What
    can't be read counts by its suffix, unless it has a colon, as ``text:FILE`` has.
    """
    path = Path(path)
    if path.suffix.lower() not in (_TABLE, ".txt", ".json"):
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
    """Read a profile that another planner's authors published, or a table of costs.

    Args:
        batch_size: samples in a mini-batch. PipeDream's times and a table's are for so many; in
            the other files a sample is all that their times are for, and 1 is the default.
        micro_batch_sizes: sizes to list besides the file's own, with costs in proportion.
        edges: with a table of costs, the table of its edges; None: each layer feeds the next.

    Raises:
        FileError: no such file, of another kind, or malformed; names the line or the place.
        TargetError: a batch size is missing, or the sizes contradict each other.
    """
    where = str(path)
    kind, text = _recognise(Path(path))
    if kind == "table":
        assert isinstance(text, str)
        return import_table(where, text, batch_size, micro_batch_sizes, edges)
    if edges is not None:
        raise TargetError(f"{edges}: edges go with a table of costs (.csv); {where} has its own")
    return _PROFILES[kind](where, text, batch_size, micro_batch_sizes)


def read_workload(path: str | Path) -> Workload:
    """Read a workload that another planner's authors published, for their own cost model.

    Raises FileError: no such file, of another kind, or malformed; names the line or the place.
    """
    kind, text = _recognise(Path(path))
    if kind == "table":
        raise FileError(f"{path}: a table of costs isn't a published workload; {_KINDS}")
    return _WORKLOADS[kind](str(path), text)


_PROFILES: dict[str, Callable[[str, Any, int | None, Sequence[int] | None], Profile]] = {
    "pipedream": import_pipedream,
    "piper": import_piper,
    "placement": import_placement,
}
_WORKLOADS: dict[str, Callable[[str, Any], Workload]] = {
    "pipedream": pipedream_workload,
    "piper": piper_workload,
    "placement": placement_workload,
}


def _recognise(path: Path) -> tuple[str, str | bytes]:
    """Of which kind a file is, and its text; bytes where that is JSON."""
    text = read_json(path, _KINDS)
    table = path.suffix.lower() == _TABLE
    if table or text.lstrip()[:1] not in (b"{", b"["):
        try:
            return "table" if table else "pipedream", text.decode("utf-8")
        except UnicodeDecodeError as error:
            expected = EXPECTED if table else _KINDS
            raise FileError(f"{path}: isn't text: {error}; {expected}") from None
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path}: not valid JSON: {error}") from None
    nodes = found.get("nodes") if isinstance(found, dict) else None
    if not isinstance(nodes, list) or not nodes:
        raise FileError(f"{path}: $.nodes: has no list of nodes; {_KINDS}")
    if _some_node_has(nodes, "TMPCs"):
        return "piper", text
    if _some_node_has(nodes, "fpgaLatency"):
        return "placement", text
    raise FileError(f"{path}: $.nodes: of an unknown kind; {_KINDS}")


def _some_node_has(nodes: Sequence[Any], field: str) -> bool:
    return any(isinstance(node, dict) and field in node for node in nodes)
