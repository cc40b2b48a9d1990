"""The best cut of one problem, by whichever solver answers."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from timeprest.planner.partition.problem import SAME, Cut, StageProblem
from timeprest.planner.partition.solve import DpSource, Progress, StopRule, source_for


@dataclass(frozen=True)
class CutAnswer:
    """The best cut of one problem, and what is proven of it.

    Attributes:
        objective_s: its largest load; infinite without a cut.
        bound_s: no cut has a smaller one.
        gap: objective over bound, less 1.
        optimal: proven; without a cut: proven that there is none.
        method: "dp" or "ilp".
        downsets: how many there are, where they were listed.
        seconds: spent.
        interrupted: stopped from outside.
    """

    cut: Cut | None
    objective_s: float
    bound_s: float
    gap: float
    optimal: bool
    method: str
    downsets: int | None
    seconds: float
    interrupted: bool = field(default=False)


def solve_cut(
    problem: StageProblem,
    *,
    solver: str = "auto",
    time_limit_s: float | None = 60.0,
    progress: Progress | None = None,
) -> CutAnswer:
    """Find the cut whose largest stage load is smallest.

    Args:
        solver: one of SOLVERS.
        time_limit_s: the best cut found by then is the answer; None: no limit.

    Raises PlanError as `source_for`.
    """
    begin = time.monotonic()
    deadline = None if time_limit_s is None else begin + time_limit_s
    source = source_for(problem, solver, deadline)
    left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
    found = source.best(problem, StopRule(left), progress)
    objective = found.cut.objective_s if found.cut else float("inf")
    bound = min(found.bound_s, objective)
    optimal = objective <= bound * SAME
    gap = 0.0 if optimal else (objective / bound - 1 if bound > 0 else float("inf"))
    return CutAnswer(
        cut=found.cut,
        objective_s=objective,
        bound_s=bound,
        gap=gap,
        optimal=optimal,
        method=source.method,
        downsets=source.lattice.size if isinstance(source, DpSource) else None,
        seconds=time.monotonic() - begin,
        interrupted=found.interrupted,
    )
