"""Making a stage's optimizer: the task's own, or the one named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from ..profiles.errors import TargetError, UserError
from ..profiles.target import describe_error
from ..profiles.task import Task
from .settings import OptimizerChoice

_MAKERS: dict[str, Callable[[Sequence[nn.Parameter], OptimizerChoice], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, o: torch.optim.SGD(
        parameters, lr=o.lr, momentum=o.momentum, weight_decay=o.weight_decay
    ),
    "adam": lambda parameters, o: torch.optim.Adam(
        parameters, lr=o.lr, weight_decay=o.weight_decay
    ),
    "adamw": lambda parameters, o: torch.optim.AdamW(
        parameters, lr=o.lr, weight_decay=o.weight_decay
    ),
}

OPTIMIZERS = tuple(_MAKERS)


def check_choice(choice: OptimizerChoice) -> OptimizerChoice:
    """Raises UserError for an unknown name, or momentum where there is none."""
    if choice.name not in _MAKERS:
        known = ", ".join(OPTIMIZERS)
        raise UserError(f"--optimizer: unknown {choice.name!r}; known are {known}")
    if choice.momentum and choice.name != "sgd":
        raise UserError(f"--momentum: {choice.name} has its own; leave it out, or use sgd")
    return choice


def make_optimizer(
    task: Task, choice: OptimizerChoice | None, parameters: Sequence[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The optimizer of one stage; None for a stage without parameters to train.

    Raises TargetError when the task's own can't be made.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return None
    if choice is not None:
        return _MAKERS[choice.name](trained, choice)
    try:
        return task.optimizer(trained)
    except Exception as error:  # the user's code
        raise TargetError(f"the task's optimizer failed: {describe_error(error)}") from error
