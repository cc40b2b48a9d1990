"""All-reduce: sums of tensors over workers, between processes and within one.

Groups of stages' replicas have names, the same on every worker (`reduce_groups`). All of a group
start the same all-reduces in the same sequence, with tensors of the same shapes. One is started
first and waited for later: those in one process all start before the first of them waits. What the
stages of a worker have is summed up first, then what the workers have.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...profiles.errors import RunError
from ..prepare.tied_parameters import TiedParameters
from ..prepare.workers import Replica
from ..records.status import Status
from .channel import PeerError, lost, wait_until
from .pinned_memory import CudaCopier

ALL_WORKERS = "all stages"
"""The group of all workers."""

LOSS_WEIGHTS = "all stages with gradients"
"""The group that sums up the weights of losses, which are for gradients alone."""

BUCKET_BYTES = 2**20
"""Tensors that are smaller go together, up to this size; larger ones go as they are. Of sums alone:
messages between stages have slots (`slots.SLOT_BYTES`)."""

Groups = Mapping[str, Sequence[Sequence[int]]]
"""Replicas' numbers by the group's name: for each of its workers, of those that it runs."""

RankGroups = Mapping[str, tuple[int, ...]]
"""Ranks by name, ascending."""


def stage_group(stage: int) -> str:
    """Name of the group of a stage's replicas."""
    return f"stage {stage}"


def reduce_groups(
    replicas: Sequence[Replica],
    tied: Sequence[TiedParameters] = (),
    weighing: Collection[int] = (),
) -> Groups:
    """All groups that a run reduces over; those of one replica left out.

    Args:
        weighing: stages that need to know the weights of losses.
    """
    groups: dict[str, list[Replica]] = {ALL_WORKERS: list(replicas)}
    for replica in replicas:
        groups.setdefault(stage_group(replica.stage), []).append(replica)
    for shared in tied:
        groups[shared.group] = [one for one in replicas if one.stage in shared.stages]
    groups[LOSS_WEIGHTS] = [one for one in replicas if one.stage in weighing]
    found = {}
    for name, members in groups.items():
        ranks = sorted({member.rank for member in members})
        if len(members) > 1:
            found[name] = tuple(
                tuple(member.number for member in members if member.rank == rank) for rank in ranks
            )
    return found


def rank_groups(replicas: Sequence[Replica], groups: Groups) -> RankGroups:
    """The workers of each group; groups within one worker left out."""
    rank_of = {replica.number: replica.rank for replica in replicas}
    found = {
        name: tuple(rank_of[numbers[0]] for numbers in members) for name, members in groups.items()
    }
    return {name: ranks for name, ranks in found.items() if len(ranks) > 1}


class Pending:
    """An all-reduce that has been started; this one is over one worker."""

    def wait(self) -> None:
        """When this returns, the tensors hold the sums. Raises PeerError within the bound."""


class AllReducer(Protocol):
    """A replica's all-reduces over the groups that it is in."""

    def start(self, group: str, tensors: Sequence[Tensor]) -> Pending:
        """Start to sum each tensor over the group, in place; a group of one has nothing to do.

        Nobody may use the tensors until `Pending.wait` returns.
        """


# Within one process -----------------------------------------------------------------------------


@dataclass
class _Offers(Pending):
    """What the replicas of a group have offered for one all-reduce, by number.

    Attributes:
        missing: numbers of those in this process that haven't started it.
        sums: of the parts of this process.
        pending: their all-reduce with those of other processes.
    """

    group: str
    missing: list[int]
    tensors: dict[int, Sequence[Tensor]] = field(default_factory=dict)
    sums: list[Tensor] = field(default_factory=list)
    pending: Pending | None = None

    def wait(self) -> None:
        """Whoever waits first gives the sums to all."""
        if self.pending is None:
            raise PeerError(f"a sum over {self.group} waits for number {self.missing[0]}")
        self.pending.wait()
        with torch.no_grad():
            for tensors in self.tensors.values():
                for tensor, total in zip(tensors, self.sums, strict=True):
                    tensor.copy_(total)
        self.tensors, self.sums, self.pending = {}, [], Pending()


class Pool:
    """All-reduces that replicas of one process have started; shared by all of them."""

    def __init__(
        self, groups: Groups, others: AllReducer | None = None, here: Collection[int] = ()
    ) -> None:
        """`others`: sums over processes, of which this one has the replicas `here`, by number;
        None: it has all."""
        # What is summed up here, worker by worker.
        self.groups = {
            name: [mine for mine in members if others is None or mine[0] in here]
            for name, members in groups.items()
        }
        self.others = others
        self.offers: dict[tuple[str, int], _Offers] = {}

    def offer(self, key: tuple[str, int], number: int, tensors: Sequence[Tensor]) -> Pending:
        """Take a replica's part. With the last one of this process the sum goes on its way."""
        group = self.groups[key[0]]
        everyone = [k for mine in group for k in mine]
        offers = self.offers.setdefault(key, _Offers(key[0], everyone))
        offers.tensors[number] = tensors
        offers.missing.remove(number)
        if not offers.missing:
            del self.offers[key]
            with torch.no_grad():
                workers = [
                    [_sum(same) for same in zip(*(offers.tensors[k] for k in mine), strict=True)]
                    for mine in group
                ]
                offers.sums = [_sum(same) for same in zip(*workers, strict=True)]
            others = self.others
            offers.pending = others.start(key[0], offers.sums) if others else Pending()
        return offers


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """In their sequence, so that runs repeat."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        total += other
    return total


class LocalAllReduce(AllReducer):
    """All-reduce of one of several replicas in a process: all of an inline run, or a worker's."""

    def __init__(self, number: int, pool: Pool) -> None:
        self.number = number
        self._pool = pool
        self._started: dict[str, int] = {}

    def start(self, group: str, tensors: Sequence[Tensor]) -> Pending:
        pool = self._pool
        if group not in pool.groups:
            return Pending()
        if pool.others is not None and pool.groups[group] == [(self.number,)]:
            return pool.others.start(group, tensors)
        count = self._started[group] = self._started.get(group, 0) + 1
        return pool.offer((group, count), self.number, tensors)


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
        copier: CudaCopier | None = None,
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
        for name, ranks in groups.items() if nccl is not None else ():
            if name in (ALL_WORKERS, LOSS_WEIGHTS):
                continue
            # A communicator for each group of gradients, made by the first all-reduce in it.
            group = dist.new_group(list(ranks), timeout=2 * self.timeout, backend="nccl")
            if rank in ranks:
                self._on_device[name] = group
                pending = _ProcessPending(self, name)
                pending.add([torch.zeros(1, dtype=torch.float32, device=nccl)])
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
        if len(tensors) == 1 and tensors[0].is_contiguous() and not tensors[0].is_conj():
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
            parameters: that are trained.
            others: tensors to be summed with them, in place.

        Raises:
            RunError: a gradient is sparse.
        """
        self._parameters = parameters
        self._present = torch.tensor([p.grad is not None for p in parameters]).int()
        gradients = []
        for p in parameters:
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
