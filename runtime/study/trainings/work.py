"""What a study trains, as data: its arms, its trainings, and the folder of those that are done.

A finished training is one file, named by a digest of all that its curve follows from: settings,
what the schedule does, versions, the files of the task and of a plugin. So a study that is started
again finds what is done, and so does one that asks for more seeds, more rates or another target.
"""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import nn

from .... import __version__
from ....planner.plan import Plan, pipeline_of
from ....planner.schedules.schedules import make_schedule
from ....planner.simulator.timeline import simulate, warm_mini_batches
from ....profiles import plugins
from ....profiles.errors import FileError, TaskWarning, UserError
from ....profiles.files import TaggedFile, file_errors, is_file, read_file, write_bytes
from ...prepare.data import segments
from ...prepare.devices import autocast_of
from ...prepare.prepare import prepare
from ...settings import RunSettings, without_effect
from ..figures.study import PLAIN, Curve, Metric, delays_of, trains_plainly

if TYPE_CHECKING:
    from ..choices import Cure

WINDOWS = 100
"""Of a curve: so many means, or some more."""
FILLING = 0.05
"""A share of an epoch's periods. From there on what filling and draining add is warned of."""


class ArmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one arm of a study trains."""

    name: str
    kind: Literal["plain", "pipeline", "uniform delay"]
    plan: int
    """Which plan is trained; of the others, whose sizes it has."""
    micro_batches: int = 0
    update_every: int = 1
    delay: int = 0
    rules: str
    """A digest of what the weights follow from besides settings."""
    settings: dict[str, Any] = {}
    """Those that are its own, of a cure."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One training of an arm."""

    arm: int
    rate: float
    warmup: int
    seed: int
    length: int
    """Mini-batches."""


