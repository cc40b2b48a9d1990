"""The local search by itself: where it begins, and climbs from anywhere."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.by_hand.profiles import chain, profile_by_hand
from helpers.plans import lone_stages
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import Cluster, Device, uniform_cluster
from timeprest.planner.cluster.links import Network
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.search import exploration, state
from timeprest.planner.search.branching import SearchRequest, explore, question_for
from timeprest.planner.search.critical_cycles import CycleSearch
from timeprest.planner.search.local_search import improve
from timeprest.planner.search.local_search.first_cuts import even_replicas, even_within
from timeprest.planner.search.local_search.improve import LocalSearch, climb_on
from timeprest.planner.search.local_search.layings import in_a_row, layings_of, mixed_layings
from timeprest.planner.search.local_search.neighbours import Point
from timeprest.planner.search.local_search.stage_moves import replica_moves, stage_moves
from timeprest.planner.search.solve import solve
from timeprest.planner.search.state import OutOfBudget
from timeprest.planner.simulator.timeline import busy_s


def search_for(profile, cluster, system, **asked):
    """A search that has looked at nothing yet."""
    question = question_for(profile, cluster, system)
    search = explore(question, SearchRequest(**asked), lambda *_: None)
    search.forget_bounds()
    return search


def of_speeds(*speeds):
    devices = tuple(Device(name=f"d{k}", speed=speed) for k, speed in enumerate(speeds))
    return Cluster(devices=devices, network=Network(bandwidth_bytes_per_s=1e9, latency_s=0.0))


def on_machines(*speeds):
    """Devices of such speeds in each machine."""
    devices = tuple(
        Device(name=f"d{m}.{k}", speed=speed, machine=f"m{m}")
        for m, mine in enumerate(speeds)
        for k, speed in enumerate(mine)
    )
    near, far = (Network(bandwidth_bytes_per_s=x, latency_s=0.0) for x in (1e9, 1e6))
    return Cluster(devices=devices, network=near, between_machines=far)


def test_slow_devices_are_left_out():
    """As they are listed, the fastest of them begin; of equal ones the last."""

    def lying(*speeds):
        search = search_for(chain(8), of_speeds(*speeds), "gpipe", stages=2)
        return next(layings_of(LocalSearch(search).near, search.branches[0]))

    assert lying(1.0, 1.0, 0.5) == ((0,), (1,))
    assert lying(0.5, 1.0, 0.5, 1.0) == ((1,), (3,))
    assert lying(1.0, 1.0, 1.0) == ((1,), (2,))
    # With replicas, and with nothing but first plans.
    asked = {"replicas": True, "stages": 2, "time_limit_s": None, "effort": 0}
    plan = solve(chain(8, parameters=1), of_speeds(1, 1, 1, 1, 0.1), "gpipe", **asked)
    assert {d for stage in plan.stages for d in stage.devices} <= {0, 1, 2, 3}


def test_borders_move_as_far_as_a_stage_has_layers():
    near = LocalSearch(search_for(chain(8), uniform_cluster(4), "gpipe", stages=4)).near
    lying = ((0,), (1,), (2,), (3,))
    point = Point(near.first_cuts(4, lying)[0], lying, (False,) * 4, 4, (1,) * 4)

    def sizes(moved):
        return [(b & ~a).bit_count() for a, b in pairwise(moved.downsets)]

    assert sizes(point) == [2, 2, 2, 2]
    assert near.shifted(point, 2, 2, 5) is None
    assert sizes(near.shifted(point, 2, 2, 5, at_most=True)) == [2, 3, 1, 2]
    assert sizes(near.shifted(point, 2, 2, -5, at_most=True)) == [2, 1, 3, 2]
    alone = near.shifted(point, 2, 2, -1)
    assert near.shifted(alone, 2, 2, -1, at_most=True) is None


def test_devices_are_left_out_where_a_stage_would_be_in_several_machines():
    cluster = uniform_cluster(6, per_machine=2, between_bandwidth="1GB/s")
    assert in_a_row([2, 1, 1, 1], cluster) == ((0, 1), (2,), (3,), (4,))
    assert in_a_row([1, 2, 1], cluster) == ((0,), (2, 3), (4,))
    # Nothing is to spare, or no longer.
    assert in_a_row([1, 2, 2], cluster) == ((0,), (2, 3), (4, 5))
    assert in_a_row([1, 2, 1, 2], cluster) == ((0,), (1, 2), (3,), (4, 5))
    assert in_a_row([1, 3, 1], cluster) == ((0,), (2, 3, 4), (5,))
    assert in_a_row([1, 1], uniform_cluster(3)) == ((1,), (2,))


def test_replicas_are_first_laid_on_one_machine_or_one_kind_too():
    """Links between may be slow."""

    def begun(cluster, *, moves_devices=False):
        search = search_for(chain(8), cluster, "gpipe", replicas=True, micro_batches=4)
        local = LocalSearch(search, moves_devices=moves_devices)
        return {*layings_of(local.near, search.branches[0])}

    alike = begun(uniform_cluster(4, per_machine=2, between_bandwidth="1MB/s"))
    assert {((0, 1),), ((0, 1), (2, 3)), ((0, 1, 2, 3),)} <= alike
    assert ((2, 3),) not in alike
    fast_and_slow = of_speeds(1.0, 0.5, 1.0, 0.5)
    assert {((0, 2),), ((1, 3),)} <= begun(fast_and_slow, moves_devices=True)
    # Each machine a pipeline of its own: gradients alone are sent between.
    machines = uniform_cluster(8, per_machine=4, between_bandwidth="1MB/s")
    assert ((0, 4), (1, 5), (2, 6), (3, 7)) in begun(machines, moves_devices=True)
    # And so those of one kind, where other machines go on.
    two_and_one = on_machines([1.0] * 2, [1.0] * 2, [0.5] * 2)
    assert ((0, 2), (1, 3), (4, 5)) in begun(two_and_one, moves_devices=True)
    # Replicas are neighbours in a list that may be taken in no other sequence.
    assert ((1, 3),) not in begun(fast_and_slow)
    assert ((0, 1),) not in begun(uniform_cluster(4))


@given(st.data())
def test_replicas_are_where_they_leave_the_busiest_one_least_to_do(data):
    """As any split of a row of devices into stages shows, with what summing gradients takes."""
    groups, devices = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    work = data.draw(st.lists(st.integers(1, 9), min_size=groups, max_size=groups))
    speeds = data.draw(st.lists(st.integers(1, 3), min_size=devices, max_size=devices))
    homes = data.draw(st.lists(st.sampled_from([None, "x"]), min_size=devices, max_size=devices))
    counts = [1, *data.draw(st.sets(st.integers(2, 4)))]
    summed = data.draw(st.lists(st.integers(0, 3), min_size=groups, max_size=groups))

    def sum_of(row):
        return 0.0, 0.5 * (len(row) > 1) * (1 + row[0] % 2)

    def rows(stages, begin=0):
        """Devices of so many stages."""
        if not stages:
            yield ()
            return
        for first, r in product(range(begin, devices), counts):
            mine = tuple(range(first, first + r))
            if first + r <= devices and len({homes[d] for d in mine}) == 1:
                yield from ((mine, *others) for others in rows(stages - 1, first + r))

    def busiest(places):
        ends = combinations(range(1, groups), len(places) - 1)
        cuts = ([*pairwise([0, *each, groups])] for each in ends)

        def takes(mine, a, b):
            capacity = len(mine) * min(speeds[d] for d in mine)
            return sum(work[a:b]) / capacity + sum(summed[a:b]) * sum_of(mine)[1]

        return min(max(takes(x, *y) for x, y in zip(places, cut, strict=True)) for cut in cuts)

    found = dict[int, float]()
    most = min(groups, devices)
    for about_s, places in even_replicas(work, speeds, homes, sorted(counts), most, summed, sum_of):
        assert places in {*rows(len(places))}
        assert busiest(places) <= about_s * (1 + 1e-6)
        found[len(places)] = about_s
    least = {s: min(map(busiest, rows(s)), default=inf) for s in range(1, most + 1)}
    # A number of stages is left out where fewer are as good on fewer devices.
    for stages, least_s in least.items():
        within = min(about for s, about in found.items() if s <= stages)
        assert within <= least_s * 1.025 * (1 + 1e-6)


def test_plans_begin_with_more_stages_though_fewer_share_the_work_as_evenly():
    """One stage on all devices shares it best, but sums all gradients."""
    found = even_replicas(
        [1.0] * 8, [1.0] * 4, [None] * 4, [1, 2, 4], 4, [0.0] * 8, lambda row: (0.0, 0.0)
    )
    assert [len(places) for _, places in found] == [1, 2, 3, 4]
    assert found[2][1] in {((0, 1), (2,), (3,)), ((0,), (1, 2), (3,)), ((0,), (1,), (2, 3))}


def test_stages_with_much_work_begin_with_more_replicas():
    """Those of one machine, where the link to others is slow."""
    layers = [(f"n{k}", 100, ms * 1e-3, 2e-3 * ms, 10, []) for k, ms in enumerate([4, 1, 1, 8])]
    edges = [(f"n{k}", f"n{k + 1}", f"t{k}", 16) for k in range(3)]
    edges.append(("n3", "output", "last", 4))
    profile = profile_by_hand(layers, edges)

    def begun(cluster, profile=profile, **asked):
        search = search_for(profile, cluster, "gpipe", micro_batches=4, **asked)
        near = LocalSearch(search).near
        return {*mixed_layings(near, search.branches[0])}

    assert ((0, 1), (2,), (3, 4, 5, 6)) in begun(uniform_cluster(7), replicas=True)
    machines = uniform_cluster(8, per_machine=4, between_bandwidth="1MB/s")
    assert ((0, 1, 2, 3), (4, 5, 6, 7)) in begun(machines, replicas=True)
    assert ((0, 1), (2,), (3,), (4, 5, 6, 7)) not in begun(machines, replicas=True)
    assert not begun(uniform_cluster(7), replicas=False)
    assert {len(lying) for lying in begun(uniform_cluster(7), replicas=True, stages=2)} == {2}
    # Sums of the last layer's gradients would take longer than what replicas gain.
    large = profile_by_hand([*layers[:3], ("n3", 10**10, *layers[3][2:])], edges)
    assert {len(lying[-1]) for lying in begun(uniform_cluster(7), large, replicas=True)} == {1}


def test_plans_that_several_sequences_lead_to_are_begun_with_once(monkeypatch):
    """And leave room for others."""
    search = search_for(chain(8), uniform_cluster(4), "gpipe", replicas=True, micro_batches=4)
    local, begun, fast = LocalSearch(search), [], ((0, 1), (2, 3))
    monkeypatch.setattr(improve, "layings_of", lambda *_: [])
    monkeypatch.setattr(improve, "mixed_layings", lambda *_: [fast] * 20 + [((0,), (1,))])
    monkeypatch.setattr(local, "starts_on", lambda lying, _: begun.append(lying) or [])
    improve.start(search, local)
    assert begun == [fast, ((0,), (1,))]


def test_in_other_sequences_first_plans_come_before_bounds(monkeypatch):
    """Of few devices, too: that takes as long there."""
    search = search_for(chain(8), of_speeds(1.0, 0.5, 1.0, 0.5), "gpipe", replicas=True)
    done = list[str]()
    for name in ("_start", "_bound_by_cycles"):
        monkeypatch.setattr(exploration, name, lambda *_, name=name: done.append(name))
    for search.any_sequence in (False, True):
        exploration._first_plans(search, LocalSearch(search), CycleSearch(search))
    assert done == ["_bound_by_cycles", "_start", "_start", "_bound_by_cycles"]


@given(st.data())
def test_even_cuts_that_fit_are_the_most_even_ones(data):
    amounts = st.integers(1, 9)
    groups = data.draw(st.integers(2, 6))
    stages = data.draw(st.integers(1, groups))
    rows = st.lists(amounts, min_size=groups, max_size=groups)
    work, held = data.draw(rows), [data.draw(rows) for _ in range(stages)]
    each = st.lists(st.integers(1, 3), min_size=stages, max_size=stages)
    speeds = data.draw(each)
    rooms = data.draw(st.lists(st.integers(3, 30) | st.just(inf), min_size=stages, max_size=stages))

    def busiest(ends):
        """None: some stage doesn't fit."""
        parts = [*pairwise([0, *ends])]
        fits = all(sum(held[s][a:b]) <= rooms[s] for s, (a, b) in enumerate(parts))
        loads = (sum(work[a:b]) / speeds[s] for s, (a, b) in enumerate(parts))
        return max(loads) if fits else None

    every = ((*ends, groups) for ends in combinations(range(1, groups), stages - 1))
    least = min((load for ends in every if (load := busiest(ends)) is not None), default=None)
    found = even_within(work, speeds, np.array(held, dtype=float), rooms)
    if least is None:
        assert found is None
    else:
        assert found is not None
        assert busiest(found) == pytest.approx(least)


