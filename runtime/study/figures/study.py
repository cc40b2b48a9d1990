"""The study as data: the question, what was trained, the plans, and the file that holds them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from ....planner.cluster.cluster import Cluster
from ....planner.plan import Plan, StagePrediction
from ....planner.search.answer.recheck import was_edited
from ....planner.systems.variants import variant_named
from ....profiles.errors import FileError, PlanError, TaskWarning
from ....profiles.files import (
    MAX_FILE_BYTES,
    Count,
    Factor,
    Predicted,
    TaggedFile,
    Tally,
    read_file,
    write_bytes,
)
from ....profiles.options import spelled_out
from ....profiles.profile import ProfileReference
from ...settings import OptimizerChoice, RunSettings

FORMAT = "timeprest-study/1"

PLAIN = "plain"
"""The name of plain training: one process, whole mini-batches, no pipeline."""

Metric = Literal["loss", "test loss", "accuracy"]
"""What a target is a level of: the training loss, or a figure of evaluations."""

RISES = {"loss": False, "test loss": False, "accuracy": True}
"""Whether more of it is better."""

DIGITS = 6
"""Significant digits that curves keep."""


BUSY = 3
"""Processes that an arm keeps busy that is trained to the end, about."""


class Budget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much a study may train: one of both."""

    trainings: Factor | None = None
    """As much as so many of the whole length."""
    seconds: Factor | None = None
    """Of each process."""
    processes: Count = 1


class StudyQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a study asks, of whatever plans."""

    profile: ProfileReference
    task: str
    mini_batch: Count
    steps: Count
    """Mini-batches after which plain training's level is the target, where none is given."""
    length: Count
    """Mini-batches of every final training: more, so that others get there too."""
    longest: Factor | msgspec.UnsetType = msgspec.UNSET
    """Times the steps, of those that may be the best though they don't get there in that length;
    unset: without a budget there are none, with one as long as it allows."""
    tune_length: Count
    """Mini-batches of a training that a rate is judged by."""
    seeds: Count
    tune: Count
    """Trainings that each arm has for its rate and warm-up, with seed 0."""
    confirm: Count
    """The best so many of them train with all seeds; the best of these counts."""
    rate: Factor
    """Where every grid begins."""
    rate_of: Literal["learning rate", "times the task's own"]
    factor: Annotated[float, Meta(gt=1, le=1e6)]
    """Between neighbours of a grid."""
    warmups: tuple[Tally, ...]
    metric: Metric
    target: float | None = None
    """None: the level of plain training after `steps`."""
    eval_every: Tally
    """Mini-batches between two evaluations; 0: there are none."""
    mixes: bool
    """A layer mixes the samples of a batch (batch norm), or the loss takes them together:
    micro-batches are trained as such."""
    budget: Budget | msgspec.UnsetType = msgspec.UNSET
    """Unset: every arm is trained to the end."""
    training: dict[str, Any]
    """The settings of all trainings, as those of a run."""

    @property
    def options(self) -> str:
        """Of ``tp-run``, that say these settings, but for rates and what is to be cured."""
        named = self.training.get("optimizer") or {}
        own = {name: value for name, value in named.items() if name != "lr"}
        words = [*spelled_out(OptimizerChoice, own), *spelled_out(RunSettings, self.training)]
        return " ".join(words)


class EvaluationPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An evaluation on the test data, of the weights after so many mini-batches at all stages."""

    mini_batches: Count
    figures: dict[str, float]
    """"loss", and the task's own."""


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One training."""

    seed: Tally
    rate: Factor
    warmup: Tally
    phase: Literal["rung", "tuning", "final"]
    """rung: a shorter one, that arms are dropped by."""
    length: Count
    """Mini-batches that it was to have."""
    window: Count
    losses: tuple[float, ...]
    """Each the mean over `window` mini-batches; the last one over what is left. Up to where it
    diverged."""
    tests: tuple[EvaluationPoint, ...] = ()
    diverged_at: Count | None = None
    """Mini-batches done when the loss wasn't finite any more, or had blown up; at the end, where
    it ended above where it began. None: it didn't."""


