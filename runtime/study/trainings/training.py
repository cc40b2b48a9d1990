"""One training of a study: a plan inline, plain training, or one with a uniform delay.

A plan's stages train in simulated sequence, on the versions that `tp-run` would train on, weights
bit for bit.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import torch

from ....profiles.errors import RunError
from ...prepare.data import Segment
from ...prepare.prepare import prepare
from ...prepare.prepared import Prepared
from ...records.progress import Observer
from ...stage.optimizer import check_updates
from ...training.loop import Course
from ...training.plain import PlainTraining
from ...training.runners import load_samples, local_runners
from ..figures.study import Curve, short
from .delayed import DelayedTraining
from .evaluations import Evaluator, FollowedStage
from .rates import task_at
from .work import ArmSpec, Asked, StudyWork

BLOWN_UP, WORSE = 4.0, 1.2
"""A training has diverged whose mean loss over `LOOKED_AT` mini-batches is `BLOWN_UP` times that of
its first ones; or at its end still `WORSE` times."""
LOOKED_AT = 8

OnMiniBatch = Callable[[int], None]
"""Is told of mini-batches that are done."""


def train_one(
    work: StudyWork, asked: Asked, on_mini_batch: OnMiniBatch = lambda done: None
) -> Curve:
    """Train, from the weights of the seed on. Raises as `runtime.run.run`."""
    arm, settings = work.arms[asked.arm], work.settings_of(asked)
    plan = work.plans[arm.plan]
    if arm.kind != "pipeline":
        plan = msgspec.structs.replace(plan, update_every=arm.update_every)
    prepared = prepare(plan, settings)
    prepared = replace(prepared, task=task_at(prepared.task, settings, asked.rate))
    check_updates(prepared)
    recorder = _CurveRecorder(work.window(asked.length), asked.length, on_mini_batch)
    parts = len(plan.stages) if arm.kind == "pipeline" else 1
    every = work.evaluated_every(asked.length)
    evaluator = Evaluator(prepared, every, asked.length, parts) if every else None
    try:
        if arm.kind == "pipeline":
            _train_plan(prepared, recorder, evaluator)
        else:
            _train_plainly(prepared, arm, recorder, evaluator)
    except DivergedError:
        pass
    finally:
        if evaluator is not None:
            evaluator.close()
    recorder.end()
    at = recorder.diverged_at
    tests = () if evaluator is None else evaluator.points
    return Curve(
        seed=asked.seed,
        rate=asked.rate,
        warmup=asked.warmup,
        phase="final",
        length=asked.length,
        window=recorder.window,
        losses=tuple(recorder.losses),
        tests=tuple(t for t in tests if at is None or t.mini_batches <= at),
        diverged_at=at,
    )


def _train_plan(prepared: Prepared, recorder: _CurveRecorder, evaluator: Evaluator | None) -> None:
    runners = local_runners(prepared)
    load_samples(runners)
    if evaluator is not None:
        for runner in runners:
            if runner.replica.leads:
                runner.stage.hooks.insert(FollowedStage(runner, evaluator))
    Course(runners, recorder).run()


def _train_plainly(
    prepared: Prepared, arm: ArmSpec, recorder: _CurveRecorder, evaluator: Evaluator | None
) -> None:
    if arm.delay:
        training: PlainTraining = DelayedTraining(prepared, arm.delay, task=prepared.task)
    else:
        by_micro_batch = arm.micro_batches > 0
        training = PlainTraining(prepared, by_micro_batch=by_micro_batch, task=prepared.task)
    # As of a pipeline of one stage.
    torch.manual_seed(prepared.settings.seed * 1_000_003)

    def after(segment: Segment, b: int, loss: float) -> None:
        if evaluator is not None and segment.updates_after(b):
            evaluator.updated(0, segment.first + b + 1, training.model.state_dict)
        recorder.mini_batch(segment.epoch, b, segment.mini_batches, loss, {})

    training.train(after)


# What is recorded -------------------------------------------------------------------------------


class DivergedError(RunError):
    """The loss isn't finite any more, or has blown up: no use in going on."""


class _CurveRecorder(Observer):
    """Keeps the means of the losses, and sees when a training diverges."""

    def __init__(self, window: int, length: int, on_mini_batch: OnMiniBatch) -> None:
        self.window = window
        self.losses: list[float] = []
        self.diverged_at: int | None = None
        self._length = length
        self._on_mini_batch = on_mini_batch
        self._done = 0
        self._open: list[float] = []
        self._recent: deque[float] = deque(maxlen=max(window, LOOKED_AT))
        self._first = 0.0

    def mini_batch(
        self, epoch: int, done: int, of: int, loss: float, figures: Mapping[str, float]
    ) -> None:
        """Note a loss. Raises DivergedError."""
        self._done += 1
        if not math.isfinite(loss):
            self._diverge("the loss isn't finite")
        self._open.append(loss)
        self._recent.append(loss)
        if self._done == self._recent.maxlen:
            self._first = self._mean()
        if len(self._open) == self.window:
            self._close()
        if self._done > len(self._recent) and self._mean() > BLOWN_UP * abs(self._first):
            self._diverge("the loss has blown up")
        self._on_mini_batch(self._done)

    def _mean(self) -> float:
        return sum(self._recent) / len(self._recent)

    def _close(self) -> None:
        self.losses.append(short(sum(self._open) / len(self._open)))
        self._open = []

    def _diverge(self, why: str) -> None:
        self.diverged_at = self._done
        self._open = []
        raise DivergedError(why)

    def end(self) -> None:
        if self._open and self.diverged_at is None:
            self._close()
        many = self._done > len(self._recent)
        if self.diverged_at is None and many and self._mean() > WORSE * abs(self._first):
            self.diverged_at = self._done
