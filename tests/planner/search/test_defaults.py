"""What wasn't said is what the best answer has, and the plan says so."""

from __future__ import annotations

import re
from unittest.mock import ANY

import msgspec
import pytest
from helpers.by_hand.profiles import chain, row_of_layers
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.question import Question
from timeprest.planner.search import default_recompute, defaults
from timeprest.planner.search.answer.recheck import recheck, was_edited
from timeprest.planner.search.branching import SearchRequest
from timeprest.planner.search.defaults import best_plan
from timeprest.planner.search.effort import placed_operations
from timeprest.planner.search.parts import LEAST_GAIN, quick_effort
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import InfeasibleError, PlanError
from timeprest.profiles.profile import SharedParameters

FAST = {"bandwidth": "1TB/s", "latency": "0s"}


def tied_chain(count):
    """A chain whose first and last layer share their parameters."""
    ends = ("n0", f"n{count - 1}")
    shared = SharedParameters(layers=ends, parameter_bytes=100)
    return msgspec.structs.replace(chain(count), tied=(ends,), shared=(shared,))


def chosen(plan):
    return () if plan.solver.chosen is msgspec.UNSET else plan.solver.chosen


@pytest.mark.parametrize("system", ["pipedream-flush", "gpipe"])
def test_shared_parameters_are_split_where_that_is_faster(system):
    """In systems that flush; a plan without copies is one of those that mustn't have any."""
    profile, cluster = tied_chain(4), uniform_cluster(2, **FAST)
    plan = best_plan(profile, cluster, system)
    together = solve(profile, cluster, system)
    assert plan.tied == "split"
    assert len(plan.stages) == 2
    assert len(together.stages) == 1
    assert plan.predicted.period_s < together.predicted.period_s
    (line,) = chosen(plan)
    assert line.startswith("--tied split")
    assert "where --tied together has 48 ms" in line
    # Slow links: a stage for all is faster, with no copies.
    slow = uniform_cluster(2, bandwidth="1kB/s")
    plan = best_plan(profile, slow, system)
    assert plan.tied == "together"
    assert len(plan.stages) == 1
    assert not chosen(plan)
    assert plan.solver.optimal
    assert not was_edited(plan)
    assert not recheck(plan, profile).changes
    assert best_plan(profile, cluster, system, tied="together").tied == "together"


def test_where_nothing_flushes_a_v_keeps_them_on_one_device():
    profile, cluster = tied_chain(4), uniform_cluster(2, **FAST)
    plan = best_plan(profile, cluster, "pipedream-2bw")
    together = solve(profile, cluster, "pipedream-2bw")
    assert plan.stages[0].devices == plan.stages[-1].devices
    assert len(plan.stages) > 1
    assert plan.predicted.period_s <= together.predicted.period_s * (1 - LEAST_GAIN)
    (line,) = chosen(plan)
    assert "--placement v" in line
    assert "--tied together has 48 ms" in line
    assert plan.solver.bound_s <= together.solver.bound_s
    assert not was_edited(plan)
    assert not recheck(plan, profile).changes
    # It says what both searches took.
    placed = solve(profile, cluster, "pipedream-2bw", stages_per_device=2, placement="v")
    assert plan.solver.plans_tried > placed.solver.plans_tried
    # What was said stays.
    said = {"tied": "together", "stages_per_device": 1}
    assert len(best_plan(profile, cluster, "pipedream-2bw", **said).stages) == 1
    assert len(best_plan(profile, cluster, "pipedream-2bw", stages_per_device=1).stages) == 1
    with pytest.raises(PlanError, match="1 stage at most"):
        best_plan(profile, cluster, "pipedream-2bw", stages=2)


@pytest.mark.parametrize("system", ["interleaved-1f1b", "zb-v"])
def test_one_stage_on_each_device_is_no_choice_of_systems_that_have_several(system):
    profile, cluster = chain(8), uniform_cluster(2, **FAST)
    with pytest.raises(PlanError, match=f"{system} runs several stages on each device"):
        best_plan(profile, cluster, system, stages_per_device=1)
    # One stage on one device is a plan of theirs.
    assert len(best_plan(profile, cluster, system, stages_per_device=1, stages=1).stages) == 1
    assert len(best_plan(profile, cluster, system).stages) == 4


