"""Runs that are stopped half-way and resumed, and whether they end as if they had not been."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from timeprest.runtime.records.progress import Observer, read_losses
from timeprest.runtime.run import resume, run


class Stopped(KeyboardInterrupt):
    """Somebody pulls the plug."""


class StopsAfter(Observer):
    """Ends a run once so many mini-batches' losses are known."""

    def __init__(self, mini_batches):
        self.left = mini_batches

    def mini_batch(self, epoch, done, of, loss, figures):
        if not self.left:
            raise Stopped
        self.left -= 1


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
    assert tensors
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


def check_resumed(plan, settings, where, at=9, last=12):
    run(plan, settings, where / "whole", inline=True)
    run_and_stop(plan, settings, where / "stopped", at)
    summary = resume(where / "stopped", inline=True)
    assert_same(where / "whole", where / "stopped", last)
    return summary
