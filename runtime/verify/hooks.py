"""A trial of the task's hooks before a run, so that their errors come before it begins."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from ...profiles.tasks.hooks import (
    RunLength,
    call_hook,
    reading,
    stand_in,
    totals_asked,
    try_figures,
    try_loss,
)
from ...profiles.tasks.samples import few, some_samples
from ...profiles.tasks.task import Split, Task
from ..checkpoint.trial import try_checkpoint
from ..communication.transport import free_bytes
from ..prepare.devices import CPU, device_kind, own_device
from ..prepare.prepared import Prepared
from ..records.progress import Observer
from ..stage.optimizer import StageUpdates, step_optimizer
from ..training.loop import Course
from ..training.runners import introduce, local_runners

_HELD = 4
"""Times its parameters that a stage holds in an update: weights, gradients and two moments."""


def try_training(prepared: Prepared) -> list[str]:
    """Train one mini-batch, evaluate on one micro-batch, write a checkpoint and go on from it, all
    in this process and in memory: every hook is called as a run calls it.

    The weights of `prepared` change; nothing else is left of it.

    Returns what its figures seem to be instead of means.

    Raises as a run: the message names the stage, the operation and the hook.
    """
    first, settings = prepared.segments[0], prepared.settings
    segment = replace(
        first,
        mini_batches=1,
        samples=min(first.samples, first.mini_batch),
        offset=0,
        rest=0,
        checkpoint=False,
    )
    test_samples = prepared.distribution.evaluation_samples
    trial = _Trial(prepared.task, test_samples, prepared.length)
    few = replace(prepared, task=cast(Task, trial), segments=(segment,))
    device = own_device(prepared.plan, settings, 0)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        runners = local_runners(few)
        introduce(runners)
        Course(runners, Observer()).run()
        if settings.checkpoint_every != 0:
            try_checkpoint(runners)
        return try_figures(prepared.task, *trial.latest, metrics=settings.evaluate)


def try_in_parts(prepared: Prepared, result: Any, target: Any, only: Collection[int]) -> list[str]:
    """The same for a model that is too large to train for a look: loss and metrics on numbers that
    stand in for its result, and optimizers and schedulers on gradients of zero.

    Args:
        result: of the last stage for one micro-batch, which may be without numbers.
        target: of that micro-batch.
        only: the stages to step the optimizers of, one after another. Where there isn't memory for
            it, or the run is to be on GPUs, it isn't stepped.

    Returns and raises as `try_training`.
    """
    task, settings = prepared.task, prepared.settings
    with torch.random.fork_rng(devices=[]):
        made = stand_in(result)
        try_loss(task, made, target)
        lines = try_figures(task, made, target, metrics=settings.evaluate)
        if settings.evaluate:
            with reading("test"):
                dataset = call_hook("data('test')", task.data, "test")
                some = prepared.distribution.evaluation_samples
                some_samples(dataset, "test", some, prepared.model.arguments)
        for s, piece in enumerate(prepared.model.pieces):
            parameters = [p for p in piece.module.parameters() if p.requires_grad]
            needed = _HELD * sum(p.nbytes for p in parameters)
            on_gpu = device_kind(prepared.plan, settings) != "cpu"
            if s not in only or on_gpu or needed > free_bytes(CPU):
                continue
            updates = StageUpdates(prepared, s)
            if updates.optimizer is None:
                continue
            for p in parameters:
                p.grad = torch.zeros_like(p)
            step_optimizer(updates.optimizer)
            if updates.scheduler is not None:
                updates.scheduler.after_update(ends_epoch=True)
            for p in parameters:
                p.grad = None
    return lines


class _Trial:
    """A task with a few test samples, that notes what its loss was last called with.

    Attributes:
        figures: none: of a few samples `try_figures` tries them.
    """

    figures = None

    def __init__(self, task: Task, test_samples: int, length: RunLength) -> None:
        """`length`: of the run, whatever the trial's is."""
        self._task = task
        self._test_samples = test_samples
        self._length = length
        self.latest: tuple[Any, Any] = (None, None)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._task, name)
        if name != "scheduler" or not callable(found):
            return found
        return partial(found, **{n: getattr(self._length, n) for n in totals_asked(found)})

    def data(self, split: Split) -> Any:
        """The task's own, cut short for the test."""
        found = self._task.data(split)
        if split == "train":
            return found
        return few(found, split, self._test_samples)

    def loss(self, output: Any, target: Any) -> Any:
        self.latest = output, target
        return self._task.loss(output, target)
