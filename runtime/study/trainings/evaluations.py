"""Evaluations of a study's trainings.

They don't disturb a pipeline: of every stage the weights are copied right after its update of the
same mini-batch, and a model without a pipeline is evaluated on them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ....planner.systems.hooks import StageHooks
from ....profiles.target import kept_numbers, resolve
from ...prepare.data import NO_EVALUATION, real_part
from ...prepare.devices import forward_context, move, own_device, put, random_kept
from ...prepare.prepared import Prepared
from ...prepare.samples import Samples
from ...records.metrics import EvaluationMetrics
from ...stage.runner import StageRunner
from ..figures.study import EvaluationPoint, short


class Evaluator:
    """Evaluates a model without a pipeline on copies of the stages' weights, to `points`."""

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
        model = target.model(settings.seed)
        # It takes others' weights, which trainings mustn't begin with.
        own = kept_numbers(model) is not None
        self._model: nn.Module = copy.deepcopy(model) if own else model
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


class FollowedStage(StageHooks):
    """Hands a stage's weights over after updates that an evaluation is due at."""

    def __init__(self, runner: StageRunner, evaluator: Evaluator) -> None:
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
        number, model = self._runner.number, self._runner.prepared.model
        self._evaluator.updated(number, self._done, partial(model.state, number))
