"""What a system makes of the user's optimizer: `Variant.update_rule`."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import SGD, Adam, NAdam, Optimizer

from ...planner.systems.variants import UpdateRule
from ...profiles.errors import TargetError


def follow(rule: UpdateRule, optimizer: Optimizer) -> Optimizer:
    """The optimizer that a stage updates with.

    Raises TargetError for one that the rule can't be had with.
    """
    return _RULES[rule](optimizer)


def _nesterov(optimizer: Optimizer) -> Optimizer:
    """Nesterov momentum with the gradient discounted by 1 − γ (2505.01099; our reading).

    The look-ahead then outweighs the late gradient. For SGD with momentum γ that is
    v ← γ·v + g, W ← W − η·(1 − γ)·(g + γ·v). Adam's first moment discounts its gradient
    already: there it is NAdam.
    """
    if isinstance(optimizer, SGD):
        for group in optimizer.param_groups:
            momentum = group["momentum"]
            if group["dampening"]:
                raise TargetError(
                    "the task's optimizer has dampening, and Nesterov momentum has none"
                )
            group["nesterov"] = momentum > 0
            group["lr"] = group["lr"] * (1 - momentum)
        return optimizer
    if isinstance(optimizer, Adam):
        names = ("params", "lr", "betas", "eps", "weight_decay", "decoupled_weight_decay")
        groups = [{name: group[name] for name in names} for group in optimizer.param_groups]
        return NAdam(groups)
    raise TargetError(
        f"the task's optimizer is {type(optimizer).__name__}: delay-corrected Nesterov momentum "
        "is there for SGD, Adam and AdamW"
    )


_RULES: dict[UpdateRule, Callable[[Optimizer], Optimizer]] = {
    "optimizer": lambda optimizer: optimizer,
    "nesterov": _nesterov,
}
