"""Conducting a study: what is asked, checked; and its trainings, done as they are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ....planner.plan import Plan
from ....profiles.errors import TargetError, UserError
from ....profiles.options import given
from ....profiles.profile import ProfileReference
from ....profiles.tasks.samples import size_of
from ....profiles.tasks.task import Task
from ...checkpoint.start import check_settings
from ...prepare.data import run_length, segments, training_samples
from ...prepare.tracing import task_to_train
from ...settings import DELAYS, RunSettings
from ..figures.study import BUSY, Curve, StudiedPlan, Study, StudyQuestion, plan_names, studied
from .choosing import Choosing
from .pool import Processes, ThisProcess
from .rates import check_tunable
from .work import (
    Asked,
    Finished,
    FinishedTraining,
    StudyWork,
    arms_of,
    cured,
    mixes_samples,
    settings_of_all,
    warn_of_filling,
)

if TYPE_CHECKING:
    from ..choices import StudyChoices

Progress = Callable[[str, float, float], None]
"""What is being done, mini-batches done, and in all."""
Say = Callable[[str], None]

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
    plans: tuple[StudiedPlan, ...]
    """Of the work; each names its arm."""


def prospect(
    plans: Sequence[Plan], files: Sequence[str], settings: RunSettings, choices: StudyChoices
) -> Prospect:
    """Check what is asked, and find out what has to be trained.

    Args:
        files: of the plans, for messages.
        settings: of all trainings; its optimizer's rate is where grids begin.

    Raises UserError and TargetError.
    """
    settings = settings_of_all(plans, files, settings)
    warmups = _warmups(settings, choices)
    check_settings(msgspec.structs.replace(settings, warmup=max(warmups)))
    first = plans[0]
    target, task = task_to_train(settings.task, first.profile)
    samples = training_samples(first, settings, task.data("train"))
    steps = sum(s.mini_batches for s in segments(first, settings, samples))
    length = math.ceil(steps * choices.longer)
    every = _evaluated_every(task, first, settings, choices, length)
    model = target.model(0)
    mixes = mixes_samples(plans, settings, model)
    long = msgspec.structs.replace(settings, steps=length)
    names = plan_names(plans)
    warn_of_filling(plans, names, long, samples)
    given = zip(plans, names, files, strict=True)
    plans, names, files, cures = zip(*cured(given, settings, choices.cures), strict=True)
    if choices.tune > 1:
        check_tunable(task, long, model, run_length(segments(first, long, samples)), choices.factor)
    arms, of_plan = arms_of(
        plans, names, long, samples, mixes=mixes, uniform_delay=choices.uniform_delay, cures=cures
    )
    choice = settings.optimizer
    question = StudyQuestion(
        profile=msgspec.convert(first.profile, ProfileReference),
        task=settings.task,
        mini_batch=first.mini_batch,
        steps=steps,
        length=length,
        longest=choices.longest or msgspec.UNSET,
        tune_length=min(choices.tune_steps or length, length),
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
        budget=choices.budget or msgspec.UNSET,
        training=_training(settings),
    )
    work = StudyWork(
        plans=tuple(plans),
        arms=tuple(arms),
        settings=settings,
        eval_every=every,
        length=length,
        metric=choices.metric,
    )
    under = [cure.text if cure else "" for cure in cures]
    by_plan = zip(plans, names, files, of_plan, under, strict=True)
    return Prospect(question, work, tuple(studied(*each) for each in by_plan))


def _warmups(settings: RunSettings, choices: StudyChoices) -> tuple[int, ...]:
    """Raises UserError."""
    warmups = choices.warmups or (settings.warmup,)
    if len(set(warmups)) < len(warmups):
        raise UserError("--warmup: names one twice")
    if choices.tune < len(warmups):
        raise UserError(
            f"--tune {choices.tune}: too few trainings for {len(warmups)} warm-ups; give "
            f"{len(warmups)} or more"
        )
    return warmups


def _evaluated_every(
    task: Task, plan: Plan, settings: RunSettings, choices: StudyChoices, length: int
) -> int:
    """Mini-batches between evaluations; 0: there are none. Raises UserError and TargetError."""
    every = choices.eval_every
    if every is None:
        every = max(length // 15, 1)
    if not every and choices.metric != "loss":
        raise UserError(f"--eval-every 0: a target of the {choices.metric} needs evaluations")
    if every:
        size_of(task.data("test"), "test", plan.mini_batch)
    if choices.metric == "accuracy" and not hasattr(task, "metrics"):
        raise TargetError(
            f"{settings.task}: has no metrics, and so no accuracy to have for a target; give it "
            "some (docs/tasks.md), or take the loss"
        )
    return every


def _training(settings: RunSettings) -> dict[str, Any]:
    """The settings that are part of the question."""
    return {
        **{name: msgspec.to_builtins(getattr(settings, name)) for name in TRAINED},
        **given(settings, DELAYS),
    }


def conduct(
    asked: Prospect,
    folder: Path,
    jobs: int,
    progress: Progress,
    timeout_s: float = 600.0,
    say: Say = lambda line: None,
) -> Study:
    """Do all trainings that aren't done yet, and put the study together.

    Args:
        folder: of finished trainings.
        jobs: processes; 1: this one.
        timeout_s: longest time that a process may say nothing.
        say: is told what is decided on the way, a line each.

    Raises:
        RunError: a training failed, a process died or is stuck. What is done stays.
        UserError: the same, where the user's input is the cause.
    """
    return _Conductor(asked, folder, jobs, progress, say).run(jobs, timeout_s)


class _Conductor:
    def __init__(
        self, prospect: Prospect, folder: Path, jobs: int, progress: Progress, say: Say
    ) -> None:
        self._prospect = prospect
        work, question = prospect.work, prospect.question
        if not isinstance(question.budget, msgspec.UnsetType) and question.budget.seconds:
            budget = msgspec.structs.replace(question.budget, processes=min(jobs, BUSY))
            question = msgspec.structs.replace(question, budget=budget)
        self.choosing = Choosing(
            question,
            work.arms,
            prospect.plans,
            self._curve,
            lambda asked: self.known[asked].seconds,
        )
        self._finished = Finished(folder, work)
        self._progress, self._say, self._said = progress, say, 0
        self.known: dict[Asked, FinishedTraining] = {}
        self._pending: set[Asked] = set()
        self._pool: ThisProcess | Processes | None = None
        self._done = 0

    def run(self, jobs: int, timeout_s: float) -> Study:
        """Train what is due until nothing is."""
        wanted = self._wanted()
        if wanted:
            work = self._prospect.work
            count = min(jobs, len(work.arms) * max(self._prospect.question.seeds, 3))
            pool = (
                ThisProcess(work, self._report) if count == 1 else Processes(work, count, timeout_s)
            )
            with closing(pool):
                self._pool = pool
                while wanted or self._pending:
                    given, wanted = wanted[: pool.free], wanted[pool.free :]
                    for asked in given:
                        self._pending.add(asked)
                        pool.give(asked)
                    self._report()
                    done = pool.wait()
                    for asked, curve, seconds in done:
                        self._pending.discard(asked)
                        self._learn(asked, self._finished.write(asked, curve, seconds))
                    if done:
                        wanted = self._wanted()
        return self.choosing.study()

    def _wanted(self) -> list[Asked]:
        found = [asked for asked in self.choosing.due() if asked not in self._pending]
        for line in self.choosing.notes[self._said :]:
            self._say(line)
        self._said = max(self._said, len(self.choosing.notes))
        return found

    def _report(self) -> None:
        pool = self._pool
        done = self._done + (0 if pool is None else pool.under_way)
        place = attrgetter("arm", "seed", "rate", "warmup")
        first = min(self._pending, key=place, default=None)
        label = "" if first is None else self._prospect.work.label(first)
        more = len(self._pending) - 1
        what = f"{label} and {more} more" if more > 0 else label
        self._progress(what, done, max(self.choosing.mini_batches, done))

    def _learn(self, asked: Asked, done: FinishedTraining) -> None:
        """Raises TargetError where evaluations don't have what the target is a level of."""
        question, tests = self._prospect.question, done.curve.tests
        metric, figures = question.metric, {name for test in tests for name in test.figures}
        if metric == "accuracy" and tests and metric not in figures:
            raise TargetError(
                f"{question.task}: its evaluations have no 'accuracy' to have for a target, "
                f"but {', '.join(sorted(figures))}: name a figure of its metrics so, or take the "
                "loss"
            )
        self.known[asked] = done
        self._done += asked.length

    def _curve(self, asked: Asked) -> Curve | None:
        if asked not in self.known:
            done = self._finished.read(asked)
            if done is None:
                return None
            self._learn(asked, done)
        return self.known[asked].curve
