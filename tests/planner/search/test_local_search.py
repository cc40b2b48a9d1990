"""The local search by itself: where it begins, and climbs from anywhere."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from math import inf

import pytest
from helpers.by_hand.profiles import chain
from helpers.plans import lone_stages
from timeprest.planner.cluster.cluster import Cluster, Device, uniform_cluster
from timeprest.planner.cluster.links import Network
from timeprest.planner.evaluate import evaluate
from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.search import state
from timeprest.planner.search.local_search import improve
from timeprest.planner.search.local_search.improve import LocalSearch, climb_on
from timeprest.planner.search.local_search.neighbours import layings_of
from timeprest.planner.search.solve import SearchRequest, explore, question_for, solve
from timeprest.planner.search.state import OutOfBudget


def search_for(profile, cluster, system, **asked):
    """A search that has looked at nothing yet."""
    question = question_for(profile, cluster, system)
    search = explore(question, SearchRequest(**asked), lambda *_: None)
    search.forget_bounds()
    return search


def of_speeds(*speeds):
    devices = tuple(Device(name=f"d{k}", speed=speed) for k, speed in enumerate(speeds))
    return Cluster(devices=devices, network=Network(bandwidth_bytes_per_s=1e9, latency_s=0.0))


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
