"""Cuts for pipelines that run empty: the least period by loads, by trying every cut."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from helpers.by_hand.profiles import profile_by_hand
from helpers.plans import lone_stages
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import Question, evaluate
from timeprest.planner.partition.dp.enumerate import chains_below
from timeprest.planner.partition.dp.flushed_period import (
    LEAST,
    period_of,
    waited_for,
    with_least_period,
)
from timeprest.planner.partition.dp.identical_devices import identical_minimax
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.dp.sweep import OutOfTime
from timeprest.planner.partition.problem import ChosenStage, Cut, cut_load
from timeprest.planner.search.choices import Branch, Freedom, in_flight_under
from timeprest.planner.search.places import Assumptions
from timeprest.planner.search.relaxation import Relaxation

LAYERS, DEVICES, MICRO_BATCHES = 5, 4, 6


def drawn_problem(seed: int):
    """A chain, in memory that makes some stages compute again, and its forwards."""
    rng = random.Random(seed)
    layers = [
        (
            f"n{k}",
            rng.choice([10, 1000]),
            rng.uniform(1, 3) * 1e-3,
            rng.uniform(1, 6) * 1e-3,
            saved,
            [],
        )
        for k, saved in enumerate(rng.choices([200, 1000, 4000], k=LAYERS))
    ]
    edges = [(f"n{k}", f"n{k + 1}", f"t{k}", 8) for k in range(LAYERS - 1)]
    profile = profile_by_hand(layers, [*edges, (f"n{LAYERS - 1}", "output", "y", 8)], sizes=(1,))
    memory = f"{rng.randint(8, 24)}kB"
    question = Question(
        profile, uniform_cluster(DEVICES, memory), "pipedream-flush", MICRO_BATCHES, 1.0
    )
    relaxation = Relaxation(question, Freedom(recompute="auto"))
    guess = in_flight_under(question.system, DEVICES, 1)
    problem = relaxation.problem(
        Branch(MICRO_BATCHES), Assumptions(guess, guess=True, identical=True)
    )
    return problem, relaxation.forward_s(MICRO_BATCHES)


def all_cuts(problem):
    """Cuts of a chain, with each stage run in either way, that fit."""
    for count in range(1, DEVICES + 1):
        for borders in combinations(range(1, LAYERS), count - 1):
            rows = list(pairwise((0, *borders, LAYERS)))
            for options in product(range(len(problem.options)), repeat=count):
                stages = tuple(
                    ChosenStage((1 << b) - (1 << a), option, count - s)
                    for s, ((a, b), option) in enumerate(zip(rows, options, strict=True))
                )
                cut = Cut(stages, 0.0)
                load = cut_load(problem, cut)
                if load < float("inf"):
                    yield replace(cut, objective_s=load)


@pytest.mark.choice(3)
@pytest.mark.parametrize("seed", range(6))
def test_no_cut_under_its_load_computes_less_again(seed):
    problem, again = drawn_problem(seed)
    lattice = find_downsets(problem, 100)
    cuts = list(all_cuts(problem))
    answer = identical_minimax(problem, lattice, few=0)
    if not cuts:
        assert answer.cut is None
        return
    least = min(cut.objective_s for cut in cuts)
    assert answer.cut.objective_s == pytest.approx(least)
    found = with_least_period(problem, lattice, again, answer.cut)
    found_s = found.objective_s + waited_for(problem, found)
    assert cut_load(problem, found) == pytest.approx(found.objective_s)
    assert waited_for(problem, found) == pytest.approx(
        min(
            waited_for(problem, cut)
            for cut in cuts
            if cut.objective_s <= found.objective_s * (1 + 1e-9)
        )
    )
    # Loads are raised in steps of 2 % up to 1.02^13.
    best = min(
        cut.objective_s * 1.02 + waited_for(problem, cut)
        for cut in cuts
        if cut.objective_s <= least * 1.02**12
    )
    assert found_s <= best * (1 + 1e-9)


@pytest.mark.choice(3)
@pytest.mark.parametrize("seed", range(6))
def test_no_cut_has_a_period_less_by_a_step_where_forwards_run_ahead(seed):
    problem, forward_s = drawn_problem(seed)
    lattice = find_downsets(problem, 100)
    answer = identical_minimax(problem, lattice, few=0)
    if answer.cut is None:
        return
    found = with_least_period(problem, lattice, forward_s, answer.cut, MICRO_BATCHES)
    assert cut_load(problem, found) == pytest.approx(found.objective_s)
    found_s = period_of(problem, forward_s, found, MICRO_BATCHES)
    for cut in all_cuts(problem):
        again_s = waited_for(problem, cut)
        period_s = period_of(problem, forward_s, cut, MICRO_BATCHES)
        assert period_s <= cut.objective_s + again_s + 1e-12
        # Targets are raised in steps of 2 %, from there on.
        largest_s = max(period_s - again_s, answer.cut.objective_s * LEAST)
        assert found_s <= largest_s * 1.02 + again_s + 1e-12


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_is_quicker_than_the_period_of_its_loads(seed):
    rng = random.Random(seed)
    stages, n = rng.randint(2, 6), rng.randint(1, 8)
    names = [f"n{k}" for k in range(stages)]
    layers = [(name, 10, rng.uniform(1, 3), rng.uniform(2, 6), 10, []) for name in names]
    edges = [(f"n{k}", f"n{k + 1}", f"t{k}", 0) for k in range(stages - 1)]
    profile = profile_by_hand(layers, [*edges, (names[-1], "output", "y", 0)], sizes=(1,))
    question = Question(profile, uniform_cluster(stages), "pipedream-flush", n, 1.0)
    relaxation = Relaxation(question, Freedom())
    problem = relaxation.problem(Branch(n), Assumptions(guess=True, identical=True))
    cut = Cut(tuple(ChosenStage(1 << k, 0, stages - k) for k in range(stages)), 0.0)
    expected_s = period_of(problem, relaxation.forward_s(n), cut, n)
    plan = lone_stages([[name] for name in names], [1] * stages)
    period_s = evaluate(question, plan, n).prediction.period_s
    assert 0.8 * period_s <= expected_s <= period_s * (1 + 1e-9)


def test_some_drawn_problems_have_a_better_cut_than_that_with_the_least_load():
    better = 0
    for seed in range(30):
        problem, again = drawn_problem(seed)
        lattice = find_downsets(problem, 100)
        answer = identical_minimax(problem, lattice, few=0)
        if answer.cut is not None:
            better += with_least_period(problem, lattice, again, answer.cut) != answer.cut
    assert better >= 2


def test_listing_cuts_ends_in_time_though_places_take_long():
    problem, _ = drawn_problem(0)
    asked = []

    def place(option, k):
        asked.append(k)
        return problem.place(option, k)

    lattice = find_downsets(problem, 100)
    with pytest.raises(OutOfTime):
        list(chains_below(replace(problem, place=place), lattice, lambda: 1.0, deadline=0.0))
    assert not asked
