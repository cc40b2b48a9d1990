"""Evaluating a plan: simulate its schedule, walk its memory → predictions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import msgspec

from ..profiles.files import ratio
from ..profiles.profile import ProfileReference
from .cluster.cluster import Cluster
from .costs.device_memory import without_ties
from .costs.layout import StageTimes, make_pipeline
from .costs.memory import Holdings, Moment, StageBytes, with_reserved
from .costs.stage_costs import StageCost, Transfer, weights_s_per_byte
from .costs.tied_parameters import DeviceTie, bytes_elsewhere, device_ties, exchange_s
from .partition.problem import SAME
from .peak_memory import holdings_of, predict_devices, stage_bytes
from .plan import (
    Plan,
    PlanEdge,
    PlanStage,
    Prediction,
    SolverReport,
    StagePrediction,
    check_plan,
    check_stages,
)
from .question import Question
from .schedules.steady_state import Steady, sequence_distance, steady_state
from .simulator.pipeline import Pipeline
from .simulator.timeline import idle_shares


@dataclass(frozen=True)
class Evaluation:
    """Stages with what they cost."""

    stages: tuple[PlanStage, ...]
    micro_batches: int
    pipeline: Pipeline
    transfers: tuple[Transfer, ...]
    prediction: Prediction
    moments: tuple[tuple[Moment, ...], ...]
    """Per stage, what its schedule makes it hold (`Holdings`)."""
    mini_batches: int
    """That were simulated, until all repeated itself or in vain."""

    @property
    def limits(self) -> tuple[int, ...]:
        """Per stage, the in-flight limit."""
        return tuple(stage.in_flight for stage in self.stages)

    @property
    def difference(self) -> int:
        """The largest version difference of any stage, in the steady state."""
        return self.prediction.version_difference

    @property
    def delay(self) -> int:
        """The largest of any stage (`StagePrediction.delay`)."""
        return max(stage.delay or 0 for stage in self.prediction.stages)

    def over_limit(self, cluster: Cluster) -> list[tuple[int, int]]:
        """Stages over what they may take of one of their devices, and by how many bytes."""
        needs = self.prediction.needs(self.stages, cluster)
        return [(s, need - limit) for s, need, limit in needs if need > limit]

    def memory_shares(self, cluster: Cluster) -> list[float]:
        """What stages with limited memory need of the smallest of their devices: over 1, it
        doesn't fit."""
        needs = self.prediction.needs(self.stages, cluster)
        return [need / limit for _, need, limit in needs]


class LaidOut(NamedTuple):
    """Stages as a pipeline, not simulated yet.

    Attributes:
        costs: per stage.
        transfers: what crosses the cuts, for each micro-batch.
        shares: per stage, the replicas that share a mini-batch's samples; else 1.
        size: samples in a micro-batch.
        ties: parameters that several stages of one device use.
    """

    pipeline: Pipeline
    costs: tuple[StageCost, ...]
    transfers: tuple[Transfer, ...]
    shares: tuple[int, ...]
    size: int
    ties: tuple[DeviceTie, ...] = ()


