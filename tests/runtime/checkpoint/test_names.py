"""Names and tensors of a model's state: what a run writes is loaded again, or it doesn't begin."""

from __future__ import annotations

import warnings

import pytest
import torch
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import check_resumed
from safetensors.torch import load_file, load_model
from timeprest.profiles.errors import TargetError, TaskWarning
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.runtime.checkpoint.export import export
from timeprest.runtime.checkpoint.trial import _try_tensor
from timeprest.runtime.prepare.tied_parameters import write
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify.dry_run import dry_run

TASKS = str(TESTS / "tasks/checkpoint_tasks.py")


def plan_for(target, **how):
    found = measure(resolve(target), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
    return plan_by_hand(with_times(found), "gpipe", 2, 2, **how)


def settings_for(target, **how):
    return RunSettings(**{"task": target, "steps": 9, "checkpoint_every": 3, **how})


@pytest.mark.parametrize("name", ["Wrapped", "WrappedTied"])
def test_names_that_hooks_change_are_the_state_dicts(name, tmp_path):
    """Exports, checkpoints and final weights have them; runs go on, and start from them."""
    target = f"{TASKS}:{name}"
    plan = plan_for(target, tied="split")
    with warnings.catch_warnings(record=True) as told:
        summary = check_resumed(plan, settings_for(target), tmp_path, at=7, last=9)
    said = {str(line.message).partition(" is tied")[0] for line in told}
    assert said == ({"the model's '4.weight'"} if name == "WrappedTied" else set())
    file = tmp_path / "model.safetensors"
    export(tmp_path / "whole", file)
    task = resolve(target).task
    model = task.model()
    assert load_file(file).keys() == model.state_dict().keys()
    model.load_state_dict(load_file(file))
    if not said:
        load_model(model, file)
    model.eval()
    inputs, wanted = task.data("test").tensors
    with torch.no_grad():
        loss = float(task.loss(model(inputs), wanted))
    assert loss == pytest.approx(summary.epochs[-1].test["loss"], abs=1e-10)
    starts = [
        run(plan, settings_for(target, steps=1, start_from=str(start)), tmp_path / k, inline=True)
        for k, start in (("a", file), ("b", tmp_path / "whole"))
    ]
    assert starts[0].epochs[0].train_loss == starts[1].epochs[0].train_loss
    assert starts[0].epochs[0].train_loss < summary.epochs[0].train_loss


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LeavesOut", "has '?0.weight'? otherwise than its parameters and buffers"),
        ("Adds", "has '?version'? otherwise than its parameters and buffers"),
        ("Halves", "has '?2.weight'? otherwise than its parameters and buffers"),
        ("ExtraTensor", "'2._extra_state' is made anew whenever it is asked for"),
    ],
)
def test_what_couldnt_be_loaded_is_refused(name, message, tmp_path):
    target = f"{TASKS}:{name}"
    plan = plan_for(target)
    with pytest.raises(TargetError, match=message):
        run(plan, settings_for(target), tmp_path / "run", inline=True)
    with pytest.raises(TargetError, match=message):
        dry_run(plan, settings_for(target), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_expanded_buffers_go_on(tmp_path):
    """Saved with the weights or not; the plain model can't load such a one, and that is said."""
    target = f"{TASKS}:Expanded"
    plan = plan_for(target)
    with pytest.warns(TaskWarning, match="the model's 'scale' is an expanded tensor"):
        check_resumed(plan, settings_for(target), tmp_path, at=7, last=9)
    found = dry_run(plan, settings_for(target), tmp_path / "new")
    assert sum("expanded" in line for line in found.warnings) == 1


def test_a_model_that_doesnt_load_its_own_state_is_said(tmp_path):
    target = f"{TASKS}:LoadsNothing"
    with pytest.warns(TaskWarning, match="load_state_dict.. doesn't take .*: no loading here"):
        run(plan_for(target), settings_for(target, steps=1), tmp_path / "run", inline=True)


@pytest.mark.parametrize("name", ["ShakenTask", "Wrapped", "Stepped"])
def test_a_dry_run_goes_on_from_its_checkpoint(name, tmp_path):
    target = f"{TASKS}:{name}"
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskWarning)
        assert not dry_run(plan_for(target), settings_for(target), tmp_path / "run").problems


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.zeros(2, dtype=torch.complex128)],
    ids=["sparse", "complex128"],
)
def test_a_kind_of_tensor_that_no_file_holds(tensor):
    with pytest.raises(TargetError, match="'it' can't be written to a checkpoint and read again"):
        _try_tensor("it", tensor, tensor)


def test_numbers_are_written_into_what_is_shared():
    memory = torch.zeros(2, 1, 3)
    write(memory.expand(4, 2, 5, 3), torch.arange(6.0).reshape(2, 1, 3).expand(4, 2, 5, 3))
    assert torch.equal(memory, torch.arange(6.0).reshape(2, 1, 3))
