"""From a plan's layers to what engines cut between: blocks, as a model's own lists have them.

A layer's name is a path of modules, ``transformer.h.3.attn.qkv``. The first number on it is a place
in a list of the model's (``transformer.h``), and the path up to there names a block. Modules beside
the lists are blocks of their own: ``transformer.ln_f`` where ``transformer`` has a list, and
``head`` for ``head.proj`` where ``head`` has none.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import Plan
from .engines import Engine


def list_of(name: str) -> tuple[str, int] | None:
    """The list that a layer's block is in, and its place there; None: it is in none."""
    parts = name.split(".")
    for k, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:k]), int(part)
    return None


def blocks_of(names: Sequence[str]) -> list[str]:
    """The block of each layer."""
    # A module's second call, or one called as something else is: ``output@2`` is ``output``.
    names = [name.split("@")[0] for name in names]
    above = {""}
    for name in names:
        found = list_of(name)
        if found is not None:
            parts = found[0].split(".")
            above.update(".".join(parts[: k + 1]) for k in range(len(parts) - 1))
    return [_block_of(name, above) for name in names]


def _block_of(name: str, above: set[str]) -> str:
    """Args: above: modules that lists are below of."""
    found = list_of(name)
    if found is not None:
        return ".".join(part for part in (found[0], str(found[1])) if part)
    parts = name.split(".")
    k = next((k for k in range(1, len(parts)) if ".".join(parts[:k]) not in above), len(parts))
    return ".".join(parts[:k])


def blocks_by_stage(engine: Engine, plan: Plan) -> list[list[str]]:
    """Per stage, its blocks as they come.

    Raises PlanError where a block is on two stages, or a list's blocks aren't in its sequence.
    """
    of_layer = iter(blocks_of([name for stage in plan.stages for name in stage.nodes]))
    found: list[list[str]] = []
    stage_of: dict[str, int] = {}
    for s, stage in enumerate(plan.stages):
        mine: list[str] = []
        for name in stage.nodes:
            block = next(of_layer)
            other = stage_of.setdefault(block, s)
            if other != s:
                raise engine.refuse(
                    f"{block!r} is cut inside: its layer {name!r} is on stage {s}, others on stage "
                    f"{other}, and there cuts are between such blocks; profile with --granularity "
                    f"'{_pattern(block)}' to plan those"
                )
            if block not in mine:
                mine.append(block)
        found.append(mine)
    last: dict[str, tuple[int, str]] = {}
    for s, mine in enumerate(found):
        for block in mine:
            place = list_of(block)
            if place is None:
                continue
            before, other_block = last.get(place[0], (-1, ""))
            if place[1] < before and stage_of[other_block] < s:
                raise engine.refuse(
                    f"{block!r} is on stage {s}, behind {other_block!r} of stage "
                    f"{stage_of[other_block]}, and there lists run in their sequence"
                )
            if place[1] > before:
                last[place[0]] = (place[1], block)
    return found


def _pattern(block: str) -> str:
    """The name pattern of blocks like this one."""
    place = list_of(block)
    return block if place is None else ".".join(part for part in (place[0], "*") if part)
