"""Peak memory of a stage, by walking its order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ..profiles.profile import Bytes
from .operations import BACKWARD, FORWARD, Op
from .stage_costs import RECEIVES_AHEAD, Crossing, StageCost
from .variants import Variant
from .versions import VersionWalk


class MemoryByKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where a stage's bytes are at its peak."""

    weights_bytes: Bytes
    """Parameters and buffers."""
    versions_bytes: Bytes
    """Older weight versions that are still needed."""
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    activations_bytes: Bytes
    """Saved for backward, of all micro-batches in flight."""
    boundary_bytes: Bytes
    """Received and awaiting use, or awaiting their sending."""
    workspace_bytes: Bytes

    @property
    def total(self) -> int:
        """All of them."""
        return sum(msgspec.structs.astuple(self))


@dataclass(frozen=True)
class StageMemory:
    """A stage's peak.

    Attributes:
        at_peak: the bytes by kind at the order's peak.
        micro_batches_kept: most micro-batches whose activations are kept at once.
        versions_held: most weight versions held at once.
    """

    at_peak: MemoryByKind
    micro_batches_kept: int
    versions_held: int


def boundary_buffers(
    stage: int,
    crossed: Sequence[Crossing],
    gradient_micro_batches: int,
    kept_storages: frozenset[str],
    waiting: Mapping[int, int],
) -> tuple[int, int]:
    """Bytes of messages around a stage.

    Args:
        kept_storages: a message made of one of these costs nothing more while it waits.
        waiting: for each receiving stage, forward messages that await their sending at once.

    Returns:
        Posted receives and messages awaiting their sending, held all the time; and the
        gradients, received and made, that a backward has at hand.
    """
    always = working = 0
    for c in crossed:
        if c.target == stage:
            always += RECEIVES_AHEAD[FORWARD] * c.nbytes
            if c.needs_grad:
                # One gradient may still be waiting for its sending while the next is made.
                always += c.nbytes * gradient_micro_batches
                working += c.nbytes * gradient_micro_batches
        if c.source == stage:
            if c.storage not in kept_storages:
                always += c.nbytes * waiting.get(c.target, 1)
            if c.needs_grad:
                always += RECEIVES_AHEAD[BACKWARD] * c.nbytes * gradient_micro_batches
                working += c.nbytes * gradient_micro_batches
    return always, working


def walk_memory(
    variant: Variant,
    micro_batches: int,
    ops: Iterable[Op],
    cost: StageCost,
    stage: int,
    crossed: Sequence[Crossing],
    optimizer_state_factor: float,
    waiting: Mapping[int, int],
) -> StageMemory:
    """Walk a stage's order and account for what is held at each operation.

    Args:
        ops: the stage's operations; enough of them to reach the steady state.
        crossed: all tensors that cross cuts.
        optimizer_state_factor: bytes of optimizer state per byte of parameters.
        waiting: for each receiving stage, forward messages that await their sending at once.
    """
    unit = micro_batches if variant.backward_unit == "mini" else 1
    always, working = boundary_buffers(stage, crossed, unit, cost.kept_storages, waiting)
    walk = VersionWalk(variant, micro_batches)
    kept = most_kept = 0
    most_held = 1
    gradients = False
    peak: MemoryByKind | None = None

    def note(boundary: int, workspace: int) -> None:
        nonlocal peak
        held = walk.held()
        now = MemoryByKind(
            weights_bytes=cost.parameter_bytes + cost.buffer_bytes,
            versions_bytes=(held - 1) * cost.parameter_bytes,
            gradients_bytes=cost.parameter_bytes if gradients else 0,
            optimizer_bytes=round(cost.parameter_bytes * optimizer_state_factor),
            activations_bytes=kept * cost.kept_bytes,
            boundary_bytes=boundary,
            workspace_bytes=workspace,
        )
        if peak is None or now.total > peak.total:
            peak = now

    for op in ops:
        if op.kind == FORWARD:
            walk.forward(op)
            kept += 1
            note(always, cost.workspace_bytes)
        elif op.kind == BACKWARD:
            walk.backward(op)
            gradients = True
            note(always + working, cost.workspace_bytes)
            kept -= micro_batches if op.micro_batch is None else 1
            walk.finish(op)
        else:
            walk.update()
            note(always, 0)
            gradients = False
        most_kept = max(most_kept, kept)
        most_held = max(most_held, walk.held())
    assert peak is not None
    return StageMemory(peak, most_kept, most_held)
