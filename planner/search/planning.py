"""A request for a plan that was read: profile, cluster, and what `best_plan` takes besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...profiles.errors import UserError
from ...profiles.profile import Profile, Together
from ..cluster.cluster import Cluster
from ..cluster.contention import contention_on, with_contention
from ..plan import Plan
from .default_recompute import choosing
from .defaults import best_plan
from .state import Progress


@dataclass(frozen=True)
class Planning:
    """A request that was read.

    Attributes:
        cluster: as described; devices that slow each other down aren't slower there.
        asked: what `best_plan` takes besides.
        together: how devices of a machine slow each other down; None: each has its own.
        systems: to choose from.
        study: whose time to target is to be least; None: the period is.
        notes: what was assumed of the devices, a line each.
    """

    profile: Profile
    cluster: Cluster
    asked: Mapping[str, Any]
    together: Together | None
    systems: tuple[str, ...]
    study: str | None = None
    notes: tuple[str, ...] = ()

    def best(
        self, progress: Progress | None = None, cluster: Cluster | None = None, **others: Any
    ) -> Plan:
        """The plan with the shortest period.

        Args:
            cluster: another one, as it is.
            others: in the place of what was asked.

        Raises as `best_plan`; UserError where several systems were asked for.
        """
        if "variant" not in others and len(self.systems) > 1:
            raise UserError(
                f"variant: give one system's name, not {len(self.systems)}; timeprest.plans takes "
                "several"
            )
        if cluster is None:
            together = contention_on(self.cluster, self.together)
            cluster = with_contention(self.cluster, together)
        asked = {"progress": progress, "variant": self.systems[0], **self.asked, **others}
        return choosing(best_plan(self.profile, cluster, **asked), *self.notes)
