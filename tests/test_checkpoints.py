"""Checkpoints: a run that was stopped and resumed is the run that wasn't, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from plans import plan_by_hand, with_times
from safetensors.torch import load_file
from timeprest.planner.variants import VARIANTS
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.runtime.observer import Silent, read_losses
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings

HERE = Path(__file__).parent
RUNNING = list(VARIANTS)
WHOLE = [name for name in RUNNING if VARIANTS[name].whole_mini_batches]
MOMENTUM = OptimizerChoice(name="sgd", lr=0.05, momentum=0.9)
PLAIN = OptimizerChoice(name="sgd", lr=0.05)
ADAM = OptimizerChoice(name="adam", lr=0.02)

_profiles = {}


class Stopped(KeyboardInterrupt):
    """Somebody pulls the plug."""


class StopsAfter(Silent):
    """Ends a run once so many mini-batches' losses are known."""

    def __init__(self, mini_batches):
        self.left = mini_batches

    def mini_batch(self, epoch, done, of, loss):
        if not self.left:
            raise Stopped
        self.left -= 1


def profile_of(target):
    if target not in _profiles:
        found = measure(resolve(target), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
        _profiles[target] = with_times(found)
    return _profiles[target]


def plan_for(target, variant, stages=3, n=4, **how):
    n = 1 if VARIANTS[variant].whole_mini_batches else n
    return plan_by_hand(profile_of(target), variant, stages, n, **how)


def settings_for(target, **how):
    return RunSettings(
        **{"task": target, "steps": 12, "checkpoint_every": 4, "evaluate": False, **how}
    )


def run_and_stop(plan, settings, where, at=9):
    with pytest.raises(Stopped):
        run(plan, settings, where, inline=True, observer=StopsAfter(at))


def everything(run_dir, at):
    """All that a checkpoint holds, and the losses up to the end."""
    folder = run_dir / "checkpoints" / f"{at:08d}"
    tensors = {
        f"{path.relative_to(folder)} {name}": tensor
        for path in folder.rglob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    numbers = {}
    for path in folder.glob("state/*.json"):
        found = json.loads(path.read_text())
        # Times, and the sizes of logs with times in them.
        del found["logs"], found["sums"]
        numbers[path.name] = found
    return tensors, numbers, read_losses(run_dir / "metrics.jsonl")


def assert_same(one, other, at=12):
    """Weights, optimizer states, random numbers and losses, bit by bit."""
    (tensors, numbers, losses), (others, other_numbers, other_losses) = (
        everything(run_dir, at) for run_dir in (one, other)
    )
    assert losses == other_losses
    assert numbers == other_numbers
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def check_resumed(plan, settings, where, at=9, last=12):
    run(plan, settings, where / "whole", inline=True)
    run_and_stop(plan, settings, where / "stopped", at)
    summary = resume(where / "stopped", inline=True)
    assert_same(where / "whole", where / "stopped", last)
    return summary


@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize("variant", RUNNING)
def test_every_system_goes_on_bit_for_bit(variant, optimizer, mlp_target, tmp_path):
    check_resumed(
        plan_for(mlp_target, variant), settings_for(mlp_target, optimizer=optimizer), tmp_path
    )
