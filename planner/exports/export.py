"""A plan as files that another engine reads: which engines there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from ...profiles.errors import UserError
from ...profiles.files import new_folder, write_bytes
from ..plan import Plan
from .deepspeed import for_deepspeed
from .engines import EngineFiles
from .megatron import for_megatron
from .torch_pipelining import ModelFacts, for_torch
from .torchtitan import for_torchtitan

EngineName = Literal["torch", "torchtitan", "megatron", "deepspeed"]

_BY_NAMES: dict[EngineName, Callable[[Plan], EngineFiles]] = {
    "torchtitan": for_torchtitan,
    "megatron": for_megatron,
}
_BY_MODEL: dict[EngineName, Callable[[Plan, Callable[[Plan], ModelFacts]], EngineFiles]] = {
    "torch": for_torch,
    "deepspeed": for_deepspeed,
}
ENGINES: tuple[EngineName, ...] = get_args(EngineName)


def exported(plan: Plan, engine: EngineName, look: Callable[[Plan], ModelFacts]) -> EngineFiles:
    """The plan as an engine reads it.

    Args:
        look: looks at the plan's model, for an engine that goes by that.

    Raises:
        UserError: there is no such engine.
        PlanError: it can't express the plan; the message says what and why.
    """
    if engine in _BY_MODEL:
        return _BY_MODEL[engine](plan, look)
    if engine not in _BY_NAMES:
        raise UserError(f"{engine!r}: no engine that plans are written for; {', '.join(ENGINES)}")
    return _BY_NAMES[engine](plan)


def write_export(
    plan: Plan, engine: EngineName, folder: str | Path, look: Callable[[Plan], ModelFacts]
) -> tuple[list[str], list[str]]:
    """Write the files into a new folder; their paths, and notes on their use.

    Takes and raises as `exported`; FileError.
    """
    with new_folder(folder) as place:
        found = exported(plan, engine, look)
        for name, text in found.files.items():
            write_bytes(place / name, text.encode())
    paths = [str(Path(folder) / name) for name in found.files]
    return paths, [note.replace("{folder}", str(folder)) for note in found.notes]
