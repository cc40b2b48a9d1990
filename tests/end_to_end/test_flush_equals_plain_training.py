"""Flush systems are plain training, loss by loss."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.plain_training import train_plainly
from helpers.plans import plan_by_hand, with_times
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

STEPS = 6
FLUSH = ("pipedream-flush", "zb-h1")


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("variant", FLUSH)
def test_flush_systems_are_plain_training(variant, stages, n, mlp_profile, mlp_target, tmp_path):
    """Loss by loss and weight by weight."""
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n)
    settings = RunSettings(task=mlp_target, steps=STEPS, evaluate=False)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    losses, model = train_plainly(mlp_target, plan.mini_batch, STEPS)
    measured = read_losses(tmp_path / "run" / "metrics.jsonl")
    np.testing.assert_allclose(measured, losses, rtol=0, atol=1e-10)
    state = load_weights(tmp_path / "run")
    for name, weight in model.state_dict().items():
        np.testing.assert_allclose(state[name], weight, rtol=0, atol=1e-10)
    assert [report.versions_held for report in summary.stages] == [1] * stages
    for report, predicted in zip(summary.stages, plan.predicted.stages, strict=True):
        assert report.peak.total <= predicted.memory_bytes


@pytest.mark.processes
@pytest.mark.parametrize(("variant", "stages"), [(FLUSH[0], 3), (FLUSH[1], 2), (FLUSH[1], 3)])
def test_flush_systems_in_processes(variant, stages, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, 4)
    run(plan, RunSettings(task=mlp_target, steps=STEPS, evaluate=False), tmp_path / "run")
    _, model = train_plainly(mlp_target, plan.mini_batch, STEPS)
    state = load_weights(tmp_path / "run")
    for name, weight in model.state_dict().items():
        np.testing.assert_allclose(state[name], weight, rtol=0, atol=1e-10)
