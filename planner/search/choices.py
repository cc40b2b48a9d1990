"""What the search chooses for each stage, and the in-flight limits that go with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..partition.problem import Cut, StageProblem
from ..partition.stage_load import members
from ..plan import PlanStage

MOST_VECTORS = 64
"""With more in-flight limits to choose from, not all are tried."""


@dataclass(frozen=True)
class Choice:
    """A cut with the devices of its stages and the stages that compute again.

    Attributes:
        nodes, devices, recompute: per stage.
    """

    nodes: tuple[tuple[str, ...], ...]
    devices: tuple[tuple[int, ...], ...]
    recompute: tuple[bool, ...]

    @property
    def stages(self) -> int:
        """S."""
        return len(self.nodes)

    def with_limits(self, limits: Sequence[int]) -> tuple[PlanStage, ...]:
        """The plan's stages with these in-flight limits."""
        parts = zip(self.nodes, self.devices, limits, self.recompute, strict=True)
        return tuple(
            PlanStage(nodes=nodes, devices=devices, in_flight=limit, recompute=again)
            for nodes, devices, limit, again in parts
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
        recompute.append(problem.modes[option.mode].name == "recompute")
    return Choice(tuple(nodes), tuple(devices), tuple(recompute))


Ranges = Sequence[tuple[int, int]]


def all_limits(ranges: Ranges, most: int = MOST_VECTORS) -> list[tuple[int, ...]] | None:
    """Every vector of limits that never rises along the pipeline; None for more than `most`.

    Args:
        ranges: per stage, the least and the most that make sense.
    """
    found: list[tuple[int, ...]] = []
    for vector in _rising_backwards(ranges, len(ranges) - 1, 0):
        if len(found) == most:
            return None
        found.append(vector)
    return found


def _rising_backwards(ranges: Ranges, stage: int, least: int) -> Iterator[tuple[int, ...]]:
    if stage < 0:
        yield ()
        return
    low, high = ranges[stage]
    for limit in range(max(low, least), high + 1):
        for rest in _rising_backwards(ranges, stage - 1, limit):
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