def test_first_plans_have_the_most_in_flight_that_memory_lets_some_cut_have():
    """An even cut's first stage has no room for two mini-batches."""
    profile = chain(12, parameters=4, saved=100)
    asked = {"stages": 2, "replicas": True, "micro_batches": 4}

    def first(memory):
        search = search_for(profile, uniform_cluster(4, memory), "timeprest", **asked)
        local, lying = LocalSearch(search), ((0, 1), (2, 3))
        return [s for s in local.starts_on(lying, 4) if not s.over]

    roomy = first("1GB")[0]
    assert roomy.point.limits == (2, 1)
    assert roomy.found.stages[0].devices == (0, 1)
    prediction = roomy.found.prediction
    needs = max(prediction.device_of(s).memory_bytes for s in range(2))
    found = min(first(f"{needs * 0.8:.0f}B"), key=lambda s: s.period_s)
    assert found.point.limits == (2, 1)
    assert len(found.found.stages[0].nodes) < len(found.found.stages[1].nodes)


@pytest.mark.choice(3)
@pytest.mark.parametrize("memory", [None, "700B"])
@pytest.mark.parametrize("system", ["timeprest", "pipedream", "gpipe"])
def test_climbs_from_anywhere_come_to_the_top_of_a_small_hill(system, memory):
    profile = chain(7)
    search = search_for(profile, uniform_cluster(3, memory, "1MB/s"), system, stages=3)
    names, best = [layer.name for layer in profile.layers], inf
    for ends in combinations(range(1, len(names)), 2):
        nodes = [tuple(names[a:b]) for a, b in pairwise([0, *ends, len(names)])]
        ranges = limit_ranges(search.question.system, 3)
        for limits in product(*(range(low, top + 1) for low, top in ranges)):
            for branch in search.branches if sorted(limits, reverse=True) == [*limits] else ():
                found = evaluate(search.question, lone_stages(nodes, limits), branch.micro_batches)
                if not found.over_limit(search.question.cluster):
                    best = min(best, found.prediction.period_s)
    climb_on(search, LocalSearch(search), search.branches)
    assert search.period_s == pytest.approx(best)


