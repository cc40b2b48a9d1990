"""Devices of several kinds in any sequence: held against solving every sequence by itself."""

from __future__ import annotations

import random
from itertools import permutations

import msgspec
import pytest
from helpers.by_hand.profiles import profile_by_hand, row_of_layers
from helpers.drawn.questions import with_links
from timeprest.planner.cluster.cluster import Cluster, Device, uniform_cluster
from timeprest.planner.cluster.links import Network
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.search import exploration, parts
from timeprest.planner.search.answer.preference import placed_first
from timeprest.planner.search.answer.recheck import recheck
from timeprest.planner.search.branching import SearchRequest, explore
from timeprest.planner.search.critical_cycles import CycleSearch
from timeprest.planner.search.device_sequences import on_first_devices, sequence_matters
from timeprest.planner.search.local_search.improve import LocalSearch
from timeprest.planner.search.relaxed import cycles
from timeprest.planner.search.relaxed.places import Assumptions
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import InfeasibleError, PlanError
from timeprest.profiles.profile import SharedParameters

LINK = Network(bandwidth_bytes_per_s=1e9, latency_s=0.0)
SYSTEMS = ("timeprest", "pipedream", "gpipe", "pipedream-flush", "pipedream-2bw")


def layers_of(times, tensor=16):
    """A chain whose layers' forwards take so many ms, and backwards twice that."""
    layers = [(f"n{k}", 100, ms * 1e-3, ms * 2e-3, 10, []) for k, ms in enumerate(times)]
    return row_of_layers(layers, tensor, 4)


def devices(*speeds, **fields):
    return tuple(Device(name=f"d{k}", speed=speed, **fields) for k, speed in enumerate(speeds))


def drawn(seed):
    """A profile, a cluster of 2 or 3 kinds, each device's kind, and what is asked."""
    rng = random.Random(seed)
    count = rng.randrange(4, 7)
    layers = [
        (
            f"n{k}",
            rng.randrange(50, 2000),
            rng.uniform(0.2, 2) * 1e-3,
            rng.uniform(0.4, 4) * 1e-3,
            rng.randrange(5, 300),
            [],
        )
        for k in range(count)
    ]
    edges = [(f"n{k}", f"n{k + 1}", f"t{k}", rng.randrange(100, 4000)) for k in range(count - 1)]
    if rng.random() < 0.4:
        edges.append(("n0", f"n{count - 1}", "t0", edges[0][3]))
    profile = profile_by_hand(layers, [*edges, (f"n{count - 1}", "output", "last", 4)])
    limits = [None, None, rng.randrange(20000, 60000)]
    made = [
        {"speed": round(rng.uniform(0.3, 3), 2), "memory_bytes": rng.choice(limits)}
        for _ in range(2 + seed % 2)
    ]
    which = [*range(len(made)), *rng.choices(range(len(made)), k=4 - len(made))]
    rng.shuffle(which)
    link = Network(bandwidth_bytes_per_s=rng.choice([1e6, 3e7]), latency_s=1e-5)
    cluster = Cluster(
        devices=tuple(Device(name=f"d{k}", **made[g]) for k, g in enumerate(which)), network=link
    )
    asked = {"optimizer_state_factor": 1.0, "time_limit_s": None}
    asked["replicas"] = rng.random() < 0.4
    if rng.random() < 0.3:
        asked["stages"] = rng.randrange(2, 4)
    return profile, cluster, which, {**asked, "variant": rng.choice(SYSTEMS)}


def period(profile, cluster, **asked):
    try:
        return solve(profile, cluster, **asked).predicted.period_s
    except InfeasibleError:
        return float("inf")


def best_of_all(profile, cluster, which, **asked):
    """The shortest period of all sequences, each listed and solved."""
    found = {}
    for places in permutations(range(len(which))):
        key = tuple(which[k] for k in places)
        if key not in found:
            listed = tuple(cluster.devices[k] for k in places)
            other = msgspec.structs.replace(cluster, devices=listed)
            found[key] = period(profile, other, **asked)
    return min(found.values())


