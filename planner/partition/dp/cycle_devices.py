"""Which devices the stages of a row may have, for the dynamic program over critical cycles.

It lays stages from the last one on, so what it has to know of the devices behind a stage is a
state: where devices are taken in the sequence of a list, the first one from which on they may be
taken; where any sequence will do, how many of each kind are. Where a pipeline fills, the same is
known of those before a stage. Where stages have replicas, rows go by devices instead: a stage has
the number of its first one.

Index letters: S stages; D devices; G kinds of devices; r replicas of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from math import lcm
from typing import NamedTuple

StageOf = Callable[[int, int], "CycleStage"]
"""Of a stage's number and a device, or a kind of devices."""


class Flight(NamedTuple):
    """So much in flight at a stage.

    Attributes:
        limit: of a plan, mini-batches.
        units: micro-batches, or mini-batches where a backward takes them whole.
        versions, kept: weight versions, and micro-batches whose activations are kept, when
            a backward runs, at the least.
    """

    limit: int
    units: int
    versions: float
    kept: float


@dataclass(frozen=True)
class CycleStage:
    """A stage's device and what may be in flight there.

    Attributes:
        speed: of each of its replicas.
        copies: of the parameters, besides versions: gradients and optimizer state.
        per_byte_s: of parameters, what the system's weight rules take in a period, and sums of
            gradients over replicas.
        flights: by rising units, which are those of a replica.
        first: it is a plan's first stage.
        replicas: r.
        whole: they share each micro-batch, else they take turns.
        after_update: with replicas that take turns, of a mini-batch's micro-batches those that run
            forward after the update for the one before it.
    """

    speed: float
    memory_bytes: float
    copies: float
    per_byte_s: float
    flights: tuple[Flight, ...]
    first: bool = False
    replicas: int = 1
    whole: bool = False
    after_update: int = 0

    @property
    def turns(self) -> int:
        """Replicas that take turns."""
        return 1 if self.whole else self.replicas

    @property
    def rate(self) -> float:
        """Of all replicas together."""
        return self.speed * self.replicas


class Wires(NamedTuple):
    """Those from a stage to the next one.

    Attributes:
        most: how many there are at the most, by the replicas of both.
        speed: all messages take no less than on so many of the fastest.
        slowest: of the fastest one's speed, that of one that some messages take.
        apart: all of them take one like that.
    """

    most: int = 1
    speed: float = 1.0
    slowest: float = 1.0
    apart: bool = False


_ONE_WIRE = Wires()


class CyclePlace(NamedTuple):
    """A device for a stage, beside those of the stages behind it.

    Attributes:
        device: its position in the list, or its kind.
        behind: the state of those behind, of the next stage's.
        used: of this stage's states, those that this device and those behind come under.
        before: of the states of devices before the stage, those that go with it.
        speed_before: of the fastest devices that the stages before it may have, together.
        wires: to the next stage.
    """

    stage: CycleStage
    device: int
    behind: int
    used: tuple[int, ...]
    before: tuple[int, ...]
    speed_before: float
    wires: Wires = _ONE_WIRE


class CycleWay(NamedTuple):
    """A device for a stage, beside those of the stages before it.

    Attributes:
        before: the state of those before, of this stage's.
        nexts: of the next stage's states, those that they come under with this device.
    """

    stage: CycleStage
    before: int
    nexts: tuple[int, ...]


@dataclass(frozen=True)
class CycleDevices:
    """What may be chosen.

    Attributes:
        places: per stage, [S]; by its first device's number, [D], where there are replicas: there
            may be none at some.
        ways: per stage but the last.
        starts: of the first stage's states, those that cuts may have, each with its number.
    """

    places: tuple[tuple[CyclePlace, ...], ...]
    ways: tuple[tuple[CycleWay, ...], ...]
    starts: tuple[tuple[int, int], ...]

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        return tuple(sorted({place.stage.replicas for mine in self.places for place in mine}))

    @property
    def replicated(self) -> bool:
        return self.replicas != (1,)

    @property
    def stages(self) -> tuple[CycleStage, ...]:
        """One of each stage's, [S]: what may be in flight is the same on all of its devices."""
        return tuple(mine[0].stage for mine in self.places if mine)

    @property
    def every(self) -> tuple[CycleStage, ...]:
        """All stages on all their devices, once."""
        return tuple(dict.fromkeys(place.stage for mine in self.places for place in mine))

    @cached_property
    def speeds(self) -> tuple[tuple[float, float], ...]:
        """Per stage, of the devices before it and of those from it on, all together at the most;
        and behind the last one, [S + 1]."""
        from_on = [[0.0] * self.states(len(self.places))]
        for s in range(len(self.places) - 1, -1, -1):
            mine = [0.0] * self.states(s)
            for place in self.places[s]:
                behind = from_on[place.stage.replicas - 1]
                for used in place.used:
                    mine[used] = max(mine[used], place.stage.rate + behind[place.behind])
            from_on.insert(0, mine)
        before = [max((place.speed_before for place in mine), default=0.0) for mine in self.places]
        before.append(max(map(max, from_on)))
        return tuple((b, max(mine)) for b, mine in zip(before, from_on, strict=True))

    def changed(self, change: Callable[[int, CycleStage], CycleStage]) -> CycleDevices:
        """With each stage as a function of its number and its device's makes it."""
        once = cache(change)
        return replace(
            self,
            places=tuple(
                tuple(each._replace(stage=once(s, each.stage)) for each in mine)
                for s, mine in enumerate(self.places)
            ),
            ways=tuple(
                tuple(each._replace(stage=once(s, each.stage)) for each in mine)
                for s, mine in enumerate(self.ways)
            ),
        )

    def states(self, s: int) -> int:
        """Of devices of stage s and those behind, how many."""
        if s == len(self.places):
            ends = (
                x for t, mine in enumerate(self.places) for x in mine if t + x.stage.replicas == s
            )
            return 1 + max(place.behind for place in ends)
        return 1 + max((max(place.used) for place in self.places[s]), default=0)

    def states_before(self, s: int) -> int:
        """Of devices before stage s, how many."""
        return 1 + max((max(place.before) for place in self.places[s]), default=0)


