"""Mistakes in the hooks of a user's task: refused in one line that names the hook."""

from __future__ import annotations

import re
import sysconfig
from functools import partial

import pytest
import torch
from click.testing import CliRunner
from helpers.paths import ROOT, TESTS
from helpers.plain_training import train_plainly
from helpers.plans import plan_by_hand, with_times
from timeprest.cli.profile import main as tp_profile
from timeprest.cli.run import main as tp_run
from timeprest.profiles.errors import (
    RunError,
    TargetError,
    TaskWarning,
    TimeprestError,
    UserError,
    is_users,
)
from timeprest.profiles.files import write_file
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.target import parse_input, resolve
from timeprest.profiles.tasks.objects import misspelt_hooks
from timeprest.profiles.tasks.optimizers import task_optimizer
from timeprest.runtime.prepare import tracing as tracing_module
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify import dry_run as dry_run_module
from timeprest.runtime.verify.dry_run import dry_run
from timeprest.runtime.verify.hooks import try_training

TASKS = f"{TESTS / 'tasks/hook_tasks.py'}"


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
    "Closure": r"optimizer gave a LBFGS, whose step\(\) needs closure: .* return another one",
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
    model = resolve(f"{TESTS / 'tasks/variety_tasks.py'}:FrozenTask").model()
    named = list(model.named_parameters())
    trained = [p for _, p in named if p.requires_grad]
    assert len(trained) < len(named)
    for held in (trained, [p for _, p in named]):
        optimizer = torch.optim.SGD(held)
        assert task_optimizer(lambda _, o=optimizer: o, trained, named, "stage 0") is optimizer


def test_a_model_begins_without_gradients():
    """The first update would have them besides."""
    assert all(p.grad is None for p in resolve(f"{TASKS}:LookedAt").model().parameters())


# Missing and misspelt hooks -----------------------------------------------------------------

MISSING = {
    "Misspelt": r"is a task without optimizer\(parameters\): rename 'optimiser' to optimizer",
    "misspelt": r"is a task without optimizer\(parameters\): rename 'optimiser' to optimizer",
    "NoData": r"is a task without data\(split\): write data\(split\)",
    "NoLoss": r"loss is None, not a method: write loss\(output, target\)",
    "ModelItself": r"model is a Linear, not a method: write model\(\) so that it makes a new one",
    "Lightning": r"is a model, not a task: .*it has loss and optimizer; a task isn't a torch\.nn",
    "Maker": r"is a task without model\(\)",
}


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_hook_is_named(name):
    with pytest.raises(TargetError, match=MISSING[name]):
        resolve(f"{TASKS}:{name}")


def test_what_makes_a_task_may_come_with_the_object():
    assert resolve(f"{TASKS}:MadeLater").task is not None


def test_a_model_may_have_something_of_a_task():
    """With --input it is one: a module, or whatever makes one when it is called."""
    inputs = [parse_input("5:float64")]
    assert resolve(f"{TASKS}:Lightning", inputs).task is None
    assert isinstance(resolve(f"{TASKS}:make_model", inputs).model(), torch.nn.Module)


@pytest.mark.parametrize("name", [f"{TASKS}:MLPTask", "vgg16"])
def test_a_task_is_not_told_what_its_model_takes(name):
    """It would go on with its data's own shapes, and the figures would be of those."""
    with pytest.raises(TargetError, match=r"is a task, whose data say .*: leave --input out"):
        resolve(name, [parse_input("3x32x32:float32")])


def test_an_optional_hook_that_is_misspelt_gets_a_warning(plan, tmp_path):
    (line,) = misspelt_hooks(resolve(f"{TASKS}:Metric").task)
    assert line.startswith("the task has 'metric', which nothing calls: is metrics(output, target)")
    assert misspelt_hooks(resolve("digits").task) == []
    settings = RunSettings(task=f"{TASKS}:Metric", steps=1, evaluate=False)
    assert line in dry_run(plan, settings, str(tmp_path / "run")).warnings
    with pytest.warns(TaskWarning, match="'metric', which nothing calls"):
        run(plan, settings, tmp_path / "run", inline=True)


