"""Learning rates over a run: the task's own scheduler, or a schedule named on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR

from ...profiles.errors import RunError
from ...profiles.hooks import RunLength, call_hook, scheduler_step, task_scheduler, totals_asked
from ...profiles.task import Task
from ..settings import RunSettings

_AFTER_WARMUP: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}

SCHEDULES = tuple(_AFTER_WARMUP)


@dataclass(frozen=True)
class Scheduler:
    """A stage's learning rates, and when they go on.

    Attributes:
        rule: one of torch.optim.lr_scheduler's, or what steps like one.
        per_epoch: it is stepped after a stage's last update of each epoch; else after every one.
    """

    rule: Any
    per_epoch: bool = False

    def after_update(self, *, ends_epoch: bool) -> None:
        """Step, where it is time. Raises RunError naming the hook."""
        if ends_epoch or not self.per_epoch:
            call_hook("scheduler", self.rule.step, doing="step()", kind=RunError)


def factor(schedule: str, warmup: int, updates: int, update: int) -> float:
    """Share of the optimizer's learning rate that an update uses.

    Rises evenly over the first `warmup` updates, the last of which uses all of it; then, by the
    schedule's name, stays or falls, so that it would be 0 at the update after the last.

    Args:
        updates: in the whole run.
        update: counted from 0.
    """
    if update < warmup:
        return (update + 1) / warmup
    done = (update - warmup) / max(updates - warmup, 1)
    return _AFTER_WARMUP[schedule](min(done, 1.0))


def make_scheduler(
    task: Task, settings: RunSettings, optimizer: torch.optim.Optimizer | None, length: RunLength
) -> Scheduler | None:
    """The scheduler of one stage; None where the learning rate stays, or there is nothing to train.

    Args:
        length: of the whole run.

    Raises TargetError when the task's own can't be made.
    """
    if optimizer is None:
        return None
    if settings.lr_schedule is not None:
        rule = partial(factor, settings.lr_schedule, settings.warmup, length.steps)
        return Scheduler(LambdaLR(optimizer, rule))
    found = task_scheduler(task, optimizer, length)
    return None if found is None else Scheduler(found, scheduler_step(task) == "epoch")


def open_reading(task: Task, scheduler: Scheduler, length: RunLength) -> str | None:
    """A line where a task's scheduler may be meant to be stepped once an epoch, and isn't.

    So torch's documentation steps all of its own but two. A task that says `scheduler_step`, or
    asks for the run's totals, which are of updates, has said how it is meant.
    """
    kind = type(scheduler.rule)
    if (
        scheduler_step(task) is not None
        or totals_asked(task.scheduler)  # type: ignore[attr-defined]
        or kind.__module__ != LRScheduler.__module__
        or issubclass(kind, (OneCycleLR, CyclicLR))
    ):
        return None
    return (
        f"the task's scheduler, a {kind.__name__}, is stepped after each update, "
        f"{length.steps_per_epoch} in an epoch; torch's documentation steps it once an epoch: say "
        'which is meant by scheduler_step = "update" or "epoch" in the task (docs/tasks.md)'
    )