def test_climbs_end_where_they_gain_nothing_or_the_effort_is_used_up(monkeypatch):
    monkeypatch.setattr(improve, "_CLIMBS", 3)
    monkeypatch.setattr(state, "_LEAST_TRIED", 0)
    search = search_for(chain(9), uniform_cluster(3), "timeprest", stages=3)
    before = search.budget.effort
    climb_on(search, LocalSearch(search), search.branches)
    spent, found = before - search.budget.effort, search.period_s
    assert 0 < spent < before
    # It goes on from the best plan, and is the same each time.
    climb_on(search, LocalSearch(search), search.branches)
    assert search.period_s <= found
    again = search_for(chain(9), uniform_cluster(3), "timeprest", stages=3)
    again.budget.effort = spent // 2
    with pytest.raises(OutOfBudget, match="effort"):
        climb_on(again, LocalSearch(again), again.branches)
    assert again.period_s >= found


def point_with(search, borders, replicas):
    """A plan of `chain`, on devices as they are listed."""
    nodes = [layer.name for layer in search.question.profile.layers]
    parts = [tuple(nodes[a:b]) for a, b in pairwise([0, *borders, len(nodes)])]
    firsts = [*accumulate(replicas, initial=0)]
    stages = [
        PlanStage(nodes=part, devices=tuple(range(a, b)), in_flight=1, recompute=False)
        for part, (a, b) in zip(parts, pairwise(firsts), strict=True)
    ]
    return evaluate(search.question, stages, 4)


