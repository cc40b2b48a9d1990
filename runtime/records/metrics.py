"""Metrics of a run: times and losses of each stage, evaluation figures, the end summary."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from msgspec.structs import replace

from ...planner.costs.memory import MemoryByKind
from ...planner.plan import Plan
from ...planner.recordings.lane_times import LaneTimes, lane_times, mini_batches_in, of_wall
from ...planner.recordings.recording import Recording
from ...profiles.errors import RunError
from ...profiles.files import ratio
from ...profiles.tasks.hooks import call_hook, task_figures, task_metrics
from ...profiles.tasks.task import Task, read_figure
from ..prepare.clock import OperationTimes
from ..prepare.data import Segment
from ..weights.staleness import Staleness

T = TypeVar("T")


@dataclass
class SegmentMetrics:
    """Metrics of one segment on one worker. Times in seconds on that process's own clock.

    Nothing in it grows with the mini-batches: an epoch may be a whole run.

    Attributes:
        first_update_s, last_update_s: when the first update ended, and the last one so far.
        step_s: from the update before that, or since the segment began.
        weighted_loss: on the last stage, of the epoch up to now: mean losses of mini-batches times
            their weights, which are their samples, or what counts in them.
        weight: sum of those; None: nothing yet.
        counted: weight of the last mini-batch.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    loading_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    first_update_s: float | None = None
    last_update_s: float = 0.0
    step_s: float = 0.0
    weighted_loss: float = 0.0
    weight: float | None = None
    counted: float = 0.0

    def add(self, times: OperationTimes) -> None:
        """Account for one operation."""
        if self.first_s is None:
            self.first_s = times.begin_s
        self.last_s = times.sent_s
        self.compute_s += times.compute_s
        self.communication_s += times.communication_s
        self.loading_s += times.loading_s

    def updated(self, at_s: float) -> None:
        """An update has ended then."""
        if self.first_update_s is None:
            self.first_update_s = at_s
            assert self.first_s is not None
            self.last_update_s = self.first_s
        self.step_s, self.last_update_s = at_s - self.last_update_s, at_s

    def add_loss(self, loss: float, weight: float) -> None:
        """Account for a mini-batch's mean loss."""
        self.counted = weight
        if weight:
            self.weighted_loss += loss * weight
            self.weight = (self.weight or 0.0) + weight

    def period_s(self, segment: Segment) -> float | None:
        """Mean time of a mini-batch from the first update to the last; filling and draining are
        left out."""
        between = segment.mini_batches - segment.together(0)
        if self.first_update_s is None or not between:
            return None
        return (self.last_update_s - self.first_update_s) / between


class Updated(NamedTuple):
    """What is known of an update.

    Attributes:
        lr: the first parameter group's; None: the stage has nothing to train.
        gradient_norm: of the whole model before clipping; None: there was none, or it isn't known.
        peak: the most that the stage's worker had held by then.
    """

    lr: float | None = None
    gradient_norm: float | None = None
    peak: MemoryByKind | None = None


def wall_s(stages: Iterable[SegmentMetrics]) -> float:
    """From the begin of the first operation of a worker's stages to the end of the last one's."""
    ran = [(each.first_s, each.last_s) for each in stages if each.first_s is not None]
    return max(last for _, last in ran) - min(first for first, _ in ran) if ran else 0.0


_FLOATS = frozenset({"train_loss", "weight_distance", "largest_weight_distance"})


def decode(text: bytes, kind: type[T]) -> T:
    """Decode JSON, where what isn't finite is null: NaN in what this returns.

    Raises msgspec.DecodeError.
    """
    return msgspec.convert(with_nan(msgspec.json.decode(text)), kind, str_keys=True)


def with_nan(value: Any, key: str = "") -> Any:
    """Decoded JSON with NaN for null where figures belong."""
    if value is None and (key in _FLOATS or key == "test"):
        return math.nan
    if isinstance(value, list):
        return [with_nan(each, key) for each in value]
    if isinstance(value, dict):
        return {k: with_nan(v, "test" if key == "test" else k) for k, v in value.items()}
    return value


def as_float(value: float | None) -> float:
    """JSON has null for what isn't finite."""
    return math.nan if value is None else value


