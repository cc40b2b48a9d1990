"""Parameters that aren't trained: once in a run, without versions, gradients or optimizer state.

A model that has them as parameters must train, and take memory, as one that has them as buffers.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.alike import assert_same_weights
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled
from helpers.processes.stopped_runs import check_resumed
from safetensors.torch import load_file
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.autograd.boundary import storage_key
from timeprest.profiles.errors import PlanError, RunError, TargetError
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.shapes import rewritten_by
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.verify.check import check
from timeprest.runtime.weights.in_place import unchanged
from timeprest.runtime.weights.stash import WeightVersions
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

WIDTH, SAMPLES, STEPS = 6, 24, 8
MATRIX = WIDTH * WIDTH * 8
"""Bytes of a frozen matrix."""


class Adapted(nn.Module):
    """A frozen matrix with an adapter of low rank beside it that is trained (LoRA)."""

    def __init__(self, given):
        super().__init__()
        self.given = given
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH)

    def forward(self, x):
        return torch.tanh(self.up(self.down(x)) + functional.linear(x, self.given))


class AsBuffer(Adapted):
    def __init__(self, given):
        nn.Module.__init__(self)
        self.register_buffer("given", given.detach().clone())
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH)


class Net(nn.Module):
    """Four of them; the first and the last have the same matrix where `layers` share parameters."""

    def __init__(self, kind=Adapted):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        one, two, three = (
            nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator), requires_grad=False)
            for _ in range(3)
        )
        self.layers = nn.ModuleList(kind(given) for given in (one, two, three, one))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Frozen:
    """The task of a model with frozen parameters."""

    kind = Adapted

    def model(self):
        return Net(self.kind).double()

    def data(self, split):
        generator = torch.Generator().manual_seed(6)
        return TensorDataset(
            torch.randn(SAMPLES, WIDTH, generator=generator).double(),
            torch.randint(0, WIDTH, (SAMPLES,), generator=generator),
        )

    def loss(self, output, target):
        return functional.cross_entropy(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


class Buffers(Frozen):
    """The same with buffers."""

    kind = AsBuffer


class Thawed(Frozen):
    """The same with everything trained."""

    def model(self):
        return super().model().requires_grad_(True)


TASKS = ("Frozen", "Buffers")


def here(name):
    return f"{Path(__file__)}:{name}"


@cache
def profile_of(name):
    return profiled(here(name))


def placed(name, variant, placement, n, **how):
    return plan_by_hand(profile_of(name), variant, len(placement), n, placement=placement, **how)


def trained(plan, name, run_dir, **more):
    settings = RunSettings(task=here(name), steps=STEPS, evaluate=False, **more)
    summary = run(plan, settings, run_dir, inline=True)
    return summary, read_losses(run_dir / "metrics.jsonl"), load_weights(run_dir)


# Profiles ---------------------------------------------------------------------------------------


def test_profiles_count_them_apart():
    frozen, buffers, thawed = map(profile_of, ("Frozen", "Buffers", "Thawed"))
    held = sum(layer.frozen_bytes or 0 for layer in frozen.layers)
    assert held == 3 * MATRIX
    assert sum(layer.buffer_bytes for layer in frozen.layers) == held
    assert sum(layer.buffer_bytes for layer in buffers.layers) == 4 * MATRIX
    every = [sum(la.parameter_bytes for la in p.layers) for p in (frozen, buffers, thawed)]
    assert every == [every[0], every[0], every[0] + 3 * MATRIX]
    assert frozen.tied == frozen.shared == ()
    (shared,) = frozen.shared_frozen
    assert shared.parameter_bytes == MATRIX
    assert shared.layers == thawed.shared[0].layers
    assert thawed.shared_frozen is msgspec.UNSET
    # State that isn't trained is no part of what the optimizer is measured on.
    assert frozen.optimizer.state_bytes_per_parameter_byte == 1


def test_a_profile_is_of_what_is_trained():
    """A plan of the one doesn't run the other."""
    assert profile_of("Frozen").fingerprint != profile_of("Thawed").fingerprint
    plan = placed("Frozen", "timeprest", (0, 1), 4)
    with pytest.raises(PlanError, match="was made for another model"):
        run(plan, RunSettings(task=here("Thawed"), steps=1), Path("unused"), inline=True)


