"""Published planners' cost models: known optima, and loads of small workloads by hand."""

from __future__ import annotations

import json
import math

import pytest
from helpers.by_hand.best_cuts import pipedream_best, piper_best, placement_best
from helpers.by_hand.workloads import SMALL, workload_file
from helpers.drawn.problems import is_downset
from helpers.paths import published
from helpers.published_files import (
    GRAPH,
    PIPER,
    PLACEMENT,
    piper_node,
    placement_edge,
    placement_node,
    write,
)
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.partition.problem import ChosenStage, Cut, cut_load, stage_bytes, stage_load
from timeprest.profiles.errors import FileError, UserError
from timeprest.tests.benchmarks.published.cost_models import COST_MODELS, problem_of
from timeprest.tests.benchmarks.published.cut import solve_cut
from timeprest.tests.benchmarks.published.reader import read_workload

GIB = 2**30


def small(tmp_path, content, name="w.json"):
    return read_workload(write(tmp_path, name, content))


def named(workload):
    return {node.name: k for k, node in enumerate(workload.nodes)}


def solved(problem):
    """The answer's load in s, after its cut was found to be one, and to have that load."""
    answer = solve_cut(problem, time_limit_s=100)
    below = 0
    for stage in answer.cut.stages:
        below |= stage.layers
        assert is_downset(problem, below)
    assert below == problem.full
    assert cut_load(problem, answer.cut) == pytest.approx(answer.objective_s, rel=1e-9)
    assert answer.bound_s <= answer.objective_s * (1 + 1e-9)
    return answer


# Optima of small workloads -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "short"),
    [("small_convnet", 3e8), ("small_residual", 1.5e8), ("small_translator", 7e6)],
)
@pytest.mark.parametrize("replicas", [False, True])
def test_pipedreams_model_has_no_better_cut(name, short, replicas, tmp_path):
    """At 4 machines and 8, over slow links and fast ones, and where memory is short."""
    name = f"pipedream/{name}.graph.txt"
    workload = read_workload(workload_file(name, tmp_path))
    found = []
    for devices, bandwidth in [(d, b) for d in (4, 8) for b in (1e8, 1e9, 1e10)]:
        for memory in (math.inf, short):
            answer = solved(
                problem_of(
                    workload,
                    devices=devices,
                    bandwidth_bytes_per_s=bandwidth,
                    replicas=replicas,
                    memory_bytes=memory,
                )
            )
            best_s = pipedream_best(
                SMALL[name], devices, bandwidth, replicas=replicas, memory=memory
            )
            assert answer.optimal
            assert answer.objective_s == pytest.approx(best_s, rel=1e-9)
            found.append(best_s)
    assert len(set(found)) >= 3


@pytest.mark.parametrize("name", ["small_layers_training", "small_operators_training"])
def test_the_placement_model_has_no_better_cut(name, tmp_path):
    """Also though some nodes are put together before; with the file's memory and without limit."""
    name = f"placement/{name}.json"
    workload = read_workload(workload_file(name, tmp_path))
    # The layers' costs are in seconds.
    unit_s = 1.0 if "layers" in name else 1e-3
    found = []
    for scale in (1, 1e-3):
        for memory in (None, math.inf):
            answer = solved(problem_of(workload, transfer_scale=scale, memory_bytes=memory))
            best_s = placement_best(SMALL[name], cost_s=scale * unit_s, memory=memory)
            assert answer.optimal
            assert answer.objective_s == pytest.approx(best_s, rel=1e-9)
            found.append(best_s)
    assert len(set(found)) >= 3


@pytest.mark.parametrize("devices", [2, 4, 8, 12])
def test_pipers_model_has_no_better_cut(devices, tmp_path):
    """From memory that makes nearly all layers compute again to enough for all."""
    name = "piper/small_transformer.json"
    workload = read_workload(workload_file(name, tmp_path))
    found = []
    for memory in (5e8, 6e8, 8e8, 1e9, 1e12):
        answer = solved(problem_of(workload, devices=devices, memory_bytes=memory))
        best_s = piper_best(SMALL[name], devices, memory, bandwidth=1e10)
        assert answer.optimal
        assert answer.objective_s == pytest.approx(best_s, rel=1e-9)
        found.append(best_s)
    assert found == sorted(found, reverse=True)
    assert len(set(found)) >= 4