def summed_counts(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sum of each number's counts, by rising numbers."""
    return dict(sorted(sum(map(Counter, counts), Counter[int]()).items()))


class EvaluationMetrics:
    """Means over the test samples: the loss, and the task's own metrics."""

    def __init__(self) -> None:
        self.samples = 0
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, task: Task, output: Any, target: Any, samples: int) -> None:
        """Add a micro-batch's figures, weighted by its samples or with weights of their own."""
        with torch.no_grad():
            loss = call_hook("loss", task.loss, output, target, kind=RunError)
            figures: dict[str, Any] = {"loss": loss, **task_metrics(task, output, target)}
        self.samples += samples
        for name, value in figures.items():
            total, weight = read_figure(name, value, samples)
            self._sums[name] = self._sums.get(name, 0.0) + total
            self._weights[name] = self._weights.get(name, 0.0) + weight

    def figures(self, task: Task) -> dict[str, float]:
        """The means by name, and what the task makes of them; "loss" is always among them. NaN
        where nothing counts. Raises TargetError."""
        means = {
            name: total / self._weights[name] if self._weights[name] else math.nan
            for name, total in self._sums.items()
        }
        return {**means, **task_figures(task, means)}


class EpochRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of training, and the evaluation behind it."""

    epoch: int
    mini_batches: int
    seconds: float
    """Of training on the last stage, the evaluation left out."""
    samples_per_s: float
    train_loss: float
    test: dict[str, float]
    lr: float | None = None
    """Learning rate of the last stage's last update (its first parameter group's); None: that
    stage has nothing to train."""


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation while its epoch goes on."""

    epoch: int
    mini_batches: int
    """Of that epoch that were done."""
    seconds: float
    """Of training in that epoch so far, evaluations left out."""
    test: dict[str, float]


class StageEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """Metrics of a stage's replica over one epoch."""

    epoch: int
    compute_s: float
    communication_s: float
    idle_s: float
    """Of the worker that runs it."""
    loading_s: float = 0.0
    """Waiting for samples; inside compute_s in files of before it was told apart."""
    versions_held: int
    """Most weight versions held at once."""
    version_differences: dict[int, int]
    """How many backwards saw each difference."""
    weight_distance: float
    """‖W_B − W_F‖ / ‖W_F‖ of the weights that backwards and their forwards used: the mean."""
    largest_weight_distance: float


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage's replica measured over the run: in all its epochs, evaluation left out."""

    stage: int
    replica: int = 0
    worker: int | None = None
    """Rank of the worker that runs it; None in reports of before workers ran several stages."""
    compute_s: float
    communication_s: float
    idle_s: float
    """Of the worker: what is left of its time by all its stages."""
    loading_s: float = 0.0
    """As in `StageEpoch`."""
    wall_s: float
    """Of the worker."""
    sent_bytes: int = 0
    """Outputs and gradients for other stages."""
    periods_s: list[float]
    """Per segment."""
    peak: MemoryByKind | None
    """Of the worker, with all its stages."""
    rss_peak_bytes: int
    """Of the whole process, libraries and data included."""
    device: str = "cpu"
    transport: str = ""
    """How its messages went; empty: within one process."""
    not_by_ipc: str = ""
    """Why they didn't go from GPU to GPU by CUDA IPC, where that was to be tried."""
    device_peak_bytes: int | None = None
    """Of all tensors on its GPU: of the whole process too; None: on the CPU."""
    device_used_bytes: int | None = None
    """Of its GPU at the end, by all processes, libraries and contexts included."""
    versions_held: int
    version_differences: dict[int, int]
    """How many backwards saw each difference."""
    weight_distance: float = 0.0
    """Of the epoch with the largest mean (`StageEpoch`)."""
    not_finite: list[int] = []
    """Mini-batches whose loss or gradients weren't finite, where the run went on."""
    beyond_profile: list[int] = msgspec.field(default_factory=list, name="larger")
    """Mini-batches that have more in some dimension than any that was profiled; noted on the last
    stage."""
    epochs: list[StageEpoch] = []
    not_compiled: str = ""
    """Why the stage wasn't compiled, where it was to be."""
    graphs: str = ""
    """What of its passes was captured and replayed, what wasn't and why; empty: none was to be."""
    idle_share: float | None = None
    """Of `wall_s`; None of an inline run, where stages take turns (`training_times`)."""


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a run, as it is printed and stored."""

    variant: str
    mode: str
    """"processes" or "inline"."""
    mini_batch: int
    micro_batches: int
    mini_batches: int
    samples_per_s: float
    seconds: float
    """Since training began, or last went on after mini-batch `resumed_at`."""
    predicted_period_s: float
    measured_period_s: float | None
    epochs: list[EpochRecord]
    stages: list[StageReport]
    """Of all replicas: stage by stage, and within a stage one by one."""
    stopped: str | None = None
    """Why a callback ended the run before its last mini-batch; None: none did."""
    resumed_at: int = 0
    """Mini-batches done when the run last went on from a checkpoint; 0: it never did."""


def summarize(
    plan: Plan,
    segments: Sequence[Segment],
    epochs: list[EpochRecord],
    reports: Sequence[StageReport],
    seconds: float,
    resumed_at: int = 0,
    *,
    inline: bool,
    stopped: str | None = None,
) -> RunSummary:
    """The end summary of a run from its epochs and its workers' reports.

    Args:
        segments: of the run that are done.
        seconds: since training began, or went on, the workers' start included.
        resumed_at: mini-batches that were done then.
    """
    # Like the prediction, the measured period is the slowest stage's. Inline, stages take
    # turns in one process: a period there says nothing about the pipeline.
    periods = [] if inline else [median(r.periods_s) for r in reports if r.periods_s]
    # The epochs' own seconds are the last stage's, which ends while earlier ones still drain.
    trained_s = max((report.wall_s for report in reports), default=0.0)
    samples = sum(segment.samples for segment in segments)
    return RunSummary(
        variant=plan.variant,
        mode="inline" if inline else "processes",
        mini_batch=plan.mini_batch,
        micro_batches=plan.micro_batches,
        mini_batches=sum(segment.mini_batches for segment in segments),
        samples_per_s=ratio(samples, trained_s),
        seconds=seconds,
        predicted_period_s=plan.predicted.period_s,
        measured_period_s=max(periods, default=None),
        epochs=epochs,
        stages=[
            replace(r, idle_share=None if inline else ratio(r.idle_s, r.wall_s)) for r in reports
        ],
        stopped=stopped,
        resumed_at=resumed_at,
    )


# Metrics of an epoch so far, where checkpoints cut it into segments -----------------------------


class EpochSums(msgspec.Struct, kw_only=True):
    """Sums over the segments of an epoch that are done. Times in seconds."""

    mini_batches: int = 0
    samples: int = 0
    weighted_loss: float | None = 0.0
    """Losses of mini-batches times their weights, on the worker that reports progress. None, as
    JSON has it: not a number."""
    weight: float | None = None
    """Of all these mini-batches: their samples, or what counts in them. None: nothing yet."""
    wall_s: float = 0.0
    """Of the worker."""
    compute_s: float = 0.0
    communication_s: float = 0.0
    loading_s: float = 0.0
    others_s: float = 0.0
    """Of all three, by the worker's other stages."""
    versions_held: int = 1
    version_differences: dict[int, int] = {}
    backwards: int = 0
    distances: float | None = 0.0
    largest_distance: float | None = 0.0
    """Both None where weights weren't numbers."""

    def begin(self, metrics: SegmentMetrics) -> None:
        """A segment begins: its losses are added to those before, in the sequence in which they
        would be without it."""
        metrics.weighted_loss, metrics.weight = as_float(self.weighted_loss), self.weight

    def add(
        self,
        segment: Segment,
        metrics: SegmentMetrics,
        seen: Staleness,
        beside: Sequence[SegmentMetrics] = (),
    ) -> None:
        """A segment is done. `beside`: metrics of the worker's other stages."""
        self.mini_batches += segment.mini_batches
        self.samples += segment.samples
        self.weighted_loss, self.weight = metrics.weighted_loss, metrics.weight
        self.wall_s += wall_s((metrics, *beside))
        self.others_s += sum(m.compute_s + m.communication_s + m.loading_s for m in beside)
        self.compute_s += metrics.compute_s
        self.communication_s += metrics.communication_s
        self.loading_s += metrics.loading_s
        self.versions_held = max(self.versions_held, seen.versions_held)
        counted = self.version_differences, seen.differences
        self.version_differences = summed_counts(counted)
        self.backwards += seen.backwards
        seen.read(seen.noted)
        self.distances = as_float(self.distances) + seen.distance
        self.largest_distance = max(as_float(self.largest_distance), seen.largest_distance)

    def stage_epoch(self, epoch: int) -> StageEpoch:
        """The epoch on this stage."""
        return StageEpoch(
            epoch=epoch,
            compute_s=self.compute_s,
            communication_s=self.communication_s,
            idle_s=of_wall(
                self.wall_s - self.others_s, self.compute_s, self.communication_s, self.loading_s
            ).idle_s,
            loading_s=self.loading_s,
            versions_held=self.versions_held,
            version_differences=self.version_differences,
            weight_distance=as_float(self.distances) / self.backwards if self.backwards else 0.0,
            largest_weight_distance=as_float(self.largest_distance),
        )

    def record(self, segment: Segment, test: dict[str, float], lr: float | None) -> EpochRecord:
        """The epoch as progress tells of it.

        Args:
            segment: its last.
            lr: of its last update.
        """
        return EpochRecord(
            epoch=segment.epoch,
            mini_batches=self.mini_batches,
            seconds=self.wall_s,
            samples_per_s=self.samples / self.wall_s if self.wall_s else 0.0,
            train_loss=as_float(self.weighted_loss) / self.weight if self.weight else math.nan,
            test=test,
            lr=lr,
        )


