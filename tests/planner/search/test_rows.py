"""Bounds of plans with a given device for each stage, and the cuts below a period."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from math import inf

import msgspec
import numpy as np
import pytest
from helpers.by_hand.profiles import chain, profile_by_hand, row_of_layers, without_gradients
from helpers.drawn.cases import examples
from helpers.drawn.lone_devices import some_alone
from helpers.drawn.questions import drawn_placed
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.evaluate import evaluate
from timeprest.planner.partition.chains import Chains, Links, Paths, Term
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.problem import SAME
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import StalenessBounds
from timeprest.planner.search.choices import Branch, Freedom
from timeprest.planner.search.relaxed import rows as rows_of_stages
from timeprest.planner.search.relaxed.relaxation import Relaxation
from timeprest.planner.search.relaxed.rows import Rows
from timeprest.profiles.profile import SharedParameters


@pytest.mark.choice(3)
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_no_plan_is_below_its_bound(first, linked, monkeypatch):
    """All plans of drawn questions, in all placements; and each is among the cuts below its
    period. In some, what is carried past stages isn't followed, as where there are many links."""
    seen = 0
    for seed in range(first, first + examples(100)):
        drawn = drawn_placed(seed, linked=linked)
        if drawn is None:
            continue
        monkeypatch.setattr(rows_of_stages, "_MOST_LINKS", inf if seed % 3 else 0)
        question, n = drawn.question, drawn.asked
        relaxation = Relaxation(question, Freedom(recompute=drawn.recompute)).with_several_stages()
        lattice = find_downsets(relaxation.problem(Branch(n)), 10_000, None)
        rows, position = Rows(relaxation, lattice, n), relaxation.graph.position
        along = Rows(relaxation, lattice, n, along_path=True)
        placed = {}
        for plan in drawn.plans:
            devices = tuple(stage.devices[0] for stage in plan.stages)
            if len(set(devices)) < len(devices) and not plan.over_limit(question.cluster):
                placed.setdefault(devices, []).append(plan)
        for devices, plans in placed.items():
            best_s = min(plan.prediction.period_s for plan in plans)
            for below_s in (best_s, 3 * best_s, inf):
                for each in (rows, along):
                    found = each.chains(devices).bound(0.1 * best_s, below_s, 60)
                    assert found.bound_s <= best_s * (1 + 1e-9), (seed, devices)
            most_s = max(plan.prediction.period_s for plan in plans)
            for bounded in (False, True):
                chains = rows.chains(devices)
                if bounded:
                    chains.bound(0.1 * best_s, most_s)
                cuts = {cut: load_s for load_s, cut in chains.below(most_s * SAME, lambda _: True)}
                for plan in plans:
                    masks = (sum(1 << position[name] for name in x.nodes) for x in plan.stages)
                    cut = (0, *accumulate(masks, int.__or__))
                    assert cuts[cut] <= plan.prediction.period_s * (1 + 1e-9), (seed, devices)
            seen += 1
    assert seen > 3


@settings(max_examples=examples(60))
@given(st.integers(0, 10**5))
def test_no_plan_with_a_device_for_each_stage_is_below_its_bound_along_the_path(seed):
    drawn = some_alone(seed)
    question = drawn.question
    relaxation, placed = Relaxation(question, drawn.freedom), {}
    for plan in drawn.fitting:
        devices = tuple(stage.devices[0] for stage in plan.stages)
        placed.setdefault((plan.micro_batches, devices), []).append(plan.prediction.period_s)
    for (n, devices), periods in placed.items():
        lattice = find_downsets(relaxation.problem(Branch(n)), 10_000, None)
        chains = Rows(relaxation, lattice, n, along_path=True).chains(devices)
        for below_s in (min(periods), inf):
            assert chains.bound(0.1 * min(periods), below_s).bound_s <= min(periods) * SAME


