"""The hill climb that everyday plans are held against, and the questions: nothing is timed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, combinations, pairwise, product
from math import inf

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from helpers.plans import lone_stages
from timeprest.planner.cluster.cluster import read_cluster, uniform_cluster
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import StalenessBounds, limit_ranges
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import TimeprestError
from timeprest.tests.benchmarks.planner import battery
from timeprest.tests.benchmarks.planner.battery import Found, drawn, rented, replicated, uneven
from timeprest.tests.benchmarks.planner.climb import Climb, ReplicaClimb


@pytest.mark.parametrize("memory", [None, "700B"])
@pytest.mark.parametrize("system", ["timeprest", "pipedream", "gpipe"])
def test_on_a_small_hill_the_climb_comes_to_the_top(system, memory):
    profile = chain(7)
    question = Question(profile, uniform_cluster(3, memory, "1MB/s"), system, 4, 1.0)
    counts = [1] if question.system.whole_mini_batches else [1, 2, 4]
    names = [layer.name for layer in profile.layers]
    best = inf
    for ends in combinations(range(1, len(names)), 2):
        nodes = [tuple(names[a:b]) for a, b in pairwise([0, *ends, len(names)])]
        ranges = limit_ranges(question.system, 3)
        for limits in product(*(range(low, top + 1) for low, top in ranges)):
            if sorted(limits, reverse=True) == list(limits):
                for n in counts:
                    found = evaluate(question, lone_stages(nodes, limits), n)
                    if not found.over_limit(question.cluster):
                        best = min(best, found.prediction.period_s)
    climb = Climb(question, [(0,), (1,), (2,)], counts)
    found = climb.run(0.5)
    assert found is None if best == inf else found.prediction.period_s == pytest.approx(best)
    assert climb.tried


@pytest.mark.parametrize("memory", [None, "700B"])
@pytest.mark.parametrize("system", ["timeprest", "gpipe"])
def test_a_climb_with_replicas_comes_to_the_top_of_a_small_hill(system, memory):
    profile = chain(5)
    question = Question(profile, uniform_cluster(3, memory, "1MB/s"), system, 4, 1.0)
    names, best = [layer.name for layer in profile.layers], inf
    for replicas in [(1,), (2,), (1, 1), (1, 2), (2, 1), (1, 1, 1)]:
        firsts = [*accumulate(replicas, initial=0)]
        devices = [tuple(range(a, b)) for a, b in pairwise(firsts)]
        for ends in combinations(range(1, len(names)), len(replicas) - 1):
            nodes = [tuple(names[a:b]) for a, b in pairwise([0, *ends, len(names)])]
            ranges = limit_ranges(question.system, len(replicas), within=StalenessBounds())
            for limits in product(*(range(low, top + 1) for low, top in ranges)):
                if sorted(limits, reverse=True) != list(limits):
                    continue
                parts = zip(nodes, devices, limits, strict=True)
                stages = [PlanStage(nodes=x, devices=d, in_flight=f) for x, d, f in parts]
                for n in (1, 2, 4):
                    with suppress(TimeprestError):
                        found = evaluate(question, stages, n)
                        if not found.over_limit(question.cluster):
                            best = min(best, found.prediction.period_s)
    found = ReplicaClimb(question, [1, 2, 4]).run(1.0)
    assert found is None if best == inf else found.prediction.period_s == pytest.approx(best)


def test_questions_with_replicas_are_those_of_the_battery():
    cases = [replicated(number) for number in range(battery.COUNT)]
    assert all(case.replicas and case.per_device == 1 for case in cases)
    assert all(case.device_of == tuple(range(case.devices)) for case in cases)
    assert all(VARIANTS[case.system].placement == "any" for case in cases)
    assert {1, 2, 16} <= {case.devices for case in cases} <= {*range(1, 17)}


def test_questions_on_rented_machines_are_of_as_many_devices_as_these_have(monkeypatch):
    monkeypatch.setattr(battery, "profile_of", lambda model: chain(4))
    monkeypatch.setattr(battery, "profile_path", lambda model: f"{model}.json")
    cases = [rented(number) for number in range(battery.COUNT)]
    assert {case.kinds for case in cases} == {*battery.RENTED}
    assert battery.machine_sizes("a100-80gb:4x2") == [4, 4]
    assert battery.machine_sizes("h100-80gb:2+a100-80gb:4") == [2, 4]
    case = next(case for case in cases if case.kinds == "h100-80gb:2+a100-80gb:4")
    assert case.devices == 6
    assert case.kinds in str(case)
    line = battery.command_line(case, 30)
    assert f"--devices {case.kinds} --between {case.bandwidth_bytes_per_s:.0f}B/s" in line
    cluster = battery.cluster_of(case)
    assert len(cluster.devices) == 6
    assert len({device.machine for device in cluster.devices}) == 2
    assert cluster.link(1, 2).bandwidth_bytes_per_s < cluster.link(0, 1).bandwidth_bytes_per_s


def test_tied_layers_stay_together():
    profile = msgspec.structs.replace(chain(4), tied=(("n0", "n2"),))
    question = Question(profile, uniform_cluster(2), "gpipe", 4, 1.0)
    found = Climb(question, [(0,), (1,)], [2]).run(0.2)
    assert [stage.nodes for stage in found.stages] == [("n0", "n1", "n2"), ("n3",)]
    assert Climb(question, [(0,), (1,), (2,)], [2]).run(0.2) is None


def test_questions_are_of_every_kind():
    cases = [drawn(number) for number in range(battery.COUNT)]
    assert len(cases) >= 300
    assert {case.system for case in cases} == set(VARIANTS)
    assert {case.model for case in cases} == set(battery.MODELS)
    assert {1, 8, 64} <= {case.devices for case in cases}
    assert any(case.second for case in cases)
    assert any(case.micro_batches is None for case in cases)
    assert {case.recompute for case in cases} == {"off", "auto"}
    assert len({str(replace(case, number=0)) for case in cases}) > 300


def test_what_is_asked_can_be_asked_of_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(battery, "WORK", tmp_path)
    monkeypatch.setattr(battery, "profile_of", lambda model: chain(4))
    monkeypatch.setattr(battery, "profile_path", lambda model: tmp_path / f"{model}.json")
    case = replace(drawn(0), devices=2, memory=1.0, second=(0.5, 2.0), system="gpipe")
    line = battery.command_line(case, 30)
    assert "--variant gpipe --replicas off --stages" in line
    assert "--time-limit 30" in line
    written = read_cluster(tmp_path / "clusters" / "0.toml")
    assert written.devices == battery.cluster_of(case).devices
    assert [device.memory_bytes for device in written.devices] == [2**30, 2**31]
    case = replace(case, devices=5, turns=2, slow=(1,), replicas=True, mini_batch=48)
    line = battery.command_line(case, 30)
    assert "--replicas auto" in line
    assert "--mini-batch 48" in line
    written = read_cluster(tmp_path / "clusters" / "0.toml")
    assert written.devices == battery.cluster_of(case).devices
    assert [device.speed for device in written.devices] == [1.0, 0.5, 1.0, 0.5, 1.0]
    assert written.link(1, 2).bandwidth_bytes_per_s == case.bandwidth_bytes_per_s / 10
    assert written.link(0, 1).bandwidth_bytes_per_s == case.bandwidth_bytes_per_s


def test_questions_drawn_otherwise_are_of_kinds_that_the_others_lack():
    cases = [uneven(number) for number in range(120)]
    assert {case.system for case in cases} == set(battery.UNEVEN_SYSTEMS)
    assert {3, 5, 6, 7} <= {case.devices for case in cases}
    assert {case.mini_batch for case in cases} == {24, 48, 96}
    assert any(case.replicas for case in cases)
    assert any(case.second and case.turns for case in cases)
    assert any(case.slow for case in cases)
    assert any("of two kinds in turns" in str(case) for case in cases)
    assert any("slow" in str(case) for case in cases)


def test_stages_with_replicas_have_a_climb_of_their_own(monkeypatch):
    monkeypatch.setattr(battery, "profile_of", lambda model: chain(6))
    case = replace(drawn(0), devices=5, second=None, memory=None, system="gpipe", replicas=True)
    case = replace(case, mini_batch=4, micro_batches=None, per_device=1, placement="auto")
    asked = battery.question_of(case, battery.cluster_of(case))
    alone, other = battery.climbs_of(case, asked)
    assert alone.placement == ((0,), (1,), (2,), (3,), (4,))
    assert isinstance(other, ReplicaClimb)
    starts = {point.replicas for point in other._starts()}
    assert starts >= {(1, 1, 1, 1, 1), (2, 2), (5,)}


def found(period_s, climb_s, bound_s=1.0, seconds=1.0):
    return Found(period_s, bound_s, period_s == bound_s, seconds, "", climb_s, 9)


def test_the_summary_counts_what_is_beaten():
    all_found = [
        found(1.0, 1.0),
        found(1.2, 1.19, seconds=9.0),
        found(2.0, 1.0),
        found(1.0, 2.0),
        found(inf, inf),
        found(inf, 1.0),
    ]
    head, _, line = battery.results(all_found).splitlines()
    assert head.startswith("| questions | with a plan | beaten | by at most | better than")
    assert line == "| 6 | 5 | 3 | 100.0% | 1 | 50% | 50% | 1.0 | 9.0 |"
    cases = [replace(drawn(k), system="gpipe" if k else "zb-v") for k in range(6)]
    *_, first, last = battery.by_system(cases, all_found).splitlines()
    assert (first, last) == ("| `gpipe` | 5 | 2 | 3 |", "| `zb-v` | 1 | 0 | 0 |")


def test_the_page_has_wide_gaps_and_beaten_plans():
    all_found = [found(1.0, 1.0), found(1.05, 1.04), found(1.2, 1.3), found(inf, inf)]
    text = battery.page([drawn(k) for k in range(4)], all_found, 20, 5)
    rows = text.partition("## Rows")[2].splitlines()[-2:]
    assert [row.split(" ")[1] for row in rows] == ["1", "2"]
    assert rows[0].endswith("| -1.0% |")
