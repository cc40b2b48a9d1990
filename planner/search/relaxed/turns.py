"""A plan's stages as they take turns in 1F1B."""

from __future__ import annotations

from collections.abc import Sequence

from ...partition.dp.cycle_devices import Flight
from ...partition.dp.turns import Turn
from ...simulator.pipeline import Pipeline


def turns_of(pipeline: Pipeline, flights: Sequence[Sequence[Flight]]) -> list[Turn]:
    """A laid-out pipeline as a `Turn` per stage. `flights`: what each may have in flight."""
    behind: list[list[tuple[int, float]]] = [[] for _ in range(pipeline.stages)]
    for link in pipeline.links:
        if link.has_gradient:
            back_s = link.backward_s * pipeline.micro_batches_per_share(link.target)
            sent_s = link.forward_s + back_s + 2 * link.latency_s
            behind[link.source].append((link.target, sent_s))
    alone = pipeline.micro_batches == 1
    return [
        Turn(
            pipeline.forward_s[s] + pipeline.backward_op_s(s),
            pipeline.update_op_s(s) if alone else 0.0,
            behind[s],
            mine,
        )
        for s, mine in enumerate(flights)
    ]
