"""Runs against the oracle: same weights, same losses, same version for every operation."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import Adam, Momentum, Oracle
from plain import train_plainly
from plans import plan_by_hand, split_evenly, with_times
from timeprest.planner.operations import order_text
from timeprest.planner.orders import make_order
from timeprest.planner.plan import pipeline_of
from timeprest.profiles.target import resolve
from timeprest.runtime.data import Samples
from timeprest.runtime.observer import read_losses
from timeprest.runtime.run import run
from timeprest.runtime.run_dir import load_weights
from timeprest.runtime.settings import OptimizerChoice, RunSettings

STEPS = 12
OPTIMIZERS = {
    "momentum": (OptimizerChoice(name="sgd", lr=0.05, momentum=0.9), Momentum),
    "adam": (OptimizerChoice(name="adam", lr=0.05), Adam),
}
CASES = [
    (variant, stages, n)
    for variant in ("timeprest", "v-timeprest", "pipedream", "gpipe")
    for stages in (1, 2, 3, 4)
    for n in ((1,) if variant == "pipedream" else (1, 2, 4))
]


def settings_of(target, optimizer):
    return RunSettings(
        task=target, steps=STEPS, optimizer=optimizer, log_operations=True, evaluate=False
    )


def ask_oracle(plan, target, optimizer):
    """What the oracle makes of the plan's own order, on the samples of epoch 0."""
    task = resolve(target).task
    torch.manual_seed(0)
    weights = {name: w.numpy().copy() for name, w in task.model().state_dict().items()}
    samples = Samples(task, "train", plan.micro_batch, seed=0)
    batches = [
        [
            (inputs[0].numpy(), wanted.numpy())
            for inputs, wanted in (
                samples.train(0, b, plan.micro_batches, i) for i in range(plan.micro_batches)
            )
        ]
        for b in range(STEPS)
    ]
    oracle = Oracle(plan.variant, [list(s.nodes) for s in plan.stages], weights, optimizer, batches)
    return oracle.run(order_text(make_order(pipeline_of(plan), STEPS)))


def compare(run_dir, plan, oracle, summary):
    state = load_weights(run_dir)
    wanted = oracle.weights()
    assert state.keys() == wanted.keys()
    for name, weight in wanted.items():
        np.testing.assert_allclose(state[name].numpy(), weight, rtol=0, atol=1e-10, err_msg=name)
    for s in range(len(plan.stages)):
        lines = (run_dir / "operations" / f"stage{s}.jsonl").read_text().splitlines()
        logged = [(line["op"], line["version"]) for line in map(json.loads, lines)]
        assert logged == oracle.log[s]
    per_mini_batch = np.array(oracle.losses).reshape(STEPS, -1).mean(1)
    np.testing.assert_allclose(
        read_losses(run_dir / "metrics.jsonl"), per_mini_batch, rtol=0, atol=1e-10
    )
    held = [report.versions_held for report in summary.stages]
    assert held == oracle.most_versions


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("variant", "stages", "n"), CASES)
def test_inline_equals_the_oracle(variant, stages, n, optimizer, mlp_profile, mlp_target, tmp_path):
    choice, by_hand = OPTIMIZERS[optimizer]
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    summary = run(plan, settings_of(mlp_target, choice), tmp_path / "run", inline=True)
    compare(tmp_path / "run", plan, ask_oracle(plan, mlp_target, by_hand), summary)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_orders_equal_the_oracle(data, mlp_profile, mlp_target, tmp_path_factory):
    """Uneven stages and limits give orders in which updates land anywhere."""
    names = [layer.name for layer in mlp_profile.layers]
    variant = data.draw(st.sampled_from(["timeprest", "v-timeprest"]))
    stages = data.draw(st.integers(2, 4))
    shares = data.draw(st.lists(st.integers(1, 9), min_size=len(names), max_size=len(names)))
    limits = [1]
    for _ in range(stages - 1):
        limits.insert(0, limits[0] + data.draw(st.integers(0, 2)))
    n = data.draw(st.sampled_from([1, 2, 4]))
    backward_s = data.draw(st.sampled_from([1e-4, 1e-3, 3e-3]))
    profile = with_times(mlp_profile, backward_s=backward_s, shares=shares)
    cut = split_evenly(names, stages)
    plan = plan_by_hand(profile, variant, stages, n, limits, cut=cut)
    run_dir = tmp_path_factory.mktemp("odd") / "run"
    choice, by_hand = OPTIMIZERS["momentum"]
    summary = run(plan, settings_of(mlp_target, choice), run_dir, inline=True)
    compare(run_dir, plan, ask_oracle(plan, mlp_target, by_hand), summary)


@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("variant", ["timeprest", "v-timeprest", "pipedream", "gpipe"])
def test_processes_equal_inline_and_the_oracle(variant, stages, mlp_profile, mlp_target, tmp_path):
    choice, by_hand = OPTIMIZERS["momentum" if stages == 3 else "adam"]
    n = 1 if variant == "pipedream" else 4
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    wanted = ask_oracle(plan, mlp_target, by_hand)
    summary = run(plan, settings_of(mlp_target, choice), tmp_path / "processes")
    compare(tmp_path / "processes", plan, wanted, summary)
    run(plan, settings_of(mlp_target, choice), tmp_path / "inline", inline=True)
    inline = load_weights(tmp_path / "inline")
    for name, weight in load_weights(tmp_path / "processes").items():
        assert (weight - inline[name]).abs().max() <= 1e-10, name
    differences = [list(report.version_differences) for report in summary.stages]
    predicted = [stage.version_difference for stage in plan.predicted.stages]
    assert [max(seen) for seen in differences] == predicted


def test_the_oracle_tells_systems_apart(mlp_profile, mlp_target):
    """Equality with it means something: each system ends with other weights."""
    _, by_hand = OPTIMIZERS["momentum"]
    profile = with_times(mlp_profile)
    found = [
        ask_oracle(plan_by_hand(profile, v, 3, n), mlp_target, by_hand).weights()
        for v, n in (("timeprest", 4), ("v-timeprest", 4), ("pipedream", 1), ("gpipe", 4))
    ]
    for a, b in combinations(found, 2):
        assert max(np.abs(a[name] - b[name]).max() for name in a) > 1e-5


@pytest.mark.processes
@pytest.mark.parametrize("inline", [True, False])
def test_gpipe_is_plain_training_loss_by_loss(inline, mlp_profile, mlp_target, tmp_path):
    """S = 3, N = 4, against a loop that anyone would write."""
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 4)
    settings_ = RunSettings(task=mlp_target, steps=STEPS, evaluate=False)
    run(plan, settings_, tmp_path / "run", inline=inline)
    losses, model = train_plainly(mlp_target, plan.mini_batch, STEPS)
    np.testing.assert_allclose(
        read_losses(tmp_path / "run" / "metrics.jsonl"), losses, rtol=0, atol=1e-10
    )
    state = load_weights(tmp_path / "run")
    for name, weight in model.state_dict().items():
        np.testing.assert_allclose(state[name], weight, rtol=0, atol=1e-10)
