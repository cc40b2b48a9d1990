"""Peak memory of a device with several stages, in bytes, by walking its schedule; parameters that
several of its stages use count once.

Such a parameter is there once, with versions and gradients of its own: the stage that updates it
does so when the backwards of all of them are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache

import msgspec

from ..simulator.pipeline import Pipeline
from ..systems.operations import BACKWARD, FORWARD, UPDATE, WEIGHT, Op
from ..systems.variants import Variant
from ..systems.versions import SharedWalk, VersionWalk
from .memory import HoldingsWalk, MemoryByKind, Moment, StageBytes, together
from .tied_parameters import DeviceTie


class TiedWalk:
    """Weight versions and gradients of parameters that several stages of one device share,
    operation by operation.

    Stages may run the backward of a later mini-batch before the one that the update waits for, and
    its gradients are kept apart until then.

    Attributes:
        stages: ascending; the first one updates.
        fullest: no moment so far had more of anything.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stages: Sequence[int],
        entries: Sequence[int],
        recompute: Sequence[bool],
    ) -> None:
        """Arguments as of `walks_of`."""
        self.stages = tuple(stages)
        variant, n = pipeline.variant, pipeline.micro_batches
        self._walk = SharedWalk(
            {s: VersionWalk(variant, n, entries, recompute=recompute[s]) for s in stages}
        )
        self._every = pipeline.update_every
        self._split = variant.split_backward
        self._mixes = variant.backward_weights == "intermediate"
        self._versions = 1
        self._updates: set[int] = set()
        self.fullest = self.between()

    def step(self, s: int, op: Op) -> Moment:
        """Take an operation of a stage that uses them. Returns what there is meanwhile."""
        meanwhile = self._step(s, op)
        self.fullest = Moment(None, *map(max, self.fullest[1:], meanwhile[1:]))
        return meanwhile

    def _step(self, s: int, op: Op) -> Moment:
        kind, b, _ = op
        walk, number = self._walk.walks[s], b // self._every
        if kind == UPDATE:
            if s != self.stages[0] or (b + 1) % self._every:
                return self.between()
            self._walk.update()
            self._versions = self._walk.held()
            meanwhile = self.between()
            self._updates = {n for n in self._updates if n > number}
            return meanwhile
        versions, scratch = self._versions, 0
        if kind == FORWARD:
            walk.forward(op)
        elif kind == BACKWARD:
            walk.backward(op)
            scratch = int(self._mixes and walk.mixes_aside(op))
            walk.finish(op)
        if kind == WEIGHT or (kind == BACKWARD and not self._split):
            self._updates.add(number)
        self._versions = self._walk.held()
        return self.between()._replace(versions=versions, scratch=scratch)

    def between(self) -> Moment:
        """What there is after the last operation."""
        return Moment(None, self._versions, len(self._updates), 0)


