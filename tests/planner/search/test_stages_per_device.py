"""Plans with several stages on each device: no plan at all is better than a proven one."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from helpers.by_hand.profiles import chain, profile_by_hand, row_of_layers, without_gradients
from helpers.drawn.cases import examples
from helpers.drawn.questions import drawn_placed, solved
from timeprest.planner.cluster.cluster import Cluster, Device, uniform_cluster
from timeprest.planner.cluster.links import Network
from timeprest.planner.partition.placings import pattern
from timeprest.planner.plan import pipeline_of
from timeprest.planner.schedules.prediction import prediction_distances
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.search import parts, placed_bounds, placed_branches, stages_per_device
from timeprest.planner.search.branching import SearchRequest, explore
from timeprest.planner.search.placed_branches import device_subsets
from timeprest.planner.search.solve import solve
from timeprest.planner.search.stages_per_device import _leave_out, placed_search
from timeprest.planner.search.state import OutOfBudget
from timeprest.planner.simulator.timeline import filled_and_drained_s
from timeprest.planner.systems.placement import pattern_of, placements
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import InfeasibleError, PlanError


def found_plan(drawn):
    return solved(
        drawn.question,
        micro_batches=drawn.asked,
        recompute=drawn.recompute,
        stages_per_device=drawn.per_device,
        placement=drawn.placement,
        effort=10**9,
    )


@pytest.mark.choice(1)
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 40))
def test_no_plan_beats_a_proven_one(first):
    no_plan_beats_a_proven_one(first)


@pytest.mark.slow
def test_no_plan_beats_a_proven_one_over_links_of_pairs():
    no_plan_beats_a_proven_one(0, linked=True)


def no_plan_beats_a_proven_one(first, *, linked=False):
    seen = proven = 0
    for seed in range(first, first + examples(60)):
        drawn = drawn_placed(seed, linked=linked)
        if drawn is None:
            continue
        seen += 1
        for found in drawn.plans if VARIANTS[drawn.question.variant].flushes else ():
            least_s = filled_and_drained_s(found.pipeline)
            assert least_s <= found.prediction.period_s * (1 + 1e-9), seed
        try:
            plan = found_plan(drawn)
        except InfeasibleError:
            assert drawn.best_s is None, seed
            continue
        assert drawn.best_s is not None, seed
        assert plan.solver.bound_s <= drawn.best_s * (1 + 1e-8), seed
        if len(plan.stages) <= 4 * len(plan.cluster.devices):
            assert plan.predicted.period_s >= drawn.best_s * (1 - 1e-8), seed
        if plan.solver.optimal:
            assert plan.predicted.period_s == pytest.approx(drawn.best_s, rel=1e-8), seed
        limits = max(len(found.stages) for found in drawn.plans) <= 4
        # Stages that compute other layers again than the others aren't all tried.
        same = drawn.recompute in ("off", "on")
        if same and drawn.per_device and (limits or VARIANTS[plan.variant].flushes):
            assert plan.solver.optimal, seed
        proven += plan.solver.optimal
    assert seen > 5, first
    assert proven > seen / 3


@pytest.mark.slow
def test_it_is_never_proven_that_none_fits_where_one_does():
    """Devices that have just what a plan takes; and less of each than any plan does."""
    seen, proven = 0, 0
    # In some of these, layers have nothing to do with others, or get no gradients.
    for seed in (*range(30, 30 + examples(90)), 69, 195, 210, 225, 394, 401, 714, 1319, 1907):
        drawn = drawn_placed(seed)
        for found in drawn.plans[::3] if drawn and drawn.per_device else ():
            held = {
                s.devices[0]: found.prediction.device_of(k).memory_bytes
                for k, s in enumerate(found.stages)
            }
            for share in (1.0, 0.5):
                search = with_rooms(drawn, held, share)
                proves = search.is_hopeless()
                seen += 1
                proven += proves
                assert not (proves and share == 1.0), seed
                _leave_out(search)
                assert share < 1.0 or found.micro_batches in search._counts, seed
    assert seen > 50
    assert proven > seen / 6


def with_rooms(drawn, held, share):
    """The search for plans on devices of so much memory, a share of it."""
    devices = tuple(
        msgspec.structs.replace(device, memory_bytes=max(round(share * held.get(d, 1)), 1))
        for d, device in enumerate(drawn.question.cluster.devices)
    )
    cluster = msgspec.structs.replace(drawn.question.cluster, devices=devices)
    question = replace(drawn.question, cluster=cluster)
    request = SearchRequest(
        micro_batches=drawn.asked,
        recompute=drawn.recompute,
        stages_per_device=drawn.per_device,
        placement=drawn.placement,
    )
    search = explore(question, request, lambda *_: None)
    return placed_search(search, request)


def test_the_cut_with_the_least_memory_is_looked_at_where_nothing_fits():
    """Of six layers that hold much none may be with another one; cuts that are even in time come
    nowhere near to that."""
    layers = [(f"n{k}", 10, 1e-3, 2e-3, 4000 if k < 6 else 10, []) for k in range(24)]
    profile = row_of_layers(layers, 8, 4)
    how = {"stages_per_device": 2, "placement": "v", "recompute": "on", "time_limit_s": None}
    plan = solve(profile, uniform_cluster(3, "20kB"), "timeprest", **how, effort=1000)
    assert [len(stage.nodes) for stage in plan.stages] == [1, 1, 1, 1, 1, 19]


def of_times(*times):
    """A row of layers that take so many ms for a sample, and twice that backwards."""
    return row_of_layers([(f"n{k}", 0, 1e-3 * t, 2e-3 * t, 0, []) for k, t in enumerate(times)])


def small(**how):
    """Six equal layers on two devices."""
    return solve(chain(6), uniform_cluster(2), **{"stages_per_device": 2, **how})


def test_a_placement_is_as_asked():
    pairs = [(stage.devices, len(stage.nodes)) for stage in small(placement="loop").stages]
    assert [devices for devices, _ in pairs] == [(0,), (1,), (0,), (1,)]
    assert pattern_of([d for ((d,), _) in pairs], 4) == "loop"
    found = small(placement="v", stages=4, pins=[("n1", 1), ("n4", 3)])
    assert [stage.devices[0] for stage in found.stages] == [0, 1, 1, 0]
    assert "n1" in found.stages[1].nodes
    assert "n4" in found.stages[3].nodes
    found = small(placement="v", stages=3)
    assert [stage.devices[0] for stage in found.stages] == [0, 1, 0]
    assert small(placement="loop", stages_per_device=3).solver.method == "loads"
    assert all(stage.recompute for stage in small(recompute="on", effort=2000).stages)


@pytest.mark.parametrize(
    ("system", "asked"), [("zb-v", {}), ("gpipe", {"stages_per_device": None})]
)
def test_a_pin_to_a_stage_that_only_placements_have(system, asked):
    found = solve(chain(6), uniform_cluster(2), system, pins=[("n4", 3)], **asked)
    assert "n4" in found.stages[3].nodes
    with pytest.raises(PlanError, match=r"--pin n4=9: there are \d stages at most"):
        solve(chain(6), uniform_cluster(2), system, pins=[("n4", 9)], **asked)


def test_no_placements_are_made_that_the_model_has_too_few_layers_for(monkeypatch):
    """Of hundreds of devices that took longer than the search may."""
    sizes = []

    def made(name, size, number):
        sizes.append(size)
        return placements(name, size, number)

    monkeypatch.setattr(placed_branches, "placements", made)
    found = small(stages=4, effort=2000)
    assert set(sizes) == {4}
    assert len(found.stages) == 4
    with_effort = {"time_limit_s": None, "effort": 2000}
    solve(chain(6), uniform_cluster(9), stages_per_device=2, **with_effort)
    assert max(sizes) == 6


def test_stages_that_are_asked_for_may_all_be_on_one_device():
    asked = {"stages": 4, "stages_per_device": None, "micro_batches": 4}
    found = solve(chain(6), uniform_cluster(1), **asked)
    assert [stage.devices for stage in found.stages] == [(0,)] * 4
    # Over a slow link, that is best of two.
    found = solve(chain(6), uniform_cluster(2, bandwidth="1kB/s"), **asked)
    assert {stage.devices for stage in found.stages} == {(0,)}
    assert found.solver.optimal
    # A pin asks for stages, too.
    slow, asked = uniform_cluster(2, bandwidth="1kB/s"), {"stages_per_device": None}
    found = solve(chain(3), slow, micro_batches=1, pins=[("n2", 2)], **asked)
    assert [stage.devices for stage in found.stages] == [(0,)] * 3
    for placed in ([("n1", 1)], [("n1", 0), ("n2", 1)]):
        assert solve(chain(3), uniform_cluster(1), "interleaved-1f1b", pins=placed).stages[1:]


def test_placements_without_a_pinned_stage_are_left_out():
    asked = {"stages_per_device": None, "placement": "loop", "pins": [("n2", 2)]}
    for time_limit_s in (0.0, None):
        found = solve(chain(3), uniform_cluster(1), time_limit_s=time_limit_s, **asked)
        assert [stage.nodes for stage in found.stages] == [("n0",), ("n1",), ("n2",)]


def test_auto_takes_more_stages_only_where_they_pay():
    fast = uniform_cluster(2, bandwidth="1000TB/s", latency="0s")
    asked = {"micro_batches": 1, "stages_per_device": None, "run_ahead": "auto"}
    # A cut can't balance them; the V whose bottom is the second layer does.
    plan = solve(of_times(2, 3, 1), fast, **asked)
    assert [stage.devices[0] for stage in plan.stages] == [0, 1, 0]
    assert plan.predicted.period_s == pytest.approx(4 * 9e-3)
    assert plan.solver.optimal
    # A gain under 5 % isn't taken, nor called the best that can be had.
    plan = solve(of_times(20, 21, 1), fast, **asked)
    assert [stage.devices[0] for stage in plan.stages] == [0, 1]
    assert plan.predicted.period_s == pytest.approx(4 * 66e-3)
    assert plan.solver.gap == pytest.approx(22 / 21 - 1)
    assert plan.solver.stopped == "asking 5% of several stages on each device, which gain 4.5%"
    plan = solve(of_times(20, 21, 1), fast, **{**asked, "stages_per_device": 2})
    assert plan.predicted.period_s == pytest.approx(4 * 63e-3)
    plan = solve(chain(6), fast, **asked)
    assert [stage.devices[0] for stage in plan.stages] == [0, 1]
    assert plan.solver.optimal
    assert plan == msgspec.structs.replace(
        solve(chain(6), fast, micro_batches=1), solver=plan.solver
    )


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"placement": "ring"}, "--placement ring: give one of auto, straight, loop, v"),
        ({"stages_per_device": 0}, "--stages-per-device 0: give at least 1"),
        ({"placement": "straight"}, "--stages-per-device 2: --placement straight has one on each"),
        ({"placement": "v", "stages_per_device": 3}, "--placement v has two on each"),
        ({"placement": "v", "stages_per_device": 1}, "give --stages-per-device 2 or auto"),
        ({"stages": 5}, "--stages 5: timeprest can't have that with 2 stages"),
        ({"stages": 7}, "cut into 6 stages at most"),
        ({"stages_per_device": 7, "placement": "loop"}, "cut into 6 stages at most"),
        ({"variant": "pipedream-2bw", "micro_batches": 1}, "pipedream-2bw can't have that"),
    ],
)
def test_contradictions_are_said_in_one_line(asked, words):
    with pytest.raises(PlanError) as info:
        small(**asked)
    assert words in str(info.value)
    assert "\n" not in str(info.value)


def test_what_does_not_fit_says_what_lacks():
    profile, asked = chain(4, parameters=1000, saved=100), {"stages_per_device": 2, "stages": 4}
    lacks = r"\(4 stages, .*lacks \d+ bytes .*on device 'device"
    with pytest.raises(InfeasibleError, match=lacks):
        solve(profile, uniform_cluster(2, "5kB"), micro_batches=1, **asked)
    ways = r"\d+ bytes .* on every device, or --recompute auto \(.*\), or --mini-batch \d+ \("
    with pytest.raises(InfeasibleError, match=f"What would do: {ways}"):
        solve(chain(4, parameters=1000, saved=1000), uniform_cluster(2, "12kB"), **asked)
    found = solve(profile, uniform_cluster(2, "40kB"), **asked)
    assert not any(
        found.predicted.device_of(s).memory_bytes > 40_000 for s in range(len(found.stages))
    )


def test_predictions_to_the_end_of_the_round_trip_can_be_counted():
    """Where the first layers are frozen, no gradients come back to them."""

    def frozen(count):
        return without_gradients(chain(7), *(f"n{k}" for k in range(count)))

    asked = {"stages_per_device": 2, "stages": 4, "placement": "loop"}
    plan = solve(frozen(3), uniform_cluster(2), "spectrain", **asked)
    schedule = make_schedule(pipeline_of(plan), 4)
    assert len(prediction_distances(VARIANTS["spectrain"], schedule)) == 4
    with pytest.raises(InfeasibleError, match="spectrain needs gradients that come back"):
        solve(frozen(4), uniform_cluster(2), "spectrain", **asked)
    # It has no predictions.
    assert len(solve(frozen(4), uniform_cluster(2), "pipedream", **asked).stages) == 4


def test_cuts_that_a_wire_is_too_slow_for_are_passed_over():
    sizes = (9000, 8000, 2000, 7000, 9000, 1000, 8000, 6000, 3000)
    plan = solve(
        row_of_layers([(f"n{k}", 0, 1e-3, 2e-3, 0, []) for k in range(10)], sizes),
        uniform_cluster(2, bandwidth="500kB/s", latency="0s"),
        micro_batches=1,
        stages=4,
        stages_per_device=2,
        placement="loop",
        run_ahead="auto",
    )
    # Between even stages there would be 7 + 1 + 8 kB a sample on one wire.
    assert [len(stage.nodes) for stage in plan.stages] == [3, 3, 3, 1]
    assert plan.predicted.period_s == pytest.approx(4 * 6 * 3e-3)
    assert plan.solver.optimal
    # Of 84 cuts, each under one or more limits.
    assert plan.solver.plans_tried < 84


def test_borders_lie_where_little_is_sent_over_slow_links():
    """Cuts with even loads send so much that they were a tenth slower."""
    layers = [(f"n{k}", 0, 1e-3, 2e-3, 0, []) for k in range(24)]
    *sent, last = (round(4e6 * 0.7**k) + 100 for k in range(24))
    plan = solve(
        row_of_layers(layers, sent, last),
        uniform_cluster(4, bandwidth="100MB/s"),
        "interleaved-1f1b",
        stages=8,
        stages_per_device=2,
        time_limit_s=None,
        effort=200_000,
    )
    assert plan.predicted.period_s < 0.14
    # Its messages and what fills the pipeline are in the bound.
    assert plan.solver.bound_s > 0.1


def test_where_places_to_cut_are_many_few_are_guessed_with(monkeypatch):
    monkeypatch.setattr(placed_bounds, "_FEW_LINKS", 0)
    asked = {"stages": 4, "time_limit_s": None, "effort": 20_000}
    found = small(placement="loop", **asked)
    monkeypatch.undo()
    assert found.predicted.period_s == small(placement="loop", **asked).predicted.period_s


@pytest.mark.parametrize("how", ["ilp", "many"])
def test_of_cuts_that_were_not_listed_nothing_is_claimed(how, monkeypatch):
    """Along one order alone, or not all of those below a load."""
    layers = [(f"n{k}", 0, 1e-3 * t, 2e-3 * t, 0, []) for k, t in enumerate((4, 1, 3, 5, 2, 6))]
    ends = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 5), (4, 5)]
    edges = [(f"n{a}", f"n{b}", f"t{a}", 8) for a, b in ends] + [("n5", "output", "t5", 8)]
    profile, fast = profile_by_hand(layers, edges), uniform_cluster(2, latency="0s")
    asked = {"micro_batches": 2, "stages_per_device": 2, "variant": "pipedream-flush"}
    best = solve(profile, fast, **asked, effort=10**9)
    assert best.solver.optimal
    if how == "many":
        monkeypatch.setattr(stages_per_device, "_MOST_STEPS", 4)
        monkeypatch.setattr(stages_per_device, "_MANY_STEPS", 4)
    plan = solve(profile, fast, **asked, solver="ilp" if how == "ilp" else "auto")
    assert plan.solver.bound_s <= best.predicted.period_s * (1 + 1e-9)
    assert plan.solver.bound_s > 0
    assert not plan.solver.optimal


def test_of_many_ways_to_leave_devices_out_those_with_fast_ones_come_first():
    speeds = [0.1 + 0.01 * k for k in range(8)] + [1.0, 1.1]
    cluster = cluster_of(*((speed, None) for speed in speeds))
    asked = {"stages": 4, "stages_per_device": 2, "micro_batches": 4}
    plan = solve(chain(4), cluster, "timeprest", **asked)
    assert {d for stage in plan.stages for d in stage.devices} == {8, 9}
    free = solve(chain(4), cluster, "timeprest", stages_per_device=2, micro_batches=4)
    assert free.predicted.period_s <= plan.predicted.period_s * (1 + 1e-9)


def test_ways_to_leave_devices_out_that_were_not_looked_at_are_not_proven_worse(monkeypatch):
    cluster = cluster_of(*((speed, None) for speed in (0.5, 0.6, 0.7, 0.8)))
    asked = {"stages_per_device": 2, "micro_batches": 4, "stages": 4}
    best = solve(chain(4), cluster, "timeprest", **asked)
    # The slowest two alone.
    for module in (placed_branches, stages_per_device):
        monkeypatch.setattr(
            module, "device_subsets", lambda cluster, number: (((0, 1),) * (number == 2), False)
        )
    found = solve(chain(4), cluster, "timeprest", **asked)
    assert best.predicted.period_s < found.predicted.period_s
    assert found.solver.bound_s <= best.predicted.period_s * (1 + 1e-9)


def cluster_of(*kinds):
    """Devices of these speeds, in these machines."""
    listed = tuple(
        Device(name=f"d{k}", speed=speed, machine=machine)
        for k, (speed, machine) in enumerate(kinds)
    )
    return Cluster(devices=listed, network=Network(bandwidth_bytes_per_s=1e10, latency_s=1e-6))


def test_ways_to_leave_devices_out_are_those_that_differ():
    rng = random.Random(5)
    for _ in range(60):
        homes, speeds = rng.choice(["a", "ab", "abc"]), rng.choice([(1.0,), (1.0, 2.0)])
        devices = [(rng.choice(speeds), rng.choice(homes)) for _ in range(rng.randint(1, 7))]
        cluster, order = (
            cluster_of(*devices),
            sorted(range(len(devices)), key=lambda d: -devices[d][0]),
        )
        for number in range(1, len(devices) + 1):
            every = {}
            for chosen in map(sorted, combinations(order, number)):
                key = pattern(
                    chosen, *zip(*((home, speed) for speed, home in devices), strict=True)
                )
                every.setdefault(key, tuple(chosen))
            found, complete = device_subsets(cluster, number)
            assert found == tuple(every.values())[:32]
            assert complete == (len(every) < 32)


@pytest.mark.parametrize(
    "devices",
    [
        [(1.0, "a")] * 10 + [(2.0, "a")] * 10,
        [(1.0 + (k >= 10), f"m{k}") for k in range(20)],
    ],
)
def test_ways_to_leave_devices_out_are_not_gone_through_one_by_one(devices, monkeypatch):
    calls = []

    def counted(*args):
        calls.append(args)
        return pattern(*args)

    monkeypatch.setattr(placed_branches, "pattern", counted)
    found, complete = device_subsets(cluster_of(*devices), 10)
    # Of 184,756.
    assert len(calls) < 10_000
    assert complete
    assert len(found) == 11


def test_ctrl_c_before_several_stages_are_looked_at_leaves_a_true_bound(monkeypatch):
    asked = {"micro_batches": 1, "stages_per_device": None}
    fast = uniform_cluster(2, bandwidth="1000TB/s", latency="0s")
    best = solve(of_times(2, 3, 1), fast, **asked)
    straight = parts._run_straight

    def interrupted(search, request, incumbent):
        straight(search, request, incumbent)
        raise KeyboardInterrupt

    monkeypatch.setattr(parts, "_run_straight", interrupted)
    plan = solve(of_times(2, 3, 1), fast, **asked)
    assert plan.solver.stopped == "interrupted"
    assert plan.predicted.period_s > best.predicted.period_s * 1.01
    assert plan.solver.bound_s <= best.predicted.period_s * (1 + 1e-9)


def test_more_stages_on_one_device_are_looked_at_where_that_saves_memory():
    devices = (Device(name="a", memory_bytes=12_000), Device(name="b", memory_bytes=1))
    cluster = Cluster(devices=devices, network=uniform_cluster(2).network)
    asked = {"variant": "gpipe", "micro_batches": 1, "recompute": "on", "stages_per_device": None}
    plan = solve(chain(5, saved=1000), cluster, **asked)
    assert [stage.devices for stage in plan.stages] == [(0,)] * 3


def test_numbers_of_stages_that_no_placement_has_are_skipped():
    asked = {"stages": 6, "micro_batches": 4}
    three = solve(chain(8), uniform_cluster(2), "timeprest", stages_per_device=3, **asked)
    found = solve(chain(8), uniform_cluster(2), "timeprest", stages_per_device=None, **asked)
    assert found.predicted.period_s == pytest.approx(three.predicted.period_s)


def test_what_needs_least_is_evaluated_before_nothing_is_said_to_come_near(monkeypatch):
    """Where there is no time for first plans: one stage for all layers needs far too much."""

    def late(*_):
        raise OutOfBudget("time limit")

    monkeypatch.setattr(stages_per_device.PlacedSearch, "_look", late)
    plan = solve(chain(16, saved=1000), uniform_cluster(4, "13kB"), "interleaved-1f1b")
    assert len(plan.stages) == 8


def test_a_proof_leaves_time_for_improving_the_best_plan(monkeypatch):
    """However near it is to the bound."""
    left, prove = [], stages_per_device.PlacedSearch._prove

    def noting(placed, *asked):
        left.append(placed.search.budget.seconds_left)
        prove(placed, *asked)

    monkeypatch.setattr(stages_per_device.PlacedSearch, "_prove", noting)
    layers = [(f"n{k}", 0, 1e-3 * (1 + k % 3), 2e-3, 0, []) for k in range(8)]
    solve(row_of_layers(layers), uniform_cluster(2), "interleaved-1f1b", time_limit_s=1000.0)
    assert left[0] < 600.0


def test_devices_that_have_room_for_no_stage_are_left_out():
    """On all devices the least that plans need is far more than the small ones have."""
    cluster = uniform_cluster(6, "26kB")
    small = (msgspec.structs.replace(d, memory_bytes=5000) for d in cluster.devices[:3])
    cluster = msgspec.structs.replace(cluster, devices=(*small, *cluster.devices[3:]))
    profile = chain(24, parameters=1000)
    plan = solve(profile, cluster, "zb-v", stages_per_device=2, effort=1000, explains=False)
    assert {d for stage in plan.stages for d in stage.devices} == {3, 4, 5}
