"""How sure a time is, and when to stop measuring."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

HEAVY_SHARE = 0.01
"""Layers with less of the step's time than this needn't be known well."""

# Of a normal distribution: deviation over median absolute deviation, and the median's
# standard error over the mean's (Kendall and Stuart, The Advanced Theory of Statistics).
_DEVIATION_OVER_MAD = 1.4826
_MEDIAN_OVER_MEAN = 1.2533


def relative_error(times: Sequence[float]) -> float:
    """Standard error of the median of repeated times, over the median.

    The spread is taken from the median absolute deviation, so that a few times when the
    machine was busy elsewhere don't count as doubt. One time alone is as unsure as can be: 1.
    """
    middle = median(times)
    if middle <= 0:
        return 0.0
    if len(times) < 2:
        return 1.0
    mad = median(abs(t - middle) for t in times)
    return float(_MEDIAN_OVER_MEAN * _DEVIATION_OVER_MAD * mad / len(times) ** 0.5 / middle)


def worst_error(layers: Sequence[Sequence[float]]) -> float:
    """Largest relative error among the layers that make up most of the time.

    Args:
        layers: for each layer its repeated times.
    """
    middles = [median(times) for times in layers]
    total = sum(middles)
    heavy = [t for t, m in zip(layers, middles, strict=True) if m >= HEAVY_SHARE * total]
    return max((relative_error(times) for times in heavy), default=0.0)
