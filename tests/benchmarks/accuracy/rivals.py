"""Other predictions of Sailor's runs: its own simulator's, and the naive one."""

from __future__ import annotations

from itertools import pairwise

from .sailor import PARAMETERS, Group, Run, Tables, bytes_per_s

_BUCKET = 500_000_000
"""Their MEMORY_BUCKET_DEEPSPEED_SIZE."""


def naive_s(tables: Tables, run: Run) -> float:
    """The slowest stage's forward and backward for every micro-batch, and once more for each stage
    before the pipeline is full; nothing besides."""
    slowest = max(
        _both_s(tables, run, s, group) for s, groups in enumerate(run.groups) for group in groups
    )
    return slowest * (run.each + len(run.stages) - 1)


def sailors_s(tables: Tables, run: Run) -> float:
    """As its `runtime_simulator.py` (cf2c8e3) has it: a straggler's compute and messages for each
    micro-batch, all stages' once, the largest update, and a ring for the largest stage."""
    stages = range(len(run.stages))
    compute_s = [
        max(sum(tables.seconds(run, s, g, tied=False)[:2]) for g in run.groups[s]) for s in stages
    ]
    messages_s = [_messages_s(tables, run, s) for s in stages]
    straggler_s = max(a + b for a, b in zip(compute_s, messages_s, strict=True))
    pipeline_s = (run.each - 1) * straggler_s + sum(compute_s) + sum(messages_s)
    return pipeline_s + _update_s(tables, run) + max(_sync_s(tables, run, s) for s in stages)


def _both_s(tables: Tables, run: Run, s: int, group: Group) -> float:
    """Forward and backward of a stage, by the table alone."""
    return sum(tables.seconds(run, s, group, tied=False)[:2])


def _update_s(tables: Tables, run: Run) -> float:
    """The one that was timed, for any stage."""
    return max(tables.update_s(run, group) for groups in run.groups for group in groups)


def _messages_s(tables: Tables, run: Run, s: int) -> float:
    """What a stage sends for a micro-batch; at the pipeline's ends some of it counts twice."""
    last = len(run.stages) - 1

    def longest(to: int, layer: int) -> float:
        nbytes = tables.fact(run, layer, 1, "act_output_floats") * run.micro_batch
        there = run.groups[to]
        return max(
            nbytes / bytes_per_s(tables.curve(group, there[j % len(there)]), nbytes)
            for j, group in enumerate(run.groups[s])
        )

    on = longest(s + 1, run.stages[s][-1]) if s < last else 0.0
    back = longest(s - 1, run.stages[s][0]) if s else 0.0
    if 0 < s < last:
        return on + back
    if s == last:
        return 2 * back
    return on if last < 3 else 2 * on


def _sync_s(tables: Tables, run: Run, s: int) -> float:
    groups = run.groups[s]
    ranks = min(4, *(group.ranks for group in groups))
    left = tables.stage_bytes(run, s, 1, PARAMETERS) / ranks
    ends = list(pairwise(groups))
    seconds = 0.0
    while left > 0 and ends:
        bucket = min(left, _BUCKET)
        seconds += _ring_s(tables, *ends[-1], bucket, len(groups))
        left -= bucket
    return seconds


def _ring_s(tables: Tables, a: Group, b: Group, nbytes: float, n: int) -> float:
    curve = tables.curve(a, b, (1, 1))
    return 2 * (n - 1) * (nbytes / n) / bytes_per_s(curve, nbytes / n)