def shapes(points):
    """Layers and replicas of each stage."""
    return {
        (
            tuple((b & ~a).bit_count() for a, b in pairwise(point.downsets)),
            tuple(map(len, point.devices)),
        )
        for point in points
    }


@pytest.mark.parametrize("sequence", ["listed", "any"])
def test_a_replica_is_moved_with_as_much_work_as_it_had(sequence):
    cluster = uniform_cluster(6)
    search = search_for(chain(12), cluster, "gpipe", replicas=True, micro_batches=4)
    near = LocalSearch(search, moves_devices=sequence == "any").near
    point = near.point_of(point_with(search, [4, 8], [2, 2, 2]))
    # Three replicas can't share four micro-batches, and two more would be all that a stage has.
    assert shapes(replica_moves(near, point, range(3))) == set()
    point = near.point_of(point_with(search, [4, 8], [2, 2, 1]))
    assert shapes(replica_moves(near, point, range(3))) == {
        ((4, 4, 4), (2, 2, 2)),
        # Two replicas of the last stage have twice as much to do as its one had.
        ((3, 3, 6), (2, 2, 2)),
        ((4, 4, 4), (1, 2, 2)),
        ((2, 3, 7), (1, 2, 2)),
        ((4, 4, 4), (2, 1, 2)),
        ((3, 2, 7), (2, 1, 2)),
    }


