"""Measuring a target: layer by layer, at several micro-batch sizes → a Profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import TargetError
from ..profile import Profile, check_profile
from ..target import Target
from ..tasks.objects import misspelt_hooks
from ..tracing.call import Call, settle, unchanged
from ..tracing.front_ends import TRACE_SAMPLES, check_other, trace, trace_alike
from ..tracing.graph import TracedModel, fingerprint, unused_parameters
from .bench import Bench, Progress
from .checks import (
    failures,
    place_call,
    time_loading,
    try_evaluation,
    try_model,
    try_parts,
    try_reads,
    try_stages,
    warn,
)
from .optimizer_cost import optimizer_cost
from .platforms import Platform, platform_of
from .profile_builder import assemble
from .request import ProfileRequest, check_sizes
from .saved_bytes import MicroBatchCase, pieces_of
from .trial import Trial, tried

if TYPE_CHECKING:
    from ..tasks.shapes import LookedAt


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
    platform: Platform | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    trial: Trial | None = None,
    **asked: Any,
) -> Profile:
    """Profile a target in train mode, by default on the CPU, as these fields of `ProfileRequest`
    ask.

    Args:
        seed: for the model's initial weights.
        trial: a training that is tried before anything is measured.

    Raises:
        UserError: an argument that can't be.
        TargetError: the model can't be built, or fails on its own inputs.
        TraceError: no front end takes the model.
    """
    how = ProfileRequest(target.name, **asked).read()
    own_sizes, platform = how["micro_batch_sizes"], platform or platform_of("cpu")
    report: Progress = progress or (lambda *_: None)
    for line in misspelt_hooks(target.task) if target.task is not None else ():
        warn(line)
    batch_size = _batch_size(target, how["batch_size"], own_sizes)
    sizes = tuple(sorted(set(own_sizes or default_sizes(batch_size, platform))))
    torch.set_num_threads(how["threads"])
    looked = target.look_at_batches(batch_size, how["batches"])
    call_of = target.call if looked is None or looked.varying is None else looked.call
    calls = {size: call_of(size) for size in {TRACE_SAMPLES, *sizes}}
    model = _model(target, platform, seed)
    with platform.working():
        placed = {size: place_call(platform.place, *found) for size, found in calls.items()}
        call = placed[TRACE_SAMPLES][0]
        if not platform.computed:
            try_parts(target, model, platform)
        try_model(target, lambda: settle(model, call, target.name))
        sizes, left_out = (sizes, ()) if own_sizes else _without_ones(target, model, placed, sizes)
        report("finding the graph", 0, 0)
        if not platform.computed:
            try_reads(target, model, placed[TRACE_SAMPLES], platform)
        traced = _graph(target, model, platform, call, looked, how)
        print_of_graph = fingerprint(traced)
        with failures(target):
            cases = _cases(target, model, platform, traced, {n: placed[n] for n in sizes})
            bench = Bench(target, model, platform, cases, batch_size, report)
            if target.task is not None:
                # Of one sample, a figure for each is a number too.
                several = next((size for size in sizes if size > 1), sizes[0])
                try_evaluation(bench, target.task, calls[several])
                try_stages(bench, call)
            optimizer = optimizer_cost(bench)
            bench.count()
            unversioned = tried(bench, trial, call_of)
            bench.run(how["seconds"], how["relative_error"])
            loading_s = time_loading(bench, call)
        profile = assemble(
            bench,
            threads=how["threads"],
            optimizer=optimizer,
            graph_fingerprint=print_of_graph,
            assumptions=left_out,
            loading_s=loading_s,
            varying=None if looked is None else looked.varying,
            unversioned=unversioned,
        )
    return check_profile(profile)


def _batch_size(target: Target, asked: int | None, sizes: Sequence[int] | None) -> int:
    """Of a mini-batch: as asked, or the target's own. Raises UserError."""
    own = target.loader_batch_size
    batch_size: int = asked or own or max(sizes or [target.batch_size])
    check_sizes(sizes, batch_size)
    if own not in (None, batch_size):
        warn(
            f"{target.name}: the DataLoader of data('train') makes batches of {own} samples, and "
            f"tp-run trains on these: profile with --batch-size {own}, or plan with --mini-batch "
            f"{own}"
        )
    return batch_size


def _model(target: Target, platform: Platform, seed: int) -> nn.Module:
    """The model where it is measured, in training mode. Raises TargetError."""
    # An importer works on the constants' values.
    model = platform.build(lambda: target.model(seed), first=target.front_end is not None)
    model.train()
    # A model alone may have none: it can be planned all the same.
    if target.task is not None and not any(p.requires_grad for p in model.parameters()):
        raise TargetError(f"{target.name}: the model has no parameter to train")
    return model


def _graph(
    target: Target,
    model: nn.Module,
    platform: Platform,
    call: Call,
    looked: LookedAt | None,
    how: Mapping[str, Any],
) -> TracedModel:
    """The model's graph, which holds for the smallest batch that was looked at, too."""
    with platform.forward_context():
        traced = trace(
            model,
            target.name,
            call,
            front_end=how["front_end"] or target.front_end,
            granularity=how["granularity"],
            verify=not platform.computed,
        )
        if looked is not None and looked.varying is not None and not platform.computed:
            smallest = looked.call(TRACE_SAMPLES, looked.smallest)
            check_other(model, target.name, traced, place_call(platform.place, *smallest)[0])
    if unused := unused_parameters(model, traced.module):
        warn(
            f"{target.name}: the forward doesn't use "
            f"{shorten(', '.join(unused), 200, placeholder=' …')}: no layer of the profile has "
            "these parameters, and training leaves them as they are"
        )
    return traced


def _cases(
    target: Target,
    model: nn.Module,
    platform: Platform,
    traced: TracedModel,
    placed: Mapping[int, tuple[Call, Any]],
) -> list[MicroBatchCase]:
    """What is measured at each size."""
    with platform.forward_context():
        graphs = [_for_size(traced, model, target, call) for call, _ in placed.values()]
    pieces = {id(graph): pieces_of(graph) for graph in {id(g): g for g in graphs}.values()}
    return [
        MicroBatchCase(size, *placed[size], graph, pieces[id(graph)])
        for size, graph in zip(placed, graphs, strict=True)
    ]


def _without_ones(
    target: Target, model: nn.Module, placed: Mapping[int, tuple[Call, Any]], sizes: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes without 1 where the model refuses it, as BatchNorm over one value does."""
    if len(sizes) == 1 or sizes[0] > 1:
        return sizes, ()
    try:
        with unchanged(model):
            try_model(target, lambda: placed[1][0].of(model))
    except TargetError as refusal:
        return sizes[1:], (f"Micro-batches of 1 were left out: {refusal}.",)
    return sizes, ()


def _for_size(traced: TracedModel, model: nn.Module, target: Target, call: Call) -> TracedModel:
    """The graph for this many samples: where the front end fixes them, a graph of its own."""
    size = call.tensors[0].shape[0]
    if traced.only_size in (None, size):
        return traced
    found = trace_alike(traced, model, target.name, call)
    names = [[layer.name for layer in t.layers] for t in (traced, found)]
    if names[0] != names[1]:
        raise TargetError(
            f"{target.name}: has other layers at {size} samples than at {traced.only_size}: its "
            "forward depends on the batch size; give one size with --micro-batch-sizes"
        )
    return replace(found, refusals=traced.refusals)
