"""A run's part of the page's data: what was measured beside what the plan predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....planner.plan import Plan
from ....planner.recordings.lane_times import LaneTimes, steady_times
from ....planner.recordings.recording import MEMORY_KINDS, Recording, by_kind
from ....profiles.errors import FileError, ScheduleError
from ....runtime.prepare.workers import Replica, Worker, workers_of
from ....runtime.processes.locks import is_over
from ....runtime.records.metrics import (
    EpochRecord,
    EvaluationRecord,
    RunSummary,
    StageEpoch,
    measured_times,
    training_times,
    worker_epochs,
)
from ....runtime.records.operation_log import read_stage_epochs
from ....runtime.records.progress import read_progress
from ....runtime.records.recording import counterpart, measured, mini_batches_of
from ....runtime.records.run_dir import RunDir
from ....runtime.settings import RunSettings
from ...tables.layout import counted
from ...tables.stages import memory_limit
from .page import columns


@dataclass(frozen=True)
class RunFacts:
    """What the files of a run directory hold so far.

    Attributes:
        name: what the report calls the run. losses: per epoch that was begun, of each mini-batch in
        it; NaN where it wasn't a number. evaluations: those within epochs. of_epoch: mini-batches
        of an epoch; None: not known yet.
        worker_epochs: per worker, of each epoch that it has done. summary: None: the run hasn't
        ended. mode: "processes" or "inline"; None: it hasn't begun. times: per worker, of a
        mini-batch (`runtime.records.metrics.measured_times`); None: not known yet.
        measured, predicted: recordings of the same mini-batches; None: there are none.
        missing: what the report doesn't have, and how to get it.
    """

    name: str
    plan: Plan
    settings: RunSettings
    workers: tuple[Worker, ...]
    losses: tuple[tuple[float, ...], ...]
    of_epoch: int | None
    epochs: tuple[EpochRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    worker_epochs: tuple[tuple[StageEpoch, ...], ...]
    summary: RunSummary | None
    mode: str | None
    times: tuple[LaneTimes | None, ...]
    measured: Recording | None
    predicted: Recording | None
    missing: tuple[str, ...]

    @property
    def inline(self) -> bool:
        """All stages took turns in one process."""
        return self.mode == "inline"

    @property
    def idle_shares(self) -> tuple[float | None, ...]:
        """Per worker. None: not known yet, or of an inline run, where it says nothing."""
        return tuple(
            None if times is None or self.inline else times.idle_share for times in self.times
        )

    @property
    def period_s(self) -> float | None:
        """Measured, of the whole run where it has ended; else of what was recorded. None: not
        known yet, or of an inline run."""
        if self.summary is not None:
            return self.summary.measured_period_s
        if self.inline or self.measured is None:
            return None
        return self.measured.period_s or None

    @property
    def recordings(self) -> list[tuple[str, Recording]]:
        """What was measured and what was predicted, as far as they are there, by these words."""
        return [(r.source, r) for r in (self.measured, self.predicted) if r is not None]


def read_facts(run_dir: str | Path, name: str | None = None) -> RunFacts:
    """Read the directory of a run that goes on or has ended.

    Raises FileError where the directory holds no run, or one that can't be read.
    """
    where = RunDir(run_dir)
    if not (where.path / "plan.json").exists():
        raise FileError(f"{run_dir}: holds no run (it has no plan.json)")
    if not (where.path / "settings.json").exists():
        raise FileError(f"{run_dir}: is no run of this version: it has no settings.json")
    plan, settings = where.read()
    workers = workers_of(plan)
    losses, of_epoch, epochs, evaluations = _progress(where.metrics)
    missing = []
    summary = where.read_summary()
    if summary is None:
        done = counted(sum(len(each) for each in losses), "mini-batch")
        missing.append(
            f"The run stopped before its end, after {done}."
            if is_over(where.path)
            else f"The run hasn't ended; {done} so far."
        )
    by_worker = tuple(
        worker_epochs([_epochs_of(where, replica, summary) for replica in worker.replicas])
        for worker in workers
    )
    found = measured(run_dir)
    beside = None
    if found is None:
        missing.append(_no_operations(settings, summary))
    else:
        try:
            beside = counterpart(plan, found, of_epoch)
        except ScheduleError as error:
            missing.append(f"No predicted timeline: {error}.")
        absent = [w.name for w in workers if not any(s.lane == w.rank for s in found.spans)]
        if absent:
            missing.append(
                f"No operations of {', '.join(absent)}: where hosts keep files of their own, "
                "gather their recorded/ or operations/ folders in one run directory."
            )
    times = tuple(
        measured_times(worker.rank, by_worker[worker.rank], epochs, found) for worker in workers
    )
    facts = RunFacts(
        name or where.path.name or str(run_dir),
        plan,
        settings,
        workers,
        losses,
        of_epoch,
        epochs,
        evaluations,
        by_worker,
        summary,
        _mode(where, summary, begun=bool(losses) or found is not None),
        times,
        found,
        beside,
        tuple(missing),
    )
    if found is None:
        return facts
    return replace(facts, measured=replace(found, idle_shares=facts.idle_shares))


def _no_operations(settings: RunSettings, summary: RunSummary | None) -> str:
    if settings.record != "none" or settings.log_operations:
        if summary is None:
            return "No operations have been recorded yet: they come with the first mini-batches."
        return (
            "No timeline: this run's operations weren't recorded (it may be of an older version); "
            "runs of this version record some by themselves."
        )
    return "No timeline: operations weren't recorded; leave --record none out, or give steady:8."


def _progress(
    path: Path,
) -> tuple[
    tuple[tuple[float, ...], ...], int | None, tuple[EpochRecord, ...], tuple[EvaluationRecord, ...]
]:
    """Losses by epoch, mini-batches of an epoch, the epochs that are done, and the evaluations
    within epochs. An epoch that was the last, and went on when the run grew, counts as several."""
    losses: list[list[float]] = []
    of_epoch = None
    epochs, evaluations = [], []
    for line in read_progress(path):
        if isinstance(line, EpochRecord):
            epochs.append(line)
        elif isinstance(line, EvaluationRecord):
            evaluations.append(line)
        else:
            while len(losses) <= len(epochs):
                losses.append([])
            losses[-1] += [math.nan if loss is None else loss for loss in line.losses]
            of_epoch = of_epoch or line.of
    by_epoch = tuple(map(tuple, losses))
    return by_epoch, of_epoch, tuple(epochs), tuple(evaluations)


def _mode(where: RunDir, summary: RunSummary | None, *, begun: bool) -> str | None:
    if summary is not None:
        return summary.mode
    # Processes say what they are at, from their start on.
    if any(where.statuses.glob("*.json")):
        return "processes"
    return "inline" if begun else None


# As data for the page and for --json --------------------------------------------------------------


def run_figures(facts: RunFacts) -> dict[str, Any]:
    """Everything but the recordings, as JSON holds it (`tp-run report --json`)."""
    predicted, summary = facts.plan.predicted, facts.summary
    return {
        "name": facts.name,
        "variant": facts.plan.variant,
        "target": facts.settings.task,
        "mode": facts.mode,
        "ended": summary is not None,
        "missing": list(facts.missing),
        "mini_batches": sum(len(each) for each in facts.losses),
        "period": {"measured_s": facts.period_s, "predicted_s": predicted.period_s},
        "samples_per_s": {"measured": _last_rate(facts), "predicted": predicted.samples_per_s},
        "sequence_distance_predicted": predicted.sequence_distance,
        **_losses(facts),
        "epochs": _epochs(facts),
        **({"evaluations": _evaluations(facts)} if facts.evaluations else {}),
        "workers": [_worker(facts, worker) for worker in facts.workers],
        "recorded": _recorded(facts),
    }


def run_part(facts: RunFacts) -> dict[str, Any]:
    """A run's part of the page's data."""
    return {
        **run_figures(facts),
        "limits": [memory_limit(facts.plan, s) for s in range(len(facts.plan.stages))],
        "memory_kinds": list(MEMORY_KINDS),
        "recordings": {
            source: None if recording is None else columns(recording)
            for source, recording in (("measured", facts.measured), ("predicted", facts.predicted))
        },
    }


def _losses(facts: RunFacts) -> dict[str, list[float | None]]:
    """Loss of each mini-batch, and the seconds of training after it: an epoch's are shared out
    among its mini-batches. Of an epoch under way, each takes as long as the last epoch's."""
    losses: list[float | None] = []
    seconds: list[float | None] = []
    recorded_s = None if facts.measured is None else facts.measured.period_s
    before, each = 0.0, facts.period_s or recorded_s or facts.plan.predicted.period_s
    for e, own in enumerate(facts.losses):
        if e < len(facts.epochs) and own:
            each = facts.epochs[e].seconds / len(own)
        losses += [_number(loss) for loss in own]
        seconds += [before + each * (k + 1) for k in range(len(own))]
        before += each * len(own)
    return {"losses": losses, "loss_seconds": seconds}