class StudyArm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of the things that are trained and compared; plans with the same weights share one."""

    name: str
    kind: Literal["plain", "pipeline", "uniform delay"]
    micro_batches: Tally = 0
    """Of plain training: how many go through the model one by one; 0: the whole mini-batch."""
    update_every: Count = 1
    delay: Tally = 0
    """Updates between the weights that gradients are made with and those they are applied to."""
    rate: Factor
    """The best of its budget."""
    warmup: Tally
    at_edge: bool
    """The best rate lies at the edge of what was tried: the budget was too small for it."""
    curves: tuple[Curve, ...]

    @property
    def length(self) -> int:
        """Mini-batches of its final trainings: some studies train some for longer."""
        return min(curve.length for curve in self.finals())

    def finals(self) -> tuple[Curve, ...]:
        """By seed."""
        found = (curve for curve in self.curves if curve.phase == "final")
        return tuple(sorted(found, key=lambda curve: curve.seed))


class StudiedPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a study needs of a plan."""

    name: str
    file: str
    arm: str
    variant: str
    stages: Count
    devices: Count
    micro_batches: Count
    update_every: Count
    in_flight: tuple[Count, ...]
    version_differences: tuple[Tally, ...]
    """Largest in the steady state, by stage."""
    delays: tuple[Tally, ...] | None = None
    """By stage (`StagePrediction.delay`). None in studies of before it was written."""
    parameter_bytes: tuple[Tally, ...] | None = None
    """By stage; as `delays`."""
    period_s: Predicted
    memory_bytes: Tally
    """Of the device that holds most."""
    cluster: str
    cure: str | msgspec.UnsetType = msgspec.UNSET
    """Settings that it trained under besides the question's, as ``--cure`` has them."""

    @property
    def is_plain_training(self) -> bool:
        """Whether it is plain training, which then was trained for it."""
        return variant_named(self.variant).is_plain_training


class DroppedArm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An arm that a budget wasn't spent on to the end, with its plans."""

    arm: StudyArm
    """Its curves are of rungs alone, its rate the best of the last one."""
    plans: tuple[StudiedPlan, ...]


class Study(TaggedFile, frozen=True, kw_only=True, tag=FORMAT, omit_defaults=True):
    """A study's file: all that its table and page are made of."""

    most: ClassVar[int] = MAX_FILE_BYTES

    question: StudyQuestion
    arms: tuple[StudyArm, ...]
    plans: tuple[StudiedPlan, ...]
    dropped: tuple[DroppedArm, ...] = ()

    def arm(self, name: str) -> StudyArm:
        """The arm of this name; a study that was read has it."""
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def plain(self) -> StudyArm:
        """Plain training."""
        return self.arm(PLAIN)


def read_study(path: str | Path) -> Study:
    """Read and check a study. Raises FileError naming the file and field."""
    study = read_file(path, Study)
    names = [arm.name for arm in study.arms]
    dropped = [each.arm.name for each in study.dropped]
    if PLAIN not in names:
        raise FileError(f"{path}: arms: there is no {PLAIN!r} training to compare with")
    for name in _repeated(names + dropped):
        raise FileError(f"{path}: arms: two have the name {name!r}; give each its own")
    left = [plan for each in study.dropped for plan in each.plans]
    for name in _repeated(plan.name for plan in (*study.plans, *left)):
        raise FileError(f"{path}: plans: two have the name {name!r}; give each its own")
    for k, plan in enumerate(study.plans):
        _check_plan(plan, names, f"{path}: plans[{k}]")
    for k, each in enumerate(study.dropped):
        where = f"{path}: dropped[{k}]"
        if {curve.phase for curve in each.arm.curves} != {"rung"}:
            raise FileError(f"{where}.arm.curves: must be of the phase 'rung', one or more")
        for n, plan in enumerate(each.plans):
            _check_plan(plan, [each.arm.name], f"{where}.plans[{n}]")
    for k, arm in enumerate(study.arms):
        seeds = [curve.seed for curve in arm.finals()]
        most = max(len(study.plain.finals()), study.question.seeds)
        if seeds != list(range(len(seeds))) or not study.question.seeds <= len(seeds) <= most:
            raise FileError(
                f"{path}: arms[{k}].curves: {arm.name!r} must have one final training for each "
                f"of the seeds 0 to {study.question.seeds - 1}, or as many as plain training"
            )
    return study


