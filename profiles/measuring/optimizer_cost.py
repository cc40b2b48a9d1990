"""What an optimizer step costs: bytes of state, and seconds by the bytes of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import torch
from torch import Tensor, nn

from ..autograd.optimizer_step import fuse
from ..profile import OptimizerCost
from ..tasks.hooks import call_hook
from .platforms import Clock

_STEPS = 7


def measure_optimizer(
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None,
    parameters: Sequence[nn.Parameter],
    groups: Sequence[Sequence[nn.Parameter]],
    clock: Clock,
) -> OptimizerCost:
    """Step an optimizer over all parameters and over the smallest layer's, with zero gradients.

    Args:
        make: the task's optimizer; without one, SGD with momentum 0.9 stands for it.
        groups: parameters of each layer.
    """
    make = make or (lambda found: torch.optim.SGD(found, lr=1e-3, momentum=0.9))
    trained = [p for p in parameters if p.requires_grad]
    small = min(
        ([p for p in group if p.requires_grad] for group in groups if group),
        key=lambda group: _bytes(group) or float("inf"),
        default=trained,
    )
    optimizer, whole_s = _time_step(make, trained, clock)
    _, small_s = _time_step(make, small or trained, clock)
    state = sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor) and value.dim()
    )
    span = _bytes(trained) - _bytes(small)
    per_byte = max((whole_s - small_s) / span, 0.0) if span > 0 else 0.0
    return OptimizerCost(
        name=type(optimizer).__name__,
        state_bytes_per_parameter_byte=round(state / _bytes(trained), 6),
        update_fixed_s=round(max(small_s - per_byte * _bytes(small), 0.0), 9),
        update_s_per_byte=per_byte,
    )


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _time_step(
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
    parameters: Sequence[nn.Parameter],
    clock: Clock,
) -> tuple[torch.optim.Optimizer, float]:
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = make(list(parameters))
    # As in training.
    fuse(optimizer)
    times = []
    for _ in range(_STEPS):
        start = clock.mark()
        call_hook("optimizer", optimizer.step, doing="step()")
        end = clock.mark()
        clock.settle()
        times.append(clock.seconds(start, end))
    for p in parameters:
        p.grad = None
    return optimizer, median(times[2:])
