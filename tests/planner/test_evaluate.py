"""Evaluating plans: periods and bytes by hand, with replicas, recomputation and every link."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import msgspec
import pytest
from helpers.by_hand.profiles import chain, drawn_profiles, profile_by_hand
from helpers.by_hand.unit_pipelines import unit_pipeline
from helpers.drawn.cases import examples
from helpers.drawn.pipelines import ALL
from helpers.drawn.plans import evaluated
from helpers.plans import REPORT, lone_stages
from helpers.stage_costs import stage_cost, transfers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from timeprest.planner import peak_memory
from timeprest.planner.cluster.cluster import Device, uniform_cluster
from timeprest.planner.costs import memory
from timeprest.planner.costs.memory import HoldingsWalk, StageBytes, holdings
from timeprest.planner.costs.stage_costs import Costs
from timeprest.planner.evaluate import evaluate, make_plan
from timeprest.planner.plan import PlanStage, check_plan, pipeline_of
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import limit_ranges, make_schedule
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.search.answer.recheck import recheck, signed
from timeprest.planner.simulator.timeline import Event, simulate
from timeprest.planner.systems.operations import Op
from timeprest.planner.systems.variants import VARIANTS
from timeprest.planner.systems.versions import entry_versions
from timeprest.profiles.errors import PlanError, ScheduleError

FAST = {"bandwidth": "1000TB/s", "latency": "0s"}


def two_layers(first_s=4e-3, second_s=1e-3, parameters=0):
    """Forward and backward of a layer take as long, per sample."""
    layers = [
        ("n0", parameters, first_s, first_s, 0, []),
        ("n1", parameters, second_s, second_s, 0, []),
    ]
    return profile_by_hand(layers, [("n0", "n1", "t0", 8), ("n1", "output", "t1", 8)])


def stage(names, devices, limit=1, *, recompute=False):
    return PlanStage(
        nodes=tuple(names), devices=tuple(devices), in_flight=limit, recompute=recompute
    )


def question(profile, cluster, variant, mini_batch=4, factor=1.0):
    return Question(profile, cluster, variant, mini_batch, factor)


# Replicas ----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ALL)
def test_one_stage_on_two_devices_is_data_parallelism(variant):
    """N/2 micro-batches each, an all-reduce, an update; or half of every mini-batch's samples."""
    profile = chain(1, parameters=1000)
    optimizer = msgspec.structs.replace(profile.optimizer, update_fixed_s=5e-3)
    profile = msgspec.structs.replace(profile, optimizer=optimizer)
    cluster = uniform_cluster(2, bandwidth="1MB/s", latency="1ms")
    whole = VARIANTS[variant].whole_mini_batches
    found = evaluate(
        question(profile, cluster, variant), [stage(["n0"], [0, 1])], 1 if whole else 4
    )
    summing_s = 2 * (1e-3 + 1e-3 / 2)
    assert cluster.all_reduce_s((0, 1), 1000) == pytest.approx(summing_s)
    predicted = found.prediction.stages[0]
    assert predicted.all_reduce_s == pytest.approx(summing_s)
    assert found.prediction.period_s == pytest.approx(2 * 3e-3 + summing_s + 5e-3)
    # A micro-batch of one sample four times over, or half a mini-batch of four at once.
    assert predicted.forward_s == pytest.approx(2e-3 if whole else 1e-3)
    assert predicted.idle_share == pytest.approx(0)


@pytest.mark.parametrize("variant", ["timeprest", "v-timeprest", "i-timeprest", "pipedream-2bw"])
def test_replicating_the_bottleneck_halves_it(variant):
    limits = [most for _, most in limit_ranges(VARIANTS[variant], 2)]
    asked = question(two_layers(), uniform_cluster(3, **FAST), variant)
    alone = evaluate(asked, [stage(["n0"], [0], limits[0]), stage(["n1"], [1], limits[1])], 4)
    shared = evaluate(asked, [stage(["n0"], [0, 2], limits[0]), stage(["n1"], [1], limits[1])], 4)
    assert alone.prediction.period_s == pytest.approx(4 * 8e-3)
    assert shared.prediction.period_s == pytest.approx(2 * 8e-3)


