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


def flush_time(terms: Sequence[FlushTerms], micro_batches: int, cut: Sequence[int]) -> float:
    """Σ total + (N − 1)·(max forward + max backward) of a cut."""
    pairs = list(zip((0, *cut), cut, strict=False))
    stages = list(zip(terms, pairs, strict=True))
    total = sum(term.total_s[a, b] for term, (a, b) in stages)
    slowest = max(term.forward_s[a, b] for term, (a, b) in stages)
    slowest += max(term.backward_s[a, b] for term, (a, b) in stages)
    return float(total + (micro_batches - 1) * slowest)


def flush_bound(terms: Sequence[FlushTerms], micro_batches: int) -> float:
    """A quick lower bound on `flush_time`: each of its three parts at its own smallest."""
    total, forward, backward = _to_go(terms)[0][:, 0]
    if not np.isfinite(total):
        return float("inf")
    return float(total + (micro_batches - 1) * (forward + backward))


def smallest_flush_time(
    terms: Sequence[FlushTerms], micro_batches: int, ceiling: float = np.inf
) -> tuple[float, list[int]] | None:
    """Cut so that Σ total + (N − 1)·(max forward + max backward) is smallest.

    Labels (total, largest forward, largest backward) are kept per downset unless another one
    is at least as good in all three, or they can't end at or below `ceiling`.

    Returns:
        The time and the downsets after each stage; None when no cut is allowed and as good.
    """
    rest = micro_batches - 1
    to_go = _to_go(terms)
    labels: dict[int, Matrix] = {0: np.zeros((1, 3))}
    history: list[dict[int, NDArray[np.intp]]] = []
    for s, term in enumerate(terms):
        found: list[Matrix] = []
        origin: list[NDArray[np.intp]] = []
        for a, here in labels.items():
            targets = np.flatnonzero(np.isfinite(term.total_s[a] + to_go[s + 1][0]))
            total = here[:, 0, None] + term.total_s[a, targets]
            forward = np.maximum(here[:, 1, None], term.forward_s[a, targets])
            backward = np.maximum(here[:, 2, None], term.backward_s[a, targets])
            ahead = to_go[s + 1][:, targets]
            least = total + ahead[0]
            least += rest * (np.maximum(forward, ahead[1]) + np.maximum(backward, ahead[2]))
            rows, columns = np.nonzero(least <= ceiling * _SLACK)
            picked = [values[rows, columns] for values in (total, forward, backward)]
            found.append(np.stack(picked, axis=1))
            origin.append(np.stack([np.full(len(rows), a), rows, targets[columns]], axis=1))
        if not found:
            return None
        all_found, all_origin = np.concatenate(found), np.concatenate(origin)
        labels, came = {}, {}
        for b in np.unique(all_origin[:, 2]):
            mine = np.flatnonzero(all_origin[:, 2] == b)
            chosen = mine[_undominated(all_found[mine])]
            labels[int(b)] = all_found[chosen]
            came[int(b)] = all_origin[chosen, :2]
        history.append(came)
    downset = terms[0].total_s.shape[0] - 1
    if downset not in labels:
        return None
    ends = labels[downset]
    times = ends[:, 0] + rest * (ends[:, 1] + ends[:, 2])
    number = int(times.argmin())
    best, cut = float(times[number]), []
    for came in reversed(history):
        cut.append(downset)
        downset, number = (int(x) for x in came[downset][number])
    return best, cut[::-1]


def _to_go(terms: Sequence[FlushTerms]) -> list[Matrix]:
    """Before each stage, and at the end: per downset the smallest total still to come, the
    smallest largest forward and the smallest largest backward; each for itself. [3, downsets]
    """
    count = terms[0].total_s.shape[0]
    level = np.full((3, count), np.inf)
    level[:, -1] = 0.0
    levels = [level]
    for term in reversed(terms):
        allowed = np.isfinite(term.total_s)
        forward = np.where(allowed, np.maximum(term.forward_s, level[1]), np.inf)
        backward = np.where(allowed, np.maximum(term.backward_s, level[2]), np.inf)
        total = term.total_s + level[0]
        level = np.stack([total.min(axis=1), forward.min(axis=1), backward.min(axis=1)])
        levels.append(level)
    return levels[::-1]


def _undominated(found: Matrix) -> NDArray[np.intp]:
    order = np.lexsort((found[:, 2], found[:, 1], found[:, 0]))
    kept: list[int] = []
    for k in order:
        if not kept or not (found[kept] <= found[k]).all(axis=1).any():
            kept.append(int(k))
    return np.array(kept, dtype=np.intp)
