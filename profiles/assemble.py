"""From a bench's measurements to a profile: names, bytes that are affine in the size, medians."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .bench import Bench, Case
from .pieces import encode
from .profile import Edge, Layer, Measurement, ModelInput, Profile, Storage, Totals
from .saved import storage_bytes, storage_key
from .trace import OUTPUT, fingerprint, state_of_layer, tied_layers


def assemble(bench: Bench, threads: int) -> Profile:
    """The profile that a bench's measurements make."""
    tied = sorted({*tied_layers(bench.traced), *bench.bound_by_changes()})
    parameter = next(bench.model.parameters())
    return Profile(
        target=bench.target.name,
        fingerprint=fingerprint(bench.traced),
        device="cpu",
        threads=threads,
        dtype=str(parameter.dtype).removeprefix("torch."),
        torch_version=torch.__version__.split("+")[0],
        batch_size=bench.batch_size,
        micro_batch_sizes=bench.sizes,
        inputs=_inputs(bench),
        layers=_layers(bench),
        edges=_edges(bench),
        storages=_storages(bench),
        tied=tuple(tuple(bench.names[k] for k in group) for group in tied),
        loss=_measurements(bench, len(bench.pieces)) if bench.target.task else (),
        optimizer=bench.optimizer,
        whole_model=tuple(
            Totals(
                micro_batch=case.size,
                forward_s=_rounded(median(f for f, _ in case.whole)),
                backward_s=_rounded(median(b for _, b in case.whole)),
                saved_bytes=sum({k: v for s in case.saved for k, v in s.items()}.values()),
            )
            for case in bench.cases
        ),
    )


def _measurements(bench: Bench, k: int) -> tuple[Measurement, ...]:
    # What it costs to call an empty piece isn't the layer's own.
    call_s = median(f for f, _ in bench.overhead)
    engine_s = median(b for _, b in bench.overhead)
    return tuple(
        Measurement(
            micro_batch=case.size,
            forward_s=_rounded(max(median(r[k] for r in case.forward_s) - call_s, 0.0)),
            backward_s=_rounded(max(median(r[k] for r in case.backward_s) - engine_s, 0.0)),
            saved_bytes=sum(case.saved[k].values()),
            workspace_bytes=case.workspace[k],
        )
        for case in bench.cases
    )


def _layers(bench: Bench) -> tuple[Layer, ...]:
    seen: set[int] = set()
    shared = _shared(bench)
    layers = []
    for k, nodes in enumerate(bench.traced.layers):
        sizes = {"parameter": 0, "buffer": 0}
        for tensor in state_of_layer(bench.traced, nodes).values():
            # Tied tensors count once, where they are used first.
            if isinstance(tensor, Tensor) and storage_key(tensor) not in seen:
                seen.add(storage_key(tensor))
                what = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                sizes[what] += tensor.numel() * tensor.element_size()
        case = bench.cases[-1]
        layers.append(
            Layer(
                name=nodes.name,
                kind=nodes.kind,
                parameter_bytes=sizes["parameter"],
                buffer_bytes=sizes["buffer"],
                saves=tuple(
                    sorted(
                        case.storages[key][0]
                        for key in case.saved[k]
                        if key in case.storages and case.storages[key][0] in shared
                    )
                ),
                measurements=_measurements(bench, k),
            )
        )
    return tuple(layers)


def _shared(bench: Bench) -> set[str]:
    """Names of the storages that go between layers."""
    return {label for label, _ in bench.cases[-1].storages.values()}


def _storages(bench: Bench) -> tuple[Storage, ...]:
    by_case = [
        {**dict(case.storages.values()), **_number_bytes(bench, case)} for case in bench.cases
    ]
    return tuple(
        Storage(
            name=label,
            **_affine(bench.sizes, [sizes.get(label, 0) for sizes in by_case]),
        )
        for label in by_case[-1]
    )


def _number_bytes(bench: Bench, case: Case) -> dict[str, int]:
    """Numbers and sizes between layers travel as int64 tensors."""
    return {
        value.node.name: storage_bytes(encode(found, value.node.name))
        for value in bench.crossing
        if value.producer is not None
        and not isinstance(found := case.values[value.node.name], Tensor)
    }


def _edges(bench: Bench) -> tuple[Edge, ...]:
    edges = []
    for value in bench.crossing:
        if value.producer is None:
            continue
        name = value.node.name
        found = [case.values[name] for case in bench.cases]
        last = found[-1]
        if isinstance(last, Tensor):
            storage = bench.cases[-1].storages[storage_key(last)][0]
            sizes = [v.numel() * v.element_size() for v in found]
        else:
            storage = name
            sizes = [_number_bytes(bench, case)[name] for case in bench.cases]
        for consumer in value.consumers:
            edges.append(
                Edge(
                    producer=bench.names[value.producer],
                    consumer=bench.names[consumer] if consumer < len(bench.names) else OUTPUT,
                    tensor=name,
                    storage=storage,
                    needs_grad=isinstance(last, Tensor) and last.requires_grad,
                    **_affine(bench.sizes, sizes),
                )
            )
    return tuple(edges)


def _inputs(bench: Bench) -> tuple[ModelInput, ...]:
    used = {value.node: value.consumers for value in bench.crossing if value.producer is None}
    return tuple(
        ModelInput(
            name=node.name,
            shape=tuple(tensor.shape[1:]),
            dtype=str(tensor.dtype).removeprefix("torch."),
            consumers=tuple(
                bench.names[k] if k < len(bench.names) else OUTPUT for k in used.get(node, ())
            ),
        )
        for node, tensor in zip(bench.traced.inputs, bench.cases[-1].inputs, strict=False)
    )


def _affine(sizes: Sequence[int], found: Sequence[int]) -> dict[str, Any]:
    """Fit ``fixed + per_sample * m`` through the smallest and the largest micro-batch."""
    if len(sizes) == 1:
        return {"bytes_per_sample": found[0] / sizes[0], "fixed_bytes": 0}
    slope = max((found[-1] - found[0]) / (sizes[-1] - sizes[0]), 0.0)
    return {"bytes_per_sample": slope, "fixed_bytes": max(round(found[0] - slope * sizes[0]), 0)}


def _rounded(seconds: float) -> float:
    """Nanoseconds are enough, and make files that people can read."""
    return round(seconds, 9)
