"""Choice of a run's transport: shared memory, gloo, CUDA IPC, NCCL or pinned memory, by where
workers are.

On the CPU messages go through shared memory where all workers were started on one host, and by gloo
else. On GPUs they go by NCCL where every worker has a GPU of its own, and else, for all of them, by
gloo through pinned host memory: NCCL can't have one GPU twice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Sequence

import msgspec
import psutil
import torch

from ...planner.plan import Plan
from ...profiles.errors import UserError
from ...profiles.units import format_bytes
from ..prepare.devices import ranks_on_a_card
from ..prepare.workers import Worker
from ..settings import TRANSPORTS, known_transport
from .shared_memory import can_share_memory

# Where the workers are, and which transport follows from it -------------------------------------

GLOO = "gloo"
SHARED = "shared memory"
PINNED = "gloo through pinned memory"
NCCL = "nccl"
IPC = "CUDA IPC"
IPC_AND_NCCL = "CUDA IPC, nccl between hosts"


class WorkerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker is, as it tells the others."""

    rank: int
    name: str
    host: str
    device: str
    gpu: str = ""
    """Names the GPU itself, whatever processes number it as; empty: it is on the CPU."""
    free_bytes: int
    """Of the device's memory, before the worker takes any."""
    sure_bytes: int
    """That the plan gives the worker for certain: weights, their versions, gradients and optimizer
    state."""
    planned_bytes: int
    """With activations and messages."""


def place_of(plan: Plan, worker: Worker, device: torch.device) -> WorkerPlace:
    """The place of this worker."""
    planned = plan.predicted.device_of(worker.stages[0])
    memory = planned.memory
    return WorkerPlace(
        rank=worker.rank,
        name=worker.name,
        host=socket.gethostname(),
        device=str(device),
        gpu=gpu_name(device, worker.rank),
        free_bytes=free_bytes(device),
        sure_bytes=memory.weights_bytes
        + memory.versions_bytes
        + memory.gradients_bytes
        + memory.optimizer_bytes,
        planned_bytes=planned.memory_bytes,
    )


def gpu_name(device: torch.device, rank: int) -> str:
    """A name of a worker's GPU that is the same in all processes of its host; empty: no GPU."""
    if device.type != "cuda":
        return ""
    own = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    name = str(own) if own is not None else f"{visible}:{device.index}"
    several = ranks_on_a_card()
    return f"{name}, {rank % several}" if several > 1 else name


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device. Of a GPU, asking takes some hundred MB."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    return int(torch.cuda.mem_get_info(device)[0])


def all_places(
    place: WorkerPlace, exchange: Callable[[bytes], Sequence[bytes]]
) -> tuple[WorkerPlace, ...]:
    """Where all workers are, by rank. `exchange` gives all workers' answers for one's own.

    Raises:
        UserError: some device has less memory free than its workers need for certain.
        PeerError: another worker didn't say where it is.
    """
    everyone = tuple(
        msgspec.json.decode(text, type=WorkerPlace) for text in exchange(msgspec.json.encode(place))
    )
    shortages = short_of_memory(everyone)
    if shortages:
        raise UserError(f"{'; '.join(shortages)}; end what else runs there, or plan for less")
    return everyone


def transport_of(gpus: Iterable[tuple[str, str]]) -> str:
    """What torch.distributed has. `gpus`: of each worker, its host and the name of its GPU; empty:
    none."""
    found = list(gpus)
    if not all(gpu for _, gpu in found):
        return GLOO
    return NCCL if len(set(found)) == len(found) else PINNED


def between_processes(transport: str, wanted: str, *, one_host: bool, varying: bool = False) -> str:
    """How messages go between processes.

    Args:
        transport: of those that torch.distributed has.
        wanted: the setting.
        one_host: all workers were started on this host.
        varying: mini-batches differ in shape. NCCL, and slots in a GPU, would have to know that of
            a message before it comes.

    Raises UserError when what is wanted can't be had.
    """
    if wanted not in TRANSPORTS:
        return known_transport(wanted, "--transport")
    on_gpus = wanted in ("ipc", "nccl")
    lacks = {
        "stages on the CPU don't use it": on_gpus and transport == GLOO,
        "mini-batches differ in shape": on_gpus and varying,
        "stages on GPUs don't use it": wanted == "shm" and transport != GLOO,
        "the workers are on several hosts": wanted in ("ipc", "shm") and not one_host,
        "workers share a GPU": wanted == "nccl" and transport == PINNED,
        "it takes Linux": wanted == "shm" and not can_share_memory(),
    }
    for reason, there in lacks.items():
        if there:
            raise UserError(f"--transport {wanted}: {reason}")
    if on_gpus:
        return IPC if wanted == "ipc" else NCCL
    if transport != GLOO:
        if wanted == "gloo" or varying:
            return PINNED
        if one_host:
            return IPC
        return IPC_AND_NCCL if transport == NCCL else PINNED
    may = transport == GLOO and one_host and can_share_memory()
    return SHARED if may and wanted != "gloo" else transport


def by_gpu(places: Sequence[WorkerPlace]) -> list[list[WorkerPlace]]:
    """For each GPU the workers on it."""
    found: dict[tuple[str, str], list[WorkerPlace]] = {}
    for place in places:
        if place.gpu:
            found.setdefault((place.host, place.gpu), []).append(place)
    return list(found.values())


def short_of_memory(places: Sequence[WorkerPlace]) -> list[str]:
    """GPUs that lack room for what their workers need for certain.

    On the CPU nothing is certain: memory can be reclaimed, or swapped.
    """
    found = []
    for there in by_gpu(places):
        needed, free = sum(p.sure_bytes for p in there), min(p.free_bytes for p in there)
        if needed > free:
            names = " and ".join(p.name for p in there)
            found.append(
                f"{names}: weights, gradients and optimizer state need {format_bytes(needed)} on "
                f"{there[0].device} of {there[0].host}, and {format_bytes(free)} are free"
            )
    return found


def shortage_here(planned: Sequence[int], free: int) -> str | None:
    """A warning for workers on the CPU of this host; None: all have room.

    Args:
        planned: bytes of each.
        free: bytes that are free.
    """
    if sum(planned) <= free:
        return None
    return (
        f"the plan's {format_bytes(sum(planned))} are more than the {format_bytes(free)} of memory "
        "that are free here: training may be slow, or end for lack of memory"
    )
