"""Muon with AdamW beside it: its rule, which weights are whose, predictions, bytes of state."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from helpers.against_oracle import OPTIMIZERS, ask_oracle, orthogonal_by_torch, settings_of, train
from helpers.oracle import Muon, newton_schulz
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import check_resumed
from timeprest.api import plan as solve_plan
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.profiles.errors import PlanError, TargetError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage.optimizer import optimizer_of, system_optimizer
from timeprest.runtime.weights.muon import MuonWithAdamW, orthogonal_step

CHOICE = OptimizerChoice(name="muon", lr=0.05, weight_decay=0.1)
HIDDEN = OPTIMIZERS["muon"][2]["matrices"]

ROUNDINGS = 2**-5
"""By how much entries of an orthogonalised matrix may differ that is rounded to bfloat16 in another
sequence: each of 5 steps rounds its 3 products to 8 bits, to 2⁻⁹ of entries up to about 1, which
the polynomial's slope (3.4445 at small singular values, less than 1 at large ones) spreads."""


# The rule --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 5), (6, 7), (4, 6), (1, 3), (16, 16)])
def test_orthogonalisation_is_the_oracles(shape):
    for seed in range(5):
        matrix = np.random.default_rng(seed).standard_normal(shape)
        found = orthogonal_by_torch(matrix)
        np.testing.assert_allclose(found, newton_schulz(matrix), rtol=0, atol=ROUNDINGS)
        # About orthogonal: all singular values near 1.
        values = np.linalg.svd(found, compute_uv=False)
        assert np.all((values > 0.6) & (values < 1.3))


def test_a_state_that_is_loaded_is_what_steps_go_on_with():
    def made():
        torch.manual_seed(0)
        own = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3))]
        how = {"muon": {"lr": 0.1}, "adamw": {"lr": 0.1}}
        return own, MuonWithAdamW([{"params": own}], own[:1], **how)

    def step(own, optimizer, k):
        for p in own:
            p.grad = torch.full_like(p, 0.3 * k) + torch.arange(p.numel()).view_as(p) / 7
        optimizer.step()

    (whole, one), (parts, other) = made(), made()
    step(whole, one, 1)
    step(parts, other, 1)
    _, again = made()
    again.param_groups[0]["params"], again.param_groups[1]["params"] = [parts[0]], [parts[1]]
    again.load_state_dict(other.state_dict())
    for k in (2, 3):
        step(whole, one, k)
        step(parts, again, k)
    assert all(torch.equal(p, q) for p, q in zip(whole, parts, strict=True))


def test_prediction_steps_as_torch_would():
    """From a momentum that the gradient equals: the very step, weight decay aside."""
    p = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.float64))
    p.grad = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    grad = p.grad.clone()
    how = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "nesterov": False}
    optimizer = torch.optim.Muon([p], adjust_lr_fn="match_rms_adamw", **how)
    optimizer.step()
    step = orthogonal_step(grad, optimizer.param_groups[0])
    torch.testing.assert_close(p.detach(), -0.1 * step, rtol=0, atol=1e-15)
    scale = 0.2 * np.sqrt(6)
    np.testing.assert_allclose(step, scale * orthogonal_by_torch(grad.numpy()), atol=1e-15)


