"""Profiles and networkx graphs, both ways."""

from __future__ import annotations

import msgspec
import networkx as nx
import pytest
import timeprest
from helpers.by_hand.profiles import chain
from helpers.plans import with_times
from timeprest.profiles.errors import FileError, TargetError
from timeprest.profiles.profile import Profile


def test_a_profile_comes_back_as_it_was(mlp_profile):
    found = Profile.from_networkx(mlp_profile.to_networkx())
    assert found == mlp_profile
    assert found.can_run


def test_changed_costs_are_the_same_model(mlp_profile):
    """Whoever knows better what a layer takes says it there."""
    graph = mlp_profile.to_networkx()
    first = mlp_profile.layers[0]
    faster = [msgspec.structs.replace(m, forward_s=0.25) for m in first.measurements]
    graph.nodes[first.name]["measurements"] = tuple(faster)
    graph.nodes[first.name]["mine"] = "isn't the profile's"
    found = Profile.from_networkx(graph)
    assert found.layers[0] == msgspec.structs.replace(first, measurements=tuple(faster))
    assert found.layers[1:] == mlp_profile.layers[1:]
    assert found.fingerprint == mlp_profile.fingerprint
    assert found.can_run


def test_what_is_left_of_a_graph_is_another_model(mlp_profile):
    profile = with_times(mlp_profile)
    graph = profile.to_networkx()
    last = profile.layers[-1].name
    graph.remove_node(last)
    found = Profile.from_networkx(graph)
    assert [layer.name for layer in found.layers] == [la.name for la in profile.layers[:-1]]
    assert found.fingerprint != profile.fingerprint
    assert not found.can_run
    assert "Its graph was changed: " in found.assumptions[-1]
    whole, parts = found.whole_model[-1], [layer.measurements[-1] for layer in found.layers]
    assert whole.forward_s == pytest.approx(sum(m.forward_s for m in parts)), "not the whole's"
    timeprest.plan(found, stages=2, replicas=False)


def own():
    """Two branches that meet again."""
    graph = nx.DiGraph()
    for name, forward_s in (("end", 0.3), ("left", 0.1), ("right", 0.2), ("begin", 0.4)):
        graph.add_node(
            name,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            parameter_bytes=1000,
            activation_bytes=100,
        )
    graph.nodes["left"]["saved_bytes"] = 7
    graph.add_edge("begin", "left")
    graph.add_edge("begin", "right", bytes=40)
    graph.add_edge("left", "end")
    graph.add_edge("right", "end")
    return graph


def test_a_graph_of_ones_own_is_planned():
    """In topological order, whatever the order of its nodes; with numbers for other sizes."""
    profile = Profile.from_networkx(own(), batch_size=8, micro_batch_sizes=[2, 4])
    names = [layer.name for layer in profile.layers]
    assert (names[0], names[-1], set(names)) == ("begin", "end", set(own()))
    first = profile.layers[0].measurements
    assert [(m.micro_batch, m.forward_s, m.backward_s) for m in first[:2]] == [
        (2, pytest.approx(0.1), pytest.approx(0.2)),
        (4, pytest.approx(0.2), pytest.approx(0.4)),
    ]
    assert profile.layers[names.index("left")].measurements[1].saved_bytes in (3, 4)
    sent = {(e.producer, e.consumer): e.bytes_per_sample for e in profile.edges}
    assert sent["begin", "right"] == 5
    assert sent["begin", "left"] == 12.5
    assert ("end", "output") in sent
    assert not profile.can_run
    plan = timeprest.plan(profile, devices=2, stages=2, mini_batch=8, replicas=False)
    assert sorted(name for stage in plan.stages for name in stage.nodes) == sorted(names)


def test_a_partition_of_ones_own_is_a_plans():
    """Found by whatever algorithm, on the graph; pinned, and planned around."""
    profile = chain(8, parameters=1000, saved=100)
    order = list(
        nx.topological_sort(profile.to_networkx().subgraph(la.name for la in profile.layers))
    )
    pins = {name: int(k >= 3) for k, name in enumerate(order)}
    plan = timeprest.plan(profile, stages=2, replicas=False, pins=pins)
    assert [len(stage.nodes) for stage in plan.stages] == [3, 5]


