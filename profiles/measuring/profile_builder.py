"""From a bench's measurements to a profile: names, sizes in bytes, medians of times."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ..autograd.boundary import storage_key
from ..profile import (
    Edge,
    Layer,
    Measurement,
    ModelInput,
    OptimizerCost,
    Profile,
    SharedParameters,
    Storage,
    Totals,
    VaryingShapes,
)
from ..tracing.graph import OUTPUT, hidden_matrices, is_frozen, shared_state, state_of
from .bench import Bench, relative_error
from .saved_bytes import MicroBatchCase
from .step import Phase


def assemble(
    bench: Bench,
    *,
    threads: int,
    optimizer: OptimizerCost,
    graph_fingerprint: str,
    assumptions: tuple[str, ...],
    loading_s: float | None,
    varying: VaryingShapes | None,
    unversioned: tuple[str, ...],
) -> Profile:
    """The profile that a bench's measurements make, with what else is known: assumptions made
    before them, shapes of mini-batches that vary, the seconds between two samples, and parameters
    that backwards take as memory has them."""
    traced, first = bench.traced, bench.cases[0]
    bound = bench.bound | bench.by_values
    shared = shared_state(traced, first.saved.rewritten)
    tied = sorted({*shared.tied, *bound})
    platform, reserved = bench.platform, bench.reserved
    return Profile(
        target=bench.target.name,
        fingerprint=graph_fingerprint,
        front_end=traced.front_end,
        refusals=traced.refusals,
        granularity=traced.granularity,
        device=platform.name,
        gpu=platform.gpu or msgspec.UNSET,
        threads=threads,
        dtype=_name(_dtype(bench, first.inputs)),
        autocast=_name(platform.autocast) if platform.autocast else None,
        torch_version=torch.__version__.split("+")[0],
        batch_size=bench.batch_size,
        micro_batch_sizes=bench.sizes,
        inputs=_inputs(bench),
        layers=_layers(bench),
        edges=_edges(bench),
        storages=_storages(bench),
        tied=tuple(tuple(bench.names[k] for k in group) for group in tied),
        shared=_shared(
            bench.names, {group: n for group, n in shared.copyable.items() if group not in bound}
        ),
        shared_frozen=_shared(bench.names, shared.frozen) or msgspec.UNSET,
        loss=_measurements(bench, len(bench.names)) if bench.target.task else (),
        optimizer=optimizer,
        whole_model=tuple(
            Totals(
                micro_batch=case.size,
                forward_s=_rounded(median(f for f, _ in case.whole)),
                backward_s=_rounded(median(b for _, b in case.whole)),
                saved_bytes=case.saved.total,
            )
            for case in bench.cases
        ),
        varying=msgspec.UNSET if varying is None else varying,
        reserved_bytes=msgspec.UNSET if reserved is None else reserved.nbytes,
        reserved_share=msgspec.UNSET if reserved is None else round(reserved.share, 4),
        unversioned=unversioned or msgspec.UNSET,
        loading_s_per_sample=msgspec.UNSET if loading_s is None else _rounded(loading_s),
        assumptions=(*assumptions, *_assumptions(bench)),
    )


def _dtype(bench: Bench, inputs: Iterable[Tensor]) -> torch.dtype:
    """Of the model's first parameter; without any, of its first input that has one."""
    floats = (t for t in inputs if t.is_floating_point())
    dtypes = (t.dtype for t in (*bench.model.parameters(), *floats))
    return next(dtypes, torch.get_default_dtype())


def _shared(
    names: Sequence[str], found: Mapping[tuple[int, ...], int]
) -> tuple[SharedParameters, ...]:
    return tuple(
        SharedParameters(layers=tuple(names[k] for k in group), parameter_bytes=nbytes)
        for group, nbytes in sorted(found.items())
    )


def _assumptions(bench: Bench) -> Iterator[str]:
    spec = bench.platform.spec
    if spec is not None:
        yield (
            f"Nothing was run: times are the roofline of {spec.name} ({spec.source}), bytes are "
            "those that PyTorch's CPU operations would keep."
        )
    names, bound = bench.names, sorted({k for group in bench.by_values for k in group})
    if bound:
        yield (
            f"From {names[bound[0]]} to {names[bound[-1]]} tensors between layers have shapes that "
            "depend on values: such layers stay on one stage, and their costs are those of the "
            "samples at hand."
        )


def _seconds(case: MicroBatchCase, k: int, phase: Phase, empty: Phase) -> float:
    """Of a part in a phase. What it costs to call an empty piece isn't the part's own."""
    found = median(times[k] for times in case.times[phase])
    return _rounded(max(found - median(case.empty_s[empty] or [0.0]), 0.0))