def test_small_contractions_are_kept(tmp_path):
    """24 nodes make 10: words and cast go with the embedding, the weight with the query.

    Both nodes of `dense` and `act`, forward and backward, are one. In order, these must follow one
    another: embed, sum, then query and key in any order, attend, dense, attend2, head, loss. The
    mask may come anywhere before attend. Up to there are 6 sets, each with the mask and without it;
    after it 5.
    """
    from timeprest.planner.partition.dp.lattice import find_downsets

    workload = read_workload(workload_file("placement/small_operators_training.json", tmp_path))
    assert (workload.listed, len(workload.nodes)) == (24, 10)
    assert find_downsets(problem_of(workload), 10_000).size == 6 * 2 + 5
    assert find_downsets(problem_of(workload), 16) is None


# The published optima --------------------------------------------------------------------------


@pytest.mark.choice(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "theirs_ms"),
    [
        ("vgg16", False, (411.0, 235.6, 411.0, 235.6)),
        ("resnet50", False, (258.1, 111.5, 258.1, 82.2)),
        ("gnmt", False, (25.87, 25.87, 19.29, 19.03)),
        ("vgg16", True, (205.5, 170.2, 103.8, 89.9)),
        ("resnet50", True, (162.9, 111.5, 92.0, 56.6)),
        ("gnmt", True, (25.87, 25.87, 19.28, 17.12)),
    ],
)
def test_pipedreams_own_results(name, replicas, theirs_ms):
    """At 4 machines and 8, 1 GB/s and 10: as good, or better where a cut was charged twice."""
    workload = read_workload(published(f"pipedream/{name}.graph.txt"))
    machines = [(devices, bandwidth) for devices in (4, 8) for bandwidth in (1e9, 1e10)]
    for (devices, bandwidth), theirs in zip(machines, theirs_ms, strict=True):
        problem = problem_of(
            workload, devices=devices, bandwidth_bytes_per_s=bandwidth, replicas=replicas
        )
        answer = solved(problem)
        assert answer.optimal
        # Their figures are rounded, 17.125 ms down.
        digit = 0.1 if theirs > 30 else 0.01
        assert answer.objective_s * 1e3 <= theirs + 0.5001 * digit
        assert answer.objective_s * 1e3 >= theirs * 0.98


@pytest.mark.parametrize(
    ("name", "scale", "theirs_ms"),
    [
        ("operator_bert_l-3", 1, 65.3031),
        ("layer_bert24", 1e-3, 41.7458),
        ("layer_bert24", 1, 46.6082),
    ],
)
def test_the_placement_papers_own_results(name, scale, theirs_ms):
    workload = read_workload(published(f"placement/{name}_training.json"))
    answer = solved(problem_of(workload, transfer_scale=scale))
    assert answer.optimal
    assert answer.objective_s * 1e3 == pytest.approx(theirs_ms, abs=1e-4)


@pytest.mark.parametrize(
    ("devices", "theirs_s"), [(8, 0.165856), (32, 0.0415155), (128, 0.0101209), (1024, 0.00130318)]
)
def test_pipers_own_results(devices, theirs_s):
    workload = read_workload(published("piper/bert32a100.json"))
    problem = problem_of(
        workload, devices=devices, memory_bytes=8 * GIB, bandwidth_bytes_per_s=25 * GIB
    )
    answer = solved(problem)
    assert float(f"{answer.objective_s:.6g}") <= theirs_s


def test_their_contraction_is_kept():
    """600 nodes make 138, with as many downsets as their program counts."""
    from timeprest.planner.partition.dp.lattice import find_downsets

    workload = read_workload(published("placement/operator_bert_l-3_training.json"))
    assert (workload.listed, len(workload.nodes)) == (600, 138)
    assert find_downsets(problem_of(workload), 10_000).size == 2774
    assert find_downsets(problem_of(workload), 2773) is None


# By hand ---------------------------------------------------------------------------------------