def check_best(profile, cluster, which, **asked):
    """No sequence is better than the plan that is found; returns whether it is proven, or none
    fits."""
    best = best_of_all(profile, cluster, which, **asked)
    if best == float("inf"):
        with pytest.raises(InfeasibleError):
            solve(profile, cluster, sequence="best", **asked)
        return True
    plan = solve(profile, cluster, sequence="best", **asked)
    assert plan.solver.bound_s <= best * (1 + 1e-9)
    assert plan.predicted.period_s == pytest.approx(best, rel=1e-9)
    return plan.solver.optimal


@pytest.mark.choice(1)
@pytest.mark.parametrize("seed", [4, 5, 7, 8, 9, 12])
def test_no_sequence_is_better(seed):
    profile, cluster, which, asked = drawn(seed)
    assert check_best(profile, cluster, which, **asked)


@pytest.mark.choice(2)
@pytest.mark.parametrize("seed", range(20, 28))
def test_no_sequence_is_better_where_transfers_stop_devices(seed):
    """No bound is known of all sequences at once there."""
    profile, cluster, which, asked = drawn(seed)
    link = msgspec.structs.replace(cluster.network, overlap=False)
    cluster = msgspec.structs.replace(cluster, network=link)
    assert check_best(profile, cluster, which, **asked)


def test_micro_batches_that_fit_in_no_sequence_are_left_out_of_each():
    layers = [(f"n{k}", 100, ms * 1e-3, ms * 2e-3, 1000, []) for k, ms in enumerate([3, 1, 2])]
    link = Network(bandwidth_bytes_per_s=1e6, latency_s=1e-5, overlap=False)
    cluster = Cluster(devices=devices(1.0, 2.0, memory_bytes=5000), network=link)
    question = row_of_layers(layers, 400, 4), cluster, [0, 1]
    # Two samples of the layers on a device fit, all four don't.
    assert check_best(*question, variant="pipedream-flush", time_limit_s=None)


def test_no_sequence_is_begun_once_the_time_is_over(monkeypatch):
    cluster = Cluster(devices=devices(1.0, 2.0, 3.0), network=LINK)
    question = Question(layers_of([3, 1, 2]), cluster, "gpipe", 4, 0.0)
    request, begun = SearchRequest(sequence="best", time_limit_s=60.0), []
    search = explore(question, request, lambda *_: None)
    search.forget_bounds()
    known = dict(search.bounds)

    def noted(question, request, progress):
        begun.append(request.time_limit_s)
        search.budget.deadline = 0.0
        return explore(question, request, progress)

    monkeypatch.setattr(parts, "explore", noted)
    monkeypatch.setattr(parts, "run", lambda own: own.forget_bounds())
    assert parts._run_each_sequence(search, request) == "time limit"
    # The first had what was left, and the five others weren't looked at.
    assert len(begun) == 1
    assert begun[0] <= 60.0
    assert search.bounds == known


def test_pinned_layers_lie_on_the_devices_that_suit_them_best():
    """As listed they fit, and take longer by half."""
    layers = [
        ("a", 7103, 1.34e-3, 4.23e-3, 1555, []),
        ("b", 4233, 0.84e-3, 2.49e-3, 3041, []),
        ("c", 113, 0.52e-3, 3.47e-3, 2188, []),
    ]
    profile = profile_by_hand(layers, [("a", "b", "t", 16), ("b", "c", "u", 16)])
    kinds = ((11_368, 0.5), (38_337, 0.5), (23_001, 2.0))
    cluster = Cluster(
        devices=tuple(Device(name=f"d{m}", memory_bytes=m, speed=speed) for m, speed in kinds),
        network=msgspec.structs.replace(LINK, overlap=False),
    )
    pins = tuple((name, s) for s, name in enumerate("abc"))
    asked = {"optimizer_state_factor": 0.0, "variant": "pipedream", "sequence": "best"}
    plan = solve(profile, cluster, pins=pins, stages=3, **asked)
    assert [stage.devices for stage in plan.stages] == [(1,), (2,), (0,)]
    assert plan.solver.optimal