def test_a_plans_stages_are_a_graph():
    plan = timeprest.plan(chain(8, parameters=1000, saved=100), devices=3, stages=3, replicas=False)
    graph = plan.to_networkx()
    assert list(nx.topological_sort(graph)) == [0, 1, 2]
    assert graph.graph["plan"] is plan
    assert graph.nodes[1]["nodes"] == plan.stages[1].nodes
    assert graph.nodes[2]["memory_bytes"] == plan.predicted.stages[2].memory_bytes
    assert [e for *_, e in graph.edges(data="tensors")] == [[edge] for edge in plan.edges]
    sizes = [edge.bytes_per_micro_batch for edge in plan.edges]
    assert [b for *_, b in graph.edges(data="bytes_per_micro_batch")] == sizes


def node(**change):
    graph = own()
    graph.nodes["left"].update(change)
    return graph


def edge(*ends, **attributes):
    graph = own()
    graph.add_edge(*ends, **attributes)
    return graph


@pytest.mark.parametrize(
    ("graph", "why"),
    [
        (nx.Graph(), "must be a networkx.DiGraph, not a Graph"),
        (nx.DiGraph(), "has no layer"),
        (edge("end", 3), "node 3: a layer's name must be a text"),
        (edge("end", "begin"), "end → begin → left → end is a cycle"),
        (edge("end", "new"), "layer 'new': has no forward_s"),
        (node(forward_s=-1), "layer 'left': forward_s must be a number from 0"),
        (node(backward_s="1 ms"), "layer 'left': backward_s must be a number"),
        (node(parameter_bytes=float("nan")), "layer 'left': parameter_bytes must be a number"),
        (edge("left", "end", bytes=-4), "edge 'left' → 'end': bytes must be a number"),
    ],
)
def test_what_is_wrong_with_a_graph_is_said(graph, why):
    with pytest.raises(FileError, match=f"^graph: .*{why}"):
        Profile.from_networkx(graph, batch_size=4)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"batch_size": 4.0}, "batch_size 4.0: give a whole number from 1"),
        ({"batch_size": "4"}, "batch_size '4': give a whole number from 1"),
        ({"batch_size": True}, "batch_size True: give a whole number from 1"),
        ({"batch_size": 4, "micro_batch_sizes": [2, 2.5]}, "micro_batch_sizes 2.5: give a whole"),
        ({"batch_size": 0}, "sizes of batches must be 1 or more"),
    ],
)
def test_sizes_of_batches_are_whole_numbers(sizes, why):
    with pytest.raises(TargetError, match=f"^graph: {why}"):
        Profile.from_networkx(own(), **sizes)


def test_what_is_wrong_with_a_changed_graph_is_said(mlp_profile):
    graph = mlp_profile.to_networkx()
    names = list(graph)
    with pytest.raises(TargetError, match="its profile says the sizes"):
        Profile.from_networkx(graph, batch_size=4)
    with pytest.raises(TargetError, match="say the batch_size"):
        Profile.from_networkx(own())
    graph.nodes[names[0]]["parameter_bytes"] = "many"
    with pytest.raises(FileError, match=f"graph: layer {names[0]!r}: .*parameter_bytes"):
        Profile.from_networkx(graph)
    graph = mlp_profile.to_networkx()
    graph.add_edge(names[0], names[2])
    with pytest.raises(FileError, match=f"edge {names[0]!r} → {names[2]!r}: tensors must be"):
        Profile.from_networkx(graph)
    graph = mlp_profile.to_networkx()
    graph.add_edge(names[2], names[0], tensors=list(mlp_profile.edges[:1]))
    with pytest.raises(FileError, match="is a cycle"):
        Profile.from_networkx(graph)
