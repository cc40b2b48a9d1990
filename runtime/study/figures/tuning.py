"""Which rates an arm tries: a geometric grid that moves on, within a budget that is equal for all.

The grid begins with the given rate and its two neighbours. While the best lies at an edge, one
more is tried beyond that edge; where it doesn't, the gap beside it is halved (in logarithms), on
the side of its better neighbour; so it is at the limits that files set to rates. The last trials go
to the other warm-ups, at the best rate. A training that diverged is worse than any other; where all
have, the grid moves down.

One seed may flatter a rate at the edge of stability: so the best few train with all seeds, and the
best of these is taken.

What counts is what the study asks: samples to the target. Where plain training is to set it, plain
training is tuned to be best after the given steps, so that the baseline is a strong one; and its
best trial's level is the target that the others are tuned for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....profiles.files import MAX_FACTOR
from .curves import end_value, points_of, samples_to, smoothed, value_at
from .study import RISES, Curve, Metric


@dataclass(frozen=True)
class Trial:
    """A training that a rate is judged by.

    Attributes:
        badness: the less, the better (`badness_of`).
    """

    rate: float
    warmup: int
    badness: tuple[float, float]


DIVERGED = 2.0
LEAST = 1e-300
"""No rate below that is tried."""


def badness_of(
    curve: Curve, metric: Metric, *, target: float | None, steps: int
) -> tuple[float, float]:
    """How bad a trial is.

    First those that reach the target, by their samples; then those that don't, by their end; then
    those that diverged.

    Args:
        target: None: this is plain training, which sets it: by its value after `steps`.
    """
    sign = -1.0 if RISES[metric] else 1.0
    end = end_value(curve, metric)
    if end is None:
        return DIVERGED, 0.0
    if target is None:
        return 0.0, sign * level_of(curve, metric, steps)
    samples = samples_to(smoothed(points_of(curve, metric, 1)), target, rises=RISES[metric])
    return (1.0, sign * end) if samples is None else (0.0, samples)


def level_of(curve: Curve, metric: Metric, steps: int) -> float:
    """What a curve has after so many mini-batches, or at its end; a curve without points: NaN."""
    value = value_at(smoothed(points_of(curve, metric, 1)), steps)
    return math.nan if value is None else value


@dataclass(frozen=True)
class TuningGrid:
    """How rates are looked for.

    Attributes:
        rate: where the grid begins.
        factor: between neighbours.
        budget: trials in all.
        warmups: updates; the rates are tried with the first.
        halves: gaps. Else, once the best doesn't lie at an edge, no more rates are tried.
    """

    rate: float
    factor: float
    budget: int
    warmups: tuple[int, ...]
    halves: bool = True

    @property
    def for_rates(self) -> int:
        """Trials that go to rates."""
        return self.budget - (len(self.warmups) - 1)


def next_trials(grid: TuningGrid, done: Sequence[Trial]) -> list[tuple[float, int]]:
    """The rates and warm-ups to be tried now, together; none: the budget is spent.

    A function of what the trials before gave, whatever came first: a study that is started again
    tries the same.
    """
    first = grid.warmups[0]
    rates = [trial for trial in done if trial.warmup == first]
    if len(rates) < grid.for_rates:
        tried = {trial.rate for trial in rates}
        left = [rate for rate in _start(grid) if rate not in tried]
        if left:
            return [(rate, first) for rate in left]
        if grid.halves or at_edge(rates, best_trial(rates).rate):
            return [(_one_more(grid, rates), first)]
    best = best_trial(rates)
    tried_warmups = {trial.warmup for trial in done}
    return [(best.rate, warmup) for warmup in grid.warmups[1:] if warmup not in tried_warmups]


def _start(grid: TuningGrid) -> list[float]:
    """The given rate and its neighbours; at a limit of rates the next two on its other side."""
    rate, by = grid.rate, grid.factor
    found = map(_rounded, (rate, rate * by, rate / by, rate / by / by, rate * by * by))
    return [rate for rate in found if _allowed(rate)][: min(grid.for_rates, 3)]


def best_trial(done: Sequence[Trial]) -> Trial:
    """The best; of equal ones, the lowest rate and the shortest warm-up."""
    return min(done, key=_rank)


def _rank(trial: Trial) -> tuple[tuple[float, float], float, int]:
    return trial.badness, trial.rate, trial.warmup


def candidates(done: Sequence[Trial], count: int) -> list[Trial]:
    """The best so many, the best first; those that diverged only where there is no other."""
    ranked = sorted(done, key=_rank)
    sound = [trial for trial in ranked if trial.badness[0] < DIVERGED]
    return (sound or ranked[:1])[:count]


def together(over_seeds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """How bad a rate is over all seeds: how many of them fail first, then the mean over those that
    fail worst."""
    worst = max(kind for kind, _ in over_seeds)
    values = [value for kind, value in over_seeds if kind == worst]
    return sum(kind for kind, _ in over_seeds), sum(values) / len(values)


def at_edge(done: Sequence[Trial], rate: float) -> bool:
    """Whether nothing was tried on one side of a rate."""
    rates = [trial.rate for trial in done]
    return rate in (min(rates), max(rates))


def _one_more(grid: TuningGrid, done: Sequence[Trial]) -> float:
    trials = sorted(done, key=lambda trial: trial.rate)
    k = trials.index(best_trial(trials))
    below, above = trials[:k][-1:], trials[k + 1 :][:1]
    beyond = _rounded(trials[k].rate * grid.factor if below else trials[k].rate / grid.factor)
    if not (below and above) and _allowed(beyond):
        return beyond
    # Inside the grid, or at a limit of rates.
    other = min(above + below, key=lambda trial: trial.badness)
    return _rounded(math.sqrt(trials[k].rate) * math.sqrt(other.rate))


def _allowed(rate: float) -> bool:
    """Whether files take such a rate, and its digits are all there."""
    return LEAST <= rate <= MAX_FACTOR


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
