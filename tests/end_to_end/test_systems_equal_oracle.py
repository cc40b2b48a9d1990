"""Runs against the oracle: same weights, same losses, same versions used and held."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
from helpers.against_oracle import STEPS, ask_oracle, settings_of, train
from helpers.drawn.cases import examples
from helpers.oracle import SYSTEMS
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import plan_by_hand, with_times
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timeprest.planner.schedules.schedules import limit_ranges
from timeprest.planner.systems.variants import VARIANTS
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings


def cases(stages, counts):
    """(system, S, N) of all systems that train so many stages on a device each, with these N where
    there are micro-batches."""
    return [
        (name, s, n)
        for name, variant in VARIANTS.items()
        for s in stages
        for n in ((1,) if variant.whole_mini_batches else counts)
        if n >= variant.least_micro_batches(s) and (s == 1 or variant.placement == "any")
    ]


# Inline ------------------------------------------------------------------------------------


@pytest.mark.choice(30)
@pytest.mark.parametrize(
    ("variant", "stages", "n", "optimizer"),
    [
        (*case, optimizer)
        for case in cases((1, 2, 3, 4), (1, 2, 4))
        for optimizer in ("sgd", "momentum", "adam")
        # Where the pipeline drains before each update, optimizers see plain gradients.
        if optimizer == "adam" or not VARIANTS[case[0]].flushes
        # Without a momentum there is less to go wrong.
        if optimizer != "sgd" or case[1] == 3
    ],
)
def test_inline_equals_the_oracle(variant, stages, n, optimizer, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    train(plan, mlp_target, optimizer, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["decayed sgd", "decayed momentum", "decayed adam", "adamw"])
@pytest.mark.parametrize(
    ("variant", "stages", "n"),
    [
        case
        for case in cases((3,), (4,))
        # For other systems weight decay is torch's own affair.
        if VARIANTS[case[0]].prediction or VARIANTS[case[0]].update_rule != "optimizer"
    ],
)
def test_weight_decay(variant, stages, n, optimizer, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    train(plan, mlp_target, optimizer, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages", "n"), cases((3,), (4,)))
def test_parameters_that_are_views(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """Of one tensor; backwards on other versions find their own."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    train(plan, mlp_target.replace("MLPTask", "FlatTask"), "momentum", tmp_path / "run")