class Centred(nn.Module):
    """A frozen parameter is its running mean: read by two layers, changed by a third."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x):
        x = torch.tanh(self.layers[0](x - self.mean))
        x = self.layers[1](x)
        self.written().mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layers[2](torch.tanh(x)) - self.mean.clone()

    def written(self):
        return self.mean


class CentredData(Centred):
    """Torch counts no version then."""

    def written(self):
        return self.mean.data


class Rewritten(Frozen):
    def model(self):
        return Centred().double()


class RewrittenData(Frozen):
    def model(self):
        return CentredData().double()


REWRITTEN = pytest.mark.parametrize("name", ["Rewritten", "RewrittenData"])


@REWRITTEN
def test_those_that_forwards_change_are_on_one_stage(name):
    """As buffers are: another stage's copy would stay as it was."""
    profile = profile_of(name)
    assert profile.tied == (("layers.0", "layers.1", "layers.2"),)
    assert profile.shared == ()
    assert profile.shared_frozen is msgspec.UNSET


@REWRITTEN
def test_an_edited_plan_has_them_on_one_stage(name):
    """The profile as if nothing were changed: what one of a device that isn't there may say."""
    profile = msgspec.structs.replace(profile_of(name), tied=())
    plan = plan_by_hand(profile, "timeprest", 2, 4)
    with pytest.raises(PlanError, match=r"'layers.1', 'layers.2' .* must be on one stage"):
        run(plan, RunSettings(task=here(name), steps=1), Path("unused"), inline=True)


@pytest.mark.parametrize(("name", "fake"), [("Rewritten", True), ("RewrittenData", False)])
def test_a_forward_shows_which_those_are(name, fake):
    target = resolve(here(name))
    model = target.model()
    call, _ = target.call(4)
    traced = trace(model, name, call)
    before = model.mean.clone()
    assert rewritten_by(traced, call.tensors, fake=fake) == {storage_key(model.mean)}
    assert torch.equal(model.mean, before)


@REWRITTEN
def test_nothing_is_computed_again_that_changes_them(name, tmp_path):
    plan = placed(name, "gpipe", (0,), 2, recompute=[True])
    with pytest.raises(RunError, match=r"shape \[6\] is changed .* or plan without --recompute"):
        trained(plan, name, tmp_path / "run")
    module = resolve(here(name)).task.model().float()
    with pytest.raises(RunError, match="--ragged drop"), unchanged(module):
        module(torch.ones(2, WIDTH))


# Runs -------------------------------------------------------------------------------------------

LAYOUTS = {
    "straight": ((0, 1, 2), {}),
    "v": ((0, 1, 1, 0), {}),
    "loop": ((0, 1, 0, 1), {}),
    "replicas": ((0, 1), {"replicas": [1, 2]}),
}
FIXED = ("interleaved-1f1b", "zb-v", "v-half")
CASES = [
    (variant, layout)
    for variant in VARIANTS
    for layout in LAYOUTS
    if variant not in FIXED or layout == ("loop" if variant == "interleaved-1f1b" else "v")
]


@pytest.mark.choice(12)
@pytest.mark.parametrize(("variant", "layout"), CASES)
def test_they_train_as_buffers_do(variant, layout, tmp_path):
    """To the last bit, with the same versions, gradients and state held; and the plan says so."""
    placement, how = LAYOUTS[layout]
    choice = OptimizerChoice(name="sgd", lr=0.1, momentum=0.9)
    ends, kinds = [], []
    for name in TASKS:
        plan = placed(name, variant, placement, 4, **how)
        summary, losses, weights = trained(plan, name, tmp_path / name, optimizer=choice)
        ends.append((losses, weights))
        devices = plan.predicted.devices
        shown = [summary.stages[d.stages[0]].peak for d in devices]
        kinds.append(
            [
                (p.versions_bytes, p.gradients_bytes, p.optimizer_bytes, p.activations_bytes)
                for p in shown
            ]
        )
        for device, peak in zip(devices, shown, strict=True):
            assert peak.weights_bytes == device.memory.weights_bytes
            assert peak.total <= device.accounted.total
    (losses, weights), (others, expected) = ends
    assert losses == others
    assert_same_weights(weights, expected)
    assert kinds[0] == kinds[1]


def test_a_device_has_them_once(tmp_path):
    plan = placed("Frozen", "timeprest", (0, 1, 1, 0), 4)
    apart = placed("Buffers", "timeprest", (0, 1, 1, 0), 4)
    most = [[d.memory.weights_bytes for d in p.predicted.devices] for p in (apart, plan)]
    assert [a - b for a, b in zip(*most, strict=True)] == [MATRIX, 0]
    summary, *_ = trained(plan, "Frozen", tmp_path / "run")
    assert [summary.stages[s].peak.weights_bytes for s in (0, 1)] == most[1]


