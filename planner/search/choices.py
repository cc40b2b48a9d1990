"""What a search chooses from: cuts, devices, recomputation, micro-batches, in-flight limits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ...profiles.errors import PlanError
from ...profiles.files import MAX_SCHEDULED
from ..costs.recomputation import Recompute, of_stage
from ..costs.tied_parameters import gradient_links, not_behind
from ..partition.problem import Cut, StageProblem, members
from ..plan import PlanStage
from ..question import Question
from ..schedules.schedules import PAPER_STALENESS, RUN_AHEAD, StalenessBounds, limit_ranges
from ..systems.placement import Pattern, numbered_devices
from ..systems.variants import Variant

MOST_VECTORS = 64
"""With more in-flight limits to choose from, not all are tried."""

RECOMPUTE = ("off", "on", "selective", "auto")
"""Stages compute no activations again, all of them, those of some layers, or whatever is best."""


@dataclass(frozen=True)
class Freedom:
    """What the search may choose besides cut and micro-batches.

    Attributes:
        replicas: stages may take several devices.
        recompute: one of RECOMPUTE.
        staleness: what bounds in-flight limits and version differences.
    """

    replicas: bool = False
    recompute: str = "off"
    staleness: StalenessBounds = PAPER_STALENESS


@dataclass(frozen=True)
class Branch:
    """The part of the search with so many micro-batches and stages.

    Attributes:
        stages: S; None: any number.
        pins: (layer, stage), 0 the first; only where the stages are counted.
    """

    micro_batches: int
    stages: int | None = None
    pins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PlacedBranch:
    """The part of the search with so many micro-batches, and several stages on each device.

    Attributes:
        placement: per stage, which of the `devices`; empty: those that aren't looked at.
        devices: positions in the cluster's list.
    """

    micro_batches: int
    placement: tuple[int, ...] = ()
    devices: tuple[int, ...] = ()

    @property
    def lying(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, its device's position in the cluster's list."""
        return tuple((d,) for d in self.on)

    @property
    def on(self) -> tuple[int, ...]:
        """The same without replicas."""
        return tuple(self.devices[d] for d in self.placement)


@dataclass(frozen=True)
class Choice:
    """A cut with the devices of its stages and what they compute again.

    Attributes:
        nodes, devices, recompute: per stage.
    """

    nodes: tuple[tuple[str, ...], ...]
    devices: tuple[tuple[int, ...], ...]
    recompute: tuple[Recompute, ...]

    @classmethod
    def of(cls, stages: Iterable[PlanStage]) -> Choice:
        """That of a plan's stages."""
        return cls(*zip(*((x.nodes, x.devices, x.recompute) for x in stages), strict=True))

    @property
    def stages(self) -> int:
        """S."""
        return len(self.nodes)

    @property
    def several(self) -> bool:
        """Whether some device has several stages."""
        return bool(numbered_devices(self.devices))

    def with_limits(self, limits: Sequence[int]) -> tuple[PlanStage, ...]:
        """The plan's stages with these in-flight limits."""
        parts = zip(self.nodes, self.devices, limits, self.recompute, strict=True)
        return tuple(
            PlanStage(nodes=nodes, devices=devices, in_flight=limit, recompute=recompute)
            for nodes, devices, limit, recompute in parts
        )


def unforeseen(question: Question, choice: Choice) -> bool:
    """Whether a "round-trip" horizon has no prediction distance (`prediction_distances`): no path
    of gradients leads from some later stage of a device back to an earlier one."""
    if question.system.horizon != "round-trip":
        return False
    stage_of = {name: s for s, names in enumerate(choice.nodes) for name in names}
    links = gradient_links(question.profile, stage_of)
    stages = range(choice.stages)
    return any(
        not_behind(s, [t for t in stages[s + 1 :] if choice.devices[t] == choice.devices[s]], links)
        is not None
        for s in stages
    )


def choice_of(problem: StageProblem, cut: Cut, grain: int = 1) -> Choice:
    """A solver's answer as names and positions of devices.

    Args:
        grain: devices that the problem counts as one.
    """
    nodes, devices, recompute = [], [], []
    for stage in cut.stages:
        option = problem.options[stage.option]
        first = (problem.devices - stage.k) * grain
        nodes.append(tuple(problem.names[j] for j in members(stage.layers)))
        devices.append(tuple(range(first, first + option.replicas * grain)))
        recompute.append(of_stage(problem.modes[option.mode].recompute, nodes[-1]))
    return Choice(tuple(nodes), tuple(devices), tuple(recompute))


Ranges = Sequence[tuple[int, int]]


