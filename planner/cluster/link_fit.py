"""What a link's measured times say: latency and bandwidth, by a fit."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import fsum, sqrt
from statistics import median
from typing import Any

import msgspec

from ...profiles.errors import RunError
from .links import costs_by_size

OFF = 1.25
"""Measured / fitted, above which, or below one over it, a fit is clearly off."""


class LinkPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A time measured for messages of one size.

    Attributes:
        message_bytes: size of the message, or of the tensor that is summed.
        seconds: a median.
        error: its relative standard error.
        repetitions: how many times it was measured.
    """

    message_bytes: int
    seconds: float
    error: float
    repetitions: int


class LinkFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A link's time as t = α + bytes / β, and the points that say so.

    Attributes:
        latency_s: α, the seconds that every message takes however small; at least 0.
        bandwidth_bytes_per_s: β, the bytes that each further second carries; more than 0.
        points: what was measured.
        ratios: measured / fitted, for each point; above 1 where the fit promises too much.
    """

    latency_s: float
    bandwidth_bytes_per_s: float
    points: tuple[LinkPoint, ...]
    ratios: tuple[float, ...]

    def seconds(self, message_bytes: float) -> float:
        return self.latency_s + message_bytes / self.bandwidth_bytes_per_s

    @property
    def is_off(self) -> bool:
        """Whether some size takes clearly more or less than fitted."""
        return max(self.ratios) > OFF or min(self.ratios) < 1 / OFF

    @property
    def costs(self) -> dict[str, Any]:
        """As a `Network` or an `AllReduce` has it: the fit, or the times where that is off."""
        if not self.is_off:
            return {
                "latency_s": self.latency_s,
                "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s,
            }
        # A larger message that took less says how much times vary.
        seconds = accumulate((p.seconds for p in self.points), max)
        sizes = (float(p.message_bytes) for p in self.points)
        times = [(size, float(f"{s:.4g}")) for size, s in zip(sizes, seconds, strict=True)]
        return costs_by_size(times, self.latency_s)


def fit_link(points: Sequence[LinkPoint]) -> LinkFit:
    """Fit t = α + bytes / β with α ≥ 0 and β > 0 (Hockney's model of a message's time).

    Raises RunError when the points don't hold a bandwidth: fewer than two sizes, or times that
    don't grow with the size.
    """
    # Least squares of fitted / measured - 1, so that every size has the same say: over four
    # orders of magnitude the largest message would else decide alone, and α be its noise.
    # Where bandwidth falls off beyond the caches, no line fits all. Too short a time can't cost
    # more than 1 here, so it is the largest sizes that are given up, not the many below them
    # where a pipeline's messages lie; the ratios tell.
    if len({p.message_bytes for p in points}) < 2 or any(p.seconds <= 0 for p in points):
        raise RunError("a link's fit needs times above 0 of two sizes or more")
    weights = [p.seconds**-2 for p in points]
    total = fsum(weights)
    mean_bytes = fsum(w * p.message_bytes for w, p in zip(weights, points, strict=True)) / total
    mean_s = fsum(w * p.seconds for w, p in zip(weights, points, strict=True)) / total
    spread = [p.message_bytes - mean_bytes for p in points]
    slope = fsum(
        w * d * (p.seconds - mean_s) for w, d, p in zip(weights, spread, points, strict=True)
    ) / fsum(w * d * d for w, d in zip(weights, spread, strict=True))
    latency = mean_s - slope * mean_bytes
    if latency < 0:
        # The best within α ≥ 0 lies on its edge: the squares are convex in α and 1 / β.
        latency = 0.0
        slope = fsum(p.message_bytes / p.seconds for p in points) / fsum(
            (p.message_bytes / p.seconds) ** 2 for p in points
        )
    if slope <= 0:
        raise RunError(
            "the times don't grow with the messages' size, so they hold no bandwidth; "
            "the machine may be busy: measure again"
        )
    return LinkFit(
        latency_s=latency,
        bandwidth_bytes_per_s=1 / slope,
        points=tuple(points),
        ratios=tuple(p.seconds / (latency + slope * p.message_bytes) for p in points),
    )


def typical_pair(pairs: Sequence[Sequence[LinkPoint]]) -> list[LinkPoint]:
    """One point for each size from those of several pairs: the median pair's time.

    Every pair has the same sizes in the same order. The error is the largest one.
    """
    return [
        LinkPoint(
            message_bytes=same_size[0].message_bytes,
            seconds=median(p.seconds for p in same_size),
            error=max(p.error for p in same_size),
            repetitions=sum(p.repetitions for p in same_size),
        )
        for same_size in zip(*pairs, strict=True)
    ]


def error_of_median(samples: Sequence[float]) -> float:
    """Relative standard error of the median of positive samples, whatever their distribution.

    How many of n samples lie below the true median is binomial, with a standard deviation of
    √n / 2: that many places to either side of the middle of the sorted samples is one standard
    error. (Distribution-free intervals: David & Nagaraja, Order Statistics, section 7.1.)
    """
    ordered = sorted(samples)
    middle, reach = (len(ordered) - 1) / 2, sqrt(len(ordered)) / 2
    below = ordered[max(0, round(middle - reach))]
    above = ordered[min(len(ordered) - 1, round(middle + reach))]
    return (above - below) / 2 / median(ordered)
