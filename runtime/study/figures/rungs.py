"""Rungs of a study with a budget: all arms train for an eighth of the length at a few rates, the
better half of these pairs twice as long, and so on (successive halving: Jamieson & Talwalkar 2016).

A pair is as good as the time that it seems to need: its overhead over plain training at the rung's
level, times the shortest period of its plans. The level is what plain training has after the same
share of the rung as the study's target is of the whole; where a pair doesn't get there, its
overhead is that at the best level that it has. A rung's curves are smoothed over a tenth to both
sides, since they are short.

What a short training says isn't what a long one would. How far the two are apart is known of the
arms that were trained to the end: the errors ln(overhead / overhead in the rung), of n arms. With
those an arm that was dropped has an interval, Student's with n + 2 degrees of freedom and

    s² = (Σ errors² + 2 · 0.2²) / (n + 2)

as if two more had been off by a fifth: with no arm at hand, a rung's say is a wide one. What delays
allow (`overhead`) makes it narrower.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from .curves import points_of, samples_to, smoothed, value_at
from .spread import Spread, t_quantile
from .study import RISES, Curve, Study, StudyArm, StudyQuestion
from .tuning import badness_of

RUNGS = 3
"""The first has a training's length over 2 to the power of this."""
LEAST = 8
"""Mini-batches of a rung's training; shorter rungs are left out."""
RATES = 3
"""Of each arm in the first rung."""
_SHARE = 10
_BEFORE, _ERROR = 2, 0.2


def rung_lengths(length: int) -> list[int]:
    """Mini-batches of the trainings of each rung, for trainings of a `length`."""
    found = [length >> k for k in range(RUNGS, 0, -1)]
    return [each for each in found if each >= LEAST] or [max(length // 2, 1)]


class Rung:
    """What plain training has in a rung, at its best rate: others are held against that."""

    def __init__(self, question: StudyQuestion, plain: Sequence[Curve]) -> None:
        """
        Args:
            plain: its curves in this rung, one or more.
        """
        self._question = question
        self._steps = max(round(plain[0].length * question.steps / question.length), 1)
        self._rises = RISES[question.metric]
        best = min(plain, key=self.badness)
        self._plain = self._points(best)
        # Of the curve that it is looked for on: another one's may never be reached there.
        found = value_at(self._plain, self._steps)
        level = math.nan if found is None else found
        self._level = level if question.target is None else self._easier(level, question.target)

    def badness(self, curve: Curve) -> tuple[float, float]:
        """Of a curve of plain training (`badness_of`)."""
        return badness_of(curve, self._question.metric, target=None, steps=self._steps)

    def overhead(self, curve: Curve) -> float:
        """A curve's over plain training; infinity where it diverged, or plain training did."""
        points = self._points(curve)
        if curve.diverged_at is not None or not points or not self._plain:
            return math.inf
        values = [value for _, value in points]
        level = self._easier(self._level, max(values) if self._rises else min(values))
        own = samples_to(points, level, rises=self._rises)
        plain = samples_to(self._plain, level, rises=self._rises)
        # Better than plain training ever was, where that diverged.
        return math.inf if own is None or not plain else own / plain

    def _points(self, curve: Curve) -> list[tuple[float, float]]:
        return smoothed(points_of(curve, self._question.metric, 1), _SHARE)

    def _easier(self, one: float, other: float) -> float:
        return min(one, other) if self._rises else max(one, other)


class SaidInRung(NamedTuple):
    """What an arm's best training in a rung says."""

    after: int
    """Mini-batches of the rung's trainings."""
    overhead: float
    rate: float


def said_in_rungs(study: Study, arm: StudyArm) -> list[SaidInRung]:
    """What an arm's trainings in each rung that it was in say, the shortest rung first."""
    found = []
    for after, plain in _by_length(study.plain).items():
        if own := _by_length(arm).get(after):
            rung = Rung(study.question, plain)
            overhead, rate = min((rung.overhead(curve), curve.rate) for curve in own)
            found.append(SaidInRung(after, overhead, rate))
    return found


def _by_length(arm: StudyArm) -> dict[int, list[Curve]]:
    own = sorted((c for c in arm.curves if c.phase == "rung"), key=lambda curve: curve.length)
    return {n: list(curves) for n, curves in itertools.groupby(own, lambda curve: curve.length)}


def expected(overhead: float, errors: Sequence[float]) -> Spread:
    """The overhead of a whole training, by a rung's and the errors of others there."""
    freedom = len(errors) + _BEFORE
    s = math.sqrt((sum(e * e for e in errors) + _BEFORE * _ERROR**2) / freedom)
    by = math.exp(t_quantile(freedom) * s)
    return Spread(mean=overhead, low=overhead / by, high=overhead * by)
