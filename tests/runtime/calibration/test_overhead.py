"""What running a stage costs besides its layers: measured, and counted by plans."""

from __future__ import annotations

import msgspec
import pytest
from helpers.plans import lone_stages, with_times
from helpers.stage_costs import stage_cost
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.costs.stage_costs import as_run_by
from timeprest.planner.evaluate import evaluate
from timeprest.planner.question import Question
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.profile import OperationCost
from timeprest.runtime.calibration.overhead import measure_operations

COST = OperationCost(forward_s=0.01, mini_batch_s=0.03)


def test_a_small_network_tells():
    """Of a difference a busy machine may leave nothing, but not again and again."""
    for _ in range(3):
        found = measure_operations(1)
        if all((found.forward_s, found.mini_batch_s, found.pack_s, found.unpack_s)):
            break
    assert 0 < found.forward_s < 0.1
    assert 0 < found.mini_batch_s < 0.1
    for seconds in (found.pack_s, found.unpack_s):
        assert 0 < seconds < 1e-3
    for per_byte in (
        found.update_s_per_byte,
        found.keep_s_per_byte,
        found.mix_s_per_byte,
        found.predict_s_per_byte,
    ):
        assert 0 < per_byte < 1e-7


def test_tensors_that_autograd_keeps_take_time(mlp_profile):
    """The layers' counts are the hooks' calls."""
    counts = [m.saved_tensors for layer in mlp_profile.layers for m in layer.measurements]
    assert all(count is not None for count in counts)
    hooks = OperationCost(forward_s=0.0, mini_batch_s=0.0, pack_s=1e-3, unpack_s=2e-3)
    free = with_times(mlp_profile)
    dear = msgspec.structs.replace(free, operation=hooks)
    names = [layer.name for layer in free.layers]
    cheap, costly = (stage_cost(p, names, 2, last=True) for p in (free, dear))
    kept = sum(layer.measurements[0].saved_tensors for layer in free.layers)
    kept += free.loss[0].saved_tensors
    assert kept > 4
    assert costly.forward_s - cheap.forward_s == pytest.approx(kept * 1e-3)
    assert costly.backward_s - cheap.backward_s == pytest.approx(kept * 2e-3)


@pytest.mark.parametrize(
    ("variant", "hooked"),
    [("timeprest", True), ("pipedream", True), ("v-timeprest", False), ("gpipe", False)],
)
def test_hooks_keep_older_weights_out_of_graphs(mlp_profile, variant, hooked):
    """In mixed precision the copies of weights, in every system."""
    hooks = OperationCost(forward_s=0.0, mini_batch_s=0.0, pack_s=1e-3, unpack_s=2e-3)
    profile = msgspec.structs.replace(with_times(mlp_profile), operation=hooks)
    mixed = msgspec.structs.replace(profile, autocast="bfloat16")
    for each, wanted in ((profile, hooked), (mixed, True)):
        found = as_run_by(each, VARIANTS[variant]).operation
        assert ((found.pack_s, found.unpack_s) == (1e-3, 2e-3)) == wanted


RULES = OperationCost(
    forward_s=0.0,
    mini_batch_s=0.0,
    update_s_per_byte=1.0,
    keep_s_per_byte=10.0,
    mix_s_per_byte=100.0,
    predict_s_per_byte=1000.0,
)


@pytest.mark.parametrize(
    ("variant", "first", "last"),
    [
        ("timeprest", 1, 11),
        ("timeprest-stashed", 11, 11),
        ("pipedream-unstashed", 1, 11),
        ("v-timeprest", 1, 1),
        ("i-timeprest", 111, 111),
        ("pipedream", 11, 1),
        ("pipedream-vertical-sync", 11, 11),
        ("pipedream-2bw", 11, 11),
        ("spectrain", 1001, 1),
        ("pipeoptim", 1001, 1),
        ("pipemare", 201, 1),
        ("gpipe", 1, 1),
    ],
)
def test_weight_rules_count_by_bytes(mlp_profile, variant, first, last):
    profile = msgspec.structs.replace(with_times(mlp_profile), operation=RULES)
    names = [layer.name for layer in profile.layers]
    limits = [1 if VARIANTS[variant].flushes else 2, 1]
    stages = lone_stages([names[:2], names[2:]], limits)
    for every in (1, 2):
        asked = Question(profile, uniform_cluster(2), variant, 8, 1.0, update_every=every)
        count = 1 if VARIANTS[variant].whole_mini_batches else 2
        found = evaluate(asked, stages, count).prediction.stages
        # Each update keeps a version; each mini-batch mixes or predicts.
        # What corrects them is mixed once for each update.
        own = 100 if variant == "pipemare" else 0
        wanted = [cost + (every - 1) * (max(cost // 100 * 100 - own, 0)) for cost in (first, last)]
        assert [s.update_s / s.parameter_bytes for s in found] == pytest.approx(wanted)


def test_plans_count_it_and_stay_proven(mlp_profile):
    free = with_times(mlp_profile)
    dear = msgspec.structs.replace(free, operation=COST)
    names = [layer.name for layer in free.layers]
    cheap, costly = (stage_cost(p, names, 2, last=True) for p in (free, dear))
    assert costly.forward_s - cheap.forward_s == pytest.approx(0.01)
    assert costly.backward_s == cheap.backward_s
    assert costly.update_s - cheap.update_s == pytest.approx(0.03)
    for variant in ("timeprest", "gpipe"):
        before, after = (
            solve(p, uniform_cluster(2), variant, mini_batch=8, stages=2, micro_batches=4)
            for p in (free, dear)
        )
        assert after.predicted.period_s >= before.predicted.period_s + 4 * 0.01 + 0.03 - 1e-9
        assert after.solver.bound_s <= after.solver.objective_s
        assert after.solver.optimal == before.solver.optimal


@pytest.mark.parametrize("every", [1, 3])
def test_mini_batches_without_an_update_cost_as_much_besides(every, mlp_profile):
    """Most of it is around their backward."""
    free = with_times(mlp_profile)
    stages = lone_stages([[layer.name for layer in free.layers]], [1])
    before, after = (
        evaluate(Question(p, uniform_cluster(1), "gpipe", 8, 1.0, every), stages, 4).prediction
        for p in (free, msgspec.structs.replace(free, operation=COST))
    )
    assert after.period_s - before.period_s == pytest.approx(4 * 0.01 + 0.03)