# Of each worker's time: computing, communicating, idle ------------------------------------------
# There is one figure of each, for the summary, the report, its page and its figures: of all
# training from the first operation of an epoch to its last, so without start-up and evaluation
# (docs/reading_tables.md).


def training_times(epochs: Iterable[StageEpoch]) -> LaneTimes:
    """A worker's times in all its epochs, in seconds."""
    each = [(e.compute_s, e.communication_s, e.idle_s, e.loading_s) for e in epochs]
    return LaneTimes(*map(sum, zip((0.0,) * 4, *each, strict=True)))


def worker_epochs(stages: Sequence[Sequence[StageEpoch]]) -> tuple[StageEpoch, ...]:
    """A worker's epochs that all its stages have done.

    Args:
        stages: the epochs of each.
    """
    if len(stages) == 1:
        return tuple(stages[0])
    return tuple(map(_of_worker, zip(*stages, strict=False)))


_OF_STAGES: Mapping[str, Callable[[list[Any]], Any]] = {
    "epoch": max,
    "compute_s": sum,
    "communication_s": sum,
    "idle_s": max,
    "loading_s": sum,
    "versions_held": max,
    "version_differences": summed_counts,
    "largest_weight_distance": max,
}
"""What a worker's epoch has of its stages', each of which says how long the worker was idle."""


def _of_worker(stages: Sequence[StageEpoch]) -> StageEpoch:
    """An epoch on all stages of a worker. Mean distances are weighted by backwards."""
    backwards = [sum(epoch.version_differences.values()) for epoch in stages]
    pairs = zip(stages, backwards, strict=True)
    distance = sum(epoch.weight_distance * count for epoch, count in pairs)
    names = [name for name in StageEpoch.__struct_fields__ if name != "weight_distance"]
    merged = {name: _OF_STAGES[name]([getattr(e, name) for e in stages]) for name in names}
    return StageEpoch(**merged, weight_distance=distance / max(sum(backwards), 1))


def measured_times(
    rank: int,
    epochs: Sequence[StageEpoch],
    records: Sequence[EpochRecord],
    recording: Recording | None,
) -> LaneTimes | None:
    """A worker's times per mini-batch, in seconds: of the epochs that are done, as it and the run
    have written them down; before the first, of the recording. None while there is neither."""
    # An epoch that was the last, and went on when the run grew, has several.
    done = list(zip(epochs, records, strict=False))
    if done:
        mini_batches = sum(record.mini_batches for _, record in done)
        return training_times(epoch for epoch, _ in done).per(mini_batches)
    if recording is None or all(span.lane != rank for span in recording.spans):
        return None
    return lane_times(recording)[rank].per(mini_batches_in(recording, rank))
