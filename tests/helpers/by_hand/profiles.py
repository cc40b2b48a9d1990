"""Profiles made by hand, for planner tests that need no torch."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import strategies as st
from timeprest.profiles.profile import (
    Edge,
    Layer,
    Measurement,
    ModelInput,
    OptimizerCost,
    Profile,
    Storage,
    check_profile,
)


def measurement(m, forward_s, backward_s, saved, workspace=0):
    return Measurement(
        micro_batch=m,
        forward_s=forward_s,
        backward_s=backward_s,
        saved_bytes=saved,
        workspace_bytes=workspace,
    )


def profile_by_hand(layers, edges, sizes=(1, 2, 4), tied=(), loss=None):
    """A profile.

    Args:
        layers: (name, parameter bytes, seconds per sample forward, backward, own saved bytes
            per sample, names of shared storages that it keeps).
        edges: (producer, consumer, tensor, bytes per sample).
    """
    tensors = {tensor: nbytes for _, _, tensor, nbytes in edges}
    return check_profile(
        Profile(
            target="by-hand",
            fingerprint="0" * 32,
            device="cpu",
            threads=1,
            dtype="float32",
            torch_version="2.13.0",
            batch_size=sizes[-1],
            micro_batch_sizes=tuple(sizes),
            inputs=(ModelInput(name="x", shape=(3,), dtype="float32", consumers=(layers[0][0],)),),
            layers=tuple(
                Layer(
                    name=name,
                    kind="Test",
                    parameter_bytes=parameters,
                    buffer_bytes=0,
                    saves=tuple(saves),
                    measurements=tuple(
                        measurement(
                            m,
                            forward * m,
                            backward * m,
                            round(m * (saved + sum(tensors[t] for t in saves))),
                        )
                        for m in sizes
                    ),
                )
                for name, parameters, forward, backward, saved, saves in layers
            ),
            edges=tuple(
                Edge(
                    producer=producer,
                    consumer=consumer,
                    tensor=tensor,
                    storage=tensor,
                    bytes_per_sample=nbytes,
                    fixed_bytes=0,
                    needs_grad=True,
                )
                for producer, consumer, tensor, nbytes in edges
            ),
            storages=tuple(
                Storage(name=tensor, bytes_per_sample=nbytes, fixed_bytes=0)
                for tensor, nbytes in tensors.items()
            ),
            tied=tuple(tied),
            loss=tuple(loss or ()),
            optimizer=OptimizerCost(
                name="SGD",
                state_bytes_per_parameter_byte=1.0,
                update_fixed_s=0.0,
                update_s_per_byte=0.0,
            ),
            whole_model=(),
        )
    )


@st.composite
def drawn_profiles(draw, most=7):
    """Small DAGs: every layer but the first needs some layer before it."""
    count = draw(st.integers(2, most))
    layers = []
    edges = []
    for k in range(count):
        producers = []
        if k:
            first = k - 1 if draw(st.booleans()) else draw(st.integers(0, k - 1))
            producers = sorted({first} | draw(st.sets(st.integers(0, k - 1), max_size=1)))
        for p in producers:
            edges.append((f"n{p}", f"n{k}", f"t{p}", 8 * (p + 1)))
        layers.append(
            (
                f"n{k}",
                draw(st.integers(0, 2000)),
                draw(st.integers(1, 50)) * 1e-3,
                draw(st.integers(1, 50)) * 1e-3,
                draw(st.integers(0, 500)),
                [f"t{p}" for p in producers if draw(st.booleans())],
            )
        )
    users = {p for p, _, _, _ in edges}
    for k in range(count):
        if f"n{k}" not in users:
            edges.append((f"n{k}", "output", f"t{k}", 8 * (k + 1)))
    profile = profile_by_hand(layers, edges)
    return with_parts(profile, draw) if draw(st.booleans()) else profile


def with_parts(profile, draw):
    """With a measured input part of some layers' backwards."""
    layers = []
    for layer in profile.layers:
        share = draw(st.sampled_from([None, 0.0, 0.25, 1.0, 1.5]))
        measured = layer.measurements
        if share is not None:
            measured = tuple(
                msgspec.structs.replace(
                    m, backward_input_s=share * m.backward_s, postponed_bytes=8 * m.micro_batch
                )
                for m in measured
            )
        layers.append(msgspec.structs.replace(layer, measurements=measured))
    return msgspec.structs.replace(profile, layers=tuple(layers))


def row_of_layers(layers, sent=8, last=8, **others):
    """A profile of layers each of which sends something to the next one alone.

    Args:
        layers: as of `profile_by_hand`.
        sent: bytes per sample from each to the next one; a number for all, or one for each.
        last: of the result.
    """
    names = [name for name, *_ in layers]
    sizes = [sent] * (len(names) - 1) if isinstance(sent, (int, float)) else sent
    edges = [(a, b, f"t{k}", sizes[k]) for k, (a, b) in enumerate(pairwise(names))]
    return profile_by_hand(layers, [*edges, (names[-1], "output", "last", last)], **others)


def chain(count, parameters=100, saved=10):
    """A chain of equal layers."""
    layers = [(f"n{k}", parameters, 1e-3, 2e-3, saved, []) for k in range(count)]
    return row_of_layers(layers, 16, 4)


def without_gradients(profile, *names):
    """No gradient for what these layers make, or for tensors of these names."""
    edges = (
        msgspec.structs.replace(e, needs_grad=not {e.producer, e.tensor} & {*names})
        for e in profile.edges
    )
    return msgspec.structs.replace(profile, edges=tuple(edges))
