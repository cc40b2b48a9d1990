"""A plan as files that another engine reads: which engines there are."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from ...profiles import plugins
from ...profiles.errors import UserError
from ...profiles.files import new_folder, write_bytes
from ..plan import Plan
from ..search.request import loaded
from .engines import EngineFiles
from .torch_pipelining import ModelFacts


def exported(plan: Plan, engine: str, look: Callable[[Plan], ModelFacts]) -> EngineFiles:
    """The plan as an engine reads it.

    Args:
        look: looks at the plan's model, for an engine that goes by that.

    Raises:
        UserError: there is no such engine.
        PlanError: it can't express the plan; the message says what and why.
        PluginError: a plugin gives something else than files.
    """
    known = plugins.names("engines")
    if engine not in known:
        raise UserError(f"{engine!r}: no engine that plans are written for; {', '.join(known)}")
    found: EngineFiles = plugins.make("engines", engine, plan, look, gives=EngineFiles)
    return found


def write_export(plan: Plan, engine: str, folder: str | Path) -> tuple[list[str], list[str]]:
    """Write the files into a new folder; their paths, and notes on their use.

    Raises as `exported`, and FileError.
    """
    with new_folder(folder) as place:
        found = exported(plan, engine, _look)
        for name, text in found.files.items():
            write_bytes(place / name, text.encode())
    paths = [str(Path(folder) / name) for name in found.files]
    return paths, [note.replace("{folder}", shlex.quote(str(folder))) for note in found.notes]


def _look(plan: Plan) -> ModelFacts:
    from .facts import facts_of  # loads torch

    return facts_of(plan)


def export(plan: Plan | str | Path, engine: str, folder: str | Path) -> list[Path]:
    """Write a plan as another engine reads it (`tp-plan export`).

    Args:
        engine: "torch", "torchtitan", "megatron" or "deepspeed".
        folder: a new one.

    Returns the files.

    Raises:
        PlanError: the engine can't express the plan; the message says what and why.
        TargetError, TraceError: of "torch", which looks at the model: it can't be built or traced.
        FileError: something stands at the folder's place, or it can't be written.
    """
    written, _ = write_export(loaded(plan, Plan, "plan"), engine, folder)
    return [Path(path) for path in written]
