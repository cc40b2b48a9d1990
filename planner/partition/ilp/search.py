"""The best answer of an integer program: solved under ascending limits until it is proven."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic

from ..problem import Answer, Cut, StageProblem, cut_load
from .loads import Found, IntegerProgram
from .mip import MipAnswer, SolverSettings
from .stages import StageModel
from .variables import least_load, make_slots

BOUND_TOLERANCE = 1e-6
"""Relative; solvers' bounds are lowered by it, as their rows hold within a tolerance only."""
SHARE = 0.25
"""Of the time left, for one limit that is tried before the real one."""


@dataclass
class Search(Generic[Found]):
    """Solves programs for ascending limits on the loads, until one holds the best answer.

    A limit below the best load makes a small program that is soon proven to have no solution,
    and that is a bound. The limit just above it makes one that is little larger.

    Attributes:
        program: (limit in s, answers that aren't wanted) → the program.
        bound_s: no answer has a smaller load. Rises.
        below: only smaller loads are of interest.
        excluded: answers that aren't wanted.
        limits: tried before the real one, ascending, in s.
        best: what is known so far.
        doubted: HiGHS has ruled out what there is.
    """

    program: Callable[[float, list[Found]], IntegerProgram[Found]]
    bound_s: float
    below: float = math.inf
    excluded: list[Found] = field(default_factory=list)
    limits: Iterable[float] = ()
    gap: float = 0.0
    time_limit_s: float | None = None
    progress: Callable[[float, float], None] | None = None
    best: Found | None = None
    interrupted: bool = False
    optimal: bool = False
    doubted: bool = False

    def run(self) -> None:
        """Search; Ctrl-C ends it, and what was found until then stays."""
        self._until = time.monotonic() + (
            math.inf if self.time_limit_s is None else self.time_limit_s
        )
        self._limits = iter(self.limits)
        try:
            self._search()
        except KeyboardInterrupt:
            self.interrupted = True
        known = self._known()
        self.optimal = self.bound_s >= known
        self.bound_s = min(self.bound_s, known)

    def offer(self, found: Found) -> None:
        """Take an answer, if it is the best so far."""
        if found.objective_s < self._known():
            self.best = found

    def _known(self) -> float:
        return self.best.objective_s if self.best is not None else self.below

    def _search(self) -> None:
        while not self._close_enough():
            limit_s, last = self._known(), True
            early = next((limit for limit in self._limits if limit > self.bound_s), math.inf)
            if early < limit_s:
                limit_s, last = early, False
            left = self._until - time.monotonic()
            if left <= 0:
                return
            if self._try(limit_s, left if last else left * SHARE) and last:
                return

    def _close_enough(self) -> bool:
        known = self._known()
        if known <= self.bound_s * (1 + 1e-12):
            self.bound_s = known
            return True
        return self.best is not None and known - self.bound_s <= self.gap * known

    def _try(self, limit_s: float, time_s: float) -> bool:
        """Look for answers up to this limit; False where that has to be done again."""
        program = self.program(limit_s, self.excluded)
        if not program.possible:
            self.bound_s = max(self.bound_s, limit_s)
            return True
        known = self._known()
        answer = self._solve(program, limit_s, time_s)
        found = None if answer.values is None else program.answer_of(answer.values)
        if found is not None and math.isinf(found.objective_s):
            # It fits within the solver's tolerance, but not really.
            self.excluded.append(found)
            return False
        if found is not None:
            self.offer(found)
        proven_s = self._proven(program, answer, found, limit_s)
        if self.best is not None and known <= limit_s and proven_s > known:
            # The solver rules out what is there to see. Presolving has had such faults.
            before, self.doubted = self.doubted, True
            return before
        self.bound_s = max(self.bound_s, min(proven_s, limit_s))
        if answer.interrupted:
            raise KeyboardInterrupt
        return True

    def _proven(
        self, program: IntegerProgram[Found], answer: MipAnswer, found: Found | None, limit_s: float
    ) -> float:
        if answer.infeasible:
            return limit_s if limit_s < self._known() else limit_s * (1 + BOUND_TOLERANCE)
        proven_s = answer.bound * program.unit_s
        if answer.optimal and found and found.objective_s <= proven_s * (1 + BOUND_TOLERANCE):
            # The difference is rounding; so it isn't said to be a gap.
            return min(found.objective_s, self._known())
        return proven_s * (1 - BOUND_TOLERANCE)

    def _solve(self, program: IntegerProgram[Found], limit_s: float, time_s: float) -> MipAnswer:
        start: dict[int, float] = {}
        if self.best is not None and self.best.objective_s <= limit_s:
            start = program.values_of(self.best)

        def report(bound: float, load: float) -> None:
            if self.progress is not None:
                bound_s = max(self.bound_s, min(bound * program.unit_s, limit_s))
                self.progress(bound_s, min(self._known(), load * program.unit_s))

        settings = SolverSettings(start, self.gap, time_s, report, self.doubted)
        return program.mip.solve(settings)


# The best cut by an integer program, or the best one in the time there is, with a bound ---------

LIMITS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0)
"""Limits on loads that are tried before the real one, as multiples of the least load."""
SMALL = 300
"""Layers times devices; a smaller program is as fast without trying limits."""


def solve_ilp(
    problem: StageProblem,
    *,
    warm: Cut | None = None,
    below: float = math.inf,
    forbidden: Sequence[Cut] = (),
    time_limit_s: float | None = None,
    progress: Callable[[float, float], None] | None = None,
) -> Answer:
    """The cut whose largest stage load is smallest.

    Args:
        problem: what to cut.
        warm: a cut to start from; it is the answer where nothing better is found.
        below: only cuts with a smaller load, in s, are looked for. Where it is proven that there
            is none, the answer's bound is this number.
        forbidden: cuts that are not wanted; those with the same layers and options per stage.
        time_limit_s: of wall time, for writing programs down and solving them.
        progress: told the bound and the best load, in s, when they change.

    Returns:
        The best cut, no worse than the one that was given; after Ctrl-C too.
    """
    slots = make_slots(problem)
    least_s = least_load(problem, slots)
    large = problem.layers * slots.count > SMALL and math.isfinite(least_s)
    search: Search[Cut] = Search(
        lambda limit_s, excluded: StageModel(problem, limit_s, excluded),
        least_s,
        below,
        list(forbidden),
        [least_s * times for times in LIMITS] if large else (),
        time_limit_s=time_limit_s,
        progress=progress,
    )
    if warm is not None and not any(_same(warm, cut) for cut in forbidden):
        search.offer(Cut(warm.stages, cut_load(problem, warm)))
    search.run()
    return Answer(search.best, search.bound_s, search.optimal, search.interrupted)


def _same(left: Cut, right: Cut) -> bool:
    """Whether two cuts have the same layers and options per stage."""
    pairs = [[(stage.layers, stage.option) for stage in cut.stages] for cut in (left, right)]
    return pairs[0] == pairs[1]
