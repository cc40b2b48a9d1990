"""Which of two plans is the better one."""

from __future__ import annotations

from .evaluate import Evaluation

SAME = 1 + 1e-9
"""Periods within this factor are the same; rounding is no gain."""


def better(found: Evaluation, best: Evaluation) -> bool:
    """A shorter period; at the same period fewer devices, stages, staleness, then less memory."""

    def rank(e: Evaluation) -> tuple[int, int, int, int]:
        predicted = e.prediction.stages
        return (
            sum(len(stage.devices) for stage in e.stages),
            len(e.stages),
            max(stage.version_difference for stage in predicted),
            max(stage.memory_bytes for stage in predicted),
        )

    mine, its = found.prediction.period_s, best.prediction.period_s
    if mine * SAME < its or its * SAME < mine:
        return mine < its
    return rank(found) < rank(best)
