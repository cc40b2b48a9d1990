"""Plans that need little memory: a proof that none fits, the one that needs least, and which
options would do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, chain, islice, product
from math import inf

import msgspec

from ....profiles.errors import PlanError, ScheduleError
from ...cluster.cluster import Cluster
from ...costs.memory import room_bytes
from ...evaluate import Evaluation, better, evaluate
from ...partition.dp.blocks import Blocks, blocks
from ...partition.dp.lattice import Lattice, joined, lattice_of
from ...partition.least_memory import LeastMemory, layers_bytes, none_fits
from ...partition.problem import FITS, Cut, OutOfTime, StageProblem
from ...partition.solve import DpSource, StopRule
from ...question import Question
from ...systems.variants import VARIANTS, Variant
from ..choices import Branch, Freedom, capped, choice_of, in_flight_under, micro_batch_counts
from ..relaxed.places import Assumptions, fixed_in_flight
from ..relaxed.relaxation import Relaxation
from ..state import FAR, SOON_S, SearchState

_CUTS = 8
"""Cuts to look at for each micro-batch count: a guess that fits may not fit after all."""

_SMALL = 2_000
"""Layers × devices."""

_WHOLE = 250
"""Of a graph with more downsets, what would do is cut between so many blocks of layers."""

_BLOCKS = 400
"""The same where there is much to look at."""

_ROOMS = (1.0, 0.99)
"""Of a device's memory, what a number of devices is looked for with: a schedule may take a little
more than the cut alone tells."""

_MOST_DEVICES = 4096

_QUICK = 1
"""Micro-batch counts that are looked at for each thing that may do."""

SECONDS = 1.5
"""Looking for what would do ends then; what was found until then is said."""

_AT_HAND_S = 10.0
"""Looking for a plan where a search had no time for one."""

_FIRST_S = 0.5
"""Of these, for the plan with the least memory, in as many micro-batches as may be looked at."""

_MANY = 4
"""Micro-batches for each stage: of plans at hand, those with more are looked at last."""

_PROOF_S = 1.0
"""For each proof that nothing fits, before anything is searched."""


class Fitting:
    """Looks for plans that need little memory: with as few mini-batches in flight as there can be.

    Args:
        search: the one that found nothing.
        micro_batches: N, where it was asked for.
    """

    def __init__(self, search: SearchState, micro_batches: int | None = None) -> None:
        self.search = search
        self.deadline = time.monotonic() + SECONDS
        self.more_devices_are_no_help = False
        self.cut_short = False
        self._micro_batches = micro_batches
        # Of the fullest device, as far as cuts alone tell, in any that was looked at.
        self._least_bytes = inf
        self._blocks: Blocks | None = None

    @property
    def seconds_left(self) -> float:
        """For finding out what would do."""
        return max(self.deadline - time.monotonic(), 0.0)

    # Proof that nothing fits ----------------------------------------------------------------

    def branches(self) -> list[Branch]:
        """Those without the ones of which it is soon proven that none of their plans fits, by the
        least that schedules hold: of layers, each and in total; then of cuts. From the fewest
        micro-batches on, which need most, up to the first of which it isn't."""
        search, cluster = self.search, self.search.question.cluster
        lattice = search.source.lattice if isinstance(search.source, DpSource) else None
        left = sorted(search.branches, key=lambda branch: branch.micro_batches)
        if lattice is None or search.large or not left or self._may_have_replicas:
            return left
        known = cluster.uniform and fixed_in_flight(search.relaxation.variant)
        assumed = Assumptions(identical=known)
        while left:
            problem = search.relaxation.problem(left[0], assumed)
            if not proven([problem], lattice, search.question):
                break
            del left[0]
        return left

    def is_far(self) -> bool:
        """Whether on equal devices the plan with the least memory comes nowhere near to fitting."""
        question, search = self.search.question, self.search
        limited = question.cluster.uniform and search.relaxation.limited
        if not limited or search.large or not search.branches or self._may_have_replicas:
            return False
        room = room_bytes(question.cluster.devices[0], question.profile)
        # Its schedule may hold more, as where messages pile up, than another cut's would.
        return self.least(question) is not None and self._least_bytes > FAR * (room or inf)

    @property
    def _may_have_replicas(self) -> bool:
        """Whether stages may that are counted, which is looked at without: these hold less where
        they share a mini-batch."""
        search = self.search
        return search.branches[0].stages is not None and search.relaxation.freedom.replicas

    # The plan with the least memory ----------------------------------------------------------

    def least(
        self,
        question: Question,
        freedom: Freedom | None = None,
        *,
        fits: bool = False,
        room: int | None = None,
    ) -> Evaluation | None:
        """A plan whose fullest device holds as little as can be, as far as cuts alone tell; None
        where none is found. Raises PlanError where there are no micro-batches for it.

        Args:
            fits: it is to fit the devices, whatever they have: the first one that does.
            room: with so much on each device, a plan on few devices.
        """
        search, best = self.search, None
        graph = search.relaxation.graph if question.variant == search.question.variant else None
        relaxation = Relaxation(question, freedom or search.relaxation.freedom, graph)
        # Smaller micro-batches hold less, but for what each holds whatever its size.
        counts = micro_batch_counts(question, self._micro_batches)[::-1]
        asked = dict.fromkeys((branch.stages, branch.pins) for branch in search.branches)
        for n, (stages, pins) in product(counts[: _QUICK if fits or room else None], asked):
            if best is not None and self.seconds_left < SECONDS - _FIRST_S:
                break
            found = self._least_of(relaxation, Branch(n, stages, pins), fits=fits, room=room)
            if found is None:
                continue
            if best is None or found.prediction.most_bytes < best.prediction.most_bytes:
                best = found
            if fits and search.counts(found, question.cluster):
                return found
        return best

    def _least_of(
        self, relaxation: Relaxation, branch: Branch, *, fits: bool, room: int | None
    ) -> Evaluation | None:
        cluster, n = relaxation.question.cluster, branch.micro_batches
        most = branch.stages or min(len(cluster.devices), relaxation.graph.most_stages)
        few = not relaxation.allows(most, n)
        if few and branch.stages is not None:
            # With fewer stages than were asked for, pins would mean others.
            return None
        while most and not relaxation.allows(most, n):
            most -= 1
        alone = branch.stages is not None or few or self.search.large
        assumed = Assumptions(in_flight_under(relaxation.variant, most, 1), unreplicated=alone)
        problem = relaxation.problem(branch, assumed)
        if (fits or room) and not self._may_fit(problem, room):
            return None
        coarse, lattice = self._coarse(problem)
        try:
            table = LeastMemory(coarse, lattice, self.deadline, shares=fits)
        except OutOfTime:
            self.cut_short = True
            return None
        devices = most if alone else len(cluster.devices)
        if room is not None:
            fitting = (k for k in range(1, devices + 1) if table.on(k) <= room)
            devices = next(fitting, 0)
        if not devices or table.on(devices) == inf:
            return None
        cut = table.cut(devices)
        choice = choice_of(
            problem, cut if coarse is problem else self._in_blocks(problem).fine(cut)
        )
        limits = capped(relaxation.limit_ranges(choice.stages), 1)
        self._least_bytes = min(self._least_bytes, table.on(devices))
        try:
            return evaluate(relaxation.question, choice.with_limits(limits), n)
        except (PlanError, ScheduleError):
            return None

    def _may_fit(self, problem: StageProblem, room: int | None) -> bool:
        """Whether layers leave it open, each and in total; on devices with this room, or as they
        are."""
        question, (alone, total) = self.search.question, layers_bytes(problem)
        rooms = [room_bytes(device, question.profile) for device in question.cluster.devices]
        if room is None and None not in rooms:
            known = [each for each in rooms if each is not None]
            return alone <= max(known) * FITS and total <= sum(known) * FITS
        return room is None or alone <= room * FITS

    def _coarse(self, problem: StageProblem) -> tuple[StageProblem, Lattice]:
        """The problem with few places to cut, and those."""
        source = self.search.source
        if isinstance(source, DpSource) and source.lattice.size <= _WHOLE:
            return problem, source.lattice
        return self._in_blocks(problem).coarse(problem)

    def _in_blocks(self, problem: StageProblem) -> Blocks:
        if self._blocks is None:
            # One order of the layers alone: it is among the downsets.
            one_order = lattice_of(problem, accumulate(joined(problem), int.__or__))
            self._blocks = blocks(problem, one_order, _BLOCKS if self.search.identical else _WHOLE)
        return self._blocks

    # What would do ---------------------------------------------------------------------------

    def smallest_memory(self) -> tuple[int, Evaluation] | None:
        """Bytes that would do if every device had them, and the plan; None: no cut at all, or
        none was found in time (`cut_short`)."""
        best = self.least(self.search.question)
        return None if best is None else (best.prediction.most_bytes, best)

    def fewest_devices(self) -> int | None:
        """Devices like the cluster's that would do; None where there is no such count."""
        question, relaxation = self.search.question, self.search.relaxation
        cluster, low = question.cluster, len(question.cluster.devices)
        room = room_bytes(cluster.devices[0], question.profile)
        if not cluster.uniform or self.search.branches[0].stages is not None or room is None:
            return None
        most = min(relaxation.graph.most_stages, _MOST_DEVICES)
        alone, _ = layers_bytes(relaxation.problem(self.search.branches[-1]))
        if low >= most or alone > room * FITS:
            # With replicas more devices than there can be stages may do.
            self.more_devices_are_no_help = not relaxation.freedom.replicas
            return None
        while low < most and self.seconds_left:
            low = min(2 * low, most)
            grown = _grown(cluster, low)
            for share in _ROOMS:
                found = self.least(replace(question, cluster=grown), room=int(room * share))
                if found is not None and self.search.counts(found, grown):
                    return len({d for stage in found.stages for d in stage.devices})
        return None

    def other_ways(self) -> Iterator[tuple[str, Evaluation]]:
        """Options that would do, each by itself where one does, and the plan."""
        question, freedom = self.search.question, self.search.relaxation.freedom
        seen = set[str]()
        for words, other, allowed in ways(question, freedom):
            option = words.partition(" ")[0]
            # The largest of mini-batches will do.
            if option not in seen and (found := self._fitting(other, allowed)) is not None:
                seen.add(option)
                yield words, found
        if may_recompute(question, freedom) and not seen:
            for other in _smaller(question):
                found = self._fitting(other, replace(freedom, recompute="auto"))
                if found is not None:
                    yield f"--recompute auto and --mini-batch {other.mini_batch}", found
                    break
        for name in _of_less_memory(question.system):
            if (found := self._fitting(replace(question, variant=name), freedom)) is not None:
                yield f"--variant {name}", found
                break

    def _fitting(self, question: Question, freedom: Freedom | None) -> Evaluation | None:
        if not self.seconds_left:
            return None
        with suppress(PlanError):
            found = self.least(question, freedom, fits=True)
            if found is not None and self.search.counts(found, question.cluster):
                return found
        return None

    def _plans_of(self, branches: Sequence[Branch], cap: int = 1) -> Iterator[Evaluation]:
        """Of each branch a plan that fits, where one is found.

        Args:
            cap: mini-batches in flight at most, as far as stages behind are worth them.
        """
        search, relaxation = self.search, self.search.relaxation
        most = min(len(search.question.cluster.devices), relaxation.graph.most_stages)
        for branch in chain.from_iterable(_counted(relaxation, b, most) for b in branches):
            if not self.seconds_left:
                return
            in_flight = in_flight_under(relaxation.variant, search.most_stages, cap)
            problem = relaxation.problem(branch, Assumptions(in_flight))
            for cut in self._cuts(problem):
                choice = choice_of(problem, cut)
                if not relaxation.allows(choice.stages, branch.micro_batches):
                    continue
                ranges = relaxation.limit_ranges(choice.stages)
                worth = [max(low, choice.stages - s) for s, (low, _) in enumerate(ranges)]
                limits = tuple(map(min, capped(ranges, cap), worth))
                stages = choice.with_limits(limits)
                found = evaluate(search.question, stages, branch.micro_batches)
                if search.counts(found):
                    yield found
                    break

    def plan_at_hand(self) -> Evaluation | None:
        """A plan that fits the search's own cluster; None where none is found in `_AT_HAND_S`.
        Once there is one, better ones are looked for as long as half of `SOON_S` lasts."""
        begin = time.monotonic()
        self.deadline = begin + _AT_HAND_S
        found = self.least(self.search.question, fits=True)
        best = found if found is not None and self.search.counts(found) else None
        if not self.search.identical:
            if best is not None:
                self.deadline = begin + SOON_S / 2
            # More micro-batches leave devices idle for less: by little, where they are many, and
            # such plans take long to simulate.
            many = _MANY * self.search.most_stages
            branches = sorted(
                self.search.branches,
                key=lambda b: (b.micro_batches > many, abs(b.micro_batches - many)),
            )
            several = self._plans_of(branches, self.search.most_stages)
            for found in chain(several, self._plans_of(branches)):
                best = found if best is None or better(found, best) else best
                self.deadline = begin + SOON_S / 2
        self.deadline = time.monotonic() + SECONDS
        return best

    def _cuts(self, problem: StageProblem) -> Iterator[Cut]:
        """The best cut; then a few others, where the graph is small enough to go on looking."""
        source = self.search.source
        found = source.best(problem, StopRule(self.seconds_left))
        if found.cut is None:
            self.cut_short |= found.bound_s < inf
            return
        yield found.cut
        if problem.layers * problem.devices <= _SMALL:
            yield from islice(source.each_below(problem, lambda: inf), _CUTS)


