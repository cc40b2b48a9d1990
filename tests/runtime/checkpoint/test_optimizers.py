"""Optimizers that are more than their `state`: modes, others inside, memory of their own."""

from __future__ import annotations

import warnings

import msgspec
import pytest
import torch
from click.testing import CliRunner
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import check_resumed
from safetensors.torch import load_file
from timeprest.cli.run import main
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import TargetError, TaskWarning
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.optimizers import for_use
from timeprest.runtime.checkpoint.trial import try_optimizers
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.prepare.samples import Samples
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage.optimizer import hook_warnings
from timeprest.runtime.verify.check import check
from torch import nn
from whole_model_tasks import ScheduleFree

TASKS = str(TESTS / "tasks/whole_model_tasks.py")
SOME = ("gpipe", "zb-h1", "timeprest", "pipedream", "pipedream-2bw", "v-timeprest", "pipemare")


def plan_for(profile, variant, stages=3, **how):
    n = 1 if VARIANTS[variant].whole_mini_batches else 4
    return plan_by_hand(with_times(profile), variant, stages, n, **how)


def settings_for(name, **how):
    return RunSettings(**{"task": f"{TASKS}:{name}", "epochs": 3, "checkpoint_every": 4, **how})


# Modes -------------------------------------------------------------------------------------


