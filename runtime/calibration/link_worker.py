"""A process that measures links, with others like it.

``python -m timeprest.runtime.calibration.link_worker FOLDER LAUNCHER``, or one of those that
torchrun or srun have started (`measure_here`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import closing
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...planner.systems.operations import BACKWARD, FORWARD
from ...profiles.errors import UserError
from ...profiles.files import write_bytes
from ..communication import cuda_ipc
from ..communication.channel import PeerError
from ..communication.shared_memory import connect
from ..communication.signed_store import SignedStore
from ..communication.transport import IPC, IPC_AND_NCCL
from ..prepare.devices import device_of, gpu_count
from ..prepare.messages import message_series
from ..processes.environment import use_interface
from ..processes.rendezvous import Rendezvous, join
from ..records.growing_file import GrowingFile
from .links import (
    FAR_TIMEOUT_S,
    MESSAGE_BYTES,
    TIMEOUT_S,
    LinkDir,
    LinkSettings,
    LinkTimes,
    Process,
    Progress,
    backend_of,
    check_gpus,
    lead,
    link_routes,
)

# Longest wait for the others to start. All load torch at once, on the cores that there are.
LOADING_S = 30.0
LOADING_S_PER_PROCESS = 2.0


def measure_here(
    rendezvous: Rendezvous, device: str, progress: Progress, **more: Any
) -> LinkTimes | None:
    """Measure the links between the processes that torchrun or srun have started. In process 0
    `progress` is told how far it is, and what was measured returned; None in the others.

    Args:
        more: other fields of `LinkSettings`.

    Raises:
        UserError: a process alone, another device in each, no GPU for one of them.
        PeerError: another process is gone, or doesn't answer.
    """
    launched = rendezvous.launched
    rendezvous.check_same({"--device": device})
    if launched.world_size < 2:
        raise UserError(f"{launched.by} started 1 process: links are between two or more")
    if device == "cuda":
        check_gpus(launched.local_rank + 1)
    node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID", "0"))
    mine = json.dumps([socket.gethostname(), node]).encode()
    found = [tuple(json.loads(each)) for each in rendezvous.gather("machine", mine)]
    machines = _names(found)
    far = len(set(machines)) > 1
    fields = {"message_bytes": MESSAGE_BYTES, "timeout_s": FAR_TIMEOUT_S if far else TIMEOUT_S}
    settings = LinkSettings(device=device, **{**fields, **more})
    times = _take_part(rendezvous, settings, progress, machines)
    if times is None or not far:
        return times
    return msgspec.structs.replace(times, machines=machines)


def _names(found: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Of each process's machine; machines that call themselves the same are told apart."""
    nodes = {host: {node for other, node in found if other == host} for host, _ in found}
    return tuple(host if len(nodes[host]) == 1 else f"{host}-{node}" for host, node in found)


def main(arguments: list[str]) -> None:
    """Take part in a measurement, and end the process."""
    where, rendezvous = LinkDir(arguments[0]), join(int(arguments[1]), "process")

    def work() -> None:
        settings = msgspec.json.decode(where.settings.read_bytes(), type=LinkSettings)
        if rendezvous.rank:
            _take_part(rendezvous, settings)
            return
        with closing(GrowingFile(where.progress)) as file:

            def progress(*line: Any) -> None:
                file.append(msgspec.json.encode(line) + b"\n")
                file.flush()

            found = _take_part(rendezvous, settings, progress)
        write_bytes(where.times, msgspec.json.encode(found))

    rendezvous.run(work)


def _take_part(
    rendezvous: Rendezvous,
    settings: LinkSettings,
    progress: Progress = lambda *_: None,
    machines: Sequence[str] = (),
) -> LinkTimes | None:
    """`machines`: of each process; none: all are on one."""
    launched = rendezvous.launched
    torch.set_num_threads(1)
    device = device_of(settings.device, launched.local_rank, gpu_count())
    store = _join_group(settings.device, device, rendezvous)
    backend, by_size, channels = backend_of(settings.device), {}, None
    if settings.device == "cuda":
        near = [
            pair
            for pair in range(launched.world_size - 1)
            if not machines or machines[pair] == machines[pair + 1]
        ]
        by_size = link_routes(near, settings.message_bytes)
        rank = rendezvous.rank
        peers = [pair + (pair == rank) for pair in by_size if rank in (pair, pair + 1)]
        why_not = cuda_ipc.why_not(rank, peers, device, store, TIMEOUT_S)
        if by_size and not why_not:
            # As stages of one host have them.
            routes = [route for of_pair in by_size.values() for route in of_pair.values()]
            names = [f"process {other}" for other in range(launched.world_size)]
            ends = cuda_ipc.GpuMemory(device)
            channels = connect(rank, names, routes, store, timeout_s=TIMEOUT_S, ends=ends)
            channels.open(
                [
                    message_series(kind, [[route]], sys.maxsize)
                    for route in routes
                    for kind in (FORWARD, BACKWARD)
                    if route.ends(kind)[1] == rank
                ]
            )
            backend = IPC if len(near) == launched.world_size - 1 else IPC_AND_NCCL
    process = Process(rendezvous.rank, device, settings.timeout_s, by_size, channels)
    if rendezvous.rank == 0:
        return lead(process, launched.world_size, settings, progress, backend)
    process.follow()
    return None


def _join_group(kind: str, device: torch.device, rendezvous: Rendezvous) -> SignedStore:
    """Join the process group, and give its store. Raises PeerError when the others don't come in
    time."""
    rank, world_size = rendezvous.rank, rendezvous.launched.world_size
    use_interface(rendezvous.launched)
    backend = "gloo"
    if kind == "cuda":
        torch.cuda.set_device(device)
        # What the processes tell each other stays on the CPU.
        backend = f"cpu:gloo,cuda:{backend_of(kind)}"
    store = rendezvous.store.below("links")
    timeout = timedelta(seconds=LOADING_S + LOADING_S_PER_PROCESS * world_size)
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    except RuntimeError as error:
        raise PeerError(f"process {rank}: the workers didn't find each other: {error}") from error
    return store


if __name__ == "__main__":
    main(sys.argv[1:])
