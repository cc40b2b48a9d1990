"""Each worker's device, its random state and modes, and moving modules and data there.

The rule: a plan is trained on the kind of device that it was profiled on, or on the one that
``--device`` names. On GPUs the worker with local rank r of its host has ``cuda:(r mod GPUs)``; an
inline run has all its stages on the first GPU.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...planner.plan import Plan
from ...profiles.errors import PlanError, UserError
from ...profiles.measuring.platforms import wake
from ...profiles.profile import ProfileReference
from ...profiles.tracing.graph import GraphBody, graph_of, recompile
from ...profiles.tracing.pieces import map_items
from ...profiles.tracing.random_states import set_states, states
from ..settings import RunSettings

CPU = torch.device("cpu")


def device_kind(plan: Plan, settings: RunSettings) -> str:
    """The kind of device that a plan is trained on, "cpu" or "cuda"; of profiles from a data sheet
    the CPU."""
    if settings.device != "auto":
        return settings.device
    return "cuda" if plan.profile.device == "cuda" else "cpu"


def check_kind(kind: str, settings: RunSettings, gpus: int) -> None:
    """Raise UserError where this host can't train on such a device."""
    if kind != "cuda" or gpus:
        return
    if settings.device == "cuda":
        raise UserError("--device cuda: torch finds no GPU here; take --device cpu")
    raise UserError(
        "plan: was profiled on cuda, and torch finds no GPU here; --device cpu trains on the CPU"
    )


