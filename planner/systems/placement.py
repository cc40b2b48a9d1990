"""Placements: which device runs which stage.

    straight   each stage on a device of its own
    loop       stage s on device s mod D
    v          down the devices and back up: stage s on device s, then D − 1 … 0 again; the two
               stages at the bottom, on one device, may be one stage
    free       any other

Devices are numbered as stages come to them, replicas' devices as one. Index letters: s stage, S
stages, D devices.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from ...profiles.errors import PlanError
from .variants import Variant

Pattern = Literal["straight", "loop", "v", "free"]
PATTERNS: tuple[Pattern, ...] = ("straight", "loop", "v", "free")


def numbered_devices(devices: Sequence[Hashable]) -> tuple[int, ...]:
    """Per stage, the number of its device; empty where each stage has one of its own.

    Args:
        devices: per stage, what names its device, or its replicas' devices.
    """
    numbers: dict[Hashable, int] = {}
    found = tuple(numbers.setdefault(device, len(numbers)) for device in devices)
    return found if len(numbers) < len(found) else ()


def pattern_of(placement: Sequence[int], stages: int) -> Pattern:
    """The pattern of a placement.

    Args:
        placement: as `numbered_devices` gives it.
    """
    if not placement:
        return "straight"
    devices, found = max(placement) + 1, tuple(placement)
    for name in ("loop", "v"):
        if found in placements(name, stages, devices):
            return name
    return "free"


def placements(pattern: Pattern, stages: int, devices: int) -> list[tuple[int, ...]]:
    """The placements of so many stages on all of so many devices: none, one, or those of a V whose
    bottom is one stage or two."""
    down = tuple(range(devices))
    if pattern == "straight":
        return [()] if stages == devices else []
    if pattern == "loop":
        turns, rest = divmod(stages, devices)
        return [down * turns] if turns > 1 and not rest else []
    if pattern == "v":
        up = down[::-1]
        return [v for v in (down + up, down + up[1:]) if len(v) == stages > devices]
    return []


def check_placement(variant: Variant, placement: Sequence[int], stages: int) -> None:
    """Check that a system runs stages that are placed so.

    Args:
        placement: as `numbered_devices` gives it.

    Raises PlanError.
    """
    pattern = pattern_of(placement, stages)
    if variant.placement == "any" or stages == 1:
        return
    if variant.placement == "loop" and pattern != "loop":
        raise PlanError(
            f"stages: {variant.name} runs two or more stages on each device, stage s on device "
            f"s mod D; these are placed {pattern}"
        )
    if variant.placement == "v" and (pattern != "v" or stages != 2 * (max(placement) + 1)):
        raise PlanError(
            f"stages: {variant.name} runs two stages on each device, down the devices and back up; "
            f"these {stages} are placed {pattern}"
        )
