"""Metrics for dashboards (--log): CSV files, TensorBoard, Weights & Biases.

They are written where progress is told of, by one process of the run: no worker waits for them. A
step is a mini-batch. Names are torchtitan's (its `components/metrics.py`) where it has one.
"""

from __future__ import annotations

import csv
import importlib
import io
import math
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...planner.plan import Plan
from ...profiles.errors import FileError, UserError
from ...profiles.files import write_bytes
from ...profiles.measuring.device_specs import load_spec
from ..prepare.devices import device_kind
from ..settings import RunSettings
from .callbacks import Callback, EvaluationDone, MiniBatchDone, RunBegun, RunEnded
from .growing_file import GrowingFile

FOLDER = "dashboards"
"""Of the run directory."""
VALIDATION = "validation_metrics/"

NAMES = {
    "loss": "loss_metrics/global_avg_loss",
    "gradient_norm": "grad_norm",
    "lr": "lr",
    "seconds": "time_metrics/end_to_end(s)",
    "loading_s": "time_metrics/data_loading(s)",
    "loading": "time_metrics/data_loading(%)",
    "samples_per_s": "throughput(samples/s)",
    "tokens_per_s": "throughput(tps)",
    "tflops": "tflops",
    "mfu": "mfu(%)",
    "memory": "memory/max_active(GiB)",
}
"""What each is called in the logs, in the sequence in which CSV files have them."""

_NEEDS = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


def check_logs_at_hand(settings: RunSettings) -> None:
    """Raise UserError where the settings' `log` names what there isn't, a library that it needs
    isn't installed, or nobody is logged in where that is needed."""
    for name in logs_named(settings.log):
        if name in _NEEDS:
            library = _library(name)
            if name == "wandb":
                _check_login(library)


def logs_named(text: str) -> tuple[str, ...]:
    """``"csv,wandb"`` → ("csv", "wandb"). Raises UserError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in _OPEN]
    if unknown:
        raise UserError(f"--log {text!r}: there is no {unknown[0]!r}; give {', '.join(_OPEN)}")
    return names


def _library(name: str) -> Any:
    try:
        return importlib.import_module(_NEEDS[name])
    except ImportError as error:
        raise UserError(
            f"--log {name}: needs the library {name} ({error}): in the checkout, "
            f"pip install -e '.[{name}]'"
        ) from None


def metrics_of(event: MiniBatchDone, devices: int, peak: float | None = None) -> dict[str, float]:
    """A mini-batch's metrics by their names in the logs; without those that aren't known, or
    aren't finite.

    ``throughput(tps)``: what counts in the loss, a second and device, as torchtitan has it of
    tokens; where the task's loss says how much that is.

    Args:
        devices: of the plan.
        peak: of each, in floating-point operations a second; None: not known.
    """
    figures, seconds = event.figures, event.figures.get("seconds", 0.0)
    found: dict[str, float | None] = {
        "loss": event.loss,
        **{name: figures.get(name) for name in ("gradient_norm", "lr", "seconds", "loading_s")},
    }
    if seconds:
        if "loading_s" in figures:
            found["loading"] = 100 * figures["loading_s"] / seconds
        found["samples_per_s"] = figures["samples"] / seconds
        if "flops" in figures:
            each = figures["flops"] / seconds / devices
            found["tflops"] = each / 1e12
            found["mfu"] = None if peak is None else 100 * each / peak
        if "counted" in figures:
            found["tokens_per_s"] = figures["counted"] / seconds / devices
    if "memory_bytes" in figures:
        found["memory"] = figures["memory_bytes"] / 2**30
    return {
        NAMES[name]: value
        for name, value in found.items()
        if value is not None and math.isfinite(value)
    }


def peak_of(plan: Plan, settings: RunSettings) -> float | None:
    """A device's peak in floating-point operations a second, by the data sheet that the plan's
    profile was made with; None: it was made without, or the run isn't on such a device."""
    made_on, name = plan.profile.device.partition(":")[::2]
    if made_on != "meta" or device_kind(plan, settings) != "cuda":
        return None
    try:
        peaks = load_spec(name).peak_flops_per_s
    except FileError:  # of a file that isn't there any more
        return None
    under = plan.profile.autocast if settings.autocast == "profiled" else settings.autocast
    return (peaks.bfloat16 if under == "bfloat16" else None) or peaks.float32