def rows_of(question, *, along_path=False, **freedom):
    """Of four micro-batches."""
    relaxation = Relaxation(question, Freedom(**freedom)).with_several_stages()
    lattice = find_downsets(relaxation.problem(Branch(4)), 10_000, None)
    return Rows(relaxation, lattice, 4, along_path=along_path)


def residual(sent):
    """Four layers in a row; the last one uses what the first one makes, too, of so many bytes."""
    layers = [(f"n{k}", 0, 1e-3, 2e-3, 0, []) for k in range(4)]
    edges = [("n0", "n1", "x", sent), ("n1", "n2", "y", 8), ("n2", "n3", "z", 8)]
    return profile_by_hand(layers, [*edges, ("n0", "n3", "x", sent), ("n3", "output", "o", 8)])


@pytest.mark.parametrize(
    ("devices", "messages"), [((0, 1, 0, 2), 1), ((0, 1, 2, 1), 2), ((0, 1, 2, 0), 1)]
)
def test_a_tensor_that_passes_stages_keeps_their_wires_busy(devices, messages):
    """From the first device to that of the last stage; with what the second stage gets, if that is
    there, too."""
    cluster = uniform_cluster(3, bandwidth="1MB/s", latency="0s")
    question = Question(residual(10_000), cluster, "timeprest", 4, 1.0)
    found = rows_of(question).chains(devices).bound(1e-2, inf)
    # Four micro-batches of a sample each.
    assert found.bound_s >= 4 * messages * 10e-3 * 0.99
    assert found.bound_s < 4 * (messages + 1) * 10e-3


def test_a_bound_ends_with_the_time():
    question = Question(chain(12), uniform_cluster(3), "timeprest", 4, 1.0)
    chains = rows_of(question).chains((0, 1, 2, 0, 1, 2))
    assert chains.bound(1e-2, inf, until=0.0).spent == 0
    assert chains.bound(1e-2, inf).spent > 0


def test_what_is_carried_isnt_followed_where_that_makes_many_links(monkeypatch):
    cluster = uniform_cluster(3, bandwidth="1MB/s", latency="0s")
    question = Question(residual(10_000), cluster, "timeprest", 4, 1.0)
    many = rows_of(question)
    monkeypatch.setattr(rows_of_stages, "_MOST_LINKS", len(many.links.begin) - 1)
    few = rows_of(question)
    assert len(few.links.begin) < len(many.links.begin)
    bounds_s = [rows.chains((0, 1, 0, 2)).bound(1e-2, inf).bound_s for rows in (few, many)]
    assert 0 < bounds_s[0] < bounds_s[1]


def asked(system, times, kept=0, memory=None, bandwidth="1000TB/s"):
    """Layers in a row, mini-batches of four samples."""
    layers = [(f"n{k}", 0, 1e-3 * f, 1e-3 * b, kept, []) for k, (f, b) in enumerate(times)]
    cluster = uniform_cluster(4, memory, bandwidth=bandwidth, latency="0s")
    return Question(row_of_layers(layers), cluster, system, 4, 1.0)


def bound_of(system, times, devices, *, along_path=False, kept=0, memory=None, low_s=1e-3):
    """In ms, of four micro-batches of one sample, each layer a stage; no messages take time.

    Args:
        kept: bytes by each layer for each sample.
        memory: of each device.
        low_s: no period is shorter.
    """
    question = asked(system, times, kept, memory)
    rows = rows_of(question, along_path=along_path)
    return 1e3 * rows.chains(devices).bound(low_s, inf).bound_s


def with_workspace(profile, nbytes):
    """Of each layer so many bytes of working set for each sample."""
    layers = (
        msgspec.structs.replace(
            layer,
            measurements=tuple(
                msgspec.structs.replace(m, workspace_bytes=nbytes * m.micro_batch)
                for m in layer.measurements
            ),
        )
        for layer in profile.layers
    )
    return msgspec.structs.replace(profile, layers=tuple(layers))