def test_a_pipedream_load_by_hand(tmp_path):
    workload = small(tmp_path, GRAPH, "graph.txt")
    at = named(workload)
    assert list(at) == [
        "node2:Embedding",
        "node3:LSTM",
        "node5:Size",
        "node10:__getitem__",
        "node9:Add",
    ]
    problem = problem_of(workload, devices=3, bandwidth_bytes_per_s=1e3)
    first = sum(1 << at[name] for name in ("node2:Embedding", "node3:LSTM", "node5:Size"))
    rest = problem.full & ~first
    # Two replicas: 18 ms / 2 + 4 · 1 · 416 bytes / (1000 · 2) / 2; nothing comes in.
    assert stage_load(problem, 0, first, 1, 3) == pytest.approx(6e-3 + 0.416)
    # The embedding's 64 bytes, all 56 of the LSTM and 4 of Size come in, each once.
    assert stage_load(problem, first, rest, 0, 1) == pytest.approx(2 * (64 + 56 + 4) / 1e3)
    assert stage_load(problem, first, rest, 1, 2) == pytest.approx((64 + 56 + 4) / 1e3)
    # Twice as large mini-batches in flight, with their weights, on the first of two devices.
    limited = problem_of(workload, devices=2, bandwidth_bytes_per_s=1e3, memory_bytes=1e6)
    assert stage_bytes(limited, 0, first, 0, 2) == 2 * (160 + 256 + 64 + 56 + 4)
    assert stage_bytes(limited, 0, first, 1, 2) == 160 + 256 + 64 + 56 + 4


def test_a_straight_pipeline_has_no_replicas(tmp_path):
    workload = small(tmp_path, GRAPH, "graph.txt")
    straight = problem_of(workload, devices=3, bandwidth_bytes_per_s=1e9, replicas=False)
    assert [option.replicas for option in straight.options] == [1]
    half = problem_of(workload, devices=3, bandwidth_bytes_per_s=1e9, transfer_scale=0.5)
    assert [t.lower_s * 2 for t in half.tensors] == [t.lower_s for t in straight.tensors]
    assert not any(t.upper_s for t in straight.tensors)


def test_backward_nodes_alone_are_nodes_of_their_own(tmp_path):
    """`loss` and `sum` have no forward; the edges of their gradients bind them, the other way."""
    workload = small(tmp_path, PLACEMENT)
    at = named(workload)
    assert list(at) == ["a", "sum", "b", "loss"]
    needs = [list(workload.graph.pred[k]) for k in workload.graph]
    assert needs == [[], [at["a"]], [at["a"], at["sum"]], [at["b"]]]
    assert [node.compute_s for node in workload.nodes] == pytest.approx([6e-3, 25e-5, 9e-3, 5e-4])
    assert [node.held_bytes for node in workload.nodes] == [121, 1, 41, 5]
    problem = problem_of(workload)
    # What a, b, loss and b.grad send crosses; a's tensor goes to b and b.grad alike.
    assert stage_load(problem, 0, 0b0011, 0, 2) == pytest.approx(6.25e-3 + 1e-3 + 1e-3)
    assert stage_load(problem, 0b0011, 0b0100, 0, 1) == pytest.approx(9e-3 + 6e-3)


def test_an_idle_node_goes_with_its_only_neighbour(tmp_path):
    """A weight with its user, a chain of such, but not what two nodes use, nor what takes time."""
    workload = {
        "nodes": [
            placement_node(1, 0.0, size=5.0, name="weight"),
            placement_node(2, 0.0, size=7.0, name="cast"),
            placement_node(3, 1.0, name="user"),
            placement_node(4, 0.0, name="shared"),
            placement_node(5, 2.0, name="other"),
        ],
        "edges": [
            placement_edge(1, 2),
            placement_edge(2, 3),
            placement_edge(4, 3),
            placement_edge(4, 5),
        ],
    }
    found = small(tmp_path, workload)
    assert {node.name: node.held_bytes for node in found.nodes} == {
        "user": 12.0,
        "shared": 0.0,
        "other": 0.0,
    }
    problem = problem_of(found, devices=2)
    at = named(found)
    user = 1 << at["user"]
    shared, other = 1 << at["shared"], 1 << at["other"]
    # One tensor, used on both sides: once for each device, at 1 ms.
    assert stage_load(problem, 0, shared | user, 0, 2) == pytest.approx(2e-3)
    assert stage_load(problem, shared | user, other, 0, 1) == pytest.approx(3e-3)
    assert solve_cut(problem).objective_s == pytest.approx(3e-3)


