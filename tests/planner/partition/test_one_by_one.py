"""Cuts for 1F1B over micro-batches by formula: what is promised is kept to, by the simulation."""

from __future__ import annotations

import random

import numpy as np
import pytest
from helpers.by_hand.profiles import chain, row_of_layers
from helpers.plans import even_stages
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import evaluate
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.one_by_one.any_replicas import least_kept_period
from timeprest.planner.partition.one_by_one.equal_replicas import _rounded_up, least_period
from timeprest.planner.question import Question
from timeprest.planner.search import first_plans
from timeprest.planner.search.branching import SearchRequest, explore
from timeprest.planner.search.choices import Branch, Freedom, choice_of, in_flight_under
from timeprest.planner.search.relaxed.places import Assumptions
from timeprest.planner.search.relaxed.relaxation import Relaxation
from timeprest.planner.search.solve import solve
from timeprest.planner.search.state import SearchState

SYSTEMS = "pipedream-flush", "pipedream-2bw"
MICRO_BATCHES = 12


def drawn_question(seed, system, devices, memory=None):
    """A chain of uneven layers over links that take no time."""
    rng = random.Random(seed)
    layers = [
        (f"n{k}", 100, rng.uniform(1, 3) * 1e-3, rng.uniform(1, 6) * 1e-3, rng.choice([9, 90]), [])
        for k in range(7)
    ]
    profile = row_of_layers(layers, sizes=(1,))
    cluster = uniform_cluster(devices, memory, bandwidth="1000TB/s", latency="0s")
    return Question(profile, cluster, system, MICRO_BATCHES, 1.0)


def guess_of(question, replicas=(), recompute="off"):
    relaxation = Relaxation(question, Freedom(replicas=True, recompute=recompute))
    devices = len(question.cluster.devices)
    guess = in_flight_under(question.system, devices, devices)
    assumed = Assumptions(guess, guess=True, identical=True, replicas=replicas)
    problem = relaxation.problem(Branch(MICRO_BATCHES), assumed)
    return relaxation, problem, find_downsets(problem, 1000)


def limits_of(question, count):
    return (1,) * count if question.system.flushes else (2,) * (count - 1) + (1,)


def period_of(question, problem, cut):
    choice = choice_of(problem, cut)
    stages = choice.with_limits(limits_of(question, choice.stages))
    return evaluate(question, stages, MICRO_BATCHES).prediction.period_s


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("seed", range(12))
def test_stages_with_different_replicas_keep_to_the_period(seed, system):
    question = drawn_question(seed, system, 3 + seed % 6)
    _, problem, lattice = guess_of(question)
    found = least_kept_period(
        problem, lattice, micro_batches=MICRO_BATCHES, flushes=question.system.flushes
    )
    simulated_s = period_of(question, problem, found)
    assert simulated_s <= found.objective_s * (1 + 1e-6)
    if not question.system.flushes:
        stages = [question.costs.stage((f"n{k}",), 1, False) for k in range(7)]
        work_s = sum(stage.forward_s + stage.backward_s for stage in stages)
        assert found.objective_s >= work_s * MICRO_BATCHES / len(question.cluster.devices)


@pytest.mark.parametrize("system", SYSTEMS)
def test_once_time_is_up_a_cut_that_fits_will_do(system):
    question = drawn_question(3, system, 5)
    _, problem, lattice = guess_of(question)
    asked = {"micro_batches": MICRO_BATCHES, "flushes": question.system.flushes}
    late = least_kept_period(problem, lattice, deadline=0.0, **asked)
    best = least_kept_period(problem, lattice, **asked)
    assert best.objective_s <= late.objective_s < float("inf")
    assert period_of(question, problem, late) <= late.objective_s * (1 + 1e-6)


def test_first_guesses_end_when_time_is_up(monkeypatch):
    question = Question(chain(4), uniform_cluster(5, "600B"), "pipedream-flush", 4, 1.0)
    guessed = []
    monkeypatch.setattr(SearchState, "large", True)
    monkeypatch.setattr(first_plans, "_in_blocks", lambda *given, **_: guessed.append(given))
    request = SearchRequest(replicas=True, time_limit_s=0.0)
    search = explore(question, request, lambda *_: None)
    assert len(search.branches) > 1
    assert not first_plans._guesses(search, 3, 0.0, None)
    assert len(guessed) == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("system", SYSTEMS)
def test_nothing_that_fits_keeps_to_no_period(system):
    """However long it may be, which thousands of targets wouldn't tell."""
    question = drawn_question(2, system, 5, "600B")
    _, problem, lattice = guess_of(question)
    flushes = question.system.flushes
    assert not least_kept_period(problem, lattice, micro_batches=MICRO_BATCHES, flushes=flushes)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_formula_for_equal_replicas_is_about_the_simulation(seed, replicas):
    question = drawn_question(seed, "pipedream-flush", 4 * replicas)
    relaxation, problem, lattice = guess_of(question, (replicas,))
    found = least_period(
        problem,
        lattice,
        relaxation.seconds.forward_s(MICRO_BATCHES),
        relaxation.seconds.way_s(MICRO_BATCHES),
        each=MICRO_BATCHES // replicas,
    )
    simulated_s = period_of(question, problem, found)
    assert found.objective_s * 0.97 <= simulated_s <= found.objective_s * 1.15
    names = [f"n{k}" for k in range(7)]
    every = (
        evaluate(question, stages, MICRO_BATCHES).prediction.period_s
        for count in range(1, 5)
        for stages in even_stages(names, limits_of(question, count), replicas)
    )
    assert simulated_s <= min(every) * 1.1


def test_what_is_computed_again_is_whole_layers():
    times = np.array([3.0, 0.0, 1.0, 4.0])
    found = _rounded_up(np.array([0.0, 0.1, 0.125, 0.2, 0.6, 0.7, 1.0]), times)
    wanted = np.array([0.0, 1, 1, 3, 5, 7, 8]) / 8
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize("system", SYSTEMS)
def test_first_plans_of_a_large_model_fit(monkeypatch, system):
    """By the same way as for thousands of devices, with memory that makes stages compute again."""
    monkeypatch.setattr(SearchState, "large", True)
    asked = []
    for name, formula in (("least_period", least_period), ("least_kept_period", least_kept_period)):
        monkeypatch.setattr(
            first_plans, name, lambda *a, f=formula, **k: asked.append(f(*a, **k)) or asked[-1]
        )
    question = drawn_question(1, system, 6, "1600B")
    plan = solve(
        question.profile,
        question.cluster,
        system,
        mini_batch=MICRO_BATCHES,
        optimizer_state_factor=1.0,
        replicas=True,
        recompute="auto",
        time_limit_s=None,
        effort=20_000,
    )
    assert any(asked)
    assert max(stage.memory_bytes for stage in plan.predicted.stages) <= 1600
    assert plan.solver.bound_s <= plan.predicted.period_s