def proven(
    problems: Iterable[StageProblem],
    lattice: Lattice,
    question: Question,
    until: float | None = None,
    each: int = 1,
    at_once: int = 0,
) -> bool:
    """Whether it is soon proven that no plan fits, by problems that bound all of them.

    Args:
        until: by `time.monotonic`; None: for `_PROOF_S`.
        each, at_once: as `layers_bytes` has them.
    """
    found = [room_bytes(device, question.profile) for device in question.cluster.devices]
    rooms = [room * FITS for room in found if room is not None]
    until = time.monotonic() + _PROOF_S if until is None else until
    try:
        return len(rooms) == len(found) and all(
            none_fits(problem, lattice, rooms, until, each, at_once) for problem in problems
        )
    except OutOfTime:
        return False


def _counted(relaxation: Relaxation, branch: Branch, most: int) -> list[Branch]:
    """The branch; with its stages counted where the best cut may have more, up to `most`, than the
    system runs with so few micro-batches."""
    n = branch.micro_batches
    if branch.stages is not None or relaxation.allows(most, n):
        return [branch]
    return [replace(branch, stages=n >> k) for k in range(n.bit_length())]


def may_recompute(question: Question, freedom: Freedom) -> bool:
    """Whether stages compute nothing again, and may."""
    return freedom.recompute == "off" and not question.system.recompute_refusal


