"""All-reduce: sums of tensors over workers, between processes and within one.

Groups of workers have names, the same on every worker (`reduce_groups`). All workers of a group
start the same all-reduces in the same sequence, with tensors of the same shapes. One is started
first and waited for later: an inline run has all workers start before the first one waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...profiles.errors import RunError
from ..prepare.tied_parameters import TiedParameters
from ..prepare.workers import Worker
from ..records.status import Status
from .channel import PeerError, lost, wait_until
from .pinned_memory import Copier

ALL_WORKERS = "all stages"
"""The group of all workers."""

BUCKET_BYTES = 2**20
"""Tensors that are smaller go together, up to this size; larger ones go as they are."""

RankGroups = Mapping[str, tuple[int, ...]]
"""Ranks by name, ascending."""


def stage_group(stage: int) -> str:
    """Name of the group of a stage's replicas."""
    return f"stage {stage}"


def reduce_groups(
    workers: Sequence[Worker], tied: Sequence[TiedParameters] = ()
) -> dict[str, tuple[int, ...]]:
    """All groups that a run of these workers reduces over; those of one worker left out."""
    groups: dict[str, list[int]] = {ALL_WORKERS: [worker.rank for worker in workers]}
    for worker in workers:
        groups.setdefault(stage_group(worker.stage), []).append(worker.rank)
    for shared in tied:
        groups[shared.group] = [w.rank for w in workers if w.stage in shared.stages]
    return {name: tuple(ranks) for name, ranks in groups.items() if len(ranks) > 1}


class Pending:
    """An all-reduce that has been started; this one is over one worker."""

    def wait(self) -> None:
        """When this returns, the tensors hold the sums. Raises PeerError within the bound."""


class AllReducer(Protocol):
    """A worker's all-reduces over the groups that it is in."""

    def start(self, group: str, tensors: Sequence[Tensor]) -> Pending:
        """Start to sum each tensor over the group, in place; a group of one has nothing to do.

        Nobody may use the tensors until `Pending.wait` returns.
        """


# Within one process -----------------------------------------------------------------------------


@dataclass
class _Offers:
    """What the workers of a group have offered for one all-reduce, by rank."""

    tensors: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    done: bool = False


class Pool:
    """All-reduces that workers of one process have started; shared by all of them."""

    def __init__(self, groups: RankGroups) -> None:
        self.groups = groups
        self.offers: dict[tuple[str, int], _Offers] = {}


class LocalAllReduce(AllReducer):
    """All-reduce within one process, for the inline run; one object for each worker."""

    def __init__(self, rank: int, pool: Pool) -> None:
        self.rank = rank
        self._pool = pool
        self._started: dict[str, int] = {}

    def start(self, group: str, tensors: Sequence[Tensor]) -> Pending:
        """Offer the tensors; whoever waits first sums up what all have offered."""
        if group not in self._pool.groups:
            return Pending()
        number = self._started[group] = self._started.get(group, 0) + 1
        offers = self._pool.offers.setdefault((group, number), _Offers())
        offers.tensors[self.rank] = tensors
        return _LocalPending(self._pool, (group, number))


class _LocalPending(Pending):
    def __init__(self, pool: Pool, key: tuple[str, int]) -> None:
        self._pool = pool
        self._key = key

    def wait(self) -> None:
        """Sum in the sequence of ranks, so that runs repeat."""
        offers = self._pool.offers.get(self._key)
        if offers is None:
            return
        ranks = self._pool.groups[self._key[0]]
        missing = [rank for rank in ranks if rank not in offers.tensors]
        if missing:
            raise PeerError(f"a sum over {self._key[0]} waits for rank {missing[0]}")
        with torch.no_grad():
            for same in zip(*(offers.tensors[rank] for rank in ranks), strict=True):
                total = same[0].clone()
                for other in same[1:]:
                    total += other
                for tensor in same:
                    tensor.copy_(total)
        del self._pool.offers[self._key]


# Between processes ------------------------------------------------------------------------------


