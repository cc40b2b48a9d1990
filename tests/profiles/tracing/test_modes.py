"""Forwards that ask which modes are on: graphs are of those that a run has."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from helpers.models.front_ends import positional
from helpers.plans import plan_by_hand, with_times
from mlp_task import MLPTask
from timeprest.profiles.errors import PlanError, TraceError
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.platforms import platform_of
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.graph import graph_of, why_not_evaluated
from timeprest.profiles.tracing.layers import without_gradient
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from torch import is_autocast_enabled, nn

AUTOCAST = "torch.is_autocast_enabled('cpu')"


class Asks(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.a, self.b, self.asks = nn.Linear(4, 8), nn.Linear(8, 3), asks

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.b(h * 2 if self.asks() else h)


class AsksForShapes(Asks):
    """Which torch.fx doesn't know."""

    def forward(self, x):
        for _ in range(x.dim()):
            x = x + 1
        return super().forward(x)


ASKED = {
    AUTOCAST: lambda: torch.is_autocast_enabled("cpu"),
    "cpu": lambda: torch.is_autocast_cpu_enabled(),
    "dtype": lambda: (
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    ),
}


@pytest.mark.filterwarnings("ignore:torch.is_autocast_cpu_enabled")
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize(("kind", "front_end"), [(Asks, "fx"), (AsksForShapes, "export")])
def test_a_graph_is_of_the_autocast_that_is_on(kind, front_end, asked):
    torch.manual_seed(0)
    model, x = kind(ASKED[asked]), torch.randn(5, 4)
    for on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=on, cache_enabled=False):
            traced = trace(model, "it", positional(torch.randn(2, 4)))
            assert traced.front_end == front_end
            assert torch.equal(traced.module(x), model(x))
        multiplied = [node for node in graph_of(traced.module).nodes if "mul" in str(node.target)]
        assert len(multiplied) == on


def test_one_that_asks_nothing_has_no_conversions_in_its_graph():
    """A run may have another autocast."""
    model = AsksForShapes(lambda: False)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        traced = trace(model, "it", positional(torch.randn(2, 4)))
    assert traced.module(torch.randn(5, 4)).dtype == torch.float32


def test_what_is_asked_unseen_is_refused():
    model = AsksForShapes(lambda: is_autocast_enabled("cpu"))
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TraceError, match="no trace sees"):
        trace(model, "it", positional(torch.randn(2, 4)))


@pytest.mark.parametrize("kind", [Asks, AsksForShapes])
def test_an_evaluation_has_no_gradients(kind):
    model, x = kind(torch.is_grad_enabled), torch.randn(5, 4)
    traced = trace(model, "it", positional(torch.randn(2, 4)))
    assert torch.equal(traced.module(x), model(x))
    traced = trace(model.eval(), "it", positional(torch.randn(2, 4)))
    with torch.no_grad():
        assert torch.equal(traced.module(x), model(x))


class Teacher(nn.Module):
    """Whose first layers are without gradients, and are told in a buffer or not."""

    def __init__(self, counts=False):
        super().__init__()
        self.a, self.b, self.last = nn.Linear(4, 8), nn.Linear(4, 6), nn.Linear(6, 3)
        self.counts = counts
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        given = self.last.bias.sum() + x
        with torch.no_grad():
            if self.counts:
                self.calls += 1
            left, right = torch.tanh(self.a(given)).chunk(2, 1)
            taught = self.b(left * right)
        return self.last(taught) + left[:, :3]


@pytest.mark.parametrize("granularity", ["layer", "op"])
@pytest.mark.parametrize("front_end", ["fx", "export"])
def test_layers_without_gradients_are_layers_in_both_modes(front_end, granularity):
    torch.manual_seed(0)
    model, x = Teacher(), torch.randn(5, 4)
    found = [
        trace(model.train(on), "it", positional(x), front_end=front_end, granularity=granularity)
        for on in (True, False)
    ]
    if granularity == "layer":
        assert [layer.name for layer in found[0].layers][-3:] == ["a", "b", "last"]
    assert why_not_evaluated(*found) == ""
    found[0].module(x).sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == [
        "last.weight",
        "last.bias",
    ]
    # None of what may go between stages has one, and no more is cut off than that.
    cut = [node for node in graph_of(found[0].module).nodes if node.target is without_gradient]
    assert len(cut) == 2 or front_end == "fx"


def test_what_is_changed_without_gradients_stays_in_one_operation():
    traced = trace(Teacher(counts=True), "it", positional(torch.randn(5, 4)), front_end="export")
    assert "a" not in [layer.name for layer in traced.layers]


class AsksTask(MLPTask):
    asks = staticmethod(ASKED[AUTOCAST])

    def model(self):
        return nn.Sequential(nn.Linear(5, 4), Asks(self.asks)).double()


class AsksDeterministic(AsksTask):
    asks = staticmethod(torch.are_deterministic_algorithms_enabled)


@contextmanager
def nothing_left():
    yield
    assert not torch.is_autocast_enabled("cpu")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("name", "profiled", "change", "modes"),
    [
        ("AsksTask", None, {"autocast": "bfloat16"}, r"\(autocast bfloat16\) .* \(autocast off\)"),
        ("AsksTask", "bfloat16", {"autocast": "off"}, r"\(autocast off\) .*autocast bfloat16\)"),
        ("AsksDeterministic", None, {"deterministic": True}, "autocast off, deterministic oper"),
    ],
)
def test_a_run_under_other_modes_than_the_profile_is_refused(
    name, profiled, change, modes, tmp_path
):
    task = f"{Path(__file__)}:{name}"
    platform = platform_of("cpu", autocast=profiled)
    profile = measure(
        resolve(task), batch_size=8, micro_batch_sizes=[4], seconds=0, platform=platform
    )
    plan = plan_by_hand(with_times(profile), "gpipe", 2, 2)
    settings = RunSettings(task=task, steps=1, evaluate=False)
    with nothing_left():
        run(plan, settings, tmp_path / "same", inline=True)
    other = RunSettings(task=task, steps=1, evaluate=False, **change)
    with nothing_left(), pytest.raises(PlanError, match=f"asks which modes are on.*{modes}"):
        run(plan, other, tmp_path / "other", inline=True)


class Kept(nn.Conv1d):
    """One of torch.nn's kinds, which is called as a whole."""

    def forward(self, x):
        h = super().forward(x)
        return h * 2 if torch.is_grad_enabled() else h


class AsksForGradients(MLPTask):
    def model(self):
        layers = (nn.Unflatten(1, (5, 1)), Kept(5, 4, 1), nn.Flatten(), nn.Linear(4, 3))
        return nn.Sequential(*layers).double()


def test_what_is_computed_again_may_not_ask_for_gradients(tmp_path):
    """The first of its two runs has none."""
    task = f"{Path(__file__)}:AsksForGradients"
    profile = measure(
        resolve(task), batch_size=8, micro_batch_sizes=[4], seconds=0, granularity="1"
    )
    plan = plan_by_hand(with_times(profile), "gpipe", 2, 2)
    again = plan_by_hand(with_times(profile), "gpipe", 2, 2, recompute=(True, True))
    settings = RunSettings(task=task, steps=1, evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    with pytest.raises(PlanError, match=r"asks whether gradients are on .* without --recompute"):
        run(again, settings, tmp_path / "again", inline=True)