def in_sequence(speeds: Sequence[float], stages: int, stage_of: StageOf) -> CycleDevices:
    """Devices in the sequence of a list, of which stages may leave out any.

    Args:
        speeds: of all devices, [D].
    """
    spare = len(speeds) - stages
    made = [[stage_of(s, s + k) for k in range(spare + 1)] for s in range(stages)]
    # State k of stage s: its devices and those behind are from position s + k on.
    places = tuple(
        tuple(
            CyclePlace(
                stage=made[s][k],
                device=s + k,
                behind=k,
                used=tuple(range(k + 1)),
                before=(k,),
                speed_before=_fastest(speeds[: s + k], s),
            )
            for k in range(spare + 1)
        )
        for s in range(stages)
    )
    ways = tuple(
        tuple(CycleWay(made[s][k], k, tuple(range(k, spare + 1))) for k in range(spare + 1))
        for s in range(stages - 1)
    )
    return CycleDevices(places, ways, ((0, 0),))


def in_any_sequence(
    counts: Sequence[int], speeds: Sequence[float], stages: int, stage_of: StageOf
) -> CycleDevices:
    """Devices by kind, in any sequence, of which stages may leave out any.

    Args:
        counts, speeds: per kind, [G].
    """
    made = [[stage_of(s, g) for g in range(len(counts))] for s in range(stages)]
    # Per number of devices, how many of each kind there may be of them, and the positions of these.
    vectors = [list(_vectors(counts, total)) for total in range(stages + 1)]
    at = [{vector: k for k, vector in enumerate(some)} for some in vectors]

    def places(s: int) -> Iterator[CyclePlace]:
        for behind, g in product(vectors[stages - 1 - s], range(len(counts))):
            if behind[g] == counts[g]:
                continue
            used = _with(behind, g)
            left = [have - taken for have, taken in zip(counts, used, strict=True)]
            before = (k for k, some in enumerate(vectors[s]) if all(map(int.__le__, some, left)))
            rest = [speed for speed, n in zip(speeds, left, strict=True) for _ in range(n)]
            yield CyclePlace(
                stage=made[s][g],
                device=g,
                behind=at[stages - 1 - s][behind],
                used=(at[stages - s][used],),
                before=tuple(before),
                speed_before=_fastest(rest, s),
            )

    def ways(s: int) -> Iterator[CycleWay]:
        for before, g in product(vectors[s], range(len(counts))):
            if before[g] < counts[g]:
                yield CycleWay(made[s][g], at[s][before], (at[s + 1][_with(before, g)],))

    return CycleDevices(
        tuple(tuple(places(s)) for s in range(stages)),
        tuple(tuple(ways(s)) for s in range(stages - 1)),
        tuple((0, state) for state in range(len(vectors[stages]))),
    )


