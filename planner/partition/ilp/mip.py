"""A mixed integer program, written down and handed to HiGHS.

HiGHS is imported on first use, so that importing the planner stays fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

INFINITY = float("inf")
TOLERANCE = 1e-9
"""Of the objective, in the program's scale: a gap this small is none."""
ATTEMPTS = ((1e-7, 0), (1e-6, 0), (1e-6, 1))
"""What rows and whole numbers may be off by, in the program's scale, and the seed of what HiGHS
draws at random; the next where it fails with the one before."""


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
    whole = Terms()
    for item in items:
        whole.add(item)
    return whole


@dataclass(frozen=True)
class SolverSettings:
    """How to solve a program.

    Attributes:
        start: values of all binary variables of a known solution.
        gap: relative; between objective and bound, small enough to stop.
        time_limit_s: of wall time; infinite without a limit.
        progress: told the bound and the best objective when they have changed.
        doubted: HiGHS has said what can't be: it is asked in the last of the ways alone.
    """

    start: Mapping[int, float] = field(default_factory=dict)
    gap: float = 0.0
    time_limit_s: float = INFINITY
    progress: Callable[[float, float], None] | None = None
    doubted: bool = False


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
        # Low, high, and whether it must be whole.
        self._variables: list[tuple[float, float, bool]] = []
        # Low, high, and coefficients by variable number.
        self._rows: list[tuple[float, float, dict[int, float]]] = []
        self._objective = Terms()
        self._impossible = False

    def variable(
        self, low: float = 0.0, high: float | None = None, *, whole: bool = False
    ) -> Terms:
        """A new variable, as an expression."""
        made = Terms()
        made.of[len(self._variables)] = 1.0
        self._variables.append((low, INFINITY if high is None else high, whole))
        return made

    def binary(self) -> Terms:
        """A new variable that is 0 or 1."""
        return self.variable(0.0, 1.0, whole=True)

    def at_most(self, terms: Terms, limit: float = 0.0) -> None:
        """Add the row terms ≤ limit."""
        self._row(terms, -INFINITY, limit)

    def equal(self, terms: Terms, value: float = 0.0) -> None:
        """Add the row terms = value."""
        self._row(terms, value, value)

    def minimise(self, terms: Terms) -> None:
        self._objective = Terms().add(terms)

    def _row(self, terms: Terms, low: float, high: float) -> None:
        low, high = low - terms.constant, high - terms.constant
        if terms.of:
            self._rows.append((low, high, dict(terms.of)))
        else:
            self._impossible |= low > TOLERANCE or high < -TOLERANCE

    def solve(self, settings: SolverSettings) -> MipAnswer:
        """Run HiGHS; Ctrl-C ends it, and the best solution so far is the answer."""
        if self._impossible:
            return MipAnswer(None, INFINITY, False, True, False, "infeasible")
        until = time.monotonic() + settings.time_limit_s
        for feasibility, seed in ATTEMPTS[-1:] if settings.doubted else ATTEMPTS:
            left = replace(settings, time_limit_s=max(0.0, until - time.monotonic()))
            answer = self._solved(left, feasibility, seed)
            # A solution was off by more than the tolerance; so it is tried with more of it. And
            # now and then HiGHS says that its time is over when it isn't.
            early = answer.status == "time limit reached" and time.monotonic() < until
            if answer.status != "solve error" and not early:
                break
        return answer

    def _solved(self, settings: SolverSettings, feasibility: float, seed: int) -> MipAnswer:
        highspy = import_module("highspy")
        highs = highspy.Highs()
        for option, value in (
            ("output_flag", False),
            ("mip_rel_gap", settings.gap),
            ("mip_abs_gap", TOLERANCE),
            ("time_limit", settings.time_limit_s),
            ("mip_feasibility_tolerance", feasibility),
            ("presolve", "off"),
            ("random_seed", seed),
        ):
            highs.setOptionValue(option, value)
        for number, (low, high, whole) in enumerate(self._variables):
            highs.addCol(self._objective.of.get(number, 0.0), low, high, 0, [], [])
            if whole:
                highs.changeColIntegrality(number, highspy.HighsVarType.kInteger)
        highs.changeObjectiveOffset(self._objective.constant)
        for low, high, of in self._rows:
            highs.addRow(low, high, len(of), list(of), list(of.values()))
        start = settings.start
        if start:
            highs.setSolution(len(start), list(start), list(start.values()))
        interrupted = _run_highs(highs, settings)
        status, info = highs.getModelStatus(), highs.getInfo()
        infeasible = status == highspy.HighsModelStatus.kInfeasible
        found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        optimal = found and status == highspy.HighsModelStatus.kOptimal
        gap, bound = info.mip_gap, info.mip_dual_bound
        if not any(whole for _, _, whole in self._variables):
            # A linear program has no gap to report, nor a bound before its end.
            gap, bound = 0.0, info.objective_function_value if optimal else -INFINITY
        return MipAnswer(
            tuple(highs.getSolution().col_value) if found else None,
            INFINITY if infeasible else bound,
            optimal and gap <= TOLERANCE,
            infeasible,
            interrupted,
            highs.modelStatusToString(status).lower(),
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
