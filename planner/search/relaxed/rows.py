"""What plans with a given device for each stage cost at the least, as sums over their stages.

Along one path through the graph, the heaviest that gradients come back on, everything waits for
what is before, and for the gradients of what comes after: a stage that has layers of it runs all of
its layers between, and sends all that the next one takes. So no schedule of N micro-batches is
faster than

- a device's work of all its stages, and its updates;
- where the pipeline flushes, the way of one micro-batch there and back, with all N of them where it
  comes by a device, or a wire, from one time to another: until the first one has come there for the
  first of these, and after the last one has for the last, nothing of that runs (`_crowded`); behind
  that the first stage's update, with sums over copies of parameters that the last one shares;
- a wire's messages, from each stage to the next one;
- the round trips of micro-batches from a stage to the end and back, one after another as its
  schedule keeps so few at once: N / K of them, or 1 / L of one where L mini-batches are in flight.

A stage that has no layer of the path waits for none of that.

Index letters: N micro-batches; S stages; s, t stages; n layers; L links (`chains`); P places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import ceil, inf

import numpy as np

from ...costs.memory import room_bytes
from ...evaluate import Evaluation
from ...partition.chains import Chains, Links, Paths, Term
from ...partition.dp.cycle_stages import StageTable
from ...partition.dp.lattice import Flags, Lattice, Positions
from ...partition.problem import StageProblem, Vector, closures, members
from ...question import Question
from ...systems.operations import BACKWARDS, FORWARDS
from ..choices import Branch
from .at_once import AtOnce, moments, nothing, order_of
from .carried import Carried
from .critical_paths import CriticalPaths, Step
from .cycles import exchanges, stage_problem
from .path_links import path_links
from .relaxation import Relaxation

_FORWARD, _BACKWARD, _WORK, _BYTES, _PARAMETERS, _KEPT, _WORKSPACE, _THERE, _BACK = range(9)
_STEP, _SUMMING, _OFF, _APART, _MESSAGES = range(9, 14)
"""Measures of links. Of a stage on the path, a micro-batch's forward and backward; of any, all work
in a period; bytes that are always there, of parameters, of what each micro-batch keeps, about, and
of the largest working set. Between two on the path, what a micro-batch's messages there take, and
those back. Of a stage on the path, its update in a period, and sums over copies of parameters that
it shares with the last one, if that is on another device. 1 where a stage has no layers of the
path; where nothing is known to be sent from it to the next one and to come back; and between two on
the path, for latencies. All on the fastest device or link."""

_PER_STEP = 60
"""Links of stages that are gone through while a path is found, for each operation and message."""

_MOST_LINKS = 1_000_000
"""Where there are more, what is carried past stages isn't followed: a chain of eight stages has
gigabytes of them."""


def _over_wires(age: int) -> tuple[int, int]:
    """Numbers of two measures: wire seconds in a period of messages, and of their gradients. Age 1:
    to the next stage; else of a carried tensor that was made so many stages before."""
    return _MESSAGES + 2 * age - 1, _MESSAGES + 2 * age


class Rows:
    """Makes the terms of plans with any devices for their stages.

    Attributes:
        links: stages.
        every_cut: whether each cut of the lattice is one row of them.

    Args:
        lattice: places to cut at.
        pins: (layer, stage).
        deadline: by `time.monotonic`.
        along_path: places are told apart by how much of the path is before them alone: a bound that
            is soon found, for a complete lattice.

    Raises OutOfTime.
    """

    def __init__(
        self,
        relaxation: Relaxation,
        lattice: Lattice,
        micro_batches: int,
        pins: Sequence[tuple[int, int]] = (),
        deadline: float | None = None,
        *,
        along_path: bool = False,
    ) -> None:
        self.relaxation, self.variant, self._n = relaxation, relaxation.variant, micro_batches
        self.question, self._lattice, self._pins = relaxation.question, lattice, pins
        self._problem = stage_problem(relaxation, Branch(micro_batches))
        self._sums = [*_sums(relaxation, self._problem.loads)]
        self._ages, self.every_cut = 1, lattice.complete
        if along_path:
            back = micro_batches if self.variant.backward_unit == "mini" else 1
            self.links = path_links(self._problem, lattice, self._layer_bytes, back, self._sums)
            self.every_cut = len(self.links.masks) == lattice.size + 2
            self._every_on_path = self.every_cut
            return
        self._table = StageTable(self._problem, lattice, deadline)
        self._carried = Carried(self._table)
        self._every_on_path = not self._table.off_path[0, 1:-1].any()
        self.links = self._links()
        self._ages = self._carried.ages

    def _links(self) -> Links:
        """Stages, with the kind of the next one and the age of what is carried to it."""
        table, n, carried, lattice = self._table, self._n, self._carried, self._lattice
        inside = np.array([lattice.column(layer) for layer in range(lattice.layers)])
        held, steps_s = self._layer_bytes @ inside, self._problem.loads.serial_s
        step = np.zeros(lattice.size) if steps_s is None else steps_s @ inside
        stages, kinds = table.within(inf), table.classes
        per_period = 1 if self.variant.backward_unit == "mini" else n
        # Kinds of stages that there are; of what comes behind the last one, the first.
        begins = np.zeros((table.lattice.size, kinds), dtype=np.bool_)
        begins[stages.below, stages.kind] = begins[-1, 0] = True
        age, pair = np.nonzero(carried.reached[:, stages.below])
        if begins.sum(axis=1)[stages.above[pair]].sum() > _MOST_LINKS:
            carried.forget()
            age, pair = np.nonzero(carried.reached[:, stages.below])
        number, after = np.nonzero(begins[stages.above[pair]])
        which, age = pair[number], age[number]
        begin = (stages.below[which] * kinds + stages.kind[which]) * carried.ages + age
        order = np.argsort(begin, kind="stable")
        which, age, after, begin = which[order], age[order], after[order], begin[order]
        above = stages.above[which]
        sent, there = stages.sent_s[after, which], stages.wire_s[after, which] / n
        returns, on_path = sent > -np.inf, stages.on_path[which]
        linked = on_path & returns & ~table.off_path[after, above]
        measured = [
            stages.forward_s[which] * on_path,
            stages.backward_s[which] * on_path,
            stages.busy_s[which],
            *(held[:, above] - held[:, stages.below[which]]),
            table.workspace(stages)[which],
            np.where(linked, there, 0.0),
            np.where(linked, sent - there, 0.0),
            (step[above] - step[stages.below[which]]) * on_path,
            _summing_s(self._sums, lattice, stages.below[which], above) * on_path,
            ~on_path,
            ~returns & (stages.above[which] < lattice.size - 1),
            linked,
            there * n,
            np.where(returns, sent - there, 0.0) * per_period,
        ]
        for each in range(2, carried.ages):
            there, back = carried.sent_s[:, which] * (age == each)
            measured += [there * n, back * per_period]
        end = (above * kinds + after) * carried.ages + carried.older(which, age)
        kinds *= carried.ages
        return Links(begin, end, np.array(measured), table.lattice.masks, kinds)

    @cached_property
    def _layer_bytes(self) -> Vector:
        """Of layers, measures in bytes, [3, n]."""
        return self.relaxation.kept.of_layers(self._n)

    def chains(self, devices: Sequence[int], *, at_once: bool = True) -> Chains:
        """All cuts into stages that have these devices, by their positions in the cluster's list;
        within the memory for what is always there and, with `at_once`, for what the schedule says
        is there at one time."""
        where, rows = tuple(devices), list[Term | None]()
        keeps = self.relaxation.recompute == (False,)
        linked = not self.links.values[_APART].any()
        for d in {*devices}:
            held = [nothing(len(devices))]
            if at_once:
                held = moments(self.variant, self._n, where, d, keeps=keeps, linked=linked)
            rows += [self._holding(d, self._held(where, d, moment)) for moment in held]
        return self._chains(devices, rows)

    def _held(self, devices: tuple[int, ...], d: int, moment: AtOnce) -> dict[int, list[float]]:
        """What a device holds at a moment: measures with how often they count, per stage."""
        found = {
            _BYTES: [float(mine == d) for mine in devices],
            _PARAMETERS: [*map(float, moment.gradients)],
            _KEPT: [*map(float, moment.kept)],
            _WORKSPACE: [*map(float, moment.works)],
        }
        per_s = self.question.cluster.fastest_bytes_per_s / self._n
        unit = self._n if self.variant.backward_unit == "mini" else 1
        for measure, counts, each in zip(
            _over_wires(1), moment.messages(devices, d), (1, unit), strict=True
        ):
            # A stage knows what it sends to the next one, and gets back.
            found[measure] = [count * each * per_s for count in counts]
        return found

    def chains_like(self, found: Evaluation, cut: Sequence[int]) -> Chains:
        """The same within the memory for what a plan's stages have in flight: a guess.

        Args:
            cut: the plan's, as bit masks of the layers before each border.
        """
        stages, rows = len(found.stages), []
        devices = [stage.devices[0] for stage in found.stages]
        factor = 1 + self.question.optimizer_state_factor
        counts = {
            _PARAMETERS: [factor + stage.versions_held for stage in found.prediction.stages],
            _KEPT: [float(stage.micro_batches_kept) for stage in found.prediction.stages],
        }
        layers = [[*members(b & ~a)] for a, b in pairwise(cut)]
        inside = np.array([self._layer_bytes[:, mine].sum(axis=1) for mine in layers]).T
        for d in {*devices}:
            mine = [s for s, other in enumerate(devices) if other == d]
            own = {k: [row[s] * (s in mine) for s in range(stages)] for k, row in counts.items()}
            about = sum(row[s] * inside[k - _BYTES, s] for k, row in own.items() for s in mine)
            needs = found.prediction.device_of(mine[0]).memory_bytes
            rows.append(self._holding(d, own, needs / about if about else 1.0))
        return self._chains(devices, rows)

    def _chains(self, devices: Sequence[int], memory: Sequence[Term | None]) -> Chains:
        terms = [*self._terms(tuple(devices)), *(term for term in memory if term is not None)]
        allowed, critical = [*self._pinned(len(devices))], self._critical(tuple(devices))
        if critical is None:
            return Chains(self.links, terms, allowed)
        paths = Paths(critical.longest, _APART, critical.size * _PER_STEP)
        return Chains(self.links, terms, allowed, paths)

    def _critical(self, devices: tuple[int, ...]) -> CriticalPaths | None:
        """Of schedules whose sequence no times decide."""
        if not self.relaxation.in_sequence:
            return None
        order, way = order_of(devices, self._n), self._way(devices)
        closing = [*_closing(self.question, devices)] if self.variant.flushes else []
        return CriticalPaths(way, order, self._n, _MESSAGES, _APART, _OFF, closing)

    def _pinned(self, stages: int) -> Iterator[Flags]:
        """Per stage, the links that have its pinned layers; none where there is no such stage."""
        kinds, missing = self.links.kinds, any(stage >= stages for _, stage in self._pins)
        for s in range(stages):
            some = np.full(len(self.links.begin), not missing)
            for layer, stage in self._pins:
                if stage == s:
                    has = self._lattice.column(layer)
                    some &= has[self.links.end // kinds] & ~has[self.links.begin // kinds]
            yield some

    # Terms ---------------------------------------------------------------------------------------

    def _terms(self, devices: tuple[int, ...]) -> Iterator[Term]:
        stages = len(devices)
        for d in dict.fromkeys(devices):
            mine = [s for s in range(stages) if devices[s] == d]
            work = self._sum(devices, {s: {_WORK: 1} for s in mine})
            # Stages on the last one's device may have its parameters, too.
            work.within[mine, _SUMMING] += d != devices[-1]
            yield work
        for term in self._crowded(devices) if self.variant.flushes else ():
            for measure, factor in _closing(self.question, devices):
                term.within[0, measure] += factor
            yield term
        yield from self._wires(devices)
        if self.variant.order is None:
            yield from self._trips(devices)

    def _crowded(self, devices: tuple[int, ...]) -> Iterator[Term]:
        """Of each device and wire, all micro-batches in one stretch of the way after another."""
        way, times = self._way(devices), dict[tuple[int, ...], list[int]]()
        turns, measures = self._turns(way, devices).items(), len(self.links.values)
        for at, step in enumerate(way):
            times.setdefault(step.where, []).append(at)
        found = {
            where: [mine[i:j] for i in range(len(mine)) for j in range(i + 1, len(mine) + 1)]
            for where, mine in times.items()
        }
        yield _on_way(measures, way)
        for where, stretches in found.items():
            for stretch in stretches:
                yield _on_way(measures, way, dict.fromkeys(stretch, self._n))
            for last, ahead in turns:
                mirrored = len(way) - 1 - last
                first = [dict.fromkeys(x, ahead) for x in stretches if x[-1] <= last]
                then = [
                    dict.fromkeys(x, self._n)
                    for other in {where, where[::-1]}
                    for x in found.get(other, ())
                    if x[0] >= mirrored
                ]
                for each in product(first, then):
                    yield _on_way(measures, way, *each, beyond=range(last + 1, mirrored))

    def _turns(self, way: Sequence[Step], devices: tuple[int, ...]) -> dict[int, int]:
        """Steps of forwards of which so many, at the least, run before the first backward there;
        the last such step, and the last of which all do."""
        found, n, stages = dict[int, int](), self._n, len(devices)
        forwards = [at for at, step in enumerate(way) if step.measure == _FORWARD]
        if self.variant.forwards_first:
            return {forwards[-1]: n}
        if not self.relaxation.in_sequence:
            return {}
        ahead = [0] * stages
        for kinds, turns in order_of(devices, self._n):
            begun = set[int]()
            for kind, s in zip(kinds, turns, strict=True):
                begun |= {s} if kind == BACKWARDS else set()
                ahead[s] += kind == FORWARDS and s not in begun
        # A stage that isn't on the path is passed by; those before it have as many.
        for at, count in zip(forwards, accumulate(ahead, min), strict=True):
            if count == n:
                found = {at: n}
            last = at, count
        return dict([*found.items(), last])

    def _way(self, devices: tuple[int, ...]) -> list[Step]:
        """A micro-batch's, there and back."""
        cluster, there, back = self.question.cluster, list[Step](), list[Step]()
        for s, d in enumerate(devices):
            if s and devices[s - 1] != d:
                a, link = devices[s - 1], cluster.link(devices[s - 1], d)
                slower = _slower(self.question, a, d)
                there.append(Step((a, d), s - 1, _THERE, slower, link.latency_s))
                back.append(Step((d, a), s - 1, _BACK, slower, link.latency_s))
            pace = 1 / cluster.devices[d].speed
            there.append(Step((d,), s, _FORWARD, pace))
            back.append(Step((d,), s, _BACKWARD, pace))
        return [*there, *reversed(back)]

    def _trips(self, devices: tuple[int, ...]) -> Iterator[Term]:
        """Round trips of micro-batches; of mini-batches where those are the units."""
        stages, n, variant = len(devices), self._n, self.variant
        limits = self.relaxation.limit_ranges(stages, several=True)
        alone = len({*devices}) == stages
        for s in range(stages):
            if variant.backward_unit == "mini":
                own, limit = {s: {_FORWARD: n, _BACKWARD: n}}, limits[s][1]
                yield self._sum(devices, own, trip=s, rounds=1, backward=n, over=limit)
                continue
            own = {s: {_FORWARD: 1, _BACKWARD: 1}}
            if variant.flushes:
                kept = self._kept(devices)
                if kept is not None:
                    rounds = ceil(n / kept[s])
                    yield self._sum(devices, own, fills=s, trip=s, rounds=rounds)
                continue
            # Alone on its device, 1F1B has one more than its limit has ahead; in a list schedule a
            # stage goes on until that has no room for the next mini-batch.
            most = limits[s][1] * n - (n - 1) * alone
            yield self._sum(devices, own, trip=s, rounds=n / min(most, stages - s))
        if variant.schedule == "v-shaped":
            yield from self._slots(devices)

    def _slots(self, devices: tuple[int, ...]) -> Iterator[Term]:
        """Both stages of a device share its places for micro-batches (`schedules.v_shaped`)."""
        if not self._every_on_path:
            # Not all stages have something to do with each other: then there may be more places.
            return
        used = dict.fromkeys(devices)
        places = self.variant.places(len(used))
        for d in used:
            mine = [s for s, other in enumerate(devices) if other == d]
            within = self._sum(devices, {}, fills=mine[0]).within.copy()
            for s in mine:
                own = {s: {_FORWARD: 1.0, _BACKWARD: 1.0}}
                within += self._sum(devices, own, trip=s, rounds=self._n / places).within
            yield Term(within)

    def _kept(self, devices: tuple[int, ...]) -> list[int] | None:
        """Per stage, micro-batches that it has at once at the most; None: as many as there are."""
        variant, stages = self.variant, len(devices)
        if variant.forwards_first or variant.schedule == "v-shaped":
            return None
        if not self.relaxation.in_sequence:
            return [stages if variant.split_backward else stages - s for s in range(stages)]
        kept, held = [1] * stages, [0] * stages
        for kinds, turns in order_of(devices, self._n):
            for kind, s in zip(kinds, turns, strict=True):
                held[s] += (kind == FORWARDS) - (kind == BACKWARDS)
                kept[s] = max(kept[s], held[s])
        if self._every_on_path:
            return kept
        # Where a stage isn't on the path, trips are those of the next one that is.
        return [*accumulate(reversed(kept), max)][::-1]

    def _wires(self, devices: tuple[int, ...]) -> Iterator[Term]:
        """Of each wire between two devices, in each direction."""
        stages, found = len(devices), dict[tuple[int, int], Vector]()
        for age in range(1, max(self._ages, 2)):
            there, back = _over_wires(age)
            for s in range(stages - age):
                a, b = devices[s], devices[s + age]
                for wire, measure in (((a, b), there), ((b, a), back)) if a != b else ():
                    within = found.setdefault(wire, np.zeros((stages, len(self.links.values))))
                    # Of what comes to the next one the stage before it knows.
                    within[s if age == 1 else s + age, measure] += _slower(self.question, a, b)
        for within in found.values():
            if (within.any(axis=0) & self.links.values.any(axis=1)).any():
                yield Term(within)

    def _holding(
        self, d: int, counts: Mapping[int, Sequence[float]], scale: float = 1.0
    ) -> Term | None:
        """The share of a device's memory that its stages take; None where that isn't limited.

        Args:
            counts: how many bytes measures count, per stage, [S].
            scale: of the sum.
        """
        room = room_bytes(self.question.cluster.devices[d], self.question.profile)
        if room is None:
            return None
        stages = max(map(len, counts.values()))
        within = np.zeros((stages, len(self.links.values)))
        for measure, row in counts.items():
            # A byte for what is rounded.
            within[:, measure] = np.array(row) * scale / (room + stages)
        return Term(within, in_memory=True)

    def _sum(
        self,
        devices: tuple[int, ...],
        own: Mapping[int, Mapping[int, float]],
        *,
        fills: int = 0,
        trip: int | None = None,
        rounds: float = 1.0,
        backward: int = 1,
        over: int = 1,
    ) -> Term:
        """A lower bound on the period, in s, as a weighted sum of stages' measures.

        Args:
            own: per stage, how often its measures count; those of the stage where trips begin in
                each of them.
            fills: the first micro-batch's way to this stage, and the last one's back, count.
            trip: those from this stage to the end and back count, the first stage's own part left
                out.
            rounds: how many round trips there are.
            backward: micro-batches that come back together.
            over: periods that all of it takes.
        """
        stages, cluster = len(devices), self.question.cluster
        within = np.zeros((stages, len(self.links.values)))
        ways = [(s, 1.0, 1) for s in range(fills)]
        sent = [(s, 1.0) for s in range(fills)]
        if trip is not None:
            ways += [(s, rounds, backward) for s in range(trip + 1, stages)]
            sent += [(s, rounds) for s in range(trip, stages - 1)]
        for s, often, back in ways:
            within[s, _FORWARD] += often
            within[s, _BACKWARD] += often * back
        for s, counts in own.items():
            for measure, often in counts.items():
                within[s, measure] += often * (rounds if s == trip else 1.0)
        within /= np.array([cluster.devices[d].speed for d in devices])[:, None]
        for s, often in sent:
            a, b = devices[s : s + 2]
            if a != b:
                within[s, [_THERE, _BACK]] += often * _slower(self.question, a, b)
                within[s, _MESSAGES] += 2 * often * cluster.link(a, b).latency_s
        return Term(within / over)


