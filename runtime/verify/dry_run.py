"""The dry run: everything that can be known before training, on every host; nothing is written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.plan import Plan
from ...profiles.errors import RunError, one_line
from ...profiles.files import check_writable
from ...profiles.target import resolve
from ...profiles.tasks.hooks import before_training, in_one_line
from ...profiles.tasks.shapes import at_profiled
from ...profiles.tracing.call import unchanged, without_data
from ...profiles.tracing.pieces import encode
from ...profiles.tracing.shapes import ValueSpec
from ...profiles.units import format_bytes
from ..checkpoint.start import check_settings
from ..checkpoint.trial import try_optimizers, try_state
from ..communication.transport import (
    WorkerPlace,
    between_processes,
    by_gpu,
    free_bytes,
    place_of,
    transport_of,
)
from ..prepare.devices import CPU, device_of, devices_here, forward_context
from ..prepare.prepare import Prepared, prepare
from ..prepare.tracing import is_small
from ..processes.environment import use_interface
from ..processes.rendezvous import Rendezvous
from ..records.metric_logs import check_logs_at_hand
from ..records.run_dir import RunDir
from ..settings import RunSettings
from ..stage.optimizer import check_updates, hook_warnings
from ..weights.delays import check_delays
from .hooks import try_in_parts, try_training
from .trial import NOT_TRIED, try_plan

# Whether the workers of a host compute at once, or take turns on its cores ----------------------


def usable_cores() -> int:
    """Cores that this process may compute on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def turns_warning(workers: int, count: int, what: str, threads: int = 1) -> str | None:
    """A warning where a host's workers take turns, which plans don't know; None: they don't.

    Args:
        workers: that compute there.
        count: cores of the host that may be used, or its GPUs.
        what: "core" or "GPU".
        threads: of each worker.
    """
    at_once = max(count // threads, 1)
    if workers <= at_once:
        return None
    return (
        f"{workers} processes take turns on {count} {what if count == 1 else f'{what}s'}: slower "
        f"than planned; tp-plan solve --devices {at_once} --stages-per-device auto plans for it"
    )


# Findings ---------------------------------------------------------------------------------------


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


class _PlaceAndHost(WorkerPlace, frozen=True, kw_only=True):
    """A worker's place, and what its process sees of the host."""

    address: str
    cores: int
    host_free_bytes: int
    run_dir: str


def dry_run(
    plan: Plan, settings: RunSettings, run_dir: str, rendezvous: Rendezvous | None = None
) -> DryRun | None:
    """Check all that a run needs, and send a micro-batch's shapes through every cut.

    Under torchrun or srun every host looks at itself, and a message goes over every cut.

    Returns:
        The findings; None on workers that aren't the one that reports.

    Raises: as `run`, for what makes a run impossible; TargetError where hooks or stages fail.
    """
    settings = check_settings(settings)
    if rendezvous is None:
        check_logs_at_hand(settings)
    check_delays(plan, settings)
    kind, gpus = devices_here(plan, settings)
    where = RunDir(run_dir)
    where.check_new()
    check_writable(where.path / "plan.json")
    address = "127.0.0.1" if rendezvous is None else use_interface(rendezvous.launched)
    with before_training():
        prepared = prepare(plan, settings)
        check_updates(prepared)
        kept = [*try_optimizers(prepared), *try_state(prepared)]
        result, target = check_shapes(prepared)
        if is_small(prepared.plan):
            warnings = try_training(prepared)
            if rendezvous is None or prepared.workers[rendezvous.rank].is_reporter:
                warnings += try_plan(prepared)
        else:
            every_stage = range(len(plan.stages))
            only = every_stage if rendezvous is None else prepared.workers[rendezvous.rank].stages
            warnings = try_in_parts(prepared, result, target, only)
            warnings.append(f"{settings.task}: {NOT_TRIED}: it is too large for a look")
        warnings = [*warnings, *kept]
    free = free_bytes(CPU)

    def one(rank: int, local_rank: int) -> _PlaceAndHost:
        place = place_of(plan, prepared.workers[rank], device_of(kind, local_rank, gpus))
        return _PlaceAndHost(
            **msgspec.structs.asdict(place),
            address=address,
            cores=usable_cores(),
            host_free_bytes=free,
            run_dir=str(where.path.absolute()),
        )

    if rendezvous is None:
        every = [one(rank, rank) for rank in range(len(prepared.workers))]
        return _findings(prepared, every, "", more=warnings)
    mine = one(rendezvous.rank, rendezvous.launched.local_rank)
    texts = rendezvous.gather("dry run", msgspec.json.encode(mine))
    _send_over_cuts(prepared, rendezvous)
    if not prepared.workers[rendezvous.rank].is_reporter:
        return None
    found = [msgspec.json.decode(text, type=_PlaceAndHost) for text in texts]
    launched = rendezvous.launched
    meets_at = f"{launched.address}:{launched.port}"
    return _findings(prepared, found, meets_at, one_host=launched.one_host, more=warnings)


def check_shapes(prepared: Prepared) -> tuple[Any, Any]:
    """Run every stage's forward for one micro-batch, on what the cuts before it promise.

    Large models run on fake tensors.

    Returns the model's result, and the target of its micro-batch.

    Raises RunError where a stage makes something else.
    """
    target = resolve(prepared.settings.task)
    fake, result, wanted = not is_small(prepared.plan), None, None
    for replica in prepared.replicas:
        if not replica.leads:
            continue
        s = replica.stage
        call, wanted = target.call(prepared.distribution.shares[replica.number].samples)
        inputs = at_profiled(call, prepared.plan.profile.varying).tensors
        named = dict(zip(prepared.model.inputs, inputs, strict=False))
        specs = prepared.model.stages[s].specs
        arguments = [
            named[name] if name in named else _value_of(specs[name])
            for name in prepared.model.pieces[s].inputs
        ]
        module = prepared.model.pieces[s].module
        looking = without_data(module) if fake else unchanged(module)
        failing = in_one_line(f"{replica.name}: its forward failed", RunError)
        precision = forward_context(prepared.model.autocast)
        with failing, torch.no_grad(), looking as mode, precision:
            if mode is not None:
                arguments = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments]
            made: Sequence[Any] = module(*arguments)
        for name, value in zip(prepared.model.pieces[s].outputs, made, strict=False):
            tensor, spec = encode(value, name), specs[name]
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise RunError(
                    f"{replica.name} makes {name!r} as {tuple(tensor.shape)} {tensor.dtype}, and "
                    f"what follows takes {spec.shape} {spec.dtype}"
                )
        result = made[-1] if prepared.model.pieces[s].has_result else None
    return result, wanted


