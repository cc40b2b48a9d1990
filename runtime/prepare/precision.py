"""Mixed precision: what forwards run under."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ...planner.plan import Plan
from ...profiles.errors import PlanError
from ..settings import RunSettings


def autocast_of(plan: Plan, settings: RunSettings) -> torch.dtype | None:
    """The dtype of torch.autocast in a run; None: off.

    Raises PlanError for a plan profiled under float16, if that is what the run would take.
    """
    if settings.autocast == "off":
        return None
    if settings.autocast == "bfloat16":
        return torch.bfloat16
    profiled = plan.profile.autocast
    if profiled is None:
        return None
    if profiled != "bfloat16":
        raise PlanError(
            f"plan: was made from a profile under autocast ({profiled}), which trains with scaled "
            "losses alone, and tp-run scales none: run with --autocast bf16 or off"
        )
    return torch.bfloat16


def forward_context(dtype: torch.dtype | None, device: str = "cpu") -> AbstractContextManager[Any]:
    """What a forward and its loss run under. `device`: the type of the one they run on."""
    if dtype is None:
        return nullcontext()
    # Its cache of cast weights may outlive an update where a caller has a context of its own.
    return torch.autocast(device, dtype, cache_enabled=False)
