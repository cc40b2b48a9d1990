"""Small models of our own in the formats of published planners.

Made up for the tests, no number is from a published file. Each has what makes its kind hard to
read or to cut; `best_cuts` tries all cuts of them.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from helpers.paths import published
from helpers.published_files import placement_edge, placement_node, write

# PipeDream's text graphs -----------------------------------------------------------------------

# A chain: large activations first, most parameters last. Computing takes 60, 5, 8, 54, 3, 5, 29
# and 9 ms, 173 ms together; loading isn't counted.
CONVNET = """\
node1 -- Input0 -- forward_compute_time=12.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Conv2d(3, 16, kernel_size=(3, 3)) -- forward_compute_time=20.000, backward_compute_time=40.000, activation_size=64000000.0, parameter_size=1792.000
node3 -- ReLU() -- forward_compute_time=2.000, backward_compute_time=3.000, activation_size=64000000.0, parameter_size=0.000
node4 -- MaxPool2d(2) -- forward_compute_time=3.000, backward_compute_time=5.000, activation_size=16000000.0, parameter_size=0.000
node5 -- Conv2d(16, 32, kernel_size=(3, 3)) -- forward_compute_time=18.000, backward_compute_time=36.000, activation_size=32000000.0, parameter_size=18560.000
node6 -- ReLU() -- forward_compute_time=1.000, backward_compute_time=2.000, activation_size=32000000.0, parameter_size=0.000
node7 -- MaxPool2d(2) -- forward_compute_time=2.000, backward_compute_time=3.000, activation_size=8000000.0, parameter_size=0.000
node8 -- Linear(in_features=8192, out_features=1024) -- forward_compute_time=10.000, backward_compute_time=19.000, activation_size=1000000.0, parameter_size=33558528.000
node9 -- Linear(in_features=1024, out_features=10) -- forward_compute_time=3.000, backward_compute_time=6.000, activation_size=10000.0, parameter_size=41000.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode4 -- node5
\tnode5 -- node6
\tnode6 -- node7
\tnode7 -- node8
\tnode8 -- node9
"""  # noqa: E501

# Two blocks with skips, the second of which has a convolution of its own: node3 and node7 send to
# two layers each. Lines and ids are in no order.
RESIDUAL = """\
node12 -- Linear(in_features=64, out_features=10) -- forward_compute_time=1.000, backward_compute_time=1.500, activation_size=5120.0, parameter_size=2600.000
node3 -- ReLU(inplace) -- forward_compute_time=1.000, backward_compute_time=1.500, activation_size=24000000.0, parameter_size=0.000
node2 -- Conv2d(3, 32) -- forward_compute_time=7.000, backward_compute_time=11.000, activation_size=24000000.0, parameter_size=3584.000
node4 -- Conv2d(32, 32) -- forward_compute_time=9.000, backward_compute_time=16.000, activation_size=24000000.0, parameter_size=36992.000
node5 -- Conv2d(32, 32) -- forward_compute_time=9.000, backward_compute_time=17.000, activation_size=24000000.0, parameter_size=36992.000
node6 -- Add() -- forward_compute_time=0.500, backward_compute_time=0.000, activation_size=24000000.0, parameter_size=0.000
node1 -- Input0 -- forward_compute_time=4.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node7 -- ReLU(inplace) -- forward_compute_time=0.500, backward_compute_time=1.000, activation_size=24000000.0, parameter_size=0.000
node10 -- Add() -- forward_compute_time=0.250, backward_compute_time=0.250, activation_size=6000000.0, parameter_size=0.000
node8 -- Conv2d(32, 64, stride=(2, 2)) -- forward_compute_time=6.000, backward_compute_time=10.000, activation_size=6000000.0, parameter_size=70000000.000
node9 -- Conv2d(32, 64, kernel_size=(1, 1)) -- forward_compute_time=2.000, backward_compute_time=3.500, activation_size=6000000.0, parameter_size=8448.000
node11 -- AvgPool2d() -- forward_compute_time=0.500, backward_compute_time=0.750, activation_size=30000.0, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node4
\tnode4 -- node5
\tnode5 -- node6
\tnode3 -- node6
\tnode6 -- node7
\tnode7 -- node8
\tnode7 -- node9
\tnode8 -- node10
\tnode9 -- node10
\tnode10 -- node11
\tnode11 -- node12
"""  # noqa: E501

# Two sentences come in: without the inputs there are two embeddings to begin with. The LSTM makes a
# tuple; nobody uses its second element (node6), and node9 counts the words.
TRANSLATOR = """\
node1 -- Input0 -- forward_compute_time=2.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node2 -- Input1 -- forward_compute_time=2.000, backward_compute_time=0.000, activation_size=0.0, parameter_size=0.000
node3 -- Embedding(5000, 64, padding_idx=0) -- forward_compute_time=0.125, backward_compute_time=0.500, activation_size=400000.0, parameter_size=1280000.000
node4 -- LSTM(64, 64) -- forward_compute_time=3.000, backward_compute_time=5.000, activation_size=[400000.0; 8000.0; 8000.0], parameter_size=132096.000
node5 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=400000.0, parameter_size=0.000
node6 -- __getitem__(1) -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=8000.0, parameter_size=0.000
node7 -- Dropout(p=0.2) -- forward_compute_time=0.250, backward_compute_time=0.250, activation_size=400000.0, parameter_size=0.000
node8 -- Embedding(6000, 64, padding_idx=0) -- forward_compute_time=0.125, backward_compute_time=0.625, activation_size=480000.0, parameter_size=1536000.000
node9 -- Size(0) -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=8.0, parameter_size=0.000
node10 -- Bmm() -- forward_compute_time=2.000, backward_compute_time=4.000, activation_size=480000.0, parameter_size=33024.000
node11 -- LSTM(128, 64) -- forward_compute_time=4.000, backward_compute_time=7.000, activation_size=480000.0, parameter_size=197632.000
node12 -- Linear(in_features=64, out_features=6000) -- forward_compute_time=5.000, backward_compute_time=6.500, activation_size=2400000.0, parameter_size=1560000.000
\tnode1 -- node3
\tnode3 -- node4
\tnode4 -- node5
\tnode4 -- node6
\tnode5 -- node7
\tnode2 -- node8
\tnode8 -- node9
\tnode8 -- node10
\tnode9 -- node10
\tnode7 -- node10
\tnode10 -- node11
\tnode8 -- node11
\tnode11 -- node12
"""  # noqa: E501


# The placement paper's JSON ----------------------------------------------------------------------


def _trained(k, name, forward_ms, backward_ms, size, color=None):
    """A node and its backward one, whose id is 100 higher."""
    color = k if color is None else color
    ahead = placement_node(k, forward_ms, color=color, size=size, name=name)
    behind = placement_node(
        100 + k, backward_ms, color=color, size=size, name=f"{name}grad", backward=True
    )
    return [ahead, behind]


def _edges(costs_ms, pairs, size_of):
    """What node a sends costs `costs_ms[a]`, on all of its edges."""
    return [placement_edge(a, b, size_of(costs_ms[a]), costs_ms[a]) for a, b in pairs]


def _layers():
    """A chain of layers with a mask that three of them use. Costs are in seconds: size / 2^31."""
    times = [(1, "embed", 1.0, 3.0), (2, "mask", 0.0, 0.0)]
    times += [(k, f"block{k - 2}", 2.0 + k / 4, 4.0 + k / 2) for k in range(3, 8)]
    times += [(8, "head", 3.0, 6.5)]
    nodes = [
        node
        for k, name, forward, backward in times
        for node in _trained(k, name, forward, backward, 0.0 if name == "mask" else 1e6 * (11 - k))
    ]
    chain = [1, 3, 4, 5, 6, 7, 8]
    ahead = [*pairwise(chain), (2, 3), (2, 5), (2, 7)]
    behind = [(100 + b, 100 + a) for a, b in ahead]
    nbytes = {k: 2.0**20 * (1 + k % 3) for k in (*range(1, 9), *range(101, 109))}
    nbytes[2] = nbytes[102] = 2.0**18
    return {
        "maxSizePerFPGA": 4.5e7,
        "maxFPGAs": 3,
        "maxCPUs": 1,
        "nodes": nodes,
        "edges": [
            placement_edge(a, b, nbytes[a], nbytes[a] / 2**31)
            for a, b in (*ahead, (8, 108), *behind)
        ],
    }


def _operators():
    """Attention, a layer whose two nodes stand around another class, and a loss.

    Classes 5 (dense up, dense down) and 6 (act) need each other. `words`, `cast` and
    `weight` take no time and touch one other node each, in the end. `loss` and `sum` are backward
    nodes alone.
    """
    nodes = [
        placement_node(20, 0.0, size=3e5, name="words"),
        placement_node(21, 0.0, size=1e5, name="cast"),
        placement_node(22, 0.0, size=4e5, name="weight"),
        placement_node(23, 0.0, size=2e4, name="mask", supportedOnFpga=False),
        *_trained(1, "embed", 1.0, 2.0, 2e5),
        *_trained(2, "query", 2.0, 4.0, 3e5),
        *_trained(3, "key", 2.0, 4.5, 3e5),
        *_trained(4, "attend", 1.5, 3.0, 1e5),
        *_trained(5, "dense.up", 2.5, 5.0, 5e5),
        *_trained(6, "act", 0.5, 0.75, 1e5),
        *_trained(7, "dense.down", 2.0, 4.0, 5e5, color=5),
        *_trained(8, "attend2", 3.0, 6.0, 2e5),
        *_trained(9, "head", 2.5, 5.0, 7e5),
        placement_node(30, 0.5, color=30, backward=True, size=1e4, name="loss"),
        placement_node(31, 0.25, backward=True, size=1e5, name="sum"),
    ]
    ahead = [(20, 21), (21, 1), (22, 2), (1, 2), (1, 3), (2, 4), (3, 4), (23, 4), (4, 5), (5, 6)]
    ahead += [(6, 7), (7, 8), (23, 8), (8, 9)]
    behind = [(9, 30), (30, 109), (109, 108), (108, 107), (107, 106), (106, 105), (105, 104)]
    behind += [(104, 102), (104, 103), (102, 31), (103, 31), (31, 101)]
    kept = [(k, 100 + k) for k in (2, 3, 4, 8)]
    costs = {k: 0.25 * (1 + k % 4) for k in (*range(1, 10), *range(101, 110), 20, 21, 22, 30, 31)}
    costs[23] = 0.125
    return {
        "maxSizePerFPGA": 2.6e6,
        "maxFPGAs": 3,
        "maxCPUs": 1,
        "nodes": nodes,
        "edges": _edges(costs, [*ahead, *behind, *kept], lambda ms: ms * 1e6),
    }


# Piper's JSON ------------------------------------------------------------------------------------


def _ways(time_s, parameters, kept, again_s, again_kept):
    """A degree's entries: plainly, and with activations computed again."""
    held = 3 * parameters

    def way(name, seconds, in_flight):
        return {
            "id": name,
            "timePerSample": seconds,
            "parameterSize": parameters,
            "memoryUsageA": in_flight,
            "memoryUsageB": held,
            "syncTimeFw": {},
            "syncTimeBw": {"1": 0.0},
        }

    return [way("vanilla", time_s, kept), way("activation recomp", again_s, again_kept)]


