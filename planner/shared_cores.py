"""A bound on the period where a machine's devices take turns on fewer cores.

A device is a process then, say. No core waits for a stage that is late as long as others have work:
with more stages than cores their cuts needn't balance, and what counts is the work in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from .relaxation import Relaxation


def least_shared_s(relaxation: Relaxation, micro_batches: int, stages: Sequence[int]) -> float:
    """No period is shorter where devices share cores; else 0.

    All cores of the cluster are busy with what the layers take on its fastest device, in the
    cheapest of the sizes that replicas may have, and with what each stage takes besides. Without
    replicas S stages keep S cores busy at the most.

    Args:
        stages: counts that are allowed.
    """
    question = relaxation.question
    cluster = question.cluster
    homes = Counter(device.machine for device in cluster.devices)
    cores = sum(cluster.at_once(count) for count in homes.values())
    if cores == len(cluster.devices):
        return 0.0
    layers_s = _layers_s(relaxation, micro_batches)
    per_stage_s = 0.0
    if (operation := question.profile.operation) is not None:
        per_stage_s = micro_batches * operation.forward_s
        per_stage_s += operation.mini_batch_s / question.update_every
    fastest = max(device.speed for device in cluster.devices)
    least = (
        (layers_s + count * per_stage_s)
        / (cores if relaxation.freedom.replicas else min(cores, count))
        for count in stages
    )
    return min(least, default=0.0) / fastest


def _layers_s(relaxation: Relaxation, micro_batches: int) -> float:
    """What all layers take for a mini-batch, and the update of their parameters."""
    question, graph = relaxation.question, relaxation.graph
    whole = relaxation.variant.whole_mini_batches
    found = []
    for share in {r if whole else 1 for r in relaxation.replica_counts(micro_batches)}:
        count = micro_batches * share
        measured = graph.measured(-(-question.mini_batch // count))
        found.append(np.array([count * (m.forward_s + m.backward_s) for m in measured]))
    parameters = float(np.sum(graph.parameter_bytes))
    updates_s = question.profile.optimizer.update_s_per_byte * parameters
    return float(np.sum(np.min(found, axis=0))) + updates_s / question.update_every
