"""The best cut of a small published workload: from its file and its cost model, trying all cuts.

Nothing here is the package's: files are read by a few lines, and loads are the formulas of the
planners' papers and programs, straight. Tests hold the package's readers, cost models and solvers
against that. Times are in s, `k` counts devices from a stage's first one to the last one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from functools import cache


def downsets(needs: list[int]) -> list[int]:
    """All sets of nodes, as bit masks, that hold what their nodes need.

    Args:
        needs: for each node, the bit mask of those it needs; circles are allowed.
    """
    return [
        mask
        for mask in range(1 << len(needs))
        if all(need & mask == need for k, need in enumerate(needs) if mask >> k & 1)
    ]


def least_load(
    needs: list[int],
    devices: int,
    load: Callable[[int, int, int, int], float],
    replicas: Iterable[int] = (1,),
) -> float:
    """The smallest load that the largest stage of a pipeline can have; infinite if none fits.

    Args:
        load: of (nodes below the stage, its nodes, its replicas, k); infinite where it doesn't fit.
    """
    sets, everything = downsets(needs), (1 << len(needs)) - 1

    @cache
    def best(below: int, k: int) -> float:
        if below == everything:
            return 0.0 if k == 0 else math.inf
        return min(
            (
                max(load(below, above ^ below, r, k), best(above, k - r))
                for above in sets
                if above != below and above & below == below
                for r in replicas
                if r <= k
            ),
            default=math.inf,
        )

    return min(best(0, k) for k in range(1, devices + 1))


def bits(mask: int) -> list[int]:
    """Positions of a mask's ones."""
    return [k for k in range(mask.bit_length()) if mask >> k & 1]


def mask_of(positions: Iterable[int]) -> int:
    """The mask with ones at these positions."""
    return sum(1 << k for k in set(positions))


# PipeDream -------------------------------------------------------------------------------------


def pipedream_graph(text: str) -> tuple[list[dict[str, float]], list[tuple[int, int]]]:
    """Nodes and edges, without inputs and without elements of tuples that nobody uses."""
    lines = [re.split(r"\s+--\s+", line.strip()) for line in text.splitlines()]
    pairs = [(parts[0], parts[1]) for parts in lines if len(parts) == 2]
    sends = {a for a, _ in pairs}
    nodes, place = [], {}
    for name, description, costs in (parts for parts in lines if len(parts) == 3):
        idle = description.startswith("__getitem__") and name not in sends
        if idle or description.startswith("Input"):
            continue
        forward, backward, sent, parameters = (
            sum(map(float, part.strip("[]").split(";"))) for part in re.findall(r"=([^,]+)", costs)
        )
        place[name] = len(nodes)
        nodes.append({"s": (forward + backward) / 1e3, "sent": sent, "parameters": parameters})
    return nodes, [(place[a], place[b]) for a, b in pairs if a in place and b in place]


def pipedream_best(
    text: str,
    devices: int,
    bandwidth: float,
    *,
    replicas: bool = True,
    memory: float = math.inf,
) -> float:
    """PipeDream: a stage of r replicas takes max(computing / r + sync, 2·bytes in / (B·r)).

    sync is 4·(r − 1)·P / (B·r) / r, and each tensor comes in once. A stage holds parameters and
    activations for as many mini-batches as are in flight behind its first device: ⌈k / r⌉.
    """
    nodes, edges = pipedream_graph(text)
    needs = [mask_of(a for a, b in edges if b == k) for k in range(len(nodes))]

    def load(below: int, stage: int, r: int, k: int) -> float:
        inside = [nodes[j] for j in bits(stage)]
        parameters = sum(node["parameters"] for node in inside)
        kept = parameters + sum(node["sent"] for node in inside)
        if kept * math.ceil(k / r) > memory:
            return math.inf
        coming = {a for a, b in edges if below >> a & 1 and stage >> b & 1}
        sync_s = 4 * (r - 1) * parameters / (bandwidth * r) / r
        wire_s = 2 * sum(nodes[a]["sent"] for a in coming) / (bandwidth * r)
        return max(sum(node["s"] for node in inside) / r + sync_s, wire_s)

    return least_load(needs, devices, load, range(1, devices + 1) if replicas else (1,))


# Placement -------------------------------------------------------------------------------------


