"""A point of the local search that was evaluated, and which of two is better."""

from __future__ import annotations

from dataclasses import dataclass

from ...evaluate import Evaluation
from ...partition.problem import SAME
from .neighbours import Point

WORTH_IT = 1e-3
"""So many bottlenecks less are worth a move where the period stays."""


@dataclass(frozen=True)
class Standing:
    """A point that was evaluated.

    Attributes:
        over: what stages need beyond their devices' memory, as a share of it, summed, and version
            differences beyond what may be; 0: it is a plan that was asked for.
        bottlenecks: how many devices and wires are busy for about all of the period.
    """

    point: Point
    found: Evaluation
    over: float
    bottlenecks: float

    @property
    def period_s(self) -> float:
        """Of the plan, whether it fits or not."""
        return self.found.prediction.period_s

    def better(self, other: Standing) -> bool:
        """Whether it is worth moving here from the other one."""
        if (self.over or other.over) and abs(self.over - other.over) > 1e-9:
            return self.over < other.over
        if self.period_s * SAME < other.period_s or other.period_s * SAME < self.period_s:
            return self.period_s < other.period_s
        return self.bottlenecks < other.bottlenecks - WORTH_IT
