"""What a dry run finds: workers, hosts, GPUs, cuts, and what a run would fail for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from ...profiles.units import format_bytes
from ..communication.transport import (
    WorkerPlace,
    between_processes,
    by_gpu,
    free_bytes,
    place_of,
    transport_of,
)
from ..prepare.devices import CPU, turns_warning, usable_cores
from ..prepare.prepared import Prepared
from ..processes.environment import Launched
from ..records.run_dir import RunDir
from ..stage.optimizer import hook_warnings


class WorkerCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A worker, and the memory that it should take."""

    rank: int
    name: str
    device: str
    """The plan's."""
    computes_on: str
    """Torch's name for it: "cpu", "cuda:0"."""
    host: str
    planned_bytes: int
    limit_bytes: int | None
    """The plan's, of its device."""


class HostCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A host with some of the workers."""

    host: str
    address: str
    planned_bytes: int
    """Of all its workers on the CPU: weights, activations and messages; not the libraries."""
    free_bytes: int
    run_dir: str


class GpuCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU with some of the workers."""

    host: str
    gpu: str
    planned_bytes: int
    """Of all its workers; each process takes some hundred MB besides."""
    free_bytes: int


class CutCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that crosses a cut."""

    tensor: str
    source: str
    target: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a dry run found."""

    variant: str
    task: str
    fingerprint: str
    mini_batches: int
    world_size: int
    meets_at: str
    """Where the workers meet; empty: they are started on this host alone."""
    workers: tuple[WorkerCheck, ...]
    transport: str
    """How messages will go: gloo, nccl, or gloo through pinned memory."""
    hosts: tuple[HostCheck, ...]
    gpus: tuple[GpuCheck, ...]
    cuts: tuple[CutCheck, ...]
    problems: tuple[str, ...]
    """For which a run would fail."""
    warnings: tuple[str, ...] = ()
    """For which it would be slower than predicted, or train otherwise than was meant."""


class PlaceAndHost(WorkerPlace, frozen=True, kw_only=True):
    """A worker's place, and what its process sees of the host."""

    address: str
    cores: int
    host_free_bytes: int
    run_dir: str


def place_and_host(
    prepared: Prepared, rank: int, device: torch.device, address: str, run_dir: RunDir
) -> PlaceAndHost:
    """Of a worker of this host, at this address."""
    # A GPU that is asked takes some of the host's.
    free = free_bytes(CPU)
    return PlaceAndHost(
        **msgspec.structs.asdict(place_of(prepared.plan, prepared.workers[rank], device)),
        address=address,
        cores=usable_cores(),
        host_free_bytes=free,
        run_dir=str(run_dir.path.absolute()),
    )


def findings(
    prepared: Prepared,
    places: Sequence[PlaceAndHost],
    launched: Launched | None,
    warnings: Sequence[str],
) -> DryRun:
    """Of all workers' places, by rank.

    Args:
        launched: how this worker was started; None: all of them will be started on this host.
        warnings: of what was tried.
    """
    plan, settings = prepared.plan, prepared.settings
    workers = tuple(_worker_check(prepared, place) for place in places)
    hosts, gpus = _host_checks(places), gpu_checks(places)
    return DryRun(
        variant=plan.variant,
        task=settings.task,
        fingerprint=plan.profile.fingerprint,
        mini_batches=sum(segment.mini_batches for segment in prepared.segments),
        world_size=len(workers),
        meets_at="" if launched is None else f"{launched.address}:{launched.port}",
        transport=between_processes(
            transport_of((place.host, place.gpu) for place in places),
            settings.transport,
            one_host=launched is None or launched.one_host,
            varying=prepared.varies,
        ),
        gpus=gpus,
        workers=workers,
        hosts=hosts,
        cuts=tuple(
            CutCheck(
                tensor=c.spec.name,
                source=c.source.name,
                target=c.target.name,
                shape=c.spec.shape,
                dtype=str(c.spec.dtype).removeprefix("torch."),
                bytes=c.spec.nbytes,
            )
            for c in prepared.distribution.routes
        ),
        problems=tuple(_problems(workers, hosts, gpus)),
        warnings=(*warnings, *_warnings(prepared, places)),
    )


def _worker_check(prepared: Prepared, place: PlaceAndHost) -> WorkerCheck:
    first = prepared.workers[place.rank].replicas[0]
    devices = prepared.plan.stages[first.stage].devices
    device = prepared.plan.cluster.devices[devices[first.index]]
    return WorkerCheck(
        rank=place.rank,
        name=place.name,
        device=device.name,
        computes_on=place.device,
        host=place.host,
        planned_bytes=place.planned_bytes,
        limit_bytes=device.memory_bytes,
    )


def _host_checks(places: Sequence[PlaceAndHost]) -> tuple[HostCheck, ...]:
    return tuple(
        HostCheck(
            host=host,
            address=there[0].address,
            planned_bytes=sum(place.planned_bytes for place in there if not place.gpu),
            free_bytes=there[0].host_free_bytes,
            run_dir=there[0].run_dir,
        )
        for host, there in _by_host(places).items()
    )


def _warnings(prepared: Prepared, places: Sequence[PlaceAndHost]) -> Iterator[str]:
    yield from hook_warnings(prepared)
    yield from prepared.cautions
    for host, there in _by_host(places).items():
        gpus = [place.gpu for place in there if place.gpu]
        threads, workers = prepared.settings.threads, len(there) - len(gpus)
        for turns in (
            turns_warning(workers, there[0].cores, "core", threads),
            turns_warning(len(gpus), len(set(gpus)), "GPU"),
        ):
            if turns is not None:
                yield f"{host}: {turns}"


def _by_host(places: Sequence[PlaceAndHost]) -> dict[str, list[PlaceAndHost]]:
    found: dict[str, list[PlaceAndHost]] = {}
    for place in places:
        found.setdefault(place.host, []).append(place)
    return found


def gpu_checks(places: Sequence[WorkerPlace]) -> tuple[GpuCheck, ...]:
    """Each GPU once, with what all its workers need."""
    return tuple(
        GpuCheck(
            host=there[0].host,
            gpu=there[0].device,
            planned_bytes=sum(place.planned_bytes for place in there),
            free_bytes=min(place.free_bytes for place in there),
        )
        for there in by_gpu(places)
    )


def _problems(
    workers: Sequence[WorkerCheck], hosts: Sequence[HostCheck], gpus: Sequence[GpuCheck]
) -> list[str]:
    places: list[tuple[str, GpuCheck | HostCheck]] = [
        *((f"{gpu.gpu} of {gpu.host}", gpu) for gpu in gpus),
        *((host.host, host) for host in hosts),
    ]
    problems = [
        f"{where}: its workers need {format_bytes(place.planned_bytes)}, and "
        f"{format_bytes(place.free_bytes)} are free"
        for where, place in places
        if place.planned_bytes > place.free_bytes
    ]
    problems += [
        f"{worker.name}: needs {format_bytes(worker.planned_bytes)}, and the plan's device "
        f"{worker.device} has {format_bytes(worker.limit_bytes)}"
        for worker in workers
        if worker.limit_bytes is not None and worker.planned_bytes > worker.limit_bytes
    ]
    return problems