@pytest.mark.choice("6")
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3, 5, 6])
def test_no_sequence_over_links_of_pairs_is_better(seed):
    """Of devices alike but for their links, whose names go with them."""
    profile, cluster, which, asked = drawn(seed)
    alike = tuple(
        msgspec.structs.replace(cluster.devices[0], name=device.name) for device in cluster.devices
    )
    cluster = with_links(random.Random(seed), msgspec.structs.replace(cluster, devices=alike))
    check_best(profile, cluster, range(len(which)), **asked)


def test_machines_whose_devices_are_listed_in_turns_are_used_one_after_another():
    """As listed, each message goes between machines and takes 24 ms for a mini-batch."""
    turns = tuple(Device(name=f"d{k}", machine="ab"[k % 2]) for k in range(4))
    far = Network(bandwidth_bytes_per_s=1e4, latency_s=1e-3)
    cluster = Cluster(devices=turns, network=LINK, between_machines=far)
    asked = {"mini_batch": 4, "micro_batches": 1, "stages": 4, "optimizer_state_factor": 0.0}
    profile = layers_of([1, 1, 1, 1], 60)
    listed = solve(profile, cluster, sequence="listed", **asked)
    best = solve(profile, cluster, sequence="best", **asked)
    in_rows = msgspec.structs.replace(
        cluster, devices=tuple(sorted(turns, key=lambda d: d.machine))
    )
    known_s = solve(profile, in_rows, sequence="listed", **asked).predicted.period_s
    assert best.predicted.period_s == pytest.approx(known_s)
    assert known_s < 0.6 * listed.predicted.period_s
    assert best.solver.bound_s <= known_s


def test_the_faster_device_takes_the_larger_layer():
    """3 + 6 ms and 1 + 2 ms: 9 / 3 and 3 / 1 s are equal, the other way round it is 9."""
    cluster = Cluster(devices=devices(1.0, 3.0), network=LINK)
    asked = {"variant": "pipedream", "optimizer_state_factor": 0.0}
    asked |= {"mini_batch": 1, "replicas": False}
    profile = layers_of([3, 1])
    listed = solve(profile, cluster, sequence="listed", **asked)
    best = solve(profile, cluster, sequence="best", **asked)
    assert best.stages[0].devices == (1,)
    assert best.stages[1].devices == (0,)
    assert best.cluster == cluster
    assert best.predicted.period_s == pytest.approx(3e-3, rel=1e-4)
    assert best.predicted.period_s < listed.predicted.period_s
    assert best.solver.optimal


@pytest.mark.parametrize("variant", ["gpipe", "pipedream-flush", "pipedream-2bw"])
def test_what_stages_wait_for_says_nearly_all(variant):
    """Tensors take long to send."""
    asked = {"optimizer_state_factor": 0.0, "mini_batch": 8, "micro_batches": 8}
    asked |= {"effort": 10_000, "time_limit_s": None}
    profile = layers_of([3 + k % 5 for k in range(20)], 1_000_000)
    cluster = Cluster(devices=devices(1.0, 1.0, 1.0, 1.0), network=LINK)
    plan = solve(profile, cluster, variant, **asked, stages=4)
    assert len(plan.stages) == 4
    assert plan.solver.gap <= 0.05
    # A pinned layer is where it was asked for, whatever the bound's own cuts say.
    pinned = solve(profile, cluster, variant, **asked, stages=4, pins=(("n0", 0), ("n1", 1)))
    assert "n1" in pinned.stages[1].nodes
    assert pinned.solver.bound_s <= pinned.predicted.period_s