def ways(question: Question, freedom: Freedom) -> list[tuple[str, Question, Freedom]]:
    """Options that may do, each by itself, and what they make of the question."""
    ways = [(f"--mini-batch {q.mini_batch}", q, freedom) for q in _smaller(question)]
    if may_recompute(question, freedom):
        ways.insert(0, ("--recompute auto", question, replace(freedom, recompute="auto")))
    return ways


def _smaller(question: Question) -> list[Question]:
    """With mini-batches halved again and again."""
    size, found = question.mini_batch, []
    while size % 2 == 0:
        size //= 2
        found.append(replace(question, mini_batch=size))
    return found


def _of_less_memory(variant: Variant) -> Iterator[str]:
    """Systems that hold less: those that hold a few micro-batches; first those that flush, or
    don't, as this one."""
    rows = [v for v in VARIANTS.values() if v.backward_unit == "micro" and v.placement == "any"]
    rows = [v for v in rows if not (v.forwards_first or v.split_backward or v.outside)]
    for row in sorted(rows, key=lambda v: v.flushes != variant.flushes):
        if row.name != variant.name:
            yield row.name


def _grown(cluster: Cluster, count: int) -> Cluster:
    """More devices of the same kind, in machines as large as the first."""
    first = cluster.devices[0]
    size = sum(1 for device in cluster.devices if device.machine == first.machine)
    devices = tuple(
        msgspec.structs.replace(
            first,
            name=f"device{k}",
            machine=None if first.machine is None else f"machine{k // size}",
        )
        for k in range(count)
    )
    # Their links would be those of others of these names; memory doesn't depend on them.
    return msgspec.structs.replace(cluster, devices=devices, links=())
