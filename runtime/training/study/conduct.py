"""Conducting a study: which trainings are due, doing them, and putting the study together.

What is trained next follows from what the trainings before gave, never from what came first: the
study is the same whatever the number of processes, and however often it was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
from torch import nn

from ....planner.plan import Plan, ProfileReference
from ....planner.study.study import (
    Curve,
    Metric,
    Study,
    StudyArm,
    StudyQuestion,
    plan_names,
    studied,
)
from ....planner.study.tuning import (
    Trial,
    TuningGrid,
    at_edge,
    badness_of,
    best_trial,
    level_of,
    next_trials,
)
from ....profiles.errors import TargetError, UserError
from ....profiles.tasks.task import dataset_size
from ...checkpoint.start import check_settings
from ...prepare.data import segments
from ...prepare.tracing import task_to_train
from ...settings import RunSettings, given
from .pool import Processes, ThisProcess, TrainingPool
from .work import ArmSpec, Asked, Finished, StudyWork, arms_of, check_together

Progress = Callable[[str, float, float], None]
"""What is being done, mini-batches done, and in all."""

TRAINED = (
    *("optimizer", "decay_only", "lr_schedule", "clip_norm", "ragged", "autocast"),
    *("deferred_batch_norm", "decay", "decay_rate", "dropout"),
)
"""Settings that are part of the question."""


@dataclass(frozen=True)
class StudyChoices:
    """What the user chooses besides plans and settings.

    Attributes:
        longer: every training is so many times as long as the steps that set the target.
        tune: trainings for each arm's rate.
        tune_steps: mini-batches of these; None: as long as the others.
        factor: between neighbours of a grid of rates.
        warmups: updates that the learning rate rises over; None: as the settings say.
        target: level of `metric`; None: the one that plain training reaches.
        eval_every: mini-batches between evaluations; None: a fifteenth of all; 0: none.
    """

    seeds: int = 3
    longer: float = 1.5
    tune: int = 5
    tune_steps: int | None = None
    factor: float = 2.0
    warmups: tuple[int, ...] | None = None
    metric: Metric = "loss"
    target: float | None = None
    eval_every: int | None = None
    uniform_delay: bool = False


@dataclass(frozen=True)
class Prospect:
    """A study that is about to be conducted: all checks that need no training have passed."""

    question: StudyQuestion
    work: StudyWork
    of_plan: tuple[str, ...]
    """By plan, the name of its arm."""
    names: tuple[str, ...]
    files: tuple[str, ...]

    @property
    def mini_batches(self) -> int:
        """Of all trainings."""
        asked = self.question
        finals = asked.seeds * asked.length
        if asked.tune_length == asked.length:
            # The best trial is a final training.
            finals -= asked.length
        return len(self.work.arms) * (asked.tune * asked.tune_length + finals)


def prospect(
    plans: Sequence[Plan], files: Sequence[str], settings: RunSettings, choices: StudyChoices
) -> Prospect:
    """Check what is asked, and find out what has to be trained.

    Args:
        files: of the plans, for messages.
        settings: of all trainings; its optimizer's rate is where grids begin.

    Raises UserError and TargetError.
    """
    check_together(plans, files)
    first = plans[0]
    settings = msgspec.structs.replace(
        settings, threads=1, checkpoint_every=0, on_nan="warn", distances=False, evaluate=False
    )
    warmups = choices.warmups or (settings.warmup,)
    if len(set(warmups)) < len(warmups):
        raise UserError("--warmup: names one twice")
    if choices.tune < len(warmups):
        raise UserError(
            f"--tune {choices.tune}: too few trainings for {len(warmups)} warm-ups; give "
            f"{len(warmups)} or more"
        )
    check_settings(msgspec.structs.replace(settings, warmup=max(warmups)))
    target, task = task_to_train(settings.task, first.profile)
    samples = dataset_size(task.data("train"), "train")
    steps = sum(s.mini_batches for s in segments(first, settings, samples))
    length = math.ceil(steps * choices.longer)
    tune_length = min(choices.tune_steps or length, length)
    every = choices.eval_every
    if every is None:
        every = max(length // 15, 1)
    if not every and choices.metric != "loss":
        raise UserError(f"--eval-every 0: a target of the {choices.metric} needs evaluations")
    if every:
        dataset_size(task.data("test"), "test")
    if choices.metric == "accuracy" and not hasattr(task, "metrics"):
        raise TargetError(
            f"{settings.task}: has no metrics, and so no accuracy to have for a target; give it "
            "some (docs/tasks.md), or take the loss"
        )
    mixes = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm) for module in target.model(0).modules()
    )
    names = plan_names(plans)
    long = msgspec.structs.replace(settings, steps=length)
    arms, of_plan = arms_of(
        plans, names, long, samples, mixes=mixes, uniform_delay=choices.uniform_delay
    )
    choice = settings.optimizer
    question = StudyQuestion(
        profile=msgspec.convert(first.profile, ProfileReference),
        task=settings.task,
        mini_batch=first.mini_batch,
        steps=steps,
        length=length,
        tune_length=tune_length,
        seeds=choices.seeds,
        tune=choices.tune,
        rate=1.0 if choice is None else choice.lr,
        rate_of="times the task's own" if choice is None else "learning rate",
        factor=choices.factor,
        warmups=warmups,
        metric=choices.metric,
        target=choices.target,
        eval_every=every,
        mixes=mixes,
        training={
            **{name: msgspec.to_builtins(getattr(settings, name)) for name in TRAINED},
            **given(settings),
        },
    )
    work = StudyWork(plans=tuple(plans), arms=tuple(arms), settings=settings, eval_every=every)
    return Prospect(question, work, tuple(of_plan), tuple(names), tuple(files))


def conduct(
    asked: Prospect,
    folder: Path,
    jobs: int,
    progress: Progress,
    timeout_s: float = 600.0,
) -> Study:
    """Do all trainings that aren't done yet, and put the study together.

    Args:
        folder: of finished trainings.
        jobs: processes; 1: this one.
        timeout_s: longest time that a process may say nothing.

    Raises:
        RunError: a training failed, a process died or is stuck. What is done stays.
        UserError: the same, where the user's input is the cause.
    """
    return _Conductor(asked, folder, progress).run(jobs, timeout_s)


class _Conductor:
    def __init__(self, prospect: Prospect, folder: Path, progress: Progress) -> None:
        self._prospect = prospect
        self._question = prospect.question
        self._arms = prospect.work.arms
        self._finished = Finished(folder, prospect.work)
        self._progress = progress
        self._known: dict[Asked, Curve] = {}
        self._pending: set[Asked] = set()
        self._pool: TrainingPool | None = None
        self._done = 0
        self._level: float | None = None

    def run(self, jobs: int, timeout_s: float) -> Study:
        """Train what is due until nothing is."""
        wanted = self._wanted()
        if wanted:
            work = self._prospect.work
            count = min(jobs, len(self._arms) * max(self._question.seeds, 3))
            pool: TrainingPool = (
                ThisProcess(work, self._tell) if count == 1 else Processes(work, count, timeout_s)
            )
            with closing(pool):
                self._pool = pool
                while wanted or self._pending:
                    for asked in wanted[: pool.free]:
                        self._pending.add(asked)
                        pool.give(asked)
                    self._tell()
                    for asked, curve, seconds in pool.wait():
                        self._finished.write(asked, curve, seconds)
                        self._pending.discard(asked)
                        self._learn(asked, curve)
                    wanted = self._wanted()
        return self._study()

    def _tell(self) -> None:
        pool = self._pool
        running = 0 if pool is None else pool.under_way
        label = next(
            (self._prospect.work.label(asked) for asked in sorted(self._pending, key=_place)), ""
        )
        more = len(self._pending) - 1
        what = f"{label} and {more} more" if more > 0 else label
        self._progress(what, self._done + running, self._prospect.mini_batches)

    def _learn(self, asked: Asked, curve: Curve) -> None:
        self._known[asked] = curve
        self._done += asked.length

    def _curve(self, asked: Asked) -> Curve | None:
        if asked not in self._known:
            done = self._finished.read(asked)
            if done is None:
                return None
            self._learn(asked, done.curve)
        return self._known[asked]

    def _wanted(self) -> list[Asked]:
        """Trainings that are due and not under way."""
        found = []
        for k in range(len(self._arms)):
            due, trials = self._tuning(k)
            if not due and trials:
                finals = self._finals(k, trials)
                due = [asked for asked in finals if self._curve(asked) is None]
            found += [asked for asked in due if asked not in self._pending]
        return found

    def _tuning(self, arm: int) -> tuple[list[Asked], list[Trial]]:
        """Of an arm's trials those that are due, and all, once they are done.

        Neither: it has to wait for plain training, which sets the target.
        """
        asked = self._question
        grid = TuningGrid(asked.rate, asked.factor, asked.tune, asked.warmups)
        trials: list[Trial] = []
        while due := next_trials(grid, trials):
            wanted = [
                Asked(arm=arm, rate=rate, warmup=warmup, seed=0, length=asked.tune_length)
                for rate, warmup in due
            ]
            curves = [self._curve(training) for training in wanted]
            missing = [w for w, curve in zip(wanted, curves, strict=True) if curve is None]
            if missing:
                return missing, []
            target = self._tuned_for() if arm else asked.target
            if arm and target is None:
                return [], []
            for (rate, warmup), curve in zip(due, curves, strict=True):
                assert curve is not None
                badness = badness_of(curve, asked.metric, target=target, steps=asked.steps)
                trials.append(Trial(rate, warmup, badness))
        return [], trials

    def _tuned_for(self) -> float | None:
        """The target that others than plain training are tuned for; None: not known yet."""
        asked = self._question
        if asked.target is None and self._level is None:
            _, trials = self._tuning(0)
            if trials:
                best = best_trial(trials)
                curve = self._curve(
                    Asked(
                        arm=0,
                        rate=best.rate,
                        warmup=best.warmup,
                        seed=0,
                        length=asked.tune_length,
                    )
                )
                assert curve is not None
                self._level = level_of(curve, asked.metric, asked.steps)
        return self._level if asked.target is None else asked.target

    def _finals(self, arm: int, trials: Sequence[Trial]) -> list[Asked]:
        best, asked = best_trial(trials), self._question
        return [
            Asked(arm=arm, rate=best.rate, warmup=best.warmup, seed=seed, length=asked.length)
            for seed in range(asked.seeds)
        ]

    def _study(self) -> Study:
        plans = zip(
            self._prospect.work.plans,
            self._prospect.names,
            self._prospect.files,
            self._prospect.of_plan,
            strict=True,
        )
        return Study(
            question=self._question,
            arms=tuple(self._arm(k, arm) for k, arm in enumerate(self._arms)),
            plans=tuple(studied(*each) for each in plans),
        )

    def _arm(self, k: int, arm: ArmSpec) -> StudyArm:
        _, trials = self._tuning(k)
        finals, best = self._finals(k, trials), best_trial(trials)
        length = self._question.tune_length
        tried = [
            Asked(arm=k, rate=trial.rate, warmup=trial.warmup, seed=0, length=length)
            for trial in trials
        ]
        tuning = [self._known[asked] for asked in tried if asked not in finals]
        return StudyArm(
            name=arm.name,
            kind=arm.kind,
            micro_batches=arm.micro_batches,
            update_every=arm.update_every,
            delay=arm.delay,
            rate=best.rate,
            warmup=best.warmup,
            at_edge=at_edge([t for t in trials if t.warmup == self._question.warmups[0]]),
            curves=(
                *(msgspec.structs.replace(curve, phase="tuning") for curve in tuning),
                *(self._known[asked] for asked in finals),
            ),
        )


def _place(asked: Asked) -> tuple[float, ...]:
    return asked.arm, asked.seed, asked.rate, asked.warmup
