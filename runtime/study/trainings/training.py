"""One training of a study: a plan inline, plain training, or one with a uniform delay.

A plan's stages train in simulated sequence, on the versions that `tp-run` would train on, weights
bit for bit. Evaluations don't disturb that: of every stage the weights are copied right after its
update of the same mini-batch, and a model without a pipeline is evaluated on them.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn

from ....planner.systems.hooks import StageHooks
from ....profiles.errors import RunError, UserError
from ....profiles.target import resolve
from ....profiles.tasks.hooks import RunLength, before_training
from ....profiles.tasks.task import Task
from ...prepare.data import NO_EVALUATION, Segment, real_part
from ...prepare.devices import forward_context, move, own_device, put, random_kept
from ...prepare.prepare import Prepared, prepare
from ...prepare.samples import Samples
from ...records.metrics import EvaluationMetrics
from ...records.progress import Observer
from ...settings import RunSettings
from ...stage.optimizer import check_updates, make_optimizer, make_scheduler
from ...stage.runner import StageRunner
from ...training.loop import Course
from ...training.plain import PlainTraining
from ...training.runners import load_samples, local_runners
from ..figures.study import Curve, EvaluationPoint, short
from .delayed import DelayedTraining
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
    prepared = replace(prepared, task=_task_at(prepared.task, settings, asked.rate))
    check_updates(prepared)
    recorder = _CurveRecorder(work.window(asked.length), asked.length, on_mini_batch)
    parts = len(plan.stages) if arm.kind == "pipeline" else 1
    every = work.evaluated_every(asked.length)
    evaluator = _Evaluator(prepared, every, asked.length, parts) if every else None
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


def _train_plan(prepared: Prepared, recorder: _CurveRecorder, evaluator: _Evaluator | None) -> None:
    device = own_device(prepared.plan, prepared.settings, 0)
    runners = local_runners(prepared, device)
    load_samples(runners)
    if evaluator is not None:
        for runner in runners:
            if runner.replica.leads:
                runner.stage.hooks.insert(_Followed(runner, evaluator))
    Course(runners, recorder).run()


class _Followed(StageHooks):
    """Hands a stage's weights over after updates that an evaluation is due at."""

    def __init__(self, runner: StageRunner, evaluator: _Evaluator) -> None:
        self._runner, self._evaluator = runner, evaluator
        self._first = self._done = 0

    def begin(self, first: int, mini_batches: int) -> None:
        """A segment begins."""
        self._first = first

    def due(self, mini_batch: int) -> None:
        """An update is due."""
        self._done = self._first + mini_batch + 1

    def after_update(self) -> None:
        """The weights have changed."""
        self._evaluator.updated(self._runner.number, self._done, self._runner.state)


