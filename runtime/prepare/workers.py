"""Workers by rank and replicas by number: which stages each runs, and its share of each mini-batch.

Replicas are numbered stage by stage and within a stage one by one; workers, which are processes,
device by device. Where each stage has devices of its own, a replica's number is its worker's rank.
Stages that share a device share all their devices, so a worker has one replica of each of them.

Micro-batch i is replica i mod r's. In systems of whole mini-batches sample k is replica k mod r's
instead. All of it follows from the plan alone, the same on every worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...planner.plan import Plan
from ...planner.systems.operations import UPDATE, Op


@dataclass(frozen=True)
class Replica:
    """One replica of a stage.

    Attributes:
        number: among all replicas of all stages.
        index: among the `count` of its stage.
        rank: of the worker that runs it.
        is_reporter: whether it is the one of the run that reports progress.
    """

    number: int
    stage: int
    rank: int
    index: int = 0
    count: int = 1
    is_reporter: bool = False

    @property
    def leads(self) -> bool:
        """Whether it is the one of its stage that saves and evaluates."""
        return self.index == 0

    @property
    def name(self) -> str:
        """For messages: "stage 1", or "stage 1, replica 0" where there are several."""
        return f"stage {self.stage}" + (f", replica {self.index}" if self.count > 1 else "")

    @property
    def file(self) -> str:
        """How its files are called, their suffix left out: stage1, stage1.1, stage1.2, …"""
        return f"stage{self.stage}" + (f".{self.index}" if self.index else "")


@dataclass(frozen=True)
class Worker:
    """A process of the run.

    Attributes:
        rank: among all workers.
        replicas: those that it runs, of one stage each, ascending.
    """

    rank: int
    replicas: tuple[Replica, ...]

    @property
    def is_reporter(self) -> bool:
        """Whether it is the one of the run that reports progress."""
        return any(replica.is_reporter for replica in self.replicas)

    @property
    def stages(self) -> tuple[int, ...]:
        """Of which it runs a replica."""
        return tuple(replica.stage for replica in self.replicas)

    @property
    def name(self) -> str:
        """For messages: as its replica's, or "stages 0 and 3, replica 1"."""
        first = self.replicas[0]
        if len(self.replicas) == 1:
            return first.name
        *others, last = map(str, self.stages)
        which = f", replica {first.index}" if first.count > 1 else ""
        return f"stages {', '.join(others)} and {last}{which}"

    @property
    def label(self) -> str:
        """The name with the rank, by which the launcher and the logs know it."""
        return f"{self.name} (rank {self.rank})"

    @property
    def file(self) -> str:
        """How its status is called: as its first replica's files."""
        return self.replicas[0].file


def all_replicas(plan: Plan) -> tuple[Replica, ...]:
    """All replicas of a plan's stages, by number."""
    counts = [len(stage.devices) for stage in plan.stages]
    placement = plan.placement or range(len(counts))
    # Per device, the rank of its first replica's worker.
    firsts: dict[int, int] = {}
    ranks = 0
    for device, count in zip(placement, counts, strict=True):
        if device not in firsts:
            firsts[device] = ranks
            ranks += count
    found: list[Replica] = []
    for s, count in enumerate(counts):
        last = s == len(counts) - 1
        found += [
            Replica(
                len(found) + j, s, firsts[placement[s]] + j, j, count, is_reporter=last and j == 0
            )
            for j in range(count)
        ]
    return tuple(found)


def workers_of(plan: Plan) -> tuple[Worker, ...]:
    """All workers of a plan, by rank."""
    found: dict[int, list[Replica]] = {}
    for replica in all_replicas(plan):
        found.setdefault(replica.rank, []).append(replica)
    return tuple(Worker(rank, tuple(mine)) for rank, mine in sorted(found.items()))


class Share(NamedTuple):
    """Which micro-batches, or samples, of each mini-batch a replica has.

    Attributes:
        micro_batches: those it runs, ascending.
        samples: in each of them.
        parts: how many such micro-batches make up the mini-batch, on all replicas together.
        dealt: which samples of the plan's micro-batch they are.
    """

    micro_batches: tuple[int, ...]
    samples: int
    parts: int
    dealt: slice

    def of(self, op: Op) -> tuple[int, ...]:
        """Those that an operation of the stage works through here; empty: it is another's."""
        if op.micro_batch is None:
            return self.micro_batches
        return (op.micro_batch,) if op.micro_batch in self.micro_batches else ()

    def has(self, op: Op) -> bool:
        """Whether an operation of the stage is run here: every replica updates."""
        return op.micro_batch in self.micro_batches or op.kind == UPDATE or bool(self.of(op))


def share_of(plan: Plan, replica: Replica) -> Share:
    """The share of one replica."""
    n, r, samples = plan.micro_batches, replica.count, plan.micro_batch
    if plan.system.whole_mini_batches:
        return Share(tuple(range(n)), samples // r, n * r, slice(replica.index, None, r))
    return Share(tuple(range(replica.index, n, r)), samples, n, slice(None))
