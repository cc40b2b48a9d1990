"""Curves of runs: losses and the task's figures over mini-batches, epochs and seconds."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from ...profiles.errors import UserError
from ...profiles.files import CURVES_HEAD, Kind

TRAINING = "training loss"

AXES = {"mini-batches": "mini-batches", "epochs": "epochs", "seconds": "seconds of training"}
"""What curves may be drawn over, and what the axis is called."""


@dataclass(frozen=True)
class CurvePoint:
    """A value, and how far training was: each of `AXES`, with evaluations' time left out."""

    mini_batches: int
    epochs: float
    seconds: float
    value: float

    def at(self, axis: str) -> float:
        """How far it was, by an axis."""
        return float(getattr(self, axis.replace("-", "_")))


@dataclass(frozen=True)
class RunCurve:
    """How a quantity of a run went: `TRAINING`, of each mini-batch; or "test" with a figure's name.
    `inline`: all stages took turns in one process."""

    run: str
    system: str
    quantity: str
    points: tuple[CurvePoint, ...]
    inline: bool = False

    @property
    def falls(self) -> bool:
        """Less is better."""
        return re.search("loss|error|perplexity", self.quantity) is not None

    def first(self, level: float) -> CurvePoint | None:
        """Where it first was at a level, or better; None: nowhere."""
        sign = 1 if self.falls else -1
        return next((p for p in self.points if sign * p.value <= sign * level), None)


@dataclass(frozen=True)
class CurveTarget:
    """A level that runs are to reach."""

    quantity: str
    value: float

    def reached(self, curves: Iterable[RunCurve]) -> dict[str, CurvePoint | None]:
        """Where each run that has the quantity was first there; None: nowhere."""
        own = (curve for curve in curves if curve.quantity == self.quantity)
        return {curve.run: curve.first(self.value) for curve in own}


def curves_of(figures: Mapping[str, Any], of_epoch: int | None) -> tuple[RunCurve, ...]:
    """All curves of a run, of what `html.run_data.run_figures` gives. `of_epoch`: mini-batches of
    an epoch; None: of all that there are."""
    run, system, inline = figures["name"], figures["variant"], figures["mode"] == "inline"
    each = of_epoch or len(figures["losses"]) or 1
    points = [
        CurvePoint(k, k / each, seconds, math.nan if loss is None else loss)
        for k, (loss, seconds) in enumerate(
            zip(figures["losses"], figures["loss_seconds"], strict=True), start=1
        )
    ]
    found = [RunCurve(run, system, TRAINING, tuple(points), inline)]
    tests: dict[str, list[CurvePoint]] = {}
    # Those within epochs, too, where there are any.
    for record in figures.get("evaluations", figures["epochs"]):
        done = record["mini_batches"]
        for name, value in record["test"].items():
            value = math.nan if value is None else value
            point = CurvePoint(done, done / each, record["seconds"], value)
            tests.setdefault(f"test {name}", []).append(point)
    found += [RunCurve(run, system, name, tuple(own), inline) for name, own in tests.items()]
    return tuple(curve for curve in found if curve.points)


def read_target(text: str | None, curves: Sequence[RunCurve]) -> CurveTarget | None:
    """``accuracy=0.9`` or ``test loss=0.4`` → a target. Raises UserError, also where no run has
    the quantity."""
    if text is None:
        return None
    name, equals, value = text.rpartition("=")
    known = list(dict.fromkeys(curve.quantity for curve in curves))
    # As tables have it for short.
    name = TRAINING if name == "train loss" else name
    quantity = next((q for q in (name, f"test {name}") if q in known), None)
    try:
        level = float(value)
    except ValueError:
        level = math.nan
    if not equals or not math.isfinite(level):
        raise UserError(f"--target {text!r}: write it like accuracy=0.9")
    if quantity is None:
        raise UserError(f"--target {text!r}: no run has it; there is {', '.join(known) or 'none'}")
    return CurveTarget(quantity, level)


def target_figures(target: CurveTarget, curves: Iterable[RunCurve]) -> dict[str, Any]:
    """When runs reached it, for --json."""
    return {
        "quantity": target.quantity,
        "value": target.value,
        "reached": {
            run: point
            and {far: getattr(point, far) for far in ("mini_batches", "epochs", "seconds")}
            for run, point in target.reached(curves).items()
        },
    }


def axes_of(text: str) -> tuple[str, ...]:
    """``epochs,seconds`` → the axes. Raises click.BadParameter."""
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in found:
        if name not in AXES:
            raise click.BadParameter(f"{name!r}: choose of {', '.join(AXES)}")
    return found


def is_table(path: str) -> bool:
    """Whether curves in a file of this name are a table."""
    return Path(path).suffix.lower() == ".csv"


def curves_kind(path: str) -> Kind:
    """What curves in a file of this name are. Raises UserError for endings of neither."""
    if is_table(path):
        return Kind.CURVES
    if Path(path).suffix.lower() not in ("", ".svg", ".pdf"):
        raise UserError(f"--curves {path}: end the name in .svg, .pdf or, for a table, .csv")
    return Kind.FIGURE


def as_csv(curves: Iterable[RunCurve]) -> str:
    """All points, each on a line; what isn't a number is left empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for curve in curves:
        for point in curve.points:
            value = "" if math.isnan(point.value) else repr(point.value)
            far = [f"{point.epochs:.6g}", point.mini_batches, f"{point.seconds:.6g}"]
            writer.writerow([curve.run, curve.system, curve.quantity, *far, value])
    return f"{CURVES_HEAD}\n{text.getvalue()}"


def thinned(curve: RunCurve, most: int) -> tuple[RunCurve, int]:
    """The curve with at most so many points, each the mean of so many neighbours, and how many;
    a last point of fewer stays."""
    width = max(1, math.ceil(len(curve.points) / most))
    if width == 1:
        return curve, 1
    return replace(curve, points=tuple(_means(curve.points, width))), width


def _means(points: Sequence[CurvePoint], width: int) -> Iterator[CurvePoint]:
    for k in range(0, len(points), width):
        own = points[k : k + width]
        yield CurvePoint(
            own[-1].mini_batches,
            sum(point.epochs for point in own) / len(own),
            sum(point.seconds for point in own) / len(own),
            sum(point.value for point in own) / len(own),
        )
