"""What a cut can cost at best, in our own systems: a `StageProblem` for a micro-batch count.

Two readings of one question. As a *bound*, every load and every byte is at most what any plan
with that stage has, whatever its order, its limits and its neighbours: the problem's optimum
bounds the periods of all plans. As a *guess*, bytes are those of the limits at hand and wires
carry what they are likely to: its optimum is a cut worth trying.

Index letters: N micro-batches; r replicas; k devices from a stage's first one to the end; D
stages behind a stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from ..cluster.contention import Sync
from ..costs.layer_graph import LayerGraph
from ..costs.stage_costs import RECEIVES_AHEAD, input_part_s, sized
from ..costs.tied_parameters import as_run_by, weights_s_per_byte
from ..evaluate import Question
from ..partition.dp.identical_devices import RisingPlaces
from ..partition.problem import Mode, Option, Place, Shared, StageProblem, Tensor, Vector
from ..systems.variants import Variant, variant_named
from .choices import Held, least_held
from .coming import links_from_before
from .draining import largest_forward_share, returning, sharing
from .places import changed, smaller

RECOMPUTE = {"off": (False,), "on": (True,), "auto": (False, True)}
"""Whether stages may, must or mustn't compute their activations again."""


@dataclass(frozen=True)
class Freedom:
    """What the search may choose besides cut, micro-batches and limits.

    Attributes:
        replicas: stages may take several devices.
        recompute: a key of RECOMPUTE.
    """

    replicas: bool = False
    recompute: str = "off"


