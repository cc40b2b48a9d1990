"""Trying a task's hooks before a run: what they would end it with is said before it begins."""

from __future__ import annotations

import warnings

from ..profiles.errors import TaskWarning
from ..profiles.target import misspelt_hooks
from .devices import device_kind
from .optimizers import make_optimizer
from .prepare import Prepared


def check_optimizers(prepared: Prepared) -> None:
    """Make every stage's optimizer once, so that a wrong one is refused before the run has a
    directory.

    Not for runs on GPUs, whose optimizers may want their parameters there: the workers find out.

    Raises TargetError naming the stage and the hook.
    """
    if device_kind(prepared.plan, prepared.settings) != "cpu":
        return
    for s, piece in enumerate(prepared.pieces):
        names = prepared.names
        named = [(names.get(name, name), p) for name, p in piece.module.named_parameters()]
        make_optimizer(prepared.task, prepared.settings, named, f"stage {s}")


def hook_warnings(prepared: Prepared) -> list[str]:
    """What in the task's hooks may be meant otherwise than it is taken."""
    return misspelt_hooks(prepared.task)


def warn_of_hooks(prepared: Prepared) -> None:
    """Say so, before a run."""
    for line in hook_warnings(prepared):
        warnings.warn(line, TaskWarning, stacklevel=2)
