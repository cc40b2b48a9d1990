"""Published planners' files: what comes out of small ones by hand, of models of our own in the
same formats, and of the real ones."""

from __future__ import annotations

import json
import math
import re
import sys
from importlib import import_module
from itertools import combinations, pairwise

import pytest
from helpers.by_hand.cuts import places_to_cut
from helpers.by_hand.workloads import SMALL, workload_file
from helpers.paths import PUBLISHED
from helpers.published_files import GRAPH, PIPER, PLACEMENT, placement_edge, placement_node, write
from helpers.stage_costs import stage_cost
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.search.answer.recheck import recheck
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import TargetError
from timeprest.profiles.files import read_file, write_file
from timeprest.profiles.imported.reader import import_profile, is_foreign
from timeprest.profiles.profile import Profile, check_profile

SAMPLES = {
    **{name: 32 if name.startswith("pipedream") else None for name in SMALL},
    "pipedream/vgg16.graph.txt": 128,
    "pipedream/resnet50.graph.txt": 128,
    "pipedream/gnmt.graph.txt": 64,
    "placement/layer_bert24_training.json": None,
    "placement/operator_bert_l-3_training.json": None,
    "piper/bert32a100.json": None,
}


FILES = [name for name in SAMPLES if name in SMALL or (PUBLISHED / name).exists()]
"""For what holds of any file: ours, and those of the published ones that are there."""


pytestmark = pytest.mark.usefixtures("planners")


def sample(name, folder):
    path = workload_file(name, folder)
    return path, import_profile(path, batch_size=SAMPLES[name])


def times(profile):
    return {
        layer.name: (layer.measurements[0].forward_s, layer.measurements[0].backward_s)
        for layer in profile.layers
    }


def edges(profile):
    return {(e.producer, e.consumer, e.tensor): e for e in profile.edges}


# By hand ---------------------------------------------------------------------------------------


def test_a_pipedream_graph_by_hand(tmp_path):
    profile = import_profile(write(tmp_path, "graph.txt", GRAPH), batch_size=4)
    assert times(profile) == {
        "node2:Embedding": (1e-3, 2e-3),
        "node3:LSTM": (3e-3, 6e-3),
        "node5:Size": (0, 0),
        "node10:__getitem__": (0, 0),
        "node9:Add": (0.5e-3, 0.25e-3),
    }
    by_name = {layer.name: layer for layer in profile.layers}
    assert by_name["node3:LSTM"].kind == "LSTM(4, 4)"
    assert [layer.parameter_bytes for layer in profile.layers] == [160, 256, 0, 0, 0]
    assert [m.measurements[0].saved_bytes for m in profile.layers] == [64, 56, 4, 32, 32]
    assert profile.batch_size == 4
    assert profile.micro_batch_sizes == (4,)
    assert [(i.shape, i.consumers) for i in profile.inputs] == [((6,), ("node2:Embedding",))]
    assert (profile.front_end, profile.device, profile.can_run) == ("pipedream", "imported", False)
    found = edges(profile)
    assert {key: (e.bytes_per_sample, e.fixed_bytes, e.needs_grad) for key, e in found.items()} == {
        ("node2:Embedding", "node3:LSTM", "node2:Embedding"): (16, 0, True),
        ("node2:Embedding", "node5:Size", "node2:Embedding"): (16, 0, True),
        ("node2:Embedding", "node9:Add", "node2:Embedding"): (16, 0, True),
        ("node3:LSTM", "node10:__getitem__", "node3:LSTM[0]"): (8, 0, True),
        ("node10:__getitem__", "node9:Add", "node10:__getitem__"): (8, 0, True),
        ("node5:Size", "node9:Add", "node5:Size"): (0, 4, False),
        ("node9:Add", "output", "node9:Add"): (8, 0, True),
    }
    whole = profile.whole_model[0]
    assert (whole.forward_s, whole.backward_s) == pytest.approx((4.5e-3, 8.25e-3))
    said = " ".join(profile.assumptions)
    for part in ("4 samples", "5 ms of loading", "Left out: 1 nodes", "node9:Add", "optimizer"):
        assert part in said


