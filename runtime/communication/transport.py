"""The channels and sums of a worker, by how messages go (`placement`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..prepare.prepare import Prepared
from ..prepare.workers import Worker
from ..records.status import Status
from .all_reduce import ProcessSums, sum_groups
from .channel import ProcessChannels
from .copying import Copier, CudaCopier
from .nccl import NcclChannels
from .pinned_memory import EndingChannels, StagedChannels
from .placement import NCCL, SHARED, STAGED
from .shared_memory import meet


def open_transport(
    transport: str,
    prepared: Prepared,
    worker: Worker,
    device: torch.device,
    status: Status,
    store: dist.Store,  # type: ignore[name-defined]
    copier: Copier | None = None,
) -> tuple[EndingChannels, ProcessSums]:
    """Make them, on all workers at the same time; the process group of gloo is there.

    Args:
        store: of all workers.
        copier: of this worker's device, where messages go through pinned memory; by default, a
            GPU's.

    Raises PeerError.
    """
    rank, timeout_s = worker.rank, prepared.settings.timeout_s
    names = [other.name for other in prepared.workers]
    groups = sum_groups(prepared.workers, prepared.tied)
    crossings = (*prepared.deal.crossings, *prepared.evaluation_crossings)
    if transport == NCCL:
        channels = NcclChannels(rank, names, crossings, device, timeout_s, status)
        return channels, ProcessSums(groups, names, rank, timeout_s, status, nccl=device)
    if transport == STAGED:
        copier = copier or CudaCopier(device)
        host = ProcessChannels(names, timeout_s, status, copier.room)
        sums = ProcessSums(groups, names, rank, timeout_s, status, copier=copier)
        return StagedChannels(host, copier, timeout_s), sums
    sums = ProcessSums(groups, names, rank, timeout_s, status)
    if transport == SHARED:
        return meet(rank, names, crossings, store, timeout_s=timeout_s, status=status), sums
    return ProcessChannels(names, timeout_s, status), sums
