"""Metrics as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...profiles.files import write_bytes
from ..records.events import RunBegun
from ..records.growing_file import GrowingFile, new_lines
from ..records.metric_logs import NAMES


class _CsvFile(GrowingFile):
    """Rows of step, epoch and metrics; those after a checkpoint are cut off."""

    def __init__(self, path: Path, resumed_at: int, columns: Sequence[str] = ()) -> None:
        """`columns`: by default those of the first row."""
        self.columns: list[str] = []
        kept = _rows_up_to(path, resumed_at) if resumed_at else []
        self._there = {int(row[0]) for row in kept[1:]}
        if kept:
            self.columns = kept[0]
            write_bytes(path, _lines(kept))
        super().__init__(path, more=bool(kept))
        if not kept and columns:
            self._begin(columns)

    def _begin(self, columns: Sequence[str]) -> None:
        self.columns = ["step", "epoch", *columns]
        self.append(_lines([self.columns]))

    def write(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        if step in self._there:
            return
        if not self.columns:
            self._begin(list(metrics))
        values = {"step": step, "epoch": epoch, **metrics}
        self.append(_lines([[values.get(name, "") for name in self.columns]]))
        self.flush()


def _rows_up_to(path: Path, step: int) -> list[list[str]]:
    """The head of a CSV file and its rows up to a step; none where there is no such file."""
    # A full disk may have left a part of a line, which looks like a row where its last number is
    # cut.
    lines, _ = new_lines(path, 0)
    try:
        head, *rows = csv.reader(line.decode() for line in lines)
    except ValueError:
        return []
    whole = [row for row in rows if len(row) == len(head) and row[0].isdigit()]
    return [head, *(row for row in whole if int(row[0]) <= step)]


def _lines(rows: Sequence[Sequence[object]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


class CsvLog:
    """``metrics.csv`` with a row for each mini-batch, ``evaluations.csv`` for each evaluation."""

    def __init__(self, folder: Path, event: RunBegun) -> None:
        """Raises FileError."""
        at = event.resumed_at
        self._metrics = _CsvFile(folder / "metrics.csv", at, list(NAMES.values()))
        self._evaluations = _CsvFile(folder / "evaluations.csv", at)

    def write(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write(step, epoch, metrics)

    def write_evaluation(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        self._evaluations.write(step, epoch, metrics)

    def close(self) -> None:
        self._metrics.close()
        self._evaluations.close()
