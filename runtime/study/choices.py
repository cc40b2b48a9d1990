"""What a study is asked for besides plans and settings: options of ``tp-run study``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from ...profiles.errors import UserError
from ...profiles.files import MAX_FACTOR, Count, Tally
from ...profiles.options import Option, option_fields, read_field
from ..settings import DIFFERENCES, OPTIMIZER, TRAINING, RunSettings
from .figures.study import RISES, Budget, Metric

TARGET = "Target"
RATES = "Learning rates"
"""Headings of the options' help."""


def _warmups(given: object, name: str) -> tuple[int, ...]:
    """``"0,100"`` → (0, 100). Raises UserError."""
    parts = [part.strip() for part in str(given).split(",")]
    if not all(part.isdecimal() and part.isascii() and len(part) <= 9 for part in parts):
        raise UserError(f"{name} {given!r}: give whole numbers of updates, like 0,100")
    return tuple(map(int, parts))


def _budget(given: object, name: str) -> Budget | None:
    """``"2h"`` is a time, ``"40"`` so many trainings. Raises UserError."""
    if given is None or isinstance(given, Budget):
        return given
    text = str(given).strip()
    unit = next((unit for unit in _TIMES if text.endswith(unit)), "")
    try:
        amount = float(text.removesuffix(unit)) * _TIMES.get(unit, 1.0)
    except ValueError:
        amount = 0.0
    if not 0 < amount <= MAX_FACTOR:
        raise UserError(
            f"{name} {given!r}: give a time, like 2h or 90min, or a number of trainings, like 40"
        )
    return Budget(seconds=amount) if unit else Budget(trainings=amount)


_TIMES = {"h": 3600.0, "min": 60.0, "s": 1.0}


class Cure(NamedTuple):
    """Settings that plans train under besides the run's own.

    Attributes:
        text: as it was given, in words and in trainings' names.
        settings: fields of `RunSettings`.
    """

    text: str
    settings: dict[str, Any]


def _cures(given: Sequence[object], name: str) -> tuple[Cure, ...]:
    """``"lr-rescheduling=100,stagewise-momentum"`` → their fields. Raises UserError."""
    found: dict[str, Cure] = {}
    for each in given:
        parts = [part.strip() for part in str(each).split(",")]
        cure = Cure(",".join(parts), dict(_setting(part, name) for part in parts))
        if cure.text in found or len(cure.settings) < len(parts):
            raise UserError(f"{name} {cure.text}: says something twice")
        found[cure.text] = cure
    return tuple(found.values())


def _setting(text: str, name: str) -> tuple[str, Any]:
    """Field and value. Raises UserError."""
    word, equals, value = text.partition("=")
    fields = [f for f in option_fields(RunSettings).values() if f.option.group == DIFFERENCES]
    known = {flag[2:]: f for f in fields for both in f.flags for flag in both.split("/")}
    field = known.get(word)
    if field is None:
        raise UserError(f"{name} {text!r}: give NAME or NAME=VALUE, of {', '.join(known)}")
    if field.kind.base is bool:
        if equals:
            raise UserError(f"{name} {text}: {word} has no value; leave ={value} out")
        return field.name, not word.startswith("no-")
    given: object = value
    if field.kind.base in (int, float):
        try:
            given = field.kind.base(value)
        except ValueError:
            raise UserError(f"{name} {text!r}: give {word} a number") from None
    elif isinstance(field.kind.base, tuple) and value not in field.kind.base:
        raise UserError(f"{name} {text!r}: give {word} one of {', '.join(field.kind.base)}")
    return field.name, read_field(field, given, f"{name} {word}")


