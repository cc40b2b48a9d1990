"""How a run is to be made: everything that isn't the plan's. Data only."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

FORMAT = "timeprest-run/1"


class OptimizerChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An optimizer named on the command line instead of the task's own."""

    name: str
    """sgd, adam or adamw."""
    lr: Annotated[float, Meta(gt=0)]
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0


class RunSettings(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="format",
    tag=FORMAT,
):
    """A run's settings; workers read them from the run directory."""

    task: str
    """Target of the task: `digits`, `file.py:task`."""
    epochs: Annotated[int, Meta(ge=1)] = 1
    steps: Annotated[int, Meta(ge=1)] | None = None
    """Mini-batches in all; where given, it ends the run instead of `epochs`."""
    optimizer: OptimizerChoice | None = None
    """None: the task's own."""
    seed: int = 0
    threads: Annotated[int, Meta(ge=1)] = 1
    evaluate: bool = True
    timeout_s: Annotated[float, Meta(gt=0)] = 60.0
    """Longest wait for a message, before the run is given up."""
    decay: str = "exponential"
    """σ of i-timeprest: exponential, inverse or linear in the version difference."""
    decay_rate: Annotated[float, Meta(ge=0)] = 1.0
    """λ, σ's parameter."""
    distances: bool = True
    """Measure how far apart the weights of forwards and backwards are (`staleness`)."""
    log_operations: bool = False
    """Write every operation with its weight version and times to operations/."""
