"""Making a stage's optimizer: the task's own, or the one named on the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ...profiles.errors import RunError, TargetError, UserError
from ...profiles.hooks import Named, call_hook, task_optimizer
from ...profiles.task import Task
from ..settings import OptimizerChoice, RunSettings

Groups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them: "params" and, where they differ, options."""

Parameters = Iterable[Any]
"""Parameters, or groups of them."""


def _adam(choice: OptimizerChoice) -> dict[str, Any]:
    betas = {} if choice.betas is None else {"betas": choice.betas}
    return {"lr": choice.lr, "weight_decay": choice.weight_decay, **betas}


_MAKERS: dict[str, Callable[[Parameters, OptimizerChoice], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, o: torch.optim.SGD(
        parameters,
        lr=o.lr,
        momentum=o.momentum,
        weight_decay=o.weight_decay,
        nesterov=o.nesterov,
    ),
    "adam": lambda parameters, o: torch.optim.Adam(parameters, **_adam(o)),
    "adamw": lambda parameters, o: torch.optim.AdamW(parameters, **_adam(o)),
}

OPTIMIZERS = tuple(_MAKERS)


def check_choice(choice: OptimizerChoice) -> OptimizerChoice:
    """Raises UserError for an unknown name, or options that another optimizer has."""
    if choice.name not in _MAKERS:
        known = ", ".join(OPTIMIZERS)
        raise UserError(f"--optimizer: unknown {choice.name!r}; known are {known}")
    if choice.momentum and choice.name != "sgd":
        raise UserError(f"--momentum: {choice.name} has its own; leave it out, or use sgd")
    if choice.nesterov and not choice.momentum:
        raise UserError("--nesterov: goes with --optimizer sgd and a --momentum above 0")
    if choice.betas is not None and choice.name == "sgd":
        raise UserError("--betas: sgd has none; use adam or adamw")
    return choice


def make_optimizer(
    task: Task,
    settings: RunSettings,
    named: Iterable[tuple[str, nn.Parameter]],
    owner: str = "the model",
) -> torch.optim.Optimizer | None:
    """The optimizer of one stage; None for a stage without parameters to train.

    Args:
        named: the stage's parameters under the model's own names.
        owner: the stage, for messages.

    Raises TargetError when the task's own can't be made, isn't over just these parameters, or
        its groups aren't right.
    """
    every = list(named)
    trained = [(name, p) for name, p in every if p.requires_grad]
    if not trained:
        return None
    parameters = _groups(task, settings, trained)
    choice = settings.optimizer
    if choice is not None:
        return _MAKERS[choice.name](parameters, choice)
    return task_optimizer(task.optimizer, parameters, every, owner)


def step_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """An update. Raises RunError naming the hook."""
    call_hook("optimizer", optimizer.step, doing="step()", kind=RunError)


def _groups(task: Task, settings: RunSettings, trained: Named) -> Parameters:
    """What the optimizer is made of: parameters, or groups where there are any."""
    by_task = getattr(task, "parameter_groups", None)
    if by_task is None and settings.decay_only == "all":
        return [p for _, p in trained]
    groups: Groups = [{"params": [p for _, p in trained]}]
    if by_task is not None:

        def listed() -> Groups:
            return [dict(group, params=list(group["params"])) for group in by_task(trained)]

        groups = call_hook("parameter_groups", listed)
        _check_groups(groups, trained)
    if settings.decay_only == "matrices":
        groups = [part for group in groups for part in _by_dimensions(group)]
    # A group may have all its parameters on other stages.
    return [group for group in groups if group["params"]]


def _by_dimensions(group: Mapping[str, Any]) -> Groups:
    """The group's matrices, and its biases and norms without weight decay."""
    matrices = [p for p in group["params"] if p.dim() >= 2]
    others = [p for p in group["params"] if p.dim() < 2]
    return [{**group, "params": matrices}, {**group, "params": others, "weight_decay": 0.0}]


def _check_groups(groups: Groups, trained: Named) -> None:
    names = {id(p): name for name, p in trained}
    seen: set[int] = set()
    for group in groups:
        for p in group["params"]:
            if id(p) not in names:
                raise TargetError(
                    "the task's parameter_groups: a group holds what isn't one of the parameters "
                    "it was given; take them from (name, parameter) pairs"
                )
            if id(p) in seen:
                raise TargetError(f"the task's parameter_groups: {names[id(p)]!r} is in two groups")
            seen.add(id(p))
    left = [name for key, name in names.items() if key not in seen]
    if left:
        raise TargetError(
            f"the task's parameter_groups: {left[0]!r} is in no group; what isn't to be trained "
            "needs requires_grad=False in model()"
        )
