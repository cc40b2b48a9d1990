"""Lowering a plan's in-flight limits where that costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from ..evaluate import SAME, Evaluation, Question, evaluate
from ..schedules.schedules import limit_ranges
from ..systems.variants import variant_named


def tightened(
    question: Question, best: Evaluation, goes_on: Callable[[], bool]
) -> Iterator[Evaluation]:
    """Plans with the same period, each with one limit lower than the plan before.

    Args:
        goes_on: asked before each simulation.
    """
    ranges = limit_ranges(variant_named(question.variant), len(best.stages))
    for s in range(len(best.stages)):
        while True:
            limits = [stage.in_flight for stage in best.stages]
            least = max(ranges[s][0], limits[s + 1] if s + 1 < len(limits) else 1)
            if limits[s] <= least or not goes_on():
                break
            limits[s] -= 1
            stages = tuple(
                msgspec.structs.replace(stage, in_flight=limit)
                for stage, limit in zip(best.stages, limits, strict=True)
            )
            found = evaluate(question, stages, best.micro_batches)
            # With fewer in flight before it a stage may hold more: other versions wait for it.
            if found.over_limit(question.cluster):
                break
            if found.prediction.period_s > best.prediction.period_s * SAME:
                break
            best = found
            yield best
