"""Where a profile's graph may be cut."""

from __future__ import annotations

import numpy as np
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.question import Question
from timeprest.planner.search.choices import Branch, Freedom
from timeprest.planner.search.relaxed.relaxation import Relaxation


def places_to_cut(profile, limit=300_000):
    """Membership of every downset, bool, [downsets, layers]."""
    question = Question(profile, uniform_cluster(1), "timeprest", profile.batch_size, 0.0)
    relaxation = Relaxation(question, Freedom())
    smallest = profile.batch_size // profile.micro_batch_sizes[-1]
    lattice = find_downsets(relaxation.problem(Branch(max(smallest, 1))), limit)
    assert lattice is not None
    return np.stack([lattice.column(k) for k in range(lattice.layers)], axis=1)