def all_limits(ranges: Ranges, most: int = MOST_VECTORS) -> list[tuple[int, ...]] | None:
    """Every vector of limits that never rises along the pipeline; None for more than `most`.

    Args:
        ranges: per stage, the least and the most that make sense.
    """
    found: list[tuple[int, ...]] = []
    for vector in _from_the_last(ranges, len(ranges) - 1, 0):
        if len(found) == most:
            return None
        found.append(vector)
    return found


def _from_the_last(ranges: Ranges, stage: int, least: int) -> Iterator[tuple[int, ...]]:
    if stage < 0:
        yield ()
        return
    low, high = ranges[stage]
    for limit in range(max(low, least), high + 1):
        for rest in _from_the_last(ranges, stage - 1, limit):
            yield (*rest, limit)


def capped(ranges: Ranges, cap: int) -> tuple[int, ...]:
    """The largest limits, none above `cap` where a stage's range allows it."""
    return tuple(max(low, min(high, cap)) for low, high in ranges)


def caps(ranges: Ranges) -> list[int]:
    """Caps to try, from the one that caps nothing: all where they are few, else by halves."""
    highest = max(high for _, high in ranges)
    lowest = min(low for low, _ in ranges)
    if highest - lowest < 8:
        return list(range(highest, lowest - 1, -1))
    found = {highest, *range(lowest, lowest + 3)}
    cap = highest
    while cap > lowest:
        found.add(cap)
        cap //= 2
    return sorted(found, reverse=True)


# How many stages devices may have, and how they lie -------------------------------------------

PLACEMENTS = ("auto", "straight", "loop", "v")
"""Which device runs which stage."""

MOST_PER_DEVICE = 4
"""Stages of a device that are looked at where any number was asked for."""


@dataclass(frozen=True)
class StagesAsked:
    """How many stages a request allows on a device, and how they may lie.

    Attributes:
        straight: plans with a stage for each device are asked for.
        one_stage: of these, only those with one stage in all.
        per_device: numbers of stages above 1, in the sequence in which they are looked at.
        patterns: how they may be placed.
        open_end: more of them are looked at only while they pay.
    """

    straight: bool
    one_stage: bool
    per_device: tuple[int, ...]
    patterns: tuple[Pattern, ...]
    open_end: bool


def stages_asked(
    variant: Variant, per_device: int | None, placement: str, stages: int | None
) -> StagesAsked:
    """What a request means for a system. Raises PlanError where it contradicts itself.

    Args:
        per_device: stages of each device; None: any number.
        placement: one of PLACEMENTS.
        stages: S; None: any.
    """
    if placement not in PLACEMENTS:
        raise PlanError(f"--placement {placement}: give one of {', '.join(PLACEMENTS)}")
    if per_device is not None and per_device < 1:
        raise PlanError(f"--stages-per-device {per_device}: give at least 1")
    own = variant.placement
    if own != "any":
        if placement not in ("auto", own):
            raise PlanError(
                f"--placement {placement}: {variant.name} places its stages in a {own} itself"
            )
        if own == "v" and per_device not in (None, 1, 2):
            raise PlanError(
                f"--stages-per-device {per_device}: {variant.name} runs two stages on each device"
            )
        one = per_device in (None, 1) and stages in (None, 1)
        several = (2,) if per_device == 1 else _numbers(per_device, (own,))
        return StagesAsked(one, True, several if stages != 1 else (), (own,), per_device is None)
    patterns: tuple[Pattern, ...] = ("loop", "v") if placement == "auto" else ()
    if placement == "straight":
        if per_device not in (None, 1):
            raise PlanError(
                f"--stages-per-device {per_device}: --placement straight has one on each"
            )
        per_device = 1
    elif placement in ("loop", "v"):
        if per_device == 1:
            raise PlanError(
                f"--placement {placement}: devices have several stages then; give "
                "--stages-per-device 2 or auto"
            )
        if placement == "v" and per_device not in (None, 2):
            raise PlanError(f"--stages-per-device {per_device}: --placement v has two on each")
        patterns = ("loop",) if placement == "loop" else ("v",)
    straight = per_device == 1 or (per_device is None and placement == "auto")
    return StagesAsked(
        straight,
        False,
        () if per_device == 1 else _numbers(per_device, patterns),
        patterns,
        per_device is None,
    )


def _numbers(per_device: int | None, patterns: tuple[Pattern, ...]) -> tuple[int, ...]:
    if per_device is not None:
        return (per_device,)
    return (2,) if patterns == ("v",) else tuple(range(2, MOST_PER_DEVICE + 1))


