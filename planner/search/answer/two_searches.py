"""Two searches as one: what holds for both of plans with and without a freedom."""

from __future__ import annotations

import msgspec

from ....profiles.profile import Profile
from ...costs.tied_parameters import misplaced
from ...evaluate import gap_between
from ...partition.problem import SAME
from ...plan import Plan, SolverReport
from .recheck import question_of, signed


def as_it_is(plan: Plan, profile: Profile) -> Plan:
    """A plan with `tied` set to "together", if its cut takes no tied layers apart."""
    nodes, devices = zip(*((stage.nodes, stage.devices) for stage in plan.stages), strict=True)
    if misplaced(profile, nodes, devices, "together") is not None:
        return plan
    plan = msgspec.structs.replace(plan, tied="together")
    return signed(plan, question_of(plan, profile))


def beside(plan: Plan, other: SolverReport, profile: Profile) -> Plan:
    """The plan with the lower bound, and the reason to stop, that hold for two searches at once."""
    solver = plan.solver
    bound_s = min(other.bound_s, solver.bound_s)
    optimal = solver.objective_s <= bound_s * SAME
    stopped = other.stopped if solver.stopped in (None, "effort") else solver.stopped
    report = msgspec.structs.replace(
        solver,
        bound_s=bound_s,
        gap=0.0 if optimal else gap_between(solver.objective_s, bound_s),
        optimal=optimal,
        stopped=None if optimal else stopped or solver.stopped,
    )
    return signed(msgspec.structs.replace(plan, solver=report), question_of(plan, profile))
