"""Files of published planners: recognising them, and reading them as profiles or workloads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from timeprest.profiles.errors import FileError
from timeprest.profiles.files import read_json
from timeprest.profiles.imported.table import read_text
from timeprest.profiles.profile import Profile
from timeprest.tests.benchmarks.published.pipedream import import_pipedream, pipedream_workload
from timeprest.tests.benchmarks.published.piper import import_piper, piper_workload
from timeprest.tests.benchmarks.published.placement import import_placement, placement_workload
from timeprest.tests.benchmarks.published.workload import Workload

_KINDS = (
    "expected PipeDream's graph.txt, or a workload of the NeurIPS'20 placement paper (nodes with "
    "fpgaLatency) or of the NeurIPS'21 planner (nodes with TMPCs)"
)


def import_published(
    path: str, batch_size: int | None, micro_batch_sizes: Sequence[int] | None
) -> Profile:
    """Read a profile that another planner's authors published.

    Args:
        batch_size: samples in a mini-batch. PipeDream's times are for so many; in the other files
            a sample is all that their times are for, and 1 is the default.
        micro_batch_sizes: sizes to list besides the file's own, with costs in proportion.

    Raises:
        FileError: no such file, of another kind, or malformed; names the line or the place.
        TargetError: a batch size is missing, or the sizes contradict each other.
    """
    kind, text = _recognise(Path(path))
    return _PROFILES[kind](path, text, batch_size, micro_batch_sizes)


def read_workload(path: str | Path) -> Workload:
    """Read a workload that another planner's authors published, for their own cost model.

    Raises FileError: no such file, of another kind, or malformed; names the line or the place.
    """
    kind, text = _recognise(Path(path))
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
    if text.lstrip()[:1] not in (b"{", b"["):
        return "pipedream", read_text(str(path), _KINDS)
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
