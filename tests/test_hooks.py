"""Mistakes in the hooks of a user's task: refused in one line that names the hook."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plans import plan_by_hand, with_times
from timeprest.profiles.errors import TargetError
from timeprest.profiles.hooks import task_optimizer
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.target import resolve
from timeprest.runtime.dry_run import dry_run
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

HERE = Path(__file__).parent
TASKS = f"{HERE / 'hook_tasks.py'}"


@pytest.fixture
def plan(mlp_profile):
    return plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)


# Optimizers over other parameters -----------------------------------------------------------

OPTIMIZERS = {
    "OtherParameters": r"optimizer holds none of stage 0's 4 parameters to train \('l0\.weight', "
    r"'l0\.bias', 'l1\.weight' and 1 more\), but 8 parameters that stage 0 doesn't have: nothing "
    r"would be trained",
    "WholeModel": r"optimizer holds 4 parameters that stage 0 doesn't have",
    "MatricesAlone": r"optimizer leaves out 2 of stage 0's 4 parameters to train \('l0\.bias', "
    r"'l1\.bias'\).* requires_grad = False in model\(\)",
    "OwnWeight": r"optimizer holds 1 parameter that stage 0 doesn't have.* parameter of the model",
    "NoOptimizer": r"the task's optimizer gave None; return one of torch\.optim's",
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_over_other_parameters_is_refused_before_the_run(name, plan, tmp_path):
    settings = RunSettings(task=f"{TASKS}:{name}", steps=2, evaluate=False)
    for attempt in (run, dry_run):
        with pytest.raises(TargetError, match=OPTIMIZERS[name]):
            attempt(plan, settings, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("platform", [None, ("meta", "a100-80gb")])
def test_profiling_refuses_it_too(platform):
    platform = platform_of(*platform) if platform else None
    with pytest.raises(TargetError, match="the task's optimizer holds none of the model's"):
        measure(resolve(f"{TASKS}:OtherParameters"), batch_size=2, platform=platform, seconds=0)


def test_what_isnt_trained_may_be_in_the_optimizer_or_not(tmp_path):
    model = resolve(f"{HERE / 'variety_tasks.py'}:FrozenTask").model()
    named = list(model.named_parameters())
    trained = [p for _, p in named if p.requires_grad]
    assert len(trained) < len(named)
    for held in (trained, [p for _, p in named]):
        optimizer = torch.optim.SGD(held)
        assert task_optimizer(lambda _, o=optimizer: o, trained, named, "stage 0") is optimizer
