"""Which weight version every forward and backward uses: the variants table, applied to a schedule.

The planner walks a schedule to count versions and bytes; the runtime walks the same schedule with
real weights. Version v of a stage is what v updates have made of it there. Where weights are
predicted, or lie between the forward's and the latest, the latest counts as the version used.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten

from ...profiles.errors import PlanError, ScheduleError
from ...profiles.profile import Profile
from .operations import FORWARD, UPDATE, Op
from .variants import Variant


def check_versions(profile: Profile, variant: Variant) -> None:
    """Raise PlanError where a backward would take other weights than the system prescribes."""
    if profile.unversioned and not variant.flushes:
        names = shorten(", ".join(map(repr, profile.unversioned)), 120, placeholder=" …")
        raise PlanError(
            f"profile: a backward of {profile.target} takes {names} as memory has it then, and "
            f"{variant.name} updates between a forward and its backward: plan with a system that "
            "flushes (--variant gpipe), or have the backward take what is saved by "
            "ctx.save_for_backward and profile again"
        )


@dataclass
class _InFlight:
    """A mini-batch between its first forward and its backward's end, at one stage."""

    backwards_left: int
    version_of: dict[int, int] = field(default_factory=dict)
    versions: set[int] = field(default_factory=set)


class VersionWalk:
    """Steps through one stage's operations and says which weights each one uses.

    Attributes:
        latest: the stage's current version: updates applied so far.
        beside: walks of other stages over the same weights.
    """

    def __init__(
        self,
        variant: Variant,
        micro_batches: int,
        entries: Sequence[int] = (),
        *,
        recompute: bool = False,
        latest: int = 0,
    ) -> None:
        """
        Args:
            entries: per micro-batch of all mini-batches, the version of stage 0 that its forwards
                use (`entry_versions`), in systems with vertical synchronisation.
            recompute: forwards are done again before the backward, on the weights they used,
                which are kept for that.
            latest: the version at the start; mini-batches count from 0 whatever it is.
        """
        self.variant = variant
        self.micro_batches = micro_batches
        self.latest = latest
        self._keeps = variant.stashes or recompute
        self._entries = entries
        # Entered versions, each once: they never fall.
        self._entered = sorted(set(entries)) if variant.synchronises else []
        self._forwards = 0
        self._backwards = micro_batches if variant.backward_unit == "micro" else 1
        self._flying: dict[int, _InFlight] = {}
        self.beside: tuple[VersionWalk, ...] = ()

    @property
    def in_flight(self) -> int:
        """Mini-batches whose forward has begun and whose backward isn't done."""
        return len(self._flying)

    def forward(self, op: Op, count: int = 1) -> int:
        """Version that this forward uses, and those of the next micro-batches if it is one of
        several in a row that use the same one (`alike`)."""
        flying = self._flying.get(op.mini_batch)
        if flying is None:
            flying = self._flying[op.mini_batch] = _InFlight(self._backwards)
        version = self._next_version(op)
        flying.versions.add(version)
        self._forwards += count
        if self._backwards == 1:
            # The backward takes all micro-batches: which versions there are is all it asks.
            count = 1
        for i in range(count):
            flying.version_of[(op.micro_batch or 0) + i] = version
        return version

    def alike(self, count: int) -> int:
        """How many of the next `count` forwards use the version that the first of them uses."""
        if not self.variant.synchronises:
            return count
        first = min(self._entries[self._forwards], self.latest)
        last = self._forwards + count
        if self._entries[last - 1] == first or first == self.latest:
            return count
        return bisect_right(self._entries, first, self._forwards, last) - self._forwards

    def _next_version(self, op: Op) -> int:
        if not self.variant.synchronises:
            return self.latest
        at = op.mini_batch * self.micro_batches + (op.micro_batch or 0)
        if at >= len(self._entries):
            raise ScheduleError(f"mini-batch {op.mini_batch}: its version at stage 0 isn't known")
        # Where no gradient goes back to stage 0, it may be ahead of a later stage.
        return min(self._entries[at], self.latest)

    def backward(self, op: Op) -> int:
        """Version that this backward uses; where it uses several, the oldest of them. The version
        its forward used: `forward_version`."""
        flying = self._flying[op.mini_batch]
        flying.backwards_left -= 1
        if self.variant.backward_weights == "forward":
            return self.forward_version(op)
        return self.latest

    def forward_version(self, op: Op) -> int:
        """Version that the forward used; the oldest, for a backward of several micro-batches."""
        if op.micro_batch is not None:
            return self._flying[op.mini_batch].version_of[op.micro_batch]
        return min(self._flying[op.mini_batch].versions)

    def version_of(self, mini_batch: int, micro_batch: int) -> int:
        """Version that the forward of a micro-batch in flight used."""
        return self._flying[mini_batch].version_of[micro_batch]

    def last_use(self, op: Op, version: int) -> bool:
        """Whether nothing needs a version any more once this backward, which was taken, is done."""
        return (
            version not in self._to_enter()
            and not any(
                version in flying.versions
                for mini_batch, flying in self._flying.items()
                # Other micro-batches of its own may have used it, too.
                if mini_batch != op.mini_batch or flying.backwards_left
            )
            and not any(version in walk.needed() for walk in self.beside)
        )

    def mixes_aside(self, op: Op) -> bool:
        """Whether a backward that mixes its forward's weights with the latest needs memory for
        that: where something else needs the forward's version, too."""
        used = self._flying[op.mini_batch].versions
        return any(v != self.latest and not self.last_use(op, v) for v in used)

    def finish(self, op: Op) -> None:
        """The backward is done; after a mini-batch's last one, it is no longer in flight."""
        if not self._flying[op.mini_batch].backwards_left:
            del self._flying[op.mini_batch]

    def update(self) -> int:
        """The optimizer steps. Returns the new latest version."""
        self.latest += 1
        return self.latest

    def _to_enter(self) -> Sequence[int]:
        """Versions up to the latest that forwards still to come will use."""
        if self._forwards >= len(self._entries) or not self._entered:
            return ()
        first = bisect_left(self._entered, self._entries[self._forwards])
        return self._entered[first : bisect_right(self._entered, self.latest)]

    def needed(self) -> set[int]:
        """Versions that some operation still to come will use, besides the latest ones to come."""
        versions = set(self._to_enter())
        if self._keeps:
            for flying in self._flying.values():
                versions |= flying.versions
        return versions

    def held(self) -> int:
        """Weight versions held now: the latest, and the older ones still needed."""
        if not self._keeps:
            older = self._to_enter()
            return len(older) + (not older or older[-1] != self.latest)
        return len(self.needed() | {self.latest})


