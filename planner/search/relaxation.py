"""What a cut can cost at best, in our own systems: a `StageProblem` for a branch of the search.

Two readings of one question. As a *bound*, every load and every byte is at most what any plan
with that stage has, whatever its schedule, its limits and its neighbours: the problem's optimum
bounds the periods of all plans. As a *guess*, bytes are those of the limits at hand and wires
carry what they are likely to: its optimum is a cut worth trying.

Index letters: N micro-batches; r replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise, product
from math import fsum

import numpy as np

from ...profiles.profile import Profile
from ..costs.layer_graph import LayerGraph, LayerVectors, capped, forward_share
from ..costs.recomputation import KeptStorages, Selection, in_steps, selections
from ..costs.stage_costs import RECEIVES_AHEAD, as_run_by, sized
from ..evaluate import Question
from ..partition.device_loads import SentOn
from ..partition.dp.identical_devices import IdenticalPlaces
from ..partition.problem import CutTensor, Mode, Option, Shared, StageProblem, Vector
from ..partition.waits import Waits, Ways
from ..schedules.schedules import Ranges, limit_ranges
from ..systems.variants import Variant
from .choices import Branch, Freedom
from .places import (
    BOUND,
    Assumptions,
    PlaceMaker,
    Places,
    fixed_in_flight,
    returning,
    sharing,
)

_AT_ONCE = 0.5
"""Of the micro-batches in flight, those that a backward of a whole mini-batch works through."""

_ABOUT_NO_TIME = 0.05
"""Of a forward, what sets of layers may take that count as one with keeping everything."""


class Relaxation:
    """Makes the problems of one question, for any branch of its search."""

    def __init__(
        self, question: Question, freedom: Freedom, graph: LayerGraph | None = None
    ) -> None:
        """`graph`: the question's, where it was made before."""
        self.question = question
        self.freedom = freedom
        self.variant: Variant = question.system
        self.graph = graph or LayerGraph(as_run_by(question.profile, self.variant), question.tied)
        asked = "off" if self.variant.recompute_refusal else freedom.recompute
        # Without limits there is nothing to gain.
        looks = asked == "selective" or (asked == "auto" and self.limited)
        chosen = self._selections if looks else ()
        ways: dict[str, tuple[Selection, ...]] = {
            "off": (False,),
            "on": (True,),
            "selective": chosen or (False,),
            "auto": (False, *chosen, True),
        }
        self.recompute = ways[asked]
        self._overlap = question.cluster.overlap

    def with_several_stages(self) -> Relaxation:
        """The same where devices have several stages, which may share parameters; itself where
        that makes no difference."""
        question = self.question
        if not question.profile.shared or question.tied != "together":
            return self
        profile = as_run_by(question.profile, self.variant)
        graph = LayerGraph(profile, question.tied, several=True)
        return Relaxation(question, self.freedom, graph)

    @cached_property
    def limited(self) -> bool:
        """Whether any device's memory is limited."""
        return any(d.memory_bytes is not None for d in self.question.cluster.devices)

    def limit_ranges(self, stages: int, *, several: bool = False) -> Ranges:
        """The in-flight limits to choose from (`schedules.limit_ranges`)."""
        within, every = self.freedom.staleness, self.question.update_every
        return limit_ranges(
            self.variant, stages, several=several, within=within, update_every=every
        )

    def allows(self, stages: int, micro_batches: int) -> bool:
        """Whether the system runs so many stages with so many micro-batches."""
        return micro_batches >= self.variant.least_micro_batches(stages)

    def replica_counts(self, micro_batches: int) -> list[int]:
        """Replicas that share a mini-batch's work evenly, and that the profile has costs for."""
        devices, batch = len(self.question.cluster.devices), self.question.mini_batch
        if not self.freedom.replicas:
            return [1]
        if not self.variant.whole_mini_batches:
            return [r for r in range(1, min(devices, micro_batches) + 1) if micro_batches % r == 0]
        sizes = self.question.profile.micro_batch_sizes
        within = range(1, min(devices, batch) + 1)
        return [r for r in within if batch % r == 0 and sizes[0] <= batch // r <= sizes[-1]]

    def problem(self, branch: Branch, assumed: Assumptions = BOUND) -> StageProblem:
        """The problem for a branch of the search.

        Raises:
            PlanError: a micro-batch size outside what was measured.
        """
        n, guess, grain = branch.micro_batches, assumed.guess, assumed.grain
        graph, all_devices = self.graph, len(self.question.cluster.devices)
        view = assumed.view or ("drain" if self.variant.flushes else "cycle")
        drains, returns = view != "cycle", view == "return"
        counts = [1] if assumed.unreplicated else self.replica_counts(n)
        counts = [r for r in counts if r % grain == 0 and (r in assumed.among or not assumed.among)]
        # There may be none that are multiples of the grain.
        most = max(counts, default=1)
        # What layers cost in each stage's micro-batches: by replicas.
        sizes = {
            r: self._size(n, r) for r in {*counts, most, *((1,) if drains or assumed.waits else ())}
        }
        costs = {r: graph.costs(size) for r, size in sizes.items()}
        before, after = None, None
        if drains:
            # 1F1B with equal stages takes as long as if both counted in full.
            before, after = self._heads(costs[1], both=guess or returns)
            if most > 1 and not guess:
                # Replicas wait for one another, so that it drains, before updates alone.
                before /= self.question.update_every
                after = None if after is None else after / self.question.update_every
        shares_forwards = returns or (after is not None and most > 1 and not guess)
        worked = costs
        if shares_forwards:
            # A handful of additions whose backward takes nothing must not make the share 1.
            counts_as = forward_share(costs[1])
            worked = {r: capped(found, counts_as) for r, found in costs.items()}
        counted = self._counted(drains=drains and not guess, alone=after is None)
        # Weight parts may run while the next mini-batch fills the pipeline behind the stage.
        inputs_only = drains and not guess and self.variant.split_backward
        forward_s = self.forward_s(n)
        modes: dict[tuple[int, float | None, Selection], Mode] = {}
        options: list[Option] = []
        same = self._alike(forward_s) if assumed.alike else ()
        for r, recompute in product(counts, [w for w in self.recompute if w not in same[1:]]):
            share = r if self.variant.whole_mini_batches else 1
            key = share, self._unit(n, r) if recompute else None, recompute
            if key not in modes:
                # Replicas of a whole mini-batch work at once, each in its own time.
                rounds = n * share / grain
                modes[key] = self._mode(
                    worked[r],
                    rounds,
                    counted,
                    recompute,
                    recompute_unit=key[1] or 0.0,
                    inputs_only=inputs_only,
                    storages=self._smallest(sizes[most], costs[most].storages, guess=guess),
                    once_s=forward_s,
                    same=same if recompute in same else (),
                )
            options.append(Option(r // grain, list(modes).index(key)))
        devices = all_devices
        guesses = guess or assumed.unreplicated
        if guesses and assumed.identical and self.variant.schedule == "1f1b-micro":
            # It never has more than N micro-batches in flight, each on one device at a time.
            devices = min(devices, n)
        place: Places = PlaceMaker(
            self.question,
            self.freedom,
            n,
            assumed,
            options,
            syncs=not drains,
            every_device=counts == [1] and branch.stages == all_devices,
        ).places()
        if shares_forwards:
            way = returning if returns else sharing
            place = way(place, options, n, all_devices, counts_as)
        known = not self.variant.flushes or most == 1 or self.question.update_every == 1
        if assumed.waits and known and isinstance(place, IdenticalPlaces):
            place = place.with_waits(self._waits(costs[1], n))
        serial_s, serial_fixed_s = (None, 0.0) if drains else self._serial(n, most)
        smallest, shared = costs[most], tuple[Shared, ...]()
        if self.limited:
            storages = self._smallest(sizes[most], smallest.storages, guess=guess)
            shared = tuple(Shared(who, storages[name]) for name, who in graph.savers.items())
        return StageProblem(
            names=graph.names,
            needs=graph.needs,
            tensors=tuple(self._tensors(n, most, guess=guess, drains=drains and not guess)),
            modes=tuple(modes.values()),
            options=tuple(options),
            parameter_bytes=graph.likely_bytes if guess else graph.parameter_bytes,
            devices=devices // grain,
            place=place,
            together=graph.together,
            shared=shared,
            serial_s=serial_s,
            serial_fixed_s=serial_fixed_s,
            workspace_bytes=smallest.workspace_bytes if self.limited else None,
            before_s=before,
            after_s=after,
            overlap=self._overlap,
            stages=branch.stages,
            pins=branch.pins,
        )

    def round_trip_s(self, micro_batches: int) -> float:
        """No period is shorter where at most N micro-batches are in flight; else 0.

        In `pipedream-2bw` every stage runs a micro-batch forward after the backward of the N-th
        one before it at the latest. So a period takes at least as long as one micro-batch needs
        from a stage to the end and back; of that only layers count that all paths go through, and
        that gradients come back along. Where a user limits mini-batches in flight to L, a period
        takes 1 / L of that of one.
        """
        n, asked = micro_batches, self.freedom.staleness
        if self.variant.schedule == "1f1b-micro":
            return self._way_s(n)
        if self.variant.flushes or (asked.max_in_flight, asked.max_difference) == (None, None):
            return 0.0
        (_, limit), *_ = self.limit_ranges(len(self.graph.names))
        replicas = max(self.replica_counts(n), default=1)
        if self.variant.backward_unit == "micro":
            return self._way_s(n) * n / ((limit - 1) * n + replicas)
        return self._way_s(n, replicas, -(-n // replicas)) / limit

    def way_and_back_s(self, micro_batches: int) -> float:
        """As `round_trip_s`, for systems that flush too: they have no more in flight either."""
        if self.variant.flushes:
            return self._way_s(micro_batches)
        return self.round_trip_s(micro_batches)

    def work_s(self, micro_batches: int) -> float:
        """All layers' work for one micro-batch, on one of the fastest devices."""
        return self._work_s(self._size(micro_batches, 1))

    def shared_out_s(self, micro_batches: int) -> float:
        """All layers' work for a mini-batch, shared out over all devices: no period is less."""
        speeds = [device.speed for device in self.question.cluster.devices]
        devices = sum(speed / max(speeds) for speed in speeds)
        whole = self.variant.whole_mini_batches
        shares = {r if whole else 1 for r in self.replica_counts(micro_batches)}
        least_s = min(s * self._work_s(self._size(micro_batches, s)) for s in shares or {1})
        return least_s * micro_batches / devices

    def _work_s(self, size: int) -> float:
        return float(np.add(*self._once(self.graph.costs(size))).sum())

    def _way_s(self, micro_batches: int, replicas: int = 1, backwards: int = 1) -> float:
        """Of a micro-batch as small as so many replicas make it, there and as often back."""
        forward, backward = self._once(self.graph.costs(self._size(micro_batches, replicas)))
        work = forward + backward * backwards
        return max((sum(work[row].tolist()) for row in self.graph.returning_rows), default=0.0)

    @property
    def views(self) -> tuple[str, ...]:
        """Ways to bound a period: no plan is below any of them.

        "cycle": a stage runs its work, its all-reduce and its update in each period. "drain",
        where systems flush: its work runs after the pipeline has filled up to it and before it
        has drained from it. "return", where they flush and run 1F1B: see `places.returning`.
        """
        if not self.variant.flushes:
            return ("cycle",)
        one_by_one = self.variant.schedule == "1f1b-flush"
        return ("drain", "return", "cycle") if one_by_one else ("drain", "cycle")

    # Layers ----------------------------------------------------------------------------------

    def forward_s(self, micro_batches: int) -> Vector:
        """Each layer's forward of a micro-batch, [n], as fast as can be."""
        return self._once(self.graph.costs(self._size(micro_batches, 1)))[0]

    def way_s(self, micro_batches: int) -> Vector:
        """The same of its forward and its backward, [n]."""
        both: Vector = np.add(*self._once(self.graph.costs(self._size(micro_batches, 1))))
        return both

    def recompute_s(self, micro_batches: int) -> Callable[[frozenset[str]], float]:
        """What computing a set of layers again takes for a micro-batch."""
        times = dict(zip(self.graph.names, self.forward_s(micro_batches).tolist(), strict=True))
        # Not by rounding either does it depend on the sequence that a set is gone through in.
        return lambda again: fsum(times[name] for name in again)

    def _size(self, micro_batches: int, replicas: int) -> int:
        """Samples in a stage's micro-batch; uneven ones count as the largest."""
        share = replicas if self.variant.whole_mini_batches else 1
        return -(-self.question.mini_batch // (micro_batches * share))

    def _mode(
        self,
        costs: LayerVectors,
        rounds: float,
        counted: tuple[Vector, Vector],
        recompute: Selection,
        *,
        recompute_unit: float,
        inputs_only: bool,
        storages: Mapping[str, int],
        once_s: Vector,
        same: tuple[Selection, ...] = (),
    ) -> Mode:
        """A way to run a stage.

        Args:
            rounds: micro-batches that its replicas share.
            counted: shares of layers' forwards and backwards.
            recompute_unit: micro-batches whose activations are computed again at once.
            inputs_only: of backwards, what gives the gradients of inputs.
            storages: bytes of each that several layers may keep, at the least.
            once_s: per layer, [n]: the forward of one micro-batch.
            same: sets of layers that count as one with it, and itself; bytes are the least of each.
        """
        forward = costs.forward_s * counted[0]
        backward = (costs.input_s if inputs_only else costs.backward_s) * counted[1]
        fixed, flight = self.graph.buffer_bytes, costs.private_bytes
        if len(same) > 1:
            work, kept = rounds * (forward + backward), self._always_kept(same, storages)
            always = 1.0 - np.max([self._members(way) for way in same], axis=0)
            return Mode("least", work, fixed, flight * always + kept, shared_in_flight=0.0)
        if recompute is False:
            return Mode("plain", rounds * (forward + backward), fixed, flight)
        if recompute is not True:
            again = self._members(recompute)
            backward = backward + costs.again_s * again * counted[1]
            kept, rebuilt = self._kept_bytes(recompute, storages)
            return Mode(
                "selective",
                rounds * (forward + backward),
                fixed + recompute_unit * (flight * again + rebuilt),
                flight * (1.0 - again) + kept,
                shared_in_flight=0.0,
                remade_kept=1.0,
                again=recompute,
                again_s=once_s * again,
            )
        backward = backward + forward * counted[1]
        return Mode(
            "recompute",
            rounds * (forward + backward),
            fixed + recompute_unit * flight,
            np.zeros_like(flight),
            shared_in_flight=0.0,
            shared_once=recompute_unit,
            inputs_kept=1.0,
            again=True,
            again_s=once_s,
        )

    @cached_property
    def _selections(self) -> tuple[frozenset[str], ...]:
        """Layers that may be computed again."""
        return selections(*self._choosing)

    @cached_property
    def steps(self) -> tuple[frozenset[str], ...]:
        """Layers one after another, as they are added to those."""
        return in_steps(*self._choosing)

    @property
    def _choosing(self) -> tuple[Profile, int, float]:
        profile, micro = self.graph.profile, self.variant.backward_unit == "micro"
        return profile, profile.micro_batch_sizes[0], 0.0 if micro else _AT_ONCE

    @cached_property
    def _kept(self) -> KeptStorages:
        return KeptStorages(self.graph.profile)

    def _members(self, recompute: Selection) -> Vector:
        """Which layers are in a set, [n]."""
        names = () if isinstance(recompute, bool) else recompute
        return np.array([float(name in names) for name in self.graph.names])

    def _alike(self, forward_s: Vector) -> tuple[Selection, ...]:
        """Keeping everything, and sets that take about no time besides."""
        most = _ABOUT_NO_TIME * float(forward_s.sum())
        sets = (way for way in self.recompute if not isinstance(way, bool))
        found = [way for way in sets if float(forward_s @ self._members(way)) <= most]
        return (False, *found) if False in self.recompute else ()

    def _always_kept(self, ways: Iterable[Selection], storages: Mapping[str, int]) -> Vector:
        """As `_kept_bytes`, of what is kept whichever of these sets is computed again, [n]."""
        again = [self._kept.positions(() if isinstance(way, bool) else way) for way in ways]
        found = np.zeros(len(self.graph.names))
        for name, nbytes in storages.items():
            keepers = set.intersection(*(set(self._kept.keepers(name, each)) for each in again))
            if keepers:
                found[min(keepers)] += nbytes
        return found

    @cached_property
    def _remade(self) -> frozenset[str]:
        """Storages that a stage keeps where another one's layer makes them, though their own stage
        computes that layer again: what is kept where cuts are, which bounds don't count."""
        kept = self._kept
        again = kept.positions(self._selections[-1] if self._selections else ())
        return frozenset(name for name in kept.savers if kept.is_recomputed(name, again))

    def _kept_bytes(
        self, recompute: frozenset[str], storages: Mapping[str, int]
    ) -> tuple[Vector, Vector]:
        """Of storages that several layers may keep: bytes that are kept for each micro-batch in
        flight, and those that layers computed again make, [n] each. Each counts for one layer that
        needs it: a stage with that layer has it, whatever its other layers."""
        kept, again = self._kept, self._kept.positions(recompute)
        found = np.zeros((2, len(self.graph.names)))
        for name, nbytes in storages.items():
            for layers in (kept.keepers(name, again), kept.copiers(name, again)):
                if layers:
                    found[0, min(layers)] += nbytes
            savers = kept.savers.get(name)
            if savers and kept.is_recomputed(name, again):
                found[1, min(savers)] += nbytes
        return found[0], found[1]

    def _unit(self, micro_batches: int, replicas: int) -> float:
        """Micro-batches that one replica's backward works through at once."""
        if self.variant.backward_unit == "micro" or self.variant.whole_mini_batches:
            return 1.0
        return micro_batches / replicas

    def _serial(self, micro_batches: int, replicas: int) -> tuple[Vector, float]:
        """Per layer, and for a stage: seconds of updates, which replicas don't share.

        While the pipeline drains, a stage's update runs beside others' backwards instead.
        """
        optimizer, operation = self.question.profile.optimizer, self.question.profile.operation
        every = self.question.update_every
        fixed_s = optimizer.update_fixed_s / every
        per_byte_s = optimizer.update_s_per_byte / every
        if operation is not None:
            own = 1 if self.variant.whole_mini_batches else max(1, micro_batches // replicas)
            fixed_s += own * operation.forward_s + operation.mini_batch_s
            per_byte_s += operation.update_s_per_byte / every
        return per_byte_s * self.graph.parameter_bytes, fixed_s

    def _heads(self, costs: LayerVectors, *, both: bool) -> tuple[Vector, Vector | None]:
        """What runs before a stage's first work and after its last, in systems that flush.

        The layers that every path goes through, the spine, run one after another, once in
        each direction for some micro-batch, however the rest is cut. In GPipe's schedule those
        behind a stage come on top: its backwards begin when all forwards are through.
        Only as far as gradients come back (`LayerGraph.drained`).

        Args:
            both: those behind it come on top, whatever the schedule.
        """
        forward, backward = self._once(costs)
        found = self.graph.drained
        before = forward * found.before_forward + backward * found.before_backward
        if not (self.variant.forwards_first or both):
            return before, None
        return before, forward * found.after_forward + backward * found.after_backward

    def _once(self, costs: LayerVectors) -> tuple[Vector, Vector]:
        """Each layer's forward of a micro-batch, and the least of its backward, as fast as can
        be, [n] each."""
        fastest = max(device.speed for device in self.question.cluster.devices)
        backward = costs.input_s if self.variant.split_backward else costs.backward_s
        return costs.forward_s / fastest, backward / fastest

    def _waits(self, costs: LayerVectors, micro_batches: int) -> Waits:
        """What stages wait for in 1F1B over micro-batches, where devices are identical."""
        before, beyond = self._heads(costs, both=True)
        assert beyond is not None
        if not self.variant.flushes:
            # Stages that no gradients come back to wait for nothing.
            beyond = beyond * bool(self.graph.drained.waiting.all())
            work, before = np.add(*self._once(costs)), np.zeros(len(costs.forward_s))
            rows = self.graph.returning_rows
            row = max(rows, key=lambda row: float(work[row].sum()), default=[])
            before[row] = work[row]
        speed = self.question.cluster.devices[0].speed
        return Waits(micro_batches, self.variant.flushes, speed, before, beyond)

    def ways(self, micro_batches: int) -> Ways | None:
        """What stages wait for on devices of any kinds; None where the schedule doesn't say."""
        variant, graph, cluster = self.variant, self.graph, self.question.cluster
        known = fixed_in_flight(variant) or (variant.forwards_first and variant.flushes)
        # With few updates replicas needn't wait for one another.
        late = self.question.update_every > 1 and max(self.replica_counts(micro_batches)) > 1
        if not known or variant.split_backward or (variant.flushes and late):
            return None
        size = self._size(micro_batches, 1)
        share = forward_share(graph.costs(size))
        costs = capped(graph.costs(size), share)
        work = costs.forward_s + costs.backward_s
        path = graph.heaviest_path(work)
        latency_s = min(link.latency_s for link in cluster.links)
        messages = []
        for a, b in pairwise(path):
            tensors = graph.graph.edges[graph.names[a], graph.names[b]]["tensors"]
            sent = (sized(e.fixed_bytes, e.bytes_per_sample, size) for e in tensors if e.needs_grad)
            messages.append(2 * (latency_s + max(sent) / cluster.fastest_bytes_per_s))
        return Ways(
            micro_batches,
            variant.flushes,
            variant.forwards_first,
            work,
            tuple(path),
            tuple(messages),
            latency_s,
            graph.costs(size).forward_s,
            share,
        )

    def _counted(self, *, drains: bool, alone: bool) -> tuple[Vector, Vector]:
        """Shares of layers' forwards and backwards that a stage's load has, [n] each.

        Args:
            drains: other work comes on top, which those that don't wait may run beside.
            alone: none of it between the stage's forwards and its backwards.
        """
        every = np.ones(len(self.graph.names))
        if not drains:
            return every, every
        waiting = self.graph.drained.waiting
        return every if alone else waiting, waiting

    # Tensors ---------------------------------------------------------------------------------

    def _tensors(
        self, micro_batches: int, most_replicas: int, *, guess: bool, drains: bool
    ) -> Iterator[CutTensor]:
        # What a stage gets may come over several links side by side, one for each stage below.
        every = guess or not self._overlap or len(self.question.cluster.devices) <= 2
        fastest = self.question.cluster.fastest_bytes_per_s
        # Wires carry whole micro-batches; a replica holds messages of its share at the least.
        size = self._size(micro_batches, 1)
        held_size = self._size(micro_batches, most_replicas)
        unit = self._unit(micro_batches, most_replicas)
        # Both directions take turns on every link, or keep its devices busy in turn.
        both = all(link.half_duplex or not link.overlap for link in self.question.cluster.links)
        # A backward has a gradient at hand; a weight part, when the gradients of weights are there
        # at last, hasn't.
        at_hand = 0 if self.variant.split_backward else 1
        wires = frozenset(range(len(self.graph.tensors)))
        if drains:
            # Messages that other work comes on top of: none that may pass beside it.
            wires = self.graph.direct_tensors if self.graph.drained.waiting.all() else frozenset()
        for number, tensor in enumerate(self.graph.tensors):
            edge = tensor.edge
            sent = sized(edge.fixed_bytes, edge.bytes_per_sample, size)
            returned = sent if edge.needs_grad else 0
            wire_s = micro_batches * (sent + returned if both else sent) / fastest
            wire_s *= number in wires
            waits = edge.needs_grad or not drains
            nbytes = sized(edge.fixed_bytes, edge.bytes_per_sample, held_size)
            gradient = unit * nbytes if edge.needs_grad else 0.0
            yield CutTensor(
                ends=tensor.ends,
                lower_s=wire_s if every or number in self.graph.lone_tensors else 0.0,
                upper_s=0.0 if self._overlap else wire_s * waits,
                lower_bytes=(
                    RECEIVES_AHEAD["F"] * nbytes + (1 + at_hand) * gradient if self.limited else 0.0
                ),
                upper_bytes=((RECEIVES_AHEAD["B"] + at_hand) * gradient if self.limited else 0.0),
                kept_bytes=nbytes if self.limited else 0.0,
                remade_bytes=nbytes if guess and edge.storage in self._remade else 0.0,
            )

    def sent_on(self, micro_batches: int) -> list[SentOn]:
        """What layers send to others in a period, over the fastest wires that there are."""
        size, fastest = self._size(micro_batches, 1), self.question.cluster.fastest_bytes_per_s
        found = []
        for tensor in self.graph.tensors:
            edge, maker = tensor.edge, tensor.ends & -tensor.ends
            nbytes = micro_batches * sized(edge.fixed_bytes, edge.bytes_per_sample, size)
            there_s = nbytes / fastest
            # The result leaves no stage.
            users = tensor.ends & ~maker & ((1 << len(self.graph.names)) - 1)
            back_s = there_s if edge.needs_grad else 0.0
            found.append(SentOn(maker.bit_length() - 1, users, there_s, back_s))
        return found

    def _smallest(
        self, size: int, storages: Mapping[str, int], *, guess: bool
    ) -> Mapping[str, int]:
        """Bytes of storages that several layers may keep. A stage that gets a view holds that
        alone.

        Args:
            storages: bytes of each at this micro-batch size.
        """
        if guess:
            return storages
        smallest = dict(storages)
        for tensor in self.graph.tensors:
            edge = tensor.edge
            nbytes = sized(edge.fixed_bytes, edge.bytes_per_sample, size)
            smallest[edge.storage] = min(smallest[edge.storage], nbytes)
        return smallest