class DeviceTies:
    """The walks over all shared parameters of a device, in step with the walks of its stages.

    Attributes:
        walks: by numbers below those of stages.
        needs: bytes of each.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        ties: Sequence[tuple[Sequence[int], StageBytes]],
        entries: Sequence[int],
        recompute: Sequence[bool],
    ) -> None:
        """Arguments as of `walks_of`."""
        self.needs = {-1 - k: nbytes for k, (_, nbytes) in enumerate(ties)}
        self.walks = {
            -1 - k: TiedWalk(pipeline, stages, entries, recompute)
            for k, (stages, _) in enumerate(ties)
        }

    def between(self) -> dict[int, Moment]:
        """What there is of each, after the last operation."""
        return {k: walk.between() for k, walk in self.walks.items()}

    def step(self, s: int, op: Op) -> tuple[dict[int, Moment], dict[int, Moment]]:
        """Take an operation of a stage. Returns what there is meanwhile and afterwards, of those
        that the stage uses."""
        used = {k: walk for k, walk in self.walks.items() if s in walk.stages}
        meanwhile = {k: walk.step(s, op) for k, walk in used.items()}
        return meanwhile, {k: walk.between() for k, walk in used.items()}

    def most(self) -> list[MemoryByKind]:
        """Of each, at least what there was at any moment so far."""
        return [self.needs[k].by_kind(walk.fullest) for k, walk in self.walks.items()]


def walks_of(
    pipeline: Pipeline,
    stages: Iterable[int],
    ties: Sequence[tuple[Sequence[int], StageBytes]],
    entries: Sequence[int],
    recompute: Sequence[bool],
) -> tuple[dict[int, HoldingsWalk], DeviceTies]:
    """The memory walks of a device's stages, and of the parameters that several of them share.

    Args:
        ties: the stages that use the same ones, and what there is to hold.
        entries: as for `versions.VersionWalk`.
        recompute: of all stages of the pipeline.
    """
    variant, n, every = pipeline.variant, pipeline.micro_batches, pipeline.update_every
    walks = {
        s: HoldingsWalk(
            variant, n, pipeline.replicas(s), entries, recompute=recompute[s], update_every=every
        )
        for s in stages
    }
    return walks, DeviceTies(pipeline, ties, entries, recompute)


def device_peaks(
    walks: Mapping[int, HoldingsWalk],
    needs: Mapping[int, StageBytes],
    ops: Iterable[tuple[int, Op]],
    ties: DeviceTies,
) -> tuple[MemoryByKind, MemoryByKind]:
    """Peak bytes of a device with several stages: of all it holds, and of what a run accounts for.

    Args:
        walks, needs: of each of its stages.
        ops: (stage, operation), in the device's sequence.
        ties: what several of the stages use, which none of them counts.
    """
    needs = {**needs, **ties.needs}
    between = {s: walk.between() for s, walk in walks.items()} | ties.between()
    # There are few different moments, and many operations.
    total = {s: cache(nbytes.total) for s, nbytes in needs.items()}
    held = sum(total[s](moment) for s, moment in between.items())
    most = [-1, -1]
    moments = [between, between]
    for s, op in ops:
        found, after = ties.step(s, op) if ties.walks else ({}, {})
        found[s] = walks[s].step(op)
        after[s] = walks[s].between()
        for k in after:
            held -= total[k](between[k])
        now = held
        for k, moment in found.items():
            now += total[k](moment)
        if now > most[0]:
            most[0], moments[0] = now, {**between, **found}
        if now > most[1] and (seen := now - needs[s].working(found[s].kind)) > most[1]:
            most[1], moments[1] = seen, {**between, **found}
        between |= after
        for k, moment in after.items():
            held += total[k](moment)
    whole, accounted = (
        together(needs[s].by_kind(moment) for s, moment in found.items()) for found in moments
    )
    return whole, msgspec.structs.replace(accounted, workspace_bytes=0)


# What there is to hold -----------------------------------------------------------------------


def tie_bytes(variant: Variant, tie: DeviceTie, copies: int) -> StageBytes:
    """Bytes of parameters that stages share; optimizer state counts for the stage that updates
    them.

    Args:
        copies: of them that a system from outside has.
    """
    nothing = dict.fromkeys(StageBytes.__struct_fields__, 0)
    parameters = tie.parameter_bytes
    found = {"parameters": parameters, "scratch": parameters * (variant.scratch_copies + copies)}
    return StageBytes(**{**nothing, **found})


def without_ties(s: int, needs: StageBytes, ties: Iterable[DeviceTie]) -> StageBytes:
    """A stage's bytes without parameters that it updates for other stages, too."""
    nbytes = sum(tie.parameter_bytes for tie in ties if s == tie.owner)
    copies = needs.scratch // needs.parameters if needs.parameters else 0
    return msgspec.structs.replace(
        needs, parameters=needs.parameters - nbytes, scratch=needs.scratch - copies * nbytes
    )
