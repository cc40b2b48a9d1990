"""Means of a few paired ratios with their intervals.

The interval of a geometric mean over n seeds is Student's, of the logarithms: with x̄ and s the mean
and the standard deviation (n − 1) of the n logarithms, exp(x̄ ± t·s/√n), t the 97.5 % quantile of
n − 1 degrees of freedom: 95 %. One seed has none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

_T = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Student's t at 97.5 %, of 1, 2, … degrees of freedom."""
_NORMAL = 1.96


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A geometric mean and its 95 % interval."""

    mean: float
    low: float | None = None
    """None: there is one seed, which has no spread."""
    high: float | None = None

    def __mul__(self, factor: float) -> Spread:
        """Of so many times as much."""
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Spread(mean=self.mean * factor, low=low, high=high)


def t_quantile(freedom: int) -> float:
    """Student's t at 97.5 % of so many degrees of freedom; beyond 30 that of the normal, which is
    4 % less at most."""
    return _T[freedom - 1] if freedom <= len(_T) else _NORMAL


def spread_of(values: Sequence[float]) -> Spread:
    """Of positive numbers, one for each seed."""
    logs = [math.log(value) for value in values]
    mean, n = sum(logs) / len(logs), len(logs)
    if n == 1:
        return Spread(mean=math.exp(mean))
    s = math.sqrt(sum((x - mean) ** 2 for x in logs) / (n - 1))
    half = t_quantile(n - 1) * s / math.sqrt(n)
    return Spread(mean=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half))
