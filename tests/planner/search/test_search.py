"""The search: its plan is the best of all plans there are, by trying every one."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from itertools import count, islice, pairwise, product
from types import SimpleNamespace

import msgspec
import pytest
from helpers.by_hand.profiles import (
    chain,
    drawn_profiles,
    profile_by_hand,
    row_of_layers,
    without_gradients,
)
from helpers.drawn.bounds import MOST_BOUNDED, check_bounds
from helpers.drawn.cases import examples
from helpers.drawn.pipelines import ALL as STRAIGHT
from helpers.drawn.questions import Drawn, all_plans, solved
from helpers.plans import lone_stages
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import Cluster, Device, uniform_cluster
from timeprest.planner.cluster.links import Network
from timeprest.planner.evaluate import evaluate, evaluate_within
from timeprest.planner.partition import problem
from timeprest.planner.partition.problem import Answer, stage_bytes, stage_load
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import RUN_AHEAD, StalenessBounds, limit_ranges
from timeprest.planner.search import exploration, first_plans, state
from timeprest.planner.search import solve as solving
from timeprest.planner.search.answer import fitting, preference
from timeprest.planner.search.answer.preference import Candidates, signed_plan
from timeprest.planner.search.branching import SearchRequest, explore
from timeprest.planner.search.choices import (
    Branch,
    Freedom,
    all_limits,
    capped,
    caps,
    choice_of,
    micro_batch_counts,
)
from timeprest.planner.search.critical_cycles import CycleSearch
from timeprest.planner.search.local_search.improve import LocalSearch, limits_and_ways
from timeprest.planner.search.relaxed.places import Assumptions
from timeprest.planner.search.relaxed.relaxation import Relaxation
from timeprest.planner.search.solve import solve
from timeprest.planner.search.state import Budget, OutOfBudget
from timeprest.planner.systems.orders import parse_order
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import InfeasibleError, PlanError

MOST_PLANS = 1500


def plans_of(question, freedom, asked):
    """(N, stages) of all plans that are looked at, if they are few: which of equal devices are left
    out makes no difference, and without limits of memory nothing is computed again."""
    if freedom.recompute == "auto" and not Relaxation(question, freedom).limited:
        freedom = replace(freedom, recompute="off")

    def alike(stages):
        used = [d for stage in stages for d in stage.devices]
        return question.cluster.uniform and used != list(range(len(used)))

    different = (each for each in all_plans(question, freedom, asked) if not alike(each[1]))
    # Too many are refused before any of them is evaluated.
    plans = list(islice(different, MOST_PLANS + 1))
    assume(len(plans) <= MOST_PLANS)
    return plans


@st.composite
def drawn_clusters(draw):
    count = draw(st.integers(1, 3))
    memory = draw(st.sampled_from([None, None, 40_000, 14_000, 9_000, 6_000]))
    devices = [Device(name=f"d{k}", memory_bytes=memory) for k in range(count)]
    if draw(st.integers(0, 3)) == 0:
        devices = [msgspec.structs.replace(d, speed=draw(st.sampled_from([1, 2]))) for d in devices]
        if memory:
            first = msgspec.structs.replace(devices[0], memory_bytes=memory * 2)
            devices = [first, *devices[1:]]
    bandwidth = draw(st.sampled_from([1e12, 1e12, 1e5, 2e4]))
    network = Network(
        bandwidth_bytes_per_s=bandwidth,
        latency_s=draw(st.sampled_from([0.0, 0.0, 1e-3])),
        half_duplex=draw(st.integers(0, 4)) == 0,
        overlap=draw(st.integers(0, 4)) != 0,
    )
    return Cluster(devices=tuple(devices), network=network)


@st.composite
def drawn_questions(draw, most):
    variant = draw(st.sampled_from(STRAIGHT))
    profile = draw(drawn_profiles(most=most))
    question = Question(profile, draw(drawn_clusters()), variant, profile.batch_size, 1.0)
    ways = ["off", "off", "auto"] + ["on"] * (not VARIANTS[variant].recompute_refusal)
    bounds = st.sampled_from([None, None, None, 1, 2])
    staleness = StalenessBounds(draw(st.sampled_from(RUN_AHEAD)), draw(bounds), draw(bounds))
    if staleness.max_in_flight == 1 and VARIANTS[variant].schedule == "1f1b-micro":
        staleness = replace(staleness, max_in_flight=2)
    freedom = Freedom(draw(st.booleans()), draw(st.sampled_from(ways)), staleness)
    counts = draw(st.sampled_from([None, None, 1, 2, 4, 3]))
    if VARIANTS[variant].whole_mini_batches:
        counts = None
    return question, freedom, counts


def best_of_all(question, freedom, asked):
    """The shortest period of all plans that fit; None when none does."""
    best, most = None, freedom.staleness.max_difference
    for n, stages in plans_of(question, freedom, asked):
        found = evaluate(question, stages, n)
        if not found.over_limit(question.cluster) and (most is None or found.difference <= most):
            period = found.prediction.period_s
            best = period if best is None else min(best, period)
    return best


def found_plan(question, freedom, asked, solver):
    try:
        return solved(
            question,
            micro_batches=asked,
            replicas=freedom.replicas,
            recompute=freedom.recompute,
            **asdict(freedom.staleness),
            solver=solver,
            effort=10**9,
        )
    except InfeasibleError:
        return None


def check_best(question, freedom, asked, solver):
    try:
        micro_batch_counts(question, asked)
    except PlanError:
        assume(False)
    best = best_of_all(question, freedom, asked)
    with pytest.MonkeyPatch.context() as patch:
        # Of the sets of layers that it tries.
        for module in (preference, first_plans):
            patch.setattr(module, "keep_more", lambda _search: None)
        plan = found_plan(question, freedom, asked, solver)
    assert (plan is None) == (best is None)
    if plan is not None:
        assert plan.predicted.period_s == pytest.approx(best, rel=1e-8)
        assert plan.solver.optimal
        assert plan.solver.bound_s <= best * (1 + 1e-9)


ALL = settings(
    max_examples=examples(60),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@pytest.mark.slow
@ALL
@given(drawn_questions(most=6))
def test_the_plan_is_the_best_of_all(drawn):
    """Every system, with and without memory limits, replicas and recomputation."""
    check_best(*drawn, "dp")


@pytest.mark.slow
@settings(ALL, max_examples=examples(25))
@given(drawn_questions(most=12))
def test_the_plan_is_the_best_of_all_on_larger_graphs(drawn):
    check_best(*drawn, "dp")


@pytest.mark.choice(0)
@pytest.mark.slow
@settings(ALL, max_examples=examples(25))
@given(drawn_questions(most=5))
def test_the_ilp_finds_the_same(drawn):
    check_best(*drawn, "ilp")


@settings(ALL, max_examples=examples(60))
@given(drawn_questions(most=6))
def test_a_bound_is_below_every_plan(drawn):
    question, freedom, asked = drawn
    plans = plans_of(question, freedom, asked)
    some = plans[:: max(len(plans) // MOST_BOUNDED, 1)]
    found = [(n, evaluate(question, stages, n)) for n, stages in some]
    check_bounds(Drawn(question, freedom, asked, found))


def test_limits_never_rise_and_are_all_there():
    ranges = [(1, 3), (1, 2), (1, 1)]
    wanted = [v for v in product([1, 2, 3], [1, 2], [1]) if v[0] >= v[1] >= v[2]]
    assert sorted(all_limits(ranges)) == sorted(wanted)
    assert all_limits(ranges, 3) is None
    assert capped(ranges, 2) == (2, 2, 1)
    assert caps(ranges) == [3, 2, 1]
    many = caps([(1, 100), (1, 1)])
    assert many[0] == 100
    assert many == sorted(many, reverse=True)
    assert {1, 2, 3} <= set(many)


def test_pinned_layers_are_where_they_were_asked_for():
    plan = solve(chain(8), uniform_cluster(4), pins=[("n5", 0)])
    assert plan.stages[0].nodes == ("n0", "n1", "n2", "n3", "n4", "n5")
    plan = solve(chain(8), uniform_cluster(4), pins=[("n1", 1), ("n2", 1)], stages=3)
    assert {"n1", "n2"} <= set(plan.stages[1].nodes)
    for name, some in (("nope", "n0, n1, n2, …"), ("n55", "n5, …")):
        with pytest.raises(PlanError, match=f"no layer of this name; it has {some}"):
            solve(chain(8), uniform_cluster(4), pins=[(name, 0)])
    # PipeDream-2BW has one stage for its only micro-batch.
    for system, pins in (("timeprest", [("n5", 0), ("n2", 1)]), ("pipedream-2bw", [("n0", 1)])):
        with pytest.raises(InfeasibleError, match="can't be cut as asked"):
            solve(chain(8), uniform_cluster(4), system, pins=pins)


def test_replicas_halve_a_layer_that_cant_be_cut():
    layers = [("small", 0, 1e-3, 1e-3, 0, []), ("large", 0, 4e-3, 4e-3, 0, [])]
    profile = row_of_layers(layers)
    fast = uniform_cluster(3, bandwidth="1TB/s", latency="0s")
    alone = solve(profile, fast, micro_batches=4)
    shared = solve(profile, fast, micro_batches=4, replicas=True)
    assert alone.predicted.period_s == pytest.approx(4 * 8e-3)
    assert [len(stage.devices) for stage in shared.stages] == [1, 2]
    assert shared.predicted.period_s == pytest.approx(2 * 8e-3)
    assert shared.solver.optimal


def test_a_time_limit_keeps_what_was_found():
    plan = solve(chain(12), uniform_cluster(4), "gpipe", effort=2000)
    assert plan.solver.bound_s <= plan.predicted.period_s
    assert plan.solver.optimal == (plan.solver.gap == 0)
    if not plan.solver.optimal:
        assert plan.solver.stopped == "effort"


def test_a_plan_that_another_run_may_not_find_says_that_time_ended_it(monkeypatch):
    """Also where a part of the search had too little of it, and the whole had enough."""
    asked = (chain(12), uniform_cluster(4), "pipedream-flush")
    others, begun = {"effort": 2000, "stages_per_device": 2}, time.monotonic()
    best, ended = solve(*asked, time_limit_s=None, **others), set()
    assert best.solver.stopped == "effort"
    for each_s in (1.0, 0.5, 0.25, 0.1, 0.01):
        clock = count(begun, each_s)
        for module in (time, problem):
            monkeypatch.setattr(module, "monotonic", lambda clock=clock: next(clock))
        plan = solve(*asked, time_limit_s=60.0, **others)
        found = plan.stages, plan.solver.bound_s
        assert plan.solver.stopped == "time limit" or found == (best.stages, best.solver.bound_s)
        ended.add((plan.solver.stopped, next(clock) < begun + 60.0))
    assert ended >= {("time limit", True), ("time limit", False), ("effort", True)}


def test_without_memory_limits_there_is_a_plan_however_little_time(monkeypatch):
    """And nothing is looked for that would do."""

    def never(fitting):
        raise AssertionError("looked for the memory that would do")

    monkeypatch.setattr(fitting.Fitting, "smallest_memory", never)
    asked = (chain(6), uniform_cluster(3, bandwidth="1TB/s", latency="0s"))
    best = solve(*asked, time_limit_s=None)
    assert solve(*asked, time_limit_s=0.0).predicted.period_s > 0
    # What is found where the search itself finds nothing isn't the plan with the least memory.

    def in_vain(search, *_):
        search.budget.deadline = 0.0
        return "time limit"

    monkeypatch.setattr(solving, "run_parts", in_vain)
    plan = solve(*asked, time_limit_s=0.0)
    assert plan.predicted.period_s < 1.1 * best.predicted.period_s
    assert plan.solver.stopped == "time limit" or plan.solver.optimal


def test_all_that_follows_the_time_limit_takes_a_second(monkeypatch):
    """However short each simulation is."""
    profile, cluster = chain(8), uniform_cluster(8)
    asked = Question(profile, cluster, "timeprest", profile.batch_size, 0.0)
    ranges = limit_ranges(asked.system, 8)
    widest = [max(low, min(high, 9)) for low, high in ranges]
    nodes = [(f"n{k}",) for k in range(8)]
    wide = evaluate(asked, lone_stages(nodes, widest), 1)
    clock = [100.0]

    def slow_within(*given):
        clock[0] += 0.15
        return evaluate_within(*given)

    def limits_after(deadline):
        met = Candidates(cluster, 0.0)
        search = explore(asked, SearchRequest(run_ahead="auto"), lambda *_: None, met.add)
        clock[0], search.best, search.budget.deadline = 100.0, wide, deadline
        chosen = signed_plan(search, met, LocalSearch)
        return sum(chosen.limits), clock[0] - 100.0

    monkeypatch.setattr(state, "evaluate_within", slow_within)
    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    all_of_it, took_s = limits_after(None)
    assert took_s > 2
    some_of_it, took_s = limits_after(100.0)
    assert all_of_it < some_of_it <= sum(widest)
    assert took_s < 1.5
    assert limits_after(98.9) == (sum(widest), 0.0)


def test_a_search_that_ends_early_is_no_worse_than_even_cuts(monkeypatch):
    """Where messages are dear inside of blocks and cheap between them, and waiting for them counts
    more than even loads."""
    names = [f"h.{k}.{part}" for k in range(12) for part in "abcd"]
    layers = [
        (name, 64, 1e-4 * (1 + k * k % 11), 2e-4 * (1 + 3 * k * k % 7), 4, ())
        for k, name in enumerate(names)
    ]
    edges = [
        (a, b, a, 4_000_000 if k % 4 else 1_000_000)
        for k, (a, b) in enumerate(pairwise(names), start=1)
    ]
    profile = profile_by_hand(layers, edges, (1, 2, 4, 8, 16))
    for stages in (4, 6):
        asked = (profile, cluster := uniform_cluster(stages, bandwidth="4GB/s"), "pipedream-flush")
        more = {"mini_batch": 16, "micro_batches": 8, "stages": stages, "effort": 20_000}
        plan = solve(*asked, **more)
        assert plan.solver.optimal or plan.solver.stopped == "effort"
        each = len(names) // stages
        even = [names[s * each : (s + 1) * each] for s in range(stages)]
        question = Question(profile, cluster, "pipedream-flush", 16, 1.0)
        other = evaluate(question, lone_stages(even, [1] * stages), 8).prediction.period_s
        assert plan.predicted.period_s <= other
        with monkeypatch.context() as patch:
            for name in ("improve", "start", "climb_on"):
                patch.setattr(exploration, name, lambda *_: None)
            patch.setattr(solving, "signed_plan", lambda search, *_: search.best)
            patch.setattr(CycleSearch, "bound", lambda _: [])
            # Nor what a proof comes upon.
            patch.setattr(CycleSearch, "prove", lambda _: None)
            before = solve(*asked, **more)
        assert plan.predicted.period_s < before.predicted.period_s


def test_a_bound_of_2bw_is_a_micro_batchs_round_trip():
    question = Question(chain(4), uniform_cluster(4), "pipedream-2bw", 4, 1.0)
    relaxation = Relaxation(question, Freedom(replicas=True))
    cost = question.costs.stage(tuple(layer.name for layer in question.profile.layers), 2, True)
    trip_s = relaxation.seconds.round_trip_s(2)
    assert trip_s == pytest.approx(cost.forward_s + cost.backward_s)
    assert relaxation.graph.returning_rows == [[0, 1, 2, 3]]
    # Where no gradient comes back, what is before doesn't wait for what is behind.
    profile = without_gradients(chain(4), "n1")
    cut = Relaxation(Question(profile, uniform_cluster(4), "pipedream-2bw", 4, 1.0), Freedom())
    assert cut.graph.returning_rows == [[0, 1], [2, 3]]
    assert cut.seconds.round_trip_s(2) == pytest.approx(trip_s / 2)


def test_staleness_is_the_users_to_bound():
    """Far messages: more in flight than S - s are worth it, where they are asked for."""
    asked = chain(4), uniform_cluster(4, latency="2ms"), "timeprest"
    found = {
        text: solve(*asked, stages=4, micro_batches=4, **more)
        for text, more in {
            "paper": {},
            "auto": {"run_ahead": "auto"},
            "limit": {"run_ahead": "auto", "max_in_flight": 3},
            "fresh": {"run_ahead": "auto", "max_difference": 1},
            "none": {"max_difference": 0},
        }.items()
    }
    limits = {text: [stage.in_flight for stage in plan.stages] for text, plan in found.items()}
    period_s = {text: plan.predicted.period_s for text, plan in found.items()}
    assert limits["auto"][0] > 4 >= limits["paper"][0]
    assert limits["limit"][0] <= 3
    assert limits["none"] == [1] * 4
    difference = {
        text: max(stage.version_difference for stage in plan.predicted.stages)
        for text, plan in found.items()
    }
    assert difference["fresh"] == 1
    assert difference["none"] == 0
    assert period_s["auto"] < period_s["paper"] < period_s["fresh"] < period_s["none"]


def test_a_difference_that_no_plan_keeps_to_says_the_least_there_is():
    order = parse_order("0F0.0 0F1.0 | 0B0 0F2.0\n1F0.0 1B0 | 1F1.0 1B1")
    asked = chain(4), uniform_cluster(2), "pipedream-unstashed"
    with pytest.raises(InfeasibleError, match=r"--max-difference 0: .* less than 1; give"):
        solve(*asked, order=order, max_difference=0)
    assert solve(*asked, order=order, max_difference=1).stages[0].in_flight == 2
    with pytest.raises(PlanError, match="the order has 2 mini-batches in flight on a stage; give"):
        solve(*asked, order=order, max_in_flight=1)


@settings(ALL, max_examples=examples(60))
@given(drawn_questions(most=4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_no_plan_is_faster_than_a_round_trip_of_what_may_be_in_flight(drawn, n, limit):
    question, freedom = (
        drawn[0],
        Freedom(True, staleness=StalenessBounds("auto", max_in_flight=limit)),
    )
    assume(n == 1 or not question.system.whole_mini_batches)
    trip_s = Relaxation(question, freedom).seconds.round_trip_s(n)
    for _, stages in plans_of(question, freedom, n):
        assert trip_s <= evaluate(question, stages, n).prediction.period_s * (1 + 1e-9)


def test_an_evaluation_that_takes_too_long_isnt_begun():
    budget = Budget(deadline=time.monotonic() + 1000.0)
    budget.took(10, 5000.0)
    budget.spend(10)
    with pytest.raises(OutOfBudget, match="time limit"):
        budget.spend(10, needed=False)
    budget.spend(1, needed=False)
    assert budget.tried == 2


def test_a_simulation_that_was_held_up_is_forgotten():
    budget = Budget()
    budget.took(100, 1.0)
    assert budget.expected_s(1000) == pytest.approx(10.0)
    for _ in range(50):
        budget.took(1000, 0.1)
    assert budget.expected_s(1000) == pytest.approx(0.1)


def test_finer_blocks_where_the_first_ones_dont_fit(monkeypatch):
    monkeypatch.setattr(state, "_LARGE", 0)
    monkeypatch.setattr(first_plans, "MOST_BLOCKS", 3)
    layers = [(f"n{k}", 1000, 1e-3, 1e-3, 0, []) for k in range(8)]
    # Two layers with gradients and optimizer state, two versions of each, fit a device.
    question = Question(row_of_layers(layers), uniform_cluster(4, "9kB"), "pipedream-2bw", 4, 1.0)
    found = explore(question, SearchRequest(micro_batches=4), lambda *_: None)
    found.bounds = dict.fromkeys(found.branches, 0.0)
    first_plans.try_blocks(found)
    assert [len(stage.nodes) for stage in found.best.stages] == [2, 2, 2, 2]


def test_a_cut_found_for_some_micro_batches_is_tried_with_others():
    question = Question(chain(4), uniform_cluster(2), "timeprest", 4, 1.0)
    seen = []
    found = explore(question, SearchRequest(), lambda *_: None, seen.append)
    found.bounds = dict.fromkeys(found.branches, 0.0)
    problem = found.relaxation.problem(found.branches[0])
    cut = found.source.best(problem).cut
    exploration._try_elsewhere(found, [(choice_of(problem, cut), cut)])
    assert {plan.micro_batches for plan in seen} == {1, 2, 4}
    assert {tuple(stage.nodes for stage in plan.stages) for plan in seen} == {
        choice_of(problem, cut).nodes
    }


def test_a_stage_with_devices_behind_it_may_be_the_last():
    """They may be left out: SpecTrain predicts nothing there, and needs no memory for it."""
    profile = chain(1, parameters=1000, saved=100)
    question = Question(profile, uniform_cluster(2), "spectrain", profile.batch_size, 1.0)
    need = evaluate(question, lone_stages([["n0"]], [1]), 1).prediction.stages[0].memory_bytes
    devices = tuple(Device(name=f"d{k}", memory_bytes=m) for k, m in enumerate((need, 1)))
    cluster = msgspec.structs.replace(question.cluster, devices=devices)
    question = replace(question, cluster=cluster)
    # With both devices from its first one to the end, it needs no more than it does.
    assert stage_bytes(Relaxation(question, Freedom()).problem(Branch(1)), 0, 0b1, 0, 2) <= need
    assert found_plan(question, Freedom(), None, "dp").stages[0].devices == (0,)


def test_a_bound_knows_that_a_stage_that_sends_nothing_back_does_not_split():
    """Both parts of a split backward may take longer than it takes whole."""
    profile = chain(3)
    layers = tuple(
        msgspec.structs.replace(
            layer,
            measurements=tuple(
                msgspec.structs.replace(m, backward_input_s=2 * m.backward_s)
                for m in layer.measurements
            ),
        )
        for layer in profile.layers
    )
    profile = msgspec.structs.replace(profile, layers=layers)
    for devices in (1, 2):
        question = Question(profile, uniform_cluster(devices), "zb-h1", profile.batch_size, 1.0)
        plan = found_plan(question, Freedom(), None, "dp")
        assert plan.solver.optimal
        whole = evaluate(question, lone_stages([["n0", "n1", "n2"]], [1]), 1)
        assert plan.predicted.period_s <= whole.prediction.period_s * (1 + 1e-9)
        for view in Relaxation(question, Freedom()).views:
            problem = Relaxation(question, Freedom()).problem(Branch(1), Assumptions(view=view))
            load = stage_load(problem, 0, 0b111, 0, devices)
            assert load <= whole.prediction.period_s * (1 + 1e-9)


def test_devices_taken_together_need_no_replicas_that_divide_into_them(monkeypatch):
    monkeypatch.setattr(exploration, "_MOST_UNITS", 1)
    plan = solve(chain(4), uniform_cluster(2), "gpipe", micro_batches=1, replicas=True)
    assert plan.solver.optimal


def test_once_time_is_up_bounds_get_none(monkeypatch):
    given = []
    monkeypatch.setattr(exploration, "_MOST_UNITS", 1)
    monkeypatch.setattr(
        exploration,
        "_solve",
        lambda search, problem, s: given.append(s) or Answer(None, 0.0, False),
    )
    question = Question(
        chain(4),
        Cluster(
            devices=(Device(name="a"), Device(name="b", speed=2.0)),
            network=uniform_cluster(1).network,
        ),
        "gpipe",
        4,
        1.0,
    )
    search = explore(question, SearchRequest(replicas=True, time_limit_s=0.0), lambda *_: None)
    assert exploration.run(search) == "time limit"
    assert set(given) == {0.0}


def test_stages_compute_again_before_few_mini_batches_are_in_flight():
    """Of eight stages with four in flight each half is idle; computing again takes a third longer.
    Where a mini-batch has many micro-batches, one in flight keeps nearly all of them busy."""
    for system, n, fewer_first in (("pipedream", 1, False), ("timeprest", 64, True)):
        profile = chain(8, saved=1000)
        question = Question(profile, uniform_cluster(8, "9kB"), system, 4, 1.0)
        search = explore(question, SearchRequest(stages=8, recompute="auto"), lambda *_: None)
        lying = tuple((d,) for d in range(8))
        under = limits_and_ways(LocalSearch(search), lying, n)
        limits, again = under[0]
        assert (limits[0], again) == (8, False)
        fewer = under.index(((1,) * 8, False))
        assert (fewer < under.index((limits, True))) == fewer_first
