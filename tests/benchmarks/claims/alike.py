"""Which plans train alike: all that a training follows from is which weights every pass uses.

Where all stages use the same versions, as under vertical synchronisation, cuts don't matter; where
all micro-batches of a mini-batch do and no layer mixes samples, neither does N.
"""

from __future__ import annotations

from collections.abc import Hashable

from timeprest.planner.plan import Plan
from timeprest.planner.recordings.predicted import predicted

LOOKED_AT = 240
"""Mini-batches. On eight stages lags may take 90 to settle, and then repeat every 30 alone."""

Row = tuple[tuple[int, ...], ...]
"""By mini-batch and micro-batch."""
Rows = tuple[Row, ...]


def lags_of(plan: Plan) -> Rows:
    """By stage, mini-batch and micro-batch, by how many updates a forward's weights are older than
    those that the mini-batch's own update is applied to."""
    found: list[list[list[int]]] = [[[] for _ in range(LOOKED_AT)] for _ in plan.stages]
    for span in predicted(plan, LOOKED_AT).spans:
        if span.kind == "F" and span.version is not None:
            found[span.stage][span.mini_batch].append(span.mini_batch - span.version)
    return tuple(tuple(tuple(row) for row in stage) for stage in found)


def training_of(plan: Plan, *, mixes: bool) -> Hashable:
    """A key: plans with the same one train alike.

    Args:
        mixes: a layer mixes the samples of a batch.
    """
    system, rows = plan.system, lags_of(plan)
    uniform = all(len(set(row)) == 1 for stage in rows for row in stage)
    if uniform and not mixes:
        rows = tuple(tuple(row[:1] for row in stage) for stage in rows)
    alike = len(set(rows)) == 1
    cut = () if alike else tuple(stage.nodes for stage in plan.stages)
    rules = (system.backward_weights, system.update_rule, system.prediction, system.horizon)
    return (rules, rows[:1] if alike else rows, cut)


def delayed(delay: int) -> Hashable:
    """The key of plain training with gradients of the weights so many updates before."""
    rows = (tuple((min(b, delay),) for b in range(LOOKED_AT)),)
    return (("forward", "optimizer", "", ""), rows, ())


# On two stages ----------------------------------------------------------------------------------


def order_on_two(plan: Plan, epoch: int) -> str:
    """An order of two stages that trains as a plan does all of whose stages use the same versions.

    Args:
        epoch: mini-batches, after which the pipeline is empty.

    Raises ValueError where they don't, or their lags neither repeat nor are known for an epoch.
    """
    lags = lags_of(plan)
    if len(set(lags)) > 1:
        raise ValueError(f"{plan.variant}: its stages use different versions")
    begin, cycle = _repeating(lags[0], plan.variant, epoch)
    words: list[list[str]] = [[], []]
    done = 0
    for b in range(begin + cycle):
        if b == begin:
            words = [[*each, "|"] for each in words]
        for i, lag in enumerate(lags[0][b]):
            while done < b - lag:
                words[0].append(f"0B{done}")
                done += 1
            words[0].append(f"0F{b}.{i}")
            words[1].append(f"1F{b}.{i}")
        words[1].append(f"1B{b}")
    return "".join(" ".join(each) + "\n" for each in words)


def _repeating(rows: Row, name: str, epoch: int) -> tuple[int, int]:
    """The mini-batch from which on lags may repeat, those of the one before are alike, and after
    how many.

    They do where that is seen four times, over half of all rows. Where they never do, as stages
    drift against one another by times that have no common measure, more than an epoch is written
    out.
    """
    for cycle in range(1, len(rows) // 8 + 1):
        alike = [row == again for row, again in zip(rows, rows[cycle:], strict=False)]
        begin = 1 + max((b for b, same in enumerate(alike) if not same), default=-1)
        if begin < len(rows) // 2:
            return begin + 1, cycle
    for b in reversed(range(epoch, len(rows))):
        if rows[b] == rows[b - 1]:
            return b, 1
    raise ValueError(
        f"{name}: its lags don't repeat within {len(rows)} mini-batches, and an epoch has {epoch}"
    )