def check_staleness(question: Question, asked: StalenessBounds, stages: int | None) -> None:
    """Raises PlanError for bounds that aren't any, or that no plan of the system keeps to."""
    if asked.run_ahead not in RUN_AHEAD:
        raise PlanError(f"--run-ahead {asked.run_ahead}: give one of {', '.join(RUN_AHEAD)}")
    most, difference = asked.max_in_flight, asked.max_difference
    if difference is not None and difference < 0:
        raise PlanError(f"--max-difference {difference}: give at least 0")
    if most is None:
        return
    variant = question.system
    least = limit_ranges(variant, 2 if stages is None else stages, within=asked)[0][0]
    if variant.order is not None:
        what, least = "the order", max(variant.order.limits)
    else:
        what = variant.name
    if most < least:
        has = f": {what} has {least} mini-batches in flight on a stage" if least > 1 else ""
        raise PlanError(f"--max-in-flight {most}{has}; give at least {least}")


# What a stage has in flight when its memory is at its peak: for sure, or by a guess -------------
# D: stages behind a stage.


@dataclass(frozen=True)
class InFlight:
    """What a stage has in flight when its memory is at its peak, by D.

    Attributes:
        mini_batches: each with all its micro-batches, in systems whose backward takes them all.
        micro_batches: in systems whose backward takes one.
        versions: weight versions held.
    """

    mini_batches: Callable[[int], float]
    micro_batches: Callable[[int], float]
    versions: Callable[[int], float]


def least_in_flight(variant: Variant) -> InFlight:
    """What every schedule has when a stage's backward begins, however it is made."""
    return InFlight(
        mini_batches=lambda _: 1.0,
        micro_batches=lambda _: np.inf if variant.forwards_first else 1.0,
        versions=lambda _: 1.0,
    )


def in_flight_under(variant: Variant, stages: int, cap: int) -> InFlight:
    """A guess at what stages with equal times have at their peak, no limit being above `cap`.

    A mini-batch stays at a stage with D behind it while D others begin behind (docs/systems.md).
    """
    limits = capped(limit_ranges(variant, stages), cap)

    def mini_batches(behind: int) -> float:
        limit = limits[max(stages - 1 - behind, 0)]
        return float(min(limit, 1 + behind))

    def micro_batches(behind: int) -> float:
        if variant.forwards_first:
            return np.inf
        return float(stages) if variant.split_backward else 1.0 + behind

    def versions(behind: int) -> float:
        if variant.stashes:
            return mini_batches(behind)
        if variant.synchronises:
            # Versions that have entered at stage 0 and not here, at most one for each stage before.
            return float(max(min(stages - behind, limits[0]), 1))
        return 1.0

    return InFlight(
        mini_batches=mini_batches,
        micro_batches=micro_batches,
        versions=versions,
    )


# Which micro-batch counts a system can run with, on costs that the profile has ------------------


def micro_batch_counts(question: Question, asked: int | None) -> list[int]:
    """Every count to look at, ascending: the one asked for, or all that divide the mini-batch.

    A count asked for need not divide it: micro-batches then differ by one sample.
    Raises PlanError where there is none.
    """
    variant = question.system
    batch, sizes = question.mini_batch, question.profile.micro_batch_sizes
    if variant.whole_mini_batches:
        if asked not in (None, 1):
            raise PlanError(
                f"--micro-batches {asked}: {variant.name} runs whole mini-batches; leave it out"
            )
        asked = 1
    if asked is not None and asked > batch:
        raise PlanError(f"--micro-batches {asked}: the mini-batch has only {batch} samples")
    if asked is None:
        within = [m for m in range(sizes[0], sizes[-1] + 1) if batch % m == 0]
        counts = sorted(batch // m for m in within)
    else:
        counts = [asked] if sizes[0] <= -(-batch // asked) <= sizes[-1] else []
    if not counts:
        size = f"of {-(-batch // asked)} samples " if asked else ""
        has = " to ".join(map(str, dict.fromkeys((sizes[0], sizes[-1]))))
        raise PlanError(
            f"mini-batch {batch}: micro-batches {size}are asked for that the profile didn't "
            f"measure: it has {has} samples; profile again with --batch-size "
            "and --micro-batch-sizes that reach them"
        )
    if counts[0] > MAX_SCHEDULED:
        raise PlanError(
            f"mini-batch {batch}: would have {counts[0]} micro-batches; {MAX_SCHEDULED} are "
            "the most"
        )
    return [n for n in counts if n <= MAX_SCHEDULED]
