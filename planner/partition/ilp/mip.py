"""A mixed integer program, written down and handed to HiGHS or CBC through PuLP.

PuLP and HiGHS are imported on first use, so that importing the planner stays fast.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INFINITY = float("inf")
TOLERANCE = 1e-9
"""Of the objective, in the program's scale: a gap this small is none."""
FEASIBILITY = (1e-7, 1e-6)
"""Of rows and whole numbers, in the program's scale; the next where HiGHS fails with the first."""


class Terms:
    """A linear expression: coefficients by variable number, and a constant."""

    __slots__ = ("constant", "of")

    def __init__(self, constant: float = 0.0) -> None:
        self.of: dict[int, float] = {}
        self.constant = constant

    def add(self, other: Terms, factor: float = 1.0) -> Terms:
        """Add `factor` times another expression to this one, in place; returns this one."""
        for variable, coefficient in other.of.items():
            sum_ = self.of.get(variable, 0.0) + factor * coefficient
            if sum_:
                self.of[variable] = sum_
            else:
                self.of.pop(variable, None)
        self.constant += factor * other.constant
        return self

    def value(self, values: Mapping[int, float] | tuple[float, ...]) -> float:
        """What it comes to with these values of the variables."""
        return self.constant + sum(c * values[v] for v, c in self.of.items())


def difference(left: Terms, right: Terms) -> Terms:
    """left − right, as an expression of its own."""
    return Terms().add(left).add(right, -1.0)


def total(items: Iterable[Terms]) -> Terms:
    """Sum of expressions."""
    whole = Terms()
    for item in items:
        whole.add(item)
    return whole


@dataclass(frozen=True)
class SolverSettings:
    """How to solve a program.

    Attributes:
        solver: "highs" or "cbc"; None: HiGHS where it is installed, else CBC.
        start: values of all binary variables of a known solution.
        gap: relative; between objective and bound, small enough to stop.
        time_limit_s: of wall time; infinite without a limit.
        progress: told the bound and the best objective when they have changed. HiGHS only.
    """

    solver: str | None = None
    start: Mapping[int, float] = field(default_factory=dict)
    gap: float = 0.0
    time_limit_s: float = INFINITY
    progress: Callable[[float, float], None] | None = None


@dataclass(frozen=True)
class MipAnswer:
    """What a solver found.

    Attributes:
        values: of all variables, in the best solution; None without one.
        bound: no solution is better, but for rounding; minus infinity where none is known.
        optimal: the solution is proven best, within TOLERANCE.
        infeasible: proven to have no solution.
        interrupted: stopped from outside.
        status: the solver's own word for how it ended.
    """

    values: tuple[float, ...] | None
    bound: float
    optimal: bool
    infeasible: bool
    interrupted: bool
    status: str


