"""What a plan costs in another engine's run: how each engine's differs from ours, in one table, and
a plan's period and memory there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

from ..profiles.errors import PlanError
from .plan import Plan, PlanEdge, pipeline_of
from .schedules.steady_state import steady_state
from .simulator.pipeline import Link, Pipeline
from .systems.variants import ScheduleRule


@dataclass(frozen=True)
class EngineCosts:
    """How an engine runs a schedule, where that isn't as ours.

    All of them sum gradients over replicas once a mini-batch's last backward is through, and update
    then, as ours does.

    Attributes:
        title: for people.
        schedules: those it has. Empty: all that flush.
        late_activations: an activation is sent behind the receive of the gradient that the device's
            next backward waits for.
        blocks: schedules in which a device that sends or receives computes nothing meanwhile,
            where it has one stage. In others it does, as far as links allow.
        parameter_copies: bytes held for each byte of parameters, besides weights, gradients and
            optimizer state.
        keeps_buffers: each of a mini-batch's messages to a stage has a buffer that stays.
        sources: for each of these fields, where that is from.
    """

    title: str
    schedules: frozenset[ScheduleRule] = frozenset()
    late_activations: bool = False
    blocks: frozenset[ScheduleRule] = frozenset()
    parameter_copies: float = 0.0
    keeps_buffers: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)


_TORCH = EngineCosts(
    title="torch.distributed.pipelining",
    blocks=frozenset({"1f1b-flush"}),
    keeps_buffers=True,
    sources={
        "blocks": "torch 2.13, distributed/pipelining/schedules.py, Schedule1F1B: waits for "
        "fwd_sends + bwd_recvs together before a backward, for bwd_sends + fwd_recvs before a "
        "forward",
        "keeps_buffers": "torch 2.13, distributed/pipelining/stage.py: args_recv_info and "
        "grad_recv_info have a tensor for each micro-batch, made once",
    },
)

ENGINE_COSTS: Mapping[str, EngineCosts] = {
    "torch": _TORCH,
    "torchtitan": replace(_TORCH, title="torchtitan"),
    "deepspeed": EngineCosts(
        title="DeepSpeed",
        schedules=frozenset({"1f1b-flush"}),
        late_activations=True,
        parameter_copies=2.0,
        sources={
            "schedules": "DeepSpeed edaa722, runtime/pipe/schedule.py: TrainSchedule",
            "late_activations": "the same, steps(): RecvGrad comes before SendActivation of the "
            "micro-batch before. Sends return once NCCL has the message in its own buffers",
            "parameter_copies": "one of gradients, flattened to be summed (DeepSpeed edaa722, "
            "runtime/engine.py, allreduce_bucket: up to 500 million elements); one made at the "
            "start that stays (Sailor cf2c8e3, Planner/simulations/runtime_simulator.py, "
            "additional_ds_copies)",
        },
    ),
    "megatron": EngineCosts(
        title="Megatron-Core",
        schedules=frozenset({"1f1b-flush", "interleaved"}),
        blocks=frozenset({"1f1b-flush"}),
        sources={
            "schedules": "Megatron-LM d98e8a6, core/pipeline_parallel/schedules.py",
            "blocks": "the same, core/pipeline_parallel/p2p_communication.py: "
            "send_forward_recv_backward waits for both (wait_on_reqs, batch_p2p_sync)",
        },
    ),
}
"""By the name that `tp-plan export --to` has for it."""


class EnginePrediction(NamedTuple):
    """A plan in an engine's run.

    Attributes:
        period_s: per mini-batch.
        memory_bytes: per stage, of its device.
    """

    period_s: float
    memory_bytes: tuple[int, ...]

    @property
    def fullest(self) -> int:
        """The stage whose device holds most."""
        return max(range(len(self.memory_bytes)), key=self.memory_bytes.__getitem__)


def predicted_on(
    plan: Plan, engine: EngineCosts, receive_bytes_per_s: float = inf
) -> EnginePrediction:
    """What a plan costs in an engine's run. Arguments and errors as of `engine_pipeline`."""
    pipeline = engine_pipeline(plan, engine, receive_bytes_per_s)
    period_s = steady_state(pipeline).period_s
    if plan.predicted.waits_for_samples:
        period_s = max(period_s, plan.predicted.period_s)
    besides = [
        _bytes_besides(plan, engine, s, pipeline.micro_batches_per_replica(s))
        for s in range(pipeline.stages)
    ]
    held = (
        plan.predicted.device_of(s).memory_bytes + sum(besides[t] for t in pipeline.beside(s))
        for s in range(pipeline.stages)
    )
    return EnginePrediction(period_s, tuple(held))


def beyond_memory(plan: Plan, found: EnginePrediction) -> tuple[int, int] | None:
    """The stage whose device lacks most for that run, and how many bytes. None: it fits."""
    lacking = list[tuple[int, int]]()
    for s, stage in enumerate(plan.stages):
        tightest = plan.cluster.tightest(stage.devices)
        if tightest is not None and tightest.usable_bytes is not None:
            lacking.append((found.memory_bytes[s] - tightest.usable_bytes, s))
    more, s = max(lacking, default=(0, 0))
    return (s, more) if more > 0 else None


def engine_pipeline(plan: Plan, engine: EngineCosts, receive_bytes_per_s: float = inf) -> Pipeline:
    """A plan's pipeline as an engine runs it.

    Args:
        receive_bytes_per_s: at which a device takes in what it has received, and does nothing else.

    Raises PlanError where the engine can't run such a plan.
    """
    _check(plan, engine)
    received = [_received(plan.edges, s) for s in range(len(plan.stages))]
    pipeline = with_receives(pipeline_of(plan), received, receive_bytes_per_s)
    return on_engine(pipeline, engine)


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


def with_receives(
    pipeline: Pipeline, received: Sequence[tuple[float, float]], bytes_per_s: float
) -> Pipeline:
    """The pipeline where taking in messages is work of its devices.

    Args:
        received: per stage, bytes of activations and of gradients that come for a micro-batch.
    """
    forward_s, backward_s = (
        tuple(own + came[k] / bytes_per_s for own, came in zip(times, received, strict=True))
        for k, times in enumerate((pipeline.forward_s, pipeline.backward_s))
    )
    return replace(pipeline, forward_s=forward_s, backward_s=backward_s)


def on_engine(pipeline: Pipeline, engine: EngineCosts) -> Pipeline:
    """The pipeline as an engine runs it: its messages' times, and whether they block devices."""
    links = pipeline.links
    if pipeline.variant.schedule in engine.blocks and not pipeline.placement:
        links = tuple(_blocking(link) for link in links)
    late: tuple[int, ...] = ()
    if engine.late_activations:
        # A backward follows each forward at once from the first on that the pipeline is full with.
        late = tuple(range(pipeline.stages - 1, -1, -1))
    return replace(pipeline, links=links, late=late)


def _blocking(link: Link) -> Link:
    routes = tuple(replace(route, overlaps=False) for route in link.all_routes())
    return replace(link, routes=routes)
