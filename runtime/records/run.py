"""`Run`: a run directory as an object."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from ...profiles.errors import FileError
from ...profiles.files import Shown, file_errors

if TYPE_CHECKING:
    from torch import Tensor

    from ...planner.plan import Plan
    from ..settings import RunSettings
    from .metrics import EpochRecord, RunSummary
    from .run_dir import RunDir


class Run(Shown):
    """A run in its directory, which may still go on: what was asked, and what it did.

    Everything is read from the files when it is asked for.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @classmethod
    def load(cls, run_dir: str | Path) -> Run:
        """A run that is there. Raises FileError where there is none, or it can't be read."""
        found = cls(run_dir)
        if not (found.path / "plan.json").exists():
            raise FileError(f"{run_dir}: holds no run (it has no plan.json)")
        found.plan  # noqa: B018
        return found

    def save(self, path: str | Path) -> None:
        """Copy the whole directory. Raises FileError where there is something already."""
        if Path(path).exists():
            raise FileError(f"{path}: is there already; give another name")
        with file_errors(Path(path), "written"):
            shutil.copytree(self.path, path, ignore=shutil.ignore_patterns("lock", "lock.workers"))

    @property
    def _files(self) -> RunDir:
        from .run_dir import RunDir  # loads torch

        return RunDir(self.path)

    @property
    def plan(self) -> Plan:
        """What it trains by. Raises FileError, as all of these."""
        return self._files.read()[0]

    @property
    def settings(self) -> RunSettings:
        """How it trains."""
        return self._files.read()[1]

    @property
    def summary(self) -> RunSummary | None:
        """The end of the run; None before that."""
        return self._files.read_summary()

    @property
    def epochs(self) -> list[EpochRecord]:
        """Those that are done: losses, figures of evaluations, times."""
        from .progress import read_epochs

        return read_epochs(self._files.metrics)

    @property
    def losses(self) -> list[float]:
        """The training loss of each mini-batch that is done."""
        from .progress import read_losses

        return read_losses(self._files.metrics)

    def weights(self) -> dict[str, Tensor]:
        """Of the whole model, under its own names. Raises FileError before the run's end."""
        from .run_dir import load_weights

        return load_weights(self.path)
