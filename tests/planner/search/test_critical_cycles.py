"""What is proven by critical cycles is so: against all plans, on drawn questions by number."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace

import msgspec
import pytest
from helpers.by_hand.profiles import chain, profile_by_hand, row_of_layers, without_gradients
from helpers.drawn.cases import examples
from helpers.drawn.lone_devices import all_alone, borders, drawn_alone, parts, some_alone
from helpers.drawn.questions import Drawn, solved
from helpers.drawn.questions import drawn as any_drawn
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import Cluster, Device, uniform_cluster
from timeprest.planner.cluster.headroom import Headroom
from timeprest.planner.cluster.links import AllReduce, Network
from timeprest.planner.evaluate import Evaluation
from timeprest.planner.partition.dp import critical_cycles as dp
from timeprest.planner.partition.dp.critical_cycles import CriticalCycles, CycleStep
from timeprest.planner.partition.dp.turns import least_turning, turnings
from timeprest.planner.partition.problem import SAME
from timeprest.planner.question import Question
from timeprest.planner.search import critical_cycles, exploration
from timeprest.planner.search.branching import SearchRequest, explore
from timeprest.planner.search.choices import Freedom
from timeprest.planner.search.critical_cycles import CycleSearch, _Way
from timeprest.planner.search.local_search.improve import LocalSearch
from timeprest.planner.search.relaxed.cycles import exchanges
from timeprest.planner.search.relaxed.relaxation import Relaxation
from timeprest.planner.search.relaxed.turns import turns_of
from timeprest.planner.search.solve import solve
from timeprest.planner.search.state import OutOfBudget, SearchState
from timeprest.planner.simulator.timeline import least_period_s
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import InfeasibleError
from timeprest.profiles.profile import OperationCost, SharedParameters

ONE_BY_ONE = tuple(
    name
    for name, variant in VARIANTS.items()
    if variant.schedule in ("1f1b", "1f1b-micro", "1f1b-deep")
)

FLUSHING = tuple(
    name for name, variant in VARIANTS.items() if variant.flushes and variant.placement == "any"
)

seeds = st.integers(0, 10**5)


def asked_of(drawn: Drawn) -> dict:
    """What is asked for, as a request has it."""
    whole = drawn.question.system.whole_mini_batches
    return {
        "micro_batches": None if whole else drawn.asked,
        "recompute": drawn.freedom.recompute,
        "run_ahead": drawn.freedom.staleness.run_ahead,
    }


def begun(question: Question, **asked) -> SearchState:
    """A search that nothing was tried in."""
    search = explore(question, SearchRequest(**asked), lambda *_: None)
    search.forget_bounds()
    return search


def search_of(drawn: Drawn) -> SearchState:
    """One that nothing was tried in."""
    return begun(drawn.question, **asked_of(drawn), time_limit_s=None, effort=10**9)


def check_proofs(drawn: Drawn) -> None:
    """Bounds and proofs by cycles alone, from plans that are far from the best or near it."""
    search = search_of(drawn)
    CycleSearch(search).bound()
    for branch in search.branches:
        stages = branch.stages
        periods = [
            found.prediction.period_s
            for found in drawn.fitting
            if stages in (None, len(found.stages))
        ]
        assert all(search.bounds[branch] <= period_s * SAME for period_s in periods)
    by_period = sorted(drawn.fitting, key=lambda found: found.prediction.period_s)
    for start in by_period[:: max(len(by_period) // 3, 1)][1:] + by_period[-1:]:
        search = search_of(drawn)
        search.best = start
        CycleSearch(search).prove()
        assert search.bound_s <= drawn.best_s * SAME
        assert not search.best.over_limit(drawn.question.cluster)


@settings(max_examples=examples(90))
@given(seeds)
@example(27)
@example(53)
@example(90)
@example(125)
@example(347)
@example(1209)
@example(4261)
def test_no_plan_is_below_what_cycles_prove(seed):
    drawn = some_alone(seed)
    assume(drawn.fitting)
    check_proofs(drawn)


@settings(max_examples=examples(90))
@given(seeds)
@example(200)
def test_what_cycles_say_of_plans_with_pins_and_without_replicas_is_so(seed):
    """Where others are asked for, too."""
    drawn = any_drawn(seed)
    assume(drawn is not None)
    assume(drawn.fitting)
    asked = {
        **asked_of(drawn),
        "replicas": drawn.freedom.replicas,
        "stages": drawn.stages,
        "pins": drawn.pins,
    }
    search = begun(drawn.question, **asked, time_limit_s=None, effort=10**9)
    cycles = CycleSearch(search)
    cycles.bound()
    for branch in search.branches:
        plans = [
            found
            for found in drawn.fitting
            if found.micro_batches == branch.micro_batches
            and branch.stages in (None, len(found.stages))
        ]
        alone = [found for found in plans if all(len(x.devices) == 1 for x in found.stages)]
        for some, bound_s in (
            (plans, search.bounds[branch]),
            (alone, cycles.alone_s.get(branch, 0.0)),
        ):
            assert all(bound_s <= found.prediction.period_s * SAME for found in some)
    # It is one of those that were asked for.
    assert search.period_s * SAME >= drawn.best_s


@settings(max_examples=examples(60))
@given(seeds, st.sampled_from([500, 20_000]))
def test_a_plan_called_optimal_is_so(seed, effort):
    """With little effort, so that it is the bounds that prove."""
    drawn = some_alone(seed)
    try:
        plan = solved(drawn.question, effort=effort, **asked_of(drawn))
    except InfeasibleError:
        assert drawn.best_s is None or effort < 1000
        return
    # It may look at more ways to compute again.
    if drawn.best_s is not None:
        assert plan.solver.bound_s <= drawn.best_s * SAME
        if plan.solver.optimal:
            assert plan.predicted.period_s <= drawn.best_s * SAME


@pytest.mark.parametrize("first", [0, 100])
def test_where_tables_would_take_too_long_bounds_along_a_path_hold(first, monkeypatch):
    monkeypatch.setattr(critical_cycles, "quick", lambda lattice, modes: False)
    known, bound = list[float](), exploration.straight_along_path

    def noted(*asked) -> float:
        known.append(bound(*asked))
        return known[-1]

    monkeypatch.setattr(exploration, "straight_along_path", noted)
    for seed in range(first, first + examples(30)):
        drawn = drawn_alone(seed)
        if drawn is None or not drawn.fitting:
            continue
        stages = max(len(found.stages) for found in drawn.fitting)
        plan = solved(drawn.question, stages=stages, effort=20_000, **asked_of(drawn))
        periods = [x.prediction.period_s for x in drawn.fitting if len(x.stages) == stages]
        assert plan.solver.bound_s <= min(periods) * SAME, seed
    assert any(bound_s > 0 for bound_s in known)


@settings(max_examples=examples(90))
@given(seeds)
def test_cycles_of_a_cut_that_flushes_take_no_longer_than_its_plan(seed):
    """In which way soever: the longest one of the cut itself, and what is known of all cuts."""
    drawn = some_alone(seed, systems=FLUSHING)
    for part in parts(drawn):
        program = part.program
        for plan in part.fitting:
            period_s = plan.prediction.period_s
            assert program.keeps(period_s * SAME) is not None
            if drawn.freedom.recompute == "off":
                assert program.period_s(steps_of(program, plan)) <= period_s * SAME


def steps_of(program: CriticalCycles, plan: Evaluation) -> list[CycleStep]:
    """A plan that computes nothing again, as a cut."""
    borders_at = [0, *borders(program.problem.loads, program.lattice.masks, plan)]
    found = []
    for s, (below, above) in enumerate(pairwise(borders_at)):
        places, mine = program.problem.devices.places[s], plan.stages[s].devices[0]
        place = next((each for each in places if each.device == mine), places[0])
        found.append(CycleStep(below, above, 0, place.stage.flights[0], place))
    return found


@settings(max_examples=examples(60))
@given(seeds)
def test_the_turns_of_a_cut_leave_no_limits_a_shorter_period(seed):
    drawn = some_alone(seed, systems=ONE_BY_ONE)
    cluster = drawn.question.cluster
    exact = cluster.flat and not cluster.network.half_duplex and cluster.network.overlap
    for part in parts(drawn):
        problem, masks = part.program.problem, part.program.lattice.masks
        flights = [stage.flights for stage in problem.stages]
        cuts = {}
        for plan in part.plans:
            devices = tuple(stage.devices for stage in plan.stages)
            key = borders(problem.loads, masks, plan), devices
            again = tuple(stage.recompute for stage in plan.stages)
            cuts.setdefault((key, again), []).append(plan)
        for plans in cuts.values():
            check_turns(plans, flights, exact=exact)


def check_turns(plans, flights, *, exact: bool) -> None:
    """`plans`: of one cut, under all limits; `exact`: messages have wires of their own."""
    best_s = min(plan.prediction.period_s for plan in plans)
    pipeline = plans[0].pipeline
    turns, n = turns_of(pipeline, flights), pipeline.micro_batches
    least_s, lowest = least_turning(turns, n, 10 * best_s)
    assert least_s <= best_s * SAME
    limits = tuple(flight.limit for flight in lowest)
    assert all(a >= b for a, b in pairwise(limits))
    assert all(
        limit in [each.limit for each in mine] for limit, mine in zip(limits, flights, strict=True)
    )
    # All that are faster than some plan are among those that its period leaves.
    below_s = sorted(plan.prediction.period_s for plan in plans)[len(plans) // 2]
    left = {tuple(each.limit for each in some) for some in turnings(turns, n, below_s)}
    means = [{each.limit for each in mine} for mine in flights]
    for plan in plans:
        if all(limit in mine for limit, mine in zip(plan.limits, means, strict=True)):
            assert plan.limits in left or plan.prediction.period_s * SAME >= below_s
    # Below any period that it may have, nothing is known but that.
    below_s = best_s * 0.9
    assert least_turning(turns, n, below_s)[0] <= below_s
    chain = {(link.source, link.target) for link in pipeline.links if link.has_gradient}
    links = {(link.source, link.target) for link in pipeline.links}
    neighbours = {(s, s + 1) for s in range(pipeline.stages - 1)}
    if exact and pipeline.micro_batches == 1 and chain == links == neighbours:
        mine = next(plan for plan in plans if plan.limits == limits)
        exact_s = max(least_s, least_period_s(pipeline))
        assert mine.prediction.period_s == pytest.approx(exact_s, rel=1e-6)


# Causes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("homes", ["aab", "abb", "aba", "aaa"])
@pytest.mark.parametrize("system", ["pipedream", "timeprest", "pipedream-flush", "gpipe"])
def test_the_same_cut_on_other_devices_is_another_plan(system, homes):
    """Where devices are alike, but not what is between them."""
    profile = row_of_layers([(f"n{k}", 100, 1e-3, 2e-3, 0, []) for k in range(2)], 1000)
    near, far = (Network(bandwidth_bytes_per_s=each, latency_s=0.0) for each in (1e9, 4e5))
    devices = tuple(Device(name=f"d{k}", machine=home) for k, home in enumerate(homes))
    cluster = Cluster(devices=devices, network=near, between_machines=far)
    question = Question(profile, cluster, system, 4, 1.0)
    n = 1 if question.system.whole_mini_batches else 4
    check_proofs(all_alone(question, Freedom(), n))


@pytest.mark.parametrize("stages", [None, 4])
def test_tables_end_with_the_time(stages):
    """Those of one number of stages serve all; none is made when the time is over."""
    asked = Question(chain(12), uniform_cluster(8 if stages is None else 4), "gpipe", 4, 0.0)
    search = begun(asked, stages=stages)
    cycles = CycleSearch(search)
    assert all(map(cycles.covers, search.branches))
    search.budget.deadline = time.monotonic() - 1
    with pytest.raises(OutOfBudget):
        cycles.bound()
    assert not cycles.tables
    search.budget.deadline = None
    cycles.bound()
    assert {way.branch.stages for way in cycles.tables} == {stages or 8}
    assert search.best is not None
    assert 0 < search.bound_s <= search.period_s * SAME


def test_plans_of_nf1b_have_in_flight_what_memory_has_room_for():
    """Early layers keep much, late ones have the weights: with one mini-batch in flight everywhere
    the best plan takes twice as long."""
    layers = [
        (f"n{k}", round(100 * 1.1**k), 1e-3, 2e-3, round(1200 * 0.9**k), []) for k in range(30)
    ]
    profile = row_of_layers(layers, [round(300 * 0.9**k) for k in range(29)], 4, sizes=(1, 2, 16))
    plan = solve(
        profile,
        uniform_cluster(6, "90000B", "1GB/s"),
        "timeprest",
        stages=6,
        micro_batches=8,
        headroom=Headroom(),
        time_limit_s=None,
        effort=200_000,
        tolerance=0.0,
    )
    assert plan.predicted.period_s < 0.65


@pytest.mark.parametrize("system", ["pipedream", "timeprest", "pipedream-flush", "pipedream-2bw"])
def test_what_passes_a_stage_keeps_a_wire_busy(system):
    """A tensor that not the next stage uses, but the one behind it."""
    layers = [(f"n{k}", 100, 1e-6, 2e-6, 0, []) for k in range(3)]
    edges = [("n0", "n1", "x", 10), ("n0", "n2", "y", 10**6), ("n1", "n2", "z", 10)]
    profile = profile_by_hand(layers, [*edges, ("n2", "output", "o", 4)], sizes=(1, 2, 4))
    asked = Question(profile, uniform_cluster(3, "1GB", "1GB/s"), system, 4, 0.0)
    search = begun(asked, stages=3)
    CycleSearch(search).bound()
    # Four samples; bounds are found by bisection.
    assert search.bound_s >= 3.98e-3
    assert search.best is not None
    assert search.bound_s <= search.period_s * SAME


def test_a_cut_is_looked_for_anew_where_its_plan_needs_more_than_is_known_of_it():
    """Messages that wait for the slow wire take more of the best cut than bounds know of."""
    layers = [(f"n{k}", 100, 1e-3, 2e-3, 10, []) for k in range(12)]
    profile = row_of_layers(layers, [100] * 6 + [8] * 5, sizes=(1,))
    devices = uniform_cluster(4, "1900B", bandwidth="5KB/s", latency="0s")
    question = Question(profile, devices, "pipedream-2bw", 4, 1.0)
    search = begun(question, stages=4, micro_batches=4)
    cycles = CycleSearch(search)
    cycles.bound()
    looked = cycles.found
    assert looked[0].over_limit(question.cluster)
    assert search.best is not None
    assert not looked[1].over_limit(question.cluster)


def test_what_other_stages_lack_anew_is_left_free_at_every_stage():
    """Of many devices others lack it each time: a stage at a time would take as many cuts."""
    profile, lacking, asked = chain(12), iter([0, 1, 2]), []

    class Lacking(CycleSearch):
        def _plan(self, way, cut):
            asked.append(way.lacks)
            short = [(s, 1) for s in islice(lacking, 1)]
            return SimpleNamespace(over_limit=lambda _: short)

    question = Question(profile, uniform_cluster(4, "1GB"), "pipedream", 1, 0.0)
    search = begun(question, stages=4)
    cycles = Lacking(search)
    way = _Way(replace(search.branches[0], stages=4))
    cut = cycles._best(way, 0.0, 0.01).cut
    assert len(list(cycles._plans(way, cut))) == 4
    nothing, first, *every = asked
    assert not nothing
    assert first[0] > 0
    assert not any(first[1:])
    assert all(len({*lacks}) == 1 and lacks[0] > 0 for lacks in every)


def test_first_cuts_are_simulated_under_limits_that_may_fit():
    """Of those far ahead none does, and simulations take long."""
    profile = chain(12, parameters=1, saved=1000)
    question = Question(profile, uniform_cluster(6, "40KB"), "timeprest", 4, 0.0)
    request = SearchRequest(stages=6, micro_batches=4, run_ahead="auto")
    search = explore(question, request, lambda *_: None)
    most = search.relaxation.limit_ranges(6)[0][1]
    found = LocalSearch(search).starts_on(tuple((d,) for d in range(6)), 4)
    assert any(not standing.over for standing in found)
    assert all(standing.point.limits[0] < most for standing in found)


@pytest.mark.parametrize(
    ("asked", "covered"),
    [
        ({"pins": (("n3", 1),)}, True),
        ({"stages": 3, "pins": (("n3", 1), ("n9", 2))}, True),
        ({"replicas": True}, True),
        ({"replicas": True, "stages": 3}, True),
        ({"replicas": True, "pins": (("n3", 1),)}, False),
    ],
)
def test_pins_and_replicas_leave_cycles_to_look_at(asked, covered):
    """Where replicas may be, of plans without: as first plans, and as their bound; and of all
    plans with some, whatever their number of stages."""
    question = Question(chain(12), uniform_cluster(4, None, 1e5), "gpipe", 4, 0.0)
    search = begun(question, micro_batches=4, **asked)
    cycles, known = CycleSearch(search), dict(search.bounds)
    cycles.bound()
    assert cycles.found
    # As many stages as devices have no replicas.
    assert all(cycles.covers(b) == (covered or b.stages == 4) for b in search.branches)
    alone = begun(question, micro_batches=4, **{**asked, "replicas": False})
    CycleSearch(alone).bound()
    # No more is asked of them than whether they are better than one with replicas.
    known_s = [min(bound_s, search.period_s) for bound_s in alone.bounds.values()]
    assert [cycles.alone_s[b] for b in search.branches] == pytest.approx(known_s)
    assert search.period_s <= alone.period_s
    raised = {branch for branch, bound_s in search.bounds.items() if bound_s > known[branch]}
    assert raised == {branch for branch in search.branches if cycles.covers(branch)}


def bound_by_cycles(profile, cluster, system, tied="together"):
    """Of four micro-batches over all devices."""
    question = Question(profile, cluster, system, 4, 0.0, 1, tied)
    stages = len(cluster.devices)
    search = begun(question, micro_batches=4, stages=stages)
    (branch,) = search.branches
    return CycleSearch(search)._best(_Way(branch), 0.0, 0.0).bound_s


@pytest.mark.parametrize("latency_s", [0.0, 1e-4])
@pytest.mark.parametrize("system", ["pipedream-flush", "gpipe", "zb-h1"])
def test_bounds_have_sums_of_tied_parameters_between_mini_batches(system, latency_s):
    """Copies on two stages are summed before the next mini-batch begins, each way once."""
    cluster = uniform_cluster(3, None, 1e5, latency_s)
    ends = ("n0", "n5")
    apart = msgspec.structs.replace(
        chain(6), tied=(ends,), shared=(SharedParameters(layers=ends, parameter_bytes=500),)
    )
    bound_s = bound_by_cycles(apart, cluster, system, "split")
    summing_s = cluster.all_reduce_s(range(2), 500)
    assert bound_s >= bound_by_cycles(chain(6), cluster, system) + summing_s * (1 - 1e-9)
    asked = {"mini_batch": 4, "micro_batches": 4, "stages": 3, "time_limit_s": None}
    plan = solve(apart, cluster, system, tied="split", **asked)
    assert 0.99 * plan.predicted.period_s <= bound_s <= plan.predicted.period_s * SAME


def test_bounds_have_the_least_that_sums_over_any_replicas_of_copies_take():
    """A ring of three may be faster than two devices are that were measured."""
    slow = AllReduce(processes=2, latency_s=1.0, bandwidth_bytes_per_s=1e3)
    cluster = msgspec.structs.replace(uniform_cluster(4, None, 1e5, 1e-4), all_reduce=slow)
    shared = SharedParameters(layers=("n0", "n5"), parameter_bytes=500)
    profile = msgspec.structs.replace(chain(6), tied=(shared.layers,), shared=(shared,))
    question = Question(profile, cluster, "gpipe", 4, 0.0, 1, "split")
    for replicas, takes_s in ((False, 1.5), (True, cluster.all_reduce_s(range(3), 500))):
        ((_, found_s),) = exchanges(Relaxation(question, Freedom(replicas=replicas)))
        assert found_s == pytest.approx(takes_s)


def test_bounds_of_gpipe_have_its_longest_forwards_and_its_longest_backwards():
    """On whatever stages these are."""
    times = [(4e-3, 1e-3), *[(1e-3, 1e-3)] * 4, (1e-3, 4e-3)]
    layers = [(f"n{k}", 0, *seconds, 10, []) for k, seconds in enumerate(times)]
    profile = row_of_layers(layers, 0, 0)
    cluster = uniform_cluster(3, None, 1e9, 0.0)
    asked = {"mini_batch": 4, "micro_batches": 4, "stages": 3, "time_limit_s": None}
    plan = solve(profile, cluster, "gpipe", **asked)
    bound_s = bound_by_cycles(profile, cluster, "gpipe")
    assert plan.predicted.period_s == pytest.approx((9 + 9 + 3 * (4 + 4)) * 1e-3)
    assert bound_s == pytest.approx(plan.predicted.period_s, rel=1e-4)


def test_what_passes_stages_has_as_much_in_flight_as_its_way_takes(monkeypatch):
    """Tables know of the heaviest message of a stage alone: its cut gets more in flight."""
    layers = [(f"n{k}", 0, 1e-3, 4e-3 if k == 3 else 1e-3, 10, []) for k in range(7)]
    edges = [*((f"n{k}", f"n{k + 1}", f"t{k}", 0) for k in range(6)), ("n6", "output", "last", 0)]
    edges += [(f"n{k}", f"n{k + 2}", f"{k}{each}", 1500) for k in (0, 2, 4) for each in "ab"]
    profile, cluster = profile_by_hand(layers, edges, sizes=(1,)), uniform_cluster(7, None, 1e6, 0)
    question = Question(profile, cluster, "pipedream-unstashed", 1, 0.0)

    def first_period_s():
        cycles = CycleSearch(begun(question, micro_batches=1, stages=7, time_limit_s=None))
        cycles.bound()
        return min(found.prediction.period_s for found in cycles.found)

    assert first_period_s() == pytest.approx(5e-3)
    monkeypatch.setattr(dp, "_with_enough", lambda program, *known: known)
    assert first_period_s() > 5.3e-3


def test_stages_are_in_a_chain_where_gradients_come_back_all_along_it():
    """A layer that none comes back from may run its backwards whenever it likes."""
    layers = [(f"n{k}", 0, 1e-3, 1e-3, 10, []) for k in range(3)]
    edges = [("n0", "n1", "x", 8), ("n1", "n2", "y", 8), ("n2", "output", "last", 0)]
    profile = profile_by_hand([*layers], [*edges, ("n0", "n2", "skip", 8)])
    for each, chained in ((profile, True), (without_gradients(profile, "y"), False)):
        question = Question(each, uniform_cluster(3, None, 1e9, 0.0), "gpipe", 4, 0.0)
        search = explore(question, SearchRequest(micro_batches=4, stages=3), lambda *_: None)
        (branch,) = search.branches
        assert (CycleSearch(search)._program(_Way(branch)).halves is not None) == chained


@pytest.mark.parametrize("system", ["pipedream-flush", "gpipe"])
def test_plans_with_replicas_are_bounded_by_their_ways_and_sums_at_once(system):
    """Replicas share their stage's work, sum its gradients, and wait for the way to the last stage
    and back."""
    profile, cluster = chain(12, parameters=3000), uniform_cluster(4, None, 1e6)
    asked = SearchRequest(replicas=True, micro_batches=8)
    search = explore(Question(profile, cluster, system, 8, 0.0), asked, lambda *_: None)
    bound_s = CycleSearch(search)._best(_Way(*search.branches, replicated=True), 0.0).bound_s
    best = solve(profile, cluster, system, mini_batch=8, micro_batches=8, replicas=True)
    # All work in equal shares, without ways and without sums.
    best_s, work_s = best.predicted.period_s, 12 * 3e-3 * 8 / 4
    assert max(len(stage.devices) for stage in best.stages) > 1
    assert work_s + 0.9 * (best_s - work_s) < bound_s <= best_s * SAME


@pytest.mark.parametrize("known_s", [0.0, 0.0995])
def test_tables_with_replicas_are_made_for_no_period_that_is_known_not_to_be(known_s, monkeypatch):
    profile, cluster, periods_s = chain(12, parameters=3000), uniform_cluster(4, None, 1e6), []
    search = begun(Question(profile, cluster, "pipedream-flush", 8, 0.0), replicas=True)
    (branch,) = (each for each in search.branches if each.micro_batches == 8)
    search.branches, search.bounds = [branch], {branch: known_s}
    table = CriticalCycles.table

    def noted(self, target, deadline):
        if self.problem.devices.replicated:
            periods_s.append(target)
        return table(self, target, deadline)

    monkeypatch.setattr(CriticalCycles, "table", noted)
    CycleSearch(search).bound()
    assert (min(periods_s) >= 0.0995) is (known_s > 0)


def test_messages_between_single_devices_are_on_one_wire_where_others_are_replicas():
    """Between replicas each has a share."""
    layers = [
        (name, parameters, seconds, 2 * seconds, 10, [])
        for name, parameters, seconds in (("a", 1, 2e-3), ("b", 10**6, 3e-3), ("c", 1, 2e-3))
    ]
    profile, cluster = row_of_layers(layers, 16, 4), uniform_cluster(4, None, 2e3)
    search = begun(Question(profile, cluster, "pipedream", 4, 0.0), replicas=True)
    bound_s = CycleSearch(search)._best(_Way(*search.branches, replicated=True), 0.0).bound_s
    best_s = solve(profile, cluster, "pipedream", mini_batch=4, replicas=True).predicted.period_s
    # By as many wires as there may be, 0.77 of it.
    assert 0.999 * best_s < bound_s <= best_s * SAME


@pytest.mark.parametrize("system", ["gpipe", "pipedream-flush", "zb-h1"])
@pytest.mark.parametrize(("bandwidth", "share"), [(2e3, 0.95), (1e6, 0.999)])
def test_what_forwards_take_besides_their_layers_is_part_of_them(system, bandwidth, share):
    """None of it is part of the update between two mini-batches: it may be beside messages."""
    besides = OperationCost(forward_s=1e-3, mini_batch_s=0.0)
    profile = msgspec.structs.replace(chain(6), operation=besides)
    cluster, asked = uniform_cluster(2, None, bandwidth), {"stages": 2, "micro_batches": 4}
    search = begun(Question(profile, cluster, system, 4, 0.0), **asked)
    bound_s = CycleSearch(search)._best(_Way(*search.branches), 0.0).bound_s
    best_s = solve(profile, cluster, system, mini_batch=4, **asked).predicted.period_s
    assert share * best_s < bound_s <= best_s * SAME


def test_what_bounds_came_upon_is_improved_though_their_time_is_over(monkeypatch):
    question = Question(chain(12), uniform_cluster(4, "4kB", "1MB/s"), "pipedream-flush", 4, 0.0)
    search = begun(question, stages=4)
    cycles, local = CycleSearch(search), LocalSearch(search)
    bounded, descended, calls = CycleSearch._bounded, [], []

    def until_late(self, *given):
        calls.append(given)
        if len(calls) > 1:
            raise search.budget.over()
        return bounded(self, *given)

    monkeypatch.setattr(CycleSearch, "_bounded", until_late)
    monkeypatch.setattr(local, "descend", descended.append)
    exploration._bound_by_cycles(search, local, cycles)
    assert len(calls) > 1
    assert descended
    assert all(standing.found in cycles.found for standing in descended)
