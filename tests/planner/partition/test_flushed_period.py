"""What the period of a pipeline that runs empty is about, against its schedule."""

from __future__ import annotations

import random

import pytest
from helpers.by_hand.profiles import row_of_layers
from helpers.plans import lone_stages
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import evaluate
from timeprest.planner.partition.flushed_period import period_of
from timeprest.planner.partition.problem import ChosenStage, Cut
from timeprest.planner.question import Question
from timeprest.planner.search.choices import Branch, Freedom
from timeprest.planner.search.relaxed.places import Assumptions
from timeprest.planner.search.relaxed.relaxation import Relaxation


@pytest.mark.parametrize("seed", range(20))
def test_no_schedule_is_quicker_than_the_period_of_its_loads(seed):
    rng = random.Random(seed)
    stages, n = rng.randint(2, 6), rng.randint(1, 8)
    names = [f"n{k}" for k in range(stages)]
    layers = [(name, 10, rng.uniform(1, 3), rng.uniform(2, 6), 10, []) for name in names]
    profile = row_of_layers(layers, 0, 0, sizes=(1,))
    question = Question(profile, uniform_cluster(stages), "pipedream-flush", n, 1.0)
    relaxation = Relaxation(question, Freedom())
    problem = relaxation.problem(Branch(n), Assumptions(guess=True, identical=True))
    cut = Cut(tuple(ChosenStage(1 << k, 0, stages - k) for k in range(stages)), 0.0)
    expected_s = period_of(problem, relaxation.seconds.forward_s(n), cut, n)
    plan = lone_stages([[name] for name in names], [1] * stages)
    period_s = evaluate(question, plan, n).prediction.period_s
    assert 0.8 * period_s <= expected_s <= period_s * (1 + 1e-9)
