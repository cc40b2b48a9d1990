"""Runs with copies of shared parameters on several stages: plain training, copies alike."""

from __future__ import annotations

import msgspec
import pytest
import torch
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from timeprest.profiles.errors import PlanError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.pieces import cut
from timeprest.runtime.checkpoint.export import export
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.prepare.tied_parameters import give_copies
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.verify.check import check

FILE = TESTS / "tasks/variety_tasks.py"
ORDERS = [(v, s) for v in ("gpipe", "pipedream-flush") for s in (2, 3, 4)] + [("zb-h1", 3)]
TASKS = ["TiedTask", "TiedByCallTask"]

_profiles = {}


def plan_for(name, variant, stages, replicas=None):
    """Even cuts into `stages`, each on one device, or on as many as `replicas` say."""
    if name not in _profiles:
        target = resolve(f"{FILE}:{name}")
        found = measure(target, batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
        _profiles[name] = with_times(found)
    return plan_by_hand(_profiles[name], variant, stages, 4, replicas=replicas, tied="split")


def settings_for(name, **more):
    return RunSettings(task=f"{FILE}:{name}", steps=4, **more)


def copies_of(run_dir, stages, name="wte.weight"):
    """The shared weight as each stage that uses it has it at the end."""
    files = [load_file(run_dir / "weights" / f"stage{s}.safetensors") for s in range(stages)]
    return [file[name] for file in files if name in file]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "stages"), ORDERS)
@pytest.mark.parametrize("name", TASKS)
def test_copies_train_as_one_parameter_does(name, stages, variant, tmp_path):
    """Losses, gradients and weights to 1e-10, and copies bit by bit."""
    plan = plan_for(name, variant, stages)
    report = check(plan, settings_for(name), inline=True, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    assert report.tolerance == 1e-10
    assert all(d.absolute < 1e-10 for against in report.against for d in against.differences)
    copies = copies_of(tmp_path / "run", stages)
    assert len(copies) == 2
    assert torch.equal(*copies)
    if name == "TiedTask":
        assert torch.equal(*copies_of(tmp_path / "run", stages, "head.weight"))


@pytest.mark.parametrize("every", [0, 2])
def test_an_exported_tie_is_written_once(every, tmp_path):
    """From final weights and from a checkpoint; safetensors' own loader puts it back."""
    settings = settings_for("TiedTask", checkpoint_every=every)
    summary = run(plan_for("TiedTask", "gpipe", 3), settings, tmp_path / "run", inline=True)
    path = tmp_path / "model.safetensors"
    assert export(tmp_path / "run", path).tied == {"head.weight": "wte.weight"}
    with safe_open(path, framework="pt") as file:
        assert "head.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata()["head.weight"] == "wte.weight"
        assert file.metadata()["format"] == "pt"
    task = resolve(f"{FILE}:TiedTask").task
    models = [task.model() for _ in range(3)]
    for model in models:
        # What is loaded has to be seen.
        torch.nn.init.zeros_(model.wte.weight)
    assert load_model(models[0], path) == (set(), [])
    missing, unexpected = models[1].load_state_dict(load_file(path), strict=False)
    assert (missing, unexpected) == (["head.weight"], [])
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        models[2].load_state_dict(load_file(path))
    trained = copies_of(tmp_path / "run", 3)[0]
    for model in models[:2]:
        assert model.head.weight is model.wte.weight
        assert torch.equal(model.wte.weight, trained)
    # Our own reader takes it for the whole model.
    start = settings_for("TiedTask", start_from=str(path), evaluate=True)
    again = run(plan_for("TiedTask", "gpipe", 2), start, tmp_path / "again", inline=True)
    assert again.epochs[0].train_loss < summary.epochs[0].train_loss


def test_a_copy_that_misses_gradients_is_found(monkeypatch):
    """The check would see it: without the sum, each copy steps by its own part."""
    from timeprest.runtime.stage.runner import StageRunner

    monkeypatch.setattr(StageRunner, "_start_all_reduces", lambda self, losses: [])
    report = check(plan_for("TiedTask", "gpipe", 2), settings_for("TiedTask"), inline=True)
    assert report.verdict == "differs"
    assert report.against[1].differences[1].name == "wte.weight"


def test_clipping_counts_a_copy_once():
    settings = settings_for("TiedTask", clip_norm=0.05)
    report = check(plan_for("TiedTask", "gpipe", 3), settings, inline=True)
    assert report.verdict == "same"


def test_replicas_of_stages_with_copies(tmp_path):
    """Two workers of the first stage and two of the last: one sum over the four."""
    plan = plan_for("TiedTask", "gpipe", 3, [2, 1, 2])
    settings = settings_for("TiedTask", clip_norm=0.5)
    report = check(plan, settings, inline=True, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    assert torch.equal(*copies_of(tmp_path / "run", 3))


def test_groups_know_copies_by_one_name(tmp_path):
    """Weight decay for the embedding by its name alone: its copy in the head has it too."""
    plan = plan_for("TiedTask", "gpipe", 2)
    settings = settings_for("DecayedEmbeddingTask")
    report = check(plan, settings, inline=True, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    assert torch.equal(*copies_of(tmp_path / "run", 2))


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_copies_in_processes(tmp_path):
    plan = plan_for("TiedByCallTask", "pipedream-flush", 3, [1, 1, 2])
    choice = OptimizerChoice(name="sgd", lr=0.1, momentum=0.9)
    settings = settings_for("TiedByCallTask", optimizer=choice)
    report = check(plan, settings, run_dir=tmp_path / "run")
    assert report.verdict == "same"
    assert torch.equal(*copies_of(tmp_path / "run", 3))


def test_plans_that_keep_them_together_are_refused_when_cut():
    plan = msgspec.structs.replace(plan_for("TiedTask", "gpipe", 2), tied="together")
    with pytest.raises(PlanError, match="'wte', 'head' share parameters and must be on one stage"):
        prepare(plan, settings_for("TiedTask"))


@pytest.mark.slow
@pytest.mark.parametrize("front_end", ["fx", "export"])
@pytest.mark.parametrize("name", TASKS)
def test_copies_are_a_stages_own(name, front_end):
    """In both modes, and nothing of the user's model changes hands."""
    target = resolve(f"{FILE}:{name}")
    model = target.model(0)
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    modes = []
    for training in (True, False):
        model.train(training)
        traced = trace(model, "model", target.call(4)[0], front_end=front_end)
        n = len(traced.layers)
        groups = [list(range(3)), list(range(3, n - 2)), list(range(n - 2, n))]
        modes.append([piece.module for piece in cut(traced, groups)])
    stages = list(zip(*modes, strict=True))
    (tied,) = give_copies(stages)
    assert tied.stages == (0, 2)
    held = [[{id(p) for p in module.parameters()} for module in both] for both in stages]
    assert all(train == evaluate for train, evaluate in held)
    assert not held[0][0] & held[2][0]
    first, last = (tied.of(s, stages[s][0])[0] for s in tied.stages)
    assert first is not last
    assert torch.equal(first, last)
    assert last.requires_grad
    after = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    assert after == before
