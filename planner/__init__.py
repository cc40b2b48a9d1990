"""What to do about a model's cost: clusters, training systems, schedules, simulation, plans.

Nothing here imports torch.
"""

from __future__ import annotations

from .cluster.cluster import Cluster, read_cluster, uniform_cluster
from .plan import Plan, read_plan
from .search.solve import solve
from .systems.variants import VARIANTS, Variant

__all__ = [
    "VARIANTS",
    "Cluster",
    "Plan",
    "Variant",
    "read_cluster",
    "read_plan",
    "solve",
    "uniform_cluster",
]
