"""When nothing fits: which stage lacks how much, and what would do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice

import msgspec

from ....profiles.errors import InfeasibleError
from ....profiles.units import format_bytes
from ...cluster.cluster import Cluster
from ...costs.layer_graph import held_together
from ...costs.tied_parameters import bound_groups
from ...evaluate import Evaluation, Question, better, evaluate
from ...partition.dp.blocks import Blocks, blocks
from ...partition.dp.identical_devices_by_target import identical_by_targets
from ...partition.problem import Answer, Cut, StageProblem
from ...partition.solve import DpSource, Enough
from ..choices import Branch, Choice, capped, choice_of, in_flight_under
from ..relaxed.places import Assumptions
from ..relaxed.relaxation import Relaxation
from ..state import SOON_S, SearchState

_CUTS = 8
"""Cuts to look at for each micro-batch count: a guess that fits may not fit after all."""

_SMALL = 2_000
"""Layers × devices."""

_BLOCKS = 400
"""Where there is much to look at, what would do is cut between so many blocks of layers."""

_CLOSE = 1.01
"""Where there is much to look at, memory that would do is found up to this factor."""

_ROOM = 0.99
"""Of it, what a number of devices is looked for with: a schedule may take a little more."""

_MOST_TIMES = 16
"""Times a device's memory that is looked at however long it takes."""

_TRIES = 2
"""Numbers of devices that are evaluated, each a twentieth larger than the last."""

_MOST_DEVICES = 4096
_SECONDS = 20.0
"""Looking for what would do ends then; what was found until then is said."""


