"""What callbacks are told of a run, and how they end it: frozen dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...planner.plan import Plan
from ...profiles.errors import RunError
from ..settings import RunSettings
from .metrics import EpochRecord, RunSummary


@dataclass(frozen=True)
class Stop:
    """What a callback returns to end the run where its pipeline drains next.

    Attributes:
        why: in a few words, for the summary.
    """

    why: str


@dataclass(frozen=True, kw_only=True)
class MiniBatchDone:
    """The last stage has the loss of a mini-batch.

    Attributes:
        mini_batch: of the run, counted from 1.
        epoch: counted from 0.
        done: mini-batches of this epoch, this one among them; `of` so many.
        loss: the mean over its samples; NaN where it wasn't finite.
        figures: where the settings' `log` asks for them (`runtime.training.loop.StepFigures`).
    """

    mini_batch: int
    epoch: int
    done: int
    of: int
    loss: float
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EvaluationDone:
    """The test data have been evaluated; the pipeline is empty.

    Attributes:
        mini_batch: mini-batches of the run that are done.
        epoch: counted from 0.
        figures: means over the test samples; "loss", and those of the task.
    """

    mini_batch: int
    epoch: int
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class EpochDone:
    """An epoch is done, and its evaluation where there is one.

    Attributes:
        mini_batch: mini-batches of the run that are done.
        record: its losses, figures and times.
    """

    mini_batch: int
    record: EpochRecord


@dataclass(frozen=True, kw_only=True)
class CheckpointWritten:
    """A checkpoint is whole.

    Attributes:
        mini_batch: mini-batches of the run that are done.
        path: its directory.
    """

    mini_batch: int
    path: Path


@dataclass(frozen=True, kw_only=True)
class RunBegun:
    """All checks have passed; training begins.

    Attributes:
        mini_batches: in the whole run.
        epoch_mini_batches: in a whole epoch.
        epoch_samples: in these, without padding.
        resumed_at: mini-batches done before; 0 for a new run.
        before: evaluations before that.
        told_before: those, and the mini-batches before that, in their sequence.
    """

    plan: Plan
    settings: RunSettings
    run_dir: Path
    mini_batches: int
    epoch_mini_batches: int
    epoch_samples: int = 0
    resumed_at: int = 0
    before: tuple[EvaluationDone, ...] = ()
    told_before: Iterable[MiniBatchDone | EvaluationDone] = ()


@dataclass(frozen=True, kw_only=True)
class RestartDue:
    """The run has failed, and starts again from its newest checkpoint.

    Attributes:
        restart: counted from 1; there are `of` at most.
    """

    error: RunError
    restart: int
    of: int

    def __str__(self) -> str:
        return f"{self.error}; restart {self.restart} of {self.of}"


@dataclass(frozen=True, kw_only=True)
class RunEnded:
    """The run is over.

    Attributes:
        summary: None where it failed or was stopped from outside.
        error: what ended it then.
    """

    summary: RunSummary | None
    error: BaseException | None = None
