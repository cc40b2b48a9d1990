"""Figures over rounds: ratios paired within each round, their median and spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from ..contestants import BASE
from .records import Figures, Round, StageFigures


@dataclass(frozen=True)
class Ratio:
    """A median with the least and the most."""

    value: float
    least: float
    most: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.least:.2f}–{self.most:.2f})"


def speed_ratio(rounds: Sequence[Round], model: str, name: str, over: str = BASE) -> Ratio | None:
    """How much faster `name` is than `over`, of the rounds that have both; None: there are none."""
    pairs = [
        (each.runs[name].samples_per_s, each.runs[over].samples_per_s)
        for each in rounds
        if each.model == model and name in each.runs and over in each.runs
    ]
    found = [one / other for one, other in pairs]
    return Ratio(median(found), min(found), max(found), len(found)) if found else None


def runs_of(rounds: Sequence[Round], model: str, name: str) -> list[Figures]:
    """All runs of a contestant on a model."""
    return [each.runs[name] for each in rounds if each.model == model and name in each.runs]


def over_runs(runs: Sequence[Figures], figure: Callable[[Figures], float]) -> float:
    """The median of a figure."""
    return median(figure(run) for run in runs)


def of_stages(
    runs: Sequence[Figures], figure: Callable[[StageFigures], float | None]
) -> list[float] | None:
    """The median of a figure, stage by stage; None where it isn't known."""
    columns = [[figure(stage) for stage in run.stages] for run in runs]
    found: list[float] = []
    for values in zip(*columns, strict=True):
        known = [value for value in values if value is not None]
        if not known:
            return None
        found.append(median(known))
    return found


def bottleneck_idle(run: Figures) -> float:
    """Share of the period in which the busiest stage waited."""
    busiest = min(run.stages, key=lambda stage: stage.idle_s)
    return busiest.idle_s / run.period_s