def _measurements(bench: Bench, k: int) -> tuple[Measurement, ...]:
    found = []
    for case in bench.cases:
        both = [f[k] + b[k] for f, b in zip(case.times["F"], case.times["B"], strict=True)]
        backward_s = input_s = _seconds(case, k, "B", "B")
        weight_s = None
        if _has_weights(bench, k):
            input_s = min(_seconds(case, k, "I", "B"), backward_s)
            if input_s:
                # Else it has no first part: all of its backward is the second.
                weight_s = _seconds(case, k, "W", "W")
        found.append(
            Measurement(
                micro_batch=case.size,
                forward_s=_seconds(case, k, "F", "F"),
                backward_s=backward_s,
                saved_bytes=sum(case.saved.by_layer[k].values()),
                workspace_bytes=case.workspace[k],
                relative_error=None if bench.platform.computed else round(relative_error(both), 4),
                backward_input_s=input_s,
                postponed_bytes=case.postponed[k],
                backward_weight_s=weight_s,
                saved_tensors=case.saved.tensors[k],
            )
        )
    return tuple(found)


def _has_weights(bench: Bench, k: int) -> bool:
    """Whether a layer (or the loss behind the last one) has a weight part in its backward."""
    layers = bench.traced.layers
    state = state_of(bench.traced, layers[k].nodes).values() if k < len(layers) else ()
    return any(isinstance(tensor, nn.Parameter) and tensor.requires_grad for tensor in state)


def _layers(bench: Bench) -> tuple[Layer, ...]:
    seen: set[tuple[int, int]] = set()
    saved = bench.cases[-1].saved
    hidden = {id(p) for p in hidden_matrices(bench.traced, bench.model)}
    layers = []
    for k, nodes in enumerate(bench.traced.layers):
        sizes = dict.fromkeys(("parameter", "buffer", "frozen", "matrix"), 0)
        for tensor in state_of(bench.traced, nodes.nodes).values():
            # Tied tensors count once, where they are used first; those side by side in one, each.
            place = storage_key(tensor), int(tensor.storage_offset())
            if place not in seen:
                seen.add(place)
                trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
                sizes["parameter" if trained else "buffer"] += tensor.nbytes
                if is_frozen(tensor):
                    sizes["frozen"] += tensor.nbytes
                elif id(tensor) in hidden:
                    sizes["matrix"] += tensor.nbytes
        layers.append(
            Layer(
                name=nodes.name,
                kind=nodes.kind,
                parameter_bytes=sizes["parameter"],
                buffer_bytes=sizes["buffer"],
                matrix_bytes=sizes["matrix"] or msgspec.UNSET,
                frozen_bytes=sizes["frozen"] or msgspec.UNSET,
                changes=saved.changed_by(k) or msgspec.UNSET,
                saves=tuple(sorted(key for key in saved.by_layer[k] if isinstance(key, str))),
                measurements=_measurements(bench, k),
            )
        )
    return tuple(layers)


def _storages(bench: Bench) -> tuple[Storage, ...]:
    by_case = [case.saved.storages for case in bench.cases]
    return tuple(
        Storage(name=name, **_affine(bench.sizes, [sizes.get(name, 0) for sizes in by_case]))
        for name in by_case[-1]
    )


def _edges(bench: Bench) -> tuple[Edge, ...]:
    edges, ends = [], [*bench.names, OUTPUT]
    for value in bench.cases[-1].values:
        if value.producer is None:
            continue
        name = value.node.name
        found = [case.saved.sent[name] for case in bench.cases]
        for consumer in value.consumers:
            edges.append(
                Edge(
                    producer=ends[value.producer],
                    consumer=ends[consumer],
                    tensor=name,
                    storage=bench.cases[-1].saved.storage_of[name],
                    needs_grad=found[-1].needs_grad,
                    **_affine(bench.sizes, [values.nbytes for values in found]),
                )
            )
    return tuple(edges)


def _inputs(bench: Bench) -> tuple[ModelInput, ...]:
    case, ends = bench.cases[-1], [*bench.names, OUTPUT]
    used = {value.node: value.consumers for value in case.values if value.producer is None}
    return tuple(
        ModelInput(
            name=node.name,
            shape=tuple(tensor.shape[1:]),
            dtype=_name(tensor.dtype),
            consumers=tuple(ends[k] for k in used.get(node, ())),
        )
        for node, tensor in zip(bench.traced.inputs, case.inputs, strict=False)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _affine(sizes: Sequence[int], found: Sequence[int]) -> dict[str, Any]:
    """Fit ``fixed + per_sample * m`` through the smallest and the largest micro-batch."""
    if len(sizes) == 1:
        return {"bytes_per_sample": found[0] / sizes[0], "fixed_bytes": 0}
    slope = max((found[-1] - found[0]) / (sizes[-1] - sizes[0]), 0.0)
    return {"bytes_per_sample": slope, "fixed_bytes": max(round(found[0] - slope * sizes[0]), 0)}


def _rounded(seconds: float) -> float:
    """Nanoseconds are enough, and make files that people can read."""
    return round(seconds, 9)
