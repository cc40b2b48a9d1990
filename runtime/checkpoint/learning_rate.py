"""A learning rate that goes on at a checkpoint, in a run that may be longer now."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
)

from ...profiles.tasks.hooks import RunLength
from ..stage.optimizer import Scheduler, check_one_cycle, options_of


def go_on(scheduler: Scheduler, state: Any, then: RunLength | None) -> str | None:
    """Give a stage's scheduler the state of a checkpoint, after its optimizer got its own. A rate
    that follows from the run's length is that of a run of this length from now on.

    Args:
        then: the length of the run that the state is of; None: not known.

    Returns a warning where such a rate can't be had. Raises TargetError for a rule that ends before
        the run does.
    """
    rule, now = scheduler.rule, scheduler.length
    other = then is not None and now is not None and then != now
    if other and scheduler.remake is not None:
        steps = _steps_of(state)
        before, after = (_stepped(scheduler, length, steps) for length in (then, now))
        # Where stepping a new one makes this state again, so it makes the other length's.
        if before and after and _plain(before[0].state_dict()) == _plain(state):
            rule.load_state_dict(after[0].state_dict())
            _change(rule.optimizer, before[1], after[1])
            return None
    rule.load_state_dict(state)
    if isinstance(rule, LambdaLR):
        # It follows from the number of the update alone.
        for group, base, factor in zip(
            rule.optimizer.param_groups, rule.base_lrs, rule.lr_lambdas, strict=True
        ):
            group["lr"] = base * factor(rule.last_epoch)
        return None
    if isinstance(rule, OneCycleLR) and now is not None and not scheduler.per_epoch:
        check_one_cycle(rule.total_steps, now)
    return _warning(scheduler, then, now) if other and then and now else None


def _stepped(
    scheduler: Scheduler, length: RunLength | None, steps: int | None
) -> tuple[Any, Optimizer] | None:
    """The task's scheduler for a run of another length, so many steps on, and its optimizer; None
    where there is none. The stage's own stay as they are."""
    own = getattr(scheduler.rule, "optimizer", None)
    if scheduler.remake is None or length is None or steps is None or own is None:
        return None
    twin = object.__new__(type(own))
    vars(twin).update(vars(own), _opt_called=True)
    twin.param_groups = [
        {**options, "params": group["params"]}
        for options, group in zip(options_of(scheduler.begun), own.param_groups, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            rule = scheduler.remake(twin, length)
            for _ in range(steps):
                rule.step()
        except Exception:  # the user's, or torch of it: then it can't be had so
            return None
    return rule, twin


def _change(optimizer: Optimizer, before: Optimizer, after: Optimizer) -> None:
    """Give an optimizer the options that a scheduler has set otherwise."""
    groups = (each.param_groups for each in (optimizer, before, after))
    for own, old, new in zip(*groups, strict=True):
        for key in new.keys() - {"params"}:
            if _plain(old.get(key)) == _plain(new[key]):
                continue
            if isinstance(own.get(key), Tensor):
                own[key].fill_(new[key])
            else:
                own[key] = new[key]


def _steps_of(state: Any) -> int | None:
    """How often a scheduler was stepped, by its state; None: that doesn't say."""
    if not isinstance(state, Mapping):
        return None
    if "last_epoch" in state:
        return state["last_epoch"]  # type: ignore[no-any-return]
    chained = state.get("_schedulers")
    return _steps_of(chained[0]) if chained else None


def _plain(tree: Any) -> Any:
    """The same with tensors as numbers, to be compared."""
    if isinstance(tree, Tensor):
        return tree.tolist()
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(part) for part in tree] if isinstance(tree, list | tuple) else tree


# What can't be had ------------------------------------------------------------------------------


def _warning(scheduler: Scheduler, then: RunLength, now: RunLength) -> str | None:
    kind = type(scheduler.rule).__name__
    changed = (
        f"the run has {now.steps} updates now, instead of {then.steps}, and the task's scheduler"
    )
    if scheduler.remake is not None:
        return (
            f"{changed}, a {kind}, goes on as in a run of {then.steps}: a new one, stepped as "
            "often, isn't in its checkpoint's state; another run takes the weights with --from"
        )
    steps = _steps_in(scheduler.rule)
    run = -(-then.steps // then.steps_per_epoch) if scheduler.per_epoch else then.steps
    if steps is None or abs(steps - run) > 1:
        return None
    return (
        f"{changed}, a {kind}, is for {steps} steps, as the run was: what comes after them is past "
        "its end; have the method ask for `steps` (docs/training.md)"
    )


def _steps_in(rule: Any) -> int | None:
    """Steps until one of torch's schedulers is at its end; None: it has none."""
    if isinstance(rule, LinearLR | ConstantLR | PolynomialLR):
        return rule.total_iters
    if isinstance(rule, CosineAnnealingLR):
        return int(rule.T_max)
    if isinstance(rule, SequentialLR):
        last = _steps_in(rule._schedulers[-1])
        return None if last is None else rule._milestones[-1] + last
    if isinstance(rule, ChainedScheduler):
        return max((n for n in map(_steps_in, rule._schedulers) if n is not None), default=None)
    return None