def placement_best(content: dict, *, cost_s: float = 1e-3, memory: float | None = None) -> float:
    """The placement paper: a device takes Σ latency + Σ cost of tensors that cross its border.

    In or out, each tensor once. A class shares a device. Forward edges never lead back to an
    earlier device, and backward nodes follow theirs; a class without forward nodes, like a
    loss, never stands before what it gets its gradients to, or behind what it has them from.
    No nodes are put together but by class, so there are more cuts here than planners look at.

    Args:
        content: the file's JSON.
        cost_s: seconds in a unit of the edges' costs.
        memory: of a device, in place of the file's.
    """
    nodes = {node["id"]: node for node in content["nodes"]}
    classes = {i: node.get("colorClass", f"node {i}") for i, node in nodes.items()}
    units = list(dict.fromkeys(classes.values()))
    unit = {i: units.index(label) for i, label in classes.items()}
    behind = {i for i, node in nodes.items() if node["isBackwardNode"]}
    forward_units = {unit[i] for i in nodes if i not in behind}
    before: list[set[int]] = [set() for _ in units]
    tensors: dict[int, set[int]] = {}
    costs = {}
    for edge in content["edges"]:
        a, b = edge["sourceId"], edge["destId"]
        tensors.setdefault(a, {unit[a]}).add(unit[b])
        costs[a] = edge["cost"] * cost_s
        if not {a, b} & behind:
            before[unit[b]].add(unit[a])
        if {a, b} <= behind and not {unit[a], unit[b]} <= forward_units:
            before[unit[a]].add(unit[b])
    needs = [mask_of(found) for found in before]
    ends = {a: mask_of(found) for a, found in tensors.items()}
    own = [[node for i, node in nodes.items() if unit[i] == u] for u in range(len(units))]
    seconds = [sum(node["fpgaLatency"] for node in found) / 1e3 for found in own]
    held = [sum(node["size"] for node in found) for found in own]
    limit = content["maxSizePerFPGA"] if memory is None else memory

    def load(below: int, stage: int, r: int, k: int) -> float:
        if sum(held[u] for u in bits(stage)) > limit:
            return math.inf
        crossing = (costs[a] for a, at in ends.items() if at & stage and at & ~stage)
        return sum(seconds[u] for u in bits(stage)) + sum(crossing)

    return least_load(needs, content["maxFPGAs"], load)


# Piper -----------------------------------------------------------------------------------------


def piper_best(content: dict, devices: int, memory: float, bandwidth: float) -> float:
    """Piper: (Σ time + 2 / B · Σ bytes of edges that cross) / r + 4·(r − 1)·P / (r·B·M).

    r divides M, the micro-batches of a mini-batch. With y = ⌈k / r⌉ micro-batches in flight a
    stage holds Σ (a·y + b). While that is too much, the layer that loses the least time per freed
    byte computes its activations again. Of tensor parallelism only degree 1.
    """
    place = {node["id"]: k for k, node in enumerate(content["nodes"])}
    ways = [{way["id"]: way for way in node["TMPCs"]["1"]} for node in content["nodes"]]
    edges = [
        (place[e["sourceId"]], place[e["destId"]], e["communicationCost"]) for e in content["edges"]
    ]
    needs = [mask_of(a for a, b, _ in edges if b == k) for k in range(len(ways))]
    count = content["mbsInBatch"]

    def loss(j: int) -> float:
        plain, again = ways[j]["vanilla"], ways[j]["activation recomp"]
        freed = plain["memoryUsageA"] - again["memoryUsageA"]
        lost = again["timePerSample"] - plain["timePerSample"]
        return lost / freed if freed > 0 else math.inf

    def load(below: int, stage: int, r: int, k: int) -> float:
        chosen = {j: ways[j]["vanilla"] for j in bits(stage)}
        for j in sorted(chosen, key=loss):
            if _held(chosen.values(), math.ceil(k / r)) <= memory:
                break
            if loss(j) < math.inf:
                chosen[j] = ways[j]["activation recomp"]
        if _held(chosen.values(), math.ceil(k / r)) > memory:
            return math.inf
        crossing = sum(n for a, b, n in edges if (stage >> a & 1) != (stage >> b & 1))
        compute_s = sum(way["timePerSample"] for way in chosen.values())
        parameters = sum(way["parameterSize"] for way in chosen.values())
        sync_s = 4 * (r - 1) * parameters / (r * bandwidth * count)
        return (compute_s + 2 * crossing / bandwidth) / r + sync_s

    shares = [r for r in range(1, devices + 1) if count % r == 0]
    return least_load(needs, devices, load, shares)


def _held(ways: Iterable[dict], in_flight: int) -> float:
    return sum(way["memoryUsageA"] * in_flight + way["memoryUsageB"] for way in ways)


def best(name: str, text: str, **machines) -> float:
    """Of a PipeDream or JSON file by its kind."""
    if name.startswith("pipedream"):
        return pipedream_best(text, **machines)
    content = json.loads(text)
    return (placement_best if name.startswith("placement") else piper_best)(content, **machines)
