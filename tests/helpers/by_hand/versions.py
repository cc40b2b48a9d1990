"""Which versions a stage's operations use, by the planner's walk, in a form that tests compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from timeprest.planner.systems.operations import BACKWARD, FORWARD, UPDATE, WEIGHT, Op
from timeprest.planner.systems.variants import Variant
from timeprest.planner.systems.versions import VersionWalk


@dataclass(frozen=True)
class VersionUse:
    """What a stage's operations use.

    Attributes:
        versions: per operation of the schedule; for an update, the version it makes; for a backward
            of micro-batches that each use their own, the oldest.
        most_held: weight versions held at once.
        differences: per backward, in order: its version less the one its forward used.
    """

    versions: tuple[int, ...]
    most_held: int
    differences: tuple[int, ...]


def version_use(
    variant: Variant,
    micro_batches: int,
    ops: Iterable[Op],
    entries: Sequence[int] = (),
    *,
    recompute: bool = False,
) -> VersionUse:
    """Walk one stage's operations. `entries`, `recompute`: as for `VersionWalk`."""
    walk = VersionWalk(variant, micro_batches, entries, recompute=recompute)
    versions, differences, most_held = [], [], 1
    for op in ops:
        if op.kind == FORWARD:
            versions.append(walk.forward(op))
        elif op.kind == BACKWARD:
            used = walk.backward(op)
            versions.append(used)
            differences.append(used - walk.forward_version(op))
            walk.finish(op)
        elif op.kind == WEIGHT:
            versions.append(walk.latest)
        else:
            assert op.kind == UPDATE
            versions.append(walk.update())
        most_held = max(most_held, walk.held())
    return VersionUse(tuple(versions), most_held, tuple(differences))