def _transformer():
    """Four blocks of unlike sizes and a mask for two of them; memory makes some compute again."""
    costs = {
        0: ("mask", 0.0, 0.0, 1e6, 0.0, 1e6),
        1: ("embed", 0.002, 64e6, 20e6, 0.0025, 4e6),
        2: ("block", 0.012, 40e6, 150e6, 0.016, 10e6),
        3: ("block", 0.012, 40e6, 150e6, 0.015, 10e6),
        4: ("block", 0.016, 48e6, 180e6, 0.021, 12e6),
        5: ("block", 0.010, 40e6, 120e6, 0.0145, 10e6),
        6: ("head", 0.006, 64e6, 60e6, 0.0075, 8e6),
    }
    nodes = [
        {
            "id": k,
            "name": name,
            "TMPCs": {
                "1": _ways(time_s, parameters, kept, again_s, less),
                "2": _ways(0.6 * time_s, parameters / 2, 0.7 * kept, 0.6 * again_s, less),
            },
        }
        for k, (name, time_s, parameters, kept, again_s, less) in costs.items()
    ]
    sent = {(1, 2): 8e6, (2, 3): 8e6, (3, 4): 8e6, (4, 5): 8e6, (5, 6): 8e6}
    sent |= {(0, 2): 1e6, (0, 4): 1e6, (2, 4): 4e6}
    return {
        "maxDevices": 6,
        "maxMemoryPerDevice": 1e9,
        "bandwidth": 1e10,
        "mbsInBatch": 24,
        "nodes": nodes,
        "edges": [
            {"sourceId": a, "destId": b, "communicationCost": nbytes}
            for (a, b), nbytes in sent.items()
        ],
    }


SMALL = {
    "pipedream/small_convnet.graph.txt": CONVNET,
    "pipedream/small_residual.graph.txt": RESIDUAL,
    "pipedream/small_translator.graph.txt": TRANSLATOR,
    "placement/small_layers_training.json": _layers(),
    "placement/small_operators_training.json": _operators(),
    "piper/small_transformer.json": _transformer(),
}
"""By name, each file's text or JSON."""


def workload_file(name, folder):
    """The path of a workload: one of `SMALL` is written to `folder`, others are published."""
    if name in SMALL:
        return write(folder, Path(name).name, SMALL[name])
    return published(name)
