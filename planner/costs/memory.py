"""Peak memory of a stage in bytes, by walking its schedule operation by operation.

A replica holds parameters, older versions that are still needed, gradients from a mini-batch's
first backward to its update (from its first weight part, where backwards are split), optimizer
state, what its micro-batches in flight keep, messages, and while it works the largest working set
of a layer. What is in flight when depends on the schedule alone (`Holdings`); how many bytes that
is, on the stage's layers (`StageBytes`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from ...profiles.files import TotalBytes
from ...profiles.profile import Profile
from ..cluster.cluster import Device
from ..systems.operations import BACKWARD, FORWARD, UPDATE, WEIGHT, B, F, Op, U, in_rows
from ..systems.variants import Variant
from ..systems.versions import VersionWalk
from .stage_costs import RECEIVES_AHEAD, Transfer


class MemoryByKind(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """A stage's bytes at its peak, by kind: weights, versions, gradients, activations and so on."""

    weights_bytes: TotalBytes
    """Parameters and buffers."""
    versions_bytes: TotalBytes
    """Older weight versions that are still needed, and copies that predictions or corrections are
    made in, and of."""
    gradients_bytes: TotalBytes
    optimizer_bytes: TotalBytes
    activations_bytes: TotalBytes
    """Saved for backward, of all micro-batches in flight; and what weight parts wait with."""
    boundary_bytes: TotalBytes
    """Received and awaiting use, or awaiting their sending."""
    workspace_bytes: TotalBytes
    engine_bytes: TotalBytes = 0
    """What another engine keeps besides: copies of parameters, buffers of messages. None with
    tp-run."""

    @property
    def total(self) -> int:
        return sum(msgspec.structs.astuple(self))


class Moment(NamedTuple):
    """Counts of what a replica holds during an operation or between two: versions, micro-batches.

    Attributes:
        kind: of the operation; None between two.
        versions: weight versions.
        gradients: whether there are any; of `TiedWalk`, for how many updates.
        kept: micro-batches whose activations are there: in flight, their weight parts included.
        postponed: how many of them wait for their weight part alone.
        scratch: copies that a backward mixes weights in.
    """

    kind: str | None
    versions: int
    gradients: int
    kept: int
    postponed: int = 0
    scratch: int = 0