# Against the oracle ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "stages", "n"),
    [
        ("timeprest", 3, 2),
        ("pipeoptim", 4, 1),
        ("pipeoptim", 2, 1),
        ("spectrain", 3, 1),
        ("pipemare", 4, 2),
        ("gpipe", 3, 4),
    ],
)
def test_inline_equals_the_oracle(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    train(plan, mlp_target, "muon", tmp_path / "run")


@pytest.mark.choice(0)
@pytest.mark.processes
def test_processes_equal_the_oracle(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "pipeoptim", 3, 1)
    train(plan, mlp_target, "muon", tmp_path / "run", inline=False)


def test_with_the_oracles_own_orthogonalisation(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """Nothing of torch's: 12 steps by 0.05 · 0.2 · √7, each within the roundings, and what comes of
    them."""
    plan = plan_by_hand(with_times(mlp_profile), "v-timeprest", 3, 2)
    asked = settings_of(mlp_target, "muon")
    run(plan, asked, tmp_path / "run", inline=True)
    given = {"weight_decay": 0.1, "matrices": HIDDEN}
    monkeypatch.setitem(OPTIMIZERS, "muon", (OPTIMIZERS["muon"][0], Muon, given))
    wanted = ask_oracle(plan, asked, "muon").weights()
    state = load_weights(tmp_path / "run")
    for name, weight in wanted.items():
        atol = 12 * 0.05 * 0.2 * np.sqrt(7) * ROUNDINGS
        np.testing.assert_allclose(state[name], weight, rtol=0, atol=atol, err_msg=name)


def test_runs_go_on_bit_for_bit(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "pipeoptim", 3, 1)
    settings = RunSettings(
        task=mlp_target,
        steps=12,
        checkpoint_every=4,
        evaluate=False,
        optimizer=CHOICE,
        lr_schedule="cosine",
        decay_only="matrices",
    )
    check_resumed(plan, settings, tmp_path, 9, 12)


# Which weights are whose -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "hidden"),
    [
        # Neither the embeddings, nor the head, nor biases and norms.
        (
            "gpt2:tied=0,layers=1,heads=2,width=8,length=6,vocabulary=11",
            ["attn", "attn", "mlp", "mlp"],
        ),
        ("mlp", None),
    ],
)
def test_matrices_of_hidden_layers(target, hidden, mlp_target):
    profile = measure(resolve(mlp_target if hidden is None else target), batch_size=2, seconds=0)
    chain = profile.layers
    bytes_of = {layer.name: layer.matrix_bytes or 0 for layer in chain}
    if hidden is None:
        assert list(bytes_of.values()) == [7 * 5 * 8, 0, 6 * 7 * 8, 0, 4 * 6 * 8, 0, 0]
        return
    found = [name for name, nbytes in bytes_of.items() if nbytes]
    assert len(found) == len(hidden)
    assert all(part in name for part, name in zip(hidden, found, strict=True))
    assert sum(bytes_of.values()) == 4 * 12 * 8 * 8


# Bytes -----------------------------------------------------------------------------------------


def test_the_plan_counts_its_state_exactly(mlp_profile, mlp_target, tmp_path):
    """A momentum of hidden matrices, two moments of all else."""
    profile = with_times(mlp_profile)
    plan = solve_plan(
        profile, uniform_cluster(3), variant="pipedream", stages=3, optimizer_state="muon"
    )
    settings = RunSettings(task=mlp_target, steps=12, optimizer=CHOICE, evaluate=False)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    state = [report.peak.optimizer_bytes for report in summary.stages]
    assert state == [stage.memory.optimizer_bytes for stage in plan.predicted.stages]
    matrices = 8 * (7 * 5 + 6 * 7 + 4 * 6)
    every = sum(layer.parameter_bytes for layer in profile.layers)
    assert sum(state) == matrices + 2 * (every - matrices)
    assert plan.matrix_state_factor == 1.0


def test_what_fits_with_it_is_found(mlp_profile):
    """Also where two moments of everything wouldn't fit: bounds count no more than there is."""
    how = {"stages": 2, "micro_batches": 2, "variant": "pipedream-flush"}
    profile = with_times(mlp_profile)
    first = solve_plan(profile, uniform_cluster(2), optimizer_state="muon", **how)
    most = max(stage.memory_bytes for stage in first.predicted.stages)
    tight = uniform_cluster(2, memory=f"{most}B")
    again = solve_plan(profile, tight, optimizer_state="muon", **how)
    assert again.predicted.period_s == first.predicted.period_s
    assert max(stage.memory_bytes for stage in again.predicted.stages) <= most


def test_plans_without_it_say_nothing_of_it(mlp_profile):
    plan = solve_plan(with_times(mlp_profile), uniform_cluster(2), stages=2)
    assert b"matrix_state_factor" not in msgspec.json.encode(plan)


# Refusals --------------------------------------------------------------------------------------


def test_profiles_without_hidden_matrices(mlp_profile):
    layers = [msgspec.structs.replace(la, matrix_bytes=msgspec.UNSET) for la in mlp_profile.layers]
    profile = msgspec.structs.replace(mlp_profile, layers=tuple(layers))
    with pytest.raises(PlanError, match="names no matrices of hidden layers"):
        solve_plan(profile, uniform_cluster(2), optimizer_state="muon")


def test_nesterov_is_not_for_it(mlp_profile, mlp_target):
    plan = plan_by_hand(with_times(mlp_profile), "pipedream-nesterov", 2, 1)
    settings = RunSettings(task=mlp_target, steps=2, optimizer=CHOICE)
    prepared = prepare(plan, settings)
    optimizer = optimizer_of(prepared, 0)
    with pytest.raises(TargetError, match="is there for SGD, Adam and AdamW"):
        system_optimizer(prepared, 0, optimizer)