@pytest.mark.parametrize(("micro_batches", "links"), [(1, [1]), (4, [2, 2, 4])])
def test_a_stage_has_no_more_links_than_messages_are_dealt_to(micro_batches, links):
    """Of 4 devices: with 1 replica from 1 or 2, with 2 from 2, with 4 from none."""
    cluster = Cluster(devices=devices(0.5, 2.5, 0.5, 2.5), network=LINK)
    question = Question(layers_of([3, 1, 2, 5]), cluster, "timeprest", 4, 0.0)
    request = SearchRequest(micro_batches=micro_batches, replicas=True)
    search = explore(question, request, lambda *_: None)
    assumed = Assumptions(identical=True, device=cluster.best_device)
    problem = search.relaxation.problem(search.branches[0], assumed)
    found = [1 / problem.place(o, 4).lower_scale for o in range(len(problem.options))]
    assert found == links


def test_devices_in_each_others_places_are_tried(monkeypatch):
    """Where not all is decided, a local search that exchanges devices makes plans better."""
    gains = []
    for seed in (3, 9, 20):
        rng = random.Random(seed)
        profile = layers_of([rng.uniform(0.3, 3) for _ in range(14)], rng.choice([16, 200_000]))
        speeds = [round(rng.uniform(0.4, 3), 2) for _ in range(4)]
        cluster = Cluster(devices=devices(*speeds), network=LINK)
        asked = {"optimizer_state_factor": 0.0, "mini_batch": 4, "variant": "pipedream-flush"}
        asked |= {"effort": 30_000, "time_limit_s": None, "sequence": "best"}
        with monkeypatch.context() as patch:
            patch.setattr(CycleSearch, "bound", lambda _: [])
            patch.setattr(CycleSearch, "prove", lambda _: None)
            patch.setattr(parts, "few_sequences", lambda *_: [])
            plan = solve(profile, cluster, **asked)
            again = recheck(plan, profile).plan
            assert again.predicted == plan.predicted
            assert plan.solver.bound_s <= plan.predicted.period_s
            patch.setattr(exploration, "LocalSearch", lambda search, **_: LocalSearch(search))
            without = solve(profile, cluster, **asked)
        gains.append(1 - plan.predicted.period_s / without.predicted.period_s)
    assert min(gains) > -1e-9
    assert max(gains) > 0.001


@pytest.mark.parametrize(
    ("machines", "speeds", "lying", "first"),
    [
        ("aaaa", (1, 1, 1, 1), ((1,), (3,)), ((0,), (1,))),
        ("aaaa", (1, 1, 1, 1), ((3,), (1, 2)), ((0,), (1, 2))),
        ("aabb", (1, 1, 1, 1), ((2,), (3,)), ((0,), (1,))),
        ("aabb", (1, 1, 1, 1), ((1,), (3,)), ((0,), (2,))),
        # Another sequence of unequal devices than the listed one is another plan.
        ("aaaa", (1, 2, 1, 2), ((3,), (2,)), ((1,), (0,))),
        ("aaaa", (1, 2, 1, 2), ((1,), (2,)), ((1,), (2,))),
        ("aabb", (1, 1, 1, 2), ((3,), (2,)), ((3,), (2,))),
        # Two stages on each device.
        ("aaa", (1, 1, 1), ((2,), (1,), (2,), (1,)), ((0,), (1,), (0,), (1,))),
    ],
)
def test_of_devices_alike_the_first_are_taken(machines, speeds, lying, first):
    found = tuple(
        Device(name=f"d{k}", speed=float(speed), machine=machine)
        for k, (machine, speed) in enumerate(zip(machines, speeds, strict=True))
    )
    assert on_first_devices(Cluster(devices=found, network=LINK), lying) == first


@pytest.mark.parametrize("sequence", ["listed", "best"])
def test_fewer_stages_than_devices_lie_on_the_first(sequence):
    cluster = Cluster(devices=devices(1.0, 1.0, 1.0, 1.0), network=LINK)
    asked = {"optimizer_state_factor": 0.0, "mini_batch": 4, "replicas": False}
    plan = solve(layers_of([3, 3, 3]), cluster, sequence=sequence, stages=2, **asked)
    assert [stage.devices for stage in plan.stages] == [(0,), (1,)]
    assert recheck(plan, layers_of([3, 3, 3])).plan.predicted == plan.predicted