def _check_plan(plan: StudiedPlan, arms: Sequence[str], where: str) -> None:
    if plan.arm not in arms:
        raise FileError(f"{where}.arm: {plan.arm!r} is none of the arms")
    for field in ("in_flight", "version_differences", "delays", "parameter_bytes"):
        count = plan.stages if (found := getattr(plan, field)) is None else len(found)
        if count != plan.stages:
            raise FileError(
                f"{where}.{field}: has {count} numbers, and the plan {plan.stages} stages: one for "
                "each"
            )
    try:
        variant_named(plan.variant)
    except PlanError as error:
        raise FileError(f"{where}.variant: {error}; name the --plugin that has others") from None


def write_study(path: str | Path, study: Study) -> None:
    """Write it as indented JSON, lists of numbers in one line each. Raises FileError."""
    text = msgspec.json.format(msgspec.json.encode(study), indent=1).decode()
    text = _NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
    write_bytes(path, text.encode() + b"\n")


_NUMBERS = re.compile(r"\[\s*-?\d[-+\d.eE,\s]*\]")


def short(value: float) -> float:
    """The number as curves keep it."""
    return float(f"{value:.{DIGITS}g}")


# From plans to what a study needs of them -------------------------------------------------------


def studied(plan: Plan, name: str, file: str, arm: str, cure: str = "") -> StudiedPlan:
    """What a study needs of a plan. A warning names one that was edited and not checked."""
    if was_edited(plan) and not cure:
        warnings.warn(
            f"{file}: edited since it was made: its period is that of before; tp-plan check {file} "
            "--profile PROFILE -o FILE says what it does now",
            TaskWarning,
            stacklevel=2,
        )
    predicted = plan.predicted
    return StudiedPlan(
        name=name,
        file=file,
        arm=arm,
        variant=plan.variant,
        stages=len(plan.stages),
        devices=plan.workers,
        micro_batches=plan.micro_batches,
        update_every=plan.update_every,
        in_flight=tuple(stage.in_flight for stage in plan.stages),
        version_differences=tuple(stage.version_difference for stage in predicted.stages),
        delays=delays_of(predicted.stages),
        parameter_bytes=tuple(stage.parameter_bytes for stage in predicted.stages),
        period_s=predicted.period_s,
        memory_bytes=predicted.most_bytes,
        cluster=cluster_name(plan.cluster),
        cure=cure or msgspec.UNSET,
    )


def delays_of(stages: Sequence[StagePrediction]) -> tuple[int, ...] | None:
    """By stage; None: a plan of before they were written."""
    found = tuple(stage.delay for stage in stages if stage.delay is not None)
    return found if len(found) == len(stages) else None


def trains_plainly(variant: str, delays: Sequence[int] | None, *, clips: bool = False) -> bool:
    """Whether weights are those of plain training: the system flushes, or no gradient is late; and
    nobody changes updates. None: delays aren't known.

    Args:
        clips: gradients; each stage its own part, where the system doesn't flush.
    """
    system = variant_named(variant)
    in_time = delays is not None and not any(delays) and not (clips and len(delays) > 1)
    return (replace(system, flushes=True) if in_time else system).is_plain_training


def cluster_name(cluster: Cluster) -> str:
    """Devices and links in a few words: ``4 devices, 4 GB/s and 50 µs``."""
    count = len(cluster.devices)
    kinds = "device" if count == 1 else "devices"
    links = ", ".join(
        f"{link.bandwidth_bytes_per_s / 1e9:.4g} GB/s and {link.latency_s * 1e6:.4g} µs"
        for link in cluster.networks
    )
    return f"{count} {kinds}, {links}"


def plan_names(plans: Sequence[Plan]) -> list[str]:
    """A name for each, no two the same: the system's, and what tells those of one system apart."""
    found = [plan.variant for plan in plans]
    for more in (
        lambda plan: f" S={len(plan.stages)} N={plan.micro_batches}",
        lambda plan: f" K={plan.update_every}",
        lambda plan: f" L={'-'.join(str(stage.in_flight) for stage in plan.stages)}",
        lambda plan: f" on {cluster_name(plan.cluster)}",
    ):
        ends: dict[str, set[str]] = {}
        for name, plan in zip(found, plans, strict=True):
            ends.setdefault(name, set()).add(more(plan))
        found = [
            name + more(plan) if len(ends[name]) > 1 else name
            for name, plan in zip(found, plans, strict=True)
        ]
    twice = _repeated(found)
    return [f"{name} #{k + 1}" if name in twice else name for k, name in enumerate(found)]


def _repeated(names: Iterable[str]) -> set[str]:
    listed = list(names)
    return {name for name in listed if listed.count(name) > 1}