def test_replicas_of_whole_mini_batches_run_half_of_each():
    asked = question(two_layers(), uniform_cluster(3, **FAST), "pipedream")
    found = evaluate(asked, [stage(["n0"], [0, 2], 2), stage(["n1"], [1], 1)], 1)
    first, second = found.prediction.stages
    assert (first.forward_s, second.forward_s) == (pytest.approx(8e-3), pytest.approx(4e-3))
    assert found.prediction.period_s == pytest.approx(16e-3)
    # Its part of a message is half a mini-batch's: two receives posted by stage 1, in whole.
    assert found.transfers[0].nbytes == 32
    assert first.memory.boundary_bytes == 16 + 16 + 16
    assert second.memory.boundary_bytes == 2 * 32 + 32 + 32


def test_the_slowest_replica_counts():
    devices = [Device(name=f"d{k}", speed=speed) for k, speed in enumerate([1.0, 2.0, 2.0])]
    cluster = msgspec.structs.replace(uniform_cluster(3, **FAST), devices=tuple(devices))
    asked = question(chain(1), cluster, "gpipe")
    periods = [
        evaluate(asked, [stage(["n0"], mine)], 4).prediction.period_s for mine in ([0, 1], [1, 2])
    ]
    assert periods == [pytest.approx(6e-3), pytest.approx(3e-3)]


def test_a_stage_is_held_to_the_memory_of_its_own_devices():
    cluster = uniform_cluster(3, **FAST)
    small = msgspec.structs.replace(cluster.devices[2], memory_bytes=1)
    cluster = msgspec.structs.replace(cluster, devices=(*cluster.devices[:2], small))
    asked = question(chain(2), cluster, "gpipe")
    fits = evaluate(asked, [stage(["n0"], [0]), stage(["n1"], [1])], 4)
    assert fits.over_limit(cluster) == []
    over = evaluate(asked, [stage(["n0"], [0, 2]), stage(["n1"], [1])], 4)
    assert over.over_limit(cluster) == [(0, over.prediction.stages[0].memory_bytes - 1)]


# Recomputation -------------------------------------------------------------------------------


def recomputed(recompute):
    stages = [stage([f"n{s}"], [s], recompute=recompute) for s in range(2)]
    return evaluate(question(chain(2), uniform_cluster(2, **FAST), "gpipe"), stages, 2)


def test_recomputation_by_hand():
    """gpipe, two equal stages, N = 2: (N + S − 1)·(f + b), where b is f more."""
    plain, again = recomputed(False), recomputed(True)
    assert plain.prediction.period_s == pytest.approx(3 * (2e-3 + 4e-3))
    assert again.prediction.period_s == pytest.approx(3 * (2e-3 + 6e-3))
    first, second = again.prediction.stages
    # Layers keep 10 bytes per sample; messages have 16; micro-batches have 2 samples.
    assert [s.memory.activations_bytes for s in plain.prediction.stages] == [2 * 20, 2 * 20]
    assert first.memory.activations_bytes == 20
    assert second.memory.activations_bytes == 2 * 32 + 20
    # Parameters, gradients and optimizer state 100 each; two receives posted, one gradient that
    # awaits its sending and one that is made.
    assert second.memory_bytes == 300 + 84 + 2 * 32 + 32 + 32
    # One activation that awaits its sending, one posted receive, one gradient at hand.
    assert first.memory_bytes == 300 + 20 + 32 + 32 + 32


def test_recomputation_of_a_whole_mini_batch():
    """nF1B's backward takes all micro-batches: all their activations are rebuilt."""
    asked = question(chain(2), uniform_cluster(2, **FAST), "v-timeprest")
    stages = [stage(["n0"], [0], 1), stage(["n1"], [1], 1, recompute=True)]
    predicted = evaluate(asked, stages, 4).prediction.stages[1]
    assert predicted.micro_batches_kept == 4
    assert predicted.memory.activations_bytes == 4 * 16 + 4 * 10
    assert predicted.backward_s == pytest.approx(1e-3 + 2e-3)


# Micro-batches --------------------------------------------------------------------------------


def test_uneven_micro_batches_cost_as_the_largest():
    asked = question(chain(1), uniform_cluster(1), "gpipe")
    found = evaluate(asked, lone_stages([["n0"]], [1]), 3)
    assert found.prediction.period_s == pytest.approx(3 * 2 * 3e-3)
    plan = make_plan(asked, found, REPORT)
    assert (plan.mini_batch, plan.micro_batches, plan.micro_batch) == (4, 3, 2)
    assert recheck(plan, asked.profile).changes == ()


