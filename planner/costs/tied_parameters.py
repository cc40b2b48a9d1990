"""Tied parameters: one tensor on each device that uses them, and an all-reduce over the copies.

A layer's parameters count where they are used first. Stages of one device have them once: the first
of these stages updates them, after the last of their backwards. A device that uses them and hasn't
that layer holds a copy, with gradient and optimizer state of its own. Before each update the
devices that hold copies sum their gradients, so that all copies step alike. Copies of parameters
that aren't trained are alike as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from ...profiles.errors import PlanError
from ...profiles.profile import Profile, SharedParameters
from ..cluster.cluster import Cluster
from ..systems.variants import VARIANTS, Variant

Tied = Literal["together", "split"]
"""Layers that share parameters are on one device, or may be on several."""

TIED: tuple[Tied, ...] = get_args(Tied)


def check_tied(variant: Variant, tied: Tied) -> None:
    """Raises PlanError where the system can't have copies of tied parameters on several stages."""
    if tied == "split" and not variant.flushes:
        known = ", ".join(name for name, v in VARIANTS.items() if v.flushes)
        raise PlanError(
            f"tied: {variant.name} updates each stage at a time of its own, so copies of a "
            f"parameter on several would differ; systems that flush can split them: {known}; and "
            "stages of one device share them in any system (--stages-per-device 2 --placement v)"
        )


def bound_groups(profile: Profile, tied: Tied) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that must be on one device: on one stage, unless they share parameters alone
    (`on_one_stage`)."""
    if tied == "together":
        return profile.tied
    return on_one_stage(profile)


def on_one_stage(profile: Profile) -> tuple[tuple[str, ...], ...]:
    """Groups of layers that must be on one stage, whatever the devices of stages."""
    free = {frozenset(shared.layers) for shared in profile.shared}
    return tuple(group for group in profile.tied if frozenset(group) not in free)


def gradient_links(profile: Profile, stage_of: Mapping[str, int]) -> set[tuple[int, int]]:
    """(source, target) of the tensors between layers whose gradients come back.

    Args:
        stage_of: by the layers' names.
    """
    return {
        (stage_of[edge.producer], stage_of[edge.consumer])
        for edge in profile.edges
        if edge.needs_grad and edge.consumer in stage_of
    }


def not_behind(stage: int, others: Iterable[int], links: Collection[tuple[int, int]]) -> int | None:
    """One of these stages from which no gradient path leads back to a stage; None: there is none.

    Where they do, the stage's forward of a micro-batch comes before theirs, and its backward after.

    Args:
        links: (source, target) of tensors whose gradients come back.
    """
    seen, pending = {stage}, [stage]
    while pending:
        at = pending.pop()
        behind = {target for source, target in links if source == at} - seen
        seen |= behind
        pending += behind
    return min(set(others) - seen, default=None)


def misplaced(
    profile: Profile, stages: Sequence[Sequence[str]], devices: Sequence[Sequence[int]], tied: Tied
) -> tuple[tuple[str, ...], str] | None:
    """A group of tied layers that a cut takes apart and mustn't, and where it must be; None: there
    is none.

    Args:
        stages: each one's layers.
        devices: of each.
    """
    if not profile.tied:
        return None
    stage_of = {name: s for s, names in enumerate(stages) for name in names}
    for group in on_one_stage(profile):
        if len({stage_of[name] for name in group}) > 1:
            return group, "one stage"
    links = gradient_links(profile, stage_of)
    for shared in profile.shared:
        on_device = _by_device(shared, stages, devices)
        if len(on_device) > 1 and tied == "together":
            return shared.layers, "one stage, or on stages of one device"
        for first, *others in on_device:
            if not_behind(first, others, links) is not None:
                return shared.layers, "one stage (no gradient comes back from one to the other)"
    return None


@dataclass(frozen=True)
class DeviceTie:
    """Parameters that several stages of one device share: one tensor, updated by the first of them.

    Attributes:
        stages: ascending; the first one updates them.
    """

    stages: tuple[int, ...]
    parameter_bytes: int

    @property
    def owner(self) -> int:
        """The stage that updates them."""
        return self.stages[0]


def device_ties(
    shared_parameters: Iterable[SharedParameters],
    stages: Sequence[Sequence[str]],
    devices: Sequence[Sequence[int]],
) -> tuple[DeviceTie, ...]:
    """Of the profile's shared parameters, those that several stages of one device use.

    Args:
        stages: each one's layers.
    """
    if len(set(map(tuple, devices))) == len(devices):
        return ()
    found: dict[tuple[int, ...], int] = {}
    for shared in shared_parameters:
        for held in _by_device(shared, stages, devices):
            if len(held) > 1:
                found[held] = found.get(held, 0) + shared.parameter_bytes
    return tuple(DeviceTie(held, nbytes) for held, nbytes in sorted(found.items()))


class BytesElsewhere(NamedTuple):
    """Of the parameters that a stage uses, the bytes that count for another stage of its device.

    Attributes:
        parameters: which that one updates.
        frozen: of parameters that aren't trained.
    """

    parameters: int = 0
    frozen: int = 0


NOTHING = BytesElsewhere()


def bytes_elsewhere(
    profile: Profile, stages: Sequence[Sequence[str]], devices: Sequence[Sequence[int]]
) -> tuple[BytesElsewhere, ...]:
    """Per stage, the bytes of its parameters that count elsewhere. `stages`: each one's layers."""
    trained, frozen = (
        [
            sum(tie.parameter_bytes for tie in ties if s in tie.stages[1:])
            for s in range(len(stages))
        ]
        for ties in (
            device_ties(profile.shared, stages, devices),
            device_ties(profile.shared_frozen or (), stages, devices),
        )
    )
    return tuple(map(BytesElsewhere, trained, frozen))


