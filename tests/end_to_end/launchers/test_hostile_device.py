"""Whole runs on a device where every operation waits for all that was posted: none stands still."""

from __future__ import annotations

import pytest
import torch
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.systems.variants import VARIANTS
from timeprest.runtime.communication.transport import NCCL
from timeprest.runtime.processes import launcher as launch
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import RunSettings

pytestmark = pytest.mark.processes


@pytest.fixture
def hostile(monkeypatch):
    monkeypatch.setattr(launch, "WORKER", "timeprest.tests.helpers.processes.hostile_worker")


def check_inline(plan, task, tmp_path, monkeypatch, **options):
    settings = RunSettings(task=task, timeout_s=20, **options)
    summary = run(plan, settings, tmp_path / "processes")
    assert {report.transport for report in summary.stages} == {NCCL}
    run(plan, settings, tmp_path / "inline", inline=True)
    found, wanted = (load_weights(tmp_path / name) for name in ("processes", "inline"))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.choice(4)
@pytest.mark.parametrize(
    ("variant", "stages", "options"),
    [
        ("timeprest", 3, {}),
        ("gpipe", 2, {}),
        ("pipedream-2bw", 2, {"replicas": [2, 1]}),
        ("zb-h1", 2, {}),
        ("timeprest", 4, {"placement": (0, 1, 1, 0)}),
        ("interleaved-1f1b", 4, {"placement": (0, 1, 0, 1)}),
        ("pipedream", 3, {"replicas": [1, 2, 1]}),
        ("timeprest", 2, {"replicas": [2, 2]}),
    ],
)
def test_a_run_is_the_inline_run(
    variant, stages, options, mlp_profile, mlp_target, tmp_path, monkeypatch, hostile
):
    """With evaluations, clipping, and sums over replicas."""
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n, **options)
    check_inline(plan, mlp_target, tmp_path, monkeypatch, steps=5, eval_every=3, clip_norm=1.0)


def test_a_run_goes_on(mlp_profile, mlp_target, tmp_path, hostile):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    settings = RunSettings(task=mlp_target, steps=6, checkpoint_every=3, timeout_s=20)
    run(plan, settings, tmp_path / "run")
    wanted = load_weights(tmp_path / "run")
    resume(tmp_path / "run", at=3)
    found = load_weights(tmp_path / "run")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
