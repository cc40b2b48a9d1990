"""A worker process: ``python -m timeprest.runtime.training.worker RUN_DIR LAUNCHER``.

That is the process which the launcher of a local run starts (`processes.launcher`). Under torchrun
or srun, `runtime.run` calls `train_worker` in the process that they started. Which stages' replicas
a rank runs, `workers_of` says.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ...profiles.errors import RunError
from ...profiles.measuring.process_settings import keep_freed_memory
from ...profiles.tasks.objects import give_bytes
from ..communication.all_reduce import ALL_WORKERS, stage_group
from ..communication.channel import START_S, PeerError
from ..communication.opening import WorkerTransport, open_transport
from ..communication.transport import (
    all_places,
    between_processes,
    place_of,
    transport_of,
)
from ..prepare.devices import own_device
from ..prepare.prepare import Prepared, prepare
from ..prepare.workers import Worker, workers_of
from ..processes import watchdog
from ..processes.environment import other_users, own_sockets, use_interface
from ..processes.locks import as_worker
from ..processes.rendezvous import ENDING_S, Rendezvous, join
from ..processes.store import LaunchingProcess
from ..records.progress import Observer
from ..records.run_dir import RunDir
from ..records.status import StatusFile
from .loop import load_samples, stage_runner, train
from .warm_up import warm_up

if TYPE_CHECKING:
    from ..records.metrics import StageReport
    from ..settings import RunSettings


def main(arguments: list[str]) -> None:
    """Run one worker of a local run, and end the process."""
    run_dir, rendezvous = RunDir(arguments[0]), join(int(arguments[1]))

    def work() -> None:
        plan, settings = run_dir.read()
        launching = LaunchingProcess(rendezvous.store, rendezvous.rank, settings.timeout_s)
        task = launching.task()
        if task is not None:
            give_bytes(settings.task, task)
        status = status_for(run_dir, workers_of(plan)[rendezvous.rank], settings, rendezvous)
        keep_freed_memory()
        use_interface(rendezvous.launched)
        with as_worker(run_dir.path):
            observer = launching if launching.is_asked() else Observer()
            train_worker(prepare(plan, settings), run_dir, rendezvous, status, observer)

    rendezvous.run(work)


def status_for(
    where: RunDir, worker: Worker, settings: RunSettings, rendezvous: Rendezvous
) -> StatusFile:
    """The status of this worker, which the others are told from now on. Raises FileError."""
    status = StatusFile(where.status(worker), worker.rank, worker.name)
    # Who waits for a message finds out first.
    rendezvous.begin(lambda: status.now, where.statuses, settings.timeout_s + ENDING_S)
    return status


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
    if not launched.one_host:
        watchdog.watch(settings.timeout_s + watchdog.SLACK_S)
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
        place = place_of(prepared.plan, worker, device)
        places = all_places(place, partial(rendezvous.gather, "places"))
        transport = between_processes(
            transport_of((each.host, each.gpu) for each in places),
            prepared.settings.transport,
            one_host=one_host,
            varying=prepared.varies,
        )
        opened = open_transport(transport, places, prepared, worker, device, status, store)
    if one_host and (users := other_users(before)):
        raise RunError(
            f"{worker.name}: a process of another user (number {users[0]}) has connected to it as "
            "if it were a worker; nothing has been trained"
        )
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


if __name__ == "__main__":
    main(sys.argv[1:])
