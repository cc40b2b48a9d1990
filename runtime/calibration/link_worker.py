"""A process that measures links, with others like it.

``python -m timeprest.runtime.calibration.link_worker FOLDER LAUNCHER``, or one of those that
torchrun or srun have started (`measure_here`).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean, median
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from ...planner.cluster.link_fit import LinkPoint, error_of_median
from ...planner.systems.operations import BACKWARD, FORWARD
from ...profiles.errors import UserError
from ...profiles.files import write_bytes
from ...profiles.units import format_bytes
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
    ALL_REDUCE,
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
    link_routes,
)

# Longest wait for the others to start. All load torch at once, on the cores that there are.
LOADING_S = 30.0
LOADING_S_PER_PROCESS = 2.0

BURST_S = 0.01
MAX_REPETITIONS = 50
# Of the few bursts that were possible when time is out; and before an error is trusted.
MIN_BURSTS = 7
TRUSTED_BURSTS = 15
# Of messages that take so many times the cap together, over slow links.
FEWEST_BURSTS = 3
FAR_BEYOND = 5
PROGRESS_S = 0.1


@dataclass
class TimedOperation:
    """An operation at one size, and its measured times.

    Attributes:
        pair: p for messages between processes p and p + 1, or ALL_REDUCE.
        message_bytes: size of the message, or of the tensor that is summed.
        cap_s: time that may be spent on it.
        medians: of the bursts, in seconds.
        count: repetitions so far.
        spent_s: time so far.
    """

    pair: int
    message_bytes: int
    cap_s: float
    medians: list[float] = field(default_factory=list)
    count: int = 0
    spent_s: float = 0.0

    def burst(self, process: Process) -> None:
        """Have another burst made, and note it."""
        # The first one is a single repetition: how long they take isn't known.
        expected_s = median(self.medians) if self.medians else BURST_S
        repetitions = max(1, min(MAX_REPETITIONS, int(BURST_S / max(expected_s, 1e-9))))
        begin = time.perf_counter()
        self.medians.append(median(process.lead(self.pair, self.message_bytes, repetitions)))
        self.spent_s += time.perf_counter() - begin
        self.count += repetitions

    def share_done(self, precision: float) -> float:
        """From 0 to 1, which is: precise enough, or out of time."""
        bursts = len(self.medians)
        precise = bursts >= TRUSTED_BURSTS and error_of_median(self.medians) <= precision
        out_of_time = bursts >= MIN_BURSTS and self.spent_s >= self.cap_s
        too_slow = bursts >= FEWEST_BURSTS and self.spent_s >= FAR_BEYOND * self.cap_s
        if precise or out_of_time or too_slow:
            return 1.0
        return min(0.99, max(bursts / TRUSTED_BURSTS, self.spent_s / self.cap_s))

    def point(self) -> LinkPoint:
        """What was measured, as a link file has it."""
        return LinkPoint(
            message_bytes=self.message_bytes,
            seconds=median(self.medians),
            error=error_of_median(self.medians),
            repetitions=self.count,
        )


def lead(
    process: Process,
    processes: int,
    settings: LinkSettings,
    progress: Progress,
    backend: str,
) -> LinkTimes:
    """Measure everything; for process 0. `backend`: what messages go by."""
    pairs = range(processes - 1)
    shares = {pair: settings.cap_s / len(pairs) for pair in pairs} | {ALL_REDUCE: settings.cap_s}
    cells = [
        TimedOperation(pair, size, cap_s)
        for size in settings.message_bytes
        for pair, cap_s in shares.items()
    ]
    for cell in cells:
        # Connect, allocate and fill caches; the times don't count.
        for _ in range(2):
            process.lead(cell.pair, cell.message_bytes, 1)
    # Burst by burst, until no cell needs more. A cell that has enough is left out.
    shown, left = 0.0, cells
    while left:
        for cell in left:
            if time.monotonic() - shown > PROGRESS_S:
                shown = time.monotonic()
                done = fmean(c.share_done(settings.precision) for c in cells)
                progress(format_bytes(cell.message_bytes), int(1000 * done), 1000)
            cell.burst(process)
        left = [cell for cell in left if cell.share_done(settings.precision) < 1]
    points = {pair: tuple(c.point() for c in cells if c.pair == pair) for pair in shares}
    found = LinkTimes(
        processes=processes,
        device=settings.device,
        backend=backend,
        pairs=tuple(points[pair] for pair in pairs),
        all_reduce=points[ALL_REDUCE],
    )
    process.end()
    return found


def measure_here(
    rendezvous: Rendezvous, device: str, progress: Progress, **more: Any
) -> LinkTimes | None:
    """Measure the links between the processes that torchrun or srun have started.

    Args:
        progress: is told how far it is, in process 0.
        more: other fields of `LinkSettings`.

    Returns what was measured in process 0; None in the others.

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