# Hooks that give something else ---------------------------------------------------------------

BLAMED = {
    "ModelNone": r"model\(\) gave None where a torch\.nn\.Module is needed",
    "DataNone": r"data\('train'\) gave None; return a map-style Dataset",
    "DataOfSplits": r"data\('train'\) gave a mapping of 'train', 'test'; return that split's",
    "DataOnce": r"data\('train'\) gave an iterator, which is over after one pass",
    "DataTensors": r"gave a tuple of Tensors; wrap tensors in a data set: .*TensorDataset\(inputs",
    "TestDataNone": r"data\('test'\) gave None; return a map-style Dataset \(or .*--no-evaluate\)",
    "Uneven": r"data\(split\): its samples can't be put into a batch: .*equal size",
    "LossNone": r"loss must (give|be) one number",
    "LossRaises": r"the task's loss failed: .*hook_tasks\.py:\d+: RuntimeError",
    "LossDetached": r"loss (gives a number without a gradient|must give one number that depends)",
    "MetricsNone": r"the task's metrics gave None; return a dict",
    "MetricsRaise": r"the task's metrics failed: .*hook_tasks\.py:\d+: RuntimeError",
    "MetricsUnnamed": r"the task's metrics gave a figure named 1; names must be text",
    "SchedulerText": r"the task's scheduler gave a str; return one of torch\.optim\.lr_scheduler",
    "SchedulerRaises": r"the task's scheduler failed in step\(\): .*hook_tasks\.py:\d+: ZeroDiv",
    "StepRaises": r"the task's optimizer failed in step\(\): .*hook_tasks\.py:\d+: ZeroDiv",
}
"""What a run says of each."""


@pytest.mark.parametrize("name", BLAMED)
def test_a_run_blames_the_hook(name, plan, tmp_path):
    settings = RunSettings(task=f"{TASKS}:{name}", steps=2)
    with pytest.raises(TimeprestError, match=BLAMED[name]):
        run(plan, settings, tmp_path / "run", inline=True)


# Losses that use parameters of the model ------------------------------------------------------

OTHERS = {
    "LossPenalty": r"uses the model's parameter 'l0\.weight' \(and \d more\), which the last stage",
    "LossOfFirst": r"uses the model's parameter 'l0\.weight', which the last stage doesn't update",
    "LossTemperature": r"parameter 'temperature', .*; return it, or .* as an output of forward",
}


