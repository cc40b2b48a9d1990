"""Stages under torch.compile: the same weights on the same versions; a word where they can't."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.against_oracle import train
from helpers.plans import plan_by_hand, profiled, with_times
from mlp_task import WIDTHS, MLPTask
from timeprest.cli.tables.run import compile_lines
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import UserError
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import RunDir, load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import COMPILING_S, RunSettings
from timeprest.runtime.stage import compiled
from torch import nn
from torch.utils.data import TensorDataset

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


def graphs():
    """How many have been compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.choice(1)
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("variant", ["timeprest", "gpipe"])
def test_compiled_stages_equal_the_oracle(variant, mlp_profile, mlp_target, tmp_path):
    """Weights, losses, versions used and held: backwards on later weights, and flushed."""
    before = graphs()
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 2)
    train(plan, mlp_target, "momentum", tmp_path / "run", compile=True)
    assert graphs() >= before + 2


class Normed(MLPTask):
    """Its norm's output, computed again on later weights, isn't what it was."""

    def model(self):
        first, last = nn.Linear(WIDTHS[0], 6), nn.Linear(6, WIDTHS[-1])
        return nn.Sequential(first, nn.LayerNorm(6), nn.GELU(), last).double()


@pytest.mark.choice(0)
@needs_compiler
@pytest.mark.slow
def test_nothing_is_computed_again_on_other_weights(tmp_path, monkeypatch):
    """What the compiler would compute again in a backward stays that of the forward's weights."""
    target = f"{__file__}:Normed"
    profile = profiled(target)
    names = [layer.name for layer in profile.layers]
    plan = plan_by_hand(profile, "timeprest", 2, 2, cut=[names[:3], names[3:]])

    def weights(name, **more):
        settings = RunSettings(task=target, steps=6, evaluate=False, **more)
        summary = run(plan, settings, tmp_path / name, inline=True)
        assert not any(report.not_compiled for report in summary.stages)
        return load_weights(tmp_path / name)

    def apart(found, wanted):
        return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)

    eager = weights("eager")
    assert apart(weights("compiled", compile=True), eager) < 1e-12
    # It would be otherwise, were the compiler let.
    monkeypatch.setattr(compiled, "same_weights", lambda prepared: True)
    torch._dynamo.reset()
    assert apart(weights("otherwise", compile=True), eager) > 1e-6


class Pictures:
    """Convolutions of all kinds, and dropout."""

    def model(self):
        layers = [nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Dropout(0.3)]
        layers += [nn.ConvTranspose2d(8, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)).double()

    def data(self, split):
        x = torch.randn(64, 3, 6, 6, generator=torch.Generator().manual_seed(0)).double()
        return TensorDataset(x, (x.sum((1, 2, 3)) > 0).long())

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.choice(0)
@needs_compiler
@pytest.mark.slow
def test_convolutions_and_dropout_on_later_weights(tmp_path):
    """No copies of their weights in another layout are kept, and nothing is drawn twice."""
    target = f"{__file__}:Pictures"
    profile = profiled(target)
    names = [layer.name for layer in profile.layers]
    plan = plan_by_hand(profile, "timeprest", 2, 2, cut=[names[:4], names[4:]])
    losses = []
    for compile_it in (False, True):
        where = tmp_path / str(compile_it)
        settings = RunSettings(task=target, steps=8, evaluate=False, compile=compile_it)
        summary = run(plan, settings, where, inline=True)
        assert not any(report.not_compiled for report in summary.stages)
        losses.append(read_losses(RunDir(where).metrics))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.choice(0)
@needs_compiler
@pytest.mark.slow
@pytest.mark.processes
def test_compiled_in_processes(mlp_profile, mlp_target, tmp_path):
    """Each worker compiles its own stage while the others wait for it."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    more = {"compile": True, "timeout_s": COMPILING_S}
    train(plan, mlp_target, "momentum", tmp_path / "run", inline=False, **more)


def test_what_cant_be_compiled_is_said(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """Systems that split backwards, and whatever the compiler refuses, in a line for each stage."""
    monkeypatch.setattr("timeprest.runtime.prepare.devices.check_compiler", lambda: None)
    plan = plan_by_hand(with_times(mlp_profile), "zb-h1", 2, 2)
    settings = RunSettings(task=mlp_target, steps=2, evaluate=False, compile=True)
    summary = run(plan, settings, tmp_path / "split", inline=True)
    why = "isn't compiled: zb-h1 splits backwards in two, and compiled ones are one piece"
    assert compile_lines(plan, summary) == [
        f"stage 0 {why}",
        f"stage 1 {why}",
    ]

    def refused(module, **_):
        def call(*arguments):
            raise RuntimeError("can't take\n  this graph " + "x" * 300)

        return call

    monkeypatch.setattr(torch, "compile", refused)
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    train(plan, mlp_target, "momentum", tmp_path / "refused", compile=True)
    summary = run(plan, settings, tmp_path / "again", inline=True)
    for s, line in enumerate(compile_lines(plan, summary)):
        assert line.startswith(f"stage {s} isn't compiled: ")
        assert line.endswith("RuntimeError: can't take this graph …")


def test_without_a_compiler_it_is_said_at_once(mlp_profile, mlp_target, tmp_path, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    settings = RunSettings(task=mlp_target, steps=2, compile=True)
    with pytest.raises(UserError, match=r"--compile: .*install g\+\+ or clang\+\+, or name one"):
        run(plan, settings, tmp_path / "run", inline=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variant", "same"),
    [("gpipe", True), ("pipedream", True), ("timeprest", False), ("spectrain", False)],
)
def test_whose_backwards_run_on_other_weights(variant, same):
    prepared = SimpleNamespace(pipeline=SimpleNamespace(variant=VARIANTS[variant]))
    assert compiled.same_weights(prepared) == same
