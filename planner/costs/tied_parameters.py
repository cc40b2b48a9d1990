"""Parameters that several stages use: each holds a copy, and their gradients are summed.

A layer's parameters count where they are used first; a stage that uses them and hasn't that layer
holds a copy, with gradient and optimizer state of its own. Before each update the stages that hold
copies sum their gradients, so that all copies step alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from ...profiles.errors import PlanError
from ...profiles.profile import Profile
from ..cluster.cluster import Cluster
from ..systems.variants import VARIANTS, Variant

Tied = Literal["together", "split"]
"""Layers that share parameters are on one stage, or may be on several."""

TIED: tuple[Tied, ...] = get_args(Tied)


def check_tied(variant: Variant, tied: Tied) -> None:
    """Raises PlanError where the system can't have copies on several stages."""
    if tied == "split" and not variant.flushes:
        known = ", ".join(name for name, v in VARIANTS.items() if v.flushes)
        raise PlanError(
            f"tied: {variant.name} updates each stage at a time of its own, so copies of a "
            f"parameter on several would differ; systems that flush can split them: {known}"
        )


def bound_groups(profile: Profile, tied: Tied) -> tuple[tuple[str, ...], ...]:
    """Layers that must be on one stage, as groups."""
    if tied == "together":
        return profile.tied
    free = {frozenset(shared.layers) for shared in profile.shared}
    return tuple(group for group in profile.tied if frozenset(group) not in free)


def hint(profile: Profile, group: Sequence[str]) -> str:
    """For a message: how a group could be split, where it could be."""
    can = any(set(shared.layers) == set(group) for shared in profile.shared)
    return '; with "tied": "split" they needn\'t be' if can else ""


def copied_bytes(profile: Profile, names: Sequence[str]) -> int:
    """Bytes of parameters that a stage of these layers uses, and that count in another layer."""
    here = set(names)
    return sum(
        shared.parameter_bytes
        for shared in profile.shared
        if shared.layers[0] not in here and not here.isdisjoint(shared.layers)
    )


def exchange_s(
    profile: Profile,
    cluster: Cluster,
    nodes: Sequence[Sequence[str]],
    devices: Sequence[Sequence[int]],
) -> tuple[float, ...]:
    """Per stage, seconds to sum the gradients of its copies with those of other stages.

    One all-reduce for each set of stages, over all their devices. It begins when the last of them
    has its gradients; the simulation gives every one the time that it takes, after its own last
    backward. Others than the last wait in reality; in systems that flush nothing else would run.
    """
    holders: dict[tuple[int, ...], int] = {}
    for shared in profile.shared:
        held = tuple(s for s, names in enumerate(nodes) if not set(shared.layers).isdisjoint(names))
        if len(held) > 1:
            holders[held] = holders.get(held, 0) + shared.parameter_bytes
    found = [0.0] * len(nodes)
    for held, nbytes in holders.items():
        seconds = cluster.all_reduce_s([d for s in held for d in devices[s]], nbytes)
        for s in held:
            found[s] += seconds
    return tuple(found)
