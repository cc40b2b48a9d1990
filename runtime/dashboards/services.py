"""What logs share that can't be read back."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...profiles.errors import UserError
from ...profiles.files import write_bytes

WRITTEN = "written.txt"
_NOTED_S = 1.0
"""Between two notes: what was written since is written again after a kill."""


class Written:
    """How far a log surely is, in a file of its own: a run that is resumed writes the rest anew.

    Attributes:
        step: the last one that is there with all that belongs to it.
    """

    def __init__(self, path: Path, resumed_at: int, flush: Callable[[], None]) -> None:
        """`flush`: puts on the disk what was written."""
        self._path, self._flush = path, flush
        self._latest, self._noted_s = 0, time.monotonic()
        try:
            there = int(path.read_text())
        except (OSError, ValueError):
            there = 0
        self.step = min(there, resumed_at)
        if there > self.step:
            # What came behind is written anew, and a kill may come before the next note.
            write_bytes(path, str(self.step).encode())

    def has(self, step: int) -> bool:
        """Whether a step is there; else it is going to be written."""
        if step <= self.step:
            return True
        self._latest = step
        if time.monotonic() - self._noted_s > _NOTED_S:
            self.note()
        return False

    def note(self) -> None:
        """What was written before the latest step is there: of that one, more may come."""
        self._flush()
        self._noted_s = time.monotonic()
        if self._latest - 1 > self.step:
            write_bytes(self._path, str(self._latest - 1).encode())


def library(name: str, module: str) -> Any:
    """What the log of this name needs. Raises UserError where it isn't there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"--log {name}: needs the library {name} ({error}): in the checkout, "
            f"pip install -e '.[{name}]'"
        ) from None
