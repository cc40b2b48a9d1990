"""Places of a relaxed problem where a mini-batch's other work comes on top of a stage's own.

In systems that flush, that is while the pipeline fills and drains. Some of a replica's forwards may
run beside it: its work counts as on a device that is faster by so much. Wires are left out.
Index letters: N micro-batches; K devices; r replicas of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ...profiles.profile import Measurement
from ..partition.problem import Option, Place
from .places import changed

Places = Callable[[int, int], Place]


def returning(
    place: Places, options: Sequence[Option], micro_batches: int, devices: int, share: float
) -> Places:
    """Places for a stage whose first backward waits for the way to the end and back.

    In 1F1B that flushes, a replica runs n = N / r micro-batches, 1 + a of them forward before
    its first backward, a ≤ ⌈K / r⌉ − 1. The first forward f begins when the layers before the
    stage have run one; the first backward b when those behind it, W in both directions, have
    run that micro-batch too. n backwards and n − 1 − a forwards are still to run then, and
    the way back to the first stage. So with P of both directions before the stage

        T ≥ P + f + W + n·b + (n − 1 − a)·f = P + W + n·(f + b) − a·f

    where a·f is at most a share of the work: as fast a device as does it in the time left.

    Args:
        share: of a layer's work that its forward is, at the most.
    """
    return _earlier(place, options, micro_batches, lambda r: -(-devices // r) - 1, share)


def sharing(
    place: Places, options: Sequence[Option], micro_batches: int, devices: int, share: float
) -> Places:
    """Places in GPipe's order, where stages behind may have replicas.

    The replica of one of r2 ≤ K − r that has the first micro-batch begins its backwards when
    it has run the last forward of its own, that of micro-batch N − r2. A replica of the stage
    may still have ⌈r2 / r⌉ − 1 forwards to run then.
    """
    return _earlier(
        place, options, micro_batches, lambda r: max(-(-(devices - r) // r) - 1, 0), share
    )


def _earlier(
    place: Places,
    options: Sequence[Option],
    micro_batches: int,
    ahead: Callable[[int], int],
    share: float,
) -> Places:
    """Places where so many of a replica's forwards may run beside other work: `ahead`(r)."""

    def change(found: Place, r: int) -> Place:
        each = micro_batches // r
        speed = found.speed / (1 - share * min(ahead(r), each - 1) / each)
        return replace(found, speed=speed, lower_scale=0.0, upper_scale=0.0)

    return changed(place, options, change)


def largest_forward_share(measured: Sequence[Measurement]) -> float:
    """Of the layers' work, at most this much is a forward."""
    works = [(m.forward_s, m.forward_s + m.backward_s) for m in measured]
    return max((forward_s / both_s for forward_s, both_s in works if both_s), default=0.0)