def plainly(task, epochs=3):
    """Model and optimizer after training as its documentation says, in its training mode."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    samples = Samples(task, "train", 8, seed=0)
    optimizer.train()
    for epoch in range(epochs):
        for start in range(0, 40, 8):
            (inputs,), wanted = samples.take(epoch, range(start, start + 8))
            optimizer.zero_grad()
            task.loss(model(inputs), wanted).backward()
            optimizer.step()
    return model, optimizer


def test_what_is_evaluated_and_kept_is_for_use(mlp_profile, tmp_path):
    """Figures of evaluations, final weights, checkpoints and exports, against a plain loop."""
    settings = settings_for("Modes", eval_every=2)
    summary = run(plan_for(mlp_profile, "gpipe"), settings, tmp_path / "run", inline=True)
    task = resolve(settings.task).task
    model, optimizer = plainly(task)
    trained = {name: t.clone() for name, t in model.state_dict().items()}
    optimizer.eval()
    wanted = model.state_dict()
    assert max(float((trained[n] - t).abs().max()) for n, t in wanted.items()) > 1e-3
    code = CliRunner().invoke(main, ["export", f"{tmp_path}/run", "-o", f"{tmp_path}/m", "-q"])
    assert code.exit_code == 0, code.output
    for found in (load_weights(tmp_path / "run"), load_file(tmp_path / "m")):
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-10)
    inputs, target = task.data("test").tensors
    with torch.no_grad():
        loss = float(task.loss(model(inputs), target))
    assert summary.epochs[-1].test["loss"] == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize("variant", SOME)
def test_going_on_with_modes(variant, mlp_profile, tmp_path):
    """Bit for bit, though checkpoints have the weights for use; evaluations leave training as it
    is, whatever memory the optimizer gives the parameters."""
    how = {"replicas": (1, 2, 1)} if variant == "gpipe" else {}
    plan = plan_for(mlp_profile, variant, **how)
    check_resumed(plan, settings_for("Modes"), tmp_path, at=14, last=15)
    run(plan, settings_for("Modes", evaluate=False), tmp_path / "unseen", inline=True)
    one, other = (load_weights(tmp_path / name) for name in ("whole", "unseen"))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.processes
def test_modes_in_processes(mlp_profile, tmp_path):
    plan, settings = plan_for(mlp_profile, "timeprest"), settings_for("Modes", eval_every=2)
    found = [
        run(plan, settings, tmp_path / name, inline=name == "inline").epochs[-1].test
        for name in ("inline", "processes")
    ]
    assert found[0] == found[1]
    one, other = (load_weights(tmp_path / name) for name in ("inline", "processes"))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("name", ["Modes", "LookaheadTask"])
def test_the_check_goes_by_their_methods_too(name, mlp_profile):
    report = check(plan_for(mlp_profile, "gpipe"), settings_for(name, epochs=1), inline=True)
    assert report.verdict == "same"


def test_for_use_and_back_again():
    p = nn.Parameter(torch.randn(7))
    optimizer = ScheduleFree([p])
    optimizer.train()
    for _ in range(3):
        p.grad = torch.randn(7)
        optimizer.step()
    before, memory = p.detach().clone(), p.data_ptr()
    with for_use(optimizer):
        assert not torch.equal(p, before)
        assert not optimizer.param_groups[0]["training"]
    assert torch.equal(p, before)
    assert p.data_ptr() == memory
    assert optimizer.param_groups[0]["training"]


# State that only its own methods know ------------------------------------------------------------


@pytest.mark.parametrize("name", ["BothKeptTask", "LookaheadTask", "GlobalTask"])
@pytest.mark.parametrize("variant", ["gpipe", "timeprest"])
def test_their_own_methods_are_used(name, variant, mlp_profile, tmp_path):
    plan = plan_for(mlp_profile, variant)
    assert try_optimizers(prepare(plan, settings_for(name))) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskWarning)
        check_resumed(plan, settings_for(name, evaluate=False), tmp_path, at=14, last=15)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BothTask", "a Both, keeps more than is in its state: a run that is resumed begins with"),
        ("BothRefusedTask", "doesn't take what checkpoints keep of it.*KeyError: 'outer'"),
    ],
)
def test_what_isnt_kept_is_said_before_training(name, message, mlp_profile, tmp_path):
    plan = plan_for(mlp_profile, "gpipe")
    with pytest.warns(TaskWarning, match=message) as told:
        run(plan, settings_for(name, epochs=1), tmp_path / "run", inline=True)
    assert len(told) == 1
    assert try_optimizers(prepare(plan, settings_for(name, checkpoint_every=0))) == []


def test_what_no_file_can_hold_is_refused_before_training(mlp_profile, tmp_path):
    plan = plan_for(mlp_profile, "gpipe")
    message = "a checkpoint can't hold optimizer/.*what: it is a object"
    with pytest.raises(TargetError, match=message):
        run(plan, settings_for("UnwritableTask"), tmp_path / "run", inline=True)
    assert not (tmp_path / "run").exists()
    run(plan, settings_for("UnwritableTask", checkpoint_every=0, epochs=1), tmp_path, inline=True)


def test_it_stays_behind_where_another_run_starts(mlp_profile, tmp_path):
    plan = plan_for(mlp_profile, "gpipe")
    run(plan, settings_for("BothKeptTask", epochs=1), tmp_path / "run", inline=True)
    start = settings_for("BothKeptTask", epochs=1, start_from=str(tmp_path / "run"))
    with pytest.warns(TaskWarning, match="its optimizer, a BothKept, keeps in a state_dict of its"):
        run(plan_for(mlp_profile, "gpipe", 2), start, tmp_path / "other", inline=True)


def test_what_another_class_keeps_stays_behind(mlp_profile, mlp_target, tmp_path):
    plan, adam = plan_for(mlp_profile, "gpipe"), OptimizerChoice(name="adam", lr=1e-3)
    settings = RunSettings(task=mlp_target, steps=2, evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    start = msgspec.structs.replace(settings, start_from=str(tmp_path / "run"), optimizer=adam)
    with pytest.warns(
        TaskWarning, match="optimizer, a SGD, keeps stays behind: .*, a Adam, begins"
    ):
        run(plan, start, tmp_path / "other", inline=True)
    run(plan, start, tmp_path / "adam", inline=True)
    again = msgspec.structs.replace(start, start_from=str(tmp_path / "adam"))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskWarning)
        run(plan, again, tmp_path / "again", inline=True)


def test_profiles_count_it():
    """Momentum of matrices, two moments of the rest: it is no part of `state`."""
    found = measure(resolve(f"{TASKS}:BothKeptTask"), batch_size=8, seconds=0)
    matrices, rest = 5 * 7 + 7 * 6 + 6 * 4 + 4 * 3, 7 + 6 + 4 + 3
    wanted = (matrices + 2 * rest) / (matrices + rest)
    assert found.optimizer.state_bytes_per_parameter_byte == pytest.approx(wanted, abs=1e-6)


# Memory of its own ---------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [name for name in ALL if not VARIANTS[name].prediction])
def test_new_memory_is_the_old_one(variant, mlp_profile, tmp_path):
    """Which versions a backward sees doesn't depend on whether a step writes in place."""
    if VARIANTS[variant].update_rule != "optimizer":
        pytest.skip("takes SGD and Adam alone")
    plan = plan_for(mlp_profile, variant)
    for name in ("NewMemoryTask", "OldMemoryTask"):
        run(plan, settings_for(name, evaluate=False), tmp_path / name, inline=True)
    one, other = (load_weights(tmp_path / f"{name}MemoryTask") for name in ("New", "Old"))
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_predictions_by_a_rule_that_may_be_another_are_said(mlp_profile):
    plan = plan_for(mlp_profile, "spectrain")
    (line,) = hook_warnings(prepare(plan, settings_for("OldMemoryTask")))
    assert "by the rule of SGD, and the task's optimizer, a OldMemory, has a step() of its" in line