class MetricLog(Protocol):
    """Where metrics go. Of a run that is resumed it is told all from the beginning, and leaves out
    what it has."""

    def write(self, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Those of a mini-batch."""

    def write_evaluation(self, step: int, epoch: int, metrics: Mapping[str, float | None]) -> None:
        """Those of an evaluation after so many mini-batches. None: it isn't finite."""

    def close(self) -> None:
        """The run is over."""


class MetricLogs(Callback):
    """Writes a run's metrics wherever its settings' `log` says; a run that is resumed goes on with
    what is there up to its checkpoint, and with what should be."""

    waited_for = False

    def __init__(self) -> None:
        self._logs: list[MetricLog] = []
        self._devices = 1
        self._peak: float | None = None

    def on_begin(self, event: RunBegun) -> None:
        """Open them. Raises FileError and UserError."""
        self._close()
        self._devices = event.plan.workers
        self._peak = peak_of(event.plan, event.settings)
        folder = event.run_dir / FOLDER
        for name in logs_named(event.settings.log):
            self._logs.append(_OPEN[name](folder, event))
        # Where who wrote them was killed, the workers had gone on for a while.
        for told in event.told_before if self._logs else ():
            if isinstance(told, EvaluationDone):
                self.on_evaluation(told)
            else:
                self.on_mini_batch(told)

    def on_mini_batch(self, event: MiniBatchDone) -> None:
        """Write its metrics."""
        if self._logs:
            metrics = metrics_of(event, self._devices, self._peak)
            for log in self._logs:
                log.write(event.mini_batch, event.epoch + 1, metrics)

    def on_evaluation(self, event: EvaluationDone) -> None:
        """Write its figures."""
        metrics = {
            f"{VALIDATION}{name}": value if math.isfinite(value) else None
            for name, value in event.figures.items()
        }
        for log in self._logs:
            log.write_evaluation(event.mini_batch, event.epoch + 1, metrics)

    def on_end(self, event: RunEnded) -> None:
        """Close them."""
        self._close()

    def _close(self) -> None:
        logs, self._logs = self._logs, []
        for log in logs:
            log.close()


# CSV ----------------------------------------------------------------------------------------------


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
        """A row, empty where there is no value."""
        if step in self._there:
            return
        if not self.columns:
            self._begin(list(metrics))
        values = {"step": step, "epoch": epoch, **metrics}
        self.append(_lines([[values.get(name, "") for name in self.columns]]))
        self.flush()


def _rows_up_to(path: Path, step: int) -> list[list[str]]:
    """The head of a CSV file and its rows up to a step; none where there is no such file."""
    try:
        with path.open(newline="") as file:
            head, *rows = csv.reader(file)
    except (FileNotFoundError, ValueError):
        return []
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error.strerror}") from None
    # The last line may be a part.
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


# What can't be read back --------------------------------------------------------------------------


class _Written:
    """How far a log surely is, in a file of its own: a run that is resumed writes the rest anew.

    Attributes:
        step: the last one that is there with all that belongs to it.
    """

    def __init__(self, path: Path, resumed_at: int, flush: Callable[[], None]) -> None:
        """`flush`: puts on the disk what was written."""
        self._path, self._flush = path, flush
        self._latest, self._noted_s = 0, time.monotonic()
        try:
            there = int(path.read_text()) if resumed_at else 0
        except (OSError, ValueError):
            there = 0
        self.step = min(there, resumed_at)

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


_WRITTEN = "written.txt"
_NOTED_S = 1.0
"""Between two notes: what was written since is written again after a kill."""


# TensorBoard --------------------------------------------------------------------------------------


class TensorBoardLog:
    """Event files; what earlier ones have besides what surely is there up to the checkpoint,
    TensorBoard leaves out."""

    def __init__(self, folder: Path, event: RunBegun) -> None:
        """Raises FileError and UserError."""
        writer = _library("tensorboard").SummaryWriter
        path = folder / "tensorboard" / _WRITTEN
        self._written = _Written(path, event.resumed_at, lambda: self._writer.flush())
        # Without a checkpoint, a run that goes on begins anew.
        purge = self._written.step + 1 if event.settings.resumed else None
        try:
            self._writer = writer(str(folder / "tensorboard"), purge_step=purge, flush_secs=10)
        except OSError as error:
            raise FileError(f"{folder}: can't be written: {error.strerror}") from None

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


# Weights & Biases ---------------------------------------------------------------------------------


def _check_login(wandb: Any) -> None:
    online = os.environ.get("WANDB_MODE", "online") == "online"
    if online and wandb.api.api_key is None:
        raise UserError(
            "--log wandb: nobody is logged in: run wandb login, set WANDB_API_KEY, or write to the "
            "disk alone with WANDB_MODE=offline"
        )


class WandbLog:
    """A run of Weights & Biases, in the project that WANDB_PROJECT names, or "timeprest"."""

    def __init__(self, folder: Path, event: RunBegun) -> None:
        """Raises FileError; UserError where nobody is logged in."""
        wandb = _library("wandb")
        _check_login(wandb)
        # Its own process writes what it was given, whatever becomes of this one.
        path = folder / "wandb" / _WRITTEN
        self._written = _Written(path, event.resumed_at, lambda: None)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "timeprest"),
                name=event.run_dir.name,
                id=_run_id(folder / "wandb" / "id.txt", new=not event.resumed_at),
                resume="allow",
                # It makes a folder called wandb there.
                dir=str(folder),
                config=_config(event.plan, event.settings),
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
    try:
        if not new and path.exists():
            return path.read_text().strip()
    except OSError as error:
        raise FileError(f"{path}: can't be read: {error.strerror}") from None
    found = uuid.uuid4().hex[:8]
    write_bytes(path, found.encode())
    return found


def _config(plan: Plan, settings: RunSettings) -> dict[str, Any]:
    """What runs are told apart by."""
    return {
        "task": settings.task,
        "system": plan.variant,
        "stages": len(plan.stages),
        "workers": plan.workers,
        "mini_batch": plan.mini_batch,
        "micro_batches": plan.micro_batches,
        "seed": settings.seed,
        "predicted_period_s": plan.predicted.period_s,
    }


_OPEN: dict[str, Any] = {"csv": CsvLog, "tensorboard": TensorBoardLog, "wandb": WandbLog}
