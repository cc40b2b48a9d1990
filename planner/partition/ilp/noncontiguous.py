"""Sets of layers that need not be contiguous: each device may hold several stretches of the model.

An integer program over assignments, one device per set. Its best load is no more than that of any
cut into stages of one device, and so tells what contiguity costs. What a set's load is says
`placement_load`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..problem import Cut, StageProblem
from .assignment import AssignmentModel
from .placement_load import Assignment, assignment_load, device_slots, parted
from .search import Search
from .variables import least_load


@dataclass(frozen=True)
class NoncontiguousAnswer:
    """What the program found.

    Attributes:
        devices: bit masks of layers, for the devices K, K − 1, … from the end of the list; None
            where nothing fits.
        objective_s: their largest load; infinite without any.
        bound_s: no assignment has a smaller load; infinite where nothing fits.
        optimal: the assignment is proven best, or it is proven that there is none.
        status: the solver's own word for how it ended.
        interrupted: stopped from outside.
    """

    devices: tuple[int, ...] | None
    objective_s: float
    bound_s: float
    optimal: bool
    status: str
    interrupted: bool


def solve_noncontiguous(
    problem: StageProblem,
    *,
    warm: Cut | None = None,
    gap: float = 0.0,
    time_limit_s: float | None = None,
    progress: Callable[[float, float], None] | None = None,
    stopped: Callable[[], bool] | None = None,
    solver: str | None = None,
) -> NoncontiguousAnswer:
    """The assignment of layers to devices whose largest load is smallest.

    Args:
        warm: a cut to start from, if all its stages have one replica.
        gap, time_limit_s, progress, stopped, solver: as in `ilp.solve_ilp`.
    """
    made = parted(problem)
    slots = device_slots(made)
    search: Search[Assignment] = Search(
        lambda limit_s, excluded: AssignmentModel(made, slots, limit_s, excluded),
        least_load(made, slots),
        gap=gap,
        time_limit_s=time_limit_s,
        progress=progress,
        stopped=stopped,
        solver=solver,
    )
    if warm is not None and all(problem.options[s.option].replicas == 1 for s in warm.stages):
        devices = [0] * slots.count
        for number, stage in enumerate(warm.stages):
            devices[number if slots.alike else problem.devices - stage.k] = stage.layers
        load_s = assignment_load(made, slots, devices)
        search.offer(Assignment(tuple(devices), load_s))
    search.run()
    best = search.best
    return NoncontiguousAnswer(
        best.devices if best else None,
        best.objective_s if best else math.inf,
        search.bound_s,
        search.optimal,
        search.status,
        search.interrupted,
    )


def noncontiguous_load(problem: StageProblem, devices: tuple[int, ...]) -> float:
    """Largest load in s of layers on devices, as in `NoncontiguousAnswer.devices`.

    Straight from the definition; infinite where one doesn't fit its device.
    """
    made = parted(problem)
    return assignment_load(made, device_slots(made), devices)
