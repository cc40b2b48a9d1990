"""A worker that runs out of memory says in one line what it held, and what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from tasks.mlp_task import MLPTask
from timeprest.profiles.errors import RunError
from timeprest.runtime.prepare.workers import all_replicas
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.stage import runner
from timeprest.runtime.stage.memory import out_of_memory

ON_A_GPU = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of "
    "which 1.20 GiB is free."
)


class StepTakesAll(MLPTask):
    """Its first update does so, on a GPU."""

    def optimizer(self, parameters):
        class Greedy(torch.optim.SGD):
            def step(self):
                raise torch.OutOfMemoryError(ON_A_GPU)

        return Greedy(parameters, lr=0.1)


class MetricsTakeAll(MLPTask):
    """Its evaluation does so."""

    def metrics(self, output, target):
        raise torch.OutOfMemoryError(ON_A_GPU)


def run_of(task, mlp_profile, where, **more):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    settings = RunSettings(task=task, steps=6)
    return plan, lambda: run(plan, settings, where, **more)


@pytest.mark.processes
@pytest.mark.parametrize("inline", [True, False])
def test_it_is_one_line_with_what_was_held_and_planned(inline, mlp_profile, tmp_path):
    plan, train = run_of(
        f"{TESTS / 'tasks/failing_tasks.py'}:LossTakesAll", mlp_profile, tmp_path, inline=inline
    )
    with pytest.raises(RunError) as found:
        train()
    line = str(found.value)
    assert "\n" not in line
    assert line.startswith("stage 1, at 1F2.1: out of memory on cpu (128.0 PiB more were asked for")
    assert "; the worker held " in line
    assert all(f"{kind} " in line for kind in ("weights", "optimizer", "activations"))
    planned = plan.predicted.stages[1].memory_bytes
    assert f"its plan has {planned / 1024:.1f} KiB at most" in line
    assert "--memory" in line


@pytest.mark.parametrize(
    ("name", "where"),
    [("StepTakesAll", "stage 1, at 1U0"), ("MetricsTakeAll", "stage 1, at 1 evaluation 0")],
)
def test_hooks_that_run_out_of_memory(name, where, mlp_profile, tmp_path):
    _, train = run_of(f"{Path(__file__)}:{name}", mlp_profile, tmp_path, inline=True)
    with pytest.raises(RunError, match=rf"{where}: out of memory on cpu \(2\.50 GiB more"):
        train()


def test_before_anything_has_run(mlp_profile, mlp_target, monkeypatch, tmp_path):
    def full(*_):
        raise torch.OutOfMemoryError(ON_A_GPU)

    monkeypatch.setattr(runner, "Stage", full)
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    message = (
        r"stage 0, at the start: out of memory on cpu \(2\.50 GiB more were asked for\); its plan"
    )
    with pytest.raises(RunError, match=message):
        run(plan, RunSettings(task=mlp_target, steps=6), tmp_path, inline=True)


def test_who_holds_more_than_planned_is_told_to_profile_again(mlp_profile):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    replica = all_replicas(plan)[1]
    cpu = torch.device("cpu")

    def line(held, error):
        return out_of_memory(error, plan, replica, cpu, held)

    full = torch.OutOfMemoryError(ON_A_GPU)
    much = [plan.predicted.stages[1].memory_bytes] * 7
    assert "it held more than planned: profile again" in line(much, full)
    assert "profile again" not in line([1] * 7, full)
    assert "messages 1 B" in line([1] * 7, full)
    for text in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling"):
        assert line([], RuntimeError(text)).startswith("out of memory on cpu; its plan has")
    assert line([], MemoryError()) is not None
    assert line([], ValueError("out of memory")) is None
    assert line([], RuntimeError("shapes differ")) is None
