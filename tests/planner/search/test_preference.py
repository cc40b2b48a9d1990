"""Of plans about as fast as the fastest: which one is signed, and what it gave away for what."""

from __future__ import annotations

from itertools import pairwise, product
from math import inf

import msgspec
import pytest
from helpers.by_hand.profiles import chain, row_of_layers
from helpers.plans import lone_stages
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import Plan
from timeprest.planner.question import Question
from timeprest.planner.search.answer.preference import Candidates, fastest_of, prefer, regard
from timeprest.planner.search.answer.recheck import recheck, was_edited
from timeprest.planner.search.choices import all_limits
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import PlanError

NEAR = {"latency": "1us", "bandwidth": "100GB/s"}


def of_times(*times):
    """A chain of layers that take so many milliseconds, and twice that backwards."""
    return row_of_layers([(f"n{k}", 100, 1e-3 * t, 2e-3 * t, 8, []) for k, t in enumerate(times)])


def cut(question, borders, limits, n=1):
    names = [layer.name for layer in question.profile.layers]
    ends = [0, *borders, len(names)]
    nodes = [tuple(names[a:b]) for a, b in pairwise(ends)]
    return evaluate(question, lone_stages(nodes, limits), n)


@pytest.fixture(scope="module")
def every_plan():
    """Of six layers on three devices, every cut under all limits."""
    question = Question(of_times(2, 3, 1, 2, 2, 2), uniform_cluster(3), "timeprest", 4, 1.0)
    vectors = all_limits([(1, 3), (1, 2), (1, 1)])
    return question, [
        cut(question, (a, b), limits, n)
        for (a, b), limits, n in product([(1, 2), (1, 3), (2, 3), (2, 4), (3, 4)], vectors, (1, 2))
    ]


@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.1, 0.3, 0.6])
def test_the_first_things_first(every_plan, tolerance):
    """Whatever was met in whatever sequence, it is the best one of those within the tolerance."""
    question, plans = every_plan
    cluster = question.cluster
    fastest = min(plans, key=lambda plan: plan.prediction.period_s)
    limit_s = fastest.prediction.period_s * (1 + tolerance) * (1 + 1e-9)
    near = [plan for plan in plans if plan.prediction.period_s <= limit_s]
    best = min(regard(plan, cluster) for plan in near)
    for sequence in (plans, plans[::-1], plans[1::2] + plans[::2]):
        met = Candidates(cluster, tolerance)
        for plan in sequence:
            met.add(plan)
        chosen = met.preferred(fastest)
        assert regard(chosen, cluster) == best
        assert chosen.difference == min(plan.difference for plan in near)
        assert sum(map(len, met._kept.values())) < len(plans) / 3
    given = fastest_of(fastest, chosen, cluster)
    if chosen.prediction.period_s > fastest.prediction.period_s:
        assert given.version_difference == fastest.difference
        if given.given_for == "staleness":
            assert chosen.difference < fastest.difference
    else:
        assert given is msgspec.UNSET


def test_memory_counts_in_tenths_above_half(every_plan):
    _, plans = every_plan
    most = max(max(plan.memory_shares(uniform_cluster(3, "1GB"))) for plan in plans) * 10**9

    def seconds(share):
        cluster = uniform_cluster(3, f"{int(most / share)}B")
        return {regard(plan, cluster)[1] for plan in plans}

    assert seconds(0.5) == {5}
    assert max(seconds(0.95)) == 10
    assert len(seconds(0.95)) > 1


def test_no_more_devices_are_taken():
    question = Question(of_times(1, 1, 8), uniform_cluster(3), "gpipe", 4, 1.0)
    two, three = cut(question, (2,), (1, 1)), cut(question, (1, 2), (1, 1, 1))
    assert prefer([three, two], two, inf, question.cluster) is two


def test_nothing_is_stale_for_a_period_that_loading_makes_longer():
    """All layers of a mini-batch take 36 ms, its samples 40 ms to load."""
    profile = msgspec.structs.replace(of_times(1, 1, 1), loading_s_per_sample=10e-3)
    plan = solve(profile, uniform_cluster(3, **NEAR), stages=3)
    assert plan.predicted.period_s == pytest.approx(40e-3)
    assert plan.predicted.version_difference == 0
    assert plan.solver.fastest is msgspec.UNSET


def test_stages_that_do_not_set_the_period_are_even_and_little_stale():
    """A head that takes as long as all others: they share those out evenly, all the same."""
    profile = of_times(*[1] * 9, 8)
    for variant, difference in (("timeprest", 1), ("pipedream", 0), ("pipedream-flush", 0)):
        plan = solve(profile, uniform_cluster(4, **NEAR), variant, stages=4)
        assert [len(stage.nodes) for stage in plan.stages] == [3, 3, 3, 1], variant
        assert max(s.version_difference for s in plan.predicted.stages) == difference
        assert plan.solver.optimal
        assert plan.solver.fastest is msgspec.UNSET


def test_the_period_is_given_for_staleness_and_the_plan_says_so(tmp_path):
    """Messages that are under way for long: all mini-batches in flight are needed to hide them."""
    profile = of_times(2, 2, 2, 2)
    asked = profile, uniform_cluster(4, latency="1ms"), "timeprest"
    fast = solve(*asked, stages=4, micro_batches=4)
    plan = solve(*asked, stages=4, micro_batches=4, tolerance=0.3)

    def stale(plan):
        return max(stage.version_difference for stage in plan.predicted.stages)

    assert stale(plan) < stale(fast)
    assert plan.solver.fastest.version_difference == stale(fast)
    assert plan.solver.fastest.given_for == "staleness"
    # What is proven is of the fastest one.
    assert plan.solver.objective_s == pytest.approx(fast.predicted.period_s)
    assert plan.solver.bound_s == pytest.approx(fast.solver.bound_s)
    assert plan.solver.optimal == fast.solver.optimal
    lost = plan.predicted.period_s / plan.solver.objective_s - 1
    assert 0 < lost <= 0.3 * (1 + 1e-9)
    path = tmp_path / "plan.json"
    plan.save(path)
    read = Plan.load(path)
    assert not was_edited(read)
    checked = recheck(read, profile)
    assert checked.plan == plan
    assert not checked.changes
    # An edited one is no longer that.
    stages = tuple(msgspec.structs.replace(stage, in_flight=1) for stage in plan.stages)
    edited = recheck(msgspec.structs.replace(plan, stages=stages), profile).plan
    assert edited.solver.fastest is msgspec.UNSET
    assert edited.solver.objective_s == edited.predicted.period_s > plan.predicted.period_s
    assert not edited.solver.optimal


def test_a_tolerance_is_a_share():
    with pytest.raises(PlanError, match="--tolerance 150%: give a share from 0% to below 100%"):
        solve(chain(4), uniform_cluster(2), tolerance=1.5)


def test_listed_devices_stay_listed():
    question = Question(of_times(1, 1), uniform_cluster(2), "gpipe", 4, 1.0)
    listed = cut(question, (1,), (1, 1))
    turned = evaluate(
        question,
        tuple(
            msgspec.structs.replace(stage, devices=(1 - s,))
            for s, stage in enumerate(listed.stages)
        ),
        1,
    )
    met = Candidates(question.cluster, 0.5)
    met.add(turned)
    assert met.preferred(listed) is listed
