"""Learning curves: smoothed, and where they cross a level.

A curve is a list of points (samples, value), by rising samples. What was averaged over a window of
mini-batches stands in its middle. Smoothing takes the mean over as many points before as after,
h = ⌊points / 30⌋ or as many as there are at the ends, so that it shifts nothing; a crossing is the
first, interpolated between two points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from .study import Curve, Metric

Points = Sequence[tuple[float, float]]

SMOOTHING = 30
"""A point is smoothed over this share of the curve before it, and as much behind."""


def points_of(curve: Curve, metric: Metric, mini_batch: int) -> list[tuple[float, float]]:
    """The curve of a figure as (samples, value), not smoothed.

    Args:
        mini_batch: samples in it.
    """
    if metric != "loss":
        name = metric.removeprefix("test ")
        return [
            (float(point.mini_batches * mini_batch), point.figures[name])
            for point in curve.tests
            if name in point.figures
        ]
    end = curve.diverged_at or curve.length
    found = []
    for k, loss in enumerate(curve.losses):
        first = k * curve.window
        last = min(first + curve.window, max(end, first + 1))
        found.append(((first + last) / 2 * mini_batch, loss))
    return found


def smoothed(points: Points, share: int = SMOOTHING) -> list[tuple[float, float]]:
    """The curve without its noise, over so small a `share` to both sides."""
    most = len(points) // share
    found = []
    for k, (at, _) in enumerate(points):
        h = min(most, k, len(points) - 1 - k)
        part = [value for _, value in points[k - h : k + h + 1]]
        found.append((at, sum(part) / len(part)))
    return found


def noise_of(points: Points) -> float:
    """Standard deviation of the points around what they follow: the root of half their mean squared
    successive difference (von Neumann 1941), which knows of no trend. 0 for fewer than two."""
    steps = [b - a for (_, a), (_, b) in pairwise(points)]
    return math.sqrt(sum(step * step for step in steps) / (2 * len(steps))) if steps else 0.0


def value_at(points: Points, samples: float) -> float | None:
    """The value after so many samples, interpolated; at the ends the nearest. None: no points."""
    if not points:
        return None
    at, values = zip(*points, strict=True)
    return float(np.interp(samples, at, values))


def samples_to(points: Points, level: float, *, rises: bool) -> float | None:
    """Samples after which a curve first is as good as a level, interpolated. None: it never is.

    Args:
        rises: more is better.
    """
    sign = 1.0 if rises else -1.0
    wanted, before = sign * level, None
    for at, value in points:
        have = sign * value
        if have >= wanted:
            if before is None:
                return at
            a, had = before
            return a + (at - a) * (wanted - had) / (have - had)
        before = at, have
    return None


def end_value(curve: Curve, metric: Metric) -> float | None:
    """The last value of the smoothed curve, the mean over its last tenth; None where it diverged,
    or has none."""
    if curve.diverged_at is not None:
        return None
    values = [value for _, value in points_of(curve, metric, 1)]
    last = values[-max(len(values) // 10, 1) :]
    return sum(last) / len(last) if last else None