def test_as_listed_where_no_sequence_is_better():
    cluster = Cluster(devices=devices(3.0, 1.0), network=LINK)
    asked = {"optimizer_state_factor": 0.0, "mini_batch": 4, "replicas": False}
    profile = layers_of([3, 1])
    listed = solve(profile, cluster, sequence="listed", **asked)
    best = solve(profile, cluster, sequence="best", **asked)
    assert best.stages == listed.stages
    assert best.predicted == listed.predicted


def test_devices_as_listed_come_first_each_time(monkeypatch):
    """A search begins once more where the time was over before there was a plan."""
    asked = []
    monkeypatch.setattr(parts, "run", lambda search: asked.append(search.any_sequence))
    cluster = Cluster(devices=devices(1.0, 3.0), network=LINK)
    request = SearchRequest(sequence="best")
    question = Question(layers_of([3, 1]), cluster, "pipedream", 4, 0.0)
    search = explore(question, request, lambda *_: None)
    for _ in range(2):
        parts._run_straight(search, request)
    assert asked == [False, True] * 2


def test_large_tensors_stay_in_a_machine():
    """Two machines with a fast and a slow device each; only one of three cuts is cheap."""
    layers = [(f"n{k}", 100, 1e-3, 2e-3, 10, []) for k in range(4)]
    profile = row_of_layers(layers, [10**6, 16, 10**6], 4)
    homes = ("a", "b", "a", "b")
    cluster = Cluster(
        devices=tuple(
            Device(name=f"d{k}", speed=1.0 + (k >= 2) * 0.1, machine=home)
            for k, home in enumerate(homes)
        ),
        network=Network(bandwidth_bytes_per_s=1e12, latency_s=0.0),
        between_machines=Network(bandwidth_bytes_per_s=1e8, latency_s=0.0),
    )
    asked = {"optimizer_state_factor": 0.0, "mini_batch": 4, "replicas": False, "stages": 4}
    plan = solve(profile, cluster, sequence="best", **asked)
    first, second, third, last = (cluster.devices[s.devices[0]].machine for s in plan.stages)
    assert first == second
    assert third == last
    listed = solve(profile, cluster, sequence="listed", **asked)
    assert plan.predicted.period_s < listed.predicted.period_s * 0.5


@pytest.mark.parametrize("seed", [4, 8])
def test_where_not_all_stages_can_be_listed_the_bound_holds(seed, monkeypatch):
    profile, cluster, which, asked = drawn(seed)
    best = best_of_all(profile, cluster, which, **asked)
    monkeypatch.setattr(cycles, "_MOST_STATES", 1)
    plan = solve(profile, cluster, sequence="best", **asked)
    assert plan.solver.bound_s <= best * (1 + 1e-9)
    assert plan.predicted.period_s <= period(profile, cluster, **asked) * (1 + 1e-9)


def test_an_unknown_sequence_is_refused():
    cluster = Cluster(devices=devices(1.0, 2.0), network=LINK)
    with pytest.raises(PlanError, match="--sequence sorted: give one of best, listed"):
        solve(layers_of([1, 1]), cluster, sequence="sorted")


@pytest.mark.parametrize("variant", ["timeprest", "pipedream", "pipedream-2bw"])
def test_replicas_may_be_on_one_machine_whose_devices_are_listed_apart(variant):
    """Neighbours in the list are on different machines, with a slow link between them."""
    homes = [(1.0, "a"), (0.25, "b"), (1.0, "a"), (0.25, "b")]
    listed = [Device(name=f"d{k}", speed=s, machine=home) for k, (s, home) in enumerate(homes)]
    near = Network(bandwidth_bytes_per_s=1e10, latency_s=1e-5)
    far = Network(bandwidth_bytes_per_s=1e6, latency_s=1e-3)
    profile, periods = layers_of([4]), []
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        cluster = Cluster(
            devices=tuple(listed[d] for d in order), network=near, between_machines=far
        )
        asked = {"mini_batch": 4, "replicas": True, "sequence": "best"}
        plan = solve(profile, cluster, variant, **asked)
        periods.append(plan.predicted.period_s)
        assert plan.solver.bound_s <= plan.predicted.period_s * (1 + 1e-9)
    assert periods[0] == pytest.approx(periods[1])


