"""Runners of this process's replicas: made, acquainted with each other, their data loaded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...profiles.errors import RunError
from ..checkpoint.logs import rewind_logs
from ..communication.all_reduce import AllReducer
from ..communication.channel import Channels
from ..communication.opening import local_transport
from ..communication.posts import Posts
from ..prepare.devices import own_device
from ..prepare.messages import MessageSeries
from ..prepare.prepared import Prepared, with_own_weights
from ..prepare.workers import Replica
from ..records.operation_log import StageEpochFile, operation_log
from ..records.run_dir import RunDir
from ..stage.memory import out_of_memory
from ..stage.runner import StageRunner


def stage_runner(
    where: RunDir,
    prepared: Prepared,
    replica: Replica,
    channels: Channels,
    all_reduce: AllReducer,
    device: torch.device,
) -> StageRunner:
    """A replica's runner. Its logs go on where they were at the checkpoint.

    Raises FileError; RunError where there isn't memory for its weights.
    """
    settings = prepared.settings
    rewind_logs(where, settings, replica)
    log = operation_log(where, replica, settings)
    own = StageEpochFile(where.stage_metrics(replica), more=settings.resumed)
    try:
        return StageRunner(prepared, replica.number, channels, all_reduce, log, own, device=device)
    except (RuntimeError, MemoryError) as error:
        line = out_of_memory(error, prepared.plan, replica, device)
        if line is None:
            raise
        raise RunError(f"{replica.name}, at the start: {line}") from error


def local_runners(prepared: Prepared, where: RunDir | None = None) -> list[StageRunner]:
    """Runners of all replicas, for one process that does the work of all workers.

    Args:
        where: the run directory with their logs; None: they leave nothing.

    Raises as `stage_runner`.
    """
    found, device = [], own_device(prepared.plan, prepared.settings, 0)
    for replica, own, (channels, all_reduce) in zip(
        prepared.replicas, with_own_weights(prepared), local_transport(prepared), strict=True
    ):
        if where is None:
            runner = StageRunner(own, replica.number, channels, all_reduce, device=device)
        else:
            runner = stage_runner(where, own, replica, channels, all_reduce, device)
        found.append(runner)
    return found


def load_samples(runners: Sequence[StageRunner]) -> None:
    """Have the runners of this process know those of the same worker (`introduce`), and load what
    data they need."""
    introduce(runners)
    before = torch.get_rng_state()
    for runner in runners:
        # As in processes of their own, where each has drawn as much before.
        torch.set_rng_state(before)
        runner.data.load()


def introduce(runners: Sequence[StageRunner]) -> None:
    """Have runners know those of the same worker, before anything is run."""
    for runner, others in zip(runners, beside(runners), strict=True):
        if others:
            runner.stand_beside(others)


def beside(runners: Sequence[StageRunner]) -> list[list[StageRunner]]:
    """For each runner, the others of its worker."""
    return [
        [r for r in runners if r is not runner and r.replica.rank == runner.replica.rank]
        for runner in runners
    ]


def announce(
    runners: Sequence[StageRunner], series: Sequence[Sequence[MessageSeries]], posted: Posts
) -> None:
    """Tell each worker's channels of all messages to come. `series`: of each runner."""
    by_rank: dict[int, list[MessageSeries]] = {}
    for runner, mine in zip(runners, series, strict=True):
        by_rank.setdefault(runner.replica.rank, []).extend(mine)
    for runner in runners:
        upcoming = by_rank.pop(runner.replica.rank, None)
        if upcoming is not None:
            runner.channels.open(upcoming, posted)
