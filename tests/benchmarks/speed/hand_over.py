"""How fast messages go between two processes that have one GPU.

    python -m timeprest.tests.benchmarks.speed.hand_over

Prints, for each way and size, bytes a second of a stream of messages (as forwards go), and the time
of one there and back.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from timeprest.planner.systems.operations import BACKWARD, FORWARD
from timeprest.profiles.tracing.shapes import ValueSpec
from timeprest.runtime.communication import cuda_ipc
from timeprest.runtime.communication.channel import Channels
from timeprest.runtime.communication.gloo import GlooChannels
from timeprest.runtime.communication.pinned_memory import CudaCopier, PinnedMemoryChannels
from timeprest.runtime.communication.shared_memory import connect
from timeprest.runtime.communication.signed_store import Secret, SignedStore
from timeprest.runtime.prepare.messages import MessageRoute, message_series
from timeprest.runtime.prepare.workers import Replica
from torch.multiprocessing.spawn import spawn

SIZES = (2**14, 2**18, 2**20, 2**23, 2**26)
COUNT = 40
BOUND_S = 30.0


def route(nbytes: int) -> MessageRoute:
    """A tensor of so many bytes from worker 0 to 1."""
    spec = ValueSpec("t", "tensor", (nbytes // 4,), torch.float32, True)
    # Receives that were posted for other sizes have other numbers.
    return MessageRoute(SIZES.index(nbytes), spec, Replica(0, 0, 0), Replica(1, 1, 1), (0,), 1)


def channels(way: str, c: MessageRoute, rank: int, store: SignedStore) -> Channels:
    """Of this worker."""
    names, device = ("stage 0", "stage 1"), torch.device("cuda", 0)
    if way == "ipc":
        prefixed = store.below(f"ipc {c.nbytes(FORWARD)}")
        why = cuda_ipc.why_not(rank, [1 - rank], device, prefixed, BOUND_S)
        if why:
            raise RuntimeError(why)
        ends = cuda_ipc.GpuMemory(device)
        return connect(rank, names, [c], prefixed, timeout_s=BOUND_S, ends=ends)
    copier = CudaCopier(device)
    return PinnedMemoryChannels(GlooChannels(names, BOUND_S, None, copier.room), copier, BOUND_S)


def measure(way: str, nbytes: int, rank: int, store: SignedStore) -> tuple[float, float]:
    """Seconds of a message in a stream, and of one there and back."""
    c = route(nbytes)
    own = channels(way, c, rank, store)
    here = torch.arange(nbytes // 4, dtype=torch.float32, device="cuda")
    wanted = [here + k for k in range(3)]
    own.open([message_series((FORWARD, BACKWARD)[not rank], [[c]], 10**6)])

    def stream(count: int) -> float:
        torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        for k in range(count):
            if rank == 0:
                own.send(c, FORWARD, wanted[k % 3])
            else:
                found = own.receive(c, FORWARD)
        if rank == 0:
            own.close()
        torch.cuda.synchronize()
        dist.barrier()
        seconds = (time.perf_counter() - begin) / count
        if rank and not torch.equal(found, wanted[(count - 1) % 3]):
            raise RuntimeError("what came isn't what was sent")
        return seconds

    def there_and_back(count: int) -> float:
        begin = time.perf_counter()
        for k in range(count):
            if rank == 0:
                own.send(c, FORWARD, wanted[k % 3])
                own.receive(c, BACKWARD)
            else:
                own.send(c, BACKWARD, own.receive(c, FORWARD)[None])
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    stream(4)
    found = stream(COUNT), there_and_back(COUNT)
    own.close()
    dist.barrier()
    own.end()
    return found


def work(rank: int, folder: str) -> None:
    """One process."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.cuda.set_device(0)
    dist.init_process_group(
        "gloo", f"file://{folder}/meet", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    store = SignedStore(dist.FileStore(f"{folder}/store", 2), Secret(b"ours"))  # type: ignore[attr-defined]
    try:
        _measure_all(rank, store)
    except BaseException:
        traceback.print_exc()
        raise
    dist.destroy_process_group()


def _measure_all(rank: int, store: SignedStore) -> None:
    for nbytes in SIZES:
        line = [f"{nbytes / 2**20:9.3f} MiB"]
        for way in ("ipc", "pinned"):
            each_s, both_s = measure(way, nbytes, rank, store)
            line.append(
                f"{way} {nbytes / each_s / 1e9:7.2f} GB/s, there and back {both_s * 1e6:7.0f} µs"
            )
        if rank == 0:
            print("   ".join(line), flush=True)


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("there is no GPU")
    with tempfile.TemporaryDirectory() as made:
        spawn(work, (made,), nprocs=2)
