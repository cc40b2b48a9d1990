"""Learning rates that a study tries: the task's own, so many times."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import torch
from torch import nn

from ....profiles.errors import UserError
from ....profiles.tasks.hooks import RunLength, before_training
from ....profiles.tasks.task import Task
from ...settings import RunSettings
from ...stage.optimizer import make_optimizer, make_scheduler


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
        optimizer = make_optimizer(task_at(task, settings, rate), tried, named)
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


def task_at(task: Task, settings: RunSettings, rate: float) -> Task:
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
