"""What 1F1B's schedule makes stages wait for: no plan breaks it, and equal stages have equality."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.by_hand.profiles import chain, drawn_profiles
from helpers.drawn.cases import examples
from helpers.plans import even_stages, lone_stages
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import evaluate
from timeprest.planner.partition.dp.identical_devices_by_target import targets_of
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.search.choices import Branch, Freedom
from timeprest.planner.search.relaxed.places import Assumptions
from timeprest.planner.search.relaxed.relaxation import Relaxation

SYSTEMS = "pipedream-flush", "pipedream-2bw"


def question_of(profile, system, devices, batch, memory=None):
    cluster = uniform_cluster(devices, memory, bandwidth="1000TB/s", latency="0s")
    return Question(profile, cluster, system, batch, 1.0)


def problem_of(question, micro_batches):
    relaxation = Relaxation(question, Freedom(replicas=True, recompute="auto"))
    view = "return" if question.system.flushes else "cycle"
    assumed = Assumptions(view=view, identical=True, waits=True)
    return relaxation.problem(Branch(micro_batches), assumed)


@st.composite
def drawn_plans(draw):
    """A question, a plan's stages in a sequence of layers, and micro-batches."""
    system, n = draw(st.sampled_from(SYSTEMS)), draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    profile = draw(drawn_profiles(most=8))
    batch = n * profile.micro_batch_sizes[0]
    stages = draw(st.integers(1, min(len(profile.layers), 4 if system == "pipedream-flush" else n)))
    counts = [r for r in range(1, n + 1) if n % r == 0 and r <= 6]
    replicas = draw(st.lists(st.sampled_from(counts), min_size=stages, max_size=stages))
    assume(system == "pipedream-flush" or stages <= n)
    memory = draw(st.sampled_from([None, "1GB"]))
    question = question_of(profile, system, sum(replicas), batch, memory)
    names = Relaxation(question, Freedom(True)).graph.names
    borders = draw(st.permutations(range(1, len(names))))[: stages - 1]
    cuts = [0, *sorted(borders), len(names)]
    again = draw(st.lists(st.booleans(), min_size=stages, max_size=stages))
    first, found = 0, []
    for s, r in enumerate(replicas):
        limit = 1 if question.system.flushes or s == stages - 1 else 2
        found.append(
            PlanStage(
                nodes=names[cuts[s] : cuts[s + 1]],
                devices=tuple(range(first, first + r)),
                in_flight=limit,
                recompute=again[s] and memory is not None,
            )
        )
        first += r
    return question, tuple(found), n


@settings(max_examples=examples(300), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn_plans())
def test_no_plan_has_fewer_devices_beyond_a_stage_than_its_period_needs(drawn):
    question, stages, n = drawn
    period_s = evaluate(question, stages, n).prediction.period_s * (1 + 1e-9)
    problem = problem_of(question, n)
    waits = problem.place.waits
    position = {name: j for j, name in enumerate(problem.names)}
    lists = [[position[name] for name in stage.nodes] for stage in stages]
    for s, stage in enumerate(stages):
        r, beyond = len(stage.devices), sum(len(each.devices) for each in stages[s + 1 :])
        before = [j for mine in lists[:s] for j in mine]
        after = [j for mine in lists[s + 1 :] for j in mine]
        (mode,) = [m for m in problem.modes if m.recompute is stage.recompute]
        work = np.array([mode.compute_s[lists[s]].sum()])
        before_s = float(waits.before_s[before].sum())
        after_s = np.array([waits.beyond_s[after].sum()])
        needed = waits.fewest_beyond(period_s, r, work, before_s, after_s)
        assert needed[0] <= beyond
        through_s = before_s + np.array([waits.before_s[lists[s]].sum()])
        assert waits.allowed(period_s, r, through_s, np.array([beyond]))[0]


@pytest.mark.parametrize("n", [4, 6, 12])
def test_equal_stages_that_drain_have_equality(n):
    question = question_of(chain(4), "pipedream-flush", 4, n)
    stages = lone_stages([["n0"], ["n1"], ["n2"], ["n3"]], [1] * 4)
    costs = question.costs.stage(("n1",), 1, False)
    work = n * (costs.forward_s + costs.backward_s)
    period_s = (n + 3) * work / n
    assert evaluate(question, stages, n).prediction.period_s == pytest.approx(period_s, rel=1e-3)
    waits = problem_of(question, n).place.waits
    for beyond in range(4):
        before_s, after_s = (3 - beyond) * work / n, np.array([beyond * work / n])
        rest = (np.array([work]), before_s, after_s)
        assert waits.fewest_beyond(period_s * 1.0001, 1, *rest)[0] <= beyond
        assert waits.fewest_beyond(period_s * 0.98, 1, *rest)[0] > beyond or beyond + 1 == n


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_bound_with_waits_is_sharper_and_no_plan_beats_it(system):
    """All cuts of a chain, with the same replicas everywhere, that fit."""
    profile, n, devices = chain(6, parameters=1000), 8, 4
    question = question_of(profile, system, devices, n, "13kB")
    problem = problem_of(question, n)
    lattice = find_downsets(problem, 10_000)
    names, plans = [layer.name for layer in profile.layers], []
    for r in (1, 2, 4):
        before = 1 if question.system.flushes else 2
        limits = [*[before] * (devices // r - 1), 1]
        plans += [evaluate(question, stages, n) for stages in even_stages(names, limits, r)]
    best = min(p.prediction.period_s for p in plans if not p.over_limit(question.cluster))
    with_waits = targets_of(problem, lattice)
    bare = targets_of(replace(problem, place=problem.place.with_waits(None)), lattice)
    low = _least(bare, best)
    assert low <= _least(with_waits, best) <= best * (1 + 1e-3)
    if system == "pipedream-flush":
        assert low * 1.02 < _least(with_waits, best)


def _least(solver, most):
    """The least target that some cut keeps to."""
    low, high = most / 8, most * 1.001
    while high > low * 1.0001:
        middle = (low * high) ** 0.5
        if solver.under(middle, None) is None:
            low = middle
        else:
            high = middle
    return low
