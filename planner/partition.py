"""Dynamic programming over chains of downsets: the best cut into a given number of stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]

_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class FlushTerms:
    """Per stage, [downsets, downsets]: what a flush system's mini-batch time is made of.

    Attributes:
        total_s: added up over stages (each stage's forward, backward, and its transfers).
        forward_s: only the largest counts, once for each further micro-batch.
        backward_s: likewise.
    """

    total_s: Matrix
    forward_s: Matrix
    backward_s: Matrix


def smallest_bottleneck(
    loads: Sequence[Matrix], costs: Sequence[Matrix] | None = None
) -> tuple[float, list[int]] | None:
    """Cut so that the largest stage load is smallest; among such cuts the cheapest.

    Args:
        loads: per stage, load of every possible stage; infinite where it isn't allowed.
        costs: per stage, what is added up to choose among cuts with the same bottleneck.

    Returns:
        The bottleneck and the downsets after each stage (the last is the full one); None when
        every cut is forbidden.
    """
    best, back = _chain(loads, np.maximum)
    if not np.isfinite(best):
        return None
    if costs is not None:
        within = [
            np.where(load <= best * _SLACK, cost, np.inf)
            for load, cost in zip(loads, costs, strict=True)
        ]
        _, back = _chain(within, np.add)
    return best, _follow(back)


def _chain(loads: Sequence[Matrix], combine: np.ufunc) -> tuple[float, list[NDArray[np.intp]]]:
    count = loads[0].shape[0]
    value = np.full(count, np.inf)
    value[0] = 0.0
    back = []
    for load in loads:
        options = combine(value[:, None], load)
        choice = options.argmin(axis=0)
        value = options[choice, np.arange(count)]
        back.append(choice)
    return float(value[-1]), back


def _follow(back: Sequence[NDArray[np.intp]]) -> list[int]:
    cut = [back[0].shape[0] - 1]
    for choice in reversed(back[1:]):
        cut.append(int(choice[cut[-1]]))
    return cut[::-1]


def smallest_flush_time(
    terms: Sequence[FlushTerms], micro_batches: int, ceiling: float = np.inf
) -> tuple[float, list[int]] | None:
    """Cut so that Σ total + (N − 1)·(max forward + max backward) is smallest.

    Labels (total, largest forward, largest backward) are kept per downset unless another one
    is at least as good in all three, or they can't end below `ceiling`.

    Returns:
        The time and the downsets after each stage; None when every cut is forbidden.
    """
    rest = micro_batches - 1
    count = terms[0].total_s.shape[0]
    labels: list[Matrix] = [np.zeros((0, 3)) for _ in range(count)]
    labels[0] = np.zeros((1, 3))
    history: list[list[NDArray[np.intp]]] = []
    for term in terms:
        fresh: list[Matrix] = []
        came: list[NDArray[np.intp]] = []
        for b in range(count):
            parts, froms = [], []
            for a in range(b):
                if len(labels[a]) and np.isfinite(term.total_s[a, b]):
                    part = np.empty_like(labels[a])
                    part[:, 0] = labels[a][:, 0] + term.total_s[a, b]
                    part[:, 1] = np.maximum(labels[a][:, 1], term.forward_s[a, b])
                    part[:, 2] = np.maximum(labels[a][:, 2], term.backward_s[a, b])
                    parts.append(part)
                    numbers = np.arange(len(part))
                    froms.append(np.stack([np.full(len(part), a), numbers], axis=1))
            if not parts:
                fresh.append(np.zeros((0, 3)))
                came.append(np.zeros((0, 2), dtype=np.intp))
                continue
            found, origin = np.concatenate(parts), np.concatenate(froms)
            below = found[:, 0] + rest * (found[:, 1] + found[:, 2]) <= ceiling * _SLACK
            chosen = np.flatnonzero(below)[_undominated(found[below])]
            fresh.append(found[chosen])
            came.append(origin[chosen])
        labels = fresh
        history.append(came)
    ends = labels[-1]
    if not len(ends):
        return None
    times = ends[:, 0] + rest * (ends[:, 1] + ends[:, 2])
    number = int(times.argmin())
    best, downset, cut = float(times[number]), count - 1, []
    for came in reversed(history):
        cut.append(downset)
        downset, number = (int(x) for x in came[downset][number])
    return best, cut[::-1]


def _undominated(found: Matrix) -> NDArray[np.intp]:
    order = np.lexsort((found[:, 2], found[:, 1], found[:, 0]))
    kept: list[int] = []
    for k in order:
        others = found[kept]
        if not len(kept) or not (others <= found[k]).all(axis=1).any():
            kept.append(int(k))
    return np.array(kept, dtype=np.intp)