class Fitting:
    """Looks for plans that need little memory: with as few mini-batches in flight as there can be.

    Args:
        search: the one that found nothing.
    """

    def __init__(self, search: SearchState) -> None:
        self.search = search
        self.deadline = time.monotonic() + _SECONDS
        self.more_devices_are_no_help = False
        self.cut_short = False
        self._blocks: Blocks | None = None

    @property
    def seconds_left(self) -> float:
        """For finding out what would do."""
        return max(self.deadline - time.monotonic(), 0.0)

    def plan_on(self, cluster: Cluster) -> Evaluation | None:
        """A plan that fits this cluster; None where none was found."""
        return next(self._plans_on(cluster, self.search.branches), None)

    def _plans_on(
        self, cluster: Cluster, branches: Sequence[Branch], cap: int = 1
    ) -> Iterator[Evaluation]:
        """Of each branch a plan that fits this cluster, where one is found.

        Args:
            cap: mini-batches in flight at most, as far as stages behind are worth them.
        """
        search = self.search
        question = _on(search.question, cluster)
        relaxation = self._relaxation(cluster)
        most = min(len(cluster.devices), relaxation.graph.most_stages)
        for branch in chain.from_iterable(_counted(relaxation, b, most) for b in branches):
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
                found = evaluate(question, stages, branch.micro_batches)
                if search.counts(found, cluster):
                    yield found
                    break

    def plan_at_hand(self) -> Evaluation | None:
        """A plan that fits the search's own cluster; None where none is found in half the time.
        Once there is one, better ones are looked for as long as half of `SOON_S` lasts."""
        cluster, begin = self.search.question.cluster, time.monotonic()
        end, self.deadline = self.deadline, begin + _SECONDS / 2
        best: Evaluation | None = None
        if self.search.identical:
            cut = self._cut_on(cluster)
            found = None if cut is None else self._evaluated(cluster, cut)
            best = found if found is not None and self.search.counts(found) else None
        else:
            # More micro-batches leave devices idle for less.
            branches = sorted(self.search.branches, key=lambda b: -b.micro_batches)
            several = self._plans_on(cluster, branches, self.search.most_stages)
            for found in chain(several, self._plans_on(cluster, branches)):
                best = found if best is None or better(found, best) else best
                self.deadline = begin + SOON_S / 2
                if not self.seconds_left:
                    break
        self.deadline = end
        return best

    def _relaxation(self, cluster: Cluster) -> Relaxation:
        search = self.search
        question = _on(search.question, cluster)
        return Relaxation(question, search.relaxation.freedom, search.relaxation.graph)

    def _cuts(self, problem: StageProblem) -> Iterator[Cut]:
        """The best cut; then a few others, where the graph is small enough to go on looking."""
        source = self.search.source
        found = source.best(problem, Enough(self.seconds_left))
        if found.cut is None:
            self.cut_short |= found.bound_s < float("inf")
            return
        yield found.cut
        if problem.layers * problem.devices <= _SMALL:
            yield from islice(source.each_below(problem, lambda: float("inf")), _CUTS)

    def smallest_memory(self) -> tuple[int, Evaluation] | None:
        """Bytes that would do if every device had them, and the plan; None: no cut at all, or
        none was found in time (`cut_short`)."""
        cluster = self.search.question.cluster
        if self.search.identical:
            return self._about_smallest_memory(cluster)
        best = self.plan_on(_with_memory(cluster, None))
        if best is None:
            return None
        low = 0
        while (high := _most_bytes(best)) - low > 1 and self.seconds_left:
            middle = (low + high) // 2
            found = self.plan_on(_with_memory(cluster, middle))
            if found is None:
                low = middle
            else:
                best = found
        return _most_bytes(best), best

    def fewest_devices(self) -> int | None:
        """Devices like the cluster's that would do; None where there is no such count."""
        cluster = self.search.question.cluster
        if self.search.identical:
            return self._about_fewest_devices(cluster)
        low = len(cluster.devices)
        asked = self.search.branches[0].stages
        most = min(self.search.relaxation.graph.most_stages, _MOST_DEVICES)
        if not cluster.uniform or asked is not None:
            return None
        if low >= most or self.plan_on(_grown(cluster, most)) is None:
            # Not finding a plan proves nothing; and with replicas more devices than there can be
            # stages, which aren't looked at, may do.
            replicas = self.search.relaxation.freedom.replicas
            sure = low >= most or self._none_fits(_grown(cluster, most))
            self.more_devices_are_no_help = sure and not replicas
            return None
        high = most
        while high - low > 1 and self.seconds_left:
            middle = (low + high) // 2
            if self.plan_on(_grown(cluster, middle)) is None:
                low = middle
            else:
                high = middle
        return high

    def _none_fits(self, cluster: Cluster) -> bool:
        """Whether bounds prove that no plan fits a cluster."""
        source, relaxation = self.search.source, self._relaxation(cluster)
        problems = (relaxation.problem(branch) for branch in self.search.branches)
        answers = (source.best(problem, Enough(self.seconds_left)) for problem in problems)
        return all(answer.cut is None and answer.bound_s == float("inf") for answer in answers)

    # Where there is so much to look at that a simulation for each guess takes too long: cuts that
    # fit as far as the schedule alone tells, with the smallest micro-batches. The last one is
    # evaluated.

    def _about_smallest_memory(self, cluster: Cluster) -> tuple[int, Evaluation] | None:
        self.deadline = time.monotonic() + _SECONDS / 2
        low = high = at_hand = cluster.devices[0].usable_bytes or 1
        while (found := self._cut_on(_with_memory(cluster, high))) is None:
            if not self.seconds_left and high > _MOST_TIMES * at_hand:
                return None
            low, high = high, 2 * high
        while high > low * _CLOSE and self.seconds_left:
            middle = (low + high) // 2
            closer = self._cut_on(_with_memory(cluster, middle))
            if closer is None:
                low = middle
            else:
                found, high = closer, middle
        best = self._evaluated(cluster, found)
        return _most_bytes(best), best

    def _about_fewest_devices(self, cluster: Cluster) -> int | None:
        self.deadline = time.monotonic() + _SECONDS / 2
        low = high = len(cluster.devices)
        most = min(self.search.relaxation.graph.most_stages, _MOST_DEVICES)
        found = None
        while found is None and high < most and self.seconds_left:
            low, high = high, min(2 * high, most)
            found = self._cut_on(_grown(cluster, high), _ROOM)
        if found is None:
            return None
        while high - low > max(high // 50, 1) and self.seconds_left:
            middle = (low + high) // 2
            closer = self._cut_on(_grown(cluster, middle), _ROOM)
            if closer is None:
                low = middle
            else:
                found, high = closer, middle
        for _ in range(_TRIES):
            grown = _grown(cluster, high)
            if found is not None and not self._evaluated(grown, found).over_limit(grown):
                return high
            # Its schedule takes more than the cut alone tells.
            high = min(-(-high * 21 // 20), most)
            found = self._cut_on(_grown(cluster, high), _ROOM)
        return None

    def _cut_on(self, cluster: Cluster, share: float = 1.0) -> tuple[Choice, int] | None:
        """Any cut that fits so much of the devices' memory, and N."""
        search = self.search
        relaxation = self._relaxation(cluster)
        branch = max(search.branches, key=lambda b: b.micro_batches)
        assumed = Assumptions(
            in_flight_under(relaxation.variant, search.most_stages, 1),
            identical=True,
            unreplicated=True,
            memory_share=share,
        )
        problem = relaxation.problem(branch, assumed)
        cut = self._any_cut(problem)
        if cut is None:
            return None
        choice = choice_of(problem, cut)
        allowed = relaxation.allows(choice.stages, branch.micro_batches)
        return (choice, branch.micro_batches) if allowed else None

    def _any_cut(self, problem: StageProblem) -> Cut | None:
        source, enough = self.search.source, float("inf")
        left = max(self.seconds_left, _SECONDS / 4)
        found: Answer | None = None
        if isinstance(source, DpSource):
            self._blocks = self._blocks or blocks(problem, source.lattice, _BLOCKS)
            coarse, lattice = self._blocks.coarse(problem)
            deadline = time.monotonic() + left
            found = identical_by_targets(coarse, lattice, within=enough, deadline=deadline)
            if found is not None and found.cut is not None:
                return self._blocks.fine(found.cut)
        found = found or source.best(problem, Enough(left, within=enough))
        self.cut_short |= found.cut is None and found.bound_s < float("inf")
        return found.cut

    def _evaluated(self, cluster: Cluster, found: tuple[Choice, int]) -> Evaluation:
        choice, micro_batches = found
        question = _on(self.search.question, cluster)
        limits = capped(self.search.relaxation.limit_ranges(choice.stages), 1)
        return evaluate(question, choice.with_limits(limits), micro_batches)


def _counted(relaxation: Relaxation, branch: Branch, most: int) -> list[Branch]:
    """The branch; with its stages counted where the best cut may have more, up to `most`, than the
    system runs with so few micro-batches."""
    n = branch.micro_batches
    if branch.stages is not None or relaxation.allows(most, n):
        return [branch]
    return [replace(branch, stages=n >> k) for k in range(n.bit_length())]


Pins = Sequence[tuple[str, int]]
"""Layers' names and their stages."""


def diagnose(
    search: SearchState, stopped: str | None, pins: Pins = ()
) -> Evaluation | InfeasibleError:
    """Why nothing fits, with the smallest memory and device count that would do.

    Both were planned: they do. Should the closest plan fit after all, it is returned.

    Args:
        stopped: what ended the search before it had looked at everything.
        pins: that were asked for.
    """
    nothing = "no plan fits" if stopped is None else f"no plan that fits was found ({stopped})"
    fitting, cluster = Fitting(search), search.question.cluster
    # What a search had no time for may fit, and without limits of memory it does.
    found = fitting.plan_at_hand() if search.budget.is_late else None
    if found is not None:
        return found
    smallest = fitting.smallest_memory()
    if smallest is None:
        if fitting.cut_short:
            return InfeasibleError(f"{nothing}, nor was what would do")
        return InfeasibleError(f"{nothing}: the graph can't be cut as asked{_pinned(pins)}")
    memory, plan = smallest
    # Made for as many devices of the same kind, but for their memory: it costs the same on these.
    closest, over = plan, plan.over_limit(cluster)
    if not over:
        return closest
    stage, missing = max(over, key=lambda item: item[1])
    names = closest.stages[stage].nodes
    layers = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
    needed = closest.prediction.stages[stage].memory_bytes
    memory = max(device.memory_for(memory) for device in cluster.devices)
    would_do = f"What would do: {memory} bytes ({format_bytes(memory)}) on every device"
    count = fitting.fewest_devices()
    if count is not None:
        would_do += f", or {count} such devices"
    elif fitting.more_devices_are_no_help:
        would_do += "; more such devices alone would not"
    return InfeasibleError(
        f"{nothing}: the closest ({_sizes(closest)}) lacks {missing} bytes "
        f"({format_bytes(missing)}) on stage {stage} ({layers}): it needs {format_bytes(needed)} "
        f"of {format_bytes(needed - missing)}{_free(closest, stage, cluster)}. "
        f"{would_do}{_advice(search)}",
        stage=stage,
        missing_bytes=missing,
    )


def lacking(search: SearchState, stopped: str | None, pins: Pins = ()) -> InfeasibleError:
    """Why no plan with several stages on each device fits: what the closest one lacks.

    Args:
        stopped, pins: as of `diagnose`.
    """
    nothing = "no plan fits" if stopped is None else f"no plan that fits was found ({stopped})"
    closest, cluster = search.closest, search.question.cluster
    if closest is None and stopped is not None:
        return InfeasibleError(f"{nothing}: none was tried; give the search more time")
    if closest is None:
        bound = bound_groups(search.question.profile, search.question.tied)
        named = "; ".join(", ".join(map(repr, group)) for group in bound)
        why = f": layers that share parameters must be on one device ({named})" if bound else ""
        if search.question.system.horizon == "round-trip" and not bound:
            why = (
                f": {search.question.variant} needs gradients that come back to each stage from "
                "the later ones of its device"
            )
        return InfeasibleError(f"{nothing}: the graph can't be cut as asked{_pinned(pins) or why}")
    stage, missing = max(closest.over_limit(cluster), key=lambda item: item[1])
    device = cluster.devices[closest.stages[stage].devices[0]].name
    needed = closest.prediction.device_of(stage).memory_bytes
    return InfeasibleError(
        f"{nothing}: the closest ({_sizes(closest)}) lacks {missing} bytes "
        f"({format_bytes(missing)}) on device {device!r}: its stages need "
        f"{format_bytes(needed)} of {format_bytes(needed - missing)}"
        f"{_free(closest, stage, cluster)}{_smaller(search)}",
        stage=stage,
        missing_bytes=missing,
    )


def _sizes(plan: Evaluation) -> str:
    stages, parts = len(plan.stages), plan.micro_batches
    return f"{stages} stage{'s' * (stages > 1)}, {parts} micro-batch{'es' * (parts > 1)}"


def _free(plan: Evaluation, stage: int, cluster: Cluster) -> str:
    """What of its device a stage has to leave free; nothing where it may take all."""
    device = cluster.tightest(plan.stages[stage].devices)
    if device is None or not device.free_bytes:
        return ""
    return f" that --headroom leaves of {format_bytes(device.memory_bytes or 0)}"


def _pinned(pins: Pins) -> str:
    """That pins are in the way, and what to do; nothing where there are none."""
    if not pins:
        return ""
    shown = ", ".join(f"--pin {name}={stage}" for name, stage in pins)
    return (
        f" with {shown}: no stage may be empty, and no layer on an earlier stage than what it "
        "needs; leave a pin out, or give it another stage or --stages another number"
    )


def _advice(search: SearchState) -> str:
    question, graph = search.question, search.relaxation.graph
    tie = None
    if graph.most_stages < len(question.cluster.devices):
        tie = held_together(question.profile, search.relaxation.variant, question.tied)
    return _smaller(search) + (f". {tie[0].upper()}{tie[1:]}" if tie else "")


def _smaller(search: SearchState) -> str:
    relaxation = search.relaxation
    if relaxation.freedom.recompute == "off" and not relaxation.variant.recompute_refusal:
        return "; --recompute auto or a smaller --mini-batch may help"
    return "; a smaller --mini-batch may help"


def _on(question: Question, cluster: Cluster) -> Question:
    return replace(question, cluster=cluster)


def _with_memory(cluster: Cluster, nbytes: int | None) -> Cluster:
    """With so much for stages on each device."""
    devices = tuple(
        msgspec.structs.replace(
            device, memory_bytes=nbytes, reserved_bytes=None, reserved_share=None
        )
        for device in cluster.devices
    )
    return msgspec.structs.replace(cluster, devices=devices)


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
    return msgspec.structs.replace(cluster, devices=devices)


def _most_bytes(found: Evaluation) -> int:
    return max(stage.memory_bytes for stage in found.prediction.stages)
