"""Training under autocast: plain training under autocast, cut into stages."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest
import torch
from helpers.alike import check_processes
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plain_training import train_plainly
from helpers.plans import plan_by_hand, profiled
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import PlanError
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.target import resolve
from timeprest.runtime.prepare.prepare import prepare
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.weights.stash import WeightVersions
from torch import nn

TARGET = f"{TESTS / 'tasks/device_tasks.py'}:Single"
STEPS = 5
TOLERANCE = 2**-6
"""Of the weights, relative to the largest change. bfloat16 has eight bits: a weight gradient
summed over micro-batches is rounded once for each of them, one of the whole mini-batch once."""


@pytest.fixture(scope="module")
def profile():
    return profiled(TARGET, platform=platform_of("cpu", autocast="bfloat16"))


def autocast(on=True):
    return torch.autocast("cpu", torch.bfloat16, enabled=on)


def train(on=True):
    """Losses, first weights and model of a plain loop."""
    torch.manual_seed(0)
    first = resolve(TARGET).task.model().state_dict()
    losses, model = train_plainly(TARGET, 8, STEPS, context=partial(autocast, on))
    return losses, first, model


def furthest(found, wanted, first):
    """Largest difference of any weight, relative to the largest change by training."""
    change = max((wanted[key] - first[key]).abs().max() for key in first)
    return max(float((found[key] - wanted[key]).abs().max() / change) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("variant", [name for name in ALL if VARIANTS[name].flushes])
@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("n", [1, 4])
def test_flush_systems_are_plain_training_under_autocast(variant, stages, n, profile, tmp_path):
    plan = plan_by_hand(profile, variant, stages, n)
    assert plan.profile.autocast == "bfloat16"
    summary = run(plan, RunSettings(task=TARGET, steps=STEPS), tmp_path / "run", inline=True)
    losses, first, model = train()
    found, wanted = load_weights(tmp_path / "run"), model.state_dict()
    if n == 1:
        assert read_losses(tmp_path / "run" / "metrics.jsonl") == pytest.approx(losses, rel=1e-6)
        assert furthest(found, wanted, first) < 1e-6
    else:
        losses_found = read_losses(tmp_path / "run" / "metrics.jsonl")
        assert losses_found == pytest.approx(losses, rel=TOLERANCE)
        assert furthest(found, wanted, first) < TOLERANCE
    for report, predicted in zip(summary.stages, plan.predicted.stages, strict=True):
        # No copies of weights wait for a backward; the profiler counted them.
        assert report.peak.activations_bytes <= predicted.memory.activations_bytes
    # The evaluation is under autocast too: on the run's own weights, sample by sample.
    model.load_state_dict(found)
    model.eval()
    test = resolve(TARGET).task.data("test")
    x, y = test.tensors
    with torch.no_grad(), autocast():
        loss = resolve(TARGET).task.loss(model(x), y).item()
    assert summary.epochs[-1].test["loss"] == pytest.approx(loss, rel=1e-3)


def test_autocast_matters(profile, tmp_path):
    """Without it the weights are others, by more than rounding from micro-batch to micro-batch."""
    plan = plan_by_hand(profile, "gpipe", 2, 1)
    settings = RunSettings(task=TARGET, steps=STEPS, autocast="off", evaluate=False)
    run(plan, settings, tmp_path / "off", inline=True)
    _, first, model = train(on=False)
    off = load_weights(tmp_path / "off")
    assert furthest(off, model.state_dict(), first) < 1e-5
    _, _, cast = train()
    assert furthest(off, cast.state_dict(), first) > 1e-3


def test_what_crosses_is_in_low_precision(profile):
    plan = plan_by_hand(profile, "gpipe", 4, 4)
    for setting, dtype in (("profiled", torch.bfloat16), ("off", torch.float32)):
        prepared = prepare(plan, RunSettings(task=TARGET, autocast=setting))
        assert dtype in {route.spec.dtype for route in prepared.distribution.routes}
    whole = msgspec.structs.replace(plan.profile, autocast=None)
    plan = msgspec.structs.replace(plan, profile=whole)
    prepared = prepare(plan, RunSettings(task=TARGET))
    assert prepared.model.autocast is None
    prepared = prepare(plan, RunSettings(task=TARGET, autocast="bfloat16"))
    assert prepared.model.autocast == torch.bfloat16


def test_float16_is_refused(profile):
    plan = plan_by_hand(profile, "gpipe", 2, 4)
    half = msgspec.structs.replace(plan.profile, autocast="float16")
    plan = msgspec.structs.replace(plan, profile=half)
    with pytest.raises(PlanError, match=r"float16.*--autocast bf16 or off"):
        prepare(plan, RunSettings(task=TARGET))
    assert prepare(plan, RunSettings(task=TARGET, autocast="off")).model.autocast is None


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_processes_equal_inline_under_autocast(profile, tmp_path):
    plan = plan_by_hand(profile, "timeprest", 3, 4)
    check_processes(plan, RunSettings(task=TARGET, steps=STEPS), tmp_path, 1e-6)


@pytest.mark.parametrize("variant", ["gpipe", "v-timeprest"])
def test_no_forward_keeps_its_own_copies_of_the_weights(variant, profile, tmp_path, monkeypatch):
    """Also where autograd may keep parameters as they are, and bytes have been counted."""
    asked, forward = [], WeightVersions.forward

    def noted(self, tensors, *, counts=True, substitutes=None):
        asked.append(counts)
        return forward(self, tensors, counts=counts, substitutes=substitutes)

    monkeypatch.setattr(WeightVersions, "forward", noted)
    plan = plan_by_hand(profile, variant, 2, 4)
    for autocast in ("bfloat16", "off"):
        how = RunSettings(task=TARGET, steps=2, evaluate=False, autocast=autocast)
        run(plan, how, tmp_path / autocast, inline=True)
        assert all(asked) == (autocast == "bfloat16")
        asked.clear()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_backward_makes_its_own_copies_of_the_weights(steps):
    """Two layers: the first one's gradient goes through the second one's weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    weights = WeightVersions(list(model.parameters()))
    x = torch.randn(5, 6)
    with weights.forward(None), autocast():
        out = model(x)
    # What is saved: the two inputs in bfloat16, and no weights.
    assert sum(weights.saved.values()) == 2 * (5 * 6 + 5 * 8)
    with torch.no_grad():
        for _ in range(steps):
            for p in model.parameters():
                p.add_(1.0)
            weights.advance(set())
    with weights.backward(None):
        out.backward(torch.ones_like(out))
    through = torch.ones(5, 4, dtype=torch.bfloat16) @ model[1].weight.detach().bfloat16()
    torch.testing.assert_close(model[0].weight.grad, (through.t() @ x.bfloat16()).float())


def test_copies_of_every_kind_of_layer_run_backward_after_an_update():
    """Those that autograd doesn't show as copies stay as they are; none fails."""
    torch.manual_seed(0)

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
            self.gru = nn.GRU(8, 8, batch_first=True)
            self.lstm = nn.LSTM(8, 8, batch_first=True)
            self.conv = nn.Conv1d(5, 5, 3, padding=1)

        def forward(self, tokens):
            x = self.embed(tokens)
            x = x + self.attend(x, x, x, need_weights=False)[0]
            # On processors without AVX-512 oneDNN has no LSTM for a mixture of types.
            x = self.lstm(self.gru(x)[0].bfloat16())[0]
            return nn.functional.linear(self.conv(x), self.embed.weight).float().square().mean()

    model = Layers()
    weights = WeightVersions(list(model.parameters()))
    with weights.forward(None), autocast():
        loss = model(torch.randint(0, 9, (3, 5)))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    weights.advance(set())
    with weights.backward(None):
        loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