@pytest.mark.parametrize("along_path", [False, True])
def test_stages_of_one_device_keep_as_many_whole_mini_batches_as_they_may(along_path):
    """Alone on its device, a stage of PipeMare keeps one micro-batch of a mini-batch in flight."""
    question, places = asked("pipemare", [(1, 2)] * 4), (0, 1, 0, 1)
    one = StalenessBounds(max_in_flight=1)
    rows = rows_of(question, along_path=along_path, staleness=one)
    stages = [PlanStage(nodes=(f"n{s}",), devices=(d,), in_flight=1) for s, d in enumerate(places)]
    period_s = evaluate(question, stages, 4).prediction.period_s
    assert rows.chains(places).bound(1e-3, inf).bound_s <= period_s * SAME
    assert rows.chains(range(4)).bound(1e-3, inf).bound_s >= 4 * 12e-3 * 0.99


@pytest.mark.parametrize("along_path", [False, True])
@pytest.mark.parametrize(("system", "most"), [("gpipe", 8), ("interleaved-1f1b", 5)])
def test_a_device_holds_all_that_its_schedule_keeps_at_one_time(system, most, along_path):
    """Of two layers and four micro-batches: all, or the first two of each, and one more."""
    times = [(1, 2), (3, 4), (5, 6), (2, 1)]
    known = {"along_path": along_path, "kept": 1_000_000}
    # Whatever fits takes less than a second; what doesn't has no period.
    for memory, takes in ((most + 0.1, pytest.approx(1e3)), (most - 0.1, pytest.approx(64e3))):
        limit = f"{memory}MB"
        found = bound_of(system, times, (0, 1, 0, 1), memory=limit, low_s=1.0, **known)
        assert found == takes


@pytest.mark.parametrize("along_path", [False, True])
@pytest.mark.parametrize(
    ("system", "known"), [("gpipe", 0.96), ("interleaved-1f1b", 0.9), ("timeprest", 0.95)]
)
def test_devices_hold_messages_gradients_and_a_working_set_besides(system, known, along_path):
    """With a little less memory than the only cut into four stages takes, it is ruled out."""
    layers, devices = [(f"n{k}", 100_000, 1e-3, 2e-3, 500_000, []) for k in range(4)], (0, 1, 0, 1)
    profile = with_workspace(row_of_layers(layers, 200_000), 300_000)
    stages = [PlanStage(nodes=(f"n{k}",), devices=(d,), in_flight=1) for k, d in enumerate(devices)]

    def question(memory=None):
        cluster = uniform_cluster(2, memory, bandwidth="1000TB/s", latency="0s")
        return Question(profile, cluster, system, 4, 1.0)

    needed = max(x.memory_bytes for x in evaluate(question(), stages, 4).prediction.devices)
    for share, fits in ((1.0, True), (known, False)):
        rows = rows_of(question(int(needed * share)), along_path=along_path)
        # What doesn't fit has no period.
        assert (rows.chains(devices).bound(1.0, inf).bound_s < 10.0) is fits


def test_where_stages_dont_wait_for_each_other_one_may_be_done_before_another_begins():
    """Then all forwards needn't come first on a device with both."""
    layers = [("n0", 0, 1e-3, 2e-3, 700_000, []), ("n1", 0, 1e-3, 2e-3, 200_000, [])]
    profile = without_gradients(row_of_layers(layers), "n0")
    stages = [PlanStage(nodes=(f"n{k}",), devices=(0,), in_flight=1) for k in range(2)]
    roomy = Question(profile, uniform_cluster(1, None, "1MB/s"), "gpipe", 4, 1.0)
    needed = evaluate(roomy, stages, 4).prediction.devices[0].memory_bytes
    assert needed < 4 * 900_000
    tight = replace(roomy, cluster=uniform_cluster(1, needed, "1MB/s"))
    assert rows_of(tight).chains((0, 0)).bound(1e-3, inf).bound_s < 1.0


def test_all_forwards_of_a_device_come_before_the_last_ones_way_back():
    """4 · (5 + 5) of its forwards; then the last stage's forward and all backwards of one."""
    times = [(5, 0.5), (1, 1), (5, 0.5), (1, 4)]
    assert bound_of("pipedream-flush", times, (0, 1, 0, 2)) == pytest.approx(40 + 1 + 6, rel=2e-3)