class Machines(NamedTuple):
    """Where equal devices are, if that makes a difference.

    Attributes:
        number: how many there are.
        most: devices of each, at the most.
        far: of the speed of the fastest wire, that of one between two of them.
    """

    number: int
    most: int
    far: float

    def apart(self, most: int = 1) -> Wires:
        """Between two: all messages are on one wire."""
        return Wires(most, self.far, self.far, apart=True)

    def wires(self, replicas: int, others: int, most: int) -> Wires:
        """Those between replicas in several machines and a stage in one, whose machine has so many
        other devices for them: the busiest is from one of the other machines."""
        share = -(-(replicas - others) // (self.number - 1))
        return Wires(most, min(self.far * replicas / max(share, 1), most), self.far)


def in_machines(
    devices: int, machines: Machines, stages: int, stage_of: Callable[[int], CycleStage]
) -> CycleDevices:
    """Equal devices, one for each stage, in machines, in any sequence (as `in_groups`).

    Args:
        stage_of: of a stage's number.
    """
    made, most = [stage_of(s) for s in range(stages)], machines.most

    def places(s: int) -> Iterator[CyclePlace]:
        behind = range(1, min(most, stages - 1 - s) + 1)
        # Those of its machine from the stage on, beside those from the next one on, and the wires.
        near = [(k + 1, k, _ONE_WIRE) for k in behind if k < most]
        near += [(1, k, machines.apart()) for k in behind]
        for mine, k, wires in near or [(1, 1, _ONE_WIRE)]:
            before = made[s].speed * min(s, devices)
            yield CyclePlace(made[s], 0, k - 1, (mine - 1,), (0,), before, wires)

    return CycleDevices(
        tuple(tuple(places(s)) for s in range(stages)),
        tuple((CycleWay(made[s], 0, (0,)),) for s in range(stages - 1)),
        tuple((0, k) for k in range(min(most, stages))),
    )


class _Group(NamedTuple):
    """What is known of the stages from a device on.

    Attributes:
        replicas: of the first one; 0: there is none.
        several: some of them has several.
        stages: how many there are, where that counts; else 0.
        near: devices of the first one's machine that it and those behind have, up to the first
            that is in another one, at the least; 0 where it is in several, or there is but one.
    """

    replicas: int
    several: bool
    stages: int
    near: int

    def before(
        self, r: int, counted: int, machines: Machines | None
    ) -> Iterator[tuple[_Group, Wires, bool]]:
        """Groups with a stage more, the wires to it, and whether its replicas are in several
        machines.

        Args:
            counted: stages that it counts as.
        """
        most = lcm(r, self.replicas or r)
        mine = _Group(r, self.several or r > 1, self.stages + counted, 0)
        same = wires = Wires(most, most)
        if machines is None:
            yield mine, same, False
            return
        if self.near + r <= machines.most:
            if self.replicas and not self.near:
                wires = machines.wires(self.replicas, machines.most - r, most)
            yield mine._replace(near=self.near + r), wires, False
        if self.near and r <= machines.most:
            yield mine._replace(near=r), machines.apart(most), False
        if r > 1:
            wires = machines.wires(r, machines.most - self.near, most) if self.near else same
            yield mine, wires, True


def in_groups(
    devices: int,
    replicas: Sequence[int],
    stage_of: Callable[[int, int, int, bool], CycleStage],
    stages: int | None = None,
    *,
    counted: bool = False,
    machines: Machines | None = None,
) -> CycleDevices:
    """Equal devices of which stages take as many as they have replicas, at least one more than one;
    the first ones may be left out.

    No more of a row of stages in one machine than it has devices, in whatever sequence machines
    come: a stage before them is in another one, and all messages between are on one wire; or some
    of its replicas are, which sum their gradients over that, and have their share of messages.

    Args:
        stage_of: of the devices from a stage's first one on, of r, of the stages behind it at the
            most, and of whether its replicas are in several machines.
        stages: how many there must be; None: any number.
        counted: what is in flight depends on the stages behind.
        machines: None: it makes no difference where devices are.
    """
    counts = counted or stages is not None

    def with_stage(behind: _Group, r: int) -> Iterator[tuple[_Group, Wires, bool]]:
        return behind.before(r, int(counts), machines)

    # From the last device on: what may be known of the stages from there on.
    known: list[dict[_Group, int]] = [{_Group(0, several=False, stages=0, near=0): 0}]
    for p in range(devices - 1, -1, -1):
        fit = [r for r in replicas if r <= devices - p]
        some = {mine for r in fit for group in known[r - 1] for mine, *_ in with_stage(group, r)}
        some = {group for group in some if stages is None or group.stages <= stages}
        known.insert(0, {group: k for k, group in enumerate(sorted(some))})

    once = cache(stage_of)

    def places(p: int) -> Iterator[CyclePlace]:
        left = devices - p
        for r in (r for r in replicas if r <= left):
            for behind, k in known[p + r].items():
                for mine, wires, apart in with_stage(behind, r):
                    if mine in known[p]:
                        stage = once(left, r, behind.stages if counts else left - r, apart)
                        used = (known[p][mine],)
                        yield CyclePlace(stage, p, k, used, (0,), stage.speed * p, wires)

    every = tuple(tuple(places(p)) for p in range(devices))
    return CycleDevices(
        every,
        tuple(
            tuple(CycleWay(stage, 0, (0,)) for stage in dict.fromkeys(x.stage for x in mine))
            for mine in every[:-1]
        ),
        tuple(
            (p, state)
            for p in range(devices)
            for group, state in known[p].items()
            if group.several and group.stages == (stages or group.stages)
        ),
    )


def _vectors(counts: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """How many of each kind there may be of so many devices."""
    first, rest = counts[0], counts[1:]
    if not rest:
        if total <= first:
            yield (total,)
        return
    for n in range(max(total - sum(rest), 0), min(first, total) + 1):
        yield from ((n, *others) for others in _vectors(rest, total - n))


def _with(counts: tuple[int, ...], kind: int) -> tuple[int, ...]:
    return (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])


def _fastest(speeds: Sequence[float], count: int) -> float:
    return sum(sorted(speeds)[len(speeds) - count :]) if count else 0.0
