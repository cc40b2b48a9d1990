"""Where a model is profiled: the CPU, a GPU or a device that isn't there; its clock and bytes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..device_specs import DeviceSpec, load_spec
from ..errors import TargetError, UserError
from ..tracing.fake import copied_without_data, fake_mode, quiet
from ..tracing.pieces import tensors_in

# Bytes of all tensors alive at once, on any device ----------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that follows every new storage from its making to its end.

    What an operation allocates inside itself and frees again (a convolution's scratch
    memory) isn't seen.

    Attributes:
        live: bytes of the storages made under this mode that are alive now.
        peak: largest `live` since the start or the last `reset_peak`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self._note((args, kwargs), count=False)
        result = func(*args, **kwargs)
        self._note(result, count=True)
        return result

    def _note(self, value: Any, count: bool) -> None:
        for tensor in tensors_in(value):
            self._note_storage(tensor.untyped_storage(), count)

    def _note_storage(self, storage: torch.UntypedStorage, count: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if count else 0

        def gone(_: object) -> None:
            self._known.pop(key, None)
            self.live -= size

        self._known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


# Clocks: the processor's, CUDA events, and one that computes time -------------------------------


_CYCLES_A_CALL = 60_000
"""Of a GPU, some 30 µs: a call and two marks take the host less."""


class Clock:
    """Takes marks while work goes on; what lies between two is known once it has settled.

    Args:
        read: seconds; by default the processor's, where work is done when its call returns. Where
            times are computed, those that a model of the device has added up so far.
    """

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self._read = read

    def mark(self) -> Any:
        """A point in time on the device."""
        return self._read()

    def settle(self) -> None:
        """Wait until all marks are there."""

    def lead(self, calls: int) -> None:
        """Have the device wait until the host has handed over so many calls, more or less."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two settled marks."""
        return float(end - start)


class CudaClock(Clock):
    """CUDA events: what the device took, not the host that feeds it."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def lead(self, calls: int) -> None:
        # So that what lies between two marks is never the host's way from one call to the next.
        torch.cuda._sleep(calls * _CYCLES_A_CALL)

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) * 1e-3


# What a GPU's processes take besides their tensors -----------------------------------------------


class Reserved(NamedTuple):
    """Memory of a GPU besides tensors."""

    nbytes: int
    """Of each process: CUDA's context, kernels, workspaces of libraries."""
    share: float
    """Of the allocator, for each byte of tensors."""


_AT_FIRST: dict[int, int] = {}
"""By GPU: what others had, and this process's context, before anything was computed."""

_STEPS = 3
_BARE_S = 120.0
_GRAINS_BYTES = 64 * 2**20
"""Torch's allocator takes memory in pieces of up to 20 MiB: so much is no share of tensors."""

_BARE = """
import sys, torch
x = torch.ones((), device="cuda", requires_grad=True)
(x * x).backward()
torch.cuda.synchronize()
print(torch.cuda.memory_reserved(), flush=True)
sys.stdin.read()
"""
"""A process that has a context on a GPU, and as good as nothing else, until it is let go."""


