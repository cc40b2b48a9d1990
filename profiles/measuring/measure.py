"""Measuring a target: layer by layer, at several micro-batch sizes → a Profile."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import TargetError, TaskWarning, UserError
from ..hooks import task_optimizer
from ..profile import OptimizerCost, Profile, check_profile
from ..target import Target, describe_error, misspelt_hooks
from ..tracing.call import Call
from ..tracing.fingerprint import fingerprint
from ..tracing.front_ends import TRACE_SAMPLES, trace
from ..tracing.graph import TracedModel, state_of_layer
from .assemble import assemble
from .bench import Bench, Case, Progress, parts_of
from .optimizer_cost import measure_optimizer
from .platforms import Platform, platform_of

RELATIVE_ERROR = 0.05
SECONDS = 15.0


def default_sizes(batch_size: int, platform: Platform | None = None) -> tuple[int, ...]:
    """Micro-batch sizes to measure: the mini-batch and its halves down to a sixteenth.

    Computed times are nearly affine in the size: there, of more than three the second and
    the fourth are left out.
    """
    sizes = [batch_size]
    while sizes[-1] % 2 == 0 and len(sizes) < 5:
        sizes.append(sizes[-1] // 2)
    if platform is not None and platform.computed and len(sizes) > 3:
        sizes = [sizes[0], sizes[2], sizes[-1]]
    return tuple(sorted(set(sizes)))


def measure(
    target: Target,
    *,
    batch_size: int = 64,
    micro_batch_sizes: Sequence[int] | None = None,
    platform: Platform | None = None,
    threads: int = 1,
    front_end: str | None = None,
    granularity: str = "layer",
    seconds: float = SECONDS,
    error: float = RELATIVE_ERROR,
    seed: int = 0,
    progress: Progress | None = None,
) -> Profile:
    """Profile a target in train mode.

    Args:
        batch_size: samples in a mini-batch.
        micro_batch_sizes: sizes to measure; by default the mini-batch and its halves.
        platform: where; by default on the CPU.
        threads: torch's threads while measuring; a stage will run with as many.
        front_end: how to find the graph (profile.FRONT_ENDS); by default the first that can.
        granularity: what makes a layer (grouping.py).
        seconds: time to spend on timing; 3 rounds at least are made, 5 where they are short.
        error: relative standard error to reach for every layer with 1 % of the step or more;
            measuring ends when it is reached, or the seconds are over.
        seed: for the model's initial weights.

    Raises:
        TargetError: the model can't be built, or fails on its own inputs.
        TraceError: no front end takes the model.
    """
    platform = platform or platform_of("cpu")
    for line in misspelt_hooks(target.task) if target.task is not None else ():
        warnings.warn(line, TaskWarning, stacklevel=2)
    sizes = tuple(sorted(set(micro_batch_sizes or default_sizes(batch_size, platform))))
    torch.set_num_threads(threads)
    calls = {size: target.call(size) for size in {TRACE_SAMPLES, *sizes}}
    # The importer of ONNX files works on the constants' values.
    model = platform.build(lambda: target.model(seed), first=target.front_end == "onnx")
    model.train()
    if not any(p.requires_grad for p in model.parameters()):
        raise TargetError(f"{target.name}: the model has no parameter to train")
    with platform.working():
        placed = {size: _placed(platform, *found) for size, found in calls.items()}
        call = placed[TRACE_SAMPLES][0]
        _try(target, model, call)
        left_out: tuple[str, ...] = ()
        if micro_batch_sizes is None and len(sizes) > 1 and sizes[0] == 1:
            sizes, left_out = _without_ones(target, model, placed, sizes)
        if progress is not None:
            progress("finding the graph", 0, 1)
        traced = trace(
            model,
            target.name,
            call,
            front_end=front_end or target.front_end,
            granularity=granularity,
            verify=not platform.computed,
        )
        print_of_graph = fingerprint(traced)
        try:
            graphs = [_for_size(traced, model, target, placed[size][0]) for size in sizes]
            parts = {id(graph): parts_of(graph) for graph in {id(g): g for g in graphs}.values()}
            cases = [
                Case(size, *placed[size], parts[id(graph)])
                for size, graph in zip(sizes, graphs, strict=True)
            ]
            bench = Bench(target, model, platform, cases, batch_size, progress)
            bench.run(seconds, error)
            optimizer = _optimizer(bench)
        except UserError:
            raise
        except Exception as failure:  # the user's model and loss run here
            raise _failed(target, failure) from failure
        profile = assemble(
            bench,
            threads=threads,
            optimizer=optimizer,
            graph_fingerprint=print_of_graph,
            assumptions=left_out,
        )
    return check_profile(profile)


def _without_ones(
    target: Target,
    model: nn.Module,
    placed: Mapping[int, tuple[Call, Any]],
    sizes: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes without 1 where the model refuses it, as BatchNorm over one value does."""
    try:
        _try(target, model, placed[1][0])
    except TargetError as refusal:
        return sizes[1:], (f"Micro-batches of 1 were left out: {refusal}.",)
    return sizes, ()


def _placed(platform: Platform, call: Call, target: Any) -> tuple[Call, Any]:
    tensors = tuple(platform.place(tensor) for tensor in call.tensors)
    placed = torch.utils._pytree.tree_map_only(torch.Tensor, platform.place, target)
    return Call(tensors, call.names), placed


def _try(target: Target, model: nn.Module, call: Call) -> None:
    """Call the model as the user would: so that what's wrong with it isn't blamed on a trace."""
    from ..tracing.state import unchanged

    try:
        with unchanged(model), torch.no_grad():
            call.of(model)
    except Exception as failure:  # whatever the user's model raises
        raise _failed(target, failure) from failure


def _failed(target: Target, failure: Exception) -> TargetError:
    return TargetError(
        f"{target.name}: the model failed on its own inputs: {describe_error(failure)}"
    )


def _for_size(traced: TracedModel, model: nn.Module, target: Target, call: Call) -> TracedModel:
    """The graph for this many samples: where the front end fixes them, a graph of its own."""
    size = call.tensors[0].shape[0]
    if traced.only_size in (None, size):
        return traced
    found = trace(
        model,
        target.name,
        call,
        front_end=traced.front_end,
        granularity=traced.granularity,
        verify=False,
    )
    names = [[layer.name for layer in t.layers] for t in (traced, found)]
    if names[0] != names[1]:
        raise TargetError(
            f"{target.name}: has other layers at {size} samples than at {traced.only_size}: its "
            "forward depends on the batch size; give one size with --micro-batch-sizes"
        )
    return replace(found, refusals=traced.refusals)


def _optimizer(bench: Bench) -> OptimizerCost:
    task = bench.target.task
    make = None
    if task is not None:
        known = {id(p): name for name, p in bench.model.named_parameters()}

        def make(given: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            named = [(known.get(id(p), "a parameter"), p) for p in given]
            return task_optimizer(task.optimizer, given, named, "the model")

    spec = bench.platform.spec
    if spec is not None:
        from .roofline import optimizer_roofline

        return optimizer_roofline(make, spec, next(bench.model.parameters()).dtype)
    groups = [
        [t for t in state_of_layer(bench.traced, layer).values() if isinstance(t, nn.Parameter)]
        for layer in bench.traced.layers
    ]
    with bench.platform.clock() as clock:
        return measure_optimizer(make, list(bench.model.parameters()), groups, clock)
