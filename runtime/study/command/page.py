"""The page of a study: curves, the Pareto front, overheads by length, which rates are stable."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from .... import __version__
from ....cli.pictures.html.page import page
from ....profiles.files import write_bytes
from ..figures.curves import end_value, points_of, smoothed
from ..figures.reckoning import ArmResult
from ..figures.results import StudyResults, results_of
from ..figures.study import Curve, Metric, Study, StudyArm
from .tables import ranked, target_text

_OWN = str(Path(__file__).with_name("study"))
SCRIPTS = ("base", "chart", _OWN, "main")
STYLES = ("page", _OWN)

_FIGURES: tuple[tuple[Metric, str], ...] = (
    ("loss", "Training loss"),
    ("test loss", "Test loss"),
    ("accuracy", "Test accuracy"),
)


def study_page(study: Study, path: str | Path) -> None:
    """Write the page. Raises FileError."""
    target = study.question.profile.target
    data = {
        "title": f"{target}: which system trains it first",
        "made_by": {"timeprest": __version__},
        "study": study_part(study, results_of(study)),
    }
    write_bytes(path, page(data, SCRIPTS, STYLES).encode("utf-8"))


def study_part(study: Study, results: StudyResults) -> dict[str, Any]:
    """What the page's script draws, as JSON holds it.

    Arms and plans have numbers, by which they are coloured: an arm that is a plan's has that
    plan's.
    """
    asked = study.question
    plans = ranked(study, results)
    number = {plan.name: k + 1 for k, plan in enumerate(plans)}
    periods = {plan.name: plan.period_s for each in study.dropped for plan in each.plans}
    arms = []
    more = len(plans) + 1
    for k, arm in enumerate(study.arms):
        index = 0 if not k else number.get(arm.name, more)
        more += index == more
        arms.append(_arm_part(study, arm, results.arm(arm.name), index))
    return {
        "question": msgspec.to_builtins(asked),
        "target": {
            "level": results.target,
            "metric": asked.metric,
            "text": target_text(study, results),
        },
        "figures": [[metric, title] for metric, title in _FIGURES],
        "arms": arms,
        "plans": [
            {
                **msgspec.to_builtins(plan),
                **msgspec.to_builtins(results.plan(plan.name)),
                "index": number[plan.name],
                "plain_training": study.arm(plan.arm).kind == "plain",
            }
            for plan in plans
        ],
        "dropped": [
            {**msgspec.to_builtins(each), "period_s": periods[each.plan]}
            for each in results.dropped
        ],
        "recommendation": msgspec.to_builtins(results.recommendation),
    }


def _arm_part(study: Study, arm: StudyArm, found: ArmResult, index: int) -> dict[str, Any]:
    asked = study.question
    return {
        **msgspec.to_builtins(found),
        "name": arm.name,
        "kind": arm.kind,
        "rate": arm.rate,
        "warmup": arm.warmup,
        "at_edge": arm.at_edge,
        "index": index,
        "curves": {
            metric: mean_curve(arm.finals(), metric, asked.mini_batch) for metric, _ in _FIGURES
        },
        "rates": [
            {
                "rate": curve.rate,
                "warmup": curve.warmup,
                "end": end_value(curve, asked.metric),
                "diverged_at": curve.diverged_at,
                "chosen": curve.phase == "final",
            }
            for curve in sorted(arm.curves, key=lambda curve: (curve.warmup, curve.rate))
            if curve.seed == 0 and curve.phase != "rung"
        ],
    }


def mean_curve(curves: Sequence[Curve], metric: Metric, mini_batch: int) -> list[list[float]]:
    """Samples, mean over seeds, least and most, as far as all seeds come."""
    every = [smoothed(points_of(curve, metric, mini_batch)) for curve in curves]
    found = []
    for together in zip(*every, strict=False):
        values = [value for _, value in together]
        found.append([together[0][0], sum(values) / len(values), min(values), max(values)])
    return found
