"""Costs of every possible stage: one matrix entry for each pair of nested downsets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..profiles.profile import Profile
from .downsets import Lattice
from .stage_costs import at, private_bytes, sized

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class CutTables:
    """Stage costs for one micro-batch size; entry [a, b] is the stage of downset b less a.

    `valid` says which entries are stages at all. Times in s for one micro-batch, sizes in
    bytes; `in_bytes` and `in_grad_bytes` cross the cut below the stage, `out_grad_bytes` are
    gradients that come back over the one above.
    """

    valid: NDArray[np.bool_]
    forward_s: Matrix
    backward_s: Matrix
    update_s: Matrix
    parameter_bytes: Matrix
    buffer_bytes: Matrix
    kept_bytes: Matrix
    workspace_bytes: Matrix
    in_bytes: Matrix
    in_grad_bytes: Matrix
    out_grad_bytes: Matrix


def cut_tables(profile: Profile, lattice: Lattice, micro_batch: int) -> CutTables:
    """Fill the tables. Raises PlanError for a micro-batch size outside what was measured."""
    layers = profile.layers
    member = lattice.member.astype(np.float64)
    count = len(member)
    measured = [at(layer.measurements, micro_batch) for layer in layers]
    loss = at(profile.loss, micro_batch) if profile.loss else None

    def differences(values: Sequence[float]) -> Matrix:
        sums = member @ np.array(values, dtype=np.float64)
        return sums[None, :] - sums[:, None]

    forward_s = differences([m.forward_s for m in measured])
    backward_s = differences([m.backward_s for m in measured])
    parameters = differences([layer.parameter_bytes for layer in layers])
    kept = differences(
        [private_bytes(profile, la, m) for la, m in zip(layers, measured, strict=True)]
    )
    if loss:
        forward_s[:, -1] += loss.forward_s
        backward_s[:, -1] += loss.backward_s
        kept[:, -1] += loss.saved_bytes
    optimizer = profile.optimizer
    update_s = np.where(
        parameters > 0,
        optimizer.update_fixed_s + optimizer.update_s_per_byte * parameters,
        0.0,
    )
    tables = CutTables(
        valid=np.zeros((count, count), dtype=np.bool_),
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_s,
        parameter_bytes=parameters,
        buffer_bytes=differences([layer.buffer_bytes for layer in layers]),
        kept_bytes=kept,
        workspace_bytes=np.zeros((count, count)),
        in_bytes=np.zeros((count, count)),
        in_grad_bytes=np.zeros((count, count)),
        out_grad_bytes=np.zeros((count, count)),
    )
    workspace = np.array([m.workspace_bytes for m in measured], dtype=np.float64)
    _fill_pairs(profile, lattice, micro_batch, tables, workspace)
    if loss:
        np.maximum(
            tables.workspace_bytes[:, -1],
            loss.workspace_bytes,
            out=tables.workspace_bytes[:, -1],
        )
    return tables


def _fill_pairs(
    profile: Profile, lattice: Lattice, micro_batch: int, tables: CutTables, workspace: Matrix
) -> None:
    """What isn't a sum over layers: tensors that several layers keep or use count once."""
    member = lattice.member
    position = {layer.name: k for k, layer in enumerate(profile.layers)}
    tensors = {edge.tensor: edge for edge in profile.edges}
    index = {name: t for t, name in enumerate(tensors)}
    made = np.zeros((len(position), len(index)), dtype=np.int32)
    used = np.zeros((len(position) + 1, len(index)), dtype=np.int32)
    for edge in profile.edges:
        made[position[edge.producer], index[edge.tensor]] = 1
        used[position.get(edge.consumer, len(position)), index[edge.tensor]] += 1
    nbytes = np.array(
        [sized(e.fixed_bytes, e.bytes_per_sample, micro_batch) for e in tensors.values()],
        dtype=np.float64,
    ).reshape(-1)
    grad_bytes = nbytes * np.array([e.needs_grad for e in tensors.values()], dtype=np.float64)
    stored = {storage.name: k for k, storage in enumerate(profile.storages)}
    saves = np.zeros((len(position), len(stored)), dtype=np.int32)
    for layer in profile.layers:
        for name in layer.saves:
            saves[position[layer.name], stored[name]] = 1
    # A stage that receives a view holds its message alone: at the least, that is kept.
    held = {s.name: sized(s.fixed_bytes, s.bytes_per_sample, micro_batch) for s in profile.storages}
    for e in tensors.values():
        held[e.storage] = min(
            held[e.storage], sized(e.fixed_bytes, e.bytes_per_sample, micro_batch)
        )
    storage_bytes = np.array(list(held.values()), dtype=np.float64).reshape(-1)
    rows = member.astype(np.int32)
    # The model's result is needed on the last stage: by what completes the full downset.
    with_result = np.concatenate([rows, rows.all(axis=1, keepdims=True)], axis=1)
    makers, savers = rows @ made, rows @ saves
    users = with_result @ used
    all_users = used.sum(axis=0)
    for a in range(len(member) - 1):
        above = slice(a + 1, None)
        nested = ~(member[a] & ~member[above]).any(axis=1)
        tables.valid[a, above] = nested
        comes_in = ((users[above] - users[a]) > 0) & (makers[a] > 0)
        goes_out = ((makers[above] - makers[a]) > 0) & (users[above] < all_users)
        tables.in_bytes[a, above] = comes_in @ nbytes
        tables.in_grad_bytes[a, above] = comes_in @ grad_bytes
        tables.out_grad_bytes[a, above] = goes_out @ grad_bytes
        tables.kept_bytes[a, above] += ((savers[above] - savers[a]) > 0) @ storage_bytes
        inside = member[above] & ~member[a]
        tables.workspace_bytes[a, above] = (inside * workspace).max(axis=1)
