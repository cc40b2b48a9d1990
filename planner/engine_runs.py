"""A plan in another engine's run: what it costs there, in seconds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TypeVar

import msgspec

from ..profiles.errors import PlanError
from .engine_costs import ENGINE_COSTS, Engine, EngineCosts, on_engine, with_receives
from .plan import DevicePrediction, Plan, PlanEdge, StagePrediction, pipeline_of
from .schedules.steady_state import steady_state
from .simulator.timeline import idle_shares

P = TypeVar("P", StagePrediction, DevicePrediction)


def run_by(plan: Plan, name: Engine, receive_bytes_per_s: float = inf) -> Plan:
    """The plan with what it costs in another engine's run.

    Args:
        receive_bytes_per_s: at which a device takes in what it has received, and does nothing else.

    Raises PlanError where the engine can't run such a plan.
    """
    engine, changed = ENGINE_COSTS[name], msgspec.structs.replace
    _check(plan, engine)
    received = [_received(plan.edges, s) for s in range(len(plan.stages))]
    pipeline = on_engine(with_receives(pipeline_of(plan), received, receive_bytes_per_s), engine)
    period_s = steady_state(pipeline).period_s
    idle, ours = idle_shares(pipeline, period_s), plan.predicted
    besides = [
        _bytes_besides(plan, engine, s, pipeline.micro_batches_per_replica(s))
        for s in range(pipeline.stages)
    ]
    stages = (
        changed(
            _holding(stage, besides[s]),
            forward_s=pipeline.forward_s[s],
            backward_s=pipeline.backward_s[s],
            idle_share=idle[s],
            holds=None if stage.holds is None else changed(stage.holds, engine=besides[s]),
        )
        for s, stage in enumerate(ours.stages)
    )
    devices = (
        changed(_holding(d, sum(besides[s] for s in d.stages)), idle_share=idle[d.stages[0]])
        for d in ours.devices
    )
    share = ours.period_s / period_s if period_s else 1.0
    predicted = changed(
        ours,
        period_s=period_s,
        samples_per_s=ours.samples_per_s * share,
        speedup=ours.speedup * share,
        stages=tuple(stages),
        devices=tuple(devices),
    )
    if ours.loading_s is not msgspec.UNSET:
        predicted = predicted.loading(ours.loading_s)
    # Another plan was faster with tp-run.
    solver = changed(plan.solver, fastest=msgspec.UNSET)
    return changed(plan, engine=name, predicted=predicted, to_target=msgspec.UNSET, solver=solver)


def beyond_memory(plan: Plan) -> tuple[int, int] | None:
    """The stage whose device lacks most, and how many bytes. None: all fit."""
    needs = plan.predicted.needs(plan.stages, plan.cluster)
    more, s = max(((need - limit, s) for s, need, limit in needs), default=(0, 0))
    return (s, more) if more > 0 else None


def _check(plan: Plan, engine: EngineCosts) -> None:
    """Raise PlanError where the times wouldn't be those of any run: what exports refuse besides
    has no part in them."""
    system, why = plan.system, ""
    if not system.flushes:
        why = f"{plan.variant} never flushes; plan with --variant pipedream-flush"
    elif engine.schedules and system.schedule not in engine.schedules:
        why = f"it has no schedule like {plan.variant}'s; plan with --variant pipedream-flush"
    elif len({len(stage.devices) for stage in plan.stages}) > 1:
        why = "there each stage has as many replicas; plan with --replicas off"
    elif engine.late_activations and plan.placement:
        why = "its devices have several stages; plan with --stages-per-device 1"
    if why:
        raise PlanError(f"{engine.title} can't run this plan: {why}")


def _holding(found: P, nbytes: int) -> P:
    """What is predicted with so many bytes of the engine's own."""
    memory = msgspec.structs.replace(found.memory, engine_bytes=nbytes)
    return msgspec.structs.replace(found, memory=memory, memory_bytes=found.memory_bytes + nbytes)


def _bytes_besides(plan: Plan, engine: EngineCosts, s: int, micro_batches: int) -> int:
    """What a stage's replica holds there and not with us."""
    predicted = plan.predicted.stages[s]
    found = round(engine.parameter_copies * predicted.parameter_bytes)
    if engine.keeps_buffers:
        came = sum(_received(plan.edges, s)) * micro_batches
        found += max(came - predicted.memory.boundary_bytes, 0)
    return found


def _received(edges: Sequence[PlanEdge], s: int) -> tuple[int, int]:
    """Bytes of activations and of gradients that come to a stage for each micro-batch."""
    return (
        sum(e.bytes_per_micro_batch for e in edges if e.target == s),
        sum(e.bytes_per_micro_batch for e in edges if e.source == s and e.needs_grad),
    )