def _value_of(spec: ValueSpec) -> Any:
    if spec.kind == "number":
        return spec.numbers[0]
    if spec.kind == "size":
        return torch.Size([int(n) for n in spec.numbers])
    return torch.zeros(spec.shape, dtype=spec.dtype)


def _send_over_cuts(prepared: Prepared, rendezvous: Rendezvous) -> None:
    """One message over each route, so that a firewall between two hosts shows now."""
    bound = timedelta(seconds=prepared.settings.timeout_s)
    rank = rendezvous.rank
    store = rendezvous.store.below("gloo")
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=len(prepared.workers), timeout=bound
        )
        works = []
        for route in prepared.distribution.routes:
            if route.handed_over:
                continue
            message = torch.zeros(route.spec.shape, dtype=route.spec.dtype)
            if route.source.rank == rank:
                works.append(dist.isend(message, route.target.rank, tag=route.number))
            elif route.target.rank == rank:
                works.append(dist.irecv(message, route.source.rank, tag=route.number))
        for work in works:
            assert work is not None
            work.wait(bound)
        dist.barrier()
    except RuntimeError as error:
        reason = one_line(error)[:200]
        raise RunError(f"rank {rank}: no message came over the network: {reason}") from error
    dist.destroy_process_group()


def _findings(
    prepared: Prepared,
    found: Sequence[_PlaceAndHost],
    meets_at: str,
    *,
    one_host: bool = True,
    more: Sequence[str] = (),
) -> DryRun:
    """`found`: what each worker says of its place, by rank; `more`: warnings of the trial."""
    plan = prepared.plan
    devices = plan.cluster.devices
    workers = []
    for worker, mine in zip(prepared.workers, found, strict=True):
        first = worker.replicas[0]
        device = devices[plan.stages[first.stage].devices[first.index]]
        workers.append(
            WorkerCheck(
                rank=mine.rank,
                name=mine.name,
                device=device.name,
                computes_on=mine.device,
                host=mine.host,
                planned_bytes=mine.planned_bytes,
                limit_bytes=device.memory_bytes,
            )
        )
    hosts = tuple(
        HostCheck(
            host=name,
            address=first.address,
            planned_bytes=sum(p.planned_bytes for p in found if p.host == name and not p.gpu),
            free_bytes=first.host_free_bytes,
            run_dir=first.run_dir,
        )
        for name, first in _first_of_each(found).items()
    )
    gpus = gpu_checks(found)
    return DryRun(
        variant=plan.variant,
        task=prepared.settings.task,
        fingerprint=plan.profile.fingerprint,
        mini_batches=sum(segment.mini_batches for segment in prepared.segments),
        world_size=len(workers),
        meets_at=meets_at,
        transport=between_processes(
            transport_of((mine.host, mine.gpu) for mine in found),
            prepared.settings.transport,
            one_host=one_host,
            varying=prepared.varies,
        ),
        gpus=gpus,
        workers=tuple(workers),
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
        warnings=(*more, *_warnings(prepared, found)),
    )


def _warnings(prepared: Prepared, found: Sequence[_PlaceAndHost]) -> Iterator[str]:
    yield from hook_warnings(prepared)
    if prepared.model.loss.apart:
        yield prepared.model.loss.apart
    for host, first in _first_of_each(found).items():
        gpus = [mine.gpu for mine in found if mine.host == host and mine.gpu]
        workers = sum(mine.host == host and not mine.gpu for mine in found)
        for turns in (
            turns_warning(workers, first.cores, "core", prepared.settings.threads),
            turns_warning(len(gpus), len(set(gpus)), "GPU"),
        ):
            if turns is not None:
                yield f"{host}: {turns}"


def _first_of_each(found: Sequence[_PlaceAndHost]) -> dict[str, _PlaceAndHost]:
    firsts: dict[str, _PlaceAndHost] = {}
    for mine in found:
        firsts.setdefault(mine.host, mine)
    return firsts


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