@dataclass(frozen=True)
class StudyChoices:
    """What the user chooses besides plans and settings."""

    seeds: Annotated[int, Meta(ge=1, le=100), Option(TRAINING)] = 3
    """Trainings of each system."""
    budget: Annotated[Budget | None, Option(TRAINING, metavar="TIME|COUNT", read=_budget)] = None
    """Drop plans that fall behind, and choose what is trained next, within 2h, or as much as 40
    trainings."""
    longer: Annotated[float, Meta(ge=1, le=1000), Option(TRAINING)] = 1.5
    """Every training is so many times as long as the steps that set the target, so that slower
    systems get there too."""
    longest: Annotated[
        Annotated[float, Meta(ge=1, le=1000)] | None,
        Option(TRAINING, usual="as --longer; with --budget as long as it allows"),
    ] = None
    """What may be the soonest by its period but doesn't reach the target trains on, up to so many
    times the steps."""
    eval_every: Annotated[Tally | None, Option(TRAINING, usual="a fifteenth of all")] = None
    """Mini-batches between evaluations; 0: none."""
    uniform_delay: Annotated[bool, Option(TRAINING)] = False
    """Also train with gradients that are S - 1 updates late in all layers."""
    cures: Annotated[
        tuple[Cure, ...],
        Option(DIFFERENCES, flags=("--cure",), metavar="NAME[=VALUE],…", several=True, read=_cures),
    ] = ()
    """Also train each plan without a flush under these of the settings above; several are several
    trainings."""
    target_loss: Annotated[
        float | None, Option(TARGET, usual="what plain training reaches after the given steps")
    ] = None
    target_accuracy: Annotated[Annotated[float, Meta(ge=0, le=1)] | None, Option(TARGET)] = None
    """From 0 to 1, on the test data."""
    metric: Annotated[
        Metric, Option(TARGET, usual="loss, in training", flags=("--target",), values=tuple(RISES))
    ] = "loss"
    """The figure that is to reach what plain training does."""
    tune: Annotated[int, Meta(ge=1, le=1000), Option(RATES, metavar="K")] = 5
    """Trainings that each system has to find its learning rate; 1: takes --lr."""
    confirm: Annotated[int, Meta(ge=1, le=100), Option(RATES)] = 2
    """Of the rates tried, the best so many train with all seeds."""
    factor: Annotated[float, Meta(gt=1, le=MAX_FACTOR), Option(RATES, flags=("--tune-factor",))] = (
        2.0
    )
    """Between neighbours of the grid of rates around --lr."""
    tune_steps: Annotated[Count | None, Option(RATES, usual="as long as the others")] = None
    """Mini-batches of these trainings."""
    warmups: Annotated[
        tuple[int, ...] | None,
        Option(OPTIMIZER, usual="0", flags=("--warmup",), metavar="UPDATES,…", read=_warmups),
    ] = None
    """Over which the learning rate rises; of several, each system's best."""

    @property
    def target(self) -> float | None:
        """Level of `metric`; None: the one that plain training reaches."""
        return self.target_accuracy if self.target_loss is None else self.target_loss


def choices_of(asked: dict[str, Any]) -> StudyChoices:
    """What the command's options say; takes them out of `asked`. Raises UserError."""
    if asked["epochs"] is not None and asked["steps"] is not None:
        raise UserError("--epochs, --steps: give one of them")
    fields = option_fields(StudyChoices)
    given = {name: asked.pop(name) for name in fields}
    metric, loss, accuracy = (given[n] for n in ("metric", "target_loss", "target_accuracy"))
    if loss is not None and accuracy is not None:
        raise UserError("--target-loss, --target-accuracy: give one of them")
    if accuracy is not None:
        if metric not in (None, "accuracy"):
            raise UserError(f"--target-accuracy, --target {metric}: leave --target out")
        metric = "accuracy"
    if loss is not None and metric == "accuracy":
        raise UserError("--target-loss, --target accuracy: leave one of them out")
    given["metric"] = metric or "loss"
    chosen = StudyChoices(
        **{name: read_field(fields[name], v, fields[name].flag) for name, v in given.items()}
    )
    for name in ("uniform_delay", "tune_steps"):
        if chosen.budget is not None and getattr(chosen, name):
            flag = fields[name].flag
            raise UserError(f"{flag}: leave it out with --budget, which trains what decides")
    return chosen