@pytest.mark.parametrize(
    ("variant", "devices", "limits", "n", "message"),
    [
        ("pipedream-2bw", [[0], [1]], [2, 1], 1, "one for each of the 2 stages at least, not 1"),
        ("spectrain", [[0], [1]], [2, 1], 2, "whole mini-batches"),
        ("gpipe", [[0], [1]], [1, 1], 5, "more than the mini-batch's 4 samples"),
        ("gpipe", [[0], [1, 2, 3]], [1, 1], 4, "3 replicas don't divide micro_batches 4"),
        ("pipedream", [[0], [1, 2, 3]], [2, 1], 1, "3 replicas don't divide mini_batch 4"),
        ("gpipe", [[0], [1]], [2, 1], 4, r"stages\[0\]\.in_flight: must be 1 in gpipe"),
        ("pipedream-2bw", [[0], [1]], [1, 1], 4, r"stages\[0\]\.in_flight: must be 2"),
        ("timeprest", [[0], [1]], [2, 2], 4, "must be 1 on the last stage"),
        ("timeprest", [[0], [1]], [1, 2], 4, "must not rise"),
    ],
)
def test_what_a_system_cant_have_is_named(variant, devices, limits, n, message):
    asked = question(chain(2), uniform_cluster(4), variant)
    stages = [stage([f"n{s}"], mine, limits[s]) for s, mine in enumerate(devices)]
    with pytest.raises(PlanError, match=message):
        evaluate(asked, stages, n)


# Flush systems ---------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["gpipe", "pipedream-flush"])
@pytest.mark.parametrize(("stages", "n"), [(1, 4), (2, 4), (3, 2), (4, 4)])
def test_a_flush_system_pays_for_its_bubble(variant, stages, n):
    asked = question(chain(stages), uniform_cluster(stages, **FAST), variant)
    found = evaluate(asked, lone_stages([[f"n{s}"] for s in range(stages)], [1] * stages), n)
    each = 3e-3 * 4 / n
    assert found.prediction.period_s == pytest.approx((n + stages - 1) * each)
    for predicted in found.prediction.stages:
        assert predicted.idle_share == pytest.approx((stages - 1) / (n + stages - 1))
        assert (predicted.versions_held, predicted.version_difference) == (1, 0)


# Memory ----------------------------------------------------------------------------------------


def test_versions_and_scratch_copies_are_counted():
    """3 stages of 100 bytes of parameters; where the peak is, and how many older versions."""
    held = {}
    for name in (
        "pipedream",
        "pipedream-vertical-sync",
        "pipedream-unstashed",
        "spectrain",
        "pipeoptim",
        "timeprest",
        "timeprest-stashed",
        "v-timeprest",
        "pipemare",
    ):
        limits = [min(most, 3 - s) for s, (_, most) in enumerate(limit_ranges(VARIANTS[name], 3))]
        asked = question(chain(3), uniform_cluster(3, **FAST), name)
        found = evaluate(asked, lone_stages([["n0"], ["n1"], ["n2"]], limits), 1)
        held[name] = [s.memory.versions_bytes for s in found.prediction.stages]
    assert held["pipedream"] == [200, 100, 0]
    assert held["pipedream-vertical-sync"] == [200, 200, 200]
    # Also on the last stage: to the end of the round trip it makes one update more.
    assert held["spectrain"] == [100, 100, 100]
    # To its own backward it makes none.
    assert held["pipeoptim"] == [100, 100, 0]
    # Versions that stage 0 had wait on later stages for the forwards that use them, and are gone
    # when most else is there; with a stash all stages keep them.
    assert held["timeprest"] == held["pipedream-unstashed"] == [0, 0, 100]
    assert held["timeprest-stashed"] == [200, 200, 200]
    assert held["v-timeprest"] == [0, 0, 0]
    # The mean change of the weights, and what is corrected by it.
    assert held["pipemare"] == [200, 200, 0]


@pytest.mark.parametrize(
    ("variant", "delays", "differences"),
    [
        ("gpipe", [0, 0, 0], [0, 0, 0]),
        ("pipedream", [2, 1, 0], [0, 0, 0]),
        ("pipedream-vertical-sync", [2, 2, 2], [0, 0, 0]),
        ("pipedream-2bw", [1, 1, 1], [0, 0, 0]),
        ("pipedream-unstashed", [2, 2, 2], [2, 2, 2]),
        ("spectrain", [2, 1, 0], [2, 1, 0]),
    ],
)
def test_a_stash_hides_no_delay(variant, delays, differences):
    """Where backwards take the forward's weights there is no difference, but gradients are late."""
    limits = [min(most, 3 - s) for s, (_, most) in enumerate(limit_ranges(VARIANTS[variant], 3))]
    asked = question(chain(3), uniform_cluster(3, **FAST), variant)
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    found = evaluate(asked, lone_stages([["n0"], ["n1"], ["n2"]], limits), n).prediction
    assert [stage.delay for stage in found.stages] == delays
    assert [stage.version_difference for stage in found.stages] == differences


