"""Where nothing fits: it is known soon, and what would do does."""

from __future__ import annotations

import re
from itertools import combinations, pairwise, product, starmap

import msgspec
import pytest
from helpers.by_hand.profiles import chain, row_of_layers, without_gradients
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import PlanStage
from timeprest.planner.search import solve as solving
from timeprest.planner.search import state
from timeprest.planner.search.answer import fitting
from timeprest.planner.search.answer.diagnosis import closest_plan
from timeprest.planner.search.branching import SearchRequest, explore, question_for
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import InfeasibleError
from timeprest.profiles.profile import SharedParameters


@pytest.mark.parametrize("system", ["pipedream-2bw", "pipedream-flush"])
def test_what_would_do_for_a_large_model_does(monkeypatch, system):
    monkeypatch.setattr(state, "_LARGE", 0)
    layers = [(f"n{k}", 1000, 1e-3, 1e-3, 0, []) for k in range(8)]
    profile = row_of_layers(layers)
    with pytest.raises(InfeasibleError) as info:
        solve(profile, uniform_cluster(2, "9kB"), system, micro_batches=4)
    words = str(info.value).split("What would do: ")[1]
    memory, count = re.match(r"(\d+) bytes .* or (\d+) such devices", words).groups()
    assert solve(profile, uniform_cluster(2, memory), system, micro_batches=4)
    assert solve(profile, uniform_cluster(int(count), "9kB"), system, micro_batches=4)


@pytest.mark.parametrize(("memory", "left"), [("9kB", [4]), ("20kB", [1, 2, 4])])
def test_micro_batch_counts_that_fit_nowhere_are_left_out(memory, left):
    """The first of two stages keeps two micro-batches, or a whole mini-batch."""
    profile, cluster = chain(8, parameters=1, saved=1000), uniform_cluster(2, memory)
    question = question_for(profile, cluster, "pipedream-flush")
    search = explore(question, SearchRequest(stages=2), lambda *_: None)
    assert [b.micro_batches for b in fitting.Fitting(search).branches()] == left
    plan = solve(profile, cluster, "pipedream-flush", stages=2)
    assert plan.solver.optimal
    assert plan.micro_batches in left


@pytest.mark.parametrize(("large", "n"), [(False, 1), (True, 2)])
def test_what_would_do_has_no_more_stages_than_micro_batches(monkeypatch, large, n):
    if large:
        monkeypatch.setattr(state, "_LARGE", 0)
    profile = chain(8, parameters=1000, saved=100)
    with pytest.raises(InfeasibleError, match=rf"closest \({n} stages?, .* lacks") as info:
        solve(profile, uniform_cluster(6, "10kB"), "pipedream-2bw", micro_batches=n)
    memory = re.search(r"What would do: (\d+) bytes", str(info.value))[1]
    assert solve(profile, uniform_cluster(6, memory), "pipedream-2bw", micro_batches=n)


@pytest.mark.parametrize("system", ["timeprest", "gpipe", "pipedream-flush", "pipedream-2bw"])
def test_each_thing_that_would_do_does(system):
    """Memory, devices, recomputation, a smaller mini-batch, another system, or what of these the
    line names."""
    profile, named = chain(6, parameters=100, saved=1000), set()
    for memory in (2_000, 4_200, 5_000):
        with pytest.raises(InfeasibleError) as info:
            solve(profile, uniform_cluster(2, memory), system, recompute="off")
        for way in str(info.value).split("What would do: ")[1].split("; more")[0].split(", or "):
            asked = dict(re.findall(r"--([a-z-]+) (\S+)", way))
            needed = re.match(r"(\d+) (bytes|such devices)", way)
            count = int(needed[1]) if needed and needed[2] == "such devices" else 2
            size = int(needed[1]) if needed and needed[2] == "bytes" else memory
            assert solve(
                profile,
                uniform_cluster(count, size),
                asked.get("variant", system),
                recompute=asked.get("recompute", "off"),
                mini_batch=int(asked.get("mini-batch", 4)),
            )
            named |= {*asked, *(needed.groups()[1:] if needed else ())}
    assert named >= {"bytes", "such devices"}
    assert named & {"mini-batch", "recompute"}


@pytest.mark.parametrize(
    ("memory", "asked"), [("5kB", {}), ("4kB", {"stages_per_device": 2, "recompute": "auto"})]
)
@pytest.mark.parametrize("system", ["timeprest", "pipedream", "pipedream-2bw", "zb-h1"])
def test_that_nothing_fits_is_known_before_anything_is_searched(monkeypatch, system, memory, asked):
    """By what weights, optimizer and activations take at the least; on each device in one stage or
    in several, whatever is computed again."""

    def never(*_):
        raise AssertionError("searched")

    # Of several stages less is known to be there at one time.
    profile, cluster = chain(8, parameters=1000, saved=100), uniform_cluster(4, memory)
    with monkeypatch.context() as patched:
        patched.setattr(solving, "run_parts", never)
        with pytest.raises(InfeasibleError, match=r"no plan fits.*: .* What would do: \d+ bytes"):
            solve(profile, cluster, system, **asked)
    # Where it isn't so, the search is what says it.
    assert solve(profile, uniform_cluster(4, "50kB"), system, **asked, effort=2000)


def test_more_devices_than_stages_may_do_with_replicas():
    profile, asked = chain(1, parameters=100, saved=1000), {"replicas": True}
    with pytest.raises(InfeasibleError) as info:
        solve(profile, uniform_cluster(1, "3kB"), "pipedream", **asked)
    assert solve(profile, uniform_cluster(2, "3kB"), "pipedream", **asked)
    assert "more such devices" not in str(info.value)


