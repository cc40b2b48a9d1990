"""What is to be planned: a profile's model, trained by a system on a cluster's devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ..profiles.profile import Profile
from .cluster.cluster import Cluster
from .costs.layout import LinkMaker
from .costs.stage_costs import Costs, StageCost, as_run_by, least_of, slowest
from .costs.tied_parameters import Tied
from .schedules.given import system_of
from .systems.variants import Variant


@dataclass(frozen=True)
class Question:
    """Everything of a plan but its stages and micro-batches."""

    profile: Profile
    cluster: Cluster
    variant: str
    mini_batch: int
    optimizer_state_factor: float
    update_every: int = 1
    tied: Tied = "together"
    matrix_state_factor: float | None = None
    """Of matrices of hidden layers, where it is another."""
    order: tuple[str, ...] = ()
    """What devices run, where a user gives it (`Order.lines`)."""

    @classmethod
    def of(cls, profile: Profile, cluster: Cluster, *more: Any) -> Question:
        """The question that a search is asked: where the cluster has devices of several kinds, the
        profile's seconds are the least of these. Raises PlanError for a kind that it hasn't."""
        return cls(least_of(profile, cluster.kinds), cluster, *more)

    @property
    def least_state_factor(self) -> float:
        """Bytes of optimizer state per byte of any parameters, at the least."""
        factor = self.optimizer_state_factor
        return factor if self.matrix_state_factor is None else min(factor, self.matrix_state_factor)

    def state_bytes(self, cost: StageCost) -> int:
        """Of the optimizer, on a stage."""
        factor, others = self.optimizer_state_factor, cost.parameter_bytes
        if self.matrix_state_factor is None:
            return round(others * factor)
        others -= cost.matrix_bytes
        return round(others * factor + cost.matrix_bytes * self.matrix_state_factor)

    @property
    def loading_s(self) -> float:
        """To load a mini-batch; 0 where the profile doesn't say it."""
        each = self.profile.loading_s_per_sample
        return 0.0 if each is msgspec.UNSET else each * self.mini_batch

    @cached_property
    def system(self) -> Variant:
        """The training system of this name. Raises PlanError where there is none."""
        return system_of(self.variant, self.order)

    @cached_property
    def costs(self) -> Costs:
        """The profile's costs; made once."""
        return Costs(as_run_by(self.profile, self.system, self.update_every))

    @cached_property
    def links(self) -> LinkMaker:
        """Of stages on the cluster's devices; made once."""
        return LinkMaker(self.system, self.cluster)

    def stage_cost(
        self, devices: Sequence[int], *stage: Any, **more: Any
    ) -> tuple[StageCost, float]:
        """What a stage costs on the slowest of its devices, and the speed that its seconds are for.

        Args:
            stage, more: as of `Costs.stage`.

        Raises PlanError as that; for a kind of device that the profile has no seconds of.
        """
        listed = self.cluster.devices
        if not self._of_kinds:
            return self.costs.stage(*stage, **more), min(listed[d].speed for d in devices)
        found = []
        for device in {listed[d].alike: listed[d] for d in devices}.values():
            costs = self.costs if device.kind is None else self.costs.on(device.kind)
            factor = (device.kind_speed or 1.0) / device.speed
            found.append((costs.stage(*stage, **more), factor))
        return slowest(found), 1.0

    @cached_property
    def _of_kinds(self) -> bool:
        return bool(self.cluster.kinds)

    @cached_property
    def one_device_s(self) -> float:
        """A mini-batch on one device of speed 1, of the profile's first kind: whole, or in the
        largest size measured."""
        profile = self.profile
        costs = self.costs.on(profile.kinds[0].name) if profile.kinds else self.costs
        sizes = profile.micro_batch_sizes
        size = min(max(self.mini_batch, sizes[0]), sizes[-1])
        cost = costs.stage(tuple(layer.name for layer in profile.layers), size, True)
        work_s = (cost.forward_s + cost.backward_s) * (self.mini_batch / size)
        return work_s + cost.update_s / self.update_every
