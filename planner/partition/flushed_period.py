"""Estimates the period of a cut where the pipeline runs empty after each mini-batch; no bound.

In 1F1B that flushes, the period is about the largest load, of a stage that waits for one
micro-batch's way through all others, and what stages compute again on that way. Stages with more
stages behind them run more forwards while they wait for that micro-batch, and may have more to do
(`places.returning` has the formula).
"""

from __future__ import annotations

from .problem import Cut, StageProblem, Vector, members, stage_load


def period_of(problem: StageProblem, forward_s: Vector, cut: Cut, each: int = 1) -> float:
    """An estimate of a cut's period, in s; the schedule's may be shorter or longer.

    Args:
        forward_s: per layer, [n]: of one micro-batch.
        each: micro-batches of a replica, where it runs forwards while it waits for its first
            backward; 1: none.
    """
    below, largest, recompute_s = 0, 0.0, 0.0
    for stage in cut.stages:
        option = problem.options[stage.option]
        mode, inside = problem.modes[option.mode], [*members(stage.layers)]
        load = stage_load(problem, below, stage.layers, stage.option, stage.k)
        behind = -(-stage.k // option.replicas) - 1
        largest = max(largest, load - min(behind, each - 1) * float(forward_s[inside].sum()))
        recompute_s += 0.0 if mode.recompute_s is None else float(mode.recompute_s[inside].sum())
        below |= stage.layers
    return largest + recompute_s
