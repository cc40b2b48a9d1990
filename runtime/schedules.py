"""Learning rates over a run: the task's own scheduler, or a schedule named on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

from ..profiles.errors import RunError
from ..profiles.hooks import call_hook, task_scheduler
from ..profiles.task import Task
from .settings import RunSettings

_AFTER_WARMUP: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: (1.0 + math.cos(math.pi * done)) / 2,
}

SCHEDULES = tuple(_AFTER_WARMUP)


class Scheduler(Protocol):
    """What steps after each update; torch.optim.lr_scheduler's classes do."""

    def step(self) -> None:
        """An update is done."""


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
    task: Task, settings: RunSettings, optimizer: torch.optim.Optimizer | None, updates: int
) -> Scheduler | None:
    """The scheduler of one stage; None where the learning rate stays, or there is nothing to train.

    Args:
        updates: in the whole run.

    Raises TargetError when the task's own can't be made.
    """
    if optimizer is None:
        return None
    if settings.lr_schedule is not None:
        rule = partial(factor, settings.lr_schedule, settings.warmup, updates)
        return LambdaLR(optimizer, rule)
    found: Scheduler | None = task_scheduler(task, optimizer)
    return found


def step_scheduler(scheduler: Scheduler) -> None:
    """Go on to the next learning rate. Raises RunError naming the hook."""
    call_hook("scheduler", scheduler.step, doing="step()", kind=RunError)
