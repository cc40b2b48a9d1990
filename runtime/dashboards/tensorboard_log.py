"""Metrics for TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...profiles.files import file_errors
from ..records.events import RunBegun
from .services import WRITTEN, Written, library

_MODULE = "torch.utils.tensorboard"


class TensorBoardLog:
    """Event files; what earlier ones have besides what surely is there up to the checkpoint,
    TensorBoard leaves out."""

    @staticmethod
    def check() -> None:
        """Raise UserError where the library isn't there."""
        library("tensorboard", _MODULE)

    def __init__(self, folder: Path, event: RunBegun) -> None:
        """Raises FileError and UserError."""
        writer = library("tensorboard", _MODULE).SummaryWriter
        path = folder / "tensorboard" / WRITTEN
        self._written = Written(path, event.resumed_at, lambda: self._writer.flush())
        # Without a checkpoint, a run that goes on begins anew.
        purge = self._written.step + 1 if event.settings.resumed else None
        with file_errors(folder, "written"):
            self._writer = writer(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)

    def write(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        if self._written.has(step):
            return
        for name, value in metrics.items():
            if value is not None:
                self._writer.add_scalar(name, value, step)

    write_evaluation = write

    def close(self) -> None:
        self._written.note()
        self._writer.close()
