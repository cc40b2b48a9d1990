"""The same question with fewer places to cut: layers between two of them become one.

Places are chosen one inside the other, the cheapest to cut at of many equal shares of the work.
A cut of the coarse problem is a cut of the fine one with the same loads and bytes; so its optimum
is a cut worth trying, and never a bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from ..ilp.variables import between
from ..problem import ChosenStage, Cut, StageProblem, Vector, members
from .lattice import Lattice, lattice_of
from .program import Program


@dataclass(frozen=True)
class Blocks:
    """Rows of layers that aren't cut.

    Attributes:
        masks: bit masks of each block's layers, from the input side on; all layers together.
    """

    masks: tuple[int, ...]

    @cached_property
    def _rows(self) -> list[list[int]]:
        return [list(members(mask)) for mask in self.masks]

    def coarse(self, problem: StageProblem) -> tuple[StageProblem, Lattice]:
        """The problem with blocks for layers, and all its downsets."""
        block_of = {j: g for g, mask in enumerate(self.masks) for j in members(mask)}
        lists = self._rows
        of = tuple(block_of[j] for j in range(problem.layers))
        tensors, _, shared = between(problem, of, len(lists))

        def summed(values: Vector | None) -> Vector | None:
            return None if values is None else self.summed(values)

        workspace = problem.workspace_bytes
        found = replace(
            problem,
            names=tuple(problem.names[rows[0]] for rows in lists),
            needs=tuple((1 << g) >> 1 for g in range(len(lists))),
            together=(),
            tensors=tensors,
            shared=shared,
            modes=tuple(
                replace(
                    mode,
                    compute_s=self.summed(mode.compute_s),
                    fixed_bytes=self.summed(mode.fixed_bytes),
                    flight_bytes=self.summed(mode.flight_bytes),
                    recompute_s=summed(mode.recompute_s),
                )
                for mode in problem.modes
            ),
            parameter_bytes=self.summed(problem.parameter_bytes),
            serial_s=summed(problem.serial_s),
            before_s=summed(problem.before_s),
            after_s=summed(problem.after_s),
            workspace_bytes=(
                None if workspace is None else np.array([workspace[rows].max() for rows in lists])
            ),
            pins=tuple((block_of[layer], stage) for layer, stage in problem.pins),
        )
        chain = [(1 << g) - 1 for g in range(len(lists) + 1)]
        return found, lattice_of(found, chain, complete=True)

    def summed(self, values: Vector) -> Vector:
        """Values of layers, [n], added up over each block's."""
        return np.array([values[rows].sum() for rows in self._rows])

    def fine(self, cut: Cut) -> Cut:
        """A cut of the coarse problem as one of the problem it was made from."""
        stages = tuple(
            ChosenStage(sum(self.masks[g] for g in members(s.layers)), s.option, s.k)
            for s in cut.stages
        )
        return Cut(stages, cut.objective_s)


def blocks(problem: StageProblem, lattice: Lattice, most: int) -> Blocks:
    """At most so many blocks, of about the same work each where cuts are as cheap."""
    thinned = Program(problem, lattice).thinned(most - 1, 1)
    chain = [0]
    for mask in thinned.masks[1:]:
        if not chain[-1] & ~mask:
            chain.append(mask)
    return Blocks(tuple(above & ~below for below, above in pairwise(chain)))