def test_a_stage_is_split_by_its_replicas_and_stages_are_joined_with_all_of_theirs():
    search = search_for(chain(12), uniform_cluster(6), "gpipe", replicas=True, micro_batches=4)
    near = LocalSearch(search).near
    point = near.point_of(point_with(search, [8], [4, 2]))
    found = shapes(stage_moves(near, point))
    split = {each for each in found if len(each[0]) == 3}
    assert split == {((4, 4, 4), (2, 2, 2)), ((8, 2, 2), (4, 1, 1))}
    joined = {each for each in found if len(each[0]) == 1}
    # Six replicas can't share four micro-batches.
    assert joined == {((12,), (4,)), ((12,), (2,))}
    point = near.point_of(point_with(search, [8], [2, 2]))
    assert ((12,), (4,)) in shapes(stage_moves(near, point))


@pytest.mark.parametrize("speed", [0.2, 1.0, 3.0])
def test_moves_are_judged_by_what_layers_take_on_these_devices(speed):
    """However fast they are beside the one that was measured: a plan's own layers take no longer
    than its period, and uneven stages become even."""
    asked = {"stages": 3, "micro_batches": 4}
    search = search_for(chain(12), of_speeds(speed, speed, speed), "gpipe", **asked)
    local = LocalSearch(search)
    here = local.look(local.near.point_of(point_with(search, [6, 9], [1] * 3)))
    assert local.work_s(here.point) == pytest.approx(max(busy_s(here.found.pipeline)))
    ended = local.descend(here)
    assert [mask.bit_count() for mask in ended.point.downsets] == [0, 4, 8, 12]


