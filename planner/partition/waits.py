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


@dataclass(frozen=True)
class Ways:
    """One micro-batch's way, where layers' devices are known, whatever their speeds.

    It goes along one path of layers, each of which sends gradients back to the one before it. Its
    messages take the fastest wire that there is. P, W and w as above, of the layers on the path;
    but w has all of a stage's layers, and holds of stages alone that have some on the path.

    In 1F1B that flushes, replicas have rounds F W B, which a micro-batch's next forward there waits
    for. From one that begins with the first forward, with m more at a distance of u each, up to the
    last micro-batch's, and everything else that must be between them,

        T ≥ P + (m + 1)·W + (n − m·(u − 1))·w    for 1 ≤ m ≤ (n − 1) / u

    and with the first of them alone T ≥ P + W + n·w − (u − 1)·f. In GPipe's schedule all forwards
    come before, T ≥ P + W + n·w; stages behind may have replicas that begin backwards before the
    last forwards (`places.sharing`).

    Where it never drains, a stage i runs F, then B of the micro-batch u − 1 before, and so does
    each stage j beyond it. So after a micro-batch has come from i to j another one goes back, which
    the forward at i waits for that is u_i − u_j + 1 after the first one's. Thus

        T · (u_i − u_j + 1) / N  ≥  w_i + … + w_j and the messages between them

    for all j. Where each stage has a device, u falls by one from stage to stage: from the end on,
    with x = 0 beyond the last one, w + x ≤ T / N, and the next x is what w + x and the message
    before it are more than T / N, or 0.

    Attributes:
        micro_batches: N.
        flushes, forwards_first: as the system.
        work_s: per layer, [n]: forward and backward, at speed 1.
        path: positions of layers.
        message_s: between neighbours on it, both ways.
        latency_s: of each of them, what doesn't keep the wire busy.
        forward_s: per layer, [n]: as in the profile.
        forward_share: of a layer's work, what its forward is at the most.
    """

    micro_batches: int
    flushes: bool
    forwards_first: bool
    work_s: Vector
    path: tuple[int, ...]
    message_s: tuple[float, ...]
    latency_s: float
    forward_s: Vector
    forward_share: float

    def most_beyond(
        self,
        target: float,
        devices: tuple[int, int],
        own_s: Vector,
        before_s: Vector,
        whole_s: float,
        *,
        alone: bool,
    ) -> Vector:
        """W that stages may have at the most for periods up to a target, [p]; −∞: none will do.
        Of stages with a device each in pipelines that never drain, x.

        Args:
            devices: from a stage's first one to the end, and its own.
            own_s: w, [p].
            before_s: P at the least, [p].
            whole_s: P + w + W at the least.
            alone: no stage has replicas.
        """
        k, r = devices
        n, left, rest = self.micro_batches // r, target - before_s, target - whole_s
        units = min(-(-k // r), n)
        if not self.flushes:
            fine = (units - 1) * r <= self.micro_batches * (
                1 + _ROUNDING - (before_s + own_s) / target
            )
            most = target / n if alone else np.minimum(units * target / n, left)
            return np.where(fine, most - own_s, -np.inf)
        ahead = units - 1
        if self.forwards_first:
            ahead = 0 if alone else max(min(-(-(k - r) // r), n) - 1, 0)
        times = n - ahead * self.forward_share
        most = left - times * own_s
        fine = (left >= n * own_s) & (rest >= (times - 1) * own_s * (1 - _ROUNDING))
        if not self.forwards_first and units < n:
            for more in {1, (n - 1) // units}:
                times = n - more * (units - 1)
                most = np.minimum(most, (left - times * own_s) / (more + 1))
                most = np.minimum(most, (rest - (times - 1) * own_s) / more)
        return np.where(fine, most, -np.inf)

    def longer(self, target: float, beyond_s: Vector, way_s: Vector, *, alone: bool) -> Vector:
        """W of what is before stages, [n, p], from that beyond them and their own ways; or x."""
        found: Vector = beyond_s + way_s
        if self.flushes or not alone:
            return found
        return np.maximum(found - target / self.micro_batches, 0.0)
