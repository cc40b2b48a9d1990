"""What an option of a relaxed problem means at each place in the list of devices.

Index letters: N micro-batches; K devices; r replicas of a stage; k devices from its first one to
the end; D stages behind a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import lcm

import numpy as np

from ...cluster.cluster import Cluster, Device
from ...cluster.contention import AllReduceTimes
from ...cluster.links import Network
from ...costs.memory import room_bytes
from ...costs.stage_costs import weights_s_per_byte
from ...partition.dp.identical_devices import IdenticalPlaces
from ...partition.problem import Option, Place
from ...question import Question
from ...systems.variants import Variant
from ..choices import Freedom, InFlight, least_in_flight

Places = Callable[[int, int], Place]
"""As `StageProblem.place`."""


@dataclass(frozen=True)
class Assumptions:
    """What a relaxed problem assumes of plans; by default a bound, which no plan breaks.

    Attributes:
        in_flight: what is in flight; None: the least that there can be.
        guess: a guess, not a bound.
        unreplicated: each stage is on one device, whatever may be chosen.
        replicas: of those that may be chosen, what stages may have; empty: any.
        grain: stages take multiples of so many devices; the problem counts those as one.
        view: one of `Relaxation.views`; "drain" by default where systems flush.
        identical: devices are counted from a stage's first one to the end without those left
            out, and links are the fastest there are, wherever they lie.
        memory_share: of each device's memory, that a guess may use.
        device: with `identical`, what all devices are like; None: as the first one.
        alike: sets of layers that take about no time to compute again count as one with keeping
            everything, which has the least time and the least memory of them: for a bound alone,
            as there is no such stage.
        waits: with `identical`, what stages wait for by the devices beyond them counts, where the
            schedule says what is in flight (`partition.waits`); for bounds.
    """

    in_flight: InFlight | None = None
    guess: bool = False
    unreplicated: bool = False
    replicas: tuple[int, ...] = ()
    grain: int = 1
    view: str = ""
    identical: bool = False
    memory_share: float = 1.0
    device: Device | None = None
    alike: bool = False
    waits: bool = False


BOUND = Assumptions()
"""What every plan keeps to."""


def fixed_in_flight(variant: Variant) -> bool:
    """Whether the schedule fixes how many micro-batches are in flight: as many for each replica
    as there are devices from its stage on for each of its stage's (`schedules`)."""
    return variant.schedule in ("1f1b-flush", "1f1b-micro")


