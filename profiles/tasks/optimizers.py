"""Optimizers of tasks: what they are made over, and what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import TargetError
from .hooks import call_hook, described, needed_arguments
from .task import Task

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters under the model's own names."""

ParameterGroups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them: "params" and, where they differ, options."""

_SHOWN_NAMES = 3


def task_groups(
    task: Task, trained: Named, own: Collection[nn.Parameter]
) -> ParameterGroups | None:
    """What the task's `parameter_groups` makes of the whole model, and of that what is a stage's:
    each group in its place, empty where the stage has nothing of it. None: the task has none.

    Args:
        trained: the parameters to train of the whole model.
        own: those of the stage.

    Raises TargetError when it raises, or its groups don't hold each parameter once.
    """
    hook = getattr(task, "parameter_groups", None)
    if hook is None:
        return None

    def copied() -> ParameterGroups:
        return [dict(group, params=list(group["params"])) for group in hook(trained)]

    groups: ParameterGroups = call_hook("parameter_groups", copied)
    _check_groups(groups, trained)
    mine = set(map(id, own))
    return [{**group, "params": [p for p in group["params"] if id(p) in mine]} for group in groups]


def _check_groups(groups: ParameterGroups, trained: Named) -> None:
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


def task_optimizer(
    hook: Callable[[Any], Any], given: Iterable[Any], named: Named, owner: str
) -> torch.optim.Optimizer:
    """What the task's `optimizer` makes of a stage's parameters.

    Args:
        given: the trainable parameters, or groups of them: what the hook is called with.
        named: all of the owner's parameters, those that don't require gradients too.
        owner: whose they are, for messages: "stage 1", "the model".

    Raises:
        TargetError: it raises, gives no optimizer, one that can't be stepped without arguments, or
            one that leaves out a trainable parameter or holds one that isn't the owner's.
    """
    given = list(given)
    hint = _of_empty_groups(given, owner)
    try:
        found = call_hook("optimizer", hook, given)
    except TargetError as error:
        raise TargetError(f"{error}{hint}") from error
    if not isinstance(found, torch.optim.Optimizer):
        raise TargetError(
            f"the task's optimizer gave {described(found)}; return one of torch.optim's, made "
            "over the parameters that it is given"
        )
    if needed := needed_arguments(found.step):
        raise TargetError(
            f"the task's optimizer gave {described(found)}, whose step() needs {needed[0]}: "
            "optimizers are stepped without arguments here, since no stage can compute the loss "
            "anew; return another one, such as SGD or AdamW"
        )
    held = {id(p): p for group in found.param_groups for p in group["params"]}
    own = {id(p) for _, p in named}
    trained = [(name, p) for name, p in named if p.requires_grad]
    missing = [name for name, p in trained if id(p) not in held]
    foreign = sum(key not in own for key in held)
    others = f"{_counted(foreign)} that {owner} doesn't have"
    if len(missing) == len(trained) and missing:
        raise TargetError(
            f"the task's optimizer holds none of {owner}'s {_counted(len(missing))} to train "
            f"({_some(missing)})"
            + (f", but {others}" if foreign else "")
            + ": nothing would be trained; make it over the parameters that optimizer(parameters) "
            "is given"
        )
    if missing:
        raise TargetError(
            f"the task's optimizer leaves out {len(missing)} of {owner}'s "
            f"{_counted(len(trained))} to train ({_some(missing)}): make it over all that "
            "optimizer(parameters) is given; those that must not be trained need "
            "requires_grad = False in model()"
        )
    if foreign:
        raise TargetError(
            f"the task's optimizer holds {others}: make it over the parameters that "
            "optimizer(parameters) is given and no others; what is to be trained must be a "
            "parameter of the model"
        )
    return found


def _of_empty_groups(given: Sequence[Any], owner: str) -> str:
    """For messages of optimizers that may not take them."""
    empty = [k for k, part in enumerate(given) if isinstance(part, dict) and not part["params"]]
    return (
        f" (group {empty[0]} of the parameters has nothing on {owner} and is empty there, so that "
        "all keep their places; torch's own optimizers take such groups)"
        if empty
        else ""
    )


def _counted(parameters: int) -> str:
    return f"{parameters} parameter{'' if parameters == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN_NAMES])
    return shown + (f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else "")