class ProcessAllReduce(AllReducer):
    """All-reduce between processes by torch.distributed; one object for each worker.

    Made by all workers at the same time, after the process group.
    """

    def __init__(
        self,
        groups: RankGroups,
        names: Sequence[str],
        rank: int,
        timeout_s: float,
        status: Status | None = None,
        *,
        copier: Copier | None = None,
        nccl: torch.device | None = None,
    ) -> None:
        """
        Args:
            names: of all workers, by rank.
            status: is told whom this worker waits for.
            copier: takes what is in device memory to the host's and back, where gloo sums it.
            nccl: this worker's device, where NCCL sums what is in device memory.
        """
        self.copier = copier
        self.status = status or Status()
        self.timeout = timedelta(seconds=timeout_s)
        self._ranks = groups
        self._rank = rank
        self._names = names
        self._groups: dict[str, dist.ProcessGroup | None] = {}
        for name, ranks in groups.items():
            # Every process takes part in making every group.
            self._groups[name] = (
                None
                if len(ranks) == len(names)
                else dist.new_group(list(ranks), timeout=self.timeout)
            )
        self._on_device: dict[str, dist.ProcessGroup] = {}
        if nccl is not None:
            self._make_nccl_groups(nccl)

    def _make_nccl_groups(self, device: torch.device) -> None:
        """A communicator for each group of gradients, made by the first all-reduce in it."""
        for name, ranks in self._ranks.items():
            if name == ALL_WORKERS:
                continue
            group = dist.new_group(list(ranks), timeout=2 * self.timeout, backend="nccl")
            if self._rank in ranks:
                self._on_device[name] = group
                pending = _ProcessPending(self, name)
                pending.add([torch.zeros(1, device=device)])
                pending.wait()

    def start(self, group: str, tensors: Sequence[Tensor]) -> Pending:
        """Hand the tensors to gloo, small ones of a type together."""
        if group not in self._ranks:
            return Pending()
        pending = _ProcessPending(self, group)
        for together in _buckets(tensors):
            pending.add(together)
        return pending

    def start_one(self, group: str, tensor: Tensor) -> dist.Work:
        """Start the all-reduce of one tensor. Raises PeerError."""
        groups = self._on_device if tensor.is_cuda else self._groups
        try:
            work: dist.Work = dist.all_reduce(tensor, group=groups[group], async_op=True)
        except RuntimeError as error:
            raise self.lost(group, error) from error
        return work

    def wait(self, work: dist.Work, tensor: Tensor) -> None:
        """Wait for one, within the bound. Raises RuntimeError, TimeoutError."""
        if tensor.is_cuda:
            wait_until(work.is_completed, self.timeout)
        work.wait(self.timeout)

    def others(self, group: str) -> list[int]:
        """Ranks of a group, this worker's own left out."""
        return [rank for rank in self._ranks[group] if rank != self._rank]

    def lost(self, group: str, error: BaseException) -> PeerError:
        """The error of an all-reduce that failed; the status says for whom."""
        self.status.wait(self.others(group))
        others = [self._names[rank] for rank in self.others(group)]
        whom = others[0] if len(others) == 1 else f"the others of {group}"
        return lost(whom, error, self.timeout)


class _ProcessPending(Pending):
    def __init__(self, all_reduce: ProcessAllReduce, group: str) -> None:
        self._all_reduce = all_reduce
        self._group = group
        self._works: list[tuple[dist.Work, Tensor, Tensor, list[Tensor]]] = []

    def add(self, tensors: list[Tensor]) -> None:
        """Start the all-reduce of a bucket's tensors."""
        if len(tensors) == 1 and tensors[0].is_contiguous():
            flat = tensors[0]
        else:
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        summed, copier = flat.detach(), self._all_reduce.copier
        if copier is not None and copier.far(flat):
            summed, landing = copier.down(flat)
            landing.synchronize()
        work = self._all_reduce.start_one(self._group, summed)
        self._works.append((work, summed, flat, tensors))

    def wait(self) -> None:
        """Wait for all buckets, and put what was packed back in its places."""
        for work, summed, flat, tensors in self._works:
            self._all_reduce.status.wait(self._all_reduce.others(self._group))
            try:
                self._all_reduce.wait(work, summed)
            except (RuntimeError, TimeoutError) as error:
                raise self._all_reduce.lost(self._group, error) from error
            self._all_reduce.status.go_on()
            copier = self._all_reduce.copier
            with torch.no_grad():
                if copier is not None and copier.far(flat):
                    flat.copy_(copier.up(summed))
                if flat is tensors[0]:
                    continue
                parts = flat.split([tensor.numel() for tensor in tensors])
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))
        self._works = []


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, small ones of a type together; the same way on every worker."""
    filling: dict[tuple[torch.dtype, str], list[Tensor]] = {}
    filled: dict[tuple[torch.dtype, str], int] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        kind, nbytes = (tensor.dtype, tensor.device.type), tensor.nbytes
        if nbytes >= BUCKET_BYTES:
            yield [tensor]
            continue
        if filled.get(kind, 0) + nbytes > BUCKET_BYTES:
            yield filling.pop(kind)
            filled[kind] = 0
        filling.setdefault(kind, []).append(tensor)
        filled[kind] = filled.get(kind, 0) + nbytes
    yield from filling.values()


# Gradients --------------------------------------------------------------------------------------


class GradientAllReduce:
    """The all-reduce of parameters' gradients over a group of workers, under way.

    A parameter without a gradient counts as zero; without one on any worker it gets none, since
    optimizers leave such a parameter alone.
    """

    def __init__(
        self,
        all_reduce: AllReducer,
        group: str,
        parameters: Sequence[nn.Parameter],
        others: Sequence[Tensor] = (),
    ) -> None:
        """
        Args:
            others: tensors to be summed with them, in place.

        Raises:
            RunError: a gradient is sparse.
        """
        self._parameters = [p for p in parameters if p.requires_grad]
        self._present = torch.tensor([p.grad is not None for p in self._parameters]).int()
        gradients = []
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad.layout != torch.strided:
                raise RunError(
                    "a sparse gradient can't be summed over replicas; make the embedding's "
                    "gradients dense (sparse=False), or plan with --replicas off"
                )
            gradients.append(p.grad)
        self._pending: Pending = all_reduce.start(group, [self._present, *others, *gradients])

    def wait(self) -> None:
        """When this returns, gradients are the sums. Raises PeerError within the bound."""
        self._pending.wait()
        for p, present in zip(self._parameters, self._present.tolist(), strict=True):
            if not present:
                p.grad = None
