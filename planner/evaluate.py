"""Evaluating a cut: simulate its order, walk its memory → predictions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..profiles.profile import Profile
from .cluster import Cluster
from .memory import StageMemory, walk_memory
from .operations import FORWARD
from .orders import make_order
from .pipeline import Pipeline
from .plan import (
    Plan,
    PlanEdge,
    PlanStage,
    Prediction,
    ProfileReference,
    SolverReport,
    StagePrediction,
    check_plan,
    make_pipeline,
)
from .simulate import (
    idle_shares,
    most_waiting,
    predicted_period_s,
    simulate,
    warm_mini_batches,
)
from .stage_costs import RECEIVES_AHEAD, Crossing, StageCost, crossings, stage_cost
from .versions import version_use


@dataclass(frozen=True)
class Question:
    """What is to be planned: everything but the cut, the micro-batches and the limits."""

    profile: Profile
    cluster: Cluster
    variant: str
    mini_batch: int
    optimizer_state_factor: float


@dataclass(frozen=True)
class Evaluation:
    """A cut with what it costs."""

    stages: tuple[tuple[str, ...], ...]
    micro_batches: int
    limits: tuple[int, ...]
    pipeline: Pipeline
    crossed: tuple[Crossing, ...]
    prediction: Prediction

    def over_limit(self, cluster: Cluster) -> list[tuple[int, int]]:
        """Stages over their device's memory, and by how many bytes."""
        over = []
        for s, stage in enumerate(self.prediction.stages):
            limit = cluster.devices[s].memory_bytes
            if limit is not None and stage.memory_bytes > limit:
                over.append((s, stage.memory_bytes - limit))
        return over


def evaluate(
    question: Question,
    stages: Sequence[Sequence[str]],
    micro_batches: int,
    limits: Sequence[int],
) -> Evaluation:
    """Predict period, memory, idle share and version differences of a cut.

    Stage s runs on the cluster's device s. Raises PlanError for micro-batches of a size that
    the profile didn't measure.
    """
    profile, cluster = question.profile, question.cluster
    size = question.mini_batch // micro_batches
    last = len(stages) - 1
    costs = [stage_cost(profile, names, size, last=s == last) for s, names in enumerate(stages)]
    crossed = crossings(profile, stages, size)
    speeds = [cluster.devices[s].speed for s in range(len(stages))]
    pipeline = make_pipeline(
        question.variant,
        micro_batches,
        [
            (cost.forward_s / speed, cost.backward_s / speed, cost.update_s / speed)
            for cost, speed in zip(costs, speeds, strict=True)
        ],
        crossed,
        cluster.network,
        limits,
    )
    mini_batches = warm_mini_batches(len(stages))
    order = make_order(pipeline, mini_batches)
    timeline = simulate(pipeline, order)
    period_s = predicted_period_s(pipeline, timeline)
    memories = [
        walk_memory(
            pipeline.variant,
            micro_batches,
            order[s],
            cost,
            s,
            crossed,
            question.optimizer_state_factor,
            {
                link.target: most_waiting(timeline, s, link.target, RECEIVES_AHEAD[FORWARD])
                for link in pipeline.links
                if link.source == s
            },
        )
        for s, cost in enumerate(costs)
    ]
    idle = idle_shares(pipeline, period_s)
    one_device_s = _one_device_s(question)
    prediction = Prediction(
        period_s=period_s,
        samples_per_s=question.mini_batch / period_s if period_s else 0.0,
        speedup=one_device_s / period_s if period_s else 0.0,
        stages=tuple(
            _predict_stage(pipeline, s, cost, memories[s], order[s], idle[s])
            for s, cost in enumerate(costs)
        ),
    )
    return Evaluation(
        tuple(tuple(names) for names in stages),
        micro_batches,
        tuple(limits),
        pipeline,
        crossed,
        prediction,
    )


def _predict_stage(
    pipeline: Pipeline,
    s: int,
    cost: StageCost,
    memory: StageMemory,
    ops: Sequence[object],
    idle_share: float,
) -> StagePrediction:
    use = version_use(pipeline.variant, pipeline.micro_batches, ops)  # type: ignore[arg-type]
    steady = use.differences[len(use.differences) // 3 : 2 * len(use.differences) // 3 + 1]
    transfer_s = 0.0
    for link in pipeline.links:
        if s in (link.source, link.target):
            transfer_s += link.latency_s + link.forward_s
            transfer_s += link.latency_s + link.backward_s if link.has_gradient else 0.0
    return StagePrediction(
        forward_s=pipeline.forward_s[s],
        backward_s=pipeline.backward_s[s],
        update_s=pipeline.update_s[s],
        transfer_s=transfer_s,
        parameter_bytes=cost.parameter_bytes,
        memory_bytes=memory.at_peak.total,
        memory=memory.at_peak,
        micro_batches_kept=memory.micro_batches_kept,
        versions_held=memory.versions_held,
        version_difference=max(steady, default=0),
        idle_share=min(idle_share, 1.0),
    )


def _one_device_s(question: Question) -> float:
    """One device of speed 1, the whole mini-batch at once, or in the largest size measured."""
    profile = question.profile
    sizes = [m for m in profile.micro_batch_sizes if m <= question.mini_batch]
    size = max(sizes, default=profile.micro_batch_sizes[0])
    names = [layer.name for layer in profile.layers]
    cost = stage_cost(profile, names, size, last=True)
    rounds = question.mini_batch / size
    return (cost.forward_s + cost.backward_s) * rounds + cost.update_s


def make_plan(question: Question, found: Evaluation, report: SolverReport) -> Plan:
    """The plan file's content for an evaluated cut."""
    profile = question.profile
    return check_plan(
        Plan(
            variant=question.variant,
            mini_batch=question.mini_batch,
            micro_batches=found.micro_batches,
            profile=ProfileReference(
                target=profile.target,
                fingerprint=profile.fingerprint,
                front_end=profile.front_end,
                granularity=profile.granularity,
                device=profile.device,
                threads=profile.threads,
                dtype=profile.dtype,
                autocast=profile.autocast,
            ),
            cluster=question.cluster,
            optimizer_state_factor=question.optimizer_state_factor,
            stages=tuple(
                PlanStage(nodes=names, devices=(s,), in_flight=limit)
                for s, (names, limit) in enumerate(zip(found.stages, found.limits, strict=True))
            ),
            edges=tuple(
                PlanEdge(
                    tensor=c.tensor,
                    source=c.source,
                    target=c.target,
                    bytes_per_micro_batch=c.nbytes,
                    needs_grad=c.needs_grad,
                )
                for c in found.crossed
            ),
            predicted=found.prediction,
            solver=report,
        )
    )