class Relaxation:
    """Makes the problems of one question, for any N."""

    def __init__(
        self, question: Question, freedom: Freedom, graph: LayerGraph | None = None
    ) -> None:
        """`graph`: the question's, where it was made before."""
        self.question = question
        self.freedom = freedom
        self.variant: Variant = variant_named(question.variant)
        self.graph = graph or LayerGraph(as_run_by(question.profile, self.variant), question.tied)
        refused = self.variant.recompute_refusal
        self._again = (False,) if refused else RECOMPUTE[freedom.recompute]

    @cached_property
    def limited(self) -> bool:
        """Whether any device's memory is limited."""
        return any(d.memory_bytes is not None for d in self.question.cluster.devices)

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

    def problem(
        self,
        micro_batches: int,
        *,
        held: Held | None = None,
        guess: bool = False,
        lone: bool = False,
        each: int | None = None,
        grain: int = 1,
        view: str = "",
        alike: bool = False,
        memory_share: float = 1.0,
        stages: int | None = None,
        pins: tuple[tuple[int, int], ...] = (),
    ) -> StageProblem:
        """The problem for N micro-batches.

        Args:
            held: what is in flight; None: the least, as in a bound.
            guess: a guess, not a bound.
            lone: each stage on one device, whatever may be chosen.
            each: of the replicas that may be chosen, so many for every stage.
            grain: stages take multiples of so many devices; the problem counts those as one.
            view: one of `views`; "drain" by default where systems flush.
            alike: devices are counted from a stage's first one to the end without those left out,
                and links are the fastest there are, wherever they lie (`alike`).
            memory_share: of each device's memory, that a guess may use.
            stages: how many; None: any number.
            pins: (layer, stage).

        Raises:
            PlanError: a micro-batch size outside what was measured.
        """
        modes: list[Mode] = []
        options: list[Option] = []
        view = view or ("drain" if self.variant.flushes else "cycle")
        drains, returns = view != "cycle", view == "return"
        # Weight parts may run while the next mini-batch fills the pipeline behind the stage.
        partial = drains and not guess and self.variant.split_backward
        before, after = None, None
        if drains:
            # 1F1B with equal stages takes as long as if both counted in full.
            before, after = self._heads(micro_batches, both=guess or returns)
        counted = self._counted(drains=drains and not guess, alone=after is None)
        counts = [1] if lone else self.replica_counts(micro_batches)
        counts = [r for r in counts if r % grain == 0 and r == (each or r)]
        known: dict[tuple[bool, int, float], int] = {}
        for r in counts:
            for again in self._again:
                share = r if self.variant.whole_mini_batches else 1
                key = again, share, self._unit(micro_batches, r) if again else 0.0
                if key not in known:
                    known[key] = len(modes)
                    modes.append(
                        self._mode(
                            micro_batches,
                            r,
                            again=again,
                            grain=grain,
                            inputs_only=partial,
                            counted=counted,
                        )
                    )
                options.append(Option(r // grain, known[key]))
        smallest = self._size(micro_batches, counts[-1])
        devices = len(self.question.cluster.devices)
        if guess and alike and self.variant.order == "1f1b-micro":
            # It never has more than N micro-batches in flight, each on one device at a time.
            devices = min(devices, micro_batches)
        graph, optimizer = self.graph, self.question.profile.optimizer
        every = self.question.update_every
        fixed_s = optimizer.update_fixed_s / every
        per_byte_s = optimizer.update_s_per_byte / every
        if (operation := self.question.profile.operation) is not None:
            own = 1 if self.variant.whole_mini_batches else max(1, micro_batches // counts[-1])
            fixed_s += own * operation.forward_s + operation.mini_batch_s / every
            per_byte_s += operation.update_s_per_byte / every
        place = self._places(
            options,
            micro_batches,
            held,
            guess=guess,
            syncs=not drains,
            grain=grain,
            alike=alike,
            all_used=counts == [1] and stages == devices,
        )
        if returns or (after is not None and counts[-1] > 1 and not guess):
            most = largest_forward_share(graph.measured(self._size(micro_batches, 1)))
            way = returning if returns else sharing
            place = way(place, options, micro_batches, len(self.question.cluster.devices), most)
        if memory_share != 1.0:
            place = changed(place, options, smaller(memory_share))
        return StageProblem(
            names=graph.names,
            needs=graph.needs,
            tensors=tuple(
                self._tensors(micro_batches, counts[-1], guess=guess, drains=drains and not guess)
            ),
            modes=tuple(modes),
            options=tuple(options),
            parameter_bytes=graph.likely_bytes if guess else graph.parameter_bytes,
            devices=devices // grain,
            place=place,
            together=graph.together,
            shared=tuple(self._shared(smallest, guess=guess)) if self.limited else (),
            # While the pipeline drains, a stage's update runs beside others' backwards.
            serial_s=None if drains else per_byte_s * graph.parameter_bytes,
            serial_fixed_s=0.0 if drains else fixed_s,
            workspace_bytes=self._workspace(smallest) if self.limited else None,
            before_s=before,
            after_s=after,
            overlap=self._overlap,
            stages=stages,
            pins=pins,
        )

    def round_trip_s(self, micro_batches: int) -> float:
        """No period is shorter where at most N micro-batches are in flight; else 0.

        In `pipedream-2bw` every stage runs a micro-batch forward after the backward of the N-th
        one before it at the latest. So a period takes at least as long as one micro-batch needs
        from a stage to the end and back; of that only layers count that all paths go through, and
        that gradients come back along.
        """
        if self.variant.order != "1f1b-micro":
            return 0.0
        work = np.add(*self._once(micro_batches))
        return max((sum(work[row].tolist()) for row in self.graph.returning_rows), default=0.0)

    @property
    def views(self) -> tuple[str, ...]:
        """Ways to bound a period: no plan is below any of them.

        "cycle": a stage runs its work, its all-reduce and its update in each period. "drain",
        where systems flush: its work runs after the pipeline has filled up to it and before it
        has drained from it. "return", where they flush and run 1F1B: see `draining.returning`.
        """
        if not self.variant.flushes:
            return ("cycle",)
        return ("drain", "return", "cycle") if self._one_by_one else ("drain", "cycle")

    @property
    def _one_by_one(self) -> bool:
        return self.variant.order == "1f1b-flush"

    # Layers ----------------------------------------------------------------------------------

    def _size(self, micro_batches: int, replicas: int) -> int:
        """Samples in a stage's micro-batch; uneven ones count as the largest."""
        share = replicas if self.variant.whole_mini_batches else 1
        return -(-self.question.mini_batch // (micro_batches * share))

    def _mode(
        self,
        micro_batches: int,
        replicas: int,
        *,
        again: bool,
        grain: int,
        inputs_only: bool,
        counted: tuple[Vector, Vector],
    ) -> Mode:
        """A way to run a stage.

        Args:
            inputs_only: of backwards, what gives the gradients of inputs.
            counted: shares of layers' forwards and backwards.
        """
        size = self._size(micro_batches, replicas)
        measured = self.graph.measured(size)
        forward = np.array([m.forward_s for m in measured]) * counted[0]
        backward = self._input_parts(size) if inputs_only else self._backwards(size)
        backward = backward * counted[1]
        if again:
            backward = backward + forward * counted[1]
        # Replicas of a whole mini-batch work at once, each in its own time.
        rounds = micro_batches * (replicas if self.variant.whole_mini_batches else 1) / grain
        fixed = self.graph.buffer_bytes
        flight = self.graph.private_bytes(size)
        if not again:
            return Mode("plain", rounds * (forward + backward), fixed, flight)
        unit = self._unit(micro_batches, replicas)
        return Mode(
            "recompute",
            rounds * (forward + backward),
            fixed + unit * flight,
            np.zeros_like(flight),
            shared_in_flight=0.0,
            shared_once=unit,
            inputs_kept=1.0,
        )

    def _backwards(self, size: int) -> Vector:
        return np.array([m.backward_s for m in self.graph.measured(size)])

    def _input_parts(self, size: int) -> Vector:
        """What the layers' backwards take at the least without their weight parts."""
        pairs = zip(self.graph.profile.layers, self.graph.measured(size), strict=True)
        # A stage that sends no gradients back doesn't split, which may be cheaper.
        return np.array([min(input_part_s(layer, m), m.backward_s) for layer, m in pairs])

    def _unit(self, micro_batches: int, replicas: int) -> float:
        """Micro-batches that one replica's backward works through at once."""
        if self.variant.backward_unit == "micro" or self.variant.whole_mini_batches:
            return 1.0
        return micro_batches / replicas

    def _workspace(self, size: int) -> Vector:
        measured = self.graph.measured(size)
        return np.array([float(m.workspace_bytes) for m in measured])

    def _heads(self, micro_batches: int, *, both: bool) -> tuple[Vector, Vector | None]:
        """What runs before a stage's first work and after its last, in systems that flush.

        The layers that every path goes through, the spine, run one after another, once in
        each direction for some micro-batch, however the rest is cut. In GPipe's order those
        behind a stage come on top: its backwards begin when all forwards are through.
        Only as far as gradients come back (`LayerGraph.drained`).

        Args:
            both: those behind it come on top, whatever the order.
        """
        forward, backward = self._once(micro_batches)
        found = self.graph.drained
        before = forward * found.before_forward + backward * found.before_backward
        if not (self.variant.forwards_first or both):
            return before, None
        return before, forward * found.after_forward + backward * found.after_backward

    def _once(self, micro_batches: int) -> tuple[Vector, Vector]:
        """Each layer's forward of a micro-batch, and the least of its backward, as fast as can
        be, [n] each."""
        size = self._size(micro_batches, 1)
        fastest = max(device.speed for device in self.question.cluster.devices)
        forward = np.array([m.forward_s for m in self.graph.measured(size)])
        backward = self._input_parts(size) if self.variant.split_backward else self._backwards(size)
        return forward / fastest, backward / fastest

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
    ) -> Iterator[Tensor]:
        # What a stage gets may come over several links side by side, one for each stage below.
        every = guess or not self._overlap or len(self.question.cluster.devices) <= 2
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
            wire_s = micro_batches * (sent + returned if both else sent) / self._most_per_s
            wire_s *= number in wires
            waits = edge.needs_grad or not drains
            nbytes = sized(edge.fixed_bytes, edge.bytes_per_sample, held_size)
            gradient = unit * nbytes if edge.needs_grad else 0.0
            yield Tensor(
                ends=tensor.ends,
                lower_s=wire_s if every or number in self.graph.lone_tensors else 0.0,
                upper_s=0.0 if self._overlap else wire_s * waits,
                lower_bytes=(
                    RECEIVES_AHEAD["F"] * nbytes + (1 + at_hand) * gradient if self.limited else 0.0
                ),
                upper_bytes=((RECEIVES_AHEAD["B"] + at_hand) * gradient if self.limited else 0.0),
                kept_bytes=nbytes if self.limited else 0.0,
            )

    @cached_property
    def _overlap(self) -> bool:
        """Whether transfers over some link run beside computing."""
        return any(link.overlap for link in self.question.cluster.links)

    @cached_property
    def _most_per_s(self) -> float:
        """Bytes over the fastest link."""
        return max(link.bandwidth_bytes_per_s for link in self.question.cluster.links)

    def _shared(self, size: int, *, guess: bool) -> Iterator[Shared]:
        """Storages that several layers may keep. A stage that gets a view holds that alone."""
        smallest = self.graph.storage_bytes(size)
        for tensor in () if guess else self.graph.tensors:
            edge = tensor.edge
            nbytes = sized(edge.fixed_bytes, edge.bytes_per_sample, size)
            smallest[edge.storage] = min(smallest[edge.storage], nbytes)
        for name, savers in self.graph.savers.items():
            yield Shared(savers, smallest[name])

    # Places ----------------------------------------------------------------------------------

    def _places(
        self,
        options: Sequence[Option],
        micro_batches: int,
        held: Held | None,
        *,
        guess: bool,
        syncs: bool,
        grain: int,
        alike: bool,
        all_used: bool,
    ) -> Callable[[int, int], Place]:
        if alike:
            return self._alike(options, micro_batches, held, guess=guess, syncs=syncs)
        return self._place(
            [option.replicas * grain for option in options],
            micro_batches,
            held or least_held(self.variant),
            guess=guess,
            syncs=syncs,
            grain=grain,
            # Else the devices behind a stage may all be left out.
            sure=guess or all_used,
        )

    @property
    def counted(self) -> bool:
        """Whether the order fixes how many micro-batches are in flight: as many for each replica
        as there are devices from its stage on for each of its stage's (`schedules`)."""
        return self.variant.order in ("1f1b-flush", "1f1b-micro")

    def _alike(
        self,
        options: Sequence[Option],
        micro_batches: int,
        held: Held | None,
        *,
        guess: bool,
        syncs: bool,
    ) -> RisingPlaces:
        """Places where devices are all alike.

        A plan's stages, moved together to the list's end, have the devices from a stage's first
        one to the end that the plan uses from there on; so what its order has in flight is known.
        Gradients are summed and tensors sent over the fastest links that so many devices have
        anywhere, at the most from as many devices as there are others.
        """
        cluster, variant = self.question.cluster, self.variant
        count, device = len(cluster.devices), cluster.devices[0]
        gradients = 1.0 + self.question.optimizer_state_factor
        # A bound doesn't know which stage is the last, that predicts nothing.
        gradients += variant.scratch_copies * guess
        counts = held or least_held(variant)
        # A version for each mini-batch in flight, where those are the units.
        per_unit = float(guess and variant.stashes and variant.backward_unit == "mini")
        sync = Sync(cluster)
        both_ways = guess or not self._overlap or not self.freedom.replicas

        def place(r: int) -> Place:
            fixed_s, per_byte = (
                (seconds / self.question.update_every for seconds in sync.least(r))
                if syncs
                else (0.0, 0.0)
            )
            share = 1 if variant.whole_mini_batches else r
            units = micro_batches / share
            if self.counted:
                units = 1.0
            elif variant.backward_unit == "micro":
                units = min(counts.micro_batches(0), units)
            return Place(
                speed=device.speed,
                memory_bytes=float(device.memory_bytes or np.inf),
                sync_s=fixed_s,
                sync_s_per_byte=per_byte,
                lower_scale=1 / r / (1 if both_ways else max(count - r, 1)),
                upper_scale=1 / r,
                units=units,
                copies=gradients + counts.versions(0 if per_unit else count),
            )

        def most(r: int) -> float:
            if self.counted:
                return micro_batches // r
            if variant.backward_unit == "micro":
                return 1.0
            return counts.mini_batches(count)

        return RisingPlaces(options, place, copies_per_unit=per_unit, most=most)

    def _place(
        self,
        replicas: Sequence[int],
        micro_batches: int,
        held: Held,
        *,
        guess: bool,
        syncs: bool,
        grain: int,
        sure: bool,
    ) -> Callable[[int, int], Place]:
        """`sure`: a stage with devices behind it isn't the last."""
        question, cluster, variant = self.question, self.question.cluster, self.variant
        count = len(cluster.devices)
        gradients = 1.0 + question.optimizer_state_factor
        sync, coming = Sync(cluster), links_from_before(cluster)

        @cache
        def place(option: int, left: int) -> Place:
            r, k = replicas[option], left * grain
            mine = range(count - k, count - k + r)
            behind = -(-k // r) - 1
            devices = [cluster.devices[d] for d in (mine[:1] if cluster.uniform else mine)]
            limits = [float(d.memory_bytes) for d in devices if d.memory_bytes is not None]
            if variant.backward_unit == "micro":
                units = min(held.micro_batches(behind), micro_batches / r)
            else:
                share = 1 if variant.whole_mini_batches else r
                units = held.mini_batches(behind) * micro_batches / share
            fixed_s, per_byte = sync.of(mine) if syncs else (0.0, 0.0)
            speed = min(d.speed for d in devices)
            last = k <= r or not sure
            rules_s = weights_s_per_byte(
                variant,
                question.profile.operation,
                question.update_every,
                first=k == count or not sure,
                last=last,
            )
            first = mine[0]
            links = [cluster.link(first - 1, first)] if guess and first else coming(mine)
            fastest = max((link.bandwidth_bytes_per_s for link in links), default=self._most_per_s)
            lower = self._most_per_s / fastest / r
            if not guess and self._overlap and self.freedom.replicas:
                # Each replica of the stage below may have a link to each of this one's.
                lower /= max(count - k, 1)
            return Place(
                speed=speed,
                memory_bytes=min(limits, default=float("inf")),
                sync_s=fixed_s / question.update_every,
                sync_s_per_byte=(per_byte + rules_s / speed) / question.update_every,
                lower_scale=lower,
                upper_scale=1 / r,
                units=units,
                copies=held.versions(behind) + gradients + variant.scratch_copies * (not last),
            )

        return place


# A bound on the period where a machine's devices take turns on fewer cores ----------------------
# A device is a process then, say. No core waits for a stage that is late as long as others have
# work: with more stages than cores their cuts needn't balance, and what counts is the work in
# all.


def least_shared_s(relaxation: Relaxation, micro_batches: int, most_stages: int) -> float:
    """No period is shorter where devices share cores; else 0.

    All cores of the cluster are busy with what the layers and their updates take on its fastest
    device, in the cheapest mode and size. Without replicas S stages keep S cores busy at the most.

    Raises PlanError for a micro-batch size outside what was measured.
    """
    cluster = relaxation.question.cluster
    homes = Counter(device.machine for device in cluster.devices)
    cores = sum(cluster.at_once(count) for count in homes.values())
    if cores == len(cluster.devices):
        return 0.0
    problem = relaxation.problem(micro_batches, view="cycle")
    work_s = float(np.sum(np.min([mode.compute_s for mode in problem.modes], axis=0)))
    if problem.serial_s is not None:
        work_s += float(np.sum(problem.serial_s))
    used = cores if relaxation.freedom.replicas else min(cores, most_stages)
    return work_s / used / max(device.speed for device in cluster.devices)
