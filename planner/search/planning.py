"""A request for a plan that was read: profile, cluster, and what `best_plan` takes besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...profiles.profile import Profile, Together
from ..cluster.cluster import Cluster
from ..cluster.contention import contention_on, with_contention
from ..plan import Plan
from .defaults import best_plan, choosing
from .state import Progress


@dataclass(frozen=True)
class Planning:
    """A request that was read.

    Attributes:
        cluster: as described; devices that slow each other down aren't slower there.
        asked: what `best_plan` takes besides.
        together: how devices of a machine slow each other down; None: each has its own.
        notes: what was assumed of the devices, a line each.
    """

    profile: Profile
    cluster: Cluster
    asked: Mapping[str, Any]
    together: Together | None
    notes: tuple[str, ...] = ()

    def best(
        self, progress: Progress | None = None, cluster: Cluster | None = None, **others: Any
    ) -> Plan:
        """The best plan.

        Args:
            cluster: another one, as it is.
            others: in the place of what was asked.

        Raises as `best_plan`.
        """
        if cluster is None:
            together = contention_on(self.cluster, self.together)
            cluster = with_contention(self.cluster, together)
        asked = {"progress": progress, **self.asked, **others}
        return choosing(best_plan(self.profile, cluster, **asked), *self.notes)
