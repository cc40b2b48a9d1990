"""How other engines' runs of a schedule differ from ours: a table of them, and a pipeline as one of
them runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from .simulator.pipeline import Pipeline
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

Engine = Literal["torch", "torchtitan", "deepspeed", "megatron"]

ENGINE_COSTS: Mapping[Engine, EngineCosts] = {
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
        links = tuple(
            replace(link, routes=tuple(r._replace(overlaps=False) for r in link.all_routes))
            for link in links
        )
    late: tuple[int, ...] = ()
    if engine.late_activations:
        # A backward follows each forward at once from the first on that the pipeline is full with.
        late = tuple(range(pipeline.stages - 1, -1, -1))
    return replace(pipeline, links=links, late=late)