def test_a_model_without_shared_parameters_is_planned_once(monkeypatch):
    given = []
    monkeypatch.setattr(
        default_recompute,
        "solve",
        lambda *asked, **more: given.append(more["tied"]) or solve(*asked, **more),
    )
    plan = best_plan(chain(4), uniform_cluster(2, **FAST), "gpipe", stages_per_device=1)
    assert given == ["together"]
    assert not chosen(plan)


@pytest.mark.parametrize("system", ["gpipe", "pipedream-2bw"])
def test_activations_are_computed_again_where_nothing_fits_otherwise(monkeypatch, system):
    profile, tight = chain(8, parameters=100, saved=1000), uniform_cluster(2, "6.8kB")
    with pytest.raises(InfeasibleError):
        solve(profile, tight, system)
    one = {"stages_per_device": 1}
    plan = best_plan(profile, tight, system, **one)
    assert any(stage.recompute for stage in plan.stages)
    assert (
        plan.predicted.period_s
        == solve(profile, tight, system, recompute="auto").predicted.period_s
    )
    (line,) = chosen(plan)
    assert line.startswith("--recompute auto")
    assert line.endswith("--recompute off asks for none")
    # Where it fits without, none is; and nothing is searched twice.
    given = []
    monkeypatch.setattr(
        default_recompute,
        "solve",
        lambda *asked, **more: given.append(more["recompute"]) or solve(*asked, **more),
    )
    plan = best_plan(profile, uniform_cluster(2, "40kB"), system, **one)
    assert given == ["off"]
    assert not chosen(plan)
    with pytest.raises(InfeasibleError, match=r"no plan fits: .* --recompute auto"):
        best_plan(profile, tight, system, recompute="off")
    with pytest.raises(InfeasibleError, match="with --recompute auto neither"):
        best_plan(profile, uniform_cluster(2, "1kB"), system)


@pytest.mark.parametrize(("stopped", "last"), [("time limit", "auto"), ("effort", "off")])
def test_a_look_that_time_ended_says_little_of_what_recomputing_gains(monkeypatch, stopped, last):
    """As shorter a plan as that is by little may be by much. What was found is where it goes on."""
    profile, cluster, given = chain(8, saved=1000), uniform_cluster(2, "20kB"), []

    def found(*asked, recompute, incumbent=None, **more):
        given.append((recompute, incumbent is not None))
        plan = solve(*asked, recompute="off", **more)
        period_s = plan.predicted.period_s * (0.98 if "stages" in more else 1.0)
        report = msgspec.structs.replace(plan.solver, optimal=False, stopped=stopped)
        predicted = msgspec.structs.replace(plan.predicted, period_s=period_s)
        return msgspec.structs.replace(plan, predicted=predicted, solver=report)

    monkeypatch.setattr(default_recompute, "solve", found)
    best_plan(profile, cluster, "gpipe", stages_per_device=1)
    assert given == [("off", False), ("auto", True), (last, True)]


def test_what_is_soon_found_where_devices_have_several_stages_is_of_some_plans():
    question = Question(chain(8), uniform_cluster(2), "timeprest", 8, 0.0)
    one, two = (
        quick_effort(question, SearchRequest(stages_per_device=v, micro_batches=8)) for v in (1, 2)
    )
    assert one < two
    assert two >= 60 * placed_operations(question.system, 4, 8)
    assert quick_effort(question, SearchRequest(stages_per_device=2, effort=10)) == 10


def test_several_stages_on_each_device_fit_without():
    """In a system that places them itself, though one stage on each device, with all layers, would
    need more; that some of them compute again is for a shorter period alone."""
    profile, cluster = chain(8, parameters=100, saved=1000), uniform_cluster(2, "10kB", **FAST)
    plan = best_plan(profile, cluster, "interleaved-1f1b")
    without = best_plan(profile, cluster, "interleaved-1f1b", recompute="off")
    assert len(plan.stages) == len(without.stages) == 4
    assert plan.predicted.period_s < 0.9 * without.predicted.period_s
    assert "as plans soon found have 63 ms without" in chosen(plan)[0]


