"""What a stage has in flight when its memory is at its peak: for sure, or by a guess.

D: stages behind a stage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..schedules.schedules import limit_ranges
from ..systems.variants import Variant
from .choices import capped


@dataclass(frozen=True)
class Held:
    """What a stage has in flight when its memory is at its peak, by D.

    Attributes:
        mini_batches: each with all its micro-batches, in systems whose backward takes them all.
        micro_batches: in systems whose backward takes one.
        versions: weight versions held.
    """

    mini_batches: Callable[[int], float]
    micro_batches: Callable[[int], float]
    versions: Callable[[int], float]


def least_held(variant: Variant) -> Held:
    """What every order has when a stage's backward begins, however it is made."""
    return Held(
        mini_batches=lambda _: 1.0,
        micro_batches=lambda _: np.inf if variant.forwards_first else 1.0,
        versions=lambda _: 1.0,
    )


def held_under(variant: Variant, stages: int, cap: int) -> Held:
    """A guess at what stages with equal times have at their peak, no limit being above `cap`.

    A mini-batch stays at a stage with D behind it while D others begin behind (docs/systems.md).
    """
    limits = capped(limit_ranges(variant, stages), cap)

    def mini_batches(behind: int) -> float:
        limit = limits[max(stages - 1 - behind, 0)]
        return float(min(limit, 1 + behind))

    def micro_batches(behind: int) -> float:
        if variant.forwards_first:
            return np.inf
        return float(stages) if variant.split_backward else 1.0 + behind

    def versions(behind: int) -> float:
        if variant.stashes:
            return mini_batches(behind)
        if variant.synchronises:
            # Versions that have entered at stage 0 and not here, at most one for each stage before.
            return float(max(min(stages - behind, limits[0]), 1))
        return 1.0

    return Held(
        mini_batches=mini_batches,
        micro_batches=micro_batches,
        versions=versions,
    )
