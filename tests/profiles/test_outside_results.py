"""Losses and figures that read what a forward leaves outside its result; and those that don't."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from types import MethodType
from typing import ClassVar

import pytest
import torch
from helpers.plans import plan_by_hand, with_times
from mlp_task import MLPTask
from timeprest.profiles.errors import TargetError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.profiles.tasks.hooks import check_reads
from timeprest.profiles.tracing.call import Call
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from torch import nn

AROUND: dict = {}
LISTED: list = []
DRAWN = torch.Generator().manual_seed(1)
ASKED = [0]


class Net(nn.Module):
    """Leaves something of its first layer."""

    losses: ClassVar[list] = []
    calls = 0

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def leave(self, h):
        """Nothing."""

    def forward(self, x):
        h = torch.tanh(self.a(x))
        self.leave(h)
        return self.b(h)


def mean(task, output, target):
    return nn.functional.mse_loss(output, target)


def by_hook(task, graph):
    def keep(module, given, output):
        task.kept["h"] = output if graph else output.detach().abs().mean()

    task.net.a.register_forward_hook(keep)


def cleared(task, output, target):
    extra = sum(Net.losses)
    Net.losses.clear()
    return mean(task, output, target) + extra


def in_closure():
    kept = {}

    def loss(task, output, target):
        return mean(task, output, target) * (1 + kept["h"])

    return (lambda net, h: kept.update(h=h.detach().mean())), loss


class Task:
    def __init__(self, leave=None, loss=mean, hook=None):
        torch.manual_seed(0)
        self.net, self.kept = Net(), {}
        if leave is not None:
            self.net.leave = MethodType(leave, self.net)
        if hook is not None:
            by_hook(self, graph=hook == "graph")
        self.loss = MethodType(loss, self)


def called(net, h):
    Net.calls += 1


def asked(task):
    torch.manual_seed(2)
    call, target = Call((torch.randn(3, 4),), (None,)), torch.randn(3, 3)
    check_reads("loss", task.loss, task.net, call, target)


@pytest.mark.parametrize(
    ("task", "name"),
    [
        ({"loss": lambda t, o, y: mean(t, o, y) * t.kept["h"], "hook": "number"}, r"Task\.kept"),
        ({"loss": lambda t, o, y: mean(t, o, y) + t.kept["h"].sum(), "hook": "graph"}, "Task.kept"),
        ({"leave": lambda n, h: Net.losses.append(h.mean()), "loss": cleared}, r"Net\.losses"),
        (
            {
                "leave": lambda n, h: Net.losses.append(h.mean()),
                "loss": lambda t, o, y: mean(t, o, y) + sum(Net.losses),
            },
            r"Net\.losses",
        ),
        (
            {"leave": lambda n, h: LISTED.append(h), "loss": lambda t, o, y: LISTED.pop().sum()},
            "LISTED",
        ),
        (
            {
                "leave": lambda n, h: AROUND.update(h=h.mean()),
                "loss": lambda t, o, y: mean(t, o, y) + 0.01 * AROUND["h"],
            },
            "AROUND",
        ),
        (
            {
                "leave": lambda n, h: AROUND.update(samples=len(h)),
                "loss": lambda t, o, y: mean(t, o, y) / AROUND["samples"],
            },
            "AROUND",
        ),
        (
            {
                "leave": lambda n, h: setattr(n, "aux", h.square().mean()),
                "loss": lambda t, o, y: mean(t, o, y) + t.net.aux,
            },
            "aux",
        ),
        ({"leave": called, "loss": lambda t, o, y: mean(t, o, y) * Net.calls}, r"Net\.calls"),
        (dict(zip(("leave", "loss"), in_closure(), strict=True)), "kept"),
    ],
)
def test_a_loss_that_reads_what_forwards_leave_is_refused_by_name(task, name):
    task = Task(**task)
    with pytest.raises(
        TargetError, match=rf"loss\(\) reads what .* its result \({name}.*return it"
    ):
        asked(task)
    # As nobody had looked.
    assert not [*task.kept, *AROUND, *LISTED, *Net.losses]


def counts(task, output, target):
    task.counted = getattr(task, "counted", 0) + 1
    return mean(task, output, target)


def anneals(task, output, target):
    return counts(task, output, target) * 0.9**task.counted


def counts_elsewhere(task, output, target):
    ASKED[0] += 1
    return mean(task, output, target) * ASKED[0]


def draws(task, output, target):
    return mean(task, output + torch.randn_like(output), target) * random.random()


def draws_of_its_own(task, output, target):
    return mean(task, output + torch.randn(output.shape, generator=DRAWN), target)


class Elsewhere:
    calls = 0


def counts_in_a_class(task, output, target):
    Elsewhere.calls += 1
    return mean(task, output, target) * Elsewhere.calls


def of_weights(task, output, target):
    return mean(task, output, target) + task.net.a.weight.square().sum()


@pytest.mark.parametrize(
    "loss",
    [
        *(counts, anneals, counts_elsewhere, counts_in_a_class),
        *(draws, draws_of_its_own, of_weights),
    ],
)
def test_what_a_loss_draws_or_counts_for_itself_is_its_own(loss):
    """So is what a forward leaves and nobody reads."""
    before = torch.get_rng_state(), random.getstate()
    task = Task(lambda net, h: LISTED.append(h), loss)
    asked(task)
    assert not hasattr(task, "counted")
    assert not LISTED
    assert ASKED == [0]
    assert random.getstate() == before[1]


class Kept(MLPTask):
    """The loss reads a number that a hook keeps of the first layer."""

    reads = "loss"

    def model(self):
        model, self.kept = super().model(), {}
        model[0].register_forward_hook(lambda m, i, o: self.kept.update(h=o.detach().mean()))
        return model

    def loss(self, output, target):
        return super().loss(output, target) + (self.kept["h"] if self.reads == "loss" else 0)

    def metrics(self, output, target):
        return {"h": self.kept["h"]} if self.reads == "metrics" else {}


class KeptForFigures(Kept):
    reads = "metrics"


@pytest.mark.parametrize("name", ["Kept", "KeptForFigures"])
def test_it_is_refused_before_a_profile_and_a_run(name, mlp_profile, tmp_path):
    """A run without an evaluation asks for no figures."""
    task, what = f"{Path(__file__)}:{name}", "loss" if name == "Kept" else "metrics"
    refused = pytest.raises(TargetError, match=rf"the task's {what}\(\) reads what .*Kept.*\.kept")
    with refused:
        measure(resolve(task), batch_size=8, micro_batch_sizes=[4], seconds=0)
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    for evaluate in (True, False):
        settings = RunSettings(task=task, steps=1, evaluate=evaluate)
        with refused if evaluate or name == "Kept" else nullcontext():
            run(plan, settings, tmp_path / f"{evaluate}", inline=True)
