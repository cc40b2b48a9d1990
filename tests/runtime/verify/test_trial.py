"""The trial before a profile and a run: what would be trained otherwise in pieces, by its cause."""

from __future__ import annotations

import copy

import msgspec
import pytest
import torch
from helpers.plans import plan_by_hand, with_times
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import PlanError, TargetError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.trial import TrialCase, trial_samples
from timeprest.profiles.target import Target, resolve
from timeprest.profiles.tasks.hooks import RunLength
from timeprest.profiles.tasks.objects import name_of
from timeprest.profiles.tracing.front_ends import trace
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.verify import trial as module
from timeprest.runtime.verify.dry_run import dry_run
from timeprest.runtime.verify.trial import try_in_pieces
from torch import nn
from torch.utils.data import TensorDataset

F = nn.functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(*s) for s in ((6, 8), (8, 8), (8, 8), (8, 3)))

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.d(torch.tanh(self.b(h)) + self.c(h))


class Task:
    net = Net

    def model(self):
        torch.manual_seed(0)
        return self.net()

    def data(self, split):
        x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, (x.sum(1) > 0).long())

    def loss(self, output, target):
        return F.cross_entropy(output, target)

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def case_of(task, **more):
    """As the profiler makes it, whatever else the profiler would say of it."""
    target = Target("mine", task, task.model, ())
    model = target.model().train()
    graph = trace(model, "mine", target.call(2)[0], verify=False)
    samples = trial_samples(*target.call(8))
    given = {"bound": (), "length": RunLength(10, 5), "autocast": None} | more
    return TrialCase("mine", task, model, graph, samples, device=torch.device("cpu"), **given)


# Causes -----------------------------------------------------------------------------------------


class LossOfNothing(Task):
    def loss(self, output, target):
        return super().loss(output, target) * torch.tensor(float("nan"))


def test_losses_that_are_not_finite_tell_nothing():
    (line,) = try_in_pieces(case_of(LossOfNothing())).lines
    assert line.endswith(
        "wasn't tried beside plain training: plain training gives a loss that isn't finite"
    )


class LossOfAHook(Task):
    """The mean of a layer's output, which a hook keeps."""

    def model(self):
        net, self.kept = super().model(), {}
        net.a.register_forward_hook(lambda m, x, y: self.kept.update(a=y.detach().abs().mean()))
        return net

    def loss(self, output, target):
        return super().loss(output, target) * (1 + self.kept["a"])


class LossOfAGraph(LossOfAHook):
    def model(self):
        net = super().model()
        net.b.register_forward_hook(lambda m, x, y: self.kept.update(b=y))
        return net

    def loss(self, output, target):
        return F.cross_entropy(output, target) + self.kept["b"].square().mean()


class Reading(Task):
    def model(self):
        net = super().model()
        net.c.register_forward_pre_hook(lambda m, x: (x[0] * self.kept["a"],))
        net.a.register_forward_hook(lambda m, x, y: self.kept.update(a=y.detach().abs().mean()))
        return net

    def __init__(self):
        self.kept = {"a": torch.ones(())}


class Asking(Net):
    def forward(self, x):
        h = torch.tanh(self.a(x))
        h = 2 * h if torch.is_autocast_enabled("cpu") else h
        return self.d(torch.tanh(self.b(h)) + self.c(h))


class AskingTask(Task):
    net = Asking


class Latest(torch.autograd.Function):
    """Its input of the latest call is an attribute of the layer."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer, layer.given = layer, x.detach()
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.layer.given * gradient, None


class Overtaken(Task):
    def model(self):
        net = super().model()
        net.c.register_forward_hook(lambda layer, x, y: Latest.apply(y, layer))
        return net


class Hooked(Task):
    """A layer clips the gradient of what another one takes, too."""

    def model(self):
        net = super().model()

        def clip(module, given):
            if given[0].requires_grad:
                given[0].register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))

        net.b.register_forward_pre_hook(clip)
        return net


class Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        ctx.w = w.detach()
        return x @ w.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.w, gradient.t() @ ctx.saved_tensors[0]


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        return Detached.apply(x, self.w)


class Kept(Task):
    middle = Own

    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), self.middle(), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
        )


def in_closure():
    """A hook on the gradient of a layer's result takes its weight."""

    def hook(module, given, output):
        weight = module.weight.detach()
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * weight.square().mean())

    layer = nn.Linear(8, 8)
    layer.register_forward_hook(hook)
    return layer


class KeptInClosure(Kept):
    middle = staticmethod(in_closure)


