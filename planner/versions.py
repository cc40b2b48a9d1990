"""Which weight version every forward and backward uses: the variants table, applied to an order.

The planner walks an order to count versions and bytes; the runtime walks the same order with
real weights. Version v of a stage is what v updates have made of it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .operations import BACKWARD, FORWARD, UPDATE, Op
from .variants import Variant


@dataclass
class _InFlight:
    """A mini-batch between its first forward and its backward's end, at one stage."""

    first_version: int
    forwards_left: int
    backwards_left: int
    version_of: dict[int | None, int] = field(default_factory=dict)


class VersionWalk:
    """Steps through one stage's operations and says which weights each one uses.

    Attributes:
        latest: the stage's current version: updates applied so far.
    """

    def __init__(self, variant: Variant, micro_batches: int) -> None:
        self.variant = variant
        self.micro_batches = micro_batches
        self.latest = 0
        self._flying: dict[int, _InFlight] = {}

    @property
    def in_flight(self) -> int:
        """Mini-batches whose forward has begun and whose backward isn't done."""
        return len(self._flying)

    def forward(self, op: Op) -> int:
        """Version that this forward uses."""
        flying = self._flying.get(op.mini_batch)
        if flying is None:
            backwards = self.micro_batches if self.variant.backward_unit == "micro" else 1
            flying = _InFlight(self.latest, self.micro_batches, backwards)
            self._flying[op.mini_batch] = flying
        pinned = self.variant.forward_weights == "first-micro-batch"
        version = flying.first_version if pinned else self.latest
        flying.forwards_left -= 1
        flying.version_of[op.micro_batch] = version
        return version

    def backward(self, op: Op) -> int:
        """Version that this backward uses; the version its forward used: `forward_version`."""
        flying = self._flying[op.mini_batch]
        flying.backwards_left -= 1
        if self.variant.backward_weights == "latest":
            return self.latest
        return self.forward_version(op)

    def forward_version(self, op: Op) -> int:
        """Version that the forward used; the oldest, for a backward of several micro-batches."""
        version_of = self._flying[op.mini_batch].version_of
        if op.micro_batch is not None:
            return version_of[op.micro_batch]
        return min(version_of.values())

    def finish(self, op: Op) -> None:
        """The backward is done; after a mini-batch's last one, it is no longer in flight."""
        if not self._flying[op.mini_batch].backwards_left:
            del self._flying[op.mini_batch]

    def update(self) -> int:
        """The optimizer steps. Returns the new latest version."""
        self.latest += 1
        return self.latest

    def needed(self) -> set[int]:
        """Versions that some operation still to come will use, besides the latest ones to come."""
        versions = set()
        for flying in self._flying.values():
            if self.variant.forward_weights == "first-micro-batch" and flying.forwards_left:
                versions.add(flying.first_version)
            if self.variant.backward_weights == "forward":
                versions.update(flying.version_of.values())
        return versions

    def held(self) -> int:
        """Weight versions held now: the latest, and the older ones still needed."""
        return len(self.needed() | {self.latest})


@dataclass(frozen=True)
class VersionUse:
    """What a stage's operations use.

    Attributes:
        versions: per operation of the order; for an update, the version it makes.
        most_held: weight versions held at once.
        differences: per backward, in order: its version less the one its forward used.
    """

    versions: tuple[int, ...]
    most_held: int
    differences: tuple[int, ...]


def version_use(variant: Variant, micro_batches: int, ops: Iterable[Op]) -> VersionUse:
    """Walk one stage's operations."""
    walk = VersionWalk(variant, micro_batches)
    versions, differences, most_held = [], [], 1
    for op in ops:
        if op.kind == FORWARD:
            versions.append(walk.forward(op))
        elif op.kind == BACKWARD:
            used = walk.backward(op)
            versions.append(used)
            differences.append(used - walk.forward_version(op))
            walk.finish(op)
        else:
            assert op.kind == UPDATE
            versions.append(walk.update())
        most_held = max(most_held, walk.held())
    return VersionUse(tuple(versions), most_held, tuple(differences))
