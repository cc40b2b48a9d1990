"""A bound on the period where a machine's devices take turns on fewer cores.

A device is a process then, say. No core waits for a stage that is late as long as others have work:
with more stages than cores their cuts needn't balance, and what counts is the work in all.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from .relaxation import Relaxation


def least_shared_s(relaxation: Relaxation, micro_batches: int, most_stages: int) -> float:
    """No period is shorter where devices share cores; else 0.

    All cores of the cluster are busy with what the layers and their updates take on its fastest
    device, in the cheapest mode and size. Without replicas S stages keep S cores busy at the most.

    Raises PlanError for a micro-batch size outside what was measured.
    """
    cluster = relaxation.question.cluster
    homes = Counter(device.machine for device in cluster.devices)
    cores = sum(cluster.at_once(count) for count in homes.values())
    if cores == len(cluster.devices):
        return 0.0
    problem = relaxation.problem(micro_batches, view="cycle")
    work_s = float(np.sum(np.min([mode.compute_s for mode in problem.modes], axis=0)))
    if problem.serial_s is not None:
        work_s += float(np.sum(problem.serial_s))
    used = cores if relaxation.freedom.replicas else min(cores, most_stages)
    return work_s / used / max(device.speed for device in cluster.devices)
