"""What a mini-batch takes in its two halves: in GPipe's, all forwards, and then all backwards.

Where stages are in a chain, all forwards are waited for where they are longest, and all backwards
where those are, on whatever stages that is: besides one micro-batch's way there and back, N - 1 of
each (`critical_cycles`, *flush*).

Index letters: N micro-batches; n layers; p stages between two downsets.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ..problem import Vector
from .cycle_stages import CycleProblem, StageTable


class Halves:
    """Of cuts into so many stages.

    Args:
        stages: of the same problem, with as many stages or more.
    """

    def __init__(self, problem: CycleProblem, stages: StageTable) -> None:
        self._problem, self._all = problem, stages

    @cached_property
    def _longest_s(self) -> tuple[float, float]:
        """What a cut's longest forward takes at the least, and its longest backward."""
        fastest = max(stage.speed for stage in self._problem.devices.every)
        halves = self._problem.forward_s.min(axis=0), self._problem.backward_s.min(axis=0)
        count = len(self._problem.stages)
        forward_s, backward_s = (self._all.least_longest(half, count) / fastest for half in halves)
        return forward_s, backward_s

    def least(self, forward_s: Vector, backward_s: Vector, way_s: Vector) -> Vector:
        """What no cut with any of some stages is below, [p].

        Args:
            forward_s, backward_s: theirs, [p].
            way_s: of one micro-batch, there and back.
        """
        longest = self._longest_s
        forward, backward = np.maximum(forward_s, longest[0]), np.maximum(backward_s, longest[1])
        found: Vector = way_s + (self._problem.micro_batches - 1) * (forward + backward)
        return found


def halves_of(problem: CycleProblem, stages: StageTable) -> Halves | None:
    """None where a mini-batch has no halves, or stages aren't in a chain, or have replicas."""
    if problem.rule != "forwards-first" or problem.devices.replicated or not stages.is_chain:
        return None
    return Halves(problem, stages)
