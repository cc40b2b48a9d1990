"""Stages with several workers train as those with one: same weights, losses and versions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import plan_by_hand, with_times
from timeprest.planner.operations import parse_op
from timeprest.planner.orders import make_order
from timeprest.planner.plan import pipeline_of
from timeprest.planner.variants import VARIANTS
from timeprest.runtime import training
from timeprest.runtime.observer import read_losses
from timeprest.runtime.run import run
from timeprest.runtime.run_dir import load_weights
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.workers import workers_of

HERE = Path(__file__).parent
STEPS = 7
ADAM = OptimizerChoice(name="adam", lr=0.05)
MOMENTUM = OptimizerChoice(name="sgd", lr=0.05, momentum=0.9)
RUNNING = [name for name, variant in VARIANTS.items() if variant.runs]
WHOLE = [name for name in RUNNING if VARIANTS[name].whole_mini_batches]


def plans(profile, variant, replicas, n=4, mini_batch=8):
    """The replicated plan, and one of the same stages with a device each."""
    n = 1 if VARIANTS[variant].whole_mini_batches else n
    return [
        plan_by_hand(profile, variant, len(replicas), n, mini_batch=mini_batch, replicas=r)
        for r in (replicas, None)
    ]


def run_both(plan, alone, settings, where, monkeypatch):
    """Run both plans, inline and in the replicated one's order, on the same samples."""
    summary = run(plan, settings, where / "replicated", inline=True)
    pipeline = pipeline_of(plan)
    with monkeypatch.context() as patched:
        patched.setattr(training, "make_order", lambda _, count: make_order(pipeline, count))
        run(alone, settings, where / "alone", inline=True)
    return summary


def logged(run_dir, name):
    """(operation, version) of each line of a log."""
    lines = (run_dir / "operations" / f"{name}.jsonl").read_text().splitlines()
    return [(line["op"], line["version"]) for line in map(json.loads, lines)]


def compare(plan, where):
    """Weights, losses, and the version of every operation, each of which one replica logs."""
    state, wanted = load_weights(where / "replicated"), load_weights(where / "alone")
    assert state.keys() == wanted.keys()
    for key, weight in wanted.items():
        torch.testing.assert_close(state[key], weight, rtol=0, atol=1e-10)
    losses = [read_losses(where / name / "metrics.jsonl") for name in ("replicated", "alone")]
    np.testing.assert_allclose(*losses, rtol=0, atol=1e-10)
    whole = VARIANTS[plan.variant].whole_mini_batches
    for worker in workers_of(plan.stages):
        mine = []
        for text, version in logged(where / "alone", f"stage{worker.stage}"):
            i = parse_op(text)[1].micro_batch
            if i is None or whole or i % worker.replicas == worker.replica:
                mine.append((text, version))
        assert logged(where / "replicated", worker.file) == mine


@pytest.mark.parametrize("variant", RUNNING)
@pytest.mark.parametrize("replicas", [(2,), (2, 1), (1, 2), (4, 2), (2, 2, 1)])
def test_replicas_equal_one_worker(
    variant, replicas, mlp_profile, mlp_target, tmp_path, monkeypatch
):
    plan, alone = plans(with_times(mlp_profile), variant, replicas)
    settings = RunSettings(
        task=mlp_target,
        optimizer=ADAM if replicas == (1, 2) else MOMENTUM,
        steps=STEPS,
        evaluate=False,
        log_operations=True,
    )
    summary = run_both(plan, alone, settings, tmp_path, monkeypatch)
    compare(plan, tmp_path)
    of_workers = [(report.stage, report.replica) for report in summary.stages]
    assert of_workers == [(s, j) for s, r in enumerate(replicas) for j in range(r)]
    for report in summary.stages:
        predicted = plan.predicted.stages[report.stage]
        assert report.versions_held == predicted.versions_held
        assert report.peak.activations_bytes == predicted.memory.activations_bytes
        if settings.optimizer is MOMENTUM:
            assert report.peak.total <= predicted.memory_bytes - predicted.memory.workspace_bytes