def _epochs(facts: RunFacts) -> list[dict[str, Any]]:
    """As recorded, with mini-batches and seconds counted from the run's beginning."""
    found, mini_batches, seconds = [], 0, 0.0
    for record in facts.epochs:
        mini_batches += record.mini_batches
        seconds += record.seconds
        found.append(
            {
                "epoch": record.epoch,
                "mini_batches": mini_batches,
                "seconds": seconds,
                "samples_per_s": record.samples_per_s,
                "train_loss": _number(record.train_loss),
                "test": {name: _number(value) for name, value in record.test.items()},
            }
        )
    return found


def _evaluations(facts: RunFacts) -> list[dict[str, Any]]:
    """All of them, within epochs and at their ends, counted from the run's beginning."""
    found: dict[int, dict[str, Any]] = {}
    ends = _epochs(facts)
    for record in facts.evaluations:
        # Epochs before it are done, and it may have been one until the run grew.
        first = max((e["mini_batches"] for e in ends if e["epoch"] < record.epoch), default=0)
        at = first + record.mini_batches
        before_s = max((e["seconds"] for e in ends if e["mini_batches"] < at), default=0.0)
        found[at] = {
            "epoch": record.epoch,
            "mini_batches": at,
            "seconds": before_s + record.seconds,
            "test": {name: _number(value) for name, value in record.test.items()},
        }
    kept = ("epoch", "mini_batches", "seconds", "test")
    # That at which a callback has ended the run is its epoch's, too.
    found |= {
        end["mini_batches"]: {name: end[name] for name in kept} for end in ends if end["test"]
    }
    return [found[at] for at in sorted(found)]