@pytest.mark.parametrize(
    ("task", "more", "says"),
    [
        (LossOfAHook, {}, "the loss reads what the model's forward leaves outside its result"),
        (LossOfAGraph, {}, "the loss reads what the model's forward leaves outside its result"),
        (Reading, {}, "a layer reads what another leaves outside its result"),
        (Overtaken, {}, "a backward takes what its forward has left in an attribute"),
        (AskingTask, {"autocast": torch.bfloat16}, "the forward asks whether autocast is on"),
        (Hooked, {}, "cut before and behind b: a layer does something to what others take"),
    ],
)
def test_what_pieces_would_train_otherwise_is_named(task, more, says):
    with pytest.raises(TargetError, match=says) as refusal:
        try_in_pieces(case_of(task(), **more))
    assert "\n" not in str(refusal.value)


def test_autocast_without_a_question_is_the_same():
    assert try_in_pieces(case_of(Task(), autocast=torch.bfloat16)).lines == ()


@pytest.mark.parametrize(("task", "name"), [(Kept, "2.w"), (KeptInClosure, "2.weight")])
def test_weights_that_a_backward_takes_from_memory_are_found(task, name):
    found = try_in_pieces(case_of(task()))
    assert found.unversioned == (name,)
    assert "save_for_backward" in found.lines[0]
    assert try_in_pieces(case_of(task(), overwrites=False)).unversioned == ()


class ByAll(torch.optim.SGD):
    """Steps by the norm of all gradients."""

    def step(self, closure=None):
        every = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, 1e-3)
        super().step()


class ByAllTask(Task):
    def optimizer(self, parameters):
        return ByAll(parameters, lr=0.1)


def test_an_optimizer_that_goes_by_all_parameters_is_named():
    (line,) = try_in_pieces(case_of(ByAllTask())).lines
    assert "a stage's optimizer has its own parameters alone" in line


# No false alarms --------------------------------------------------------------------------------


class Noisy(torch.optim.SGD):
    """Adds noise to the gradients."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.grad.add_(torch.randn_like(p))
        return super().step(closure)


class NoisyTask(Task):
    def optimizer(self, parameters):
        return Noisy(parameters, lr=0.1)


def test_noise_that_an_optimizer_adds_is_none_of_all_parameters_together():
    assert not try_in_pieces(case_of(NoisyTask())).lines


class Drawing(nn.Module):
    """Dropout, a batch norm, and numbers drawn by itself; frozen and tied weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.drop, self.d = nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.c.weight = self.b.weight
        self.a.bias.requires_grad_(False)

    def forward(self, x):
        h = self.norm(self.a(x))
        h = self.drop(torch.relu(self.b(h))) + torch.randn_like(h)
        return self.d(self.drop(self.c(h)))


class DrawingTask(Task):
    """Its loss is weighted, draws and counts its calls; its rate changes."""

    net = Drawing

    def __init__(self):
        self.calls = 0

    def loss(self, output, target):
        self.calls += 1
        losses = F.cross_entropy(output + torch.rand(()), target, reduction="none")
        kept = (target > 0) | (torch.rand(len(target)) > 0.5)
        return (losses * kept).sum() * self.calls, kept.sum()

    def scheduler(self, optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=0.01)


def test_nothing_is_said_of_what_pieces_train_alike_and_all_is_put_back():
    task = DrawingTask()
    case = case_of(task)
    before = copy.deepcopy(case.model.state_dict())
    state = torch.get_rng_state()
    assert try_in_pieces(case) == module.TrialReport()
    for name, tensor in case.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(p.grad is None for p in case.model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert task.calls == 0


def test_what_is_too_large_says_that_it_was_not_tried(monkeypatch):
    monkeypatch.setattr(module, "_MOST_S", 0.0)
    (line,) = try_in_pieces(case_of(Task())).lines
    assert "wasn't tried beside plain training: it would take" in line


# In commands ------------------------------------------------------------------------------------


def test_a_layer_that_hooks_a_gradient_stays_with_all_that_take_it(tmp_path):
    profile = measure(resolve(name_of(Hooked())), batch_size=8, seconds=0, trial=try_in_pieces)
    assert profile.tied == (("b", "c"),)


def test_systems_that_do_not_flush_are_refused_for_weights_without_versions(tmp_path):
    target = resolve(name_of(Kept()))
    with pytest.warns(UserWarning, match=r"a backward takes '2\.w' as memory has it then"):
        profile = measure(target, batch_size=8, seconds=0, trial=try_in_pieces)
    assert profile.unversioned == ("2.w",)
    with pytest.raises(PlanError, match=r"takes '2\.w' as memory has it then, and pipedream"):
        solve(profile, uniform_cluster(2), "pipedream", stages=2)
    flushing = solve(profile, uniform_cluster(2), "gpipe", stages=2, micro_batches=2)
    settings = RunSettings(task=target.name, steps=2, evaluate=False)
    assert dry_run(flushing, settings, str(tmp_path / "run")).warnings == ()
    blind = msgspec.structs.replace(with_times(profile), unversioned=msgspec.UNSET)
    other = plan_by_hand(blind, "pipedream", 2, 1)
    with pytest.raises(TargetError, match=r"'2\.w' as memory has it then.*; pipedream doesn't"):
        dry_run(other, settings, str(tmp_path / "run"))
