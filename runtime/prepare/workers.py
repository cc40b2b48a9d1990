"""Workers, numbered stage by stage and within a stage replica by replica; what each has to do.

Micro-batch i is replica i mod r's. In systems of whole mini-batches sample k is replica k mod r's
instead. All of it follows from the plan alone, the same on every worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...planner.plan import PlanStage
from ...planner.simulator.pipeline import Pipeline
from ...planner.systems.operations import Op


@dataclass(frozen=True)
class Worker:
    """One replica of a stage.

    Attributes:
        rank: among all workers.
        replica: among the `replicas` of its stage.
        tells: whether it is the one of the run that tells of progress.
    """

    rank: int
    stage: int
    replica: int = 0
    replicas: int = 1
    tells: bool = False

    @property
    def leads(self) -> bool:
        """Whether it is the one of its stage that saves and evaluates."""
        return self.replica == 0

    @property
    def name(self) -> str:
        """For messages: "stage 1", or "stage 1, replica 0" where there are several."""
        return f"stage {self.stage}" + (f", replica {self.replica}" if self.replicas > 1 else "")

    @property
    def label(self) -> str:
        """The name with the rank, by which the launcher and the logs know it."""
        return f"{self.name} (rank {self.rank})"

    @property
    def file(self) -> str:
        """How its files are called, their suffix left out: stage1, stage1.1, stage1.2, …"""
        return f"stage{self.stage}" + (f".{self.replica}" if self.replica else "")


def workers_of(stages: Sequence[PlanStage]) -> tuple[Worker, ...]:
    """All workers of a plan, by rank."""
    found: list[Worker] = []
    for s, stage in enumerate(stages):
        replicas, last = len(stage.devices), s == len(stages) - 1
        found += [
            Worker(len(found) + j, s, j, replicas, tells=last and j == 0) for j in range(replicas)
        ]
    return tuple(found)


def replicas_of(workers: Sequence[Worker], stage: int) -> tuple[Worker, ...]:
    """The workers of one stage."""
    return tuple(worker for worker in workers if worker.stage == stage)


class Share(NamedTuple):
    """What a worker has of each mini-batch.

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


def share_of(pipeline: Pipeline, micro_batch: int, worker: Worker) -> Share:
    """A worker's share. `micro_batch`: samples in a micro-batch of the plan."""
    n, r = pipeline.micro_batches, worker.replicas
    if pipeline.variant.whole_mini_batches:
        return Share(tuple(range(n)), micro_batch // r, n * r, slice(worker.replica, None, r))
    return Share(tuple(range(worker.replica, n, r)), micro_batch, n, slice(None))