class SharedWalk:
    """The walks over a parameter that several stages of one device use, a walk for each of them.

    It is updated by the first of the stages, whose backward of a mini-batch comes last, and its
    versions count those updates. With these, every stage's operations follow the same rules as for
    weights of the stage's own.

    Attributes:
        walks: by stage.
    """

    def __init__(self, walks: Mapping[int, VersionWalk]) -> None:
        self.walks = dict(walks)
        for s, walk in self.walks.items():
            walk.beside = tuple(other for t, other in self.walks.items() if t != s)

    @property
    def latest(self) -> int:
        """Updates so far."""
        return next(iter(self.walks.values())).latest

    def update(self) -> int:
        """The parameter is updated. Returns its new latest version."""
        return max(walk.update() for walk in self.walks.values())

    def needed(self) -> set[int]:
        """Versions that some stage's operation still to come will use (`VersionWalk.needed`)."""
        return set[int]().union(*(walk.needed() for walk in self.walks.values()))

    def held(self) -> int:
        """Versions held now."""
        return len(self.needed() | {self.latest})


def entry_versions(
    variant: Variant, micro_batches: int, ops: Iterable[Op], latest: int = 0
) -> tuple[int, ...]:
    """Per micro-batch of all mini-batches, the version that its forwards use at every stage.

    That is the version of stage 0 when it entered there, or when its mini-batch's first one did.
    Empty for systems without vertical synchronisation.

    Args:
        ops: stage 0's.
        latest: its version before them.
    """
    if not variant.synchronises:
        return ()
    by_mini_batch = variant.forward_weights == "mini-batch-entry"
    found: list[int] = []
    updates = latest
    for op in ops:
        if op.kind == UPDATE:
            updates += 1
        elif op.kind == FORWARD:
            found.append(found[-1] if by_mini_batch and len(found) % micro_batches else updates)
    return tuple(found)
