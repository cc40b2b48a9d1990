"""What the schedule of 1F1B over micro-batches makes stages wait for, by the devices beyond them.

A replica of a stage has u = min(⌈K / r⌉, n) micro-batches in flight, K the devices from the stage
on, r the stage's, n = N / r its share of the micro-batches. With fewer it waits more; so a period
to keep to needs so many devices beyond a stage, however they are used. W is one micro-batch's way
through the layers beyond the stage, forward and back, P that through those before it, w the
stage's own work for it.

Where the pipeline drains, n forwards and n backwards run in the sequence F^(u-1) (F B)^(n-u+1)
B^(u-1). The first backward waits for W after the first forward. From its begin to the end of the
last forward n - u backwards and as many forwards run, where u < n; then the last backward waits
for W once more. So

    T ≥ P + f + W + (n - u)·w + W + b = P + 2·W + (n + 1 - u)·w

where equal stages with one device each have equality. Where u = n, no forward comes after the
first backward.

Where it never drains, a stage runs a micro-batch's forward after the backward of the u·r-th one
before it, which takes w + W from its own forward on: T ≥ n·(w + W) / u. And no stage gets further
ahead than its first ones let it, which have N micro-batches in flight at the most: micro-batch m
goes back from stage s when m + (u_s - 1)·r_s has come there, after m + (u_s - 1)·r_s - N went back
from the first stage, and so from s. So in a period, in which N micro-batches go round,

    N - (u_s - 1)·r_s  ≥  N · (P + w) / T
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Vector

_ROUNDING = 1e-9
"""Of a number of micro-batches, what is no reason for one more."""


@dataclass(frozen=True)
class Waits:
    """What stages wait for.

    Attributes:
        micro_batches: N.
        flushes: the pipeline drains after each mini-batch.
        speed: of a device.
        before_s, beyond_s: per layer, [n]: of P and of W, as fast as can be; 0 for layers that a
            micro-batch may pass by.
    """

    micro_batches: int
    flushes: bool
    speed: float
    before_s: Vector
    beyond_s: Vector

    def fewest_beyond(
        self, target: float, r: int, work: Vector, before_s: float, beyond_s: Vector
    ) -> Vector:
        """Devices that there must be beyond stages for periods up to a target, at the least, [p].

        Args:
            work: of a stage for a whole mini-batch, in s at speed 1, [p].
            before_s: P.
            beyond_s: W, [p].
        """
        a, b = self.falling(target, work, before_s, beyond_s)
        units = np.ceil(((a - 1) / r + 2 - b) * (1 - _ROUNDING) - _ROUNDING)
        needed: Vector = np.maximum((units - 2) * r + 1, 0.0)
        return needed

    def falling(
        self, target: float, work: Vector, before_s: float, beyond_s: Vector
    ) -> tuple[float | Vector, float | Vector]:
        """As `fewest_beyond`, whatever r, were units not whole: a and b of a - b · r, [p]."""
        n = self.micro_batches
        mine = np.maximum(work / (n * self.speed), 1e-300)
        if self.flushes:
            # With as many as there are, what a drained pipeline waits for is the way alone.
            return n + 1.0, 1.0 + np.maximum((target - before_s - 2 * beyond_s) / mine, 1.0)
        return np.minimum(n * (mine + beyond_s) / target, n) + 1.0, 2.0

    def allowed(
        self, target: float, r: int, through_s: Vector, devices: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether stages may have so many devices beyond them, [p].

        Args:
            through_s: P + w of layers that no micro-batch passes by, nothing computed again, [p].
        """
        n = self.micro_batches
        ahead = np.minimum(-(-devices // r) * r, n - r)
        fine: NDArray[np.bool_] = ahead <= n * (1 - through_s / target) + _ROUNDING * n
        return fine | self.flushes
