"""Callbacks: who is told of a run while it goes on, and may end it early.

They run in the process that launched the run, one after the other in the sequence given; under
torchrun and srun in the process of the worker that reports progress (the last stage's). What they
are told of are frozen dataclasses. A run can end early only where its pipeline drains: at a
checkpoint, at the end of an epoch, at an evaluation. Its weights are then those after all
mini-batches up to there, in every system, bit for bit those that the whole run had there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...profiles.errors import RunError, TimeprestError, UserError
from ...profiles.tasks.hooks import in_one_line
from ...profiles.units import number, whole
from .events import (
    CheckpointWritten,
    EpochDone,
    EvaluationDone,
    MiniBatchDone,
    RestartDue,
    RunBegun,
    RunEnded,
    Stop,
)
from .metrics import EpochRecord, EvaluationRecord
from .progress import Losses, Observer, read_progress
from .run_dir import RunDir, keep_alone


@dataclass(frozen=True)
class ToldBefore:
    """What callbacks were told, or should have been, before the place where a run goes on: as the
    workers wrote it down, whatever became of who was told. It is read anew by each who asks.

    Attributes:
        path: of the metrics file, whose first `size` bytes count.
        epoch_mini_batches: in a whole epoch.
    """

    path: Path
    size: int
    epoch_mini_batches: int

    def __iter__(self) -> Iterator[MiniBatchDone | EvaluationDone]:
        """Raises FileError."""
        done, starts, evaluated = 0, dict[int, int](), 0
        for found in read_progress(self.path, self.size) if self.size else ():
            if isinstance(found, Losses):
                for k, loss, figures in found.one_by_one():
                    yield MiniBatchDone(
                        mini_batch=found.epoch * self.epoch_mini_batches + k,
                        epoch=found.epoch,
                        done=k,
                        of=found.of,
                        loss=loss,
                        figures=figures,
                    )
                continue
            # An epoch that was the last, and went on when the run grew, has several records.
            start = starts.setdefault(found.epoch, done)
            if isinstance(found, EpochRecord):
                at = done = done + found.mini_batches
            else:
                at = start + found.mini_batches
            # Where a run has ended early, that of the place has been told of.
            if found.test and at != evaluated:
                evaluated, figures = at, dict(found.test)
                yield EvaluationDone(mini_batch=at, epoch=found.epoch, figures=figures)


class Callback:
    """Base of what is told how a run goes on; each method does nothing until it is overridden.

    All but `on_starting`, `on_restart` and `on_end` may return `Stop("why")`.

    Attributes:
        waited_for: the workers wait where the pipeline drains until this callback has been told of
            all up to there, so that its `Stop` takes effect at that place. False for one that only
            shows or writes: the workers go on meanwhile.
    """

    waited_for: bool = True

    def on_starting(self, what: str) -> None:
        """This is being done, in a word or two, before the first mini-batch."""

    def on_begin(self, event: RunBegun) -> Stop | None:
        """Training begins, also of a run that is resumed or restarted."""

    def on_mini_batch(self, event: MiniBatchDone) -> Stop | None:
        """A mini-batch's loss is known. From workers' processes these come a few times a second,
        several at once."""

    def on_evaluation(self, event: EvaluationDone) -> Stop | None:
        """The test data have been evaluated."""

    def on_epoch(self, event: EpochDone) -> Stop | None:
        """An epoch is done; its evaluation was told of before."""

    def on_checkpoint(self, event: CheckpointWritten) -> Stop | None:
        """A checkpoint is whole. Of interest to `waited_for` callbacks: of a run that none of these
        is told of, checkpoints aren't told either."""

    def on_restart(self, event: RestartDue) -> None:
        """The run has failed and is restarted."""

    def on_end(self, event: RunEnded) -> None:
        """The run is over, whether it trained to its end, was stopped or failed."""


# Telling them -----------------------------------------------------------------------------------


