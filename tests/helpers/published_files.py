"""Small files of the kinds that published planners read, for tests of their import."""

from __future__ import annotations

import json

GRAPH = """\
node1 -- Input0 -- forward_compute_time=5.0, backward_compute_time=0.0, activation_size=96.0, parameter_size=0
node9 -- Add -- forward_compute_time=0.5, backward_compute_time=0.25, activation_size=32.0, parameter_size=0.000
node2 -- Embedding(10, 4) -- forward_compute_time=1.0, backward_compute_time=2.0, activation_size=64.0, parameter_size=160.000
node3 -- LSTM(4,  4) -- forward_compute_time=3.0, backward_compute_time=6.0, activation_size=[32.0; 16.0; 8.0], parameter_size=256.0
node10 -- __getitem__(0) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=32.0, parameter_size=0
node4 -- __getitem__(1) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=16.0, parameter_size=0
node5 -- Size(0) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=4.0, parameter_size=0
\tnode1 -- node2
\tnode2 -- node3
\tnode3 -- node10
\tnode3 -- node4
\tnode10 -- node9
\tnode2 -- node5
\tnode2 -- node9
\tnode5 -- node9
"""  # noqa: E501


def placement_node(k, latency, color=None, backward=False, size=0.0, name=None, **more):
    node = {"id": k, "name": name or f"n{k}", "fpgaLatency": latency, "cpuLatency": 99.0}
    node |= {"size": size, "isBackwardNode": backward, "supportedOnFpga": True}
    return node | ({"colorClass": color} if color is not None else {}) | more


def placement_edge(source, target, size=1000.0, cost=1.0):
    return {"sourceId": source, "destId": target, "size": size, "cost": cost}


# a → b → loss, and back; a's weight shares its class; a sum of gradients has no class.
PLACEMENT = {
    "maxSizePerFPGA": 1e6,
    "maxFPGAs": 2,
    "maxCPUs": 1,
    "nodes": [
        placement_node(7, 0.0, color=1, size=100.0, name="a.weight"),
        placement_node(1, 2.0, color=1, size=10.0, name="a"),
        placement_node(2, 3.0, color=2, size=20.0, name="b"),
        placement_node(3, 0.5, color=3, backward=True, size=5.0, name="loss"),
        placement_node(4, 6.0, color=2, backward=True, size=21.0, name="b.grad"),
        placement_node(5, 0.25, backward=True, size=1.0, name="sum"),
        placement_node(6, 4.0, color=1, backward=True, size=11.0, name="a.grad"),
    ],
    "edges": [
        placement_edge(7, 1, 100.0, 0.1),
        placement_edge(1, 2),
        placement_edge(2, 3, 2000.0, 2.0),
        placement_edge(3, 4, 2000.0, 2.0),
        placement_edge(1, 4),
        placement_edge(4, 5),
        placement_edge(5, 6),
    ],
}


def piper_node(k, name, time, parameters, a, b):
    plain = {"id": "vanilla", "timePerSample": time, "parameterSize": parameters}
    plain |= {"memoryUsageA": a, "memoryUsageB": b, "syncTimeFw": {}, "syncTimeBw": {"1": 0.0}}
    again = plain | {"id": "activation recomp", "timePerSample": time * 2}
    return {"id": k, "name": name, "TMPCs": {"1": [again, plain], "2": [plain, again]}}


PIPER = {
    "maxDevices": 10,
    "maxMemoryPerDevice": 8e10,
    "bandwidth": 2.5e10,
    "mbsInBatch": 1920,
    "nodes": [
        piper_node(4, "Layer", 0.3, 100.0, 1000.0, 200.0),
        piper_node(0, "Layer", 0.6, 200.0, 2000.0, 700.0),
        piper_node(8, "Head", 0.0, 0.0, 8.0, 0.0),
    ],
    "edges": [
        {"sourceId": 4, "destId": 0, "communicationCost": 64.0},
        {"sourceId": 0, "destId": 8, "communicationCost": 32.0},
        {"sourceId": 4, "destId": 8, "communicationCost": 16.0},
    ],
}


def write(folder, name, content):
    """Write text, bytes or JSON to a file of this name; returns its path."""
    path = folder / name
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path
