"""Training somewhere else than on the CPU, as far as that shows without such a device."""

from __future__ import annotations

import pytest
import torch
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, profiled, with_times
from helpers.processes.pretend_device import DEVICE, Elsewhere, MixedDevicesError
from timeprest.profiles.tracing.call import Call
from timeprest.profiles.tracing.front_ends import trace
from timeprest.profiles.tracing.graph import fingerprint, graph_of
from timeprest.runtime import run as running
from timeprest.runtime.prepare.devices import move
from timeprest.runtime.settings import RunSettings


@pytest.fixture
def elsewhere(monkeypatch):
    """All stages of inline runs are on the device that isn't there."""
    monkeypatch.setattr("timeprest.runtime.training.runners.own_device", lambda *_: DEVICE)
    with Elsewhere() as mode:
        yield mode


def test_mixing_devices_is_noticed(elsewhere):
    with pytest.raises(MixedDevicesError):
        torch.ones(2, device=DEVICE) + torch.ones(2)


@pytest.mark.choice(3)
@pytest.mark.slow
@pytest.mark.parametrize("variant", ALL)
def test_nothing_of_a_stage_stays_on_the_cpu(variant, elsewhere, mlp_profile, tmp_path):
    """Training, a checkpoint, going on from it, and evaluation on a few samples."""
    task = f"{TESTS / 'tasks/mlp_task.py'}:ShortEpochs"
    plan = plan_by_hand(with_times(mlp_profile), variant, 3, 4)
    settings = RunSettings(task=task, steps=4, ragged="drop", checkpoint_every=2, clip_norm=1.0)
    running.run(plan, settings, tmp_path / "run", inline=True)
    assert elsewhere.computed > 100
    running.resume(tmp_path / "run", at=2, inline=True)


@pytest.mark.parametrize(
    ("variant", "options"),
    [
        ("gpipe", {"recompute": (True,), "replicas": [2, 1]}),
        ("timeprest", {"recompute": (True, True)}),
        ("pipedream", {"replicas": [1, 2]}),
        ("spectrain", {"replicas": [2, 2]}),
    ],
)
def test_nor_of_replicas_nor_what_is_computed_again(
    variant, options, elsewhere, mlp_profile, mlp_target, tmp_path
):
    plan = plan_by_hand(with_times(mlp_profile), variant, 2, 4, **options)
    settings = RunSettings(task=mlp_target, steps=3, evaluate=False, checkpoint_every=0)
    running.run(plan, settings, tmp_path / "run", inline=True)


@pytest.mark.choice(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        *("tasks/variety_tasks.py:ResNetTask", "tasks/variety_tasks.py:GPTTask"),
        *("tasks/device_tasks.py:PositionsTask", "tasks/device_tasks.py:RecurrentTask"),
    ],
)
def test_models_of_many_shapes_go_there_whole(task, elsewhere, tmp_path):
    target = f"{TESTS / task}"
    plan = plan_by_hand(profiled(target), "timeprest", 2, 2)
    settings = RunSettings(task=target, steps=2, deferred_batch_norm=True, checkpoint_every=0)
    running.run(plan, settings, tmp_path / "run", inline=True)


def test_a_graph_is_the_same_one_there_and_blocks_without_autocast_are_too():
    class Part(torch.nn.Linear):
        def forward(self, x):
            with torch.autocast(x.device.type, enabled=False):
                places = torch.arange(3, device=x.device)
                x = super().forward(x.float() + places)
            return x + torch.arange(2, device=x.device)

    call = Call((torch.randn(2, 3),), (None,))
    traced = trace(torch.nn.Sequential(Part(3, 2)), "it", call, front_end="export")
    before, module = fingerprint(traced), traced.module
    move([module], torch.device("meta"))
    assert fingerprint(traced) == before
    graph = graph_of(module)
    targets = {node.target: node.args[0] for node in graph.nodes if node.args}
    assert targets[torch.ops.higher_order.wrap_with_autocast] == "meta"
    assert "cpu" not in graph.python_code("self").src