def test_activations_are_computed_again_where_memory_makes_plans_slow_otherwise():
    """Of stages that keep everything, few mini-batches may be in flight."""
    profile, tight = chain(8, parameters=1, saved=1000), uniform_cluster(4, "9kB", **FAST)
    asked = {"stages_per_device": 1, "replicas": False, "stages": None, "micro_batches": None}
    without = best_plan(profile, tight, "pipedream", recompute="off", **asked)
    assert not any(stage.recompute for stage in without.stages)
    plan = best_plan(profile, tight, "pipedream", **asked)
    best = solve(profile, tight, "pipedream", recompute="auto", replicas=False)
    assert plan.predicted.period_s == best.predicted.period_s
    assert plan.predicted.period_s < 0.95 * without.predicted.period_s
    (line,) = chosen(plan)
    assert re.match(r"--recompute auto, as plans soon found have \S+ \S+ without; ", line)


def test_ctrl_c_leaves_a_plan_that_recomputes_with_a_true_bound(monkeypatch):
    """That of as many stages and micro-batches alone may be above what others have."""
    profile, tight = chain(8, parameters=1, saved=1000), uniform_cluster(4, "9kB", **FAST)
    asked, found = {"stages_per_device": 1, "replicas": False}, []

    def stopped(*given, **more):
        if len(found) == 2:
            raise KeyboardInterrupt
        found.append(solve(*given, **more))
        return found[-1]

    monkeypatch.setattr(default_recompute, "solve", stopped)
    plan = best_plan(profile, tight, "pipedream", **asked)
    assert plan.stages == found[1].stages
    assert not plan.solver.optimal
    best = solve(profile, tight, "pipedream", recompute="auto", replicas=False)
    assert plan.solver.bound_s <= best.predicted.period_s
    assert chosen(plan)[0].startswith("--recompute auto")


def test_devices_with_several_stages_compute_again_only_where_they_must():
    profile, several = chain(8, parameters=100, saved=1000), {"stages_per_device": 2}
    several["effort"] = 2000
    plan = best_plan(profile, uniform_cluster(2, "9kB"), "gpipe", **several)
    assert any(stage.recompute for stage in plan.stages)
    assert len(plan.stages) > 2
    plan = best_plan(profile, uniform_cluster(2, "90kB"), "gpipe", **several)
    assert not any(stage.recompute for stage in plan.stages)


def test_two_stages_on_each_device_where_that_is_soon_found_to_pay(monkeypatch):
    """Three layers halve on two devices where these have several stages, in a small question."""
    layers = [(f"n{k}", 100, 1e-3 * w, 2e-3 * w, 10, []) for k, w in enumerate((1, 2, 1))]
    profile, cluster = row_of_layers(layers, 16, 4), uniform_cluster(2, **FAST)
    plan, one = best_plan(profile, cluster), best_plan(profile, cluster, stages_per_device=1)
    assert plan.placement
    assert plan.predicted.period_s <= one.predicted.period_s * (1 - LEAST_GAIN)
    assert plan.solver.bound_s <= one.solver.bound_s
    (line,) = chosen(plan)
    assert line.startswith("--stages-per-device 2")
    assert "where --stages-per-device 1 has 36 ms" in line
    assert not was_edited(plan)
    assert not recheck(plan, profile).changes
    for said in ({"stages": 2}, {"placement": "straight"}, {"pins": (("n0", 0),)}):
        assert not best_plan(profile, cluster, **said).placement
    monkeypatch.setattr(defaults, "_SMALL", 0)
    assert best_plan(profile, cluster) == msgspec.structs.replace(one, solver=ANY)


@pytest.mark.parametrize("system", ["gpipe", "pipedream-2bw"])
def test_ctrl_c_leaves_what_was_found_before(monkeypatch, system):
    profile, cluster, begun = tied_chain(4), uniform_cluster(2, **FAST), []

    def stopped(*asked, **more):
        begun.append(more["tied"])
        if len(begun) > 1:
            raise KeyboardInterrupt
        return solve(*asked, **more)

    monkeypatch.setattr(default_recompute, "solve", stopped)
    plan = best_plan(profile, cluster, system)
    assert plan.tied == begun[0]
    assert len(begun) == 2
    monkeypatch.setattr(default_recompute, "solve", lambda *asked, **more: stopped(*asked, **more))
    with pytest.raises(KeyboardInterrupt):
        best_plan(profile, cluster, system)
