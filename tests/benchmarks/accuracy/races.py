"""Our own races (docs/benchmarks/races.json): predicted against measured."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

RACES = Path(__file__).resolve().parents[3] / "docs" / "benchmarks" / "races.json"

SHARED = ("+2", "zb-v")
"""What contestants are called that have several workers for each core, or stages of one device."""


class Raced(NamedTuple):
    """One system on one model, of all rounds; periods in seconds, errors as shares.

    Attributes:
        memory: of each stage's peak in each round.
    """

    model: str
    name: str
    measured_s: float
    predicted_s: float
    memory: tuple[float, ...]

    @property
    def shared(self) -> bool:
        """Whether workers share cores, or stages a device."""
        return any(word in self.name for word in SHARED)

    @property
    def error(self) -> float:
        """Of the period."""
        return self.predicted_s / self.measured_s - 1


def raced(path: Path = RACES) -> Iterator[Raced]:
    """All that were predicted, by their newest prediction: earlier rounds may be of other plans, or
    of plans that were made by other rules."""
    found: dict[tuple[str, str], list[Any]] = defaultdict(list)
    rounds = json.loads(path.read_text(encoding="utf-8"))["rounds"]
    for of_round in sorted(rounds, key=lambda one: str(one["begun"])):
        for name, run in of_round["runs"].items():
            if run["predicted_period_s"]:
                found[of_round["model"], name].append(run)
    for (model, name), every in found.items():
        runs = [run for run in every if _planned(run) == _planned(every[-1])]
        yield Raced(
            model,
            name,
            median(run["period_s"] for run in runs),
            median(run["predicted_period_s"] for run in runs),
            tuple(
                stage["predicted_bytes"] / stage["peak_bytes"] - 1
                for run in runs
                for stage in run["stages"]
                if stage["peak_bytes"] and stage["predicted_bytes"]
            ),
        )


def _planned(run: Any) -> list[Any]:
    """What the plan of a run said of its stages."""
    return [run["cuts"], *(stage["predicted_bytes"] for stage in run["stages"])]
