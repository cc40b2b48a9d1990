"""A stage's own logs: every operation with its weight version and times, and every epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

import msgspec

from .scores import StageEpoch


class OperationLog:
    """Lines of JSON, one per operation: op, version, forward_version, start_s, end_s."""

    def __init__(self, path: Path, *, more: bool = False) -> None:
        """`more`: a run that is resumed goes on with the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: TextIO = path.open("a" if more else "w", encoding="utf-8")

    def write(
        self, op: str, version: int, forward_version: int | None, start_s: float, end_s: float
    ) -> None:
        """Add an operation. Buffered; `close` makes sure that all of it is on disk."""
        line = {"op": op, "version": version, "start_s": start_s, "end_s": end_s}
        if forward_version is not None:
            line["forward_version"] = forward_version
        self._file.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Write what is buffered."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


class StageMetrics:
    """Lines of JSON, one per epoch: what the stage saw in it."""

    def __init__(self, path: Path, *, more: bool = False) -> None:
        """`more`: a run that is resumed goes on with the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: TextIO = path.open("a" if more else "w", encoding="utf-8")

    def epoch(self, seen: StageEpoch) -> None:
        """Add an epoch."""
        self._file.write(msgspec.json.encode(seen).decode() + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Write what is buffered."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