def test_where_forwards_come_first_a_device_runs_its_backwards_after_their_way_to_the_end():
    """4 · (5 + 1) of its forwards, the last stage's two, 4 · (6 + 1) of its backwards."""
    times = [(5, 1), (1, 1), (1, 6), (1, 4)]
    assert bound_of("gpipe", times, (0, 1, 0, 2)) == pytest.approx(24 + 5 + 28, rel=2e-3)


@pytest.mark.parametrize("along_path", [False, True])
@pytest.mark.parametrize("bandwidth", ["1000TB/s", "8kB/s"])
def test_in_a_given_sequence_no_plan_is_below_its_longest_path(bandwidth, along_path):
    """Of one cut that is its period, with messages of 1 ms, too; by sums alone less is known."""
    times = [(1, 2), (3, 4), (5, 6), (2, 1), (4, 3), (2, 5)]
    question, devices = asked("interleaved-1f1b", times, bandwidth=bandwidth), (0, 1, 2, 0, 1, 2)
    stages = [PlanStage(nodes=(f"n{k}",), devices=(d,), in_flight=1) for k, d in enumerate(devices)]
    period_s = evaluate(question, stages, 4).prediction.period_s
    rows = rows_of(question, along_path=along_path)
    found = rows.chains(devices).bound(1e-3, 1.5 * period_s)
    assert found.bound_s == pytest.approx(period_s, rel=1e-3)
    # Where no plan is known no path is.
    assert rows.chains(devices).bound(1e-3, inf).bound_s < 0.97 * period_s


@pytest.mark.parametrize("along_path", [False, True])
@pytest.mark.parametrize(
    ("system", "devices", "every", "besides_s"),
    [
        ("interleaved-1f1b", (0, 1, 0, 1), 1, 10e-3),
        ("gpipe", (0, 1, 0, 1), 1, 10e-3),
        ("gpipe", (0, 1, 0, 1), 2, 5e-3),
        ("gpipe", (0, 1, 1, 0), 1, 0.0),
    ],
)
def test_copies_of_tied_parameters_are_summed(system, devices, every, besides_s, along_path):
    """Before each update; the first stage and the last have one copy in a V."""
    times, ends = [(1, 2), (3, 4), (5, 6), (2, 1)], ("n0", "n3")
    question = replace(asked(system, times, bandwidth="100kB/s"), update_every=every)
    shared = SharedParameters(layers=ends, parameter_bytes=1000)
    profile = msgspec.structs.replace(question.profile, tied=(ends,), shared=(shared,))
    tied = replace(question, profile=profile, tied="split")
    stages = [PlanStage(nodes=(f"n{k}",), devices=(d,), in_flight=1) for k, d in enumerate(devices)]
    period_s = evaluate(tied, stages, 4).prediction.period_s
    bounds_s = []
    for each in (question, tied):
        rows = rows_of(each, along_path=along_path)
        bounds_s.append(rows.chains(devices).bound(1e-3, 2 * period_s).bound_s)
    assert bounds_s[1] - bounds_s[0] == pytest.approx(besides_s, abs=1e-4)
    assert bounds_s[1] <= period_s * SAME


def test_paths_of_a_shorter_period_are_forgotten_for_a_longer_one():
    """Of a stage of 1 s, whose path is the shorter the longer the period is that it holds below."""
    links = Links(np.array([0]), np.array([1]), np.array([[1.0], [0.0]]), (0, 1), 1)
    paths = Paths(lambda _, period_s: np.array([[4.0 / period_s, 0.0]]), apart=1, spent=1)
    chains = Chains(links, [Term(np.array([[1.0, 0.0]]))], [np.array([True])], paths)
    assert chains.bound(0.5, 1.5).bound_s == pytest.approx(1.5)
    assert chains.bound(0.5, 3.0).bound_s == pytest.approx(4 / 3, rel=2e-3)
