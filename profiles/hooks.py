"""What a task's hooks give, held against what they must give: mistakes are blamed on the hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from .errors import RunError, TargetError, TimeprestError
from .target import describe_error
from .task import Task

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters under the model's own names."""

_SHOWN_NAMES = 3


def call_hook(
    name: str,
    hook: Callable[..., Any],
    *arguments: Any,
    doing: str = "",
    kind: type[TimeprestError] = TargetError,
) -> Any:
    """What the user's hook returns.

    Args:
        doing: what failed, where that isn't the hook itself but what it gave: "step()".
        kind: of the error: RunError where training is under way.

    Raises `kind` naming the hook when it raises.
    """
    try:
        return hook(*arguments)
    except TimeprestError:
        raise
    except Exception as error:
        at = f" in {doing}" if doing else ""
        raise kind(f"the task's {name} failed{at}: {describe_error(error)}") from error


def task_metrics(task: Task, output: Any, target: Any) -> dict[str, Any]:
    """The task's figures beside the loss, by name; none where it has no `metrics`.

    Raises TargetError when it gives no dict, RunError when it raises.
    """
    metrics = getattr(task, "metrics", None)
    if metrics is None:
        return {}
    found = call_hook("metrics", metrics, output, target, kind=RunError)
    if not isinstance(found, Mapping):
        raise TargetError(
            f"the task's metrics gave {described(found)}; return a dict of figures by their names"
        )
    for name in found:
        if not isinstance(name, str):
            raise TargetError(
                f"the task's metrics gave a figure named {name!r}; names must be text"
            )
    return dict(found)


def task_optimizer(
    hook: Callable[[Any], Any], given: Iterable[Any], named: Named, owner: str
) -> torch.optim.Optimizer:
    """What the task's `optimizer` makes of a stage's parameters.

    Args:
        given: the trainable parameters, or groups of them: what the hook is called with.
        named: all of the owner's parameters, those that don't require gradients too.
        owner: whose they are, for messages: "stage 1", "the model".

    Raises:
        TargetError: it raises, gives no optimizer, or one that leaves out a trainable
            parameter or holds one that isn't the owner's.
    """
    found = call_hook("optimizer", hook, given)
    if not isinstance(found, torch.optim.Optimizer):
        raise TargetError(
            f"the task's optimizer gave {described(found)}; return one of torch.optim's, made "
            "over the parameters that it is given"
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


def described(value: Any) -> str:
    """What a hook gave, for messages."""
    return "None" if value is None else f"a {type(value).__name__}"


def _counted(parameters: int) -> str:
    return f"{parameters} parameter{'' if parameters == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN_NAMES])
    return shown + (f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else "")