def _train_plainly(
    prepared: Prepared, arm: ArmSpec, recorder: _CurveRecorder, evaluator: _Evaluator | None
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


class _Evaluator:
    """Evaluates the weights that all stages have after the same mini-batch, to `points`."""

    def __init__(self, prepared: Prepared, every: int, length: int, parts: int) -> None:
        """
        Args:
            every: mini-batches between two evaluations; one comes at the end, too.
            parts: that the model's weights come in, one from each stage.
        """
        self.points: list[EvaluationPoint] = []
        settings = prepared.settings
        target = resolve(settings.task)
        self._task, self._call = prepared.task, target.call(1)[0]
        self._every, self._length = every, length
        self._parts_of_all = parts
        self._last = [0] * parts
        self._parts: dict[int, dict[str, Tensor]] = {}
        self._came: dict[int, int] = {}
        self._device = own_device(prepared.plan, settings, 0)
        self._autocast = prepared.model.autocast
        self._model: nn.Module = target.model(settings.seed)
        move([self._model], self._device)
        self._model.eval()
        names, mini_batch = self._call.names, prepared.plan.mini_batch
        self._samples = Samples(self._task, "test", mini_batch, settings.seed, names)

    def updated(self, stage: int, done: int, state: Callable[[], dict[str, Any]]) -> None:
        """A stage has made the update of its mini-batch number `done`. `state`: its weights and
        buffers, under the model's own names."""
        before, self._last[stage] = self._last[stage], done
        if done // self._every == before // self._every and done != self._length:
            return
        part = self._parts.setdefault(done, {})
        part.update({name: tensor.detach().clone() for name, tensor in state().items()})
        self._came[done] = self._came.get(done, 0) + 1
        if self._came[done] == self._parts_of_all:
            self._evaluate(done, self._parts.pop(done))

    def close(self) -> None:
        """End what loads in the background."""
        self._samples.close()

    def _evaluate(self, done: int, state: dict[str, Tensor]) -> None:
        self._model.load_state_dict(state, strict=False)
        metrics = EvaluationMetrics()
        with (
            random_kept(self._device),
            torch.no_grad(),
            forward_context(self._autocast, self._device.type),
        ):
            for k in range(self._samples.evaluations):
                inputs, target, real = self._samples.evaluation(k)
                inputs, target = put(inputs, self._device), put(target, self._device)
                result = self._call.of(self._model, inputs)
                if real < self._samples.micro_batch:
                    result = real_part(result, real, self._samples.micro_batch, NO_EVALUATION)
                metrics.add(self._task, result, target, real)
        figures = {
            name: short(value)
            for name, value in metrics.figures(self._task).items()
            if math.isfinite(value)
        }
        self.points.append(EvaluationPoint(mini_batches=done, figures=figures))


# Rates that are tried ---------------------------------------------------------------------------


def check_tunable(
    task: Task, settings: RunSettings, model: nn.Module, length: RunLength, factor: float
) -> None:
    """Refuse to try rates where the task's scheduler sets them, whatever the optimizer's are.

    Args:
        factor: between two rates that would be tried.

    Raises UserError; TargetError where no optimizer or scheduler can be made.
    """
    found, name = [], ""
    for rate in (1.0, factor):
        choice = settings.optimizer
        if choice is not None:
            choice = msgspec.structs.replace(choice, lr=choice.lr * rate)
        tried = msgspec.structs.replace(settings, optimizer=choice)
        named = model.named_parameters()
        optimizer = make_optimizer(_task_at(task, settings, rate), tried, named)
        scheduler = make_scheduler(task, tried, optimizer, length)
        if optimizer is None or scheduler is None:
            return
        name = type(scheduler.rule).__name__
        with before_training(), warnings.catch_warnings():
            # Torch's, that no update came before.
            warnings.simplefilter("ignore")
            scheduler.after_update(ends_epoch=True)
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    # Where a warm-up begins with rates of zero, these say nothing.
    if found[0] == found[1] and any(found[0]):
        raise UserError(
            f"{settings.task}: the task's scheduler, a {name}, sets the learning rates whatever "
            "the optimizer's are, so that trying others would change nothing: have it take them "
            'from optimizer.param_groups (max_lr=[g["lr"] for g in optimizer.param_groups]), name '
            "an --lr-schedule, or give --tune 1"
        )


def _task_at(task: Task, settings: RunSettings, rate: float) -> Task:
    """The task; without an optimizer by name in the settings, with rates so many times its own."""
    return task if settings.optimizer is not None else cast(Task, ScaledTask(task, rate))


class ScaledTask:
    """A task whose optimizer's learning rates are so many times its own."""

    def __init__(self, task: Task, factor: float) -> None:
        self._task = task
        self._factor = factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The task's own, with other rates. Raises UserError where it has none."""
        made = self._task.optimizer(parameters)
        for group in getattr(made, "param_groups", ()):
            if "lr" not in group:
                raise UserError(
                    "the task's optimizer has no learning rate to tune: name one with --optimizer "
                    "and --lr"
                )
            group["lr"] = group["lr"] * self._factor
        return made
