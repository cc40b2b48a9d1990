"""A stage that has computed once before the run trains as one that hasn't."""

from __future__ import annotations

import pytest
import torch
from helpers.alike import assert_same_training, assert_same_weights
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled, with_times
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.training import train as training
from timeprest.runtime.training import warm_up as warming


@pytest.fixture
def warms_up(monkeypatch):
    """Has stages of inline runs warm up, as those on GPUs do."""

    def load_samples(runners, load=training.load_samples):
        load(runners)
        for runner in runners:
            warming.warm_up(runner)

    monkeypatch.setattr(training, "load_samples", load_samples)


@pytest.fixture
def warmed(warms_up, monkeypatch):
    """And nothing of it fail unseen."""
    found = []

    def counted(name):
        once = getattr(warming, name)

        def counting(*arguments):
            found.append(once(*arguments))

        monkeypatch.setattr(warming, name, counting)

    for name in ("train_once", "evaluate_once"):
        counted(name)
    return found


def check_same(plan, settings, tmp_path, monkeypatch, warmed, stages=2):
    run(plan, settings, tmp_path / "warm", inline=True)
    # Both of each stage, to their ends.
    assert len(warmed) == 2 * stages
    monkeypatch.setattr(warming, "warm_up", lambda runner: None)
    run(plan, settings, tmp_path / "cold", inline=True)
    assert_same_training(tmp_path / "warm", tmp_path / "cold")


@pytest.mark.choice(6)
@pytest.mark.parametrize("variant", ALL)
def test_losses_are_the_same_to_the_last_bit(
    variant, mlp_profile, mlp_target, tmp_path, monkeypatch, warmed
):
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 2)
    adam = OptimizerChoice(name="adam", lr=0.01)
    settings = RunSettings(task=mlp_target, steps=3, optimizer=adam)
    check_same(plan, settings, tmp_path, monkeypatch, warmed)


@pytest.mark.parametrize(
    ("name", "options", "chosen"),
    [
        # A loss that counts its calls.
        (TESTS / "runtime/stage/test_graphs.py:Annealed", {}, {}),
        ("checkpoint_tasks.py:ShakenTask", {"recompute": (True, True)}, {}),
        ("checkpoint_tasks.py:ShakenTask", {}, {"lr_schedule": "cosine", "autocast": "bfloat16"}),
        ("batch_norm_tasks.py:Traced", {}, {}),
        ("variety_tasks.py:SkipsTask", {}, {}),
    ],
)
def test_whatever_the_model_keeps_draws_or_sends(
    name, options, chosen, tmp_path, monkeypatch, warmed
):
    task = f"{TESTS / 'tasks' / name}"
    plan = plan_by_hand(profiled(task), "timeprest", 2, 2, **options)
    settings = RunSettings(task=task, steps=3, **chosen)
    check_same(plan, settings, tmp_path, monkeypatch, warmed)


def test_also_where_a_run_goes_on(mlp_profile, mlp_target, tmp_path, warmed, monkeypatch):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    adam = OptimizerChoice(name="adam", lr=0.01)
    settings = RunSettings(task=mlp_target, steps=6, checkpoint_every=3, optimizer=adam)
    run(plan, settings, tmp_path / "run", inline=True)
    wanted = load_weights(tmp_path / "run")
    resume(tmp_path / "run", at=3, inline=True)
    assert_same_weights(tmp_path / "run", wanted)


def test_what_fails_in_it_is_left_to_the_run(
    warms_up, mlp_profile, mlp_target, tmp_path, monkeypatch
):
    def fails(*arguments):
        raise ValueError

    monkeypatch.setattr(warming, "train_once", fails)
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    assert run(plan, RunSettings(task=mlp_target, steps=2), tmp_path / "run", inline=True)


def test_an_update_beforehand_is_of_stand_ins_alone():
    """Though a scheduler has given the optimizer a step that is its own."""
    stepped = []

    class Notes(torch.optim.SGD):
        def __getstate__(self):
            # Torch's own leave out what they were given.
            return vars(self).copy()

        def step(self, closure=None):
            stepped.append([tuple(p.shape) for p in self.param_groups[0]["params"]])
            return super().step(closure)

    weight = torch.nn.Parameter(torch.ones(100, 3))
    optimizer = Notes([weight], lr=1.0, momentum=0.9)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    warming._update_once(optimizer)
    assert stepped == [[(64, 3)]]
    assert not optimizer.state
    optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    # One with a state has made updates before, or is to go on from there.
    warming._update_once(optimizer)
    assert len(stepped) == 1