@pytest.mark.parametrize("recompute", [[], [True, True], [("layers.0.up",), ("layers.2.up",)]])
@pytest.mark.parametrize("variant", ["gpipe", "timeprest", "pipedream", "i-timeprest"])
def test_layers_computed_again_have_them(variant, recompute, tmp_path):
    """As with buffers, to the last bit."""
    plans = [placed(name, variant, (0, 1), 2, recompute=recompute) for name in TASKS]
    ends = [trained(p, name, tmp_path / name) for p, name in zip(plans, TASKS, strict=True)]
    assert ends[0][1] == ends[1][1]
    held, others = ([s.peak.activations_bytes for s in end[0].stages] for end in ends)
    assert held == others
    assert held == [s.accounted_memory.activations_bytes for s in plans[0].predicted.stages]


@pytest.mark.parametrize("how", [{"placement": (0, 1, 0)}, {"replicas": [2, 1]}])
def test_it_is_plain_training(how, tmp_path):
    plan = placed("Frozen", "gpipe", n=2, **{"placement": (0, 1), **how})
    settings = RunSettings(task=here("Frozen"), steps=4)
    report = check(plan, settings, inline=True, run_dir=tmp_path / "run")
    assert report.verdict == "same"


@pytest.mark.processes
@pytest.mark.slow
def test_processes_train_as_one_does(tmp_path):
    name = f"{TESTS / 'tasks/variety_tasks.py'}:FrozenTask"
    plan = plan_by_hand(profiled(name, (4, 8)), "timeprest", 4, 2, placement=(0, 1, 1, 0))
    report = check(plan, RunSettings(task=name, steps=4), run_dir=tmp_path / "run")
    assert report.verdict == "same"


def test_autocast_copies_them_as_it_does_buffers(tmp_path):
    """It copies what isn't trained in each forward, and nothing tells what such a copy is of."""
    kept = []
    for name in ("Single", "SingleBuffers"):
        platform = platform_of("cpu", autocast="bfloat16")
        plan = plan_by_hand(profiled(here(name), (4, 8), platform=platform), "timeprest", 2, 2)
        summary, *_ = trained(plan, name, tmp_path / name)
        kept.append([report.peak.activations_bytes for report in summary.stages])
        planned = [s.accounted_memory.activations_bytes for s in plan.predicted.stages]
        assert all(held <= most for held, most in zip(kept[-1], planned, strict=True))
    assert kept[0] == kept[1]


class Single(Frozen):
    def model(self):
        return Net(self.kind)

    def data(self, split):
        x, y = super().data(split).tensors
        return TensorDataset(x.float(), y)


class SingleBuffers(Single):
    kind = AsBuffer


def test_resumed_runs_have_them(tmp_path):
    """And they are in the checkpoints, under all names that the model has for them."""
    plan = placed("Frozen", "timeprest", (0, 1, 1, 0), 4)
    choice = OptimizerChoice(name="adam", lr=0.05)
    settings = RunSettings(task=here("Frozen"), steps=9, optimizer=choice, checkpoint_every=3)
    check_resumed(plan, settings, tmp_path, at=8, last=9)
    whole = load_weights(tmp_path / "stopped")
    assert whole.keys() == resolve(here("Frozen")).task.model().state_dict().keys()
    given = Net().double().layers[0].given
    assert torch.equal(whole["layers.0.given"], given)
    assert torch.equal(whole["layers.3.given"], given)


@pytest.mark.parametrize(("name", "held"), [("Rewritten", {"frozen/mean"}), ("Frozen", set())])
def test_resumed_replicas_have_what_their_own_forwards_made_of_them(name, held, tmp_path):
    """As with buffers, the weights are the first one's. There may be gigabytes of the others."""
    plan = placed(name, "gpipe", (0,), 4, replicas=[2])
    settings = RunSettings(task=here(name), steps=9, checkpoint_every=3)
    check_resumed(plan, settings, tmp_path, at=8, last=9)
    # Of the second replica, then of the first.
    states = sorted((tmp_path / "stopped/checkpoints/00000009/state").glob("*.safetensors"))
    kept = [{key for key in load_file(path) if key.startswith("frozen/")} for path in states]
    assert kept == [held, set()]


def test_one_that_is_changed_in_between_ends_the_backward():
    """It would run on other numbers than its forward took."""
    weight, frozen = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), False)
    versions = WeightVersions([weight], [frozen])
    with versions.forward(None):
        loss = (torch.ones(1, 2) @ weight @ frozen).sum()
    with versions.backward(None):
        loss.backward(retain_graph=True)
    torch.testing.assert_close(weight.grad, torch.full((2, 2), 2.0))
    with torch.no_grad():
        frozen.mul_(2)
    with versions.backward(None), pytest.raises(TargetError, match=r"shape \[2, 2\] is changed"):
        loss.backward()
