"""The cut with the smallest largest stage load, exactly.

Targets are tried from a bound on; the first one that any chain keeps to shows the optimum, as
the program under it goes over all chains within it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..problem import Cut, StageProblem
from .fewest import any_chain, fewest_chain
from .lattice import Lattice
from .program import Program, just_below
from .sweep import OutOfTime, Sweep

STEPS: tuple[float, ...] = (
    0.002,
    0.01,
    0.03,
    0.06,
    0.1,
    0.16,
    0.25,
    0.35,
    0.5,
    0.7,
    1.0,
    1.5,
    2.5,
    5.0,
    15.0,
)
"""How far above the bound targets are tried, in turn."""

THINNED_STEP, SHARES, EACH = 2, 400, 6
"""On a large lattice, when so many targets have failed, the best cut on fewer downsets says where
to look on: those cheapest to cut at, so many of each of so many shares of the work."""

SAME = 1 + 1e-10
"""Loads within this factor are the same."""


@dataclass(frozen=True)
class Answer:
    """What is known of the best cut.

    Attributes:
        cut: the best one below what was asked for; None where there is none, or none was found.
        bound_s: no cut on the lattice has a smaller objective.
        complete: nothing more can be known: the cut is the best, or there is none.
    """

    cut: Cut | None
    bound_s: float
    complete: bool


def minimax(
    problem: StageProblem,
    lattice: Lattice,
    *,
    below: float = float("inf"),
    deadline: float | None = None,
) -> Cut | None:
    """The cut on a lattice whose largest stage load is smallest; None where there is none.

    Among cuts with the same objective one with the fewest devices, then with the fewest stages;
    on the first devices, where it makes no difference which.

    Args:
        below: only objectives less than this, by more than rounding, count.
        deadline: on the clock of `time.monotonic`.

    Raises:
        OutOfTime: the deadline passed.
    """
    answer = minimax_with_bound(problem, lattice, below=below, deadline=deadline)
    if not answer.complete:
        raise OutOfTime
    return answer.cut


def minimax_with_bound(
    problem: StageProblem,
    lattice: Lattice,
    *,
    below: float = float("inf"),
    deadline: float | None = None,
) -> Answer:
    """As `minimax`, but what is known when time runs out."""
    if just_below(below) < 0:
        return Answer(None, below, complete=True)
    return _Search(Program(problem, lattice), just_below(below), deadline).answer(below)


class _Search:
    """The search for the target.

    Attributes:
        known_s: no cut has a smaller objective.
        found: the best cut on fewer downsets.
    """

    def __init__(
        self, program: Program, limit: float, deadline: float | None, *, thin: bool = True
    ) -> None:
        self._program, self._limit, self._deadline = program, limit, deadline
        self._large = thin and program.lattice.size > 2 * SHARES * EACH
        self.known_s = program.bound_s
        self.found: Cut | None = None

    def answer(self, below: float) -> Answer:
        """What is known when a target is kept to, none can be, or time runs out."""
        try:
            for target in self._targets():
                sweep = Sweep(self._program, target, self._deadline)
                if sweep.best_s <= target:
                    return self._best(sweep)
                self.known_s = max(self.known_s, target)
        except OutOfTime:
            return Answer(self.found, self.known_s, complete=False)
        return Answer(self.found, self.found.objective_s if self.found else below, complete=True)

    def _targets(self) -> Iterator[float]:
        bound, last, steps = self._program.bound_s, self._limit, STEPS
        for number, step in enumerate(STEPS):
            if number == THINNED_STEP and self._large:
                self._thin()
                # There may be no cut at all, which no target but the last can show.
                steps = STEPS if self.found else STEPS[::3]
                last = bound + (self._limit - bound) / 2 if self.found else self._limit
            target = bound * (1 + step)
            if step in steps and 0 < target < last:
                yield target
        yield self._limit

    def _thin(self) -> None:
        program = self._program
        fewer = Program(program.problem, program.thinned(SHARES, EACH))
        search = _Search(fewer, self._limit, self._deadline, thin=False)
        self.found = search.answer(float("inf")).cut
        if self.found is not None:
            # Ties with it count: of those the one with the fewest devices is wanted.
            self._limit = min(self._limit, self.found.objective_s * SAME)

    def _best(self, sweep: Sweep) -> Answer:
        limit = min(sweep.best_s * SAME, sweep.target)
        try:
            cut, complete = fewest_chain(sweep, limit, self._deadline), True
        except OutOfTime:
            cut, complete = any_chain(sweep), False
        return Answer(cut, cut.objective_s, complete)
