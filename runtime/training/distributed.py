"""Distributed training: as one worker of many, each of them a process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ..communication.all_reduce import ALL_WORKERS, stage_group
from ..communication.channel import START_S, PeerError
from ..communication.opening import WorkerTransport, open_transport
from ..prepare.devices import own_device
from ..prepare.prepared import Prepared
from ..prepare.workers import Worker
from ..processes.environment import check_users, own_sockets
from ..processes.rendezvous import Rendezvous
from ..records.metrics import StageReport
from ..records.progress import Observer
from ..records.run_dir import RunDir
from ..records.status import StatusFile
from .runners import load_samples, stage_runner
from .train import train
from .warm_up import warm_up


def train_worker(
    prepared: Prepared,
    where: RunDir,
    rendezvous: Rendezvous,
    status: StatusFile,
    observer: Observer,
) -> list[StageReport]:
    """Train as one worker of many; gloo listens where its environment variable says.

    Args:
        observer: is told of progress, where this is the worker that reports.

    Raises:
        RunError: training failed here.
        UserError: there isn't memory enough.
        PeerError: another worker is gone, or didn't answer in time.
    """
    settings, launched = prepared.settings, rendezvous.launched
    worker = prepared.workers[launched.rank]
    device = own_device(prepared.plan, settings, launched.local_rank)
    bound = timedelta(seconds=max(settings.timeout_s, START_S))
    opened = _opened(prepared, worker, device, rendezvous, status, bound)
    runners = []
    for replica, shared in zip(worker.replicas, opened.shared, strict=True):
        runners.append(stage_runner(where, prepared, replica, opened.channels, shared, device))
        runners[-1].notes.status, messages = status, runners[-1].messages
        messages.transport, messages.not_by_ipc = opened.transport, opened.why_not
    status.begin("loading its data")
    load_samples(runners)
    if device.type == "cuda":
        status.begin("loading what its GPU needs")
        for runner in runners:
            warm_up(runner)
    with _with_others(prepared, worker, status, "waiting for the others to load"):
        dist.monitored_barrier(timeout=bound)

    def agree(yes: bool, group: str = ALL_WORKERS) -> bool:
        against = torch.tensor([float(not yes)], dtype=torch.float32)
        try:
            opened.sums.start(group, [against]).wait()
        except PeerError as error:
            raise PeerError(f"{worker.name}: {error}") from error
        return not against.item()

    # Those that share one of its stages share all of them.
    replicas_agree = partial(agree, group=stage_group(worker.stages[0]))
    reports = train(where, runners, observer, agree, replicas_agree)
    status.begin("the end", worker.name)
    agree(True)
    opened.channels.end()
    dist.destroy_process_group()
    return reports


def _opened(
    prepared: Prepared,
    worker: Worker,
    device: torch.device,
    rendezvous: Rendezvous,
    status: StatusFile,
    bound: timedelta,
) -> WorkerTransport:
    """The transport that all workers agree on, open. Raises PeerError; RunError where a process of
    somebody else has come among them."""
    one_host, store = rendezvous.launched.one_host, rendezvous.store.below("gloo")
    before, world_size = own_sockets(), len(prepared.workers)
    with _with_others(prepared, worker, status, "the workers didn't find each other"):
        dist.init_process_group(
            "gloo", store=store, rank=worker.rank, world_size=world_size, timeout=bound
        )
        exchange = partial(rendezvous.gather, "places")
        opened = open_transport(
            prepared, worker, device, status, store, exchange, one_host=one_host
        )
    if one_host:
        check_users(worker.name, before)
    return opened


@contextlib.contextmanager
def _with_others(
    prepared: Prepared, worker: Worker, status: StatusFile, failing: str
) -> Iterator[None]:
    """Do what this worker waits for all others in. Raises PeerError where torch's fails."""
    status.begin("meeting the others")
    status.wait([other.rank for other in prepared.workers if other != worker])
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"{worker.name}: {failing}: {error}") from error
    status.go_on()
