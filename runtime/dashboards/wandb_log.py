"""Metrics for Weights & Biases."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...profiles.errors import FileError, UserError
from ...profiles.files import file_errors, write_bytes
from ..records.events import RunBegun
from .services import WRITTEN, Written, library


def _check_login(wandb: Any) -> None:
    online = os.environ.get("WANDB_MODE", "online") == "online"
    if online and wandb.api.api_key is None:
        raise UserError(
            "--log wandb: nobody is logged in: run wandb login, set WANDB_API_KEY, or write to the "
            "disk alone with WANDB_MODE=offline"
        )


class WandbLog:
    """A run of Weights & Biases, in the project that WANDB_PROJECT names, or "timeprest"."""

    @staticmethod
    def check() -> None:
        """Raise UserError where the library isn't there, or nobody is logged in."""
        _check_login(library("wandb", "wandb"))

    def __init__(self, folder: Path, event: RunBegun) -> None:
        """Raises FileError; UserError where nobody is logged in."""
        wandb = library("wandb", "wandb")
        _check_login(wandb)
        # Its own process writes what it was given, whatever becomes of this one.
        path, plan = folder / "wandb" / WRITTEN, event.plan
        self._written = Written(path, event.resumed_at, lambda: None)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "timeprest"),
                name=event.run_dir.name,
                id=_run_id(folder / "wandb" / "id.txt", new=not event.resumed_at),
                resume="allow",
                # It makes a folder called wandb there.
                dir=str(folder),
                # What runs are told apart by.
                config={
                    "task": event.settings.task,
                    "system": plan.variant,
                    "stages": len(plan.stages),
                    "workers": plan.workers,
                    "mini_batch": plan.mini_batch,
                    "micro_batches": plan.micro_batches,
                    "seed": event.settings.seed,
                    "predicted_period_s": plan.predicted.period_s,
                },
                settings=wandb.Settings(silent=True, console="off"),
            )
        except OSError as error:
            raise FileError(f"{folder}: can't be written: {error.strerror}") from None
        except wandb.Error as error:
            raise UserError(f"--log wandb: {' '.join(str(error).split())}") from None

    def write(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        if self._written.has(step):
            return
        known = {name: value for name, value in metrics.items() if value is not None}
        self._run.log({**known, "epoch": epoch}, step=step)

    write_evaluation = write

    def close(self) -> None:
        self._written.note()
        self._run.finish()


def _run_id(path: Path, *, new: bool) -> str:
    """By which a run that is resumed goes on with its own. Raises FileError."""
    with file_errors(path, "read"):
        if not new and path.exists():
            return path.read_text().strip()
    found = uuid.uuid4().hex[:8]
    write_bytes(path, found.encode())
    return found