def test_gradients_cross_borders_too(tmp_path):
    """b's gradient goes back to a: three tensors at the border, 1 ms each, each device once."""
    workload = {
        "nodes": [
            placement_node(1, 2.0, color=1, name="a", size=10.0),
            placement_node(2, 3.0, color=2, name="b", size=20.0),
            placement_node(3, 4.0, color=2, backward=True, name="b.grad", size=1.0),
            placement_node(4, 5.0, color=1, backward=True, name="a.grad"),
        ],
        "edges": [
            placement_edge(1, 2, 8.0, 1.0),
            placement_edge(1, 3, 8.0, 1.0),
            placement_edge(1, 4, 8.0, 1.0),
            placement_edge(2, 3, 8.0, 1.0),
            placement_edge(3, 4, 8.0, 1.0),
        ],
    }
    found = small(tmp_path, workload)
    problem = problem_of(found, devices=2, memory_bytes=21.0)
    assert stage_load(problem, 0, 0b01, 0, 2) == pytest.approx(7e-3 + 2e-3)
    assert stage_load(problem, 0b01, 0b10, 0, 1) == pytest.approx(7e-3 + 2e-3)
    assert stage_bytes(problem, 0b01, 0b10, 0, 1) == 21
    assert solve_cut(problem).objective_s == pytest.approx(9e-3)
    # A bandwidth takes the place of the file's costs: 2 · 8 bytes at 8 bytes/s.
    slow = problem_of(found, devices=2, bandwidth_bytes_per_s=8.0)
    assert stage_load(slow, 0, 0b01, 0, 2) == pytest.approx(7e-3 + 2.0)


def test_costs_in_seconds_are_taken_for_that(tmp_path):
    workload = json.loads(json.dumps(PLACEMENT))
    for edge in workload["edges"]:
        edge["cost"] = edge["size"] / 2**31
    found = small(tmp_path, workload)
    assert {tensor.cost_s for tensor in found.tensors} == {1000 / 2**31, 2000 / 2**31}
    assert any("taken to be seconds" in sentence for sentence in found.notes)
    assert found.bandwidth_bytes_per_s == pytest.approx(2**31)


def test_a_piper_load_by_hand(tmp_path):
    workload = small(tmp_path, PIPER)
    assert list(named(workload)) == ["Layer.4", "Layer.0", "Head"]
    problem = problem_of(workload, devices=3, memory_bytes=1e6, bandwidth_bytes_per_s=16.0)
    replicas = [option.replicas for option in problem.options]
    assert sorted(set(replicas)) == [1, 2, 3]
    two = replicas.index(2)
    # 64 + 16 bytes of edges cross, both ways; 4 · (2 − 1) / 2 · 100 bytes of parameters.
    expected = (0.3 + 2 * 80 / 16) / 2 + 2 * 100 / (16 * 1920)
    assert stage_load(problem, 0, 0b001, two, 3) == pytest.approx(expected)
    assert stage_bytes(problem, 0, 0b001, two, 3) == 2 * 1000 + 200
    assert stage_bytes(problem, 0, 0b001, 0, 3) == 3 * 1000 + 200