class HoldingsWalk:
    """Counts what a stage's replicas hold (weight versions, gradients, micro-batches), operation by
    operation.

    Attributes:
        versions: weight versions held after the last one.
        gradients: whether there are gradients then.
        kept: per replica, micro-batches in flight then, those that wait for their weight parts
            included.
        postponed: per replica, how many do.
        delays: per backward so far, the latest version then, to which its gradient is applied, less
            the one its forward used.
    """

    def __init__(
        self,
        variant: Variant,
        micro_batches: int,
        replicas: int,
        entries: Sequence[int] = (),
        *,
        recompute: bool = False,
        update_every: int = 1,
    ) -> None:
        # Replicas that share every mini-batch all hold the same.
        self._r = r = 1 if variant.whole_mini_batches else replicas
        self._last = micro_batches - 1
        self._share = micro_batches // r
        self._walk = VersionWalk(variant, micro_batches, entries, recompute=recompute)
        self._update_every = update_every
        self.versions = 1
        self.gradients = False
        self._split = variant.split_backward
        self._synchronises = variant.synchronises
        self._mixes = variant.backward_weights == "intermediate"
        self.kept = [0] * r
        self.postponed = [0] * r
        self.delays: list[int] = []

    def step(self, op: Op, count: int = 1) -> Moment:
        """Take an operation. Returns what the replica that holds most has meanwhile.

        `count`: that many forwards in a row, `alike`, the mini-batch's last not among them unless
        it is the only one. Returns the fullest moment then.
        """
        kind, b, i = op
        if kind == FORWARD:
            return self._forward(op, i or 0, count)
        if kind == BACKWARD:
            return self._backward(op, i)
        if kind == WEIGHT:
            return self._weight(i or 0)
        if (b + 1) % self._update_every:
            # Gradients are kept for a later update.
            return self.between()
        self._walk.update()
        self.versions = self._walk.held()
        meanwhile = self.between()._replace(kind=UPDATE)
        self.gradients = False
        return meanwhile

    def alike(self, count: int) -> int:
        """How many of the next `count` forwards may be taken in one step."""
        return self._walk.alike(count)

    def _forward(self, op: Op, i: int, count: int) -> Moment:
        versions = self.versions
        self._walk.forward(op, count)
        if self._synchronises or i == self._last:
            # What no forward will use any more goes after the last one that did.
            self.versions = self._walk.held()
        fullest = (0, 0)
        for k in range(i, i + min(count, self._r)):
            j = k % self._r
            self.kept[j] += -(-(i + count - k) // self._r)
            fullest = max(fullest, (self.kept[j], self.postponed[j]))
        return Moment(FORWARD, versions, self.gradients, *fullest)

    def _backward(self, op: Op, i: int | None) -> Moment:
        walk = self._walk
        walk.backward(op)
        self.delays.append(walk.latest - walk.forward_version(op))
        scratch = int(self._mixes and walk.mixes_aside(op))
        walk.finish(op)
        self.gradients = self.gradients or not self._split
        if i is None:
            meanwhile = Moment(BACKWARD, self.versions, True, max(self.kept), scratch=scratch)
            self.kept = [kept - self._share for kept in self.kept]
        else:
            j = i % self._r
            self.postponed[j] += self._split
            meanwhile = self._meanwhile(BACKWARD, j)
            self.kept[j] -= not self._split
        if i is None or i == self._last:
            self.versions = walk.held()
        return meanwhile

    def _weight(self, i: int) -> Moment:
        j = i % self._r
        self.gradients = True
        meanwhile = self._meanwhile(WEIGHT, j)
        self.kept[j] -= 1
        self.postponed[j] -= 1
        return meanwhile

    def _meanwhile(self, kind: str, j: int) -> Moment:
        return Moment(kind, self.versions, self.gradients, self.kept[j], self.postponed[j])

    def between(self) -> Moment:
        """What the replica that holds most has after the last operation."""
        kept, postponed = max(zip(self.kept, self.postponed, strict=True))
        return Moment(None, self.versions, self.gradients, kept, postponed)


@dataclass(frozen=True)
class Holdings:
    """The counts of all moments of a stage's schedule, whatever its layers are.

    Attributes:
        moments: all different ones during operations; of those that differ only in what is kept,
            the fullest.
        delays: per backward, the latest version then less the one its forward used.
    """

    moments: tuple[Moment, ...]
    delays: tuple[int, ...]

    @property
    def micro_batches_kept(self) -> int:
        """Most micro-batches whose activations a replica keeps at once."""
        return max(moment.kept for moment in self.moments)

    @property
    def versions_held(self) -> int:
        """Most weight versions held at once."""
        return max(moment.versions for moment in self.moments)

    def filled(self, kept: int) -> Holdings:
        """The same with so many micro-batches in flight at the least."""
        moments = (m._replace(kept=max(m.kept, kept)) for m in self.moments)
        return Holdings(tuple(moments), self.delays)


def holdings(
    variant: Variant,
    micro_batches: int,
    replicas: int,
    kinds: bytes,
    entries: Sequence[int] = (),
    *,
    recompute: bool = False,
    update_every: int = 1,
) -> Holdings:
    """The counts that a stage's schedule holds, from one walk to its steady state.

    Args:
        kinds: of the operations (`operations.numbered`).
        entries, recompute: as for `versions.VersionWalk`.
    """
    micro, n = variant.backward_unit == "micro", micro_batches
    if micro and not variant.split_backward:
        kinds, n, entries = _without_repeats(kinds, micro_batches, replicas, entries)
    walk = HoldingsWalk(
        variant, n, replicas, entries, recompute=recompute, update_every=update_every
    )
    fullest: dict[tuple[object, ...], Moment] = {}

    def note(moment: Moment) -> None:
        key = (*moment[:3], moment.postponed, moment.scratch)
        known = fullest.get(key)
        if known is None or moment.kept > known.kept:
            fullest[key] = moment

    for op, count in in_rows(kinds, n, micro=micro):
        first = op.micro_batch or 0
        while op.kind == FORWARD and (alike := walk.alike(count)) < count:
            note(walk.step(op._replace(micro_batch=first), alike))
            first, count = first + alike, count - alike
        note(walk.step(op if op.kind != FORWARD else op._replace(micro_batch=first), count))
    return Holdings(tuple(fullest.values()), _repeated(walk.delays, n, micro_batches))


_ROUNDS = 3
"""Of all replicas, with as many micro-batches in flight throughout, before and after what is left
out: in one of them each has had both operations of each kind of moment."""


def _without_repeats(
    kinds: bytes, micro_batches: int, replicas: int, entries: Sequence[int]
) -> tuple[bytes, int, Sequence[int]]:
    """A stage's operations in mini-batches of fewer micro-batches, how many these have, and the
    versions that they enter with.

    Where a forward and a backward take turns for long, what the replicas hold repeats after each
    has had one of both: weight versions change at updates alone, here and at stage 0. Left out are
    as many turns in every mini-batch. Where some mini-batch has no such row, or the last one is
    broken off, all is as it was.
    """
    whole, steps = (kinds, micro_batches, entries), np.array([1, -1, 0, 0])
    ahead = int(np.cumsum(steps[np.frombuffer(kinds, dtype=np.uint8)]).max(initial=0))
    # Of a mini-batch's micro-batches, how many have entered when the last change comes.
    changed = 1 + np.flatnonzero(np.diff(entries))
    ahead = max(ahead, int((changed % micro_batches).max(initial=0)))
    n = replicas * (-(-ahead // replicas) + _ROUNDS)
    turns = micro_batches - n
    if turns <= 0:
        return whole
    *parts, rest = kinds.split(U)
    row, found = (F + B) * (turns + 1), []
    for part in parts:
        at = part.find(row)
        if at < 0 or part.count(B) != micro_batches:
            return whole
        found.append(part[:at] + part[at + 2 * turns :])
    if rest:
        return whole
    firsts = range(0, len(entries), micro_batches)
    fewer = tuple(version for first in firsts for version in entries[first : first + n])
    return U.join([*found, b""]), n, fewer


def _repeated(delays: Sequence[int], n: int, micro_batches: int) -> tuple[int, ...]:
    """Those of mini-batches with so many micro-batches, from those with n, whose last ones repeat
    what was left out."""
    found: list[int] = []
    for first in range(0, len(delays), n):
        found += delays[first : first + n]
        found += [found[-1]] * (micro_batches - n)
    return tuple(found)


WORKING = (FORWARD, BACKWARD, WEIGHT)
"""Operations that layers work in."""


class StageBytes(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    rename=lambda name: f"{name}_bytes",
):
    """What there is to hold on each replica of a stage. In files, names end in ``_bytes``."""

    parameters: TotalBytes
    buffers: TotalBytes
    optimizer: TotalBytes
    scratch: TotalBytes
    """Of copies of the weights that predictions or corrections are made in, and of."""
    kept: TotalBytes
    """Of each micro-batch in flight."""
    rebuilt: TotalBytes
    """Activations that a backward computes again first."""
    messages: TotalBytes
    """Held all the time: posted receives, and what awaits its sending."""
    gradients: TotalBytes
    """Messages that a backward has at hand."""
    workspace: TotalBytes
    """Largest working set of any layer."""
    postponed: TotalBytes = 0
    """Gradients that wait with each micro-batch for its weight part."""
    stepping: TotalBytes | msgspec.UnsetType = msgspec.UNSET
    """What an optimizer's step takes besides, while it runs."""
    engine: TotalBytes | msgspec.UnsetType = msgspec.UNSET
    """What another engine keeps besides, all the time (`MemoryByKind.engine_bytes`)."""

    def working(self, kind: str | None) -> int:
        """Of an operation, what it takes while it runs, and a run can't see."""
        if kind in WORKING:
            return self.workspace
        return (self.stepping or 0) if kind == UPDATE else 0

    def total(self, moment: Moment) -> int:
        """Bytes held at a moment."""
        kind, versions, gradients, kept, postponed, scratch = moment
        total = self.parameters * (versions + gradients + scratch) + self.buffers + self.optimizer
        total += self.scratch + kept * self.kept + postponed * self.postponed + self.messages
        total += self.engine or 0
        if kind == BACKWARD:
            total += self.rebuilt + self.gradients
        return total + self.working(kind)

    def by_kind(self, moment: Moment) -> MemoryByKind:
        """The same, by kind."""
        kind, versions, gradients, kept, postponed, scratch = moment
        backward = kind == BACKWARD
        return MemoryByKind(
            weights_bytes=self.parameters + self.buffers,
            versions_bytes=(versions - 1 + scratch) * self.parameters + self.scratch,
            gradients_bytes=self.parameters * gradients,
            optimizer_bytes=self.optimizer,
            activations_bytes=(
                kept * self.kept + postponed * self.postponed + (self.rebuilt if backward else 0)
            ),
            boundary_bytes=self.messages + (self.gradients if backward else 0),
            workspace_bytes=self.working(kind),
            engine_bytes=self.engine or 0,
        )

    def peak(self, found: Holdings) -> MemoryByKind:
        """The most there is to hold at once."""
        return self.by_kind(max(found.moments, key=self.total))

    def accounted_peak(self, found: Holdings) -> MemoryByKind:
        """The same without working sets, which a run can't see."""
        return msgspec.structs.replace(self, workspace=0, stepping=msgspec.UNSET).peak(found)


P = TypeVar("P", bound=msgspec.Struct)
"""What is predicted of a stage or a device."""


def with_reserved(found: P, profile: Profile) -> P:
    """A process's bytes with what it takes of its GPU besides tensors, counted as working set,
    which a run's account doesn't see either."""
    if profile.reserved_bytes is msgspec.UNSET:
        return found
    memory: MemoryByKind = found.memory  # type: ignore[attr-defined]
    more = profile.reserved_bytes + round((profile.reserved_share or 0.0) * memory.total)
    memory = msgspec.structs.replace(memory, workspace_bytes=memory.workspace_bytes + more)
    return msgspec.structs.replace(found, memory=memory, memory_bytes=memory.total)


def stepping_bytes(profile: Profile, parameter_bytes: int) -> int | msgspec.UnsetType:
    """Bytes that an optimizer's step over these parameters takes besides; absent if not
    measured."""
    factor = profile.optimizer.scratch_bytes_per_parameter_byte
    return factor if factor is msgspec.UNSET else round(parameter_bytes * factor)


def room_bytes(device: Device, profile: Profile) -> int | None:
    """Bytes that stages' tensors may take of a device: its memory less headroom and less what a
    process was measured to take besides tensors. None: no limit."""
    usable = device.usable_bytes
    if usable is None or profile.reserved_bytes is msgspec.UNSET:
        return usable
    left = usable - profile.reserved_bytes
    return max(int(left / (1.0 + (profile.reserved_share or 0.0))), 1)


def together(parts: Iterable[MemoryByKind]) -> MemoryByKind:
    """The sum of several stages' bytes, by kind."""
    sums = [sum(each) for each in zip(*map(msgspec.structs.astuple, parts), strict=True)]
    return MemoryByKind(**dict(zip(MemoryByKind.__struct_fields__, sums, strict=True)))


def boundary_buffers(
    stage: int,
    transfers: Sequence[Transfer],
    gradient_micro_batches: int,
    kept_storages: frozenset[str],
    waiting: Mapping[int, int],
    beside: Collection[int] = (),
) -> tuple[int, int]:
    """Bytes of received and sent messages that a replica of a stage holds.

    Args:
        transfers: tensors that cross cuts, as large as the replica's part of them.
        gradient_micro_batches: how many of them one backward of the replica works through.
        kept_storages: a message made of one of these costs nothing more while it waits.
        waiting: for each receiving stage, forward messages that await their sending at once.
        beside: stages on the same device, to which tensors are handed over: there are no receives,
            and what waits counts where it was made.

    Returns:
        Posted receives and messages awaiting their sending, held all the time; and the
        gradients, received and made, that a backward has at hand.
    """
    always = working = 0
    for c in transfers:
        if c.target == stage and c.source in beside:
            # One gradient may still be waiting for its backward while the next is made.
            always += c.nbytes * gradient_micro_batches * c.needs_grad
            working += c.nbytes * gradient_micro_batches * c.needs_grad
        elif c.target == stage:
            always += RECEIVES_AHEAD[FORWARD] * c.nbytes
            if c.needs_grad:
                # One gradient may still be waiting for its sending while the next is made.
                always += c.nbytes * gradient_micro_batches
                working += c.nbytes * gradient_micro_batches
        if c.source == stage:
            if c.storage not in kept_storages:
                always += c.nbytes * waiting.get(c.target, 1)
            if c.needs_grad and c.target not in beside:
                always += RECEIVES_AHEAD[BACKWARD] * c.nbytes * gradient_micro_batches
                working += c.nbytes * gradient_micro_batches
    return always, working
