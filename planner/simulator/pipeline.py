"""The pipeline as schedules and simulator take it: durations in seconds, links, limits; no
layers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import NamedTuple

from ..systems.variants import Variant


class Route(NamedTuple):
    """Latency and wire of messages between one replica of a stage and one of a later stage, and
    back.

    Attributes:
        source, target: replicas.
        forward_s, backward_s, latency_s: as in `Link`, for what this pair exchanges.
        wire, wire_back: what messages keep busy; equal ones take turns.
        overlaps: both replicas compute while a message is on the wire.
    """

    source: int
    target: int
    forward_s: float
    backward_s: float
    latency_s: float
    wire: Hashable
    wire_back: Hashable
    overlaps: bool = True


@dataclass(frozen=True)
class Link:
    """Messages from a stage to a later one for each micro-batch, and back: seconds and routes.

    Attributes:
        source, target: stages.
        forward_s: time on the wire of one micro-batch's activations, latency left out; where
            replicas share a mini-batch's samples, of the part that a pair of them exchanges.
        backward_s: the same for their gradients; 0 when none is sent.
        latency_s: what each message takes besides; it doesn't keep the wire busy.
        has_gradient: whether a gradient message comes back.
        routes: one for each pair of replicas that exchange messages. Empty: one pair, with a
            wire of its own in each direction, and transfers that overlap computing.
    """

    source: int
    target: int
    forward_s: float
    backward_s: float
    latency_s: float
    has_gradient: bool = True
    routes: tuple[Route, ...] = ()

    @cached_property
    def all_routes(self) -> tuple[Route, ...]:
        """The routes, written out."""
        if self.routes:
            return self.routes
        there, back = ("stages", self.source, self.target), ("stages", self.target, self.source)
        times = self.forward_s, self.backward_s, self.latency_s
        return (Route(0, 0, *times, there, back),)

    @cached_property
    def fastest_s(self) -> tuple[float, float]:
        """A micro-batch's message there and its gradient's back, each over the fastest route."""
        there = min(route.latency_s + route.forward_s for route in self.all_routes)
        return there, min(route.latency_s + route.backward_s for route in self.all_routes)

    @cached_property
    def wires(self) -> tuple[Hashable, ...]:
        """What its messages keep busy, route by route."""
        return tuple(
            wire
            for route in self.all_routes
            for wire in ((route.wire, route.wire_back) if self.has_gradient else (route.wire,))
        )


@dataclass(frozen=True)
class Pipeline:
    """Durations, links and limits of laid-out stages: all that decides a schedule.

    A stage on r devices has r replicas. Micro-batch i is replica i mod r's; in systems of whole
    mini-batches each replica has 1/r of the samples, dealt likewise. Every replica updates.

    Attributes:
        forward_s: per stage, forward of one micro-batch (of a replica's share of it in systems
            of whole mini-batches), on the stage's slowest replica.
        backward_s: likewise its backward; that of several micro-batches takes so many times that.
        update_s: per stage, optimizer step.
        links: one for each pair of stages that exchange tensors.
        limits: per stage, mini-batches that may be in flight there.
        paces: per stage, for each replica its times over those of the slowest. Empty: one each.
        all_reduce_s: per stage, summing gradients over its replicas, and those of parameters that
            other stages use too with them. Empty: 0 each.
        update_every: mini-batches per update; their gradients are summed up until then.
        weight_s: per stage, how much of the backward is its weight part, which runs by itself where
            the system splits it. Empty: 0 each.
        placement: per stage, the number of the device that runs it, or of the devices whose
            replicas do; stages on one device have as many replicas each, one on each of these.
            Empty: each stage has a device of its own.
        late: per stage, the first of a replica's forwards of each mini-batch whose activations
            are sent only as its next operation, a backward, begins: behind the gradient that it
            waits for. Empty: all are sent as their forward ends.
    """

    variant: Variant
    micro_batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    links: tuple[Link, ...]
    limits: tuple[int, ...]
    paces: tuple[tuple[float, ...], ...] = ()
    all_reduce_s: tuple[float, ...] = ()
    update_every: int = 1
    weight_s: tuple[float, ...] = ()
    placement: tuple[int, ...] = ()
    late: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.forward_s)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Per device, its stages."""
        if not self.placement:
            return tuple((s,) for s in range(self.stages))
        devices = range(max(self.placement) + 1)
        return tuple(tuple(s for s, d in enumerate(self.placement) if d == k) for k in devices)

    def beside(self, stage: int) -> tuple[int, ...]:
        """The stages on a stage's device, itself among them."""
        return self.stages_of[self.placement[stage] if self.placement else stage]

    @property
    def backwards_per_mini_batch(self) -> int:
        """N where the backward's unit is the micro-batch, else 1."""
        return self.micro_batches if self.variant.backward_unit == "micro" else 1

    def replicas(self, stage: int) -> int:
        """r, the devices of a stage."""
        return len(self.paces[stage]) if self.paces else 1

    def micro_batches_per_replica(self, stage: int) -> int:
        """How many of a mini-batch's micro-batches, or shares of them, one replica runs."""
        if self.variant.whole_mini_batches:
            return self.micro_batches
        return self.micro_batches // self.replicas(stage)

    def micro_batches_per_share(self, stage: int) -> int:
        """Micro-batches that one replica works through in one backward."""
        if self.variant.backward_unit == "micro":
            return 1
        return self.micro_batches_per_replica(stage)

    def messages_per_route(self, link: Link) -> int:
        """Micro-batches, or shares of them, of a mini-batch that go over each of its routes."""
        if self.variant.whole_mini_batches:
            return self.micro_batches
        return self.micro_batches // lcm(self.replicas(link.source), self.replicas(link.target))

    def backward_op_s(self, stage: int) -> float:
        """Duration of one backward operation on one replica; where split, of its first part."""
        # A weight part known to take longer than the whole must not begin before this one.
        seconds = max(self.backward_s[stage] - self.weight_op_s(stage), 0.0)
        return seconds * self.micro_batches_per_share(stage)

    def weight_op_s(self, stage: int) -> float:
        """Duration of one weight part on one replica."""
        return self.weight_s[stage] if self.weight_s else 0.0

    def update_op_s(self, stage: int) -> float:
        """Duration of one update: gradients are summed over the replicas first."""
        summing_s = self.all_reduce_s[stage] if self.all_reduce_s else 0.0
        return summing_s + self.update_s[stage]

    def work_s(self, stage: int) -> float:
        """What a replica's operations take per mini-batch: no pipeline is faster than that."""
        return (
            self.micro_batches_per_replica(stage) * (self.forward_s[stage] + self.backward_s[stage])
            + self.update_op_s(stage) / self.update_every
        )

    def updates_after(self, mini_batch: int) -> bool:
        """Whether an update follows this mini-batch, be it the last one or not."""
        return not (mini_batch + 1) % self.update_every


def in_a_row(
    variant: Variant, micro_batches: int, limits: tuple[int, ...], placement: tuple[int, ...] = ()
) -> Pipeline:
    """Stages that each send to the next, whose operations take a second each, and all else nothing:
    for what follows from a schedule alone."""
    stages = len(limits)
    each = 1 if variant.backward_unit == "micro" else micro_batches
    return Pipeline(
        variant=variant,
        micro_batches=micro_batches,
        forward_s=(1.0,) * stages,
        backward_s=(1.0 / each,) * stages,
        update_s=(0.0,) * stages,
        links=tuple(Link(s, s + 1, 0.0, 0.0, 0.0) for s in range(stages - 1)),
        limits=limits,
        placement=placement,
    )
