"""Optimizers of tasks: what they are made over, and what is asked of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import RunError, TargetError, TimeprestError
from ..tracing.pieces import tensors_in
from .hooks import call_hook, described, needed_arguments
from .task import Task

Named = Sequence[tuple[str, nn.Parameter]]
"""Parameters under the model's own names."""

ParameterGroups = list[dict[str, Any]]
"""Parameter groups as torch's optimizers take them: "params" and, where they differ, options."""

_LIBRARIES = ("torch", "timeprest")
_SHOWN_NAMES = 3


def task_groups(
    task: Task, trained: Named, own: Collection[nn.Parameter]
) -> ParameterGroups | None:
    """What the task's `parameter_groups` makes of the parameters to train of the whole model, and
    of that what is a stage's own: each group in its place, empty where the stage has nothing of
    it. None: the task has none.

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
) -> Optimizer:
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
    hint = of_empty_groups(given, owner)
    try:
        found = call_hook("optimizer", hook, given)
    except TargetError as error:
        raise TargetError(f"{error}{hint}") from error
    if not isinstance(found, Optimizer):
        raise TargetError(
            f"the task's optimizer gave {described(found)}; return one of torch.optim's, made "
            "over the parameters that it is given"
        )
    step: Any = found.step
    if getattr(step, "__wrapped__", None) is type(found).step:
        # A scheduler that was made with it has wrapped the method as a function.
        step = partial(type(found).step, found)
    if needed := needed_arguments(step):
        raise TargetError(
            f"the task's optimizer gave {described(found)}, whose step() needs {needed[0]}: "
            "optimizers are stepped without arguments here, since no stage can compute the loss "
            "anew; return another one, such as SGD or AdamW"
        )
    held = {id(p): p for group in found.param_groups for p in group["params"]}
    train_mode(found)
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
    own_options(found)
    return found


def own_options(optimizer: Optimizer) -> None:
    """Have it options of its own where they are tensors, into which schedulers write: a rate that
    the task keeps may be other stages' optimizers', too."""
    for group in getattr(optimizer, "param_groups", ()):
        group.update({k: v.clone() for k, v in group.items() if isinstance(v, Tensor)})


def of_empty_groups(groups: Sequence[Any], owner: str) -> str:
    """For messages of optimizers that may not take them."""
    empty = [k for k, one in enumerate(groups) if isinstance(one, dict) and not one["params"]]
    return (
        f" (group {empty[0]} of the parameters has nothing on {owner} and is empty there, so that "
        "all keep their places; torch's own optimizers take such groups)"
        if empty
        else ""
    )


# What an optimizer has besides `state` -----------------------------------------------------------


def has_modes(optimizer: Optimizer | None) -> bool:
    """Whether its parameters are for training only between its train() and its eval(), as those of
    the schedule-free kind are."""
    modes = (getattr(optimizer, name, None) for name in ("eval", "train"))
    return optimizer is not None and all(map(callable, modes))


def train_mode(optimizer: Optimizer, kind: type[TimeprestError] = TargetError) -> None:
    """Call its train(), where it has modes. Raises `kind` naming the hook."""
    if has_modes(optimizer):
        call_hook("optimizer", optimizer.train, doing="train()", kind=kind)  # type: ignore[attr-defined]


@contextmanager
def for_use(optimizer: Optimizer | None) -> Iterator[None]:
    """Its parameters are those to evaluate and to keep: what its eval() makes of them, where it has
    modes. After that they are again, bit for bit and in the same memory, what is trained.

    Raises RunError naming the hook.
    """
    if optimizer is None or not has_modes(optimizer):
        yield
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [(p, p.data, p.detach().clone()) for p in parameters]
    call_hook("optimizer", optimizer.eval, doing="eval()", kind=RunError)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        train_mode(optimizer, RunError)
        for p, memory, numbers in trained:
            p.data = memory.copy_(numbers)


def is_librarys(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's or ours."""
    return type(optimizer).__module__.split(".")[0] in _LIBRARIES


def has_own_state(optimizer: Optimizer) -> bool:
    """Whether what it keeps goes by its state_dict() and load_state_dict(): what it keeps for each
    parameter isn't all, or isn't of use without its groups' options."""
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    besides = any(id(key) not in parameters for key in optimizer.state)
    return writes_own_state(optimizer) or besides or has_modes(optimizer)


def writes_own_state(optimizer: Optimizer) -> bool:
    """Whether these methods are its own, or have hooks."""
    names = ("state_dict", "load_state_dict")
    hooks = (f"_optimizer_{name}_{when}_hooks" for name in names for when in ("pre", "post"))
    return any(getattr(optimizer, name, None) for name in hooks) or any(
        name in vars(optimizer) or getattr(type(optimizer), name) is not getattr(Optimizer, name)
        for name in names
    )


def steps_otherwise(optimizer: Optimizer) -> str | None:
    """The class of torch's that it is derived from, where it has a step of its own beside that
    one's."""
    kinds = type(optimizer).__mro__
    torchs: type[Optimizer] = next(
        (k for k in kinds if k.__module__.startswith("torch.optim.")), Optimizer
    )
    # Torch wraps each class's `step` when the first of its objects is made.
    own, others = inspect.unwrap(type(optimizer).step), inspect.unwrap(torchs.step)
    return None if torchs is Optimizer or own is others else torchs.__name__


def state_bytes(optimizer: Optimizer) -> int:
    """What it keeps, in tensors as large as their parameters; not counts of steps."""
    kept = optimizer.state_dict() if has_own_state(optimizer) else [*optimizer.state.values()]
    found = {id(tensor): tensor for tensor in tensors_in(kept) if tensor.dim()}
    return sum(t.numel() * t.element_size() for t in found.values())


def _counted(parameters: int) -> str:
    return f"{parameters} parameter{'' if parameters == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN_NAMES])
    return shown + (f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else "")
