"""What an optimizer step costs, measured or by a roofline: bytes of state, and seconds by the bytes
of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..autograd.optimizer_step import fuse
from ..device_specs import DeviceSpec
from ..errors import one_line
from ..profile import OptimizerCost
from ..tasks.hooks import call_hook, in_one_line
from ..tasks.optimizers import state_bytes, task_groups, task_optimizer
from ..tracing.graph import state_of
from .bench import Bench
from .checks import try_scheduler, usual_length
from .platforms import Clock

_STEPS = 7

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""A task's `optimizer`."""


def optimizer_cost(bench: Bench) -> OptimizerCost:
    """What a step of the task's optimizer costs, which is stepped here, and its scheduler once."""
    task = bench.target.task
    make = None
    if not any(p.requires_grad for p in bench.model.parameters()):
        return OptimizerCost(
            name="none", state_bytes_per_parameter_byte=0, update_fixed_s=0, update_s_per_byte=0
        )
    if task is not None:
        trained = [(n, p) for n, p in bench.model.named_parameters() if p.requires_grad]
        known = {id(p): name for name, p in trained}

        def make(given: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            named = [(known.get(id(p), "a parameter"), p) for p in given]
            groups = task_groups(task, trained, given)
            if groups:
                # A stand-in is of any group.
                groups[0]["params"] += [p for p in given if id(p) not in known]
            found = task_optimizer(task.optimizer, groups or given, named, "the model")
            made.append(found)
            return found

    made: list[torch.optim.Optimizer] = []
    spec = bench.platform.spec
    if spec is not None:
        cost = optimizer_roofline(make, spec, next(bench.model.parameters()).dtype)
    else:
        groups = [
            [t for t in state_of(bench.traced, layer.nodes).values() if isinstance(t, nn.Parameter)]
            for layer in bench.traced.layers
        ]
        held = list(bench.model.parameters())
        before = [p.detach().clone() for p in held]
        with bench.platform.clock() as clock:
            cost = measure_optimizer(make, held, groups, clock)
        # Its steps are on gradients of zeros, which not every optimizer takes for nothing.
        with torch.no_grad():
            for p, own in zip(held, before, strict=True):
                p.copy_(own)
    if task is not None:
        try_scheduler(task, made[-1], usual_length(bench, task))
    return cost


def measure_optimizer(
    make: Make | None,
    parameters: Sequence[nn.Parameter],
    groups: Sequence[Sequence[nn.Parameter]],
    clock: Clock,
) -> OptimizerCost:
    """Step an optimizer over all parameters and over those of the smallest layer, of these groups,
    with zero gradients: the task's; without one, SGD with momentum 0.9 stands for it."""
    make = make or _stand_in
    trained = [p for p in parameters if p.requires_grad]
    small = min(
        ([p for p in group if p.requires_grad] for group in groups if group),
        key=lambda group: _bytes(group) or float("inf"),
        default=trained,
    )
    scratch = _scratch(make, trained)
    optimizer, whole_s = _time_step(make, trained, clock)
    _, small_s = _time_step(make, small or trained, clock)
    span = _bytes(trained) - _bytes(small)
    per_byte = max((whole_s - small_s) / span, 0.0) if span > 0 else 0.0
    return OptimizerCost(
        name=type(optimizer).__name__,
        state_bytes_per_parameter_byte=round(state_bytes(optimizer) / _bytes(trained), 6),
        scratch_bytes_per_parameter_byte=scratch,
        update_fixed_s=round(max(small_s - per_byte * _bytes(small), 0.0), 9),
        update_s_per_byte=per_byte,
    )


def _stand_in(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _bytes(parameters: Iterable[Tensor]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def _scratch(make: Make, parameters: Sequence[nn.Parameter]) -> float | msgspec.UnsetType:
    """Bytes that a step takes besides for each of parameters, where these are on a GPU: torch's
    optimizers go over many at once there, term by term."""
    if not all(p.is_cuda for p in parameters):
        return msgspec.UNSET
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer = make(list(parameters))
    for _ in range(2):
        # The first one makes its state.
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call_hook("optimizer", optimizer.step, doing="step()")
    most = torch.cuda.max_memory_allocated() - before
    for p in parameters:
        p.grad = None
    return round(most / _bytes(parameters), 4)


def _time_step(
    make: Make, parameters: Sequence[nn.Parameter], clock: Clock
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


def optimizer_roofline(
    make: Make | None, spec: DeviceSpec, dtype: torch.dtype = torch.float32
) -> OptimizerCost:
    """What a step of the task's optimizer, or of SGD with momentum 0.9 in its place, would cost on
    a device, from one small real parameter.

    A fused step reads parameters, gradients and state, and writes parameters and state. It
    launches as many kernels as there are operations in the step for one parameter: torch's
    foreach optimizers do each of them for all parameters at once.

    Raises TargetError when the optimizer can't be made or stepped.
    """
    from .roofline import Roofline

    make = make or _stand_in
    # Out of any fake mode: an optimizer may look at its numbers.
    with _disable_current_modes():
        parameter = nn.Parameter(torch.zeros(256, 256, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        with in_one_line("optimizer: can't be stepped over one parameter", text=one_line):
            optimizer = make([parameter])
            call_hook("optimizer", optimizer.step, doing="step()")
            with Roofline(spec) as clock:
                optimizer.step()
    ratio = state_bytes(optimizer) / _bytes([parameter])
    return OptimizerCost(
        name=type(optimizer).__name__,
        state_bytes_per_parameter_byte=round(ratio, 6),
        update_fixed_s=clock.operations * spec.launch_s,
        update_s_per_byte=(3 + 2 * ratio)
        / (spec.memory_bandwidth_bytes_per_s * spec.memory_efficiency),
    )
