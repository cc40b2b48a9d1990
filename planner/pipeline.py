"""A pipeline as the orders and the simulator see it: durations, links and limits. Units: s."""

from __future__ import annotations

from dataclasses import dataclass

from .variants import Variant


@dataclass(frozen=True)
class Link:
    """What goes from one stage to a later one for each micro-batch, and back.

    Attributes:
        source, target: stages.
        forward_s: time on the wire of one micro-batch's activations, latency left out.
        backward_s: the same for their gradients; 0 when none is sent.
        latency_s: what each message takes besides; it doesn't keep the wire busy.
        has_gradient: whether a gradient message comes back.
    """

    source: int
    target: int
    forward_s: float
    backward_s: float
    latency_s: float
    has_gradient: bool = True


@dataclass(frozen=True)
class Pipeline:
    """All that decides an order.

    Attributes:
        forward_s: per stage, forward of one micro-batch.
        backward_s: per stage, backward of one micro-batch; a mini-batch's takes N times that.
        update_s: per stage, optimizer step.
        links: one for each pair of stages that exchange tensors.
        limits: per stage, mini-batches that may be in flight there.
    """

    variant: Variant
    micro_batches: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    links: tuple[Link, ...]
    limits: tuple[int, ...]

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.forward_s)

    @property
    def backwards_per_mini_batch(self) -> int:
        """N where the backward's unit is the micro-batch, else 1."""
        return self.micro_batches if self.variant.backward_unit == "micro" else 1

    @property
    def micro_batches_per_backward(self) -> int:
        """Micro-batches that one backward works through, and one gradient message holds."""
        return self.micro_batches // self.backwards_per_mini_batch

    def backward_op_s(self, stage: int) -> float:
        """Duration of one backward operation: of a micro-batch or of a whole mini-batch."""
        return self.backward_s[stage] * self.micro_batches_per_backward

    def work_s(self, stage: int) -> float:
        """Busy time per mini-batch: no pipeline completes them faster than its busiest stage."""
        return (
            self.micro_batches * (self.forward_s[stage] + self.backward_s[stage])
            + self.update_s[stage]
        )