def test_an_element_of_a_tuple_is_kept_once(tmp_path):
    """The element lies in the tuple: 64 + (32 + 16 + 8) + 4 + 32, not the element twice."""
    profile = import_profile(write(tmp_path, "graph.txt", GRAPH), batch_size=4)
    names = [layer.name for layer in profile.layers]
    assert stage_cost(profile, names, 4, last=True).kept_bytes == 64 + 56 + 4 + 32
    # On a stage of its own it is what came over the cut.
    assert stage_cost(profile, ["node10:__getitem__"], 4, last=False).kept_bytes == 32


def test_what_uses_a_whole_tuple_gets_all_of_it(tmp_path):
    graph = GRAPH.replace("\tnode2 -- node9\n", "\tnode3 -- node9\n")
    profile = import_profile(write(tmp_path, "graph.txt", graph), batch_size=4)
    sent = {e.tensor: e.bytes_per_sample for e in profile.edges if e.producer == "node3:LSTM"}
    assert sent == {"node3:LSTM[0]": 8, "node3:LSTM[1]": 4, "node3:LSTM[2]": 2}


def test_other_sizes_are_in_proportion_and_said_to_be(tmp_path):
    path = write(tmp_path, "graph.txt", GRAPH)
    profile = import_profile(path, batch_size=4, micro_batch_sizes=[1, 2])
    assert profile.micro_batch_sizes == (1, 2, 4)
    lstm = profile.layers[1].measurements
    assert [m.forward_s for m in lstm] == pytest.approx([0.75e-3, 1.5e-3, 3e-3])
    assert [m.saved_bytes for m in lstm] == [14, 28, 56]
    assert [m.saved_bytes for m in profile.layers[2].measurements] == [4, 4, 4]
    assert any("proportional" in sentence for sentence in profile.assumptions)
    assert solve(profile, uniform_cluster(2), micro_batches=2).micro_batch == 2
    with pytest.raises(TargetError, match="8 samples are more than the mini-batch of 4"):
        import_profile(path, batch_size=4, micro_batch_sizes=[8])


def test_pipedream_needs_a_batch_size(tmp_path):
    with pytest.raises(TargetError, match=r"graph\.txt: .*give it with --batch-size"):
        import_profile(write(tmp_path, "graph.txt", GRAPH))


def test_fractional_sizes_that_just_fit_their_limit_fit(tmp_path):
    sizes = [10.6, 5.5, 15.6, 3.6]
    # Two devices of so much memory hold two nodes each.
    limit = math.fsum(sizes[2:])
    workload = {
        "maxFPGAs": 2,
        "maxSizePerFPGA": limit,
        "nodes": [placement_node(k, 1.0, size=size) for k, size in enumerate(sizes)],
        "edges": [placement_edge(k, k + 1, 0.0, 0.0) for k in range(3)],
    }
    profile = import_profile(write(tmp_path, "w.json", workload))
    (words,) = re.findall(r"--memory (\d+)", " ".join(profile.assumptions))
    plan = solve(profile, uniform_cluster(2, words + "B"), "gpipe")
    assert [len(stage.nodes) for stage in plan.stages] == [2, 2]
    assert any("whole bytes" in line for line in profile.assumptions)


def test_a_placement_workload_by_hand(tmp_path):
    """`sum` belongs to a, which it sums the gradient of; `loss` to b, which it is the loss of."""
    profile = import_profile(write(tmp_path, "w.json", PLACEMENT))
    assert times(profile) == {
        "a": pytest.approx((2e-3, 4.25e-3)),
        "b": pytest.approx((3e-3, 6.5e-3)),
    }
    assert [layer.buffer_bytes for layer in profile.layers] == [122, 46]
    assert [layer.kind for layer in profile.layers] == [
        "2 forward + 2 backward",
        "1 forward + 2 backward",
    ]
    assert [(e.tensor, e.bytes_per_sample, e.needs_grad) for e in profile.edges] == [
        ("a", 1000, True)
    ]
    assert (profile.batch_size, profile.micro_batch_sizes) == (1, (1,))
    said = " ".join(profile.assumptions)
    for part in ("2 backward nodes have no forward node", "0.001 GB/s", "--devices 2"):
        assert part in said
    plan = solve(profile, uniform_cluster(2, bandwidth="1TB/s", latency="0s"))
    assert plan.predicted.period_s == pytest.approx(9.5e-3)
    assert plan.predicted.stages[0].memory.weights_bytes == 122


def test_edge_costs_in_seconds_are_recognised(tmp_path):
    workload = json.loads(json.dumps(PLACEMENT))
    for edge in workload["edges"]:
        edge["cost"] = edge["size"] / 2**31
    said = " ".join(import_profile(write(tmp_path, "w.json", workload)).assumptions)
    assert "taken to be seconds" in said
    assert "2.147 GB/s" in said