def test_a_difference_that_is_there_once_an_update_is_seen():
    """Of four mini-batches one is between its passes at the update. Over a slow link all is later
    by something else each time, so that nothing repeats soon."""
    layers = [("n0", 6, 6e-3, 12e-3, 0, []), ("n1", 12, 15e-3, 11e-3, 0, [])]
    profile = profile_by_hand(layers, [("n0", "n1", "t", 34), ("n1", "output", "y", 1)], sizes=(1,))
    optimizer = msgspec.structs.replace(profile.optimizer, update_s_per_byte=1e-4)
    profile = msgspec.structs.replace(profile, optimizer=optimizer)
    cluster = uniform_cluster(2, bandwidth="1kB/s", latency="0s")
    question = Question(profile, cluster, "pipedream-unstashed", 1, 1.0, 4)
    found = evaluate(question, lone_stages([["n0"], ["n1"]], [2, 1]), 1)
    assert not steady_state(found.pipeline).cycle
    assert [stage.version_difference for stage in found.prediction.stages] == [1, 1]


AMOUNTS = st.integers(0, 1000)


@given(
    st.sampled_from(ALL),
    st.integers(1, 4),
    st.integers(1, 2),
    st.builds(StageBytes, **dict.fromkeys(StageBytes.__annotations__, AMOUNTS)),
    st.data(),
)
def test_memory_over_time_peaks_where_the_walk_says(variant, stages, times_, needs, data):
    system = VARIANTS[variant]
    n = 1 if system.whole_mini_batches else times_ * stages
    limits = [most for _, most in limit_ranges(system, stages)]
    asked = question(chain(stages), uniform_cluster(stages, **FAST), variant, n)
    pipeline = evaluate(asked, lone_stages([[f"n{s}"] for s in range(stages)], limits), n).pipeline
    order = make_schedule(pipeline, 3 * stages)
    entries = entry_versions(pipeline.variant, pipeline.micro_batches, order[0])
    timeline = simulate(pipeline, order)
    s = data.draw(st.integers(0, stages - 1))
    walk = HoldingsWalk(system, n, 1, entries)
    steps = list(memory_steps(walk, timeline.stages[s], needs))
    kinds = bytes("FBUW".index(op.kind) for op in order[s])
    peak = needs.peak(holdings(system, n, 1, kinds, entries))
    assert max(nbytes for _, nbytes in steps) == peak.total
    assert [t for t, _ in steps] == sorted(t for t, _ in steps)
    # When all is done, weights, optimizer, scratch, posted receives and an engine's own are left.
    left = needs.parameters + needs.buffers + needs.optimizer + needs.scratch + needs.messages
    left += needs.engine
    assert steps[-1][1] == left


BY_MICRO_BATCH = [v for v in ALL if VARIANTS[v].backward_unit == "micro"]


@settings(max_examples=examples(50))
@given(st.sampled_from(BY_MICRO_BATCH), st.data())
def test_long_mini_batches_hold_what_every_operation_says(variant, data):
    """What repeats in the middle of them is left out; of whatever limits, replicas, placement."""
    system = VARIANTS[variant]
    n = data.draw(st.sampled_from([24, 48, 72]))
    devices = data.draw(st.integers(1, 4))
    placement = data.draw(st.sampled_from([tuple(range(devices)), (*range(devices),) * 2]))
    replicas = [data.draw(st.sampled_from([1, 1, 2, 3, 8])) for _ in range(devices)]
    ranges = limit_ranges(system, len(placement), several=len(placement) > devices)
    limits = sorted((data.draw(st.integers(least, most)) for least, most in ranges), reverse=True)
    first = [sum(replicas[:d]) for d in range(devices)]
    stages = [
        stage([f"n{s}"], range(first[d], first[d] + replicas[d]), limit)
        for s, (d, limit) in enumerate(zip(placement, limits, strict=True))
    ]
    asked = question(chain(len(stages)), uniform_cluster(sum(replicas), **FAST), variant, n)
    try:
        pipeline = evaluate(asked, stages, n).pipeline
    except (PlanError, ScheduleError):
        assume(False)
    steady, again = steady_state(pipeline), [data.draw(st.booleans()) for _ in stages]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak_memory, "MOST_KEPT", 0)
        found = peak_memory.holdings_of(pipeline, steady, again)
        patch.setattr(memory, "_without_repeats", lambda kinds, n, _, entries: (kinds, n, entries))
        assert found == peak_memory.holdings_of(pipeline, steady, again)