def _sums(relaxation: Relaxation, loads: StageProblem) -> Iterator[tuple[int, float]]:
    """Layers that share parameters with one that all others lead to, so that it is on the last
    stage: bit masks, each with what summing over copies takes."""
    needed = closures(loads.needs, loads.together)
    for ends, seconds in exchanges(relaxation):
        last = ends.bit_length() - 1
        if needed[last] == loads.full:
            yield ends & ~(1 << last), seconds


def _summing_s(
    sums: Sequence[tuple[int, float]], lattice: Lattice, below: Positions, above: Positions
) -> Vector:
    """Of stages that share parameters with the last one, what that takes."""
    found = np.zeros(len(below))
    for ends, seconds in sums:
        within = np.sum([lattice.column(layer) for layer in members(ends)], axis=0)
        found += seconds * ((within[above] > within[below]) & (above < lattice.size - 1))
    return found


def _closing(question: Question, devices: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Measures of the first stage behind its last backward, each with a factor."""
    yield _STEP, 1 / question.cluster.devices[devices[0]].speed
    if devices[0] != devices[-1]:
        yield _SUMMING, 1.0


def _on_way(
    measures: int, way: Sequence[Step], *stretches: Mapping[int, int], beyond: Sequence[int] = ()
) -> Term:
    """Of one micro-batch; of more in the steps of stretches, and none in what those have
    between, nor beyond where it turns."""
    stages = 1 + max(step.stage for step in way)
    within, often = np.zeros((stages, measures)), [1] * len(way)
    for at in beyond:
        often[at] = 0
    for stretch in stretches:
        for at in range(min(stretch), max(stretch) + 1):
            often[at] = stretch.get(at, 0)
    for step, count in zip(way, often, strict=True):
        within[step.stage, step.measure] += count * step.factor
        within[step.stage, _MESSAGES] += step.latency_s * (count > 0)
    return Term(within)


def _slower(question: Question, a: int, b: int) -> float:
    """How many times as long as over the fastest link messages between two devices take."""
    cluster = question.cluster
    return cluster.fastest_bytes_per_s / cluster.link(a, b).top_bytes_per_s