@pytest.mark.choice(8)
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages", "n"), cases((4,), (4,)))
def test_updates_after_several_mini_batches(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """12 mini-batches, an update after each fifth: the last takes the mean of two."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n, update_every=5)
    train(plan, mlp_target, "momentum", tmp_path / "run")


@pytest.mark.choice(8)
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages", "n"), cases((3,), (4,)))
def test_one_epoch_after_another(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """Of 5, 5 and 2 mini-batches: each ends drained, with an update; versions go on."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n, update_every=2)
    target = mlp_target.replace("MLPTask", "ShortEpochs")
    train(plan, target, "adam", tmp_path / "run")


@pytest.mark.choice(8)
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages", "n"), cases((3,), (4,)))
def test_an_epochs_last_mini_batch(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """Every sixth has 2 samples; with 4 micro-batches, two of them have none."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    target = mlp_target.replace("MLPTask", "ShortEpochs")
    train(plan, target, "adam", tmp_path / "run", ragged="pad")


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages", "n"), cases((3,), (4,)))
def test_clipping_and_schedules(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """Predictions go by the learning rate to come; asynchronous stages clip their own part."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    more = {"clip_norm": 0.3, "lr_schedule": "linear", "warmup": 4}
    train(plan, mlp_target, "momentum", tmp_path / "run", **more)


@pytest.mark.choice(16)
@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages", "n"), cases((1, 3), (2, 4)))
def test_weighted_losses(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """A mini-batch's loss is the sum over all that counts in it by how much that is."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    train(plan, mlp_target.replace("MLPTask", "WeightedTask"), "momentum", tmp_path / "run")


@pytest.mark.choice(16)
@pytest.mark.slow
@pytest.mark.parametrize("task", ["ShortEpochs", "ShortWeighted"])
@pytest.mark.parametrize(("variant", "stages", "n"), cases((3,), (4,)))
def test_everything_at_once(variant, stages, n, task, mlp_profile, mlp_target, tmp_path):
    """The mean of two mini-batches' means, the last of 2 samples; clipped, with a warm-up."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n, update_every=2)
    more = {"clip_norm": 0.3, "lr_schedule": "linear", "warmup": 4, "ragged": "pad"}
    target = mlp_target.replace("MLPTask", task)
    train(plan, target, "momentum", tmp_path / "run", **more)


@pytest.mark.choice(12)
@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize(("variant", "stages"), [(v, s) for v, s, n in cases((3,), (4,)) if n > 1])
def test_uneven_micro_batches(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """8 samples as 3, 3, 2 and as 2, 2, 2, 1, 1."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    train(plan, mlp_target, "adam", tmp_path / "run")


@pytest.mark.choice(14)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "stages", "n"),
    [case for case in cases((3,), (2, 4)) if not VARIANTS[case[0]].recompute_refusal],
)
def test_recomputation(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """On the forward's weights: nothing changes but what the stage holds. Not on the last stage."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n, recompute=(True, True, False))
    train(plan, mlp_target, "momentum", tmp_path / "run")


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    ("decay", "rate"), [("exponential", 0.3), ("inverse", 1.0), ("linear", 0.4)]
)
def test_significance_of_a_forwards_weights(decay, rate, n, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "i-timeprest", 4, n)
    more = {"decay": decay, "decay_rate": rate}
    summary = train(plan, mlp_target, "momentum", tmp_path / "run", **more)
    assert max(summary.stages[0].version_differences) > 1


@pytest.mark.parametrize("recompute", [(), (True, True, True, False)])
@pytest.mark.parametrize("variant", ["timeprest", "timeprest-stashed", "i-timeprest"])
def test_micro_batches_on_several_versions(variant, recompute, mlp_profile, mlp_target, tmp_path):
    """Updates land between the micro-batches of a mini-batch, and each has its own weights."""
    # A mini-batch's backward takes as long as a micro-batch's forward.
    profile = with_times(mlp_profile, backward_s=0.25e-3)
    plan = plan_by_hand(profile, variant, 4, 4, recompute=recompute)
    train(plan, mlp_target, "momentum", tmp_path / "run")
    lines = (tmp_path / "run" / "operations" / "stage3.jsonl").read_text().splitlines()
    used = {line["op"]: line["version"] for line in map(json.loads, lines)}
    each = [{used[f"3F{b}.{i}"] for i in range(4)} for b in range(STEPS)]
    # In some mini-batch at least.
    assert max(map(len, each)) == 2


@pytest.mark.slow
@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_orders_equal_the_oracle(data, mlp_profile, mlp_target, tmp_path_factory):
    """Uneven stages, limits and updates give orders in which updates land anywhere."""
    names = [layer.name for layer in mlp_profile.layers]
    variant, stages, n = data.draw(st.sampled_from(cases((2, 3, 4), (1, 2, 4))))
    shares = data.draw(st.lists(st.integers(1, 9), min_size=len(names), max_size=len(names)))
    limits = []
    for least, most in reversed(limit_ranges(VARIANTS[variant], stages)):
        limits.insert(0, data.draw(st.integers(max([least, *limits[:1]]), most)))
    backward_s = data.draw(st.sampled_from([1e-4, 1e-3, 3e-3]))
    every = data.draw(st.sampled_from([1, 1, 2, 3]))
    profile = with_times(mlp_profile, backward_s=backward_s, shares=shares)
    plan = plan_by_hand(profile, variant, stages, n, limits, update_every=every)
    train(plan, mlp_target, "momentum", tmp_path_factory.mktemp("odd") / "run")


def test_the_oracle_tells_systems_apart(mlp_profile, mlp_target):
    """Equality with it means something: each system ends with other weights."""
    # A mini-batch's backward takes as long as a micro-batch's forward: updates land between the
    # micro-batches of a mini-batch. With longer ones, some systems would be the same here.
    profile = with_times(mlp_profile, backward_s=0.25e-3)
    found = []
    for variant, stages, n in cases((4,), (4,)):
        # Those that flush are all the same.
        if not VARIANTS[variant].flushes or variant == "gpipe":
            plan = plan_by_hand(profile, variant, stages, n)
            asked = settings_of(mlp_target, "momentum")
            found.append((variant, ask_oracle(plan, asked, "momentum").weights()))
    assert len(found) > 3
    for (one, a), (other, b) in combinations(found, 2):
        assert max(np.abs(a[name] - b[name]).max() for name in a) > 1e-5, (one, other)


def test_the_oracle_knows_every_system():
    assert set(SYSTEMS) == set(VARIANTS)


# In processes ------------------------------------------------------------------------------


@pytest.mark.choice(6)
@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("variant", "stages", "n", "optimizer"),
    [
        ("timeprest", 3, 4, "momentum"),
        ("timeprest", 4, 4, "adam"),
        ("timeprest-stashed", 3, 2, "momentum"),
        ("pipedream-unstashed", 3, 1, "momentum"),
        ("i-timeprest", 2, 2, "momentum"),
        ("pipedream-vertical-sync", 2, 1, "momentum"),
        ("pipedream-2bw", 2, 4, "adam"),
        ("spectrain", 3, 1, "momentum"),
        ("pipemare", 3, 2, "momentum"),
        ("zb-h1", 3, 4, "sgd"),
    ],
)
def test_processes_equal_inline_and_the_oracle(
    variant, stages, n, optimizer, mlp_profile, mlp_target, tmp_path
):
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    summary = train(plan, mlp_target, optimizer, tmp_path / "processes", inline=False)
    train(plan, mlp_target, optimizer, tmp_path / "inline")
    inline = load_weights(tmp_path / "inline")
    for name, weight in load_weights(tmp_path / "processes").items():
        assert (weight - inline[name]).abs().max() <= 1e-10, name
    predicted = [stage.version_difference for stage in plan.predicted.stages]
    assert [max(report.version_differences) for report in summary.stages] == predicted


@pytest.mark.processes
def test_parameters_that_are_views_in_processes(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 3, 4)
    target = mlp_target.replace("MLPTask", "FlatTask")
    train(plan, target, "momentum", tmp_path / "run", inline=False)


@pytest.mark.processes
@pytest.mark.parametrize("inline", [True, False])
def test_gpipe_is_plain_training_loss_by_loss(inline, mlp_profile, mlp_target, tmp_path):
    """S = 3, N = 4, against a loop that anyone would write."""
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 4)
    settings_ = RunSettings(task=mlp_target, steps=STEPS, evaluate=False)
    run(plan, settings_, tmp_path / "run", inline=inline)
    assert_trained_as(tmp_path / "run", train_plainly(mlp_target, plan.mini_batch, STEPS))


# Systems that flush are plain training, loss by loss ----------------------------------------

FLUSH_STEPS = 6
FLUSH = ("pipedream-flush", "zb-h1")


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("variant", FLUSH)
def test_flush_systems_are_plain_training(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """Loss by loss and weight by weight."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    settings = RunSettings(task=mlp_target, steps=FLUSH_STEPS, evaluate=False)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train_plainly(mlp_target, plan.mini_batch, FLUSH_STEPS))
    assert [report.versions_held for report in summary.stages] == [1] * stages
    for report, predicted in zip(summary.stages, plan.predicted.stages, strict=True):
        assert report.peak.total <= predicted.memory_bytes


@pytest.mark.processes
@pytest.mark.parametrize(("variant", "stages"), [(FLUSH[0], 3), (FLUSH[1], 2), (FLUSH[1], 3)])
def test_flush_systems_in_processes(variant, stages, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, 4)
    run(plan, RunSettings(task=mlp_target, steps=FLUSH_STEPS, evaluate=False), tmp_path / "run")
    assert_trained_as(tmp_path / "run", train_plainly(mlp_target, plan.mini_batch, FLUSH_STEPS))
