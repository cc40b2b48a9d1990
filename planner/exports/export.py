"""A plan as files that another engine reads: which engines there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ...profiles.errors import UserError
from ..plan import Plan
from .deepspeed import for_deepspeed
from .engines import EngineFiles
from .megatron import for_megatron
from .torch_pipelining import ModelFacts, for_torch
from .torchtitan import for_torchtitan

EngineName = Literal["torch", "torchtitan", "megatron", "deepspeed"]

TORCH: EngineName = "torch"
"""The one whose files follow from the model too."""

_EXPORTS: dict[EngineName, Callable[[Plan], EngineFiles]] = {
    "torchtitan": for_torchtitan,
    "megatron": for_megatron,
    "deepspeed": for_deepspeed,
}
ENGINES: tuple[EngineName, ...] = (TORCH, *_EXPORTS)


def exported(plan: Plan, engine: EngineName, look: Callable[[Plan], ModelFacts]) -> EngineFiles:
    """The plan as an engine reads it.

    Args:
        look: looks at the plan's model, for an engine that is given the model itself.

    Raises:
        UserError: there is no such engine.
        PlanError: it can't express the plan; the message says what and why.
    """
    if engine == TORCH:
        return for_torch(plan, look)
    if engine not in _EXPORTS:
        raise UserError(f"{engine!r}: no engine that plans are written for; {', '.join(ENGINES)}")
    return _EXPORTS[engine](plan)
