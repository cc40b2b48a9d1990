"""--dry-run: what a run needs is checked, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from functools import partial

import msgspec
import psutil
import pytest
import torch
from click.testing import CliRunner
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled, with_times
from timeprest.cli.run import main
from timeprest.cli.run_commands.checks import device_lines
from timeprest.profiles.errors import FileError, PlanError, RunError, TargetError
from timeprest.profiles.files import write_file
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify import cuts, findings
from timeprest.runtime.verify.cuts import check_shapes
from timeprest.runtime.verify.dry_run import dry_run


@pytest.fixture
def plan(mlp_profile):
    return plan_by_hand(with_times(mlp_profile), "timeprest", 3, 4)


def test_it_finds_workers_hosts_and_cuts(plan, mlp_target, tmp_path):
    found = dry_run(plan, RunSettings(task=mlp_target, steps=7), str(tmp_path / "run"))
    assert found.world_size == 3
    assert found.mini_batches == 7
    assert [(c.source, c.target) for c in found.cuts] == [
        ("stage 0", "stage 1"),
        ("stage 1", "stage 2"),
    ]
    assert all(cut.shape[0] == plan.micro_batch and cut.dtype == "float64" for cut in found.cuts)
    planned = [stage.memory_bytes for stage in plan.predicted.stages]
    assert [worker.planned_bytes for worker in found.workers] == planned
    assert [host.planned_bytes for host in found.hosts] == [sum(planned)]
    assert found.problems == ()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("task", ["tasks/graph_task.py:GraphTask", "tasks/mlp_task.py:MLPTask"])
def test_shapes_go_through_every_cut(task, fake, monkeypatch):
    """Skips, several values on a cut, numbers; on fake tensors as for real, and replicated."""
    name = f"{TESTS / task}"
    profile = profiled(name)
    monkeypatch.setattr(cuts, "is_small", lambda plan: not fake)
    for replicas in (None, (2, 1)):
        plan = plan_by_hand(profile, "timeprest", 2, 4, replicas=replicas)
        check_shapes(prepare(plan, RunSettings(task=name, steps=2)))


def test_a_model_that_fails_here_is_named(plan, mlp_target, monkeypatch):
    """As where it looks for a file that the machine of the profile had."""

    def forward(self, x):
        raise FileNotFoundError("words.txt")

    monkeypatch.setattr(torch.nn.Tanh, "forward", forward)
    for look in (dry_run, partial(run, inline=True)):
        with pytest.raises(TargetError, match=r"the model failed on its own inputs.*words\.txt"):
            look(plan, RunSettings(task=mlp_target, steps=2), "runs/never")


def test_a_stage_that_makes_another_shape_is_named(plan, mlp_target):
    prepared = prepare(plan, RunSettings(task=mlp_target, steps=2))
    name, spec = next((n, s) for n, s in prepared.model.stages[0].specs.items() if n == "t0")
    prepared.model.stages[0].specs[name] = replace(spec, shape=(2, 99))
    with pytest.raises(
        RunError, match=r"stage 0 makes 't0' as .* and what follows takes \(2, 99\)"
    ):
        check_shapes(prepared)


def test_too_little_memory_is_a_problem(plan, mlp_target, tmp_path, monkeypatch):
    class Full:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Full)
    found = dry_run(plan, RunSettings(task=mlp_target, steps=7), str(tmp_path / "run"))
    assert len(found.problems) == 1
    assert found.problems[0].endswith("and 1000 B are free")


def test_workers_of_a_host_that_take_turns_are_a_warning(plan, mlp_target, tmp_path, monkeypatch):
    """And the run is ready all the same."""
    settings = RunSettings(task=mlp_target, steps=7)
    write_file(tmp_path / "plan.json", plan)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(findings, "usable_cores", lambda: 2)
    found = dry_run(plan, settings, "run")
    (told,) = found.warnings
    assert "3 processes take turns on 2 cores" in told
    assert told.endswith("tp-plan solve --devices 2 --stages-per-device auto plans for it")
    assert found.problems == ()
    told = CliRunner().invoke(main, ["plan.json", "--dry-run", "--steps", "7"])
    assert told.exit_code == 0
    assert "warning: " in told.output
    monkeypatch.setattr(findings, "usable_cores", lambda: 3)
    assert dry_run(plan, settings, "run").warnings == ()


def test_a_plan_that_was_edited_is_named(plan, mlp_target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    figures = msgspec.structs.replace(plan.predicted, samples_per_s=1e9)
    write_file("mine.json", msgspec.structs.replace(plan, predicted=figures))
    words = ["mine.json", "--dry-run", "--steps", "2", "--task", mlp_target]
    told = CliRunner().invoke(main, words)
    assert "mine.json: edited since it was made: tp-plan check mine.json" in told.stderr


def test_a_hook_that_fails_is_in_the_way(plan, tmp_path, monkeypatch):
    """Exit code 2, though a run that it ends has 1."""
    monkeypatch.chdir(tmp_path)
    write_file("plan.json", plan)
    task = f"{TESTS / 'tasks/hook_tasks.py'}:LossRaises"
    told = CliRunner().invoke(main, ["plan.json", "--dry-run", "--steps", "2", "--task", task])
    assert told.exit_code == 2
    (line,) = told.stderr.splitlines()
    assert re.search(r"stage 2, at 2F0\.0: the task's loss failed: .*: RuntimeError", line)


def test_a_scheduler_is_told_how_long_the_run_is(plan, tmp_path):
    """And not the mini-batch that is tried, a tenth of which is none."""
    settings = RunSettings(task=f"{TESTS / 'tasks/hook_tasks.py'}:Warmed", steps=20)
    assert not dry_run(plan, settings, str(tmp_path / "run")).problems


@pytest.mark.parametrize(
    ("cores", "threads", "devices"),
    [(2, 1, 2), (1, 1, 1), (4, 2, 2), (1, 2, 1), (3, 1, None), (4, 1, None), (8, 2, None)],
)
def test_a_run_says_that_its_processes_take_turns(plan, monkeypatch, cores, threads, devices):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    settings = RunSettings(task="x", threads=threads)
    told = [line for line in device_lines(plan, settings, 3) if "take turns" in line]
    assert len(told) == (devices is not None)
    assert all(f" --devices {devices} " in line for line in told)
    assert not any("turns" in line for line in device_lines(plan, settings, 3, inline=True))
    assert not any("turns" in line for line in device_lines(plan, settings, 3, one_host=False))


@pytest.mark.parametrize(("gpus", "devices"), [(1, 1), (2, 2), (3, None)])
def test_a_run_says_that_its_processes_share_gpus(plan, monkeypatch, gpus, devices):
    monkeypatch.setattr("timeprest.runtime.prepare.devices.gpu_count", lambda: gpus)
    settings = RunSettings(task="x", device="cuda")
    told = [line for line in device_lines(plan, settings, 3) if "take turns" in line]
    assert len(told) == (devices is not None)
    assert all(f" --devices {devices} " in line for line in told)


def test_what_makes_a_run_impossible_is_an_error(plan, mlp_target, tmp_path):
    settings = RunSettings(task=mlp_target, steps=7)
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="isn't a folder one can write to"):
        dry_run(plan, settings, str(tmp_path / "file" / "run"))
    (tmp_path / "plan.json").write_text("")
    with pytest.raises(FileError, match=r"write over its own plan\.json"):
        dry_run(plan, settings, str(tmp_path))
    other = msgspec.structs.replace(
        plan, profile=msgspec.structs.replace(plan.profile, fingerprint="0" * 32)
    )
    with pytest.raises(PlanError, match="was made for another model"):
        dry_run(other, settings, str(tmp_path / "run"))


@pytest.mark.choice(0)
@pytest.mark.processes
def test_under_torchrun_messages_go_over_the_cuts(plan, tmp_path):
    write_file(tmp_path / "plan.json", plan)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
    command = ["-m", "timeprest.cli.run", "plan.json", "--dry-run", "--json"]
    done = subprocess.run(
        [*launcher, "--master-port", port, *command],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["meets_at"] == f"127.0.0.1:{port}"
    assert [host["address"] for host in found["hosts"]] == ["127.0.0.1"]
    assert not (tmp_path / "runs").exists()