class Mip:
    """Variables, rows, and an expression to make small."""

    def __init__(self) -> None:
        self._pulp = import_module("pulp")
        self._problem: Any = self._pulp.LpProblem("cut", self._pulp.LpMinimize)
        self._variables: list[Any] = []
        self._whole = False
        self._impossible = False

    def variable(
        self, low: float = 0.0, high: float | None = None, *, whole: bool = False
    ) -> Terms:
        """A new variable, as an expression."""
        number = len(self._variables)
        kind = self._pulp.LpInteger if whole else self._pulp.LpContinuous
        # PuLP sorts by name; so the order of making them is kept.
        self._variables.append(self._problem.add_variable(f"v{number:07d}", low, high, kind))
        self._whole |= whole
        made = Terms()
        made.of[number] = 1.0
        return made

    def binary(self) -> Terms:
        """A new variable that is 0 or 1."""
        return self.variable(0.0, 1.0, whole=True)

    def at_most(self, terms: Terms, limit: float = 0.0) -> None:
        """Add the row terms ≤ limit."""
        self._row(terms, self._pulp.LpConstraintLE, limit)

    def equal(self, terms: Terms, value: float = 0.0) -> None:
        """Add the row terms = value."""
        self._row(terms, self._pulp.LpConstraintEQ, value)

    def minimise(self, terms: Terms) -> None:
        """Say what is to be small."""
        self._problem.setObjective(self._expression(terms))

    def _expression(self, terms: Terms) -> Any:
        return self._pulp.LpAffineExpression(
            {self._variables[number]: value for number, value in terms.of.items()}
        )

    def _row(self, terms: Terms, sense: int, right: float) -> None:
        right -= terms.constant
        if terms.of:
            row = self._pulp.LpConstraint(self._expression(terms), sense, rhs=right)
            self._problem.addConstraint(row)
        else:
            off = -right if sense == self._pulp.LpConstraintLE else abs(right)
            self._impossible |= off > TOLERANCE

    def solve(self, settings: SolverSettings) -> MipAnswer:
        """Run a solver; Ctrl-C ends it, and the best solution so far is the answer."""
        if self._impossible:
            return MipAnswer(None, INFINITY, False, True, False, "infeasible")
        highs = settings.solver == "highs" or (settings.solver is None and find_spec("highspy"))
        until = time.monotonic() + settings.time_limit_s
        for feasibility in FEASIBILITY if highs else ():
            left = replace(settings, time_limit_s=max(0.0, until - time.monotonic()))
            answer = self._highs(left, feasibility)
            # A solution was off by more than the tolerance; so it is tried with more of it. And
            # now and then HiGHS says that its time is over when it isn't.
            early = answer.status == "time limit reached" and time.monotonic() < until
            if answer.status != "solve error" and not early:
                return answer
        left_s = until - time.monotonic()
        if left_s <= 0:
            return MipAnswer(None, -INFINITY, False, False, False, "time limit reached")
        return self._cbc(replace(settings, time_limit_s=left_s))

    def _highs(self, settings: SolverSettings, feasibility: float) -> MipAnswer:
        highspy = import_module("highspy")
        solver = self._pulp.HiGHS(
            msg=False,
            timeLimit=settings.time_limit_s,
            gapRel=settings.gap,
            gapAbs=TOLERANCE,
            mip_feasibility_tolerance=feasibility,
            presolve="off",
        )
        solver.createAndConfigureSolver(self._problem)
        solver.buildSolverModel(self._problem)
        highs = self._problem.solverModel
        # PuLP leaves out variables that no row has; for them any value will do.
        there = {v.index: n for n, v in enumerate(self._variables) if hasattr(v, "index")}
        start = {c: settings.start[n] for c, n in there.items() if n in settings.start}
        if start:
            highs.setSolution(len(start), list(start), list(start.values()))
        interrupted = _run_highs(highs, settings)
        status, info = highs.getModelStatus(), highs.getInfo()
        infeasible = status == highspy.HighsModelStatus.kInfeasible
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        # PuLP calls it optimal at a time limit too; HiGHS doesn't.
        optimal = found and status == highspy.HighsModelStatus.kOptimal
        gap, bound = info.mip_gap, info.mip_dual_bound
        kinds = highs.getLp().integrality_
        if not self._whole or not any(kind != highspy.HighsVarType.kContinuous for kind in kinds):
            # A linear program, perhaps as no row has any of the variables that must be whole; it
            # has no gap to report, nor a bound before its end.
            gap, bound = 0.0, info.objective_function_value if optimal else -INFINITY
        values = [0.0] * len(self._variables)
        for column, value in enumerate(highs.getSolution().col_value):
            values[there[column]] = value
        return MipAnswer(
            tuple(values) if found else None,
            INFINITY if infeasible else bound,
            optimal and gap <= TOLERANCE,
            infeasible,
            interrupted,
            highs.modelStatusToString(status).lower(),
        )

    def _cbc(self, settings: SolverSettings) -> MipAnswer:
        pulp, problem = self._pulp, self._problem
        for number, variable in enumerate(self._variables):
            variable.varValue = settings.start.get(number)
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "cbc.log"
            limited = settings.time_limit_s < INFINITY
            cbc = pulp.COIN_CMD(
                path=pulp.PULP_CBC_CMD.pulp_cbc_path,
                msg=False,
                timeLimit=settings.time_limit_s if limited else None,
                gapRel=settings.gap,
                gapAbs=TOLERANCE,
                warmStart=bool(settings.start),
                logPath=str(log),
            )
            until = time.monotonic() + settings.time_limit_s
            try:
                problem.solve(cbc)
            except KeyboardInterrupt:
                return MipAnswer(None, -INFINITY, False, False, True, "interrupted")
            lower = re.search(r"Lower bound:\s+(\S+)", log.read_text())
        # Of a program that it had no time to prepare CBC says that there is no solution.
        infeasible = problem.status == pulp.LpStatusInfeasible and time.monotonic() < until
        optimal = problem.sol_status == pulp.LpSolutionOptimal
        found = optimal or problem.sol_status == pulp.LpSolutionIntegerFeasible
        bound = INFINITY if infeasible else float(lower[1]) if lower else -INFINITY
        if optimal and settings.gap == 0.0:
            bound = float(pulp.value(problem.objective))
        return MipAnswer(
            tuple(float(v.varValue or 0.0) for v in self._variables) if found else None,
            bound,
            optimal and settings.gap == 0.0,
            infeasible,
            False,
            "infeasible" if infeasible else pulp.LpSolution[problem.sol_status].lower(),
        )


def _run_highs(highs: Any, settings: SolverSettings) -> bool:
    """Run HiGHS in a thread of its own, where Ctrl-C can reach us; whether it was stopped."""
    seen = told = (-INFINITY, INFINITY)

    def look(event: Any) -> None:
        nonlocal seen
        seen = (event.data_out.mip_dual_bound, event.data_out.mip_primal_bound)

    highs.cbMipInterrupt += look
    highs.HandleUserInterrupt = True
    highs.startSolve()
    interrupted = False
    try:
        while not highs.wait(0.1)[0]:
            if settings.progress is not None and seen != told:
                told = seen
                settings.progress(*told)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        highs.cancelSolve()
        while not highs.wait(0.1)[0]:
            pass
    return interrupted
