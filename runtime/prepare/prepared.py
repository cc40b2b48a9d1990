"""`Prepared`: a plan and its task, ready to train."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ...planner.costs.tied_parameters import not_behind
from ...planner.plan import Plan
from ...planner.simulator.pipeline import Pipeline
from ...profiles.autograd.random_numbers import RandomCalls
from ...profiles.tasks.hooks import RunLength
from ...profiles.tasks.task import Task
from ...profiles.tracing.call import Call
from ..settings import RunSettings
from .data import Segment, run_length
from .distribution import Distribution
from .model import PreparedModel
from .tied_parameters import computed_tensors, treat_alike
from .workers import Replica, Worker


@dataclass(frozen=True)
class Prepared:
    """A plan and its task, ready to train: pieces, workers, shares, messages, settings.

    Attributes:
        samples: in the training data.
        replicas: of all stages, by number.
        workers: by rank.
        example: gives the model's inputs and the target for some number of samples.
        flops_per_sample: of the model's forward; None: not known, or the settings' `log` doesn't
            ask for it.
        random: what draws random numbers, where samples are to have the same ones in all stages and
            micro-batches; None: it isn't known, or they needn't.
        cautions: why a mini-batch may be another one in micro-batches and replicas, in lines.
    """

    plan: Plan
    settings: RunSettings
    task: Task
    samples: int
    segments: tuple[Segment, ...]
    pipeline: Pipeline
    replicas: tuple[Replica, ...]
    workers: tuple[Worker, ...]
    model: PreparedModel
    distribution: Distribution
    example: Callable[[int], tuple[Call, Any]]
    flops_per_sample: float | None = None
    random: RandomCalls | None = None
    cautions: tuple[str, ...] = ()

    @property
    def varies(self) -> bool:
        """Whether mini-batches may differ in shape."""
        return self.plan.profile.varying is not msgspec.UNSET

    @property
    def reached(self) -> frozenset[int]:
        """The stages that gradients of the loss come to. The backwards and updates of the others
        wait for nobody, and may come before the last stage's forward."""
        last = len(self.plan.stages) - 1
        routes = self.distribution.routes
        links = {(c.source.stage, c.target.stage) for c in routes if c.spec.needs_grad}
        return frozenset(s for s in range(last + 1) if not_behind(s, [last], links) is None)

    @property
    def length(self) -> RunLength:
        """Updates in the run, and in a whole epoch of it."""
        return run_length(self.segments)


def with_own_weights(prepared: Prepared) -> list[Prepared]:
    """Pieces for each replica, by number, with weights of their own, for replicas in one process.
    Stages of one worker go on to share theirs."""
    found = [prepared for _ in prepared.replicas]
    for worker in prepared.workers:
        if worker.replicas[0].leads:
            continue
        stages = list(prepared.model.stages)
        mine = [stages[s] for s in worker.stages]
        # Together: both modes of a stage share their parameters.
        modules = [module for stage in mine for module in stage.modules]
        memo: dict[int, Any] = {k: t for m in modules for k, t in computed_tensors(m).items()}
        copies = copy.deepcopy(mine, memo)
        for key, p in {id(p): p for module in modules for p in module.parameters()}.items():
            treat_alike(p, memo[key])
        for s, copied in zip(worker.stages, copies, strict=True):
            stages[s] = copied
        model = replace(prepared.model, stages=tuple(stages))
        for replica in worker.replicas:
            found[replica.number] = replace(prepared, model=model)
    return found