@pytest.mark.parametrize("variant", ["pipedream-flush", "pipedream-2bw"])
def test_of_long_mini_batches_few_operations_are_walked(variant):
    pipeline = unit_pipeline(variant, 6, 600)
    steady = steady_state(pipeline)
    entries = peak_memory._entries(pipeline, steady)
    for kinds in steady.kinds:
        fewer, n, _ = memory._without_repeats(kinds, 600, 1, entries)
        assert n < 12
        assert len(fewer) < len(kinds) / 20


def test_memory_over_time_by_hand():
    """F, F, B, U with 1 byte per weight, 10 per micro-batch kept, 100 of workspace."""
    needs = StageBytes(
        parameters=1,
        buffers=0,
        optimizer=0,
        scratch=0,
        kept=10,
        rebuilt=0,
        messages=0,
        gradients=0,
        workspace=100,
    )
    pipeline = evaluate(
        question(chain(1), uniform_cluster(1), "v-timeprest", 2), lone_stages([["n0"]], [1]), 2
    ).pipeline
    timeline = simulate(pipeline, make_schedule(pipeline, 1))
    steps = memory_steps(HoldingsWalk(VARIANTS["v-timeprest"], 2, 1), timeline.stages[0], needs)
    assert [(round(t, 6), nbytes) for t, nbytes in steps] == [
        (0.0, 111), (1e-3, 11),
        (1e-3, 121), (2e-3, 21),
        (2e-3, 122), (6e-3, 2),
        (6e-3, 2), (6e-3, 1),
    ]  # fmt: skip


def test_what_a_run_accounts_for_may_peak_at_another_moment():
    """The last of 4 stages holds most versions while it updates, and scratch memory before."""
    system = VARIANTS["timeprest"]
    order = make_schedule(unit_pipeline("timeprest", 4, 1), 12)
    kinds = bytes("FBUW".index(op.kind) for op in order[3])
    found = holdings(system, 1, 1, kinds, entry_versions(system, 1, order[0]))
    nothing = dict.fromkeys(StageBytes.__annotations__, 0)
    needs = StageBytes(**(nothing | {"parameters": 100, "kept": 10, "workspace": 1000}))
    peak, accounted = needs.peak(found), needs.accounted_peak(found)
    # Weights, older versions, gradients, activations: in a backward, and in an update.
    assert (peak.versions_bytes, peak.activations_bytes, peak.total) == (200, 10, 1410)
    assert (accounted.versions_bytes, accounted.activations_bytes) == (300, 0)
    assert accounted.total == 500


@given(drawn_profiles(), st.data())
def test_costs_kept_are_costs_looked_up(profile, data):
    """Whatever was asked for before."""
    costs = Costs(profile)
    names = [layer.name for layer in profile.layers]
    for _ in range(4):
        some = data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1))
        size = data.draw(st.integers(1, 4))
        last = data.draw(st.booleans())
        assert costs.stage(tuple(some), size, last) == stage_cost(profile, some, size, last=last)
        cut = data.draw(st.integers(1, len(names)))
        groups = (tuple(names[:cut]), tuple(names[cut:]))
        assert costs.transfers(groups, size) == transfers(profile, groups, size)


@pytest.mark.parametrize("mini_batch", [1, 3, 4])
def test_one_device_is_as_fast_as_one_device(mini_batch):
    """Also where its mini-batch lies between sizes that were measured, which cost more a sample the
    smaller they are."""
    profile = chain(2)
    replaced = msgspec.structs.replace
    layers = [
        replaced(
            layer,
            measurements=tuple(
                replaced(m, forward_s=m.forward_s + 0.1) for m in layer.measurements
            ),
        )
        for layer in profile.layers
    ]
    profile = replaced(profile, layers=tuple(layers))
    asked = question(profile, uniform_cluster(1), "gpipe", mini_batch)
    found = evaluate(asked, lone_stages([["n0", "n1"]], [1]), 1)
    assert found.prediction.speedup == pytest.approx(1.0)


# Plans -------------------------------------------------------------------------------------------


