"""What stages beyond a cut answer: no plan is below its bounds, and of chains they say all."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from helpers.by_hand.profiles import profile_by_hand
from helpers.drawn.questions import drawn
from helpers.plans import lone_stages
from timeprest.planner.cluster.cluster import Cluster, Device, Network, uniform_cluster
from timeprest.planner.evaluate import Question, evaluate
from timeprest.planner.partition.one_by_one import answers
from timeprest.planner.search import device_sequences, exploration
from timeprest.planner.search.solve import SearchRequest, explore, solve

SYSTEMS = "gpipe", "pipedream-flush"


def programs(question, **asked):
    """Those of all micro-batch counts."""
    search = explore(question, SearchRequest(**asked), lambda *_: None)
    alike = device_sequences.kinds_of_devices(search)
    for branch in search.branches:
        found = device_sequences.waiting(search, alike, branch)
        if found is not None and isinstance(found[1], answers.AnsweringProgram):
            yield branch.micro_batches, found[1]


@pytest.mark.choice(6)
@pytest.mark.parametrize("kept", [1, 200])
@pytest.mark.parametrize("seed", range(24))
def test_no_plan_is_below_a_bound(seed, kept, monkeypatch):
    """Of drawn questions: graphs, links, replicas, recomputation, memory."""
    monkeypatch.setattr(answers, "_FEWEST", 1)
    monkeypatch.setattr(answers, "_MOST", kept)
    monkeypatch.setattr(answers, "_NUMBERS", (kept - 1) * 6400)
    question = drawn(seed, systems=SYSTEMS)
    if question is None or question.stages is not None:
        pytest.skip("too many plans, or none")
    asked = {"replicas": question.freedom.replicas, "recompute": question.freedom.recompute}
    least = {}
    for n, plan in question.plans:
        if not plan.over_limit(question.question.cluster):
            least[n] = min(least.get(n, float("inf")), plan.prediction.period_s)
    for n, program in programs(question.question, micro_batches=question.asked, **asked):
        if n in least:
            assert program.under(least[n] * (1 + 1e-9))
            assert not program.under(least[n] / 6)


def uneven(tensor):
    """A chain of few layers, much work at the begin, and large tensors there."""
    times = [3, 9, 4, 5, 2, 4, 1, 0.2]
    layers = [(f"n{k}", 100, ms * 1e-3, ms * 2e-3, 10, []) for k, ms in enumerate(times)]
    sizes = [round(tensor / (k + 1)) for k in range(len(times))]
    edges = [(f"n{k}", f"n{k + 1}", f"t{k}", sizes[k]) for k in range(len(times) - 1)]
    return profile_by_hand(layers, [*edges, (f"n{len(times) - 1}", "output", "last", 4)])


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("tensor", [1_000, 8_000_000])
def test_of_a_chain_they_say_all(system, tensor, monkeypatch):
    """The best of all cuts is the only one, and no target below its period is kept to; it is proven
    without trying cuts one by one."""
    monkeypatch.setattr(exploration, "_prove", lambda _: None)
    cluster = uniform_cluster(5, None, bandwidth="1GB/s", latency="1ms")
    question, n = Question(uneven(tensor), cluster, system, 4, 1.0), 4
    names = [layer.name for layer in question.profile.layers]
    best = min(
        evaluate(
            question, lone_stages([names[a:b] for a, b in pairwise(cuts)], [1] * s), n
        ).prediction.period_s
        for s in range(1, 6)
        for inner in combinations(range(1, len(names)), s - 1)
        for cuts in [(0, *inner, len(names))]
    )
    ((_, program),) = programs(question, micro_batches=n)
    (cut, *_) = program.under(best * (1 + 1e-9))
    assert cut.objective_s == pytest.approx(best, rel=1e-9)
    asked = {"mini_batch": 4, "micro_batches": n}
    plan = solve(question.profile, cluster, system, optimizer_state_factor=1.0, **asked)
    assert plan.solver.optimal
    assert plan.predicted.period_s == pytest.approx(best, rel=1e-9)
    assert not program.under(best * (1 - 1e-6))


@pytest.mark.parametrize("memory", [None, "falls", "rises"])
def test_devices_of_several_kinds_are_all_that_there_are(memory, monkeypatch):
    """Where matrices of several vectors become one, cuts still have devices for each stage."""
    monkeypatch.setattr(answers, "_NUMBERS", 1)
    sizes = {None: [None] * 3, "falls": [8000, 6000, 5000], "rises": [5000, 6000, 8000]}[memory]
    kinds = zip((2.0, 1.0, 0.5), sizes, strict=True)
    devices = tuple(
        Device(name=f"d{speed}{k}", speed=speed, memory_bytes=size)
        for speed, size in kinds
        for k in range(2)
    )
    cluster = Cluster(devices=devices, network=Network(bandwidth_bytes_per_s=1e9, latency_s=1e-4))
    asked = {"mini_batch": 4, "micro_batches": 4, "optimizer_state_factor": 1.0}
    plan = solve(uneven(1_000_000), cluster, "pipedream-flush", **asked, sequence="best")
    exact = plan.predicted.period_s
    ((_, program),) = programs(
        Question(uneven(1_000_000), cluster, "pipedream-flush", 4, 1.0), micro_batches=4
    )
    found = program.under(exact * (1 + 1e-9))
    assert found
    for cut in found:
        for g in range(3):
            assert sum(stage.kind == g for stage in cut.stages) <= 2