def test_an_inference_workload_has_no_backward(tmp_path):
    workload = {
        "nodes": [placement_node(1, 2.0), placement_node(2, 3.0, supportedOnFpga=0)],
        "edges": [placement_edge(1, 2)],
    }
    profile = import_profile(write(tmp_path, "w.json", workload), batch_size=8)
    assert times(profile) == {"n1": (2e-3, 0), "n2": (3e-3, 0)}
    assert not profile.edges[0].needs_grad
    said = " ".join(profile.assumptions)
    assert "no backward nodes" in said
    assert "1 nodes aren't supported on accelerators" in said
    assert solve(profile, uniform_cluster(2)).micro_batches == 8


def test_classes_that_need_each_other_are_one_layer(tmp_path):
    """x1 → y → x2, x1 and x2 of one class: y can stand nowhere but with them."""
    workload = {
        "nodes": [
            placement_node(1, 1.0, color=5, name="x1"),
            placement_node(2, 2.0, name="y"),
            placement_node(3, 4.0, color=5, name="x2"),
            placement_node(4, 8.0, name="z"),
        ],
        "edges": [placement_edge(1, 2), placement_edge(2, 3), placement_edge(3, 4)],
    }
    assert times(import_profile(write(tmp_path, "w.json", workload))) == {
        "x2": pytest.approx((7e-3, 0)),
        "z": (8e-3, 0),
    }


def test_what_passes_in_the_backward_alone_is_an_edge(tmp_path):
    """Two branches whose losses are summed: the sum goes with the later branch."""
    workload = {
        "nodes": [
            placement_node(1, 1.0, color=1, name="left"),
            placement_node(2, 1.0, color=2, name="right"),
            placement_node(3, 0.5, color=3, backward=True, name="total"),
            placement_node(4, 2.0, color=1, backward=True, name="left.grad"),
            placement_node(5, 2.0, color=2, backward=True, name="right.grad"),
        ],
        "edges": [
            placement_edge(1, 3, 8.0),
            placement_edge(2, 3, 8.0),
            placement_edge(3, 4, 4.0),
            placement_edge(3, 5, 4.0),
        ],
    }
    profile = import_profile(write(tmp_path, "w.json", workload))
    assert times(profile) == {"left": (1e-3, 2e-3), "right": (1e-3, 2.5e-3)}
    assert [(e.producer, e.consumer, e.tensor, e.needs_grad) for e in profile.edges] == [
        ("left", "right", "left", True)
    ]


def test_a_piper_workload_by_hand(tmp_path):
    profile = import_profile(write(tmp_path, "w.json", PIPER))
    assert times(profile) == {
        "Layer.4": pytest.approx((0.1, 0.2)),
        "Layer.0": pytest.approx((0.2, 0.4)),
        "Head": (0, 0),
    }
    assert [layer.parameter_bytes for layer in profile.layers] == [100, 200, 0]
    assert [layer.buffer_bytes for layer in profile.layers] == [0, 300, 0]
    assert {key: e.bytes_per_sample for key, e in edges(profile).items()} == {
        ("Layer.4", "Layer.0", "Layer.4[0]"): 64,
        ("Layer.0", "Head", "Layer.0"): 32,
        ("Layer.4", "Head", "Layer.4[1]"): 16,
    }
    said = " ".join(profile.assumptions)
    for part in ("3 node configurations with recomputation", "6 node configurations with tensor"):
        assert part in said
    assert "--devices 10 --memory 80000000000 --bandwidth 25GB/s" in said
    # Weights, gradients, optimizer state and buffers of one version are memoryUsageB.
    plan = solve(profile, uniform_cluster(1, latency="0s"), "pipedream")
    memory = plan.predicted.stages[0].memory
    assert plan.predicted.stages[0].versions_held == 1
    assert memory.weights_bytes + memory.gradients_bytes + memory.optimizer_bytes == 900
    assert memory.activations_bytes == 3008
    assert plan.predicted.period_s == pytest.approx(0.9)
    larger = import_profile(write(tmp_path, "w.json", PIPER), batch_size=6)
    assert solve(larger, uniform_cluster(2)).micro_batches == 6


