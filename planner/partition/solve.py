"""Which solver answers: dynamic programming where the downsets can be listed, else the ILP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...profiles.errors import PlanError
from .dp.enumerate import chains_below
from .dp.identical_devices import FEW, identical_minimax
from .dp.identical_devices_by_target import identical_by_targets
from .dp.lattice import Lattice, find_downsets
from .dp.minimax import minimax_with_bound
from .ilp.search import solve_ilp
from .problem import Answer, Cut, Deadline, OutOfTime, StageProblem
from .warm_start import good_cut

MOST_DOWNSETS = 300_000
"""With more, the ILP takes over."""

SOLVERS = ("auto", "dp", "ilp")

Progress = Callable[[float, float], None]
"""Told the lower bound and the best load so far, in s."""


Target = Callable[[], float]
"""In s; may fall while cuts below it are looked for."""


@dataclass(frozen=True)
class StopRule:
    """When a solver may stop looking for the best cut.

    Attributes:
        seconds: after so much time; None: no limit.
        below: cuts with objectives from it on may be left out; the bound is at most it then.
        within: a cut whose objective is at most so many times the bound will do.
    """

    seconds: float | None = None
    below: float = float("inf")
    within: float = 1.0


PROVEN = StopRule()
"""When the best cut is proven."""


@dataclass(frozen=True)
class DpSource:
    """Solves all problems of one graph by dynamic programming over a list of all downsets.

    Attributes:
        method: what plans call it.
    """

    lattice: Lattice
    method: str = "dp"

    def best(
        self, problem: StageProblem, stop: StopRule = PROVEN, progress: Progress | None = None
    ) -> Answer:
        """The best cut, or one that is good enough, and a bound on all cuts."""
        seconds, below = stop.seconds, stop.below
        deadline = None if seconds is None else time.monotonic() + seconds
        answer = identical_minimax(problem, self.lattice, deadline=deadline)
        if answer is None and len(problem.options) * problem.devices > FEW:
            answer = identical_by_targets(
                problem, self.lattice, below=below, within=stop.within, deadline=deadline
            )
        return answer or minimax_with_bound(problem, self.lattice, below=below, deadline=deadline)

    def each_below(
        self, problem: StageProblem, target: Target, deadline: Deadline = None
    ) -> Iterator[Cut]:
        """Every cut with an objective below the target, which may fall meanwhile. Raises
        OutOfTime."""
        return chains_below(problem, self.lattice, target, deadline=deadline)


@dataclass
class IlpSource:
    """The integer program, started from the best cut along good topological orders."""

    method: str = "ilp"
    orders_s: float = 10.0
    """Time for those orders at most; a quarter of what there is, where that is less."""

    def best(
        self, problem: StageProblem, stop: StopRule = PROVEN, progress: Progress | None = None
    ) -> Answer:
        begin, seconds = time.monotonic(), stop.seconds
        share = self.orders_s if seconds is None else min(self.orders_s, seconds / 4)
        warm = good_cut(problem, deadline=begin + share)
        left = None if seconds is None else max(seconds - (time.monotonic() - begin), 0.0)
        return solve_ilp(problem, warm=warm, time_limit_s=left, progress=progress)

    def each_below(
        self, problem: StageProblem, target: Target, deadline: Deadline = None
    ) -> Iterator[Cut]:
        seen: list[Cut] = []
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            answer = solve_ilp(problem, below=target(), forbidden=seen, time_limit_s=left)
            if answer.interrupted:
                raise KeyboardInterrupt
            if answer.cut is None:
                if not answer.optimal:
                    raise OutOfTime
                return
            seen.append(answer.cut)
            yield answer.cut


Source = DpSource | IlpSource
"""A solver for all the problems of one graph."""


def source_for(problem: StageProblem, solver: str = "auto", deadline: Deadline = None) -> Source:
    """The solver to use for this problem's graph.

    Args:
        solver: one of SOLVERS.
        deadline: for listing the downsets.

    Raises PlanError where "dp" is asked for, and they are too many or take too long.
    """
    if solver == "ilp":
        return IlpSource()
    limit = MOST_DOWNSETS if solver == "auto" else 10 * MOST_DOWNSETS
    lattice = find_downsets(problem, limit, deadline)
    if lattice is not None:
        return DpSource(lattice)
    if solver == "dp":
        late = deadline is not None and time.monotonic() > deadline
        why = "listing the model's downsets takes longer than --time-limit"
        many = f"the model has more than {limit:,} downsets"
        raise PlanError(f"--solver dp: {why if late else many}; leave it out")
    return IlpSource()