class StudyWork(msgspec.Struct, frozen=True, kw_only=True):
    """All that a process needs to train any of a study's trainings."""

    plans: tuple[Plan, ...]
    arms: tuple[ArmSpec, ...]
    settings: RunSettings
    """Of all trainings; rate, warm-up, seed and steps are each one's own."""
    eval_every: int
    """Mini-batches between evaluations of a training of the whole `length`; 0: there are none."""
    length: int
    metric: Metric

    def evaluated_every(self, length: int) -> int:
        """Of a training so long: a shorter one is evaluated as often, or not at all where its
        target is of the training loss."""
        if length >= self.length or not self.eval_every:
            return self.eval_every
        return 0 if self.metric == "loss" else max(self.eval_every * length // self.length, 1)

    def settings_of(self, asked: Asked) -> RunSettings:
        """The settings of one training. Without an optimizer by name, its rate isn't in them."""
        choice = self.settings.optimizer
        if choice is not None:
            choice = msgspec.structs.replace(choice, lr=asked.rate)
        return msgspec.structs.replace(
            self.settings,
            **self.arms[asked.arm].settings,
            optimizer=choice,
            warmup=asked.warmup,
            seed=asked.seed,
            steps=asked.length,
        )

    def window(self, length: int) -> int:
        """Mini-batches that a point of a curve is the mean of."""
        return max(length // WINDOWS, 1)

    def label(self, asked: Asked) -> str:
        """The training, for messages."""
        arm = self.arms[asked.arm].name
        return f"{arm}, rate {asked.rate:g}, warm-up {asked.warmup}, seed {asked.seed}"


# From plans to arms -----------------------------------------------------------------------------


def arms_of(
    plans: Sequence[Plan],
    names: Sequence[str],
    settings: RunSettings,
    samples: int,
    *,
    mixes: bool,
    uniform_delay: bool,
    cures: Sequence[Cure | None],
) -> tuple[list[ArmSpec], list[str]]:
    """The arms of a study, plain training first; and for each plan the name of its arm.

    Pipelines that flush, or none of whose gradients is late or clipped by stages, are plain
    training and share its arm, unless rules from outside have a part in their updates; but where a
    layer mixes the samples of a batch (`mixes`), plain training of the same micro-batches one by
    one, and replicas that share whole mini-batches are trained as such. Plans whose operations,
    cuts and system are the same share an arm as well.

    Args:
        names: of the plans, all different.
        samples: in the training data.
        uniform_delay: an arm more for each number of stages: plain training with gradients of the
            weights S − 1 updates before.
        cures: by plan.
    """
    arms = [ArmSpec(name=PLAIN, kind="plain", plan=0, rules=_digest("plain", 0, 1))]
    of_plan: list[str] = []
    for k, (plan, name, cure) in enumerate(zip(plans, names, cures, strict=True)):
        clips = settings.clip_norm is not None
        plainly = trains_plainly(plan.variant, delays_of(plan.predicted.stages), clips=clips)
        # Replicas' shares of a whole mini-batch aren't micro-batches one by one.
        if plainly and not (mixes and plan.system.whole_mini_batches and _most_replicas(plan) > 1):
            n = plan.micro_batches if mixes and plan.micro_batches > 1 else 0
            found = ArmSpec(
                name=_plain_name(n, plan.update_every),
                kind="plain",
                plan=k,
                micro_batches=n,
                update_every=plan.update_every,
                rules=_digest("plain", n, plan.update_every),
            )
        else:
            rules = _schedule_digest(plan, settings, samples)
            own = {} if cure is None else cure.settings
            found = ArmSpec(name=name, kind="pipeline", plan=k, rules=rules, settings=own)
        alike = (found.rules, found.settings)
        same = next((arm for arm in arms if (arm.rules, arm.settings) == alike), None)
        if same is None:
            arms.append(found)
        of_plan.append((same or found).name)
    delays = {len(plan.stages) - 1 for plan in plans} - {0} if uniform_delay else set()
    for delay in sorted(delays):
        rules, name = _digest("uniform delay", delay), f"uniform delay of {delay}"
        arms.append(ArmSpec(name=name, kind="uniform delay", plan=0, delay=delay, rules=rules))
    return arms, of_plan


def cured(
    plans: Iterable[tuple[Plan, str, str]], settings: RunSettings, cures: Sequence[Cure]
) -> list[tuple[Plan, str, str, Cure | None]]:
    """Plans with their names and files, each without a cure, and then with every one all of whose
    settings do something in it. Raises UserError for a cure of which that holds in no plan, and
    warns of settings that do nothing in plans that have a delay."""
    idle: dict[str, list[str]] = {}
    found: list[tuple[Plan, str, str, Cure | None]] = []
    missing = {cure.text: "all flush or have no delay" for cure in cures}
    for plan, name, file in plans:
        found.append((plan, name, file, None))
        if trains_plainly(plan.variant, delays_of(plan.predicted.stages)):
            continue
        before = set(without_effect(settings, plan, 1, inline=True))
        for line in sorted(before):
            idle.setdefault(line.partition(":")[0], []).append(name)
        for cure in cures:
            own = msgspec.structs.replace(settings, **cure.settings)
            after = set(without_effect(own, plan, 1, inline=True))
            if after <= before:
                found.append((plan, f"{name} with {cure.text}", file, cure))
                missing.pop(cure.text, None)
            elif cure.text in missing:
                missing[cure.text] = "; ".join(sorted(after - before))
    for text, why in missing.items():
        raise UserError(f"--cure {text}: changes nothing in these plans ({why}); leave it out")
    for setting, names in idle.items():
        line = f"{setting}: does nothing in {', '.join(names)} (docs/weights.md)"
        warnings.warn(line, TaskWarning, stacklevel=3)
    return found


def _plain_name(micro_batches: int, update_every: int) -> str:
    parts = [PLAIN]
    if micro_batches:
        parts.append(f"{micro_batches} micro-batches one by one")
    if update_every > 1:
        parts.append(f"updates every {update_every}")
    return ", ".join(parts)


def _schedule_digest(plan: Plan, settings: RunSettings, samples: int) -> str:
    pipeline = pipeline_of(plan)
    outside = pipeline.variant.outside
    lengths = sorted({s.mini_batches for s in segments(plan, settings, samples)})
    return _digest(
        plan.variant,
        plan.mini_batch,
        plan.micro_batches,
        plan.update_every,
        plan.tied,
        [[stage.nodes, len(stage.devices), stage.recompute] for stage in plan.stages],
        [tuple(make_schedule(pipeline, length)) for length in lengths],
        *([] if outside is None else [outside.checksum]),
    )


def _digest(*parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:16]


# Trainings that are done ------------------------------------------------------------------------


class FinishedTraining(TaggedFile, frozen=True, kw_only=True, tag="timeprest-study-training/1"):
    """The file of a finished training."""

    training: str
    """Which one, for people."""
    seconds: float
    """That it took."""
    curve: Curve


class Finished:
    """The folder of a study's finished trainings."""

    def __init__(self, folder: Path, work: StudyWork) -> None:
        self.folder = folder
        self._work = work
        self._source = source_of(work.settings.task)

    def path(self, asked: Asked) -> Path:
        """Where a training's file is to be."""
        arm = self._work.arms[asked.arm]
        plan = self._work.plans[arm.plan]
        digest = _digest(
            (__version__, str(torch.__version__), self._source),
            (plan.profile.fingerprint, plan.mini_batch, arm.rules),
            self._work.settings_of(asked),
            (
                asked.rate,
                self._work.evaluated_every(asked.length),
                self._work.window(asked.length),
            ),
        )
        return self.folder / f"{digest}.json"

    def read(self, asked: Asked) -> FinishedTraining | None:
        """A training that is done; None: it isn't. Raises FileError."""
        path = self.path(asked)
        if not is_file(path):
            return None
        try:
            return read_file(path, FinishedTraining)
        except FileError as error:
            raise FileError(f"{error}; remove the file, and it is trained again") from None

    def write(self, asked: Asked, curve: Curve, seconds: float) -> FinishedTraining:
        """Keep a training. Raises FileError."""
        done = FinishedTraining(training=self._work.label(asked), seconds=seconds, curve=curve)
        write_bytes(self.path(asked), msgspec.json.encode(done) + b"\n")
        return done


def source_of(task: str) -> str:
    """A digest of the file that a task stands in, or of its module's; "": it has none.

    Raises FileError where it can't be read.
    """
    # The version of this package says what a built-in one is.
    if task.partition(":")[0] in plugins.names("tasks"):
        return ""
    name = task.rpartition(":")[0] or task
    file = name if name.endswith(".py") else _module_file(name)
    if not file or not is_file(file):
        return ""
    with file_errors(Path(file), "read"):
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def _module_file(name: str) -> str:
    """Of ``pkg.mod``; "": there is no such module, or none in a file."""
    if not all(part.isidentifier() for part in name.split(".")):
        return ""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):  # a package on the way that isn't one
        return ""
    return (spec.origin or "") if spec is not None and spec.has_location else ""


# Checks of what plans have in common ------------------------------------------------------------


def settings_of_all(
    plans: Sequence[Plan], files: Sequence[str], settings: RunSettings
) -> RunSettings:
    """The settings of all trainings. Raises UserError where plans can't be compared."""
    _check_together(plans, files)
    under = autocast_of(plans[0], settings)
    for plan, file in zip(plans, files, strict=True):
        if autocast_of(plan, settings) != under:
            raise UserError(
                f"{file}: was profiled under another autocast than {files[0]}; a study trains all "
                "alike: give --autocast bf16 or off"
            )
    settings = msgspec.structs.replace(
        settings, threads=1, checkpoint_every=0, on_nan="warn", distances=False, evaluate=False
    )
    # Finished trainings are known by their settings.
    return settings if under is None else msgspec.structs.replace(settings, autocast="bfloat16")


def mixes_samples(plans: Sequence[Plan], settings: RunSettings, model: nn.Module) -> bool:
    """Whether micro-batches train something else than whole mini-batches: a layer mixes the samples
    of a batch, or the loss takes them together. Warns of what does, but for batch norms."""
    parts = [plan.micro_batches * _most_replicas(plan) for plan in plans]
    parted = plans[parts.index(max(parts))]
    cautions = prepare(parted, settings).cautions if max(parts) > 1 else ()
    for line in cautions:
        warnings.warn(line, TaskWarning, stacklevel=3)
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    return norms or bool(cautions)


def _most_replicas(plan: Plan) -> int:
    return max(len(stage.devices) for stage in plan.stages)


def warn_of_filling(
    plans: Sequence[Plan], names: Sequence[str], settings: RunSettings, samples: int
) -> None:
    """Warn where epochs, or the whole training, are so short that filling and draining, which no
    period has in it, may change which plan is first."""
    epoch = max(s.mini_batches for s in segments(plans[0], settings, samples))
    slower: dict[str, float] = {}
    for plan, name in zip(plans, names, strict=True):
        pipeline, period_s = pipeline_of(plan), plan.predicted.period_s
        count = min(epoch, warm_mini_batches(len(plan.stages), plan.micro_batches))
        stages = simulate(pipeline, make_schedule(pipeline, count)).stages
        end_s = max(events[-1].end_s for events in stages)
        filling_s = end_s - count * period_s
        if filling_s > FILLING * epoch * period_s:
            slower[name] = 1 + filling_s / (epoch * period_s)
    if slower:
        line = (
            f"pipelines run empty after every {epoch} mini-batches, which predicted times leave "
            f"out: {', '.join(slower)} would take up to {max(slower.values()):.2f} times as long"
        )
        warnings.warn(line, TaskWarning, stacklevel=3)


def _check_together(plans: Sequence[Plan], files: Sequence[str]) -> None:
    """Raise UserError where plans can't be compared: another model, or another mini-batch."""
    first, at = plans[0], files[0]
    for plan, file in zip(plans, files, strict=True):
        if plan.profile.fingerprint != first.profile.fingerprint:
            raise UserError(
                f"{file}: is for another model ({plan.profile.target}, fingerprint "
                f"{plan.profile.fingerprint}) than {at} ({first.profile.target}, "
                f"{first.profile.fingerprint}); a study compares plans of one profile"
            )
        if plan.mini_batch != first.mini_batch:
            raise UserError(
                f"{file}: its mini-batch is {plan.mini_batch}, that of {at} {first.mini_batch}; "
                "a study compares plans of one mini-batch"
            )
