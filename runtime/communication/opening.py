"""Opens a worker's channels and all-reduces for the transport that the workers agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...planner.systems.operations import BACKWARD, FORWARD
from ...profiles import plugins
from ..settings import TRANSPORTS
from . import cuda_ipc as ipc
from .all_reduce import (
    AllReducer,
    Groups,
    LocalAllReduce,
    Pool,
    ProcessAllReduce,
    rank_groups,
    reduce_groups,
)
from .channel import Channels, LocalChannels, Mailbox, PeerChannels, TwoKindsOfChannels
from .gloo import GlooChannels
from .nccl import NcclChannels
from .pinned_memory import CudaCopier, PinnedMemoryChannels
from .shared_memory import connect
from .transport import (
    GLOO,
    IPC,
    IPC_AND_NCCL,
    NCCL,
    PINNED,
    SHARED,
    all_places,
    between_processes,
    place_of,
    transport_of,
)

if TYPE_CHECKING:
    from ..prepare.messages import MessageRoute
    from ..prepare.prepared import Prepared
    from ..prepare.workers import Worker
    from ..records.status import Status
    from .signed_store import SignedStore


class WorkerTransport(NamedTuple):
    """What a worker's process has of the transport.

    Attributes:
        transport: how messages go, which may be another way than was agreed on.
        sums: over processes.
        shared: of each of its replicas.
        why_not: why it isn't the one that was agreed on.
    """

    transport: str
    channels: Channels
    sums: ProcessAllReduce
    shared: tuple[AllReducer, ...]
    why_not: str


def open_transport(
    prepared: Prepared,
    worker: Worker,
    device: torch.device,
    status: Status,
    store: SignedStore,
    exchange: Callable[[bytes], Sequence[bytes]],
    *,
    one_host: bool,
    copier: CudaCopier | None = None,
) -> WorkerTransport:
    """Agree on a transport and make a worker's channels and all-reduces: on all workers at once,
    after gloo's group.

    Args:
        store: of all workers.
        exchange: gives all workers' answers for one's own.
        one_host: all workers were started on this host.
        copier: of this worker's device, where messages go through pinned memory; by default, a
            GPU's.

    Raises PeerError, and as `all_places` and `between_processes`.
    """
    settings, rank = prepared.settings, worker.rank
    timeout_s = settings.timeout_s
    places = all_places(place_of(prepared.plan, worker, device), exchange)
    torchs = transport_of((place.host, place.gpu) for place in places)
    transport = between_processes(
        torchs, settings.transport, one_host=one_host, varying=prepared.varies
    )
    names = [other.name for other in prepared.workers]
    every = _groups(prepared)
    groups = rank_groups(prepared.replicas, every)
    every_route = (*prepared.distribution.routes, *prepared.distribution.evaluation_routes)
    routes = [route for route in every_route if not route.handed_over]
    near, why_not = routes, ""
    own_gpus = torchs == NCCL
    if transport in (IPC, IPC_AND_NCCL):
        hosts = [place.host for place in places]
        near = [route for route in routes if hosts[route.source.rank] == hosts[route.target.rank]]
        targets = {route.ends(kind)[1] for route in near for kind in (FORWARD, BACKWARD)}
        why_not = ipc.why_not(rank, sorted(targets - {rank}), device, store, timeout_s)
        if why_not:
            transport = NCCL if own_gpus else PINNED
    if copier is None and device.type == "cuda" and (transport == PINNED or not own_gpus):
        copier = CudaCopier(device)
    sums = ProcessAllReduce(
        groups, names, rank, timeout_s, status, copier=copier, nccl=device if own_gpus else None
    )
    own = store.below("transport")
    made = Connection(rank, names, routes, device, timeout_s, status, prepared.varies, own)
    channels = _channels(transport, made, near, copier, settings.transport)
    if len(worker.replicas) == 1:
        return WorkerTransport(transport, channels, sums, (sums,), why_not)
    here = [replica.number for replica in worker.replicas]
    pool = Pool(every, sums, here)
    shared = tuple(LocalAllReduce(number, pool) for number in here)
    # Between the stages of a worker nothing is sent.
    handed_over = [route for route in every_route if route.handed_over]
    several = TwoKindsOfChannels(LocalChannels(rank, Mailbox()), channels, handed_over)
    return WorkerTransport(transport, several, sums, shared, why_not)


class Connection(NamedTuple):
    """What channels of a worker are made of, also a plugin's.

    Attributes:
        names: of all workers, by rank.
        routes: of messages between workers.
        varying: mini-batches differ in shape.
        store: of all workers, for the transport alone: what one sets, others get, and wait for.
    """

    rank: int
    names: Sequence[str]
    routes: Sequence[MessageRoute]
    device: torch.device
    timeout_s: float
    status: Status
    varying: bool
    store: SignedStore


def _channels(
    transport: str,
    made: Connection,
    near: Sequence[MessageRoute],
    copier: CudaCopier | None,
    asked: str,
) -> Channels:
    """A worker's channels. `near`: routes on its host; `asked`: the setting."""
    rank, names, routes, device, timeout_s, status, varying, store = made
    connected = partial(connect, rank, names, store=store, timeout_s=timeout_s, status=status)
    if asked not in TRANSPORTS:
        own: Channels = plugins.make("transports", asked, made, gives=PeerChannels)
        return own
    if transport == PINNED:
        assert copier is not None
        host = GlooChannels(names, timeout_s, status, copier.room, varying=varying)
        return PinnedMemoryChannels(host, copier, timeout_s)
    if transport == SHARED:
        return connected(routes, varying=varying)
    if transport == GLOO:
        return GlooChannels(names, timeout_s, status, varying=varying)
    if transport == NCCL:
        return NcclChannels(rank, names, routes, device, timeout_s, status)
    channels = connected(near, ends=ipc.GpuMemory(device))
    if transport == IPC:
        return channels
    far = [route for route in routes if route not in near]
    others = NcclChannels(rank, names, far, device, timeout_s, status)
    return TwoKindsOfChannels(channels, others, near)


def _groups(prepared: Prepared) -> Groups:
    weighing = prepared.reached if prepared.model.loss.weighted else ()
    return reduce_groups(prepared.replicas, prepared.model.ties.copied, weighing)


def local_transport(prepared: Prepared) -> list[tuple[LocalChannels, LocalAllReduce]]:
    """Channels and all-reduces of all workers in one process, by the replicas' numbers. Those of
    one worker have the same channels."""
    mailbox, pool = Mailbox(), Pool(_groups(prepared))
    channels = [LocalChannels(worker.rank, mailbox) for worker in prepared.workers]
    return [
        (channels[replica.rank], LocalAllReduce(replica.number, pool))
        for replica in prepared.replicas
    ]
