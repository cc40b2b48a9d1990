"""Workers that don't have the same data are told before they train on them."""

from __future__ import annotations

import pytest
import torch
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from timeprest.profiles.errors import TargetError, UserError
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import RunSettings

TASKS = TESTS / "tasks/data_tasks.py"
WRONG = [
    (
        "UnseededTargets",
        r"data\('train'\) gives other targets for the first mini-batches of ep",
    ),
    ("UnseededInputs", r"data\('train'\) gives other inputs for the first mini-batches of ep"),
    ("UnseededOrder", r"data\('train'\) gives other targets for"),
    ("Mixed", r"data\('train'\) gives other targets for"),
    ("UnseededLength", r"data\('train'\) has \d+ samples "),
    ("UnseededTest", r"data\('test'\) gives other targets for the first micro-batches on stage 1"),
    ("UnseededTestLength", r"data\('test'\) has \d+ samples on stage 0 and \d+ on stage 1"),
]


def settings_for(name, **more):
    return RunSettings(task=f"{TASKS}:{name}", **more)


@pytest.mark.parametrize(("name", "message"), WRONG)
def test_data_that_differ_end_a_run(name, message, mlp_profile, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    with pytest.raises(TargetError, match=message) as caught:
        run(plan, settings_for(name, steps=2), tmp_path / "run", inline=True)
    assert "\n" not in str(caught.value)
    assert "seed each random generator" in str(caught.value)


@pytest.mark.processes
def test_data_that_differ_end_processes(mlp_profile, tmp_path):
    name = "UnseededTargets"
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 3, 2)
    with pytest.raises(UserError, match=dict(WRONG)[name]) as caught:
        run(plan, settings_for(name, steps=2), tmp_path / "run")
    assert str(caught.value).endswith("(docs/tasks.md)")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("replicas", [(2,), (1, 2), (2, 1)])
def test_replicas_have_the_same_data_too(replicas, mlp_profile, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", len(replicas), 2, replicas=replicas)
    how = {"steps": 2, "evaluate": False}
    with pytest.raises(TargetError, match="gives other targets for"):
        run(plan, settings_for("UnseededTargets", **how), tmp_path / "wrong", inline=True)
    run(plan, settings_for("Augmented", **how), tmp_path / "right", inline=True)


def test_one_stage_may_draw_its_samples(mlp_profile, tmp_path):
    """It has inputs and targets of the same draw, and nobody else has any."""
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 1, 2)
    for name in ("Mixed", "UnseededTargets"):
        run(plan, settings_for(name, steps=2), tmp_path / name, inline=True)
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 1, 2, replicas=(2,))
    run(plan, settings_for("Mixed", steps=2), tmp_path / "run", inline=True)


def test_inputs_of_the_first_stage_may_be_drawn(mlp_profile, tmp_path):
    """Augmentation: nobody else takes them."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    run(plan, settings_for("Augmented", steps=2), tmp_path / "run", inline=True)


def test_a_resumed_run_compares_from_where_it_goes_on(mlp_profile, tmp_path):
    """In the middle of an epoch, with data that have changed since."""
    task = tmp_path / "task.py"
    text = "from data_tasks import {0} as Task\n"
    task.write_text(text.format("Augmented"))
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    how = RunSettings(task=f"{task}:Task", steps=4, evaluate=False, checkpoint_every=4)
    run(plan, how, tmp_path / "run", inline=True)
    task.write_text(text.format("UnseededOrder"))
    with pytest.raises(TargetError, match="gives other targets for the first mini-batches of epo"):
        resume(tmp_path / "run", steps=8, inline=True)


def test_comparing_draws_nothing(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """Random numbers of workers are where they were without it."""
    from timeprest.runtime.training import evaluation, loop

    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    seen = []
    for name in ("compared", "not"):
        if name == "not":
            for module, check in (
                (loop, "compare_lengths"),
                (loop, "compare_training"),
                (evaluation, "compare_evaluation"),
            ):
                monkeypatch.setattr(module, check, lambda *_: None)
        run(plan, settings_for("Augmented", steps=2), tmp_path / name, inline=True)
        seen.append(torch.get_rng_state())
    assert torch.equal(*seen)
