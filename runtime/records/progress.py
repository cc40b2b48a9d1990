"""Progress of a run: written by the last stage to metrics.jsonl, read by whoever shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...profiles.errors import FileError
from ...profiles.files import read_lines
from .growing_file import GrowingFile, new_lines
from .metrics import EpochRecord, EvaluationRecord, as_float, with_nan

if TYPE_CHECKING:
    from .events import RunBegun, Stop


class Observer:
    """Is told how a run goes on; each method does nothing until it is overridden.

    Attributes:
        waited_for: workers wait where the pipeline drains until `drained` says whether to go on.
        stop: what ends the run early; None: nothing does.
    """

    waited_for: bool = False
    stop: Stop | None = None

    def starting(self, what: str) -> None:
        """This is being done, in a word or two, before the first mini-batch."""

    def begin(self, begun: RunBegun) -> None:
        """All checks have passed; training begins."""

    def mini_batch(
        self, epoch: int, done: int, of: int, loss: float, figures: Mapping[str, float]
    ) -> None:
        """A mini-batch's forward is done on the last stage. It has `figures` where the settings'
        `log` asks for them."""

    def evaluation(self, record: EvaluationRecord) -> None:
        """The test data have been evaluated while an epoch goes on."""

    def epoch(self, record: EpochRecord) -> None:
        """An epoch and its evaluation are done."""

    def drained(self, mini_batches: int, *, checkpoint: bool) -> bool:
        """The pipeline is empty after so many mini-batches of the run.

        Args:
            checkpoint: one has been written there.

        Returns whether to go on.
        """
        return True


FULL_BYTES = 64 * 2**20
"""Of a metrics file with all figures in it, which take fifteen times what losses do."""


class MetricsFile(GrowingFile, Observer):
    """Writes progress as lines of JSON; of the mini-batches all losses, a few lines a second.

    Every line of kind "mini_batches" holds the losses since the last one. Figures are thinned: as
    the file comes to `FULL_BYTES`, and whenever it has doubled, half as many mini-batches have
    them.
    """

    def __init__(self, path: Path, then: Observer, *, more: bool = False) -> None:
        """
        Args:
            then: is told of everything behind it.
            more: a run that is resumed goes on with the file.

        Raises FileError, as all of it.
        """
        super().__init__(path, more=more)
        self._then = then
        self._losses: list[float] = []
        self._figures: list[Mapping[str, float]] = []
        self._at = (0, 0, 0)
        self._written = 0.0
        self._size, self._told = self.size(), 0

    def mini_batch(
        self, epoch: int, done: int, of: int, loss: float, figures: Mapping[str, float]
    ) -> None:
        if figures:
            every = 1 << (self._size // FULL_BYTES).bit_length()
            self._figures.append({} if self._told % every else figures)
            self._told += 1
        self._losses.append(loss)
        self._at = epoch, done, of
        if done == of or time.monotonic() - self._written > 0.2:
            self.flush()
        self._then.mini_batch(epoch, done, of, loss, figures)

    def drained(self, mini_batches: int, *, checkpoint: bool) -> bool:
        self.flush()
        return self._then.drained(mini_batches, checkpoint=checkpoint)

    def flush(self) -> None:
        if self._losses:
            epoch, done, of = self._at
            losses, self._losses = self._losses, []
            self._written = time.monotonic()
            line = {"kind": "mini_batches", "epoch": epoch, "done": done, "of": of}
            line["losses"] = losses
            if self._figures:
                line["figures"], self._figures = self._figures, []
            self._append_line(line)
        super().flush()

    def evaluation(self, record: EvaluationRecord) -> None:
        self.flush()
        self._append_line({"kind": "evaluation", **msgspec.to_builtins(record)})
        self.flush()
        self._then.evaluation(record)

    def epoch(self, record: EpochRecord) -> None:
        self._append_line({"kind": "epoch", **msgspec.to_builtins(record)})
        self.flush()
        self._then.epoch(record)

    def _append_line(self, line: dict[str, Any]) -> None:
        text = msgspec.json.encode(line) + b"\n"
        self._size += len(text)
        self.append(text)


class Tail:
    """Reads a metrics file while it grows, and passes what is new on to an observer."""

    def __init__(self, path: Path, observer: Observer) -> None:
        self.path = path
        self.observer = observer
        # Of a run that is resumed, there is one already.
        self._position = path.stat().st_size if path.exists() else 0

    def poll(self) -> bool:
        """Pass on the lines that are new and whole. Returns whether there were any."""
        lines, self._position = new_lines(self.path, self._position)
        for line in lines:
            try:
                found = _progress(msgspec.json.decode(line, type=dict[str, Any]))
            except (msgspec.DecodeError, UnicodeDecodeError):
                # Somebody else has written into the file: who reads it at the end says so.
                continue
            if isinstance(found, EpochRecord):
                self.observer.epoch(found)
            elif isinstance(found, EvaluationRecord):
                self.observer.evaluation(found)
            else:
                for done, loss, figures in found.one_by_one():
                    self.observer.mini_batch(found.epoch, done, found.of, loss, figures)
        return bool(lines)


class Losses(msgspec.Struct, frozen=True, kw_only=True):
    """Of the mini-batches done since the line before."""

    epoch: int
    done: int
    """Mini-batches of that epoch."""
    of: int
    losses: list[float | None]
    """None: it wasn't finite."""
    figures: list[dict[str, float | None]] = []
    """Of each, where the settings' `log` asks for them."""

    def one_by_one(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        """For each how many of the epoch are done with it, its loss, and its figures."""
        for done, loss in enumerate(self.losses, self.done - len(self.losses) + 1):
            own = self.figures[done - self.done - 1] if self.figures else {}
            yield done, as_float(loss), {k: v for k, v in own.items() if v is not None}


Progress = Losses | EvaluationRecord | EpochRecord
"""What a line of a metrics file may be."""
_KINDS: dict[Any, type[Progress]] = {
    "mini_batches": Losses,
    "evaluation": EvaluationRecord,
    "epoch": EpochRecord,
}


def read_progress(path: Path, size: int | None = None) -> Iterator[Progress]:
    """The lines of a metrics file, or of its first `size` bytes; none where there is no file.
    Raises FileError: it can't be read, or a line is damaged; the message has its number."""
    for number, line in read_lines(path, size):
        try:
            yield _progress(line)
        except (msgspec.ValidationError, RecursionError) as error:
            raise FileError(f"{path}: line {number}: {error}") from None


def _progress(line: dict[str, Any]) -> Progress:
    """Raises msgspec.ValidationError."""
    kind = line.pop("kind", None)
    if kind not in _KINDS:
        raise msgspec.ValidationError(f"is of no kind that is known: {kind!r}")
    return msgspec.convert(with_nan(line), _KINDS[kind])


def read_losses(path: Path) -> list[float]:
    """All training losses of a run, mini-batch by mini-batch. Raises FileError."""
    lines = [line for line in read_progress(path) if isinstance(line, Losses)]
    return [as_float(loss) for line in lines for loss in line.losses]


def read_epochs(path: Path) -> list[EpochRecord]:
    """The epochs of a run that are done. Raises FileError."""
    return [line for line in read_progress(path) if isinstance(line, EpochRecord)]
