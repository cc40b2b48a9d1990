"""A task's scheduler: stepped after each update or each epoch, as the task says."""

from __future__ import annotations

import msgspec
import pytest
import torch
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import assert_same, run_and_stop
from timeprest.profiles.errors import TargetError
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.hooks import RunLength
from timeprest.runtime.checkpoint.learning_rate import go_on
from timeprest.runtime.checkpoint.worker_state import unpack
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.records.progress import read_epochs
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage.optimizer import Scheduler, hook_warnings, make_scheduler
from timeprest.runtime.verify.check import check
from timeprest.runtime.verify.dry_run import dry_run

TASKS = f"{TESTS / 'tasks/hook_tasks.py'}"
EPOCH = 5
"""Mini-batches; the task's learning rate is 0.05, and half of the last after each epoch."""


def settings_of(name, **how):
    return RunSettings(**{"task": f"{TASKS}:{name}", "epochs": 3, "evaluate": False, **how})


def plan_of(profile, variant="timeprest", **how):
    return plan_by_hand(with_times(profile), variant, 2, 4, **how)


@pytest.mark.choice(14)
@pytest.mark.slow
@pytest.mark.parametrize("update_every", [1, 2])
@pytest.mark.parametrize("variant", ALL)
def test_an_epoch_ends_with_its_last_update(variant, update_every, mlp_profile, tmp_path):
    """At every stage, in every system; checkpoints in mid-epoch, and the run's end, don't count."""
    plan = plan_of(mlp_profile, variant, update_every=update_every)
    settings = settings_of("Epochs", epochs=1, steps=2 * EPOCH + 3, checkpoint_every=2)
    run(plan, settings, tmp_path / "run", inline=True)
    found = read_epochs(tmp_path / "run" / "metrics.jsonl")
    rates = [record.lr for record in found]
    assert [rate / rates[0] for rate in rates] == [1, 0.5, 0.25]
    for s in range(2):
        (folder,) = (tmp_path / "run" / "checkpoints").glob(f"*{2 * EPOCH + 3}")
        state = msgspec.json.decode((folder / f"state/stage{s}.json").read_bytes())
        assert unpack(state["scheduler"], {})["last_epoch"] == 2


@pytest.mark.parametrize("at", [4, 7])
def test_a_resumed_run_steps_where_the_whole_one_does(at, mlp_profile, tmp_path):
    plan = plan_of(mlp_profile)
    settings = settings_of("Epochs", epochs=1, steps=12, checkpoint_every=2)
    run(plan, settings, tmp_path / "whole", inline=True)
    run_and_stop(plan, settings, tmp_path / "stopped", at)
    resume(tmp_path / "stopped", inline=True)
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_more_steps_go_on_in_the_epoch_that_the_end_cut(mlp_profile, tmp_path):
    """Not at the end of `--steps`, but at that of the epoch, the rate falls."""
    plan = plan_of(mlp_profile, "gpipe")
    settings = settings_of("Epochs", epochs=1, steps=3)
    run(plan, settings, tmp_path / "run", inline=True)
    summary = resume(tmp_path / "run", steps=2 * EPOCH, inline=True)
    assert [record.lr for record in summary.epochs] == [0.05, 0.05, 0.025]


@pytest.mark.processes
def test_processes_step_as_inline(mlp_profile, tmp_path):
    plan = plan_of(mlp_profile)
    settings = settings_of("Epochs", epochs=1, steps=12)
    run(plan, settings, tmp_path / "inline", inline=True)
    run(plan, settings, tmp_path / "processes")
    assert_same(tmp_path / "inline", tmp_path / "processes")


def test_it_is_plain_training(mlp_profile):
    """Flushing systems, held against training without a pipeline, over an epoch's end."""
    plan = plan_of(mlp_profile, "gpipe")
    assert check(plan, settings_of("Epochs", steps=8), inline=True).verdict == "same"


def test_a_scheduler_may_ask_for_the_runs_length(mlp_profile, tmp_path):
    plan = plan_of(mlp_profile, update_every=2)
    settings = settings_of("Totals")
    task = resolve(settings.task).task
    optimizer = task.optimizer([torch.nn.Parameter(torch.zeros(1))])
    make_scheduler(task, settings, optimizer, RunLength(9, 3))
    assert task.told == {"steps": 9, "steps_per_epoch": 3}
    summary = run(plan, settings, tmp_path / "run", inline=True)
    rates = [0.05 * (1 - done / 9) for done in (2, 5, 8)]
    assert [record.lr for record in summary.epochs] == pytest.approx(rates)


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_run_that_grew_has_its_new_rate_from_the_first_update_on(shape, mlp_profile, tmp_path):
    """The rate that its checkpoint has is of the shorter run: 0 at its end."""
    plan, where = plan_of(mlp_profile), tmp_path / "run"
    how = {"epochs": 1, "lr_schedule": shape, "warmup": 1}
    for steps, path in ((5, tmp_path / "whole"), (4, where)):
        run(plan, settings_of("MLPTask", steps=steps, **how), path, inline=True)
    before = load_weights(where)
    resume(where, steps=5, inline=True)
    whole, grown = (read_epochs(path / "metrics.jsonl") for path in (tmp_path / "whole", where))
    assert grown[-1].lr == whole[-1].lr > 0
    assert any(not torch.equal(w, before[name]) for name, w in load_weights(where).items())