def lay_out(question: Question, stages: Sequence[PlanStage], micro_batches: int) -> LaidOut:
    """The pipeline that stages make.

    Micro-batches that don't divide the mini-batch all cost as much as the largest.

    Raises:
        PlanError: the system can't have such stages with so many micro-batches, or the profile
            didn't measure micro-batches of that size.
    """
    variant = question.system
    check_stages(variant, question.mini_batch, micro_batches, tuple(stages))
    nodes = tuple(stage.nodes for stage in stages)
    size = -(-question.mini_batch // micro_batches)
    # Replicas run micro-batches of their own, or share every mini-batch's samples.
    shares = tuple(len(stage.devices) if variant.whole_mini_batches else 1 for stage in stages)
    last = len(stages) - 1
    devices = [stage.devices for stage in stages]
    ties = device_ties(question.profile.shared, nodes, devices)
    elsewhere = bytes_elsewhere(question.profile, nodes, devices)
    found, speeds = zip(
        *(
            question.stage_cost(
                x.devices, x.nodes, size // shares[s], s == last, elsewhere[s], x.recomputed
            )
            for s, x in enumerate(stages)
        ),
        strict=True,
    )
    transfers = question.costs.transfers(nodes, size)
    pipeline = make_pipeline(
        question.links,
        micro_batches,
        _times(question, stages, found, speeds, transfers),
        transfers,
        devices,
        [stage.in_flight for stage in stages],
        question.update_every,
    )
    return LaidOut(pipeline, found, transfers, shares, size, ties)


def evaluate(question: Question, stages: Sequence[PlanStage], micro_batches: int) -> Evaluation:
    """Predict period, memory, idle share and version differences of a plan's stages.

    Raises as `lay_out`.
    """
    found = evaluate_within(question, stages, micro_batches, inf)
    assert found is not None
    return found


def evaluate_within(
    question: Question, stages: Sequence[PlanStage], micro_batches: int, most_s: float
) -> Evaluation | None:
    """The same of plans whose period is no longer than that; None of others, whose memory isn't
    looked at, which takes as long as all the rest."""
    stages = tuple(stages)
    pipeline, found, transfers, shares, size, ties = lay_out(question, stages, micro_batches)
    nodes = tuple(stage.nodes for stage in stages)
    steady = steady_state(pipeline)
    if steady.period_s > most_s:
        return None
    recompute = [bool(stage.recompute) for stage in stages]
    held = holdings_of(pipeline, steady, recompute)
    idle = idle_shares(pipeline, steady.period_s)
    sent = [question.costs.transfers(nodes, size // r) if r > 1 else transfers for r in shares]
    needs = [
        stage_bytes(question, pipeline, steady.clock, s, stages, found, mine)
        for s, mine in enumerate(sent)
    ]
    predicted = [
        _predict_stage(pipeline, s, needs[s], held[s], steady, idle[s]) for s in range(len(stages))
    ]
    if ties:
        # On its device, such a parameter counts by itself.
        needs = [without_ties(s, own, ties) for s, own in enumerate(needs)]
        predicted = [
            msgspec.structs.replace(one, holds=own)
            for one, own in zip(predicted, needs, strict=True)
        ]
    period_s = steady.period_s
    prediction = Prediction(
        period_s=period_s,
        samples_per_s=ratio(question.mini_batch, period_s),
        speedup=ratio(question.one_device_s, period_s),
        sequence_distance=sequence_distance(steady),
        stages=tuple(with_reserved(stage, question.profile) for stage in predicted),
        devices=tuple(
            with_reserved(device, question.profile)
            for device in predict_devices(pipeline, needs, held, predicted, steady, recompute, ties)
        ),
    )
    moments = tuple(each.moments for each in held)
    return Evaluation(
        stages, micro_batches, pipeline, transfers, prediction, moments, steady.mini_batches
    )


def _times(
    question: Question,
    stages: Sequence[PlanStage],
    costs: Sequence[StageCost],
    speeds: Sequence[float],
    transfers: Sequence[Transfer],
) -> list[StageTimes]:
    """Per stage. `speeds`: of the devices that the costs' seconds are for."""
    variant, cluster, profile = question.system, question.cluster, question.profile
    exchanges = exchange_s(
        profile, cluster, [stage.nodes for stage in stages], [stage.devices for stage in stages]
    )
    returning = {c.target for c in transfers if c.needs_grad}
    last, found = len(stages) - 1, []
    for s, (stage, cost, speed) in enumerate(zip(stages, costs, speeds, strict=True)):
        rules_s = weights_s_per_byte(
            variant,
            profile.operation,
            question.update_every,
            first=s == 0,
            last=s == last and not variant.makes_weights_on(s, len(stages)),
        )
        recompute_s = cost.forward_s if stage.recompute is True else cost.recompute_s
        backward_s, weight_s = cost.backward_s + recompute_s, 0.0
        if variant.split_backward and s in returning:
            backward_s, weight_s = backward_s + cost.split_s, cost.weight_s
        elif variant.split_backward:
            # No gradient goes back: all of it is the weight part.
            weight_s = backward_s
        all_reduce_s = exchanges[s]
        if len(stage.devices) > 1 and cost.parameter_bytes:
            all_reduce_s += cluster.all_reduce_s(stage.devices, cost.parameter_bytes)
        update_s = cost.update_s + rules_s * cost.parameter_bytes
        times = (cost.forward_s / speed, backward_s / speed, update_s / speed)
        found.append(StageTimes(*times, all_reduce_s, weight_s / speed))
    return found


# The prediction ------------------------------------------------------------------------------


def _predict_stage(
    pipeline: Pipeline,
    s: int,
    needs: StageBytes,
    held: Holdings,
    steady: Steady,
    idle_share: float,
) -> StagePrediction:
    transfer_s = 0.0
    for link in pipeline.links:
        if s in (link.source, link.target):
            transfer_s += link.latency_s + link.forward_s
            transfer_s += link.latency_s + link.backward_s if link.has_gradient else 0.0
    memory, delay = needs.peak(held), _steady_delay(pipeline, held, steady.cycle)
    return StagePrediction(
        forward_s=pipeline.forward_s[s],
        backward_s=pipeline.backward_s[s],
        weight_s=pipeline.weight_op_s(s),
        update_s=pipeline.update_s[s],
        all_reduce_s=pipeline.all_reduce_s[s] if pipeline.all_reduce_s else 0.0,
        transfer_s=transfer_s,
        parameter_bytes=needs.parameters,
        memory_bytes=memory.total,
        memory=memory,
        micro_batches_kept=held.micro_batches_kept,
        versions_held=held.versions_held,
        version_difference=0 if pipeline.variant.backward_weights == "forward" else delay,
        delay=delay,
        idle_share=min(idle_share, 1.0),
        holds=needs,
        accounted=needs.accounted_peak(held),
    )


def _steady_delay(pipeline: Pipeline, held: Holdings, cycle: int) -> int:
    """The largest in the last cycle; without one, in the last third, from update to update at the
    least."""
    count = (cycle or pipeline.update_every) * pipeline.backwards_per_mini_batch
    if not cycle:
        count = max(count, -(-len(held.delays) // 3))
    return max(held.delays[-count:], default=0)


def make_plan(question: Question, found: Evaluation, report: SolverReport) -> Plan:
    """The plan file's content for evaluated stages. Raises PlanError as `check_plan` does."""
    profile, predicted, own = question.profile, found.prediction, question.matrix_state_factor
    if profile.loading_s_per_sample is not msgspec.UNSET:
        predicted = predicted.loading(question.loading_s)
        report = report.loading(question.loading_s)
    return check_plan(
        Plan(
            variant=question.variant,
            mini_batch=question.mini_batch,
            micro_batches=found.micro_batches,
            profile=ProfileReference.to(profile),
            cluster=question.cluster,
            optimizer_state_factor=question.optimizer_state_factor,
            matrix_state_factor=msgspec.UNSET if own is None else own,
            update_every=question.update_every,
            tied=question.tied,
            order=question.order or msgspec.UNSET,
            plugin=outside.plugin if (outside := question.system.outside) else msgspec.UNSET,
            plugin_checksum=(outside.checksum if outside else "") or msgspec.UNSET,
            stages=found.stages,
            edges=tuple(
                PlanEdge(
                    tensor=c.tensor,
                    source=c.source,
                    target=c.target,
                    bytes_per_micro_batch=c.nbytes,
                    needs_grad=c.needs_grad,
                )
                for c in found.transfers
            ),
            predicted=predicted,
            solver=report,
        )
    )


def gap_between(period_s: float, bound_s: float) -> float:
    """How far a period may be from the best one: over its bound, less 1; 1 without a bound."""
    return max(ratio(period_s, bound_s) - 1, 0.0) if bound_s > 0 else 1.0


# Which of two plans is the better one -----------------------------------------------------------


def better(found: Evaluation, best: Evaluation) -> bool:
    """A shorter period; at the same period fewer devices, stages, staleness, then less memory."""

    def rank(e: Evaluation) -> tuple[int, int, int, int]:
        return (
            len({d for stage in e.stages for d in stage.devices}),
            len(e.stages),
            e.difference,
            e.prediction.most_bytes,
        )

    mine, its = found.prediction.period_s, best.prediction.period_s
    if mine * SAME < its or its * SAME < mine:
        return mine < its
    return rank(found) < rank(best)