def _by_device(
    shared: SharedParameters, stages: Sequence[Sequence[str]], devices: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """The stages that use them, device by device."""
    layers = set(shared.layers)
    on_device: dict[tuple[int, ...], list[int]] = {}
    for s, names in enumerate(stages):
        if not layers.isdisjoint(names):
            on_device.setdefault(tuple(devices[s]), []).append(s)
    return [tuple(held) for held in on_device.values()]


def hint(profile: Profile, group: Sequence[str]) -> str:
    """For a message: how a group of tied layers could be split, where it could be."""
    can = any(set(shared.layers) == set(group) for shared in profile.shared)
    return '; with "tied": "split" they needn\'t be' if can else ""


def copied_bytes(shared_parameters: Iterable[SharedParameters], names: Sequence[str]) -> int:
    """Bytes of copies of shared parameters on a stage of these layers: of those that count in
    another layer."""
    here = set(names)
    return sum(
        shared.parameter_bytes
        for shared in shared_parameters
        if shared.layers[0] not in here and not here.isdisjoint(shared.layers)
    )


def exchange_s(
    profile: Profile,
    cluster: Cluster,
    nodes: Sequence[Sequence[str]],
    devices: Sequence[Sequence[int]],
) -> tuple[float, ...]:
    """Per stage, seconds of the all-reduce that sums the gradients of its tied parameters' copies.

    One all-reduce for each set of stages that update a copy, over all their devices. It begins when
    the last of them has its gradients; the simulation gives every one the time that it takes, after
    its own last backward. Others than the last wait in reality; in systems that flush nothing else
    would run.
    """
    holders: dict[tuple[int, ...], int] = {}
    for shared in profile.shared:
        held = tuple(mine[0] for mine in _by_device(shared, nodes, devices))
        if len(held) > 1:
            holders[held] = holders.get(held, 0) + shared.parameter_bytes
    found = [0.0] * len(nodes)
    for held, nbytes in holders.items():
        seconds = cluster.all_reduce_s([d for s in held for d in devices[s]], nbytes)
        for s in held:
            found[s] += seconds
    return tuple(found)
