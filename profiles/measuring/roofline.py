"""A clock that reckons instead of measuring: the roofline of a device's data sheet.

Every operation takes the longer of its arithmetic at the device's peak and its memory traffic at
the device's bandwidth (Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009), and a
launch. It needs shapes only, so models run under it on fake tensors, without memory.

What counts for each operation is in operation_cost.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..errors import TargetError
from ..hooks import call_hook
from ..profile import OptimizerCost
from .device_specs import DeviceSpec
from .operation_cost import Rule, moved_bytes, rule_of


class Roofline(TorchDispatchMode):
    """Dispatch mode that adds up what the operations under it would take on a device.

    It sees a backward as well as a forward. With fake tensors, enter it inside the
    FakeTensorMode; the other way round, that mode's cache would hide operations from it.

    float32 matrix products and convolutions go at the peak of TF32 where the spec says so, or
    where torch's own flags (read when the clock is made) would let them on a CUDA device: by
    default for cuDNN's convolutions and recurrent layers, not for matrix products.

    Attributes:
        seconds: on the device so far.
        flops: floating-point operations so far; a multiply-add is two.
        bytes: moved from and to memory so far.
        operations: kernels launched so far.
    """

    def __init__(self, spec: DeviceSpec) -> None:
        super().__init__()
        self.spec = spec
        self.seconds = 0.0
        self.flops = 0
        self.bytes = 0
        self.operations = 0
        self._bandwidth = spec.memory_bandwidth_bytes_per_s * spec.memory_efficiency
        self._peaks = {cudnn: _peaks(spec, cudnn) for cudnn in (False, True)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = rule_of(func)
        if rule.composite:
            # In inference mode, these arrive whole.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not rule.free:
            self._add(rule, args, kwargs, result)
        return result

    def _add(self, rule: Rule, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        moved = moved_bytes(rule, args, kwargs, result)
        seconds = moved / self._bandwidth
        if rule.flops is not None:
            flops = rule.flops(*args, **kwargs, out_val=result)
            peaks = self._peaks[rule.cudnn]
            peak = peaks.get(args[0].dtype, peaks[torch.float32])
            seconds = max(seconds, flops / peak)
            self.flops += flops
        self.seconds += seconds + self.spec.launch_s
        self.bytes += moved
        self.operations += 1


def optimizer_roofline(
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] | None,
    spec: DeviceSpec,
    dtype: torch.dtype = torch.float32,
) -> OptimizerCost:
    """What an optimizer step would cost on a device, from one small real parameter.

    A fused step reads parameters, gradients and state, and writes parameters and state. It
    launches as many kernels as there are operations in the step for one parameter: torch's
    foreach optimizers do each of them for all parameters at once.

    Args:
        make: the task's optimizer; without one, SGD with momentum 0.9 stands for it.
        dtype: of the parameters.

    Raises TargetError when the optimizer can't be made or stepped.
    """
    make = make or (lambda found: torch.optim.SGD(found, lr=1e-3, momentum=0.9))
    # Out of any fake mode: an optimizer may look at its numbers.
    with _disable_current_modes():
        parameter = nn.Parameter(torch.zeros(256, 256, dtype=dtype))
        parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer = make([parameter])
            call_hook("optimizer", optimizer.step, doing="step()")
            with Roofline(spec) as clock:
                optimizer.step()
        except TargetError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split())
            raise TargetError(
                f"optimizer: can't be stepped over one parameter: {reason}"
            ) from error
    state = sum(
        value.numel() * value.element_size()
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor) and value.dim()
    )
    ratio = state / (parameter.numel() * parameter.element_size())
    return OptimizerCost(
        name=type(optimizer).__name__,
        state_bytes_per_parameter_byte=round(ratio, 6),
        update_fixed_s=clock.operations * spec.launch_s,
        update_s_per_byte=(3 + 2 * ratio)
        / (spec.memory_bandwidth_bytes_per_s * spec.memory_efficiency),
    )


# Peaks ---------------------------------------------------------------------------------------


def _peaks(spec: DeviceSpec, cudnn: bool) -> dict[torch.dtype, float]:
    """Operations per second by dtype, of matrix products or of what cuDNN does."""
    peak, share = spec.peak_flops_per_s, spec.compute_efficiency
    single = peak.float32
    if peak.tf32 is not None and (spec.matmul == "tf32" or _allows_tf32(cudnn)):
        single = peak.tf32
    return {
        torch.float32: single * share,
        torch.float16: (peak.float16 or peak.float32) * share,
        torch.bfloat16: (peak.bfloat16 or peak.float32) * share,
    }


def _allows_tf32(cudnn: bool) -> bool:
    backend: Any = torch.backends.cudnn if cudnn else torch.backends.cuda.matmul
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        # Set through the newer fp32_precision, after which torch refuses to be asked as before.
        newer = backend.conv if cudnn else backend
        return bool(newer.fp32_precision == "tf32")