def test_slow_devices_that_are_idle_may_have_a_layer_at_an_end_alone():
    def split(*speeds):
        search = search_for(chain(12), of_speeds(*speeds), "gpipe", replicas=True, micro_batches=4)
        near = LocalSearch(search, moves_devices=True).near
        found = shapes(stage_moves(near, near.point_of(point_with(search, [], [1]))))
        return {layers for layers, _ in found if len(layers) == 2}

    assert split(1.0, 0.3) == {(6, 6), (1, 11), (11, 1)}
    assert split(1.0, 1.0) == {(6, 6)}


def test_a_stage_in_two_may_have_all_idle_devices_that_are_alike():
    search = search_for(chain(12), uniform_cluster(7), "gpipe", replicas=True, micro_batches=4)
    near = LocalSearch(search).near
    found = shapes(stage_moves(near, near.point_of(point_with(search, [], [2]))))
    # Five are idle; as replicas four may share four micro-batches.
    assert {replicas for layers, replicas in found if layers == (6, 6)} == {
        (2, 1),
        (1, 2),
        (2, 4),
        (4, 2),
        (1, 1),
    }


def test_first_cuts_know_which_link_is_slow():
    """A border between machines is where little is sent."""
    layers = [(f"n{k}", 1, 1e-3, 2e-3, 1, []) for k in range(12)]
    edges = [(f"n{k}", f"n{k + 1}", f"t{k}", 16 if k == 5 else 4000) for k in range(11)]
    profile = profile_by_hand(layers, [*edges, ("n11", "output", "last", 4)])

    def borders(cluster):
        search = search_for(profile, cluster, "timeprest", stages=3, micro_batches=1)
        near = LocalSearch(search).near
        lying = next(layings_of(near, search.branches[0]))
        return {cut[1].bit_length() for cut in near.first_cuts(1, lying)}

    inside = Network(bandwidth_bytes_per_s=1e9, latency_s=0.0)
    slow = Network(bandwidth_bytes_per_s=1e6, latency_s=0.0)
    devices = [Device(name=f"d{k}", machine="ab"[k > 0]) for k in range(3)]
    one = Cluster(devices=(*devices,), network=inside)
    two = Cluster(devices=(*devices,), network=inside, between_machines=slow)
    # Device 0 is alone in its machine: what its stage sends goes over the slow link.
    assert 6 not in borders(one)
    assert 6 in borders(two)


def test_stages_whose_layers_take_no_time_are_split_too():
    layers = [(f"n{k}", 1, 0.0, 0.0, 1, []) for k in range(6)]
    edges = [(f"n{k}", f"n{k + 1}", f"t{k}", 16) for k in range(5)]
    profile = profile_by_hand(layers, [*edges, ("n5", "output", "last", 4)])
    search = search_for(profile, uniform_cluster(4), "gpipe", replicas=True, micro_batches=4)
    near = LocalSearch(search).near
    point = near.point_of(point_with(search, [3], [2, 2]))
    assert (1, 1, 2) in {replicas for _, replicas in shapes(stage_moves(near, point))}


def test_what_fits_is_gone_to_from_what_does_not_however_much_slower(monkeypatch):
    """Where stages may have replicas, borders are moved of near plans alone."""
    search = search_for(chain(6), uniform_cluster(4), "gpipe", replicas=True, micro_batches=4)
    local = LocalSearch(search)
    here = local.look(local.near.point_of(point_with(search, [3], [2, 2])))
    fast = replace(here, over=1.0)
    slow = replace(here, found=SimpleNamespace(prediction=SimpleNamespace(period_s=1e3)))
    monkeypatch.setattr(local, "look", lambda *_: slow)
    monkeypatch.setattr(local, "_bettered", lambda *_: None)
    assert local._elsewhere(fast) is slow
    assert local._elsewhere(here) is None
