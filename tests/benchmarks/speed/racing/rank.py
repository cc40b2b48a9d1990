"""A process of a rival: ``python -m timeprest.tests.benchmarks.speed.racing.rank SPEC STORE OUT``.

RANK says which. It trains and writes down what it measured of itself.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from timeprest.profiles.measuring.process_settings import keep_freed_memory
from timeprest.runtime.prepare.clock import clock_of

from ..cuts import child_times
from ..tasks import ALL_RACES
from .steps import Step, data_parallel, deepspeed_pipeline, plain, torch_pipeline


class RankSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank is to do.

    Attributes:
        kind: as in `contestants`; or "times": how long the model's children take.
        warm: mini-batches before the clock runs.
        timed: mini-batches after that.
        address: to meet at; None: the store's file.
        device: of the network between the ranks.
        computes_on: "cpu" or "cuda"; there all ranks share the first GPU.
        keep_memory: freed memory stays with the process, as in the product's own.
        fused: optimizers step with torch's fused kernel, as the product's do.
        longest_s: after which a rank that is stuck writes down where, and ends.
    """

    model: str
    kind: str
    processes: int = 1
    threads: int = 1
    schedule: str = ""
    micro_batches: int = 1
    cuts: tuple[int, ...] = ()
    warm: int = 2
    timed: int = 4
    address: str | None = None
    device: str = "lo"
    computes_on: str = "cpu"
    keep_memory: bool = True
    fused: bool = False
    longest_s: float = 120.0


class RankFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank measured; times of a mini-batch."""

    period_s: float = 0.0
    processor_s: float = 0.0
    rss_bytes: int = 0
    sent_bytes: float | None = None
    """Over the spec's device: by all ranks, where it is the loopback one."""
    losses: tuple[float, ...] = ()
    children_s: tuple[float, ...] = ()
    steps_s: tuple[float, ...] = ()


def make_step(spec: RankSpec) -> Step:
    """The rival's own way to train."""
    race = ALL_RACES[spec.model]
    if spec.fused:
        race = replace(race, fused=True)
    device = torch.device(spec.computes_on)
    if spec.kind == "plain":
        return plain(race, spec.micro_batches, device)
    if spec.kind == "ddp":
        return data_parallel(race)
    if spec.kind == "tdp":
        return torch_pipeline(race, spec.schedule, spec.micro_batches, spec.cuts, device)
    return deepspeed_pipeline(race, spec.micro_batches, spec.cuts)


def measured(spec: RankSpec) -> RankFigures:
    """Train for a while."""
    if spec.kind == "times":
        race = ALL_RACES[spec.model]
        times, steps = child_times(
            race, race.mini_batch // spec.micro_batches, torch.device(spec.computes_on)
        )
        return RankFigures(children_s=tuple(times), steps_s=tuple(steps))
    step, clock = make_step(spec), clock_of(torch.device(spec.computes_on)).now
    losses = [step(k) for k in range(spec.warm)]
    sent, processor, begin = _sent(spec.device), time.process_time(), clock()
    losses += [step(k) for k in range(spec.warm, spec.warm + spec.timed)]
    seconds, used = clock() - begin, time.process_time() - processor
    sent_now = _sent(spec.device)
    return RankFigures(
        period_s=seconds / spec.timed,
        processor_s=used / spec.timed,
        rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        sent_bytes=None if sent is None or sent_now is None else (sent_now - sent) / spec.timed,
        losses=tuple(loss for loss in losses if loss is not None),
    )


def _sent(device: str) -> int | None:
    path = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
    return int(path.read_text()) if path.exists() else None


def _leave_stuck() -> None:
    """Say where all threads are, and leave. Of threads that go on meanwhile, as beside
    `dump_traceback_later`, a stack that is read may be gone."""
    print("Timeout (", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(1)


def main(spec_text: str, store: str, out: str) -> None:
    """Take part in the race, and leave at once when it is over."""
    spec = msgspec.json.decode(spec_text, type=RankSpec)
    rank = int(os.environ["RANK"])
    over = threading.Timer(spec.longest_s, _leave_stuck)
    over.daemon = True
    over.start()
    if spec.keep_memory:
        keep_freed_memory()
    torch.set_num_threads(spec.threads)
    if spec.processes > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = spec.device
        where = f"tcp://{spec.address}" if spec.address else f"file://{store}"
        dist.init_process_group("gloo", where, rank=rank, world_size=spec.processes)
    figures = measured(spec)
    path = Path(f"{out}.{rank}")
    path.write_bytes(msgspec.json.encode(figures))
    if spec.processes > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