@dataclass(frozen=True)
class PlaceMaker:
    """Makes the places of a relaxed problem.

    Attributes:
        options: of the problem, whose replicas are counted in grains.
        syncs: summing gradients counts.
        every_device: plans use all devices; else those behind a stage may all be left out.
    """

    question: Question
    freedom: Freedom
    micro_batches: int
    assumed: Assumptions
    options: Sequence[Option]
    syncs: bool
    every_device: bool

    def places(self) -> Places:
        """As assumed."""
        place: Places = self._identical() if self.assumed.identical else self._in_given_sequence()
        share = self.assumed.memory_share
        if share == 1.0:
            return place

        def smaller(found: Place, r: int) -> Place:
            return replace(found, memory_bytes=found.memory_bytes * share)

        return changed(place, self.options, smaller)

    @cached_property
    def _in_flight(self) -> InFlight:
        return self.assumed.in_flight or least_in_flight(self.question.system)

    def _identical(self) -> IdenticalPlaces:
        """Places where devices are identical.

        A plan's stages, moved together to the list's end, have the devices from a stage's first one
        to the end that the plan uses from there on; so what its schedule has in flight is known.
        Gradients are summed and tensors sent over the fastest links that so many devices have
        anywhere, at the most from as many devices as there are others.
        """
        question, in_flight, guess = self.question, self._in_flight, self.assumed.guess
        cluster, variant = question.cluster, question.system
        count, device = len(cluster.devices), self.assumed.device or cluster.devices[0]
        gradients = 1.0 + question.least_state_factor
        # A bound doesn't know which stage is the last, that predicts nothing.
        gradients += variant.scratch_copies * guess
        # A version for each mini-batch in flight, where those are the units.
        per_unit = float(guess and variant.stashes and variant.backward_unit == "mini")
        all_reduce = AllReduceTimes(cluster)
        both_ways = guess or not cluster.overlap or not self.freedom.replicas
        counts = {option.replicas for option in self.options}

        def links_below(r: int) -> int:
            """Links that a stage gets messages by, at the most."""
            if both_ways:
                return r
            below = [n for n in counts if n <= count - r]
            if self.assumed.device is None or not below:
                return r * max(count - r, 1)
            # What is dealt to replicas in turn, or in equal shares.
            return max(lcm(r, n) for n in below)

        def place(r: int) -> Place:
            fixed_s, per_byte = (
                (seconds / question.update_every for seconds in all_reduce.least(r))
                if self.syncs
                else (0.0, 0.0)
            )
            share = 1 if variant.whole_mini_batches else r
            units = self.micro_batches / share
            if fixed_in_flight(variant):
                units = 1.0
            elif variant.backward_unit == "micro":
                units = min(in_flight.micro_batches(0), units)
            return Place(
                speed=device.speed,
                memory_bytes=float(room_bytes(device, question.profile) or np.inf),
                sync_s=fixed_s,
                sync_s_per_byte=per_byte,
                lower_scale=1 / links_below(r),
                upper_scale=1 / r,
                units=units,
                copies=gradients + in_flight.versions(0 if per_unit else count),
            )

        def most(r: int) -> float:
            if fixed_in_flight(variant):
                return self.micro_batches // r
            if variant.backward_unit == "micro":
                return 1.0
            return in_flight.mini_batches(count)

        return IdenticalPlaces(self.options, place, copies_per_unit=per_unit, most=most)

    def _in_given_sequence(self) -> Places:
        """Places of devices as the cluster lists them."""
        question, in_flight, guess = self.question, self._in_flight, self.assumed.guess
        cluster, variant = question.cluster, question.system
        replicas = [option.replicas * self.assumed.grain for option in self.options]
        # A stage with devices behind it isn't the last.
        sure = guess or self.every_device
        count, fastest = len(cluster.devices), cluster.fastest_bytes_per_s
        uniform = cluster.uniform
        gradients = 1.0 + question.least_state_factor
        all_reduce, links_before = AllReduceTimes(cluster), _links_from_before(cluster)
        # Each replica of the stage below may have a link to each of this one's.
        side_by_side = not guess and cluster.overlap and self.freedom.replicas

        @cache
        def place(option: int, left: int) -> Place:
            r, k = replicas[option], left * self.assumed.grain
            mine = range(count - k, count - k + r)
            behind = -(-k // r) - 1
            devices = [cluster.devices[d] for d in (mine[:1] if uniform else mine)]
            rooms = (room_bytes(d, question.profile) for d in devices)
            limits = [float(room) for room in rooms if room is not None]
            if variant.backward_unit == "micro":
                units = min(in_flight.micro_batches(behind), self.micro_batches / r)
            else:
                share = 1 if variant.whole_mini_batches else r
                units = in_flight.mini_batches(behind) * self.micro_batches / share
            fixed_s, per_byte = all_reduce.of(mine) if self.syncs else (0.0, 0.0)
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
            links = [cluster.link(first - 1, first)] if guess and first else links_before(mine)
            link_bytes_per_s = max((k.top_bytes_per_s for k in links), default=fastest)
            lower = fastest / link_bytes_per_s / r
            if side_by_side:
                lower /= max(count - k, 1)
            return Place(
                speed=speed,
                memory_bytes=min(limits, default=float("inf")),
                sync_s=fixed_s / question.update_every,
                sync_s_per_byte=(per_byte + rules_s / speed) / question.update_every,
                lower_scale=lower,
                upper_scale=1 / r,
                units=units,
                copies=in_flight.versions(behind) + gradients + variant.scratch_copies * (not last),
            )

        return place


def _links_from_before(cluster: Cluster) -> Callable[[range], list[Network]]:
    """The links by which neighbouring devices may get messages from any device listed before; those
    that there are anywhere, where links differ from pair to pair."""
    if cluster.links:
        every = [*cluster.networks]
        return lambda mine: every if mine[0] else []
    seen: dict[str | None, int] = {}
    kinds = [0]
    for d, device in enumerate(cluster.devices):
        seen.setdefault(device.machine, d)
        kinds.append(len(seen))

    def links(mine: range) -> list[Network]:
        first = mine[0]
        homes = {cluster.devices[d].machine for d in mine}
        before = [home for home in homes if seen[home] < first]
        found = [cluster.network] if before else []
        if first and kinds[first] + len(homes) - len(before) > 1:
            found.append(cluster.between_machines or cluster.network)
        return found

    return links


# Places where a mini-batch's other work comes on top of a stage's own ---------------------------
# In systems that flush, that is while the pipeline fills and drains. Some of a replica's forwards
# may run beside it: its work counts as on a device that is faster by so much. Wires are left out.


def changed(
    place: Places, options: Sequence[Option], change: Callable[[Place, int], Place]
) -> Places:
    """Places that are each changed by a function of theirs and of their replicas, which leaves
    units and copies as they are."""
    if isinstance(place, IdenticalPlaces):
        return place.changed(options, change)
    return lambda option, k: change(place(option, k), options[option].replicas)


def returning(
    place: Places, options: Sequence[Option], micro_batches: int, devices: int, share: float
) -> Places:
    """Places for a stage whose first backward waits for the way to the end and back.

    In 1F1B that flushes, a replica runs n = N / r micro-batches, 1 + a of them forward before
    its first backward, a ≤ ⌈K / r⌉ − 1. The first forward f begins when the layers before the
    stage have run one; the first backward b when those behind it, W in both directions, have
    run that micro-batch too. n backwards and n − 1 − a forwards are still to run then, and
    the way back to the first stage. So with P of both directions before the stage

        T ≥ P + f + W + n·b + (n − 1 − a)·f = P + W + n·(f + b) − a·f

    where a·f is at most a share of the work: as fast a device as does it in the time left.

    Args:
        share: of a layer's work that its forward is, at the most.
    """
    return _overlapped(place, options, micro_batches, lambda r: -(-devices // r) - 1, share)


def sharing(
    place: Places, options: Sequence[Option], micro_batches: int, devices: int, share: float
) -> Places:
    """Places in GPipe's schedule, where stages behind may have replicas.

    The replica of one of r2 ≤ K − r that has the first micro-batch begins its backwards when
    it has run the last forward of its own, that of micro-batch N − r2. A replica of the stage
    may still have ⌈r2 / r⌉ − 1 forwards to run then.
    """
    return _overlapped(
        place, options, micro_batches, lambda r: max(-(-(devices - r) // r) - 1, 0), share
    )


def _overlapped(
    place: Places,
    options: Sequence[Option],
    micro_batches: int,
    ahead: Callable[[int], int],
    share: float,
) -> Places:
    """Places as if `ahead`(r) of a replica's forwards took no time, and messages none either."""

    def change(found: Place, r: int) -> Place:
        each = micro_batches // r
        speed = found.speed / (1 - share * min(ahead(r), each - 1) / each)
        return replace(found, speed=speed, lower_scale=0.0, upper_scale=0.0)

    return changed(place, options, change)