class Callbacks(Observer):
    """Tells callbacks what an observer of the run is told.

    Attributes:
        stop: what the first callback that wants to end the run has said.
        waited_for: one of them is.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        """Raises UserError for what isn't a callback."""
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks: {_name(callback)} isn't a callback: give objects of classes that "
                    "derive from timeprest.Callback"
                )
        self.callbacks = tuple(callbacks)
        self.waited_for = any(callback.waited_for for callback in callbacks)
        self.stop = None
        self._done = self._evaluated = 0

    def starting(self, what: str) -> None:
        self._call("on_starting", what)

    def begin(self, begun: RunBegun) -> None:
        self._done, self._evaluated, self.stop = begun.resumed_at, 0, None
        self._run_dir, self._of_epoch = RunDir(begun.run_dir), begun.epoch_mini_batches
        self._call("on_begin", begun)

    def mini_batch(
        self, epoch: int, done: int, of: int, loss: float, figures: Mapping[str, float]
    ) -> None:
        self._done = epoch * self._of_epoch + done
        event = MiniBatchDone(
            mini_batch=self._done, epoch=epoch, done=done, of=of, loss=loss, figures=figures
        )
        self._call("on_mini_batch", event)

    def evaluation(self, record: EvaluationRecord) -> None:
        self._evaluated = record.epoch * self._of_epoch + record.mini_batches
        figures = dict(record.test)
        event = EvaluationDone(mini_batch=self._evaluated, epoch=record.epoch, figures=figures)
        self._call("on_evaluation", event)

    def epoch(self, record: EpochRecord) -> None:
        # Where a run ends early, that of the place where it stopped has been told of.
        if record.test and self._evaluated != self._done:
            figures = dict(record.test)
            event = EvaluationDone(mini_batch=self._done, epoch=record.epoch, figures=figures)
            self._call("on_evaluation", event)
        self._call("on_epoch", EpochDone(mini_batch=self._done, record=record))

    def drained(self, mini_batches: int, *, checkpoint: bool) -> bool:
        if checkpoint:
            path = self._run_dir.checkpoints.folder(mini_batches)
            self._call("on_checkpoint", CheckpointWritten(mini_batch=mini_batches, path=path))
        return self.stop is None

    def restart(self, event: RestartDue) -> None:
        """The run starts again."""
        self._call("on_restart", event)

    def end(self, event: RunEnded) -> None:
        """The run is over. After a failure, that of a callback isn't told."""
        try:
            self._call("on_end", event)
        except TimeprestError:
            if event.error is None:
                raise

    def _call(self, method: str, event: Any) -> None:
        """Raises RunError for a callback that fails, UserError for one that gives nonsense."""
        for callback in self.callbacks:
            name = f"callback {_name(callback)}.{method}"
            with in_one_line(f"{name} failed", RunError):
                found = getattr(callback, method)(event)
            if isinstance(found, Stop):
                self.stop = self.stop or found
            elif found is not None:
                raise UserError(
                    f"{name} gave {found!r:.60}: return Stop('why') to end the run, else nothing"
                )


def _name(callback: object) -> str:
    return callback.__name__ if isinstance(callback, type) else type(callback).__name__


# Ready-made -------------------------------------------------------------------------------------


class EarlyStopping(Callback):
    """Ends a run whose test figure hasn't got better for some evaluations.

    The run keeps the weights that it has then, and a checkpoint of them; those of its best
    evaluation are in the checkpoint of `best_mini_batch`, if one was written there: the run keeps
    it besides its newest ones.

    Attributes:
        best: the best figure so far; None: there was none.
        best_mini_batch: mini-batches that were done then.
    """

    def __init__(
        self,
        figure: str = "loss",
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        """
        Args:
            figure: of the evaluation: "loss", or one of the task's metrics.
            patience: evaluations without a better figure that end the run.
            min_delta: what a figure must be better by than the best one.
            mode: whether less ("min") or more ("max") is better.

        Raises UserError for a patience that is no whole number from 1, a negative `min_delta` or
        another mode.
        """
        if mode not in ("min", "max"):
            raise UserError(f"EarlyStopping: mode {mode!r}: give 'min' or 'max'")
        self.figure, self.patience = figure, whole(patience, "EarlyStopping: patience")
        self.min_delta = number(min_delta, "EarlyStopping: min_delta") or 0.0
        self._sign = 1.0 if mode == "min" else -1.0
        self.best: float | None = None
        self.best_mini_batch = 0
        self._without = 0

    def on_begin(self, event: RunBegun) -> Stop | None:
        """Begin anew, or where the run was that is resumed. Raises UserError without evaluation."""
        if not event.settings.evaluate:
            raise UserError("EarlyStopping: goes by evaluations; leave evaluate=False out")
        self.best, self.best_mini_batch, self._without = None, 0, 0
        for before in event.before:
            self._note(before)
        return None

    def on_evaluation(self, event: EvaluationDone) -> Stop | None:
        """Stop after `patience` evaluations without a better figure."""
        self._note(event)
        if self._without < self.patience:
            return None
        return Stop(
            f"test {self.figure} no better than {self.best:.4g} for {self.patience} "
            f"evaluation{'s' if self.patience > 1 else ''}"
            if self.best is not None
            else f"test {self.figure} isn't finite"
        )

    def on_checkpoint(self, event: CheckpointWritten) -> Stop | None:
        """Keep that of the best evaluation. Raises FileError."""
        if self.best is not None and event.mini_batch == self.best_mini_batch:
            # Others may go by the same figure.
            keep_alone(event.path, f"best {self.figure} {self._sign:g} {self.min_delta:g}")
        return None

    def _note(self, event: EvaluationDone) -> None:
        if self.figure not in event.figures:
            raise UserError(
                f"EarlyStopping: the evaluation has no {self.figure!r}; it has "
                f"{', '.join(event.figures)}"
            )
        found = event.figures[self.figure]
        better = self.best is None or self._sign * (self.best - found) > self.min_delta
        if math.isfinite(found) and better:
            self.best, self.best_mini_batch, self._without = found, event.mini_batch, 0
        else:
            self._without += 1