# Small models of our own, and the published files ----------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_workloads_keep_their_totals(name, tmp_path):
    """Forward and backward together are the file's own sums, read here by other means."""
    path, profile = sample(name, tmp_path)
    assert is_foreign(path)
    assert check_profile(profile) is profile
    text = path.read_text()
    if name.startswith("pipedream"):
        lines = [x for x in text.splitlines() if "compute_time" in x and "Input" not in x]
        numbers = [re.findall(r"(?:compute_time|parameter_size)=([\d.]+)", line) for line in lines]
        forward, backward, parameters = (
            sum(map(float, column)) for column in zip(*numbers, strict=True)
        )
        assert profile.whole_model[0].forward_s == pytest.approx(forward / 1e3, rel=1e-12)
        assert profile.whole_model[0].backward_s == pytest.approx(backward / 1e3, rel=1e-12)
        assert sum(layer.parameter_bytes for layer in profile.layers) == parameters
        return
    total_s = profile.whole_model[0].forward_s + profile.whole_model[0].backward_s
    nodes = json.loads(text)["nodes"]
    if name.startswith("piper"):
        plain = [next(c for c in n["TMPCs"]["1"] if c["id"] == "vanilla") for n in nodes]
        assert total_s == pytest.approx(sum(c["timePerSample"] for c in plain), rel=1e-12)
        constant = [2 * layer.parameter_bytes + layer.buffer_bytes for layer in profile.layers]
        assert sum(constant) == sum(c["memoryUsageB"] for c in plain)
        assert profile.whole_model[0].saved_bytes == sum(c["memoryUsageA"] for c in plain)
        return
    assert total_s * 1e3 == pytest.approx(sum(n["fpgaLatency"] for n in nodes), rel=1e-12)
    assert sum(layer.buffer_bytes for layer in profile.layers) == sum(n["size"] for n in nodes)
    counted = [list(map(int, re.findall(r"\d+", layer.kind))) for layer in profile.layers]
    assert sum(map(sum, counted)) == len(nodes)


@pytest.mark.choice(6)
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_workloads_can_be_planned(name, tmp_path):
    """On 2 devices and on 4; a plan's own prediction is made again from the profile alone.

    The largest, whose search has no end but its effort's on 4, on 3.
    """
    _, profile = sample(name, tmp_path)
    work_s = profile.whole_model[0].forward_s + profile.whole_model[0].backward_s
    before = math.inf
    for devices in (2, 3) if "operator_bert" in name else (2, 4):
        plan = solve(profile, uniform_cluster(devices, bandwidth="10GB/s", latency="10us"))
        assert recheck(plan, profile).changes == ()
        assert work_s / devices <= plan.predicted.period_s * (1 + 1e-9)
        assert plan.predicted.period_s <= before * (1 + 1e-9)
        before = plan.predicted.period_s


