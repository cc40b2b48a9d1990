"""Stages by how much of one path through the graph is before them, and behind: few, whatever else
the graph has.

Of all downsets with as many layers of the path one place stands for any. What a stage costs is then
known from below: it has the path's layers between its places, and others that are in no cut
elsewhere; and it sends the path's message.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...partition.chains import Links
from ...partition.dp.cycle_stages import CycleProblem
from ...partition.dp.lattice import Lattice
from ...partition.problem import Vector


def path_links(
    problem: CycleProblem,
    lattice: Lattice,
    layer_bytes: Vector,
    gradients: int,
    exchanges: Sequence[tuple[int, float]] = (),
) -> Links:
    """Stages with whether the next one has any of the path: 0 where it has, else 1.

    Args:
        lattice: a complete one.
        layer_bytes: of layers, measures in bytes, [_, n].
        gradients: of how many micro-batches a message back is.
        exchanges: bit masks of layers that share parameters with the last stage, each with what
            summing over copies takes.

    Returns:
        Links whose first and last places are by themselves; `values` as of `Rows`.
    """
    n, path, loads = problem.micro_batches, [*problem.path], problem.loads
    inside = np.array([lattice.column(layer) for layer in range(lattice.layers)])
    passed = inside[path].sum(axis=0)
    _, first_at, alike = np.unique(passed, return_index=True, return_counts=True)
    # The first one and the last one by themselves: others may have as many layers of the path.
    at = np.concatenate([[passed[0]], passed[first_at], [passed[-1]]])
    masks = [lattice.masks[0], *(lattice.masks[k] for k in first_at), lattice.masks[-1]]
    work = np.min([mode.compute_s for mode in loads.modes], axis=0)
    step = np.zeros(lattice.layers) if loads.serial_s is None else loads.serial_s
    forward, backward = problem.forward_s.min(axis=0), problem.backward_s.min(axis=0)
    sharing = [[float(ends >> k & 1) for k in range(lattice.layers)] for ends, _ in exchanges]
    each = np.array([forward, backward, work + step, *layer_bytes, step, *sharing])
    sums = np.concatenate([np.zeros((len(each), 1)), each[:, path].cumsum(axis=1)], axis=1)
    # None of the path have stages between places with as many of it.
    low, high = np.triu_indices(len(at), 1)
    several = np.concatenate([[False], alike > 1, [False]])
    some = at[high] > at[low]
    some |= (low == 0) & several[high] | (high == len(at) - 1) & several[low]
    middle = np.flatnonzero(several)
    low, high = np.append(low[some], middle), np.append(high[some], middle)
    on = at[high] > at[low]
    values = sums[:, at[high]] - sums[:, at[low]]
    for layer in {*range(lattice.layers)}.difference(path):
        has = inside[layer]
        sure = on & ((low == 0) | (at[low] < passed[has].min()))
        sure &= (high == len(at) - 1) | (at[high] > passed[~has].max())
        values[:, sure] += each[:, layer, None]
    # A message by how much of the path is before it, one way.
    crossing = np.array([0.0, *problem.path_s, 0.0]) / (1 + gradients)
    which, after = np.divmod(np.arange(2 * len(low)), 2)
    linked = on[which] & (after == 0) & (high[which] < len(at) - 1)
    there = np.where(linked, crossing[at[high[which]]], 0.0)
    apart = ~linked & (high[which] < len(at) - 1)
    values, (step, *shares) = np.split(values, [3 + len(layer_bytes)])
    sums_s = np.array([seconds for _, seconds in exchanges])
    summing = sums_s @ (np.reshape(shares, (-1, len(low))) > 0) * (high < len(at) - 1)
    sent = (
        there,
        there * gradients,
        (step * on)[which],
        (summing * on)[which],
        ~on[which],
        apart,
        linked,
        there * n,
        there * n,
    )
    largest = _largest(path, loads.workspace_bytes)[at[low], at[high]][which]
    measured = [*values[:, which], largest, *sent]
    begin, end = low[which] * 2 + ~on[which], high[which] * 2 + after
    kept = (after == 0) | np.isin(high[which], low[~on])
    order = np.flatnonzero(kept)[np.argsort(begin[kept], kind="stable")]
    return Links(begin[order], end[order], np.array(measured)[:, order], masks, 2)


def _largest(path: Sequence[int], of_layers: Vector | None) -> Vector:
    """Of the path's layers from each one to each later one the largest value, [path + 1] by as
    many; 0 where there are none.

    Args:
        of_layers: of all layers, [n].
    """
    found = np.zeros((len(path) + 1,) * 2)
    if of_layers is not None:
        for k in range(len(path)):
            found[k, k + 1 :] = np.maximum.accumulate(of_layers[path[k:]])
    return found
