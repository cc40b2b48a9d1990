"""What stages cost in a relaxed problem, held against plans."""

from __future__ import annotations

from itertools import product

from helpers.drawn.questions import Drawn
from timeprest.planner.costs.recomputation import of_stage
from timeprest.planner.partition.problem import stage_bytes, stage_load
from timeprest.planner.search.choices import Branch
from timeprest.planner.search.relaxed.places import Assumptions
from timeprest.planner.search.relaxed.relaxation import Relaxation

MOST_BOUNDED = 40
"""Plans of a question that bounds are held against."""


def check_bounds(drawn: Drawn) -> None:
    """In every view, what a stage costs in the relaxed problem is never more than in a plan."""
    relaxation, problems = Relaxation(drawn.question, drawn.freedom), {}
    step = max(len(drawn.plans) // MOST_BOUNDED, 1)
    for n, found in drawn.plans[::step]:
        assert relaxation.seconds.shared_out_s(n) <= found.prediction.period_s * (1 + 1e-9)
        for view in relaxation.views:
            for alike in {False, drawn.question.cluster.uniform}:
                for stages, least in product((None, len(found.stages)), (False, True)):
                    key = n, view, alike, stages, least
                    if key not in problems:
                        assumed = Assumptions(view=view, identical=alike, alike=least)
                        problems[key] = relaxation.problem(Branch(n, stages), assumed)
                    ways = relaxation.kept.alike(relaxation.seconds.forward_s(n)) if least else ()
                    check_stages(problems[key], found, alike, ways)


def check_stages(problem, found, alike: bool, ways) -> None:
    """`ways`: of recomputation that may count as one."""
    position = {name: j for j, name in enumerate(problem.names)}
    below = 0
    for s, (stage, predicted) in enumerate(zip(found.stages, found.prediction.stages, strict=True)):
        layers = sum(1 << position[name] for name in stage.nodes)
        options = [
            o
            for o, option in enumerate(problem.options)
            if option.replicas == len(stage.devices)
            and stage.recompute in of_stages(problem.modes[option.mode], ways, stage.nodes)
        ]
        assert options
        k = problem.devices - stage.devices[0]
        if alike:
            # Devices that the plan uses, without those left out.
            k = sum(len(other.devices) for other in found.stages[s:])
        # Sets of layers that differ elsewhere alone are the same here.
        for option in options:
            where = problem, below, layers, option, k
            assert stage_load(*where) <= found.prediction.period_s * (1 + 1e-9)
            assert stage_bytes(*where) <= predicted.memory_bytes * (1 + 1e-12)
        below |= layers


def of_stages(mode, ways, nodes):
    """What stages of a mode compute again."""
    if mode.name == "least":
        return [of_stage(way, nodes) for way in ways if way is not True]
    return [of_stage(mode.recompute, nodes)]