def _epochs_of(where: RunDir, replica: Replica, summary: RunSummary | None) -> Sequence[StageEpoch]:
    known = read_stage_epochs(where.stage_metrics(replica))
    return known or (() if summary is None else summary.stages[replica.number].epochs)


def _worker(facts: RunFacts, worker: Worker) -> dict[str, Any]:
    stages = [facts.plan.predicted.stages[s] for s in worker.stages]
    predicted = facts.plan.predicted.device_of(worker.stages[0])
    epochs = facts.worker_epochs[worker.rank]
    number = worker.replicas[0].number
    report = None if facts.summary is None else facts.summary.stages[number]
    peak = _peak(facts, worker)
    total, each = training_times(epochs), facts.times[worker.rank]
    return {
        "name": worker.name,
        "stage": worker.stages[0],
        "replica": worker.replicas[0].index,
        **total._asdict(),
        "idle_share": facts.idle_shares[worker.rank],
        "idle_share_predicted": predicted.idle_share,
        "per_mini_batch": {
            "measured": None if each is None else each._asdict(),
            "predicted": steady_times(facts.plan)[worker.stages[0]]._asdict(),
        },
        "memory": {
            "measured": peak,
            "predicted": list(by_kind(predicted.memory)),
            "process_bytes": None if report is None else report.rss_peak_bytes,
        },
        "versions_held": {
            "measured": max((epoch.versions_held for epoch in epochs), default=None),
            "predicted": max(stage.versions_held for stage in stages),
        },
        "version_difference_predicted": max(stage.version_difference for stage in stages),
        "epochs": [
            {
                "epoch": epoch.epoch,
                "version_differences": {
                    str(d): count for d, count in sorted(epoch.version_differences.items())
                },
                "weight_distance": _number(epoch.weight_distance),
                "largest_weight_distance": _number(epoch.largest_weight_distance),
                **training_times([epoch])._asdict(),
            }
            for epoch in epochs
        ],
    }


def _peak(facts: RunFacts, worker: Worker) -> list[int] | None:
    """Bytes by kind at the fullest moment: of the run, or of what was recorded of it so far."""
    if facts.summary is not None:
        peak = facts.summary.stages[worker.replicas[0].number].peak
        return None if peak is None else list(by_kind(peak))
    if facts.measured is None:
        return None
    points = [p.nbytes for p in facts.measured.memory if p.lane == worker.rank]
    return list(max(points, key=sum)) if points else None


def _recorded(facts: RunFacts) -> dict[str, Any] | None:
    if facts.measured is None:
        return None
    begin, end = mini_batches_of(facts.measured)
    return {
        "first_mini_batch": begin,
        "mini_batches": end - begin,
        "period_s": facts.measured.period_s,
    }


def _last_rate(facts: RunFacts) -> float | None:
    if facts.summary is not None:
        return facts.summary.samples_per_s
    return facts.epochs[-1].samples_per_s if facts.epochs else None


def _number(value: float) -> float | None:
    """The number, or None, JSON's null, for what isn't finite."""
    return value if math.isfinite(value) else None