@pytest.fixture(scope="module")
def of_model():
    """A profile of their model."""
    task = resolve(f"{TASKS}:LossOfLast")
    return with_times(measure(task, batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("large", [False, True])
def test_a_loss_that_reaches_for_parameters_of_other_stages_is_refused(
    name, large, of_model, tmp_path, monkeypatch
):
    """Their gradients would be nobody's."""
    if large:
        monkeypatch.setattr(tracing_module, "is_small", lambda plan: False)
    plan = plan_by_hand(of_model, "timeprest", 2, 4)
    settings = RunSettings(task=f"{TASKS}:{name}", steps=2, evaluate=False)
    for attempt in (run, partial(run, inline=True), dry_run):
        with pytest.raises(TargetError, match=OTHERS[name]):
            attempt(plan, settings, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_it_is_the_users_to_mend(of_model, tmp_path):
    """One line, and exit code 2."""
    write_file(tmp_path / "plan.json", plan_by_hand(of_model, "timeprest", 2, 4))
    given = [str(tmp_path / "plan.json"), "--steps", "2", "--task", f"{TASKS}:LossPenalty"]
    for more in (["--dry-run"], ["--inline", "--run-dir", str(tmp_path / "run")]):
        result = CliRunner().invoke(tp_run, given + more)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert "'l0.weight'" in line


@pytest.mark.parametrize(
    ("name", "stages"), [("LossOfLast", 2), ("LossOfLast", 1), ("LossPenalty", 1)]
)
def test_a_loss_may_use_what_its_own_stage_updates(name, stages, of_model, tmp_path):
    """It trains as in plain torch."""
    plan = plan_by_hand(of_model, "gpipe", stages, 2)
    settings = RunSettings(task=f"{TASKS}:{name}", steps=3, evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    _, model = train_plainly(f"{TASKS}:{name}", 8, 3)
    weights = load_weights(tmp_path / "run")
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[key], tensor)


def test_what_a_loss_alone_has_is_said_not_to_be_trained(of_model, tmp_path):
    plan = plan_by_hand(of_model, "gpipe", 2, 2)
    settings = RunSettings(task=f"{TASKS}:LossOfItsOwn", steps=2, evaluate=False)
    with pytest.warns(TaskWarning, match=r"to a parameter that isn.t the model.s \(a number\)"):
        run(plan, settings, tmp_path / "run", inline=True)


def test_what_only_a_loss_uses_is_no_stages(of_model, tmp_path):
    """On one stage, too."""
    plan = plan_by_hand(of_model, "gpipe", 1, 2)
    settings = RunSettings(task=f"{TASKS}:LossTemperature", steps=2, evaluate=False)
    with pytest.raises(TargetError, match="parameter 'temperature'"):
        run(plan, settings, tmp_path / "run", inline=True)


# Trying every hook before a run -----------------------------------------------------------------

TRIED = {
    **BLAMED,
    "MetricsOfEach": r"the task's metric 'error' must be (one|a) number",
    "Unwritable": r"a checkpoint can't hold|'rule'",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    # Of a large model, no checkpoint is put together.
    ("name", "large"),
    [
        (name, large)
        for name in TRIED
        for large in (False, True)
        if name != "Unwritable" or not large
    ],
)
def test_a_dry_run_tries_every_hook(name, large, plan, tmp_path, monkeypatch):
    """As a run does; of a large model on numbers that stand in for its results. It is the user who
    has to mend it: exit code 2."""
    if large:
        monkeypatch.setattr(dry_run_module, "is_small", lambda plan: False)
    with pytest.raises(UserError, match=TRIED[name]):
        dry_run(plan, RunSettings(task=f"{TASKS}:{name}", steps=2), str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["TestDataNone", "MetricsNone", "Unwritable"])
def test_what_a_run_leaves_out_isnt_tried(name, plan, tmp_path):
    settings = RunSettings(task=f"{TASKS}:{name}", steps=2, evaluate=False, checkpoint_every=0)
    assert dry_run(plan, settings, str(tmp_path / "run")).problems == ()


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("name", "sums"),
    [("MetricsCount", ["metric 'right'"]), ("LossSum", ["loss"]), ("MLPTask", [])],
)
def test_sums_in_place_of_means_get_a_warning(name, sums, large, plan, tmp_path, monkeypatch):
    monkeypatch.setattr(dry_run_module, "is_small", lambda plan: not large)
    task = f"{TASKS}:{name}"
    found = dry_run(plan, RunSettings(task=task, steps=2), str(tmp_path / "run")).warnings
    assert [line.split(" doubles where")[0] for line in found if " doubles where" in line] == [
        f"the task's {figure}" for figure in sums
    ]


def test_figures_that_divide_by_nothing_among_a_few_samples_get_a_warning(plan, tmp_path):
    """In all of them there may be some."""
    task, said = f"{TASKS}:FiguresOfNone", r"figures failed: .*ZeroDivisionError.* a few samples"
    with pytest.warns(TaskWarning, match=said):
        measure(resolve(task), batch_size=2, seconds=0)
    found = dry_run(plan, RunSettings(task=task, steps=2), str(tmp_path / "run"))
    assert any(re.search(said, line) for line in found.warnings)


def test_a_loss_among_the_metrics_may_be_a_float(plan, tmp_path):
    """It takes the place of the task's own in evaluations, as a tensor of that name does."""
    summary = run(plan, RunSettings(task=f"{TASKS}:MetricsLoss", epochs=1), tmp_path, inline=True)
    own = run(plan, RunSettings(task=f"{TASKS}:MLPTask", epochs=1), tmp_path / "own", inline=True)
    assert summary.epochs[0].test["loss"] == pytest.approx(own.epochs[0].test["loss"] + 1)


def test_a_trial_leaves_random_numbers_as_they_were(plan, mlp_target):
    prepared = prepare(plan, RunSettings(task=mlp_target, steps=2))
    before = torch.get_rng_state()
    assert try_training(prepared) == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "name", [name for name in TRIED if name not in ("TestDataNone", "Unwritable")]
)
@pytest.mark.parametrize("platform", [("cpu",), ("meta", "a100-80gb")])
def test_profiling_tries_every_hook(name, platform):
    with pytest.raises(UserError, match=TRIED[name]) as error:
        measure(
            resolve(f"{TASKS}:{name}"),
            batch_size=4,
            platform=platform_of(*platform),
            seconds=0,
        )
    assert "the model failed" not in str(error.value)


def test_profiling_warns_of_what_only_an_evaluation_needs():
    with pytest.warns(TaskWarning, match=r"data\('test'\) gave None.*--no-evaluate"):
        measure(resolve(f"{TASKS}:TestDataNone"), batch_size=2, seconds=0)
    failing = r"data\('test'\) failed: .*hook_tasks\.py:\d+: OSError: no such file.*--no-evaluate"
    with pytest.warns(TaskWarning, match=failing):
        measure(resolve(f"{TASKS}:TestSampleRaises"), batch_size=2, seconds=0)
    with pytest.warns(TaskWarning, match="metric 'right' doubles"):
        measure(resolve(f"{TASKS}:MetricsCount"), batch_size=2, seconds=0)


# Hooks that end programs ---------------------------------------------------------------------

ENDINGS = {
    "Ending": "SystemExit: 0",
    "EndingByGeneratorExit": "GeneratorExit",
    "EndingByItsOwn": "Mine: text",
    "EndingWithoutText": r"_NoTextError: \(its text can't be had: __str__ raised GeneratorExit\)",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_whatever_a_hook_raises_fails_the_run_and_names_it(name, plan, tmp_path):
    settings = RunSettings(task=f"{TASKS}:{name}", steps=4, evaluate=False)
    where = r"^stage \d, at \dU\d: the task's optimizer failed in step\(\): .*hook_tasks\.py:\d+: "
    with pytest.raises(RunError, match=f"{where}{ENDINGS[name]}$"):
        run(plan, settings, tmp_path / "run", inline=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [("EndingModel", "building the model failed: "), ("EndingForward", "")],
)
def test_a_model_that_ends_the_program_is_said_so(name, said):
    """Whatever code it asks for, the command failed."""
    result = CliRunner().invoke(tp_profile, [f"{TASKS}:{name}", "--batch-size", "4"])
    assert result.exit_code in (1, 2)
    (line,) = result.stderr.splitlines()
    assert re.search(rf"{said}\S*hook_tasks\.py:\d+: SystemExit: 0$", line)


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        (
            "RowsRaise",
            2,
            r"data\('train'\) failed: \S*hook_tasks.py:\d+: ValueError: bad",
        ),
        # Gradients of zeros, that its steps are timed with, leave no weights to try it with.
        ("StepsOfOneLength", 0, r"the update of parameter 'l0.weight' is off by .* by all of them"),
    ],
)
def test_what_a_profile_says_of_a_task(name, code, said, tmp_path):
    words = (f"{TASKS}:{name}", "--batch-size", "8", "-o", tmp_path / "profile.json", "-q")
    result = CliRunner().invoke(tp_profile, [str(word) for word in words])
    assert result.exit_code == code
    assert re.search(said, result.stderr)


# Whose line is named -------------------------------------------------------------------------


def test_whose_code_a_file_is():
    assert is_users(str(ROOT / "cli_task.py"))
    assert is_users("mine.py")
    ours, library = str(ROOT / "cli/errors.py"), f"{sysconfig.get_path('purelib')}/click/core.py"
    for file in (ours, library, torch.__file__, re.__file__, "<string>"):
        assert not is_users(file)
    # Where a model fails, a library's model is named, and torch isn't.
    assert is_users(library, models=True)
    assert is_users(str(ROOT / "profiles/zoo/gpt2.py"), models=True)
    for file in (torch.__file__, re.__file__, str(ROOT / "profiles/tracing/fx.py")):
        assert not is_users(file, models=True)