WRONG = {
    "OddStep": r'scheduler_step is \'epochs\'; it must be "update" or "epoch"',
    "OddTotals": r"scheduler asks for 'epochs': besides the optimizer it is given steps and",
    "Plateau": r"gave a ReduceLROnPlateau, whose step\(\) needs metrics",
    "OtherOptimizer": r"is over another optimizer than the one it was given",
    "ShortCycle": r"OneCycleLR is for 4 updates, and the run has \d+: have the method",
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_stepped_is_refused_before_the_run(name, mlp_profile, tmp_path):
    with pytest.raises(TargetError, match=WRONG[name]):
        run(plan_of(mlp_profile), settings_of(name), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def warned(recwarn):
    lines = [str(w.message) for w in recwarn.list if "updates now, instead of" in str(w.message)]
    recwarn.clear()
    return lines


def state_at_the_end(where):
    """What stage 1 has of rates in the newest checkpoint."""
    folder = max((where / "checkpoints").iterdir(), key=lambda path: path.name)
    state = msgspec.json.decode((folder / "state/stage1.json").read_bytes())
    return {name: state[name] for name in ("updates", "scheduler", "run_length", "groups")}


@pytest.mark.parametrize("name", ["Totals", "AskedCycle", "InParts", "Chained", "EpochTotals"])
def test_a_schedule_of_the_runs_length_grows_with_it(name, mlp_profile, tmp_path, recwarn):
    """To the last bit of rates and momenta; grown twice, and begun again in between."""
    plan, where = plan_of(mlp_profile), tmp_path / "run"
    for steps, path in ((12, tmp_path / "whole"), (4, where)):
        settings = settings_of(name, epochs=1, steps=steps, checkpoint_every=2)
        run(plan, settings, path, inline=True)
    resume(where, steps=8, inline=True)
    resume(where, at=6, inline=True)
    resume(where, steps=12, inline=True)
    assert warned(recwarn) == []
    assert state_at_the_end(where) == state_at_the_end(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Fixed", "a LinearLR, is for 4 steps, as the run was"),
        ("FixedCosine", "a SequentialLR, is for 4 steps, as the run was"),
        ("FixedEpochs", "a PolynomialLR, is for 1 steps, as the run was"),
        ("DrawnTotals", "a Drawn, goes on as in a run of 4: a new one, stepped as often, isn't in"),
        ("WarmedUp", ""),
        ("ToldUpdate", ""),
        ("Epochs", ""),
    ],
)
def test_one_that_cannot_grow_says_so_once(name, says, mlp_profile, tmp_path, recwarn):
    plan, where = plan_of(mlp_profile), tmp_path / "run"
    run(plan, settings_of(name, epochs=1, steps=4), where, inline=True)
    assert warned(recwarn) == []
    resume(where, steps=8, inline=True)
    lines = warned(recwarn)
    assert len(lines) == bool(says)
    for line in lines:
        assert line.startswith(
            "the run has 8 updates now, instead of 4, and the task's scheduler, a "
        )
        assert says in line


def test_a_cycle_that_ends_before_the_run_is_refused_when_it_goes_on():
    """The task has another one now."""
    states = []
    for updates in (4, 8):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        rule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=updates)
        states.append(rule.state_dict())
    scheduler = Scheduler(rule, length=RunLength(8, 4))
    go_on(scheduler, states[1], None)
    with pytest.raises(TargetError, match=r"is for 4 updates, and the run has 8.* --from"):
        go_on(scheduler, states[0], None)


@pytest.mark.parametrize("name", ["Open", "ToldUpdate", "Epochs", "Cycled", "Totals", "MLPTask"])
def test_a_scheduler_that_may_be_meant_per_epoch_gets_a_warning(name, mlp_profile, tmp_path):
    found = dry_run(plan_of(mlp_profile), settings_of(name), str(tmp_path / "run")).warnings
    lines = [line for line in found if "scheduler" in line]
    assert len(lines) == (name == "Open")
    for line in lines:
        assert line.startswith("the task's scheduler, a StepLR, is stepped after each update, 5 in")
        assert 'scheduler_step = "update" or "epoch"' in line


def test_a_named_schedule_has_no_two_readings(mlp_profile):
    choice = OptimizerChoice(name="sgd", lr=0.1)
    settings = settings_of("Open", lr_schedule="linear", optimizer=choice)
    assert hook_warnings(prepare(plan_of(mlp_profile), settings)) == []
