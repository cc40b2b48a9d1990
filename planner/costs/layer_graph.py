"""A profile's layer graph in bit masks: each layer's ancestors, tensors between layers, kept
storages."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np

from ...profiles.profile import Edge, Measurement, Profile
from ..partition.problem import Vector, closures, members, needs_of
from ..systems.variants import VARIANTS, Variant
from .stage_costs import input_part_s, layer_costs, sized
from .tied_parameters import Tied, bound_groups, on_one_stage


@dataclass(frozen=True)
class SentTensor:
    """A tensor that one layer makes and others take: its bytes, maker and users.

    Attributes:
        ends: bit mask of the layer that makes it and those that use it; bit n: the result.
        edge: one of its edges, for its sizes.
    """

    ends: int
    edge: Edge


@dataclass(frozen=True)
class Drained:
    """Layers that a mini-batch waits for before the next begins, in systems that flush: 1.0 each,
    [n].

    A stage begins the next mini-batch when it has run this one's backwards. These wait for the
    stages behind it that send gradients back, and for no others: what no gradient comes back from
    may still be running then. So a period takes as long as a way that begins and ends at one stage.
    With end e of the last row in which gradients come back along the spine (`returning_rows`):

    Attributes:
        waiting: not what e needs without sending a gradient back to it. The backward of a stage
            of other layers alone waits for nothing, and nothing need wait for it.
        before_forward, before_backward: of the spine, what runs before the first work of any stage
            above it and after its last: it gets gradients from all of the waiting layers above it.
            Forward, everything from the first such layer on.
        after_forward, after_backward: likewise between the forward and the backward of a stage
            below it, which sends gradients back to all of the waiting layers there.
    """

    waiting: Vector
    before_forward: Vector
    before_backward: Vector
    after_forward: Vector
    after_backward: Vector


_LEFT_OUT, _WORTH_IT = 1e-3, 0.01
"""Layers with so much of the work may count for less, where that lowers the largest share of a
layer's work that its forward is by more than this."""


@dataclass(frozen=True)
class LayerVectors:
    """Each layer's seconds and bytes for one micro-batch size, on a device of speed 1; [n] each.

    Attributes:
        recompute_s: of forwards, what a layer takes that is computed again by itself.
        input_s: of backwards, at the least what gives the gradients of inputs.
        private_bytes: kept besides the storages that other layers may keep too.
        storages: bytes of each of those.
    """

    forward_s: Vector
    recompute_s: Vector
    backward_s: Vector
    input_s: Vector
    workspace_bytes: Vector
    private_bytes: Vector
    storages: dict[str, int]


def _without_itself(closures: Sequence[int]) -> list[int]:
    return [mask & ~(1 << k) for k, mask in enumerate(closures)]