def device_of(kind: str, local_rank: int, gpus: int) -> torch.device:
    """The device of a worker.

    Args:
        local_rank: among the workers of its host.
        gpus: that its process sees.
    """
    if kind != "cuda":
        return CPU
    return torch.device("cuda", local_rank % gpus // ranks_on_a_card())


def devices_here(plan: Plan, settings: RunSettings) -> tuple[str, int]:
    """The kind of device that a run trains on, and how many GPUs this host has.

    Raises UserError where it can't train on such a device, send messages as is asked for, compile
    for it, or capture graphs there.
    """
    kind, gpus = device_kind(plan, settings), gpu_count()
    check_kind(kind, settings, gpus)
    if kind == "cpu" and settings.transport in ("ipc", "nccl"):
        raise UserError(f"--transport {settings.transport}: is of GPUs, and stages are on the CPU")
    if kind == "cpu" and settings.graphs == "on":
        raise UserError("--graphs on: CUDA graphs are of GPUs, and stages are on the CPU")
    if settings.compile and kind == "cpu":
        check_compiler()
    return kind, gpus


def check_compiler() -> None:
    """Raise UserError where there is no C++ compiler, which is needed on the CPU."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise UserError(
            "--compile: on the CPU it needs a C++ compiler, and none is found: install g++ or "
            "clang++, or name one in the environment variable CXX"
        ) from None


def own_device(plan: Plan, settings: RunSettings, local_rank: int) -> torch.device:
    """The device of a worker of this host, made the current one, and torch's operations the
    deterministic ones where the settings say so. Raises UserError."""
    kind, gpus = devices_here(plan, settings)
    if settings.deterministic:
        # Read by cuBLAS when it is used first.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    device = device_of(kind, local_rank, gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        wake(device)
    return device


RANKS_ON_A_CARD = "TIMEPREST_TEST_RANKS_ON_A_CARD"
"""Of tests alone: so many workers count each card as GPUs of their own. NCCL 2.30 and later takes
several ranks on a card where NCCL_MULTI_RANK_GPU_ENABLE is 1."""


def ranks_on_a_card() -> int:
    """1 but in tests."""
    return int(os.environ.get(RANKS_ON_A_CARD, "1"))


def gpu_count() -> int:
    """GPUs that torch finds here."""
    return torch.cuda.device_count() * ranks_on_a_card() if torch.cuda.is_available() else 0


# Modules and data -------------------------------------------------------------------------------


def usable_cores() -> int:
    """Cores that this process may compute on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def turns_warning(workers: int, count: int, what: str, threads: int = 1) -> str | None:
    """A warning where a host's workers, of so many threads, take turns on its `count` cores or
    GPUs, which plans don't know; None: they don't. `what`: "core" or "GPU"."""
    at_once = max(count // threads, 1)
    if workers <= at_once:
        return None
    return (
        f"{workers} processes take turns on {count} {what if count == 1 else f'{what}s'}: slower "
        f"than planned; tp-plan solve --devices {at_once} --stages-per-device auto plans for it"
    )


def move(modules: Sequence[nn.Module], device: torch.device) -> None:
    """Move modules to a device, and keep parameters and buffers shared that they share.

    Devices that tracing wrote into their graphs are replaced too.
    """
    if device == CPU:
        return
    moved: dict[int, tuple[Tensor, Tensor]] = {}

    def there(tensor: Tensor) -> Tensor:
        # The old one is kept too, so that nothing else gets its id.
        return moved.setdefault(id(tensor), (tensor, tensor.to(device)))[1]

    for module in modules:
        module._apply(there)
        for part in module.modules():
            if isinstance(part, GraphBody) and _name_device(graph_of(part), device):
                recompile(part)
            elif isinstance(part, fx.GraphModule) and _name_device(part.graph, device):
                part.recompile()


def _name_device(graph: fx.Graph, device: torch.device) -> bool:
    """Replace the CPU in a graph's arguments; whether there was any."""
    changed = found = False

    def other(argument: Any) -> Any:
        nonlocal found
        if isinstance(argument, torch.device) and argument.type == "cpu":
            found = True
            return device
        return argument

    for node in graph.nodes:
        found = False
        args = fx.node.map_aggregate(node.args, other)
        kwargs = fx.node.map_aggregate(node.kwargs, other)
        if found:
            node.args, node.kwargs = args, kwargs
        if node.target is torch.ops.higher_order.wrap_with_autocast and node.args[0] == "cpu":
            node.args, found = (device.type, *node.args[1:]), True
        changed |= found
    return changed


def put(value: Any, device: torch.device) -> Any:
    """Containers with their tensors moved to a device; anything else is left as it is."""
    if isinstance(value, Tensor):
        if value.device == device:
            return value
        pinned = value.device == CPU and value.layout == torch.strided and value.numel() > 1
        if device.type == "cuda" and pinned:
            # From other memory the copy, and the host with it, waits for what the device has to do.
            value = value.pin_memory()
        return value.to(device, non_blocking=True)
    if device == CPU:
        return value
    moves = getattr(value, "to", None)
    if callable(moves):
        return moves(device)
    return map_items(lambda item: put(item, device), value)


# Random numbers ---------------------------------------------------------------------------------


_CPU_STATE_BYTES = torch.get_rng_state().numel()


def random_state(device: torch.device) -> Tensor:
    """Random state of a worker: torch's generator of the CPU, and of its GPU."""
    own = torch.get_rng_state()
    if device.type != "cuda":
        return own
    return torch.cat([own, torch.cuda.get_rng_state(device)])


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Restore a random state, which may be of a worker on another kind of device.

    A GPU's generator is then seeded by what is known of the CPU's.
    """
    more = state.numel() > _CPU_STATE_BYTES
    # Inline runs come here at every operation, and a slice takes longer than setting does.
    torch.set_rng_state(state[:_CPU_STATE_BYTES] if more else state)
    if device.type != "cuda":
        return
    if more:
        torch.cuda.set_rng_state(state[_CPU_STATE_BYTES:], device)
        return
    digest = hashlib.sha256(bytes(state.numpy())).digest()
    with torch.cuda.device(device):
        torch.cuda.manual_seed(int.from_bytes(digest[:8], "big"))


def generators(device: torch.device) -> tuple[Any, ...]:
    """Random states of torch, Python and NumPy."""
    return *states(), random_state(device)


def set_generators(given: tuple[Any, ...], device: torch.device) -> None:
    """Restore these random states."""
    *before, own = given
    set_states(tuple(before))
    set_random_state(own, device)


@contextmanager
def random_kept(device: torch.device) -> Iterator[None]:
    """A context after which torch, Python and NumPy draw as if nothing had been drawn inside."""
    before = generators(device)
    try:
        yield
    finally:
        set_generators(before, device)


# Memory -----------------------------------------------------------------------------------------


def dense_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of a sparse one (a gradient) those that it would have if it were dense."""
    return tensor.numel() * tensor.element_size()


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes that tensors have had on a GPU since the process began; None: on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def used_bytes(device: torch.device) -> int | None:
    """Bytes of a GPU that all processes have now, as its driver counts them; None: on the CPU.

    Torch gives nothing back while it runs: that is the peak, where no other process had more.
    """
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return total - free


# Mixed precision, and what else a forward may ask for -------------------------------------------


@dataclass(frozen=True)
class Modes:
    """Modes of torch that a forward may ask for: autocast, deterministic operations.

    Attributes:
        autocast: its dtype; None: off.
        device: the kind of device that the model is going to run on.
        deterministic: operations that are, or that needn't be; None: as the process has them.
    """

    autocast: torch.dtype | None
    device: str = "cpu"
    deterministic: bool | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Switch to them, for work on a CPU; back afterwards."""
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        dtype, on = self.autocast or torch.bfloat16, self.autocast is not None
        with ExitStack() as stack:
            for kind in {"cpu", self.device}:
                stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=False))
            if self.deterministic is not None:
                torch.use_deterministic_algorithms(self.deterministic, warn_only=True)
            try:
                yield
            finally:
                torch.use_deterministic_algorithms(before, warn_only=warn_only)

    def __str__(self) -> str:
        autocast = "off" if self.autocast is None else str(self.autocast).removeprefix("torch.")
        return f"autocast {autocast}" + ", deterministic operations" * bool(self.deterministic)


def modes_of_profile(profile: ProfileReference) -> Modes:
    """The modes that a profile was made under."""
    return Modes(None if profile.autocast is None else getattr(torch, profile.autocast))


def modes_of(plan: Plan, settings: RunSettings) -> Modes:
    """The modes of a run. Raises PlanError as `autocast_of`."""
    kind = device_kind(plan, settings)
    return Modes(autocast_of(plan, settings), kind, settings.deterministic or None)


def autocast_of(plan: Plan, settings: RunSettings) -> torch.dtype | None:
    """The dtype of torch.autocast in a run; None: off.

    Raises PlanError for a plan profiled under float16, if that is what the run would take.
    """
    if settings.autocast == "off":
        return None
    if settings.autocast == "bfloat16":
        return torch.bfloat16
    profiled = plan.profile.autocast
    if profiled is None:
        return None
    if profiled != "bfloat16":
        raise PlanError(
            f"plan: was made from a profile under autocast ({profiled}), which trains with scaled "
            "losses alone, and tp-run scales none: run with --autocast bf16 or off"
        )
    return torch.bfloat16


def forward_context(dtype: torch.dtype | None, device: str = "cpu") -> AbstractContextManager[Any]:
    """The context of a forward and its loss: autocast. `device`: the type of the one they run
    on."""
    if dtype is None:
        return nullcontext()
    # Its cache of cast weights may outlive an update where a caller has a context of its own.
    return torch.autocast(device, dtype, cache_enabled=False)