def test_machines_of_several_sizes_are_tried_in_other_sequences():
    """Devices are alike; where the wire between machines lies makes the difference."""
    profile = row_of_layers([(f"n{k}", 100, 1e-3, 2e-3, 10, []) for k in range(3)], [16, 50_000], 4)
    apart = Cluster(
        devices=tuple(Device(name=f"d{k}", machine=m) for k, m in enumerate("xxy")),
        network=LINK,
        between_machines=Network(bandwidth_bytes_per_s=1e7, latency_s=0.0),
    )
    asked = {"stages": 3, "micro_batches": 2, "replicas": False}
    listed = solve(profile, apart, "gpipe", sequence="listed", **asked)
    best = solve(profile, apart, "gpipe", sequence="best", **asked)
    assert best.stages[0].devices == (2,)
    assert best.predicted.period_s < 0.5 * listed.predicted.period_s
    even = msgspec.structs.replace(apart, devices=apart.devices[1:])
    question = Question(profile, even, "gpipe", 4, 0.0)
    assert not sequence_matters(question, replicas=False)
    assert sequence_matters(question, replicas=True)
    near, far = even.network, msgspec.structs.replace(even.network, bandwidth_bytes_per_s=1e12)
    within = uniform_cluster(4, per_machine=2)
    for inside, matters in ((far, False), (near, True)):
        linked = msgspec.structs.replace(within, network=inside, between_machines=far)
        asked = Question(profile, linked, "gpipe", 4, 0.0)
        assert sequence_matters(asked, replicas=False) == matters


def test_replicas_stay_where_others_would_exchange_messages_between_machines():
    """On the first devices of their machines the first of two replicas sends to another machine,
    where it had the next stage's beside it."""
    cluster = uniform_cluster(6, per_machine=2, bandwidth="1GB/s", between_bandwidth="10kB/s")
    question = Question(layers_of([1, 1, 1]), cluster, "gpipe", 4, 0.0)

    def found(*lying):
        stages = [
            PlanStage(nodes=(f"n{s}",), devices=mine, in_flight=1) for s, mine in enumerate(lying)
        ]
        return evaluate(question, stages, 2)

    beside, first = found((0,), (2, 1), (3, 4)), found((0,), (1, 2), (3, 4))
    assert beside.prediction.period_s < first.prediction.period_s
    assert on_first_devices(cluster, [(0,), (2, 1), (3, 4)]) == ((0,), (1, 2), (3, 4))
    assert placed_first(question, beside) is beside
    alike = found((1,), (0,), (2,))
    moved = placed_first(question, alike)
    assert [stage.devices for stage in moved.stages] == [(0,), (1,), (2,)]


def test_stages_that_sum_copies_of_parameters_are_in_one_machine():
    """Machines are alike, and devices: the wire between them takes what the copies sum."""
    ends = ("n0", "n3")
    profile = msgspec.structs.replace(
        layers_of([1, 1, 1, 1]),
        tied=(ends,),
        shared=(SharedParameters(layers=ends, parameter_bytes=50),),
    )
    cluster = uniform_cluster(4, per_machine=2, bandwidth="1GB/s", between_bandwidth="20kB/s")
    asked = {"stages": 4, "micro_batches": 4, "replicas": False, "tied": "split"}
    listed = solve(profile, cluster, "gpipe", sequence="listed", **asked)
    best = solve(profile, cluster, "gpipe", sequence="best", **asked)
    homes = [cluster.devices[d].machine for (d,) in (stage.devices for stage in best.stages)]
    assert homes[0] == homes[3] != homes[1] == homes[2]
    assert best.predicted.period_s < listed.predicted.period_s
    assert not sequence_matters(Question(profile, cluster, "gpipe", 4, 0.0), replicas=False)
