"""What plain attributes keep isn't in checkpoints: a run that goes on says so."""

import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.systems.hooks import HookChain
from timeprest.profiles.errors import TaskWarning
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.runtime.checkpoint.plain_attributes import changed, plain_attributes
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from torch import nn

TASK = f"{TESTS / 'tasks/checkpoint_tasks.py'}:RememberingTask"


def trained(target, where, **how):
    profile = measure(resolve(target), batch_size=8, micro_batch_sizes=[4, 8], seconds=0)
    plan = plan_by_hand(with_times(profile), "gpipe", 2, 2)
    asked = {"task": target, "steps": 4, "checkpoint_every": 2, "evaluate": False, **how}
    run(plan, RunSettings(**asked), where, inline=True)


def warnings_of_going_on(where):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resume(where, steps=6, inline=True)
    return [str(w.message) for w in caught if issubclass(w.category, TaskWarning)]


def test_a_run_that_goes_on_names_what_begins_anew(tmp_path):
    trained(TASK, tmp_path)
    (line,) = [w for w in warnings_of_going_on(tmp_path) if "changed in training" in w]
    for name in ("optimizer's (stage 0) steps", "task's center.calls", "task's center.mean"):
        assert name in line
    assert "task's history" in line
    assert "still" not in line


def test_nothing_is_said_where_everything_is_in_the_checkpoint(mlp_target, tmp_path):
    adam = OptimizerChoice(name="adam", lr=0.01)
    trained(mlp_target, tmp_path, optimizer=adam)
    assert not warnings_of_going_on(tmp_path)


class Kept(nn.Module):
    """As an LSTM, which has its weights in a list, too, and weights made of others."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(4, 4)
        self.normed = nn.utils.weight_norm(nn.Linear(4, 4))
        self.count = 0


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
def stage_of(module, optimizer, task):
    return SimpleNamespace(
        number=0,
        piece=SimpleNamespace(module=module, task=task),
        updates=SimpleNamespace(optimizer=optimizer),
        hooks=HookChain([]),
    )


def test_weights_are_no_plain_attributes():
    module = Kept()
    optimizer = torch.optim.Adam(module.parameters())
    stage = stage_of(module, optimizer, object())
    before = plain_attributes([stage])
    module.normed(module.inner(torch.randn(2, 3, 4))[0]).sum().backward()
    optimizer.step()
    module.eval()
    assert not changed(before, [stage])
    module.count += 10**5000
    assert changed(before, [stage]) == ["the model's count"]


def test_large_tensors_are_told_by_what_is_written_into_them():
    """A task's data aren't summed up at each checkpoint."""
    task = SimpleNamespace(data=torch.zeros(2**21), mask=torch.ones(3), sparse=torch.eye(2))
    task.sparse = task.sparse.to_sparse()
    stage = stage_of(nn.Linear(1, 1), None, task)
    before = plain_attributes([stage])
    task.mask = torch.ones(3)
    assert not changed(before, [stage])
    task.data[5] = 1.0
    task.sparse = task.sparse * 2
    assert changed(before, [stage]) == ["the task's data", "the task's sparse"]


def test_generators_of_their_own_begin_anew():
    """Nothing of them is in checkpoints."""
    module, task = nn.Linear(1, 1), SimpleNamespace(noise=random.Random(0))
    module.drawn, module.still = torch.Generator(), torch.Generator()
    task.numpy = [np.random.default_rng(0)]
    stage = stage_of(module, None, task)
    before = plain_attributes([stage])
    assert not changed(before, [stage])
    torch.rand(3, generator=module.drawn)
    task.noise.random()
    task.numpy[0].random()
    names = ["the model's drawn (Generator)", "the task's noise (Random)", "the task's numpy"]
    assert changed(before, [stage]) == names
