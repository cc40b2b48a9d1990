"""Metrics for dashboards (--log): what is written, and when. Where to, plugins say.

They are written where progress is told of, by one process of the run: no worker waits for them. A
step is a mini-batch. Names are torchtitan's (its `components/metrics.py`) where it has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

from ...planner.plan import Plan
from ...profiles import plugins
from ...profiles.device_specs import load_spec
from ...profiles.errors import FileError, UserError
from ...profiles.files import file_errors
from ..prepare.devices import device_kind
from ..settings import RunSettings
from .callbacks import Callback
from .events import EvaluationDone, MiniBatchDone, RunBegun, RunEnded

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


def check_logs_at_hand(settings: RunSettings) -> None:
    """Raise UserError where the settings' `log` names what there isn't, a library that it needs
    isn't installed, or nobody is logged in where that is needed."""
    for name in logs_named(settings.log):
        check = getattr(plugins.load("logs", name), "check", None)
        if check is not None:
            check()


def logs_named(text: str) -> tuple[str, ...]:
    """``"csv,wandb"`` → ("csv", "wandb"). Raises UserError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = plugins.names("logs") if names else []
    for name in names:
        if name not in known:
            raise UserError(f"--log {text!r}: there is no {name!r}; give {', '.join(known)}")
    return names


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
    """Where metrics go; plugins' are made of a folder and the `RunBegun`, and may have a `check`
    without arguments that raises UserError before the run. Of a run that is resumed it is told all
    from the beginning, and leaves out what it has."""

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
            with file_errors(folder, "made"):
                folder.mkdir(exist_ok=True)
            self._logs.append(plugins.load("logs", name)(folder, event))
        # Where who wrote them was killed, the workers had gone on for a while.
        for told in event.told_before if self._logs else ():
            if isinstance(told, EvaluationDone):
                self.on_evaluation(told)
            else:
                self.on_mini_batch(told)

    def on_mini_batch(self, event: MiniBatchDone) -> None:
        if self._logs:
            metrics = metrics_of(event, self._devices, self._peak)
            for log in self._logs:
                log.write(event.mini_batch, event.epoch + 1, metrics)

    def on_evaluation(self, event: EvaluationDone) -> None:
        metrics = {
            f"{VALIDATION}{name}": value if math.isfinite(value) else None
            for name, value in event.figures.items()
        }
        for log in self._logs:
            log.write_evaluation(event.mini_batch, event.epoch + 1, metrics)

    def on_end(self, event: RunEnded) -> None:
        self._close()

    def _close(self) -> None:
        logs, self._logs = self._logs, []
        for log in logs:
            log.close()
