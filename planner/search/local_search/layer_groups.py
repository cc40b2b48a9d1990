"""What a cut may be between: groups of layers that share a stage in every plan, and what they take.

Index letters: n groups of layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ...cluster.links import Network
from ...costs.stage_costs import sized
from ...partition.dp.lattice import joined
from ...partition.problem import members
from ...question import Question
from ..choices import Branch
from ..relaxed.relaxation import Relaxation


class LayerGroups:
    """Layers that share a stage in every plan: what may be on either side of a border, and what it
    takes.

    Args:
        relaxation: whose graph says which those are.
    """

    def __init__(self, question: Question, relaxation: Relaxation) -> None:
        self.question, self.relaxation = question, relaxation
        self._seconds: dict[int, list[float]] = {}
        self._inside: dict[int, list[int]] = {}

    @cached_property
    def groups(self) -> list[int]:
        """Layers that share a stage, as bit masks, in topological order."""
        # For any micro-batches that were measured they are the same.
        fewest = -(-self.question.mini_batch // self.question.profile.micro_batch_sizes[-1])
        return joined(self.relaxation.problem(Branch(fewest)))

    @cached_property
    def number_of(self) -> NDArray[np.intp]:
        """Of each layer, the number of its group, [n]."""
        numbers = {layer: g for g, mask in enumerate(self.groups) for layer in members(mask)}
        return np.array([numbers[layer] for layer in range(len(numbers))], dtype=np.intp)

    def inside(self, mask: int) -> list[int]:
        """Numbers of the groups that some layers are in, ascending."""
        if mask not in self._inside:
            number_of = self.number_of
            self._inside[mask] = sorted({int(number_of[layer]) for layer in members(mask)})
        return self._inside[mask]

    def downsets(self, ends: Iterable[int]) -> tuple[int, ...]:
        """Of stages that end after so many groups."""
        masks = [0, *accumulate(self.groups, int.__or__)]
        return (0, *(masks[g] for g in ends))

    def work_s(self, micro_batches: int) -> list[float]:
        """Per group of layers, the forward and the backward of a micro-batch."""
        found: list[float] = np.bincount(self.number_of, self.seconds(micro_batches)).tolist()
        return found

    def messages_s(self, micro_batches: int, network: Network) -> tuple[list[float], list[float]]:
        """What the messages of a micro-batch take, and their gradients, where a stage ends before
        each group, [n], over such a link: the longest one, as others may go to other stages, over
        wires of their own; and all together."""
        size = -(-self.question.mini_batch // micro_batches)
        there = self.number_of.tolist()
        longest, together = ([0.0] * len(self.groups) for _ in range(2))
        for tensor in self.relaxation.graph.tensors:
            ends = [there[layer] for layer in members(tensor.ends) if layer < len(there)]
            edge = tensor.edge
            sent_s = network.wire_s(sized(edge.fixed_bytes, edge.bytes_per_sample, size))
            seconds = (sent_s + network.latency_s) * (1 + edge.needs_grad)
            for g in range(min(ends) + 1, max(ends) + 1):
                longest[g] = max(longest[g], seconds)
                together[g] += seconds
        return longest, together

    def seconds(self, micro_batches: int) -> list[float]:
        """Per layer, the forward and the backward of a micro-batch, at speed 1."""
        if micro_batches not in self._seconds:
            # Those are what the fastest devices take.
            fastest = max(device.speed for device in self.question.cluster.devices)
            fast_s = self.relaxation.seconds.way_s(micro_batches)
            self._seconds[micro_batches] = (fast_s * fastest).tolist()
        return self._seconds[micro_batches]