def _outside_torch() -> int:
    """Bytes of the GPU at hand that this process's tensors have nothing to do with."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _reserved(device: torch.device, step: Callable[[], object]) -> Reserved | None:
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(_STEPS):
            step()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        beside = torch.cuda.max_memory_reserved() - most
        bare = _bare_context()
        if bare is None:
            return None
        grown = _outside_torch() - _AT_FIRST.get(torch.cuda.current_device(), _outside_torch())
        before = torch.cuda.memory_allocated()
        # They are tensors to the allocator, and none of the model's.
        torch._C._cuda_clearCublasWorkspaces()
        workspaces = before - torch.cuda.memory_allocated()
        grains = min(beside, _GRAINS_BYTES)
        nbytes = bare + max(grown, 0) + workspaces + grains
        return Reserved(nbytes, (beside - grains) / most if most else 0.0)


@cache
def _bare_context() -> int | None:
    """What a context takes of the GPU at hand, seen from here while another process makes one."""
    free, _ = torch.cuda.mem_get_info()
    visible = {"CUDA_VISIBLE_DEVICES": _visible()}
    with subprocess.Popen(
        [sys.executable, "-c", _BARE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **visible},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        line = b""
        try:
            ready, _, _ = select.select([child.stdout], [], [], _BARE_S)
            line = child.stdout.readline() if ready else b""
            left, _ = torch.cuda.mem_get_info()
        finally:
            child.stdin.close()
            if not line:
                child.kill()
    # Of the two, the tensors of the other one aren't the context's.
    return max(free - left - int(line), 0) if line.strip().isdigit() else None


def _visible() -> str:
    """The GPU at hand, as another process sees it as its only one."""
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    current = torch.cuda.current_device()
    return own.split(",")[current].strip() if own else str(current)


# Platforms --------------------------------------------------------------------------------------

META = "meta"
DEVICES = ("cpu", "cuda", META)
AUTOCAST = ("bfloat16", "float16")


class CudaMeter:
    """What PyTorch's CUDA allocator has handed out, scratch memory of operations included."""

    @property
    def live(self) -> int:
        return torch.cuda.memory_allocated()

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True)
class Platform:
    """A device to profile on.

    Attributes:
        name: as the profile says it: "cpu", "cuda", "meta:NAME".
        device: torch's device for the tensors; on a device that isn't there, fake CPU ones.
        spec: of the device that isn't there; else None.
        autocast: dtype of torch.autocast for the forwards; None: off.
    """

    name: str
    device: torch.device
    spec: DeviceSpec | None = None
    autocast: torch.dtype | None = None
    _fake: Any = field(default=None, repr=False)

    @property
    def gpu(self) -> str:
        """What CUDA calls it; empty on any other device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    @property
    def computed(self) -> bool:
        """Nothing is run: times are computed, and the same every time."""
        return self.spec is not None

    @contextmanager
    def working(self) -> Iterator[None]:
        """What building the model and all work with it runs under."""
        if self._fake is None:
            yield
        else:
            with quiet(), self._fake:
                yield

    @contextmanager
    def clock(self) -> Iterator[Clock]:
        """A clock that runs while the context lasts."""
        if self.spec is not None:
            from .roofline import Roofline

            with Roofline(self.spec) as counter:
                yield Clock(lambda: counter.seconds)
        else:
            yield CudaClock() if self.device.type == "cuda" else Clock()

    @contextmanager
    def meter(self) -> Iterator[LiveBytes | CudaMeter]:
        """A meter of memory that runs while the context lasts."""
        if self.device.type == "cuda":
            yield CudaMeter()
        else:
            with LiveBytes() as live:
                yield live

    def reserved(self, step: Callable[[], object]) -> Reserved | None:
        """What a process takes of a GPU besides its tensors, by steps of training on the largest
        micro-batch. None on any other device, and where it can't be measured."""
        return _reserved(self.device, step) if self.device.type == "cuda" else None

    def forward_context(self) -> AbstractContextManager[Any]:
        """What forwards run under."""
        if self.autocast is None:
            return nullcontext()
        # With its cache of cast weights, two layers that share weights would share a graph.
        return torch.autocast(self.device.type, self.autocast, cache_enabled=False)

    def place(self, tensor: Tensor) -> Tensor:
        """The tensor on this device."""
        if self._fake is None:
            return tensor.to(self.device)
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def build(self, make: Callable[[], nn.Module], *, first: bool) -> nn.Module:
        """Build a model here.

        On a device that isn't there it takes no memory, unless building looks at values or
        changes the model's dtype, or it is to be built with real tensors `first` and placed then.
        """
        if self._fake is None:
            return make().to(self.device)
        model = None
        if not first:
            try:
                with self.working(), copied_without_data():
                    model = make()
            except TargetError as failure:
                cause = failure.__cause__
                # Of a module whose parameters are fake, torch can't always change the dtype.
                swapping = isinstance(cause, RuntimeError) and "Couldn't swap" in str(cause)
                if not swapping and not isinstance(cause, DataDependentOutputException):
                    raise
        # One that there is already is of real tensors, too.
        model = make() if model is None else model
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    # A fake of a parameter is a parameter; shared ones stay shared.
                    module._parameters[name] = self.place(parameter)  # type: ignore[assignment]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.place(buffer)
        return model


def platform_of(device: str, spec: str | None = None, autocast: str | None = None) -> Platform:
    """The platform for "cpu", "cuda" or "meta", with the spec of the device that isn't there, a
    shipped one's name or a TOML file, and autocast to "bfloat16" or "float16". Raises UserError: no
    such device here, or options that don't go together."""
    if device not in DEVICES:
        raise UserError(f"--device {device!r}: give one of {', '.join(DEVICES)}")
    if (spec is not None) != (device == META):
        raise UserError(
            "--spec: goes with --device meta"
            if spec
            else "--device meta: say which device to reckon with: --spec NAME, or --spec FILE"
        )
    if autocast is not None and autocast not in AUTOCAST:
        raise UserError(f"--autocast {autocast!r}: give one of {', '.join(AUTOCAST)}")
    dtype = getattr(torch, autocast) if autocast else None
    if device == META:
        found = load_spec(str(spec))
        name = str(spec) if not str(spec).endswith(".toml") else found.name
        return Platform(f"{META}:{name}", torch.device("cpu"), found, dtype, fake_mode())
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA device here; take --device cpu")
    if device == "cuda":
        wake(torch.device(device))
        _AT_FIRST.setdefault(torch.cuda.current_device(), _outside_torch())
    return Platform(device, torch.device(device), None, dtype)


def wake(device: torch.device) -> None:
    """Have the thread of a GPU's backwards begin with a kernel of torch's own: of cuBLAS's, torch
    warns there."""
    x = torch.ones((), device=device, requires_grad=True)
    (x * x).backward()
