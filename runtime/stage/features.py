"""The list of hooks that a system or a setting adds to a stage's passes and updates."""

from __future__ import annotations

from collections.abc import Callable

from ...planner.systems.hooks import HookChain, StageHooks
from ..weights.delays import rescheduling_of
from ..weights.drift import drift_of
from ..weights.hooked import HookedStage
from ..weights.in_place import PaddingAlone
from ..weights.outside import outside_rules
from ..weights.prediction import predictor_of
from ..weights.staleness import StalenessMeter, meter_of
from .batch_norm import deferred_of

FEATURES: tuple[Callable[[HookedStage], StageHooks | None], ...] = (
    PaddingAlone,
    deferred_of,
    predictor_of,
    drift_of,
    outside_rules,
    rescheduling_of,
)
"""Each makes a stage's hooks, as its system and the run's settings say; None: it has no part in
the stage. They are called in this order, behind those that every stage has."""


def hooks_of(stage: HookedStage) -> tuple[StalenessMeter, HookChain]:
    """What measures a stage's staleness, and all its hooks."""
    meter, made = meter_of(stage), [make(stage) for make in FEATURES]
    return meter, HookChain([meter, stage.ties, *(h for h in made if h is not None)])
