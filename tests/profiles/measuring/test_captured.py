"""Layers are timed in graphs where a run replays its stages: here by a stand-in on the CPU."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.recorded_graphs import Recorded, RecordedGraphs
from mlp_task import MLPTask
from timeprest.profiles.autograd import boundary
from timeprest.profiles.errors import TaskWarning
from timeprest.profiles.measuring import capture
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.measuring.platforms import Clock, Platform
from timeprest.profiles.measuring.step import CapturedStep
from timeprest.profiles.target import resolve

START = 10


class Looks(torch.nn.Module):
    """Looks at numbers."""

    def forward(self, x):
        return x[x > 0].mean() + x


class LooksTask(MLPTask):
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 3), Looks()).double()


@pytest.fixture
def replays(monkeypatch):
    """Graphs are recorded on the CPU, and the clock shows how much was replayed: START for each
    graph, and 1 for each call in it."""
    found, replay = [], Recorded.replay

    def counted(graph):
        replay(graph)
        found.append(graph)

    @contextmanager
    def clock(self):
        yield Clock(lambda: sum(START + len(graph.calls) for graph in found))

    monkeypatch.setattr(Recorded, "replay", counted)
    monkeypatch.setattr(Platform, "clock", clock)
    monkeypatch.setattr(capture, "capture_on", RecordedGraphs)
    return found


def measured(task):
    return measure(resolve(task), batch_size=8, micro_batch_sizes=[4, 8], seconds=0)


def bytes_of(profile):
    layers = msgspec.to_builtins(profile.layers)
    for layer in layers:
        for m in layer["measurements"]:
            for name in [name for name in m if name.endswith("_s")]:
                del m[name]
    return layers


def test_each_layer_is_one_graph(replays, mlp_target, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskWarning)
        profile = measured(mlp_target)
    assert replays
    parts = [*(layer.measurements for layer in profile.layers), profile.loss]
    for of_part, whole in zip(zip(*parts, strict=True), profile.whole_model, strict=True):
        # A run's stage is one graph: what it costs to begin those of single layers is left out.
        for kind in ("forward_s", "backward_s"):
            times, whole_s = [getattr(m, kind) for m in of_part], getattr(whole, kind)
            assert START < whole_s <= sum(times) + START
            assert sum(times) < whole_s + START
        assert all(m.backward_weight_s < START for m in of_part if m.backward_weight_s)
    monkeypatch.setattr(capture, "capture_on", lambda device: None)
    assert bytes_of(measured(mlp_target)) == bytes_of(profile)


def test_a_layer_that_cant_be_captured_has_all_timed_as_ever(replays):
    with pytest.warns(TaskWarning, match="operation by operation.*as a mask says"):
        profile = measured(f"{Path(__file__)}:LooksTask")
    assert not replays
    assert all(m.forward_s == 0 for layer in profile.layers for m in layer.measurements)


def test_all_of_a_captured_step_is_on_one_stream(replays, mlp_target, monkeypatch):
    """What is made between two layers' graphs, too: a backward waits for the streams of its
    forward."""
    inside, admit = [0], boundary.Inlet.admit

    @contextmanager
    def aside(self):
        inside[0] += 1
        yield
        inside[0] -= 1

    def admitted(inlet, tensor):
        made.append(inside[0])
        return admit(inlet, tensor)

    made = []
    monkeypatch.setattr(RecordedGraphs, "aside", aside)
    monkeypatch.setattr(boundary.Inlet, "admit", admitted)
    monkeypatch.setattr(CapturedStep, "replay", lambda self, probe: made.append("replayed"))
    measured(mlp_target)
    captured = made[made.index(1) : made.index("replayed")]
    assert len(captured) > 4
    assert all(captured)
