"""Evaluating a plan: simulate its schedule, walk its memory → predictions. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from math import inf
from typing import Any, NamedTuple

import msgspec

from ..profiles.files import ratio
from ..profiles.profile import Profile, ProfileReference
from .cluster.cluster import Cluster
from .costs.device_memory import device_peaks, tie_bytes, walks_of, without_ties
from .costs.layout import StageTimes, copies_beside, copies_from_outside, make_pipeline
from .costs.memory import (
    Holdings,
    Moment,
    StageBytes,
    boundary_buffers,
    holdings,
    stepping_bytes,
    together,
    with_reserved,
)
from .costs.stage_costs import (
    RECEIVES_AHEAD,
    Costs,
    StageCost,
    Transfer,
    as_run_by,
    least_of,
    slowest,
    weights_s_per_byte,
)
from .costs.tied_parameters import DeviceTie, Tied, bytes_elsewhere, device_ties, exchange_s
from .partition.problem import SAME
from .plan import (
    DevicePrediction,
    Plan,
    PlanEdge,
    PlanStage,
    Prediction,
    SolverReport,
    StagePrediction,
    TiePrediction,
    check_plan,
    check_stages,
)
from .schedules.given import system_of
from .schedules.schedules import is_patterned
from .schedules.steady_state import Steady, sequence_distance, steady_state
from .simulator.clock import SimulatedClock
from .simulator.pipeline import Pipeline
from .simulator.timeline import idle_shares, most_waiting
from .systems.operations import FORWARD, FORWARDS, Op, numbered, numbered_schedule
from .systems.variants import Variant
from .systems.versions import entry_versions


@dataclass(frozen=True)
class Question:
    """What is to be planned: everything but the stages and the micro-batches."""

    profile: Profile
    cluster: Cluster
    variant: str
    mini_batch: int
    optimizer_state_factor: float
    update_every: int = 1
    tied: Tied = "together"
    matrix_state_factor: float | None = None
    """Of matrices of hidden layers, where it is another."""
    order: tuple[str, ...] = ()
    """What devices run, where a user gives it (`Order.lines`)."""

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster, *more: Any) -> Question:
        """The question that a search is asked: where the cluster has devices of several kinds, the
        profile's seconds are the least of these. Raises PlanError for a kind that it hasn't."""
        return cls(least_of(profile, cluster.kinds), cluster, *more)

    @property
    def least_state_factor(self) -> float:
        """Bytes of optimizer state per byte of any parameters, at the least."""
        factor = self.optimizer_state_factor
        return factor if self.matrix_state_factor is None else min(factor, self.matrix_state_factor)

    def state_bytes(self, cost: StageCost) -> int:
        """Of the optimizer, on a stage."""
        factor, others = self.optimizer_state_factor, cost.parameter_bytes
        if self.matrix_state_factor is None:
            return round(others * factor)
        others -= cost.matrix_bytes
        return round(others * factor + cost.matrix_bytes * self.matrix_state_factor)

    @cached_property
    def system(self) -> Variant:
        """The training system of this name. Raises PlanError where there is none."""
        return system_of(self.variant, self.order)

    @cached_property
    def costs(self) -> Costs:
        """The profile's costs; made once."""
        return Costs(as_run_by(self.profile, self.system, self.update_every))

    def stage_cost(
        self, devices: Sequence[int], *stage: Any, **more: Any
    ) -> tuple[StageCost, float]:
        """What a stage costs on the slowest of its devices, and the speed that its seconds are for.

        Args:
            stage, more: as of `Costs.stage`.

        Raises PlanError as that; for a kind of device that the profile has no seconds of.
        """
        listed = self.cluster.devices
        if not self._of_kinds:
            return self.costs.stage(*stage, **more), min(listed[d].speed for d in devices)
        found = []
        for device in {listed[d].alike: listed[d] for d in devices}.values():
            costs = self.costs if device.kind is None else self.costs.on(device.kind)
            factor = (device.kind_speed or 1.0) / device.speed
            found.append((costs.stage(*stage, **more), factor))
        return slowest(found), 1.0

    @cached_property
    def _of_kinds(self) -> bool:
        return bool(self.cluster.kinds)

    @cached_property
    def one_device_s(self) -> float:
        """A mini-batch on one device of speed 1, of the profile's first kind: whole, or in the
        largest size measured."""
        profile = self.profile
        costs = self.costs.on(profile.kinds[0].name) if profile.kinds else self.costs
        sizes = profile.micro_batch_sizes
        size = min(max(self.mini_batch, sizes[0]), sizes[-1])
        cost = costs.stage(tuple(layer.name for layer in profile.layers), size, True)
        work_s = (cost.forward_s + cost.backward_s) * (self.mini_batch / size)
        return work_s + cost.update_s / self.update_every


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
        variant,
        micro_batches,
        _times(question, stages, found, speeds, transfers),
        transfers,
        question.cluster,
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
    held = _holdings(pipeline, steady, recompute)
    idle = idle_shares(pipeline, steady.period_s)
    sent = [question.costs.transfers(nodes, size // r) if r > 1 else transfers for r in shares]
    needs = [
        _bytes(question, pipeline, steady.clock, s, stages, found, mine)
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
            for device in _predict_devices(
                pipeline, needs, held, predicted, steady, recompute, ties
            )
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


# Memory --------------------------------------------------------------------------------------


def _holdings(
    pipeline: Pipeline, steady: Steady, recompute: Sequence[bool]
) -> tuple[Holdings, ...]:
    """What each stage's schedule makes it hold. `recompute`: per stage."""
    variant, n, every = pipeline.variant, pipeline.micro_batches, pipeline.update_every
    entries = _entries(pipeline, steady)
    found = tuple(
        (_kept_holdings if len(kinds) <= MOST_KEPT else holdings)(
            variant,
            n,
            pipeline.replicas(s),
            _entered(kinds, len(entries)) if variant.synchronises else kinds,
            entries,
            recompute=recompute[s],
            update_every=every,
        )
        for s, kinds in enumerate(steady.kinds)
    )
    if _all_seen(pipeline, steady):
        return found
    # The simulation may have ended before all was in flight that may be.
    return tuple(
        held.filled(pipeline.limits[s] * pipeline.micro_batches_per_replica(s))
        for s, held in enumerate(found)
    )


def _entries(pipeline: Pipeline, steady: Steady) -> tuple[int, ...]:
    """The versions that micro-batches enter with, in systems with vertical synchronisation."""
    variant, n = pipeline.variant, pipeline.micro_batches
    if not variant.synchronises:
        return ()
    micro = variant.backward_unit == "micro"
    ops = numbered(steady.kinds[0], n, micro=micro, update_every=pipeline.update_every)
    return entry_versions(variant, n, ops)


def _all_seen(pipeline: Pipeline, steady: Steady) -> bool:
    """Whether all that may be in flight at once has been.

    Patterns are walked until then, whatever was simulated of them.
    """
    if steady.cycle or is_patterned(pipeline):
        return True
    return steady.mini_batches >= 2 * max(pipeline.limits)


def _entered(kinds: bytes, forwards: int) -> bytes:
    """What a stage runs until so many forwards, those that stage 0 has begun.

    It may be ahead of stage 0 where nothing comes to it from there.
    """
    position = -1
    for _ in range(forwards + 1):
        position = kinds.find(FORWARDS, position + 1)
        if position < 0:
            return kinds
    return kinds[:position]


MOST_KEPT = 4096
"""What longer schedules hold isn't kept for the next time."""

# Different cuts and limits often have the same schedules.
_kept_holdings = lru_cache(maxsize=4096)(holdings)


def _bytes(
    question: Question,
    pipeline: Pipeline,
    clock: SimulatedClock,
    s: int,
    stages: Sequence[PlanStage],
    costs: Sequence[StageCost],
    transfers: Sequence[Transfer],
) -> StageBytes:
    """What there is to hold on a replica. `transfers`: tensors, as large as its part of them."""
    unit = pipeline.micro_batches_per_share(s)
    stage, cost = stages[s], costs[s]
    beside = [t for t in pipeline.beside(s) if t != s]
    # What is computed again isn't kept; what is received is, whether a layer keeps it or not.
    whole = stage.recompute is True
    kept_storages = frozenset[str]() if whole else cost.kept_storages
    wait = {c.target for c in transfers if c.source == s and c.storage not in kept_storages}
    waiting = {
        link.target: most_waiting(
            clock, link, 0 if link.target in beside else RECEIVES_AHEAD[FORWARD]
        )
        for link in pipeline.links
        if link.source == s and link.target in wait
    }
    messages, gradients = boundary_buffers(s, transfers, unit, kept_storages, waiting, beside)
    received = sum(c.nbytes for c in transfers if c.target == s)
    kept = received if whole else cost.kept_bytes
    if beside:
        kept -= _kept_by_makers(s, stages, costs, transfers, beside)
    return StageBytes(
        parameters=cost.parameter_bytes,
        buffers=cost.buffer_bytes,
        optimizer=question.state_bytes(cost),
        stepping=stepping_bytes(question.profile, cost.parameter_bytes),
        scratch=cost.parameter_bytes * copies_beside(pipeline, s),
        kept=kept,
        rebuilt=unit * (cost.kept_bytes if whole else cost.rebuilt_bytes),
        messages=messages,
        gradients=gradients,
        workspace=cost.workspace_bytes,
        postponed=_postponed_bytes(s, cost, transfers) if pipeline.weight_s else 0,
    )


def _kept_by_makers(
    s: int,
    stages: Sequence[PlanStage],
    costs: Sequence[StageCost],
    transfers: Sequence[Transfer],
    beside: Collection[int],
) -> int:
    """Of what a stage keeps of each micro-batch, bytes that it was handed over without a copy, and
    that their maker on the same device keeps for longer."""
    handed = {
        c.storage: c.nbytes
        for c in transfers
        if c.target == s and c.source in beside and stages[c.source].recompute is not True
        if c.storage in costs[c.source].kept_storages
    }
    whole = stages[s].recompute is True
    mine = handed.keys() if whole else costs[s].kept_storages & handed.keys()
    return sum(handed[storage] for storage in mine)


def _postponed_bytes(s: int, cost: StageCost, transfers: Sequence[Transfer]) -> int:
    """Gradients that wait with a micro-batch for its weight part."""
    if any(c.target == s and c.needs_grad for c in transfers):
        return cost.postponed_bytes
    # Nothing goes back, so all of the backward waits, with the gradients that came, one a tensor.
    return sum({c.tensor: c.nbytes for c in transfers if c.source == s and c.needs_grad}.values())


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


def _predict_devices(
    pipeline: Pipeline,
    needs: Sequence[StageBytes],
    held: Sequence[Holdings],
    predicted: Sequence[StagePrediction],
    steady: Steady,
    recompute: Sequence[bool],
    ties: Sequence[DeviceTie],
) -> Iterator[DevicePrediction]:
    """Of devices with several stages; none where there are no such."""
    if not pipeline.placement:
        return
    variant, n, every = pipeline.variant, pipeline.micro_batches, pipeline.update_every
    entries = _entries(pipeline, steady)
    micro = variant.backward_unit == "micro"
    schedule = numbered_schedule(steady.kinds, steady.turns, n, micro=micro, update_every=every)

    def entered(at: tuple[int, Op]) -> bool:
        """Whether it isn't ahead of the forwards that stage 0 has begun."""
        _, (kind, b, i) = at
        return kind != FORWARD or b * n + (i or 0) < len(entries)

    for stages, ops in zip(pipeline.stages_of, schedule.on_devices(), strict=True):
        tied = [
            (tie.stages, tie_bytes(variant, tie, copies_from_outside(pipeline, tie.owner)))
            for tie in ties
            if tie.owner in stages
        ]
        walks, of_ties = walks_of(pipeline, stages, tied, entries, recompute)
        known = list(takewhile(entered, ops)) if variant.synchronises else ops
        memory, accounted = device_peaks(walks, {s: needs[s] for s in stages}, known, of_ties)
        if not _all_seen(pipeline, steady):
            # More may be in flight at once than was seen.
            memory = together([*(needs[s].peak(held[s]) for s in stages), *of_ties.most()])
            accounted = together(
                [*(needs[s].accounted_peak(held[s]) for s in stages), *of_ties.most()]
            )
        yield DevicePrediction(
            stages=stages,
            memory_bytes=memory.total,
            memory=memory,
            accounted=accounted,
            idle_share=predicted[stages[0]].idle_share,
            ties=tuple(TiePrediction(stages=of, holds=nbytes) for of, nbytes in tied),
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
        loading_s = profile.loading_s_per_sample * question.mini_batch
        predicted = predicted.loading(loading_s)
        report = report.loading(loading_s)
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
