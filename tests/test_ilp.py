"""The integer program: the same answer as trying everything, by either solver."""

from __future__ import annotations

from math import inf

import pytest
from drawn_problems import brute_force, drawn_problems
from hypothesis import HealthCheck, assume, given, settings
from timeprest.planner.partition.downsets import find_downsets
from timeprest.planner.partition.ilp import solve_ilp
from timeprest.planner.partition.minimax import minimax
from timeprest.planner.partition.noncontiguous import solve_noncontiguous
from timeprest.planner.partition.stage_load import cut_load

FEW = settings(max_examples=40, suppress_health_check=list(HealthCheck))


def check(problem, answer):
    best = brute_force(problem)
    assert answer.optimal
    if best is None:
        assert answer.cut is None
        assert answer.bound_s == inf
        return
    assert answer.cut.objective_s == pytest.approx(best.objective_s, rel=1e-6, abs=1e-6)
    assert cut_load(problem, answer.cut) == pytest.approx(answer.cut.objective_s)
    assert answer.bound_s <= best.objective_s * (1 + 1e-9)


@FEW
@given(drawn_problems(most=6, devices=3))
def test_it_finds_the_best_cut(problem):
    check(problem, solve_ilp(problem))


@settings(FEW, max_examples=8)
@given(drawn_problems(most=5, devices=2))
def test_cbc_finds_the_same(problem):
    check(problem, solve_ilp(problem, solver="cbc"))


@settings(FEW, max_examples=25)
@given(drawn_problems(most=5, devices=3))
def test_what_is_forbidden_isnt_found_again(problem):
    first = solve_ilp(problem).cut
    assume(first is not None)
    second = solve_ilp(problem, forbidden=[first]).cut
    if second is not None:
        same = [(s.layers, s.option) for s in second.stages]
        assert same != [(s.layers, s.option) for s in first.stages]
        assert second.objective_s >= first.objective_s * (1 - 1e-6)
    nothing = solve_ilp(problem, below=first.objective_s * (1 - 1e-3))
    assert nothing.cut is None


@settings(FEW, max_examples=25)
@given(drawn_problems(most=7, devices=3))
def test_without_time_the_given_cut_is_the_answer_with_a_bound(problem):
    best = minimax(problem, find_downsets(problem, 10_000))
    assume(best is not None)
    answer = solve_ilp(problem, warm=best, time_limit_s=0.0)
    assert answer.cut is not None
    assert answer.bound_s <= best.objective_s * (1 + 1e-9)
    assert answer.cut.objective_s == pytest.approx(best.objective_s)


@settings(FEW, max_examples=25)
@given(drawn_problems(most=5, devices=3))
def test_several_stretches_on_a_device_are_never_worse(problem):
    assume(problem.stages is None)
    assume(all(option.replicas == 1 for option in problem.options))
    assume(problem.before_s is None)
    assume(problem.after_s is None)
    best = brute_force(problem)
    assume(best is not None)
    answer = solve_noncontiguous(problem, time_limit_s=None)
    assert answer.optimal
    assert answer.objective_s <= best.objective_s * (1 + 1e-6) + 1e-6
    layers = 0
    for mask in answer.devices:
        assert not mask & layers
        layers |= mask
    assert layers == problem.full
