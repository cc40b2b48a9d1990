"""The plugin: tp-profile reads published planners' files, tp-plan cuts them as their authors do."""

from __future__ import annotations

import json
import math
from functools import partial
from importlib import import_module

import pytest
import timeprest
from helpers.by_hand.workloads import workload_file
from helpers.output.commands import called
from helpers.paths import PLANNERS
from timeprest.profiles.profile import Profile

call = partial(called, "tp-plan", "--plugin", PLANNERS)

pytestmark = pytest.mark.usefixtures("plugins_forgotten")

CHAIN = (
    "node1 -- Linear(4, 8) -- forward_compute_time=1.0, backward_compute_time=2.0, "
    "activation_size=3200, parameter_size=160\n"
    "node2 -- Linear(8, 2) -- forward_compute_time=2.0, backward_compute_time=4.0, "
    "activation_size=800, parameter_size=64\n"
    "\tnode1 -- node2\n"
)


@pytest.fixture
def graph(tmp_path, monkeypatch):
    """A small graph.txt in a folder of its own, which the commands are in."""
    (tmp_path / "chain.graph.txt").write_text(CHAIN)
    monkeypatch.chdir(tmp_path)
    return "chain.graph.txt"


def test_a_published_profile_is_planned_and_says_that_it_cant_be_run(graph):
    words = (graph, "--batch-size", 100, "-o", "chain.json")
    assert "no importer reads such a file" in called("tp-profile", *words, code=2)
    text = called("tp-profile", *words, "--plugin", PLANNERS)
    assert "from numbers (pipedream): can be planned, but not run" in text
    # Once it is a profile, nothing asks for the plugin.
    text = called("tp-plan", "solve", "chain.json", "-o", "chain.plan.json")
    assert "it can't be run" in text
    text = called("tp-run", "chain.plan.json", code=2)
    assert "costs without a model" in text


def test_from_python(graph):
    assert timeprest.plugin(PLANNERS) == ()
    found = timeprest.profile(graph, batch_size=100)
    assert isinstance(found, Profile)
    assert not found.can_run
    assert found.layers[0].measurements[0].forward_s == 1e-3


def test_the_command_is_there_with_the_plugin_alone(graph):
    assert "No such command 'published'" in called("tp-plan", "published", graph, code=2)
    assert "published" not in called("tp-plan", "--help")
    assert "published" in called("tp-plan", "--plugin", PLANNERS, "--help")


@pytest.mark.parametrize("number", ["nan", "1e400"])
def test_transfers_scale_by_finite_numbers(graph, number):
    text = call("published", graph, "--transfer-scale", number, code=2)
    assert "--transfer-scale" in text


@pytest.mark.parametrize(
    ("name", "nodes", "best_ms", "scaled"),
    [
        # Blocks 2 to 4 compute for 29.25 ms, and 9.25 times 2^20 bytes cross their borders.
        ("placement/small_layers_training.json", 8, 33.7666, "29.2545 ms"),
        # Published.
        ("placement/layer_bert24_training.json", 21, 46.6082, "41.7458 ms"),
    ],
)
def test_a_workload_under_its_own_cost_model(name, nodes, best_ms, scaled, tmp_path):
    path = workload_file(name, tmp_path)
    found = json.loads(call("published", path, "--json"))
    assert found["objective_s"] == pytest.approx(best_ms / 1e3, rel=1e-5)
    assert found["optimal"]
    assert sum(len(stage["nodes"]) for stage in found["stages"]) >= nodes
    text = call("published", path, "--transfer-scale", 0.001)
    assert scaled in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_several_stretches_on_a_device_gain(tmp_path):
    """Of cuts without replicas: a device of theirs has none either."""
    path = workload_file("placement/small_layers_training.json", tmp_path)
    alone = ("published", path, "--replicas", "off")
    found = json.loads(call(*alone, "--non-contiguous", "--json"))
    gain = 1 - found["non_contiguous"]["objective_s"] / found["objective_s"]
    assert 0 <= gain < 1
    assert call(*alone, "--non-contiguous").endswith(f"(proven optimal), {gain:.1%} shorter\n")
    path = workload_file("pipedream/small_convnet.graph.txt", tmp_path)
    how = ("--devices", 4, "--bandwidth", "10GB/s", "--non-contiguous")
    text = call("published", path, *how)
    assert "to compare a cut without them: --replicas off" in text


def test_no_answer_in_time_is_said(tmp_path, monkeypatch):
    module = import_module("timeprest.tests.benchmarks.published.non_contiguous")
    none = module.NoncontiguousAnswer(None, math.inf, 0.0, optimal=False, interrupted=False)
    monkeypatch.setattr(module, "solve_noncontiguous", lambda problem, **how: none)
    path = workload_file("placement/small_layers_training.json", tmp_path)
    text = call("published", path, "--non-contiguous")
    assert text.endswith("device: none found in time; raise --time-limit\n")
    late = call("published", path, "--solver", "ilp", "--time-limit", 0, code=2)
    assert "no cut found in time; raise --time-limit" in late


def test_a_published_workload_with_no_room_says_so(tmp_path):
    path = workload_file("placement/small_layers_training.json", tmp_path)
    text = call("published", path, "--memory", "1B", code=2)
    assert text.endswith("no cut fits the devices' memory; raise --memory or --devices\n")
