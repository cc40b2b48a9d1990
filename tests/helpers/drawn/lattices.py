"""Cut problems of the shapes and sizes that planners are measured on, made up from a seed."""

from __future__ import annotations

import numpy as np
from timeprest.planner.partition.problem import CutTensor, Mode, Option, Place, StageProblem


class Graph:
    """Layers as they are added: what each one uses."""

    def __init__(self):
        self.needs = []

    def add(self, *used):
        self.needs.append(sum(1 << j for j in set(used)))
        return len(self.needs) - 1

    def chain(self, count, *used):
        """Layers one after another; the last one's position."""
        for _ in range(count):
            used = (self.add(*used),)
        return used[0]

    def split(self, lengths, *used):
        """Chains side by side, joined by one more layer."""
        return self.add(*(self.chain(length, *used) for length in lengths))


def chain(layers):
    graph = Graph()
    graph.chain(layers)
    return graph.needs


def gnmt_like(length=25):
    """Three long chains with residual sums that come together late: 17,586 downsets."""
    graph = Graph()
    start = graph.chain(1)
    ends = []
    for _ in range(3):
        last = start
        for k in range(length):
            last = graph.add(last, last - 1) if k % 4 == 3 else graph.add(last)
        ends.append(last)
    graph.chain(8, graph.add(*ends))
    return graph.needs


def inception_like(modules=11, lengths=(6, 6, 9, 6)):
    """Modules of four branches: 37,739 downsets; with lengths (9, 10, 12, 13) 220,229."""
    graph = Graph()
    last = graph.chain(6)
    for _ in range(modules):
        last = graph.split(lengths, last)
    graph.chain(2, last)
    return graph.needs


def operators(blocks=11, heads=(5, 5, 5), tail=37):
    """A transformer's operators: three branches a block, a residual sum, a long tail."""
    graph = Graph()
    last = graph.chain(4)
    for _ in range(blocks):
        first = last
        last = graph.split(heads, last)
        last = graph.add(graph.chain(tail, last), first)
    graph.chain(4, last)
    return graph.needs


def nasnet_like(cells=18, blocks=5, length=3):
    """Cells of five blocks, each two branches of what the last two cells made."""
    graph = Graph()
    before = last = graph.chain(3)
    for _ in range(cells):
        inputs, outputs = [graph.add(last), graph.add(before)], []
        for block in range(blocks):
            a, b = inputs[block % 2], inputs[-1 - block % 3]
            outputs.append(graph.split((length, length), a, b))
            inputs.append(outputs[-1])
        before, last = last, graph.add(*outputs)
    graph.chain(2, last)
    return graph.needs


def problem(
    needs,
    devices,
    *,
    replicas=(1,),
    wire=0.1,
    overlap=True,
    sync=0.0,
    memory=None,
    staged=False,
    seed=0,
):
    """Costs for a graph.

    Args:
        wire: all tensors' wire times together, as a share of all compute.
        sync: of each layer, with two replicas or many, as a share of its compute.
        memory: a device's limit, as a multiple of what one of `devices` equal stages holds.
        staged: every stage holds units for the stages behind it.
    """
    draw = np.random.default_rng(seed)
    n = len(needs)
    compute = draw.lognormal(0.0, 1.0, n) * 1e-3
    nbytes = draw.lognormal(0.0, 1.0, n)
    nbytes *= compute.sum() / nbytes.sum()
    users = [sum(1 << u for u in range(j + 1, n) if needs[u] >> j & 1) for j in range(n)]
    flight = draw.lognormal(0.0, 0.5, n)
    held = draw.lognormal(0.0, 1.0, n)
    limit = float("inf")
    if memory is not None:
        limit = memory * (held.sum() + flight.sum()) / devices
    options = tuple(Option(r) for r in replicas)

    def place(o, k):
        r = replicas[o]
        return Place(
            memory_bytes=limit,
            sync_s_per_byte=2 * (r - 1) / r,
            lower_scale=1 / r,
            upper_scale=1 / r,
            units=float(-(-k // r)) / devices if staged else 1.0,
        )

    return StageProblem(
        names=tuple(f"layer{j}" for j in range(n)),
        needs=tuple(needs),
        tensors=tuple(
            CutTensor(1 << j | (users[j] or 1 << n), wire * b, wire * b, b, b)
            for j, b in enumerate(nbytes)
        ),
        modes=(Mode("plain", compute, np.zeros(n), flight),),
        options=options,
        parameter_bytes=sync * compute if memory is None else held,
        devices=devices,
        place=place,
        overlap=overlap,
    )