def _the_other_way(masks: Sequence[int]) -> list[int]:
    """Per layer, bit mask of the layers whose masks have it."""
    count = len(masks)
    wide = -(-count // 8)
    rows = np.frombuffer(b"".join(m.to_bytes(wide, "little") for m in masks), dtype=np.uint8)
    bits = np.unpackbits(rows.reshape(count, wide), axis=1, count=count, bitorder="little")
    packed = np.packbits(bits.T, axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def _marked(positions: Sequence[int], count: int) -> Vector:
    marks = np.zeros(count)
    marks[list(positions)] = 1.0
    return marks


class LayerGraph:
    """The graph of one profile, and its layers' costs at any micro-batch size measured.

    Attributes:
        names: of the n layers.
        graph: `Profile.to_networkx` without the result.
        needs: per layer, bit mask of the layers it uses.
        together: bit masks of layers that must share a stage.
        one_device: bit masks of layers that must share a device.
        parameter_bytes, buffer_bytes: per layer, [n]. Shared parameters count in one layer.
    """

    def __init__(self, profile: Profile, tied: Tied = "together", *, several: bool = False) -> None:
        """`several`: devices have several stages, which layers that share parameters may be on."""
        self.profile = profile
        self.names = tuple(layer.name for layer in profile.layers)
        self.position = {name: k for k, name in enumerate(self.names)}
        self.graph = profile.to_networkx()
        self.graph.remove_nodes_from(["output"])
        self.needs = needs_of(self.graph)
        self.together = tuple(
            sum(1 << self.position[name] for name in set(group))
            for group in (on_one_stage(profile) if several else bound_groups(profile, tied))
        )
        # Those that needn't, but must share a device.
        self.one_device = tuple(
            sum(1 << self.position[name] for name in set(shared.layers))
            for shared in profile.shared
            if several and tied == "together"
        )
        layers = profile.layers
        self.parameter_bytes: Vector = np.array([float(la.parameter_bytes) for la in layers])
        self._split = profile.shared if tied == "split" and not several else ()
        self.buffer_bytes: Vector = np.array([float(la.buffer_bytes) for la in layers])
        self._costs: dict[int, LayerVectors] = {}

    @cached_property
    def tensors(self) -> tuple[SentTensor, ...]:
        """Every tensor once."""
        ends: dict[str, int] = {}
        edge_of: dict[str, Edge] = {}
        for edge in self.profile.edges:
            consumer = self.position.get(edge.consumer, len(self.names))
            mask = 1 << self.position[edge.producer] | 1 << consumer
            ends[edge.tensor] = ends.get(edge.tensor, 0) | mask
            edge_of.setdefault(edge.tensor, edge)
        return tuple(SentTensor(mask, edge_of[name]) for name, mask in ends.items())

    @cached_property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """Of parameters that layers on several devices may share, the layer that they count in and
        those that need it, as a bit mask, and bytes: a stage with some of these layers and without
        the first one holds a copy."""
        found = list[tuple[int, int]]()
        for shared in self._split:
            first, *others = (self.position[name] for name in shared.layers)
            behind = sum(1 << k for k in others if self._before[k] >> first & 1)
            if behind:
                found.append((1 << first | behind, shared.parameter_bytes))
        return tuple(found)

    @cached_property
    def savers(self) -> dict[str, int]:
        """Storage → bit mask of the layers that keep it."""
        found: dict[str, int] = {}
        for k, layer in enumerate(self.profile.layers):
            for name in layer.saves:
                found[name] = found.get(name, 0) | 1 << k
        return found

    @cached_property
    def lone_tensors(self) -> frozenset[int]:
        """Positions of tensors no two of which cross any cut together, as heavy as can be.

        What crosses a cut of these comes from one stage, over one link. They are the heaviest
        chain (by bytes per sample) in this order: a tensor is before another when all that use
        it come before what makes the other, or make it.
        """
        tensors = self.tensors
        maker = [(t.ends & -t.ends).bit_length() - 1 for t in tensors]
        weight = [t.edge.bytes_per_sample + t.edge.fixed_bytes for t in tensors]
        order = sorted(range(len(tensors)), key=lambda t: (maker[t], t))
        # Per tensor: bytes of the best chain that ends with it, and the one before it there.
        best: dict[int, tuple[float, int]] = {}
        ends: list[tuple[float, int]] = []
        for t in order:
            inside = self._before[maker[t]] | 1 << maker[t]
            # The heaviest first: most of them have ended by then.
            ended = (end for end in reversed(ends) if not tensors[end[1]].ends & ~inside)
            longest, before = next(ended, (0.0, -1))
            best[t] = longest + weight[t], before
            insort(ends, (best[t][0], t))
        chosen, t = set(), max(best, key=lambda u: best[u][0], default=-1)
        while t >= 0:
            chosen.add(t)
            t = best[t][1]
        return frozenset(chosen)

    @cached_property
    def direct_tensors(self) -> frozenset[int]:
        """Positions of tensors that pass by no layer of the spine: made after those before them."""
        along = sum(1 << k for k in np.flatnonzero(self.spine).tolist())
        layers, found = (1 << len(self.names)) - 1, []
        for t, tensor in enumerate(self.tensors):
            first = tensor.ends & -tensor.ends
            passed = along & self._behind[first.bit_length() - 1]
            users = members(tensor.ends & layers & ~first)
            if not any(self._before[user] & passed for user in users):
                found.append(t)
        return frozenset(found)

    @cached_property
    def most_stages(self) -> int:
        """Stages there can be: layers, with those that must share a stage counted as one."""
        return len(set(closures(self.needs, self.together)))

    @cached_property
    def _before(self) -> list[int]:
        """Per layer, bit mask of all the layers that it depends on."""
        return _without_itself(closures(self.needs))

    @cached_property
    def _behind(self) -> list[int]:
        """Per layer, bit mask of all the layers that depend on it."""
        return _the_other_way(self._before)

    @cached_property
    def spine(self) -> Vector:
        """1.0 for layers that are before or behind every other one: all paths go through them."""
        pairs = zip(self._before, self._behind, strict=True)
        related = [before.bit_count() + behind.bit_count() + 1 for before, behind in pairs]
        return np.array([float(found == len(related)) for found in related])

    @cached_property
    def returning_rows(self) -> list[list[int]]:
        """Layers of the spine in order, in rows: within each, gradients come back all the way."""
        rows: list[list[int]] = []
        for k in np.flatnonzero(self.spine).tolist():
            if not rows or not self._sending_back[k] >> rows[-1][-1] & 1:
                rows.append([])
            rows[-1].append(k)
        return rows

    @cached_property
    def _sending_back(self) -> list[int]:
        """Per layer, bit mask of all the layers that gradients come back to from it."""
        back = [0] * len(self.names)
        for producer, consumer, tensors in self.graph.edges(data="tensors"):
            if any(edge.needs_grad for edge in tensors):
                back[self.position[consumer]] |= 1 << self.position[producer]
        return _without_itself(closures(back))

    @cached_property
    def kept_at_once(self) -> int:
        """Bit mask of layers that all keep a micro-batch when the backward of one of them begins,
        from which gradients come back to all others."""
        edges = self.profile.edges
        last = {self.position[e.producer] for e in edges if e.consumer == "output" and e.needs_grad}
        return max((self._sending_back[k] | 1 << k for k in last), key=int.bit_count, default=0)

    def heaviest_path(self, weights: Vector) -> list[int]:
        """Of the paths that gradients come back along, the layers of that with the most weight."""
        best: list[tuple[float, int]] = [(float(w), -1) for w in weights]
        for k, name in enumerate(self.names):
            for producer, tensors in self.graph.pred[name].items():
                a = self.position[producer]
                if any(edge.needs_grad for edge in tensors["tensors"]):
                    best[k] = max(best[k], (best[a][0] + float(weights[k]), a))
        at = max(range(len(best)), key=lambda k: best[k][0])
        path = [at]
        while best[at][1] >= 0:
            at = best[at][1]
            path.append(at)
        return path[::-1]

    def sent_along(self, path: Sequence[int], size: int) -> list[int]:
        """What layers of such a path send to the next one for a micro-batch of so many samples, and
        get the gradient of, in bytes: of several tensors the largest; others may go elsewhere."""
        found = []
        for a, b in pairwise(path):
            tensors = self.graph.edges[self.names[a], self.names[b]]["tensors"]
            sent = (sized(e.fixed_bytes, e.bytes_per_sample, size) for e in tensors if e.needs_grad)
            found.append(max(sent))
        return found

    @cached_property
    def drained(self) -> Drained:
        """What a mini-batch can't be over without, where the pipeline drains after each."""
        count, back = len(self.names), self._sending_back
        row = self.returning_rows[-1] if self.returning_rows else []
        waiting = [True] * count
        if row:
            end = row[-1]
            waiting = [
                not self._before[end] >> k & 1 or bool(back[end] >> k & 1) for k in range(count)
            ]
        held = sum(1 << k for k in range(count) if waiting[k])
        sent = _the_other_way(back)
        ahead = [j for j in row if not self._behind[j] & held & ~sent[j]]
        behind = [j for j in row if not self._before[j] & held & ~back[j]]
        first = ahead[0] if ahead else count
        return Drained(
            waiting=np.array(waiting, dtype=np.float64),
            before_forward=np.array([s * (k >= first) for k, s in enumerate(self.spine.tolist())]),
            before_backward=_marked(ahead, count),
            after_forward=_marked(row, count),
            after_backward=_marked(behind, count),
        )

    @cached_property
    def last_layer(self) -> int | None:
        """The one layer that nothing comes after: always on the last stage. None: several."""
        ends = [k for k, name in enumerate(self.names) if not self.graph.succ[name]]
        return ends[0] if len(ends) == 1 else None

    def costs(self, size: int) -> LayerVectors:
        """Each layer at a micro-batch size; the loss is part of the last layer.

        Where several layers could be the last, the loss is left out.
        Raises PlanError for a size outside what was measured.
        """
        if size in self._costs:
            return self._costs[size]
        layers, found = self.profile.layers, layer_costs(self.profile, size)
        measured, loss = list(found.measured), found.loss
        if loss is not None and self.last_layer is not None:
            last = measured[self.last_layer]
            measured[self.last_layer] = Measurement(
                micro_batch=size,
                forward_s=last.forward_s + loss.forward_s,
                backward_s=last.backward_s + loss.backward_s,
                saved_bytes=last.saved_bytes + loss.saved_bytes,
                workspace_bytes=max(last.workspace_bytes, loss.workspace_bytes),
                backward_input_s=input_part_s(layers[self.last_layer], last) + loss.backward_s,
                backward_weight_s=last.backward_weight_s,
            )
        pairs = list(zip(layers, measured, strict=True))
        kept = zip(measured, found.shared_bytes, strict=True)
        self._costs[size] = LayerVectors(
            forward_s=np.array([m.forward_s for m in measured]),
            # The loss isn't computed again with its layer.
            recompute_s=np.array([m.forward_s for m in found.measured]),
            backward_s=np.array([m.backward_s for m in measured]),
            # A stage that sends no gradients back doesn't split, which may be cheaper.
            input_s=np.array([min(input_part_s(layer, m), m.backward_s) for layer, m in pairs]),
            workspace_bytes=np.array([float(m.workspace_bytes) for m in measured]),
            private_bytes=np.array([float(max(m.saved_bytes - n, 0)) for m, n in kept]),
            storages=found.storages,
        )
        return self._costs[size]


def held_together(profile: Profile, variant: Variant, tied: Tied) -> str | None:
    """For a message that the model can't be cut into more stages: the tie that keeps layers on one
    stage, and what would free them; None where no tie is in the way of any cut."""
    if not profile.tied:
        return None
    now = LayerGraph(profile, tied).most_stages
    without = LayerGraph(msgspec.structs.replace(profile, tied=(), shared=())).most_stages
    if now == without:
        return None
    split = LayerGraph(profile, "split").most_stages
    bound = bound_groups(profile, tied)
    named = [repr(name) for name in bound[0]]
    shown = ", ".join(named[:3]) + (" …" if len(named) > 3 else "")
    more = f" (and {len(bound) - 1} more such groups)" if len(bound) > 1 else ""
    if split <= now:
        return (
            f"layers {shown}{more} stay on one stage with all that lies between them: they share "
            "memory or change it in place, and copies of that can't be kept apart; to cut there, "
            "change the model"
        )
    way = f"--tied split gives copies to several stages, {split} at most"
    if not variant.flushes:
        flushing = ", ".join(name for name, v in VARIANTS.items() if v.flushes)
        way += f", in systems that flush (--variant {flushing})"
    return (
        f"layers {shown}{more} share parameters and stay on one stage with all that lies between "
        f"them, or on stages of one device (--stages-per-device 2 --placement v); {way}; or give "
        "them parameters of their own in the model"
    )


def forward_share(costs: LayerVectors) -> float:
    """The largest share of a layer's forward plus backward seconds that its forward may have in
    `capped`, outliers left out."""
    forward_s, both_s = costs.forward_s, costs.forward_s + costs.backward_s
    known = np.flatnonzero(both_s > 0)
    shares = forward_s[known] / both_s[known]
    order = np.argsort(-shares, kind="stable")
    ranked = shares[order]
    largest = float(ranked.max(initial=0.0))
    most = np.cumsum(both_s[known][order]) > _LEFT_OUT * float(both_s.sum())
    usual = float(ranked[most].max(initial=0.0))
    return usual if largest - usual > _WORTH_IT else largest


def capped(costs: LayerVectors, share: float) -> LayerVectors:
    """The layers' costs with each forward limited to a share of forward plus backward, so that a
    bound by work stays one. Where a stage runs n forwards of f and n backwards of b, and a ≤ n of
    those forwards run beside other work, n·(f + b) − a·f falls with f by no more than n − a ≥ 0: it
    is at least as much with the true f."""
    if share >= 1.0:
        return costs
    return replace(
        costs, forward_s=np.minimum(costs.forward_s, costs.backward_s * (share / (1.0 - share)))
    )