@given(evaluated())
def test_a_plan_is_what_was_evaluated(drawn):
    """Its orders follow from the file alone, and checking it again changes nothing."""
    asked, found = drawn
    plan = make_plan(asked, found, REPORT)
    again = msgspec.json.decode(msgspec.json.encode(plan), type=type(plan))
    assert check_plan(again) == plan
    assert pipeline_of(again) == found.pipeline
    assert recheck(again, asked.profile).changes == ()


def test_plans_of_one_device_each_have_lone_links():
    """As before there were replicas and machines: their orders and runs stay what they were."""
    asked = question(chain(4), uniform_cluster(2, bandwidth="1MB/s"), "timeprest")
    found = evaluate(asked, lone_stages([["n0", "n1"], ["n2", "n3"]], [2, 1]), 4)
    pipeline = found.pipeline
    assert (pipeline.paces, pipeline.all_reduce_s) == ((), ())
    (link,) = pipeline.links
    assert link.routes == ()
    assert (link.forward_s, link.backward_s) == (16 / 1e6, 16 / 1e6)


def test_old_plan_files_are_read():
    """Without what only replicas need."""
    asked = question(chain(2), uniform_cluster(2), "timeprest")
    found = evaluate(asked, lone_stages([["n0"], ["n1"]], [2, 1]), 4)
    data = msgspec.json.decode(msgspec.json.encode(make_plan(asked, found, REPORT)))
    for predicted in data["predicted"]["stages"]:
        del predicted["all_reduce_s"]
    plan = msgspec.convert(data, type(make_plan(asked, found, REPORT)))
    assert pipeline_of(plan) == found.pipeline


def test_recheck_says_what_replicas_and_recomputation_do():
    asked = question(two_layers(parameters=100), uniform_cluster(3, **FAST), "timeprest")
    proven = {"bound_s": 32e-3, "optimal": True, "gap": 0.0}
    solved = msgspec.structs.replace(REPORT, **proven)
    stages = [stage(["n0"], [0], 2), stage(["n1"], [1], 1)]
    plan = signed(make_plan(asked, evaluate(asked, stages, 4), solved), asked)
    assert recheck(plan, asked.profile).plan.solver.optimal
    edited = (
        msgspec.structs.replace(plan.stages[0], devices=(0, 2)),
        msgspec.structs.replace(plan.stages[1], recompute=True),
    )
    found = recheck(msgspec.structs.replace(plan, stages=edited), asked.profile)
    assert any(line.startswith("period") for line in found.changes)
    # A shorter period than the bound: it was proven for plans without replicas.
    assert found.plan.predicted.period_s < 32e-3
    assert (found.plan.solver.bound_s, found.plan.solver.optimal) == (0.0, False)
    assert found.plan.stages == edited


# Speed -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "limit"), [("gpipe", 1), ("pipedream-flush", 1), ("timeprest", 2)]
)
def test_many_stages_and_micro_batches_take_no_time(variant, limit):
    """64 stages and 512 micro-batches: a third of a second, unless the machine is busy."""
    layers = [(f"n{k}", 100, 1e-3, 2e-3, 10, []) for k in range(64)]
    edges = [(f"n{k}", f"n{k + 1}", f"t{k}", 16) for k in range(63)]
    profile = profile_by_hand(layers, [*edges, ("n63", "output", "o", 4)], sizes=(1, 512))
    limits = [min(limit, most) for _, most in limit_ranges(VARIANTS[variant], 64)]
    asked = question(profile, uniform_cluster(64), variant, 512)
    begin = time.process_time()
    evaluate(asked, lone_stages([[f"n{k}"] for k in range(64)], limits), 512)
    assert time.process_time() - begin < 3


def test_op_is_still_what_orders_are_made_of():
    pipeline = evaluate(
        question(chain(1), uniform_cluster(1), "spectrain"), lone_stages([["n0"]], [1]), 1
    ).pipeline
    assert make_schedule(pipeline, 1).stages == ((Op("F", 0, 0), Op("B", 0), Op("U", 0)),)


def memory_steps(
    walk: HoldingsWalk, events: Iterable[Event], held: StageBytes
) -> Iterator[tuple[float, int]]:
    """Bytes over time, as steps: from each time on so many, until the next.

    Args:
        walk: at the start of the stage's schedule.
        events: the stage's, one after another (`timeline.Timeline.stages`). With replicas, of
            each operation that of the one that holds most counts.

    Yields:
        (seconds, bytes), at the start and at the end of each event. The peak is `StageBytes.peak`.
    """
    for event in events:
        yield event.start_s, held.total(walk.step(event.op))
        yield event.end_s, held.total(walk.between())
