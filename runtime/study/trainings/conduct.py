"""Conducting a study: which trainings are due, doing them, and putting the study together.

What is trained next follows from what the trainings before gave, never from what came first: the
study is the same whatever the number of processes, and however often it was stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch import nn

from ....planner.plan import Plan
from ....profiles.errors import TargetError, UserError
from ....profiles.options import given
from ....profiles.profile import ProfileReference
from ....profiles.tasks.samples import size_of
from ...checkpoint.start import check_settings
from ...prepare.data import run_length, segments, training_samples
from ...prepare.devices import autocast_of
from ...prepare.tracing import task_to_train
from ...settings import DELAYS, RunSettings
from ..figures.study import (
    Curve,
    Study,
    StudyArm,
    StudyQuestion,
    plan_names,
    studied,
)
from ..figures.tuning import (
    Trial,
    TuningGrid,
    at_edge,
    badness_of,
    best_trial,
    candidates,
    level_of,
    next_trials,
    together,
)
from .pool import Processes, ThisProcess, TrainingPool
from .training import check_tunable
from .work import ArmSpec, Asked, Finished, StudyWork, arms_of, check_together

if TYPE_CHECKING:
    from ..choices import StudyChoices

Progress = Callable[[str, float, float], None]
"""What is being done, mini-batches done, and in all."""

TRAINED = (
    *("optimizer", "decay_only", "lr_schedule", "clip_norm", "ragged", "autocast"),
    *("deferred_batch_norm", "decay", "decay_rate", "dropout"),
)
"""Settings that are part of the question."""


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
        finals = asked.confirm * asked.seeds * asked.length
        if asked.tune_length == asked.length:
            # The best trials are among them.
            finals -= asked.confirm * asked.length
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
    first, under = plans[0], autocast_of(plans[0], settings)
    for plan, file in zip(plans, files, strict=True):
        if autocast_of(plan, settings) != under:
            raise UserError(
                f"{file}: was profiled under another autocast than {files[0]}; a study trains all "
                "alike: give --autocast bf16 or off"
            )
    settings = msgspec.structs.replace(
        settings, threads=1, checkpoint_every=0, on_nan="warn", distances=False, evaluate=False
    )
    if under is not None:
        # Finished trainings are known by their settings.
        settings = msgspec.structs.replace(settings, autocast="bfloat16")
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
    samples = training_samples(first, settings, task.data("train"))
    steps = sum(s.mini_batches for s in segments(first, settings, samples))
    length = math.ceil(steps * choices.longer)
    tune_length = min(choices.tune_steps or length, length)
    every = choices.eval_every
    if every is None:
        every = max(length // 15, 1)
    if not every and choices.metric != "loss":
        raise UserError(f"--eval-every 0: a target of the {choices.metric} needs evaluations")
    if every:
        size_of(task.data("test"), "test", first.mini_batch)
    if choices.metric == "accuracy" and not hasattr(task, "metrics"):
        raise TargetError(
            f"{settings.task}: has no metrics, and so no accuracy to have for a target; give it "
            "some (docs/tasks.md), or take the loss"
        )
    model = target.model(0)
    mixes = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    names = plan_names(plans)
    long = msgspec.structs.replace(settings, steps=length)
    if choices.tune > 1:
        check_tunable(task, long, model, run_length(segments(first, long, samples)), choices.factor)
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
        confirm=min(choices.confirm, choices.tune),
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
            **given(settings, DELAYS),
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
                ThisProcess(work, self._report) if count == 1 else Processes(work, count, timeout_s)
            )
            with closing(pool):
                self._pool = pool
                while wanted or self._pending:
                    for asked in wanted[: pool.free]:
                        self._pending.add(asked)
                        pool.give(asked)
                    self._report()
                    for asked, curve, seconds in pool.wait():
                        self._finished.write(asked, curve, seconds)
                        self._pending.discard(asked)
                        self._learn(asked, curve)
                    wanted = self._wanted()
        return self._study()

    def _report(self) -> None:
        pool = self._pool
        running = 0 if pool is None else pool.under_way
        label = next(
            (self._prospect.work.label(asked) for asked in sorted(self._pending, key=_place)), ""
        )
        more = len(self._pending) - 1
        what = f"{label} and {more} more" if more > 0 else label
        self._progress(what, self._done + running, self._prospect.mini_batches)

    def _learn(self, asked: Asked, curve: Curve) -> None:
        """Raises TargetError where evaluations don't have what the target is a level of."""
        metric, figures = self._question.metric, {n for test in curve.tests for n in test.figures}
        if metric == "accuracy" and curve.tests and metric not in figures:
            raise TargetError(
                f"{self._question.task}: its evaluations have no 'accuracy' to have for a target, "
                f"but {', '.join(sorted(figures))}: name a figure of its metrics so, or take the "
                "loss"
            )
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
        found: list[Asked] = []
        for k in range(len(self._arms)):
            due, trials = self._tuning(k)
            if not due and trials:
                due = [
                    asked
                    for trial in candidates(trials, self._question.confirm)
                    for asked in self._finals(k, trial)
                    if self._curve(asked) is None
                ]
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
            if self._waits(arm):
                return [], []
            for (rate, warmup), curve in zip(due, curves, strict=True):
                assert curve is not None
                trials.append(Trial(rate, warmup, self._badness(arm, curve)))
        return [], trials

    def _waits(self, arm: int) -> bool:
        """Whether an arm's trials can't be judged yet."""
        return bool(arm) and self._target() is None

    def _badness(self, arm: int, curve: Curve) -> tuple[float, float]:
        asked = self._question
        target = self._target() if arm else asked.target
        return badness_of(curve, asked.metric, target=target, steps=asked.steps)

    def _target(self) -> float | None:
        """What arms are tuned for; None: plain training hasn't set it yet."""
        asked = self._question
        if asked.target is not None:
            return asked.target
        if self._level is None and (best := self._best(0)) is not None:
            curves = [self._curve(training) for training in self._finals(0, best)]
            # As the study's target: of seeds that don't diverge, if there are any.
            sound = [c for c in curves if c is not None and c.diverged_at is None]
            levels = [level_of(c, asked.metric, asked.steps) for c in sound]
            self._level = sum(levels) / len(levels) if levels else math.nan
        return self._level

    def _best(self, arm: int) -> Trial | None:
        """The rate and warm-up of an arm; None: all that it takes isn't trained yet."""
        _, trials = self._tuning(arm)
        judged = []
        for trial in candidates(trials, self._question.confirm):
            curves = [self._curve(asked) for asked in self._finals(arm, trial)]
            if None in curves:
                return None
            over_seeds = [self._badness(arm, curve) for curve in curves if curve is not None]
            judged.append(replace(trial, badness=together(over_seeds)))
        return best_trial(judged) if judged else None

    def _finals(self, arm: int, trial: Trial) -> list[Asked]:
        asked = self._question
        return [
            Asked(arm=arm, rate=trial.rate, warmup=trial.warmup, seed=seed, length=asked.length)
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
        best, asked = self._best(k), self._question
        assert best is not None
        finals = self._finals(k, best)
        tried = [
            Asked(arm=k, rate=trial.rate, warmup=trial.warmup, seed=0, length=asked.tune_length)
            for trial in trials
        ]
        for trial in candidates(trials, asked.confirm):
            tried += [each for each in self._finals(k, trial) if each not in tried]
        tuning = [self._known[each] for each in tried if each not in finals]
        return StudyArm(
            name=arm.name,
            kind=arm.kind,
            micro_batches=arm.micro_batches,
            update_every=arm.update_every,
            delay=arm.delay,
            rate=best.rate,
            warmup=best.warmup,
            at_edge=at_edge([t for t in trials if t.warmup == asked.warmups[0]], best.rate),
            curves=(
                *(msgspec.structs.replace(curve, phase="tuning") for curve in tuning),
                *(self._known[each] for each in finals),
            ),
        )


def _place(asked: Asked) -> tuple[float, ...]:
    return asked.arm, asked.seed, asked.rate, asked.warmup