@pytest.mark.choice(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_workloads_are_solved_and_shown_by_the_command(name, tmp_path, monkeypatch, capsys):
    _, profile = sample(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tp-plan"])
    write_file("profile.json", profile)
    assert read_file("profile.json", Profile) == profile
    assert not is_foreign("profile.json")
    main = import_module("timeprest.cli.plan").main
    main(["solve", "profile.json", "--devices", "3", "-v"], standalone_mode=False)
    # Where that takes its time, it says from time to time how far it is.
    told = capsys.readouterr()
    assert all(line.startswith("tp-plan: planning: ") for line in told.err.splitlines())
    main(["show", "plan.json"], standalone_mode=False)
    printed = capsys.readouterr()
    # Long names are cut in the middle.
    assert profile.layers[0].name[:5] in printed.out
    assert max(len(line) for line in (told.out + printed.out).splitlines()) <= 100
    assert printed.err == ""


@pytest.mark.parametrize(
    ("name", "cuts"),
    [
        # A chain of 8 layers.
        ("pipedream/small_convnet.graph.txt", 8 + 1),
        # A chain of 11, but of two convolutions side by side the second one may stand alone too.
        ("pipedream/small_residual.graph.txt", 11 + 1 + 1),
        # Before the attention a chain of 4 layers beside one of 2; from it on 3 in a chain.
        ("pipedream/small_translator.graph.txt", (4 + 1) * (2 + 1) + 3),
        # The authors count 40 states for vgg16, 240 for resnet50, and 561 downsets of gnmt, without
        # the empty one.
        ("pipedream/vgg16.graph.txt", 40 + 1),
        ("pipedream/resnet50.graph.txt", 240 + 1),
        ("pipedream/gnmt.graph.txt", 561 + 1),
    ],
)
def test_there_are_as_many_cuts_as_counted(name, cuts, tmp_path):
    assert len(places_to_cut(sample(name, tmp_path)[1], 10**4)) == cuts


def their_period_s(profile, stages, bandwidth):
    """PipeDream's own model, without replicas, over prefixes of the layers, by brute force."""
    position = {layer.name: k for k, layer in enumerate(profile.layers)}
    work = [sum(times(profile)[layer.name]) for layer in profile.layers]
    count = len(work)

    def wire_s(cut):
        crossing = {
            e.tensor: e.bytes_per_sample * profile.batch_size + e.fixed_bytes
            for e in profile.edges
            if e.consumer in position and position[e.producer] < cut <= position[e.consumer]
        }
        return 2 * sum(crossing.values()) / bandwidth

    wires = [0.0, *(wire_s(cut) for cut in range(1, count))]
    ahead = [sum(work[:k]) for k in range(count + 1)]
    return min(
        max(max(wires[a], ahead[b] - ahead[a]) for a, b in pairwise((0, *cuts, count)))
        for parts in range(1, stages + 1)
        for cuts in combinations(range(1, count), parts - 1)
    )


@pytest.mark.parametrize(
    ("name", "slow_s", "fast_s"),
    [
        # At 1 GB/s cuts right behind the first convolution, of 60 ms, or its ReLU take 128 ms: both
        # that and the pooling go with it. At 10 GB/s it is the largest stage, alone.
        ("pipedream/small_convnet.graph.txt", 0.073, 0.060),
        ("pipedream/vgg16.graph.txt", 0.4110, 0.2356),
    ],
)
def test_chains_have_their_known_periods_in_their_own_model(name, slow_s, fast_s, tmp_path):
    _, profile = sample(name, tmp_path)
    assert their_period_s(profile, 4, 1e9) == pytest.approx(slow_s, rel=5e-4)
    assert their_period_s(profile, 4, 1e10) == pytest.approx(fast_s, rel=5e-4)


@pytest.mark.parametrize(
    ("name", "best_s"),
    [
        ("pipedream/small_convnet.graph.txt", 0.060),
        # Below the published 235.6 ms, whose cut avoids large activations on a 10 GB/s link.
        ("pipedream/vgg16.graph.txt", 0.21645),
    ],
)
def test_where_transfers_do_not_matter_it_is_the_best_cut_there_is(name, best_s, tmp_path):
    _, profile = sample(name, tmp_path)
    cluster = uniform_cluster(4, bandwidth="1000TB/s", latency="0s")
    plan = solve(profile, cluster, "pipedream")
    assert plan.solver.optimal
    best = their_period_s(profile, 4, math.inf)
    assert plan.predicted.period_s == pytest.approx(best, rel=1e-4)
    assert best == pytest.approx(best_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "devices", "known_s", "rel"),
    [
        # With convolutions of 25 and 26 ms on stages of their own 20.5 ms are before them and 27.25
        # behind; an addition of 0.5 ms may stand on either side. With one more device, the largest.
        ("pipedream/small_residual.graph.txt", 4, 0.02725, 1e-6),
        ("pipedream/small_residual.graph.txt", 5, 0.026, 1e-6),
        # The linear layer takes 11.5 ms, the LSTM before it 11, and all before them 15.875: 9.125
        # for one sentence, 6.75 for the other one and the attention.
        ("pipedream/small_translator.graph.txt", 3, 0.015875, 1e-6),
        ("pipedream/small_translator.graph.txt", 4, 0.0115, 1e-6),
        # Published, at 10 GB/s.
        ("pipedream/resnet50.graph.txt", 4, 0.1115, 5e-3),
        ("pipedream/gnmt.graph.txt", 4, 0.02587, 5e-3),
        ("pipedream/gnmt.graph.txt", 8, 0.01903, 5e-3),
    ],
)
def test_known_periods_that_computing_decides(name, devices, known_s, rel, tmp_path):
    """Periods under PipeDream's own model where no transfer is the bottleneck."""
    _, profile = sample(name, tmp_path)
    cluster = uniform_cluster(devices, bandwidth="1000TB/s", latency="0s")
    plan = solve(profile, cluster, "pipedream")
    assert plan.predicted.period_s == pytest.approx(known_s, rel=rel)