def test_layers_that_lose_least_are_computed_again_first(tmp_path):
    """As many as the stage needs: of three alike but for what they lose, two."""
    nodes = [piper_node(k, f"n{k}", 1.0, 0.0, 100.0, 0.0) for k in (1, 2, 3)]
    for node, again in zip(nodes, (3.0, 1.5, 2.0), strict=True):
        node["TMPCs"]["1"][0] |= {"timePerSample": again, "memoryUsageA": 10.0}
    edges = [{"sourceId": k, "destId": k + 1, "communicationCost": 0.0} for k in (1, 2)]
    workload = small(tmp_path, PIPER | {"nodes": nodes, "edges": edges})
    machines = {"devices": 1, "bandwidth_bytes_per_s": 1e9}
    assert solve_cut(problem_of(workload, memory_bytes=120, **machines)).objective_s == 4.5
    assert solve_cut(problem_of(workload, memory_bytes=119, **machines)).objective_s == 6.5
    assert solve_cut(problem_of(workload, memory_bytes=math.inf, **machines)).objective_s == 3.0
    plain = problem_of(workload, memory_bytes=120, recompute=False, **machines)
    assert len(plain.modes) == 1
    assert cut_load(plain, Cut((ChosenStage(0b111, 0, 1),), 3.0)) == math.inf


def test_replicas_divide_the_mini_batch(tmp_path):
    workload = small(tmp_path, PIPER)
    problem = problem_of(workload, devices=9, micro_batches=6, memory_bytes=math.inf)
    assert (problem.devices, [option.replicas for option in problem.options]) == (6, [1, 2, 3, 6])


# Errors ----------------------------------------------------------------------------------------


def complaint(workload, error=UserError, **arguments):
    with pytest.raises(error) as raised:
        problem_of(workload, **arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_what_a_cost_model_lacks(tmp_path):
    graph = small(tmp_path, GRAPH, "graph.txt")
    assert "doesn't say how many devices" in complaint(graph)
    assert "doesn't say the bandwidth" in complaint(graph, devices=2)
    assert "there are pipedream, placement, piper" in complaint(graph, model="simplex")
    assert "for the cost model pipedream, not piper" in complaint(graph, model="piper")
    assert "0 devices; expected 1 to" in complaint(graph, devices=0)
    for name in ("bandwidth_bytes_per_s", "memory_bytes"):
        given = {"bandwidth_bytes_per_s": 1e9, name: 0}
        assert "more than 0" in complaint(graph, devices=2, **given)
    assert "can't take nan times" in complaint(graph, devices=2, transfer_scale=math.nan)
    assert "no link's" in complaint(graph, devices=2, bandwidth_bytes_per_s=1e-9)
    again = {key: value for key, value in PIPER.items() if key != "mbsInBatch"}
    assert "how many micro-batches" in complaint(small(tmp_path, again))


def test_a_cost_without_end_is_refused(tmp_path):
    workload = json.loads(json.dumps(PLACEMENT))
    workload["edges"][1]["cost"] = 1e300
    assert "too long" in complaint(small(tmp_path, workload))


def test_three_ways_to_run_a_node_are_too_many(tmp_path):
    workload = json.loads(json.dumps(PIPER))
    ways = workload["nodes"][1]["TMPCs"]["1"]
    ways.append(ways[0] | {"id": "third"})
    with pytest.raises(FileError, match=r"nodes\[1\].*one entry besides"):
        small(tmp_path, workload)


@given(data=st.data())
def test_a_workload_with_any_value_anywhere_is_a_problem_or_one_line(data, tmp_path_factory):
    workload = json.loads(json.dumps(data.draw(st.sampled_from([PLACEMENT, PIPER]))))
    parts = [data.draw(st.sampled_from([workload, *workload["nodes"], *workload["edges"]]))]
    if "TMPCs" in parts[0]:
        parts += parts[0]["TMPCs"]["1"]
    part = data.draw(st.sampled_from(parts))
    key = data.draw(st.sampled_from(sorted(part)))
    values = [0, -1, 1, 7, 2**60, 10**30, 1e17, 1e-300, 0.5, "", "1", True, None, [], {}, "é\n[/x]"]
    part[key] = data.draw(st.sampled_from(values))
    path = tmp_path_factory.getbasetemp() / "valued.json"
    path.write_text(json.dumps(workload))
    try:
        found = read_workload(path)
        problem = problem_of(found, **({} if found.devices else {"devices": 2}))
    except UserError as error:
        line = str(error)
    else:
        line = "valued.json"
        assert found.cost_model in COST_MODELS
        everything = Cut((ChosenStage(problem.full, 0, 1),), 0.0)
        assert cut_load(problem, everything) >= 0
    assert "valued.json" in line
    assert "\n" not in line