def test_more_devices_are_ruled_out_by_proof_alone(monkeypatch):
    def says(memory):
        with pytest.raises(InfeasibleError) as info:
            solve(chain(4, parameters=1000), uniform_cluster(1, memory), "gpipe")
        return str(info.value)

    # A layer with gradients and optimizer state takes 3 kB.
    assert "more such devices alone would not" in says("2kB")
    assert "or 4 such devices" in says("5kB")
    # That none is found proves nothing.
    least = fitting.Fitting.least
    monkeypatch.setattr(
        fitting.Fitting,
        "least",
        lambda self, *asked, room=None, **more: None if room else least(self, *asked, **more),
    )
    assert "such devices" not in says("5kB")


def test_a_search_ends_where_nothing_comes_near_to_fitting(monkeypatch):
    """Though no bound proves it: cuts aren't gone through one by one then. A bound knows of one
    micro-batch on each stage, where weight parts make it hold one for each stage."""

    def never(*_, **__):
        raise AssertionError("gone through")

    monkeypatch.setattr(solving, "run_parts", never)
    profile = chain(8, parameters=10, saved=1000)
    with pytest.raises(InfeasibleError, match="nothing comes near to fitting"):
        solve(profile, uniform_cluster(4, "3kB"), "zb-h1")


def test_what_piles_up_behind_one_cut_rules_out_no_other():
    """The two fast layers on a stage hold the least, but for messages that no gradients answer."""
    layers = [("n0", 0, 1e-3, 1e-3, 1000, []), ("n1", 0, 1e-3, 1e-3, 1000, [])]
    profile = row_of_layers([*layers, ("n2", 0, 9e-3, 9e-3, 1100, [])], 500)
    profile = without_gradients(profile, "n1")
    plan = solve(profile, uniform_cluster(2, "20kB"), micro_batches=1, stages=2)
    assert plan.stages[1].nodes == ("n1", "n2")


def test_replicas_of_so_many_stages_may_fit_where_one_device_does_not():
    profile = chain(2, parameters=0, saved=1000)
    plan = solve(profile, uniform_cluster(2, "4500B"), stages=1, replicas=True)
    assert plan.stages[0].devices == (0, 1)


@pytest.mark.parametrize("others", [(), ("n3",)])
def test_copies_of_shared_parameters_count_where_it_is_proven_that_nothing_fits(others):
    """A copy is held by each stage that has a later one of these layers and not the first."""
    ends = ("n0", *others, "n5")
    shared = SharedParameters(layers=ends, parameter_bytes=500)
    layers = [(f"n{k}", (k == 0) * 500, 1e-3, 1e-3, (k == 5) * 100, []) for k in range(6)]
    profile = msgspec.structs.replace(row_of_layers(layers), tied=(ends,), shared=(shared,))

    def search_with(memory):
        question = question_for(profile, uniform_cluster(3, memory), "gpipe", tied="split")
        return explore(question, SearchRequest(stages=3), lambda *_: None)

    names = tuple(layer.name for layer in profile.layers)

    def needed(cut, branch):
        parts = enumerate(pairwise((0, *cut, 6)))
        stages = [PlanStage(nodes=names[a:b], devices=(s,), in_flight=1) for s, (a, b) in parts]
        return evaluate(search.question, stages, branch.micro_batches).prediction.most_bytes

    search = search_with(None)
    least = min(starmap(needed, product(combinations(range(1, 6), 2), search.branches)))
    assert fitting.Fitting(search_with(least)).branches()
    assert not fitting.Fitting(search_with(least - 50)).branches()


def test_there_is_time_to_say_what_would_do_after_a_late_search():
    question = question_for(chain(4, parameters=1000), uniform_cluster(2, "5kB"), "gpipe")
    found = fitting.Fitting(explore(question, SearchRequest(), lambda *_: None))
    found.deadline = 0.0
    assert found.plan_at_hand() is None
    assert found.smallest_memory() is not None


def test_nothing_is_looked_for_after_a_late_search_that_is_one_of_several():
    """The time of those that follow it isn't over."""
    question = question_for(chain(4), uniform_cluster(2, "1GB"), "gpipe")

    def closest(explains):
        request = SearchRequest(time_limit_s=0.0, explains=explains)
        search = explore(question, request, lambda *_: None)
        return closest_plan(search, "time limit", request, None, apart=True)

    assert closest(explains=True)
    with pytest.raises(InfeasibleError, match=r"found \(time limit\)$"):
        closest(explains=False)


@pytest.mark.parametrize(("seconds", "looked_at"), [(0.0, [4]), (1e3, [4, 2, 1, 4])])
def test_plans_at_hand_are_looked_for_as_long_as_there_is_time(monkeypatch, seconds, looked_at):
    """First the one that holds least; then those in few micro-batches, which are soon simulated."""
    monkeypatch.setattr(fitting, "SOON_S", seconds)
    monkeypatch.setattr(fitting, "_MANY", 1)
    seen = []

    def noted(question, stages, micro_batches):
        seen.append(micro_batches)
        return evaluate(question, stages, micro_batches)

    monkeypatch.setattr(fitting, "evaluate", noted)
    question = question_for(chain(4), uniform_cluster(2, "1GB"), "gpipe")
    search = explore(question, SearchRequest(), lambda *_: None)
    assert fitting.Fitting(search).plan_at_hand()
    assert seen[:4] == looked_at
