"""Workers: numbered stage by stage, and within a stage replica by replica."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...planner.plan import PlanStage


@dataclass(frozen=True)
class Worker:
    """One replica of a stage.

    Attributes:
        rank: among all workers.
        replica: among the `replicas` of its stage.
    """

    rank: int
    stage: int
    replica: int = 0
    replicas: int = 1

    @property
    def leads(self) -> bool:
        """Whether it is the one of its stage that saves, evaluates and tells of progress."""
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
        replicas = len(stage.devices)
        found += [Worker(len(found) + j, s, j, replicas) for j in range(replicas)]
    return tuple(found)


def replicas_of(workers: Sequence[Worker], stage: int) -> tuple[Worker, ...]:
    """The workers of one stage."""
    return tuple(worker for worker in workers if worker.stage == stage)
