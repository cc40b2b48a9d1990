"""Logs of a run that goes on from a checkpoint: checked, and cut to what they were there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ...profiles.errors import FileError
from ...profiles.files import check_regular, file_errors
from ..prepare.workers import Replica
from ..records.operation_log import read_stage_epochs
from ..records.progress import read_progress
from ..records.run_dir import RunDir
from ..settings import RunSettings
from .checkpoint import Saved


def check_logs(where: RunDir, settings: RunSettings, replicas: Sequence[Replica]) -> None:
    """Refuse to go on with a run whose figures so far are damaged, before anything is changed.

    Args:
        replicas: whose logs are looked at.

    Raises FileError that names the line.
    """
    for replica in replicas:
        noted = noted_sizes(where, settings, replica)
        _check_log(where, where.stage_metrics(replica), noted, read_stage_epochs)
        if replica.is_reporter:
            _check_log(where, where.metrics, noted, read_progress)


def _check_log(
    where: RunDir, path: Path, noted: Mapping[str, int], read: Callable[..., Iterable[object]]
) -> None:
    """What a log had at the checkpoint must be there still; what came later is cut off."""
    size = noted.get(str(path.relative_to(where.path)), 0)
    if not size:
        return
    have = path.stat().st_size if path.exists() else 0
    if have < size:
        raise FileError(f"{path}: has {have} bytes, and had {size} at the checkpoint; {_GONE}")
    try:
        list(read(path, size))
    except FileError as error:
        raise FileError(f"{error}; {_GONE}") from None


_GONE = "put the file back as it was, or start another run from the weights: tp-run PLAN --from RUN"


def noted_sizes(where: RunDir, settings: RunSettings, replica: Replica) -> Mapping[str, int]:
    """Bytes of a replica's logs at the checkpoint that a run is resumed from, by their paths."""
    if not settings.resume_at:
        return {}
    return Saved(where.checkpoints.folder(settings.resume_at)).worker_state(replica.file).logs


def rewind_logs(where: RunDir, settings: RunSettings, replica: Replica) -> None:
    """Cut a replica's own logs to what they were at the checkpoint that a run is resumed from.

    Raises FileError.
    """
    if settings.resume_at is None:
        return
    noted = noted_sizes(where, settings, replica)
    logs = [where.operations(replica), where.recorded(replica), where.stage_metrics(replica)]
    if replica.is_reporter:
        logs.append(where.metrics)
    for path in logs:
        size = noted.get(str(path.relative_to(where.path)), 0)
        if os.path.lexists(path):
            check_regular(path, _GONE)
        with file_errors(path, "written"):
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)
