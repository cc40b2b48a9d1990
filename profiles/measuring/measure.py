"""Measuring a target: layer by layer, at several micro-batch sizes → a Profile."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import TargetError, TaskWarning
from ..profile import OptimizerCost, Profile, check_profile
from ..target import Target
from ..tasks.hooks import (
    RunLength,
    before_training,
    call_hook,
    check_reads,
    in_one_line,
    stand_in,
    task_scheduler,
    try_figures,
)
from ..tasks.loading import loading_s_per_sample
from ..tasks.objects import misspelt_hooks
from ..tasks.optimizers import task_groups, task_optimizer
from ..tasks.samples import comes_in_batches, dataset_size, pick, rows_of, size_of, some_samples
from ..tasks.task import Task
from ..tracing.call import Call, settle, unchanged
from ..tracing.front_ends import TRACE_SAMPLES, check_other, trace
from ..tracing.graph import TracedModel, fingerprint, shared_state, state_of, unused_parameters
from ..tracing.pieces import map_items
from ..tracing.shapes import bound_by_values
from .bench import Bench, Progress
from .optimizer_cost import measure_optimizer, optimizer_roofline
from .platforms import Platform, platform_of
from .profile_builder import assemble
from .request import ProfileRequest, check_sizes
from .saved_bytes import MicroBatchCase, pieces_of

if TYPE_CHECKING:
    from ..tasks.shapes import LookedAt

_EPOCHS = 5
_FEW = 4


# A training that is tried before anything is measured: it needs weight versions and optimizers of
# stages, and lives in `runtime/verify` ---------------------------------------------------------

TRIAL_MICRO_BATCHES = 2
"""Of each of a trial's mini-batches."""


@dataclass(frozen=True)
class TrialCase:
    """A model and its graph, before it is measured or trained.

    Attributes:
        name: of the target.
        model: in training mode; the graph has its parameters and modules.
        micro_batches: of a mini-batch, each inputs and target.
        bound: positions of layers that no plan parts.
        length: of the run that schedulers are told of.
        overwrites: parameters may be written into between a forward and its backward.
        cuts: for each of two mini-batches the layers' positions piece by piece; None: drawn ones.
    """

    name: str
    task: Task
    model: nn.Module
    graph: TracedModel
    micro_batches: tuple[tuple[Call, Any], ...]
    bound: Collection[tuple[int, ...]]
    length: RunLength
    autocast: torch.dtype | None
    device: torch.device
    overwrites: bool = True
    cuts: tuple[tuple[tuple[int, ...], ...], ...] | None = None


@dataclass(frozen=True)
class TrialReport:
    """What a trial found.

    Attributes:
        lines: to warn of.
        unversioned: parameters that a backward takes as memory has them then, by name.
    """

    lines: tuple[str, ...] = ()
    unversioned: tuple[str, ...] = ()


Trial = Callable[[TrialCase], TrialReport]
"""Raises TargetError for a model that pieces would train otherwise."""


def trial_samples(
    call: Call, expected: Any, place: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> tuple[tuple[Call, Any], ...]:
    """A mini-batch in micro-batches, as `TrialCase` has them. Raises TargetError where it can't be
    cut.

    Args:
        place: puts a tensor where it is needed.
    """
    rows = rows_of(call.tensors, "train")
    each = rows // TRIAL_MICRO_BATCHES
    found = []
    for i in range(TRIAL_MICRO_BATCHES):
        part = slice(i * each, (i + 1) * each)
        cut = call.with_tensors([tensor[part].clone() for tensor in call.tensors])
        found.append(_placed(place, cut, pick(expected, part, rows)))
    return tuple(found)


# Measuring --------------------------------------------------------------------------------------


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
    """Profile a target in train mode.

    Args:
        platform: where; by default on the CPU.
        seed: for the model's initial weights.
        trial: a training that is tried before anything is measured.
        asked: fields of `ProfileRequest` of how a target is measured.

    Raises:
        UserError: an argument that can't be.
        TargetError: the model can't be built, or fails on its own inputs.
        TraceError: no front end takes the model.
    """
    how = ProfileRequest(target.name, **asked).read()
    own_sizes, platform = how["micro_batch_sizes"], platform or platform_of("cpu")
    report: Progress = progress or (lambda *_: None)
    for line in misspelt_hooks(target.task) if target.task is not None else ():
        _warn(line)
    batch_size = _batch_size(target, how["batch_size"], own_sizes)
    sizes = tuple(sorted(set(own_sizes or default_sizes(batch_size, platform))))
    torch.set_num_threads(how["threads"])
    looked = target.look_at_batches(batch_size, how["batches"])
    call_of = target.call if looked is None or looked.varying is None else looked.call
    calls = {size: call_of(size) for size in {TRACE_SAMPLES, *sizes}}
    model = _model(target, platform, seed)
    with platform.working():
        placed = {size: _placed(platform.place, *found) for size, found in calls.items()}
        call = placed[TRACE_SAMPLES][0]
        if not platform.computed:
            _try_parts(target, model, platform)
        _try(target, lambda: settle(model, call, target.name))
        sizes, left_out = (sizes, ()) if own_sizes else _without_ones(target, model, placed, sizes)
        report("finding the graph", 0, 0)
        if not platform.computed:
            _try_reads(target, model, placed[TRACE_SAMPLES], platform)
        traced = _graph(target, model, platform, call, looked, how)
        print_of_graph = fingerprint(traced)
        with _failures(target):
            cases = _cases(target, model, platform, traced, {n: placed[n] for n in sizes})
            bench = Bench(target, model, platform, cases, batch_size, report)
            if target.task is not None:
                # Of one sample, a figure for each is a number too.
                several = next((size for size in sizes if size > 1), sizes[0])
                _try_evaluation(bench, target.task, calls[several])
            optimizer = _optimizer(bench)
            bench.count()
            unversioned = _tried(bench, trial, call_of)
            bench.run(how["seconds"], how["relative_error"])
            loading_s = _loading_s(bench, call)
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
        _warn(
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
            check_other(model, target.name, traced, _placed(platform.place, *smallest)[0])
    if unused := unused_parameters(model, traced.module):
        _warn(
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


def _tried(
    bench: Bench, trial: Trial | None, call_of: Callable[[int], tuple[Call, Any]]
) -> tuple[str, ...]:
    """Find layers whose shapes depend on values, then make the trial. Returns its `unversioned`."""
    if bench.platform.computed:
        return ()
    bench.progress("shapes that depend on values", 0, 0)
    # Of a few samples hardly all have the same value.
    case = next((case for case in bench.cases if case.size >= _FEW), bench.cases[-1])
    bench.by_values = bound_by_values(case.traced, case.inputs)
    if trial is None or bench.target.task is None:
        return ()
    bench.progress("training two mini-batches", 0, 0)
    tried = trial(_trial_case(bench, bench.target.task, call_of))
    for line in tried.lines:
        _warn(line)
    return tried.unversioned


def _trial_case(bench: Bench, task: Task, call_of: Callable[[int], tuple[Call, Any]]) -> TrialCase:
    """Of as few samples as will do, where the graph takes any number of them."""
    case, platform = bench.cases[0], bench.platform
    free = bench.traced.only_size is None and bench.batch_size > _FEW
    size = _FEW if free else case.size
    samples = trial_samples(*call_of(size * TRIAL_MICRO_BATCHES), platform.place)
    shared = shared_state(case.traced, case.saved.rewritten)
    return TrialCase(
        name=bench.target.name,
        task=task,
        model=bench.model,
        graph=case.traced,
        micro_batches=samples,
        bound=bench.bound | bench.by_values | (set(shared.tied) - set(shared.copyable)),
        length=_usual_length(bench, task),
        autocast=platform.autocast,
        device=platform.device,
    )


def _without_ones(
    target: Target,
    model: nn.Module,
    placed: Mapping[int, tuple[Call, Any]],
    sizes: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The sizes without 1 where the model refuses it, as BatchNorm over one value does."""
    if len(sizes) == 1 or sizes[0] > 1:
        return sizes, ()
    try:
        with unchanged(model):
            _try(target, lambda: placed[1][0].of(model))
    except TargetError as refusal:
        return sizes[1:], (f"Micro-batches of 1 were left out: {refusal}.",)
    return sizes, ()


def _placed(place: Callable[[Tensor], Tensor], call: Call, target: Any) -> tuple[Call, Any]:
    def placed(value: Any) -> Any:
        return place(value) if isinstance(value, Tensor) else map_items(placed, value)

    return call.with_tensors([*map(place, call.tensors)]), placed(target)


def _try(target: Target, call: Callable[[], Any]) -> None:
    """Call the model as the user would: so that what's wrong with it isn't blamed on a trace."""
    with _failures(target), torch.no_grad():
        call()


def _try_parts(target: Target, model: nn.Module, platform: Platform) -> None:
    """Look whether parts of a batch, which the data put together by themselves, are batches too:
    they aren't where numbers count in the whole of it."""
    found = target.whole_and_parts(TRACE_SAMPLES)
    if found is None:
        return
    whole, *parts = (_placed(platform.place, call, ())[0] for call in (found[0], *found[1]))
    with unchanged(model), torch.no_grad():
        try:
            whole.of(model)
        except Exception:  # the user's model, of which others tell
            return
        for part in parts:
            with in_one_line(
                f"{target.name}: the model takes a batch of {len(whole.tensors[0])} samples, and "
                f"fails on {TRACE_SAMPLES} of them",
                mend=". Whole numbers that count in all of a batch (offsets, edges between "
                "samples) can't be cut into micro-batches: let each sample have its own",
            ):
                part.of(model)


def _try_reads(
    target: Target, model: nn.Module, given: tuple[Call, Any], platform: Platform
) -> None:
    """Look whether the loss, or the figures beside it, read what isn't the model's result."""
    if target.task is None:
        return
    figures = getattr(target.task, "metrics", None)
    with platform.forward_context():
        check_reads("loss", target.task.loss, model, *given)
        if figures is not None:
            model.eval()
            check_reads("metrics", figures, model, *given)
            model.train()


def _failures(target: Target, on: str = "its own inputs") -> AbstractContextManager[None]:
    return in_one_line(f"{target.name}: the model failed on {on}")


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


def _try_evaluation(bench: Bench, task: Task, trained: tuple[Call, Any]) -> None:
    """Evaluate on a micro-batch of the smallest size, of training samples (`trained`) where there
    is no test data, so that what is wrong with the task's hooks shows before the measuring.

    Raises TargetError naming the hook. Figures that aren't means get a warning.
    """
    target, platform, model = bench.target, bench.platform, bench.model
    size = trained[0].tensors[0].shape[0]
    try:
        with _disable_current_modes():
            dataset = call_hook("data('test')", task.data, "test")
            some = size
            if not comes_in_batches(dataset):
                some = min(size, dataset_size(dataset, "test"))
            names = trained[0].names
            call, wanted = call_hook("data('test')", some_samples, dataset, "test", some, names)
    except TargetError as error:
        _warn(f"{error} (or train with tp-run --no-evaluate)")
        call, wanted = trained
    placed, wanted_there = _placed(platform.place, call, wanted)
    model.eval()
    try:
        with (
            _failures(target, "test samples in evaluation mode"),
            unchanged(model),
            torch.no_grad(),
            platform.forward_context(),
        ):
            output = placed.of(model)
    finally:
        model.train()
    with before_training():
        if platform.computed:
            with _disable_current_modes():
                lines = try_figures(task, stand_in(output), wanted)
        else:
            lines = try_figures(task, output, wanted_there)
    for line in lines:
        _warn(line)


def _try_scheduler(task: Task, optimizer: torch.optim.Optimizer, length: RunLength) -> None:
    """Step it once. `optimizer`: one that has been stepped."""
    with _disable_current_modes(), warnings.catch_warnings():
        # Torch looks for a step that the optimizer makes after the scheduler is made.
        warnings.simplefilter("ignore")
        scheduler = task_scheduler(task, optimizer, length)
        if scheduler is not None:
            call_hook("scheduler", scheduler.step, doing="step()")


def _usual_length(bench: Bench, task: Task) -> RunLength:
    """Of a run with as many epochs as tp-run trains where nothing else is said."""
    with _disable_current_modes():
        given = call_hook("data('train')", task.data, "train")
        samples = size_of(given, "train", bench.batch_size) or 0
    updates = max(samples // bench.batch_size, 1)
    return RunLength(_EPOCHS * updates, updates)


def _loading_s(bench: Bench, call: Call) -> float | None:
    task = bench.target.task
    if task is None or bench.platform.computed:
        return None
    bench.progress("loading samples", 0, 0)
    given = call_hook("data('train')", task.data, "train")
    size = size_of(given, "train", bench.batch_size)
    if size is not None and size < bench.batch_size:
        _warn(
            f"{bench.target.name}: data('train') has {size} samples, which don't fill a mini-batch "
            f"of {bench.batch_size}: give a smaller --batch-size, or train with --ragged pad"
        )
    return loading_s_per_sample(given, bench.batch_size, call.names)


def _warn(line: str) -> None:
    warnings.warn(line, TaskWarning, stacklevel=4)


def _optimizer(bench: Bench) -> OptimizerCost:
    task = bench.target.task
    make = None
    if not any(p.requires_grad for p in bench.model.parameters()):
        return OptimizerCost(
            name="none", state_bytes_per_parameter_byte=0, update_fixed_s=0, update_s_per_byte=0
        )
    if task is not None:
        trained = [(n, p) for n, p in bench.model.named_parameters() if p.requires_grad]
        known = {id(p): name for name, p in trained}

        def make(given: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
            named = [(known.get(id(p), "a parameter"), p) for p in given]
            groups = task_groups(task, trained, given)
            if groups:
                # A stand-in is of any group.
                groups[0]["params"] += [p for p in given if id(p) not in known]
            found = task_optimizer(task.optimizer, groups or given, named, "the model")
            made.append(found)
            return found

    made: list[torch.optim.Optimizer] = []
    spec = bench.platform.spec
    if spec is not None:
        cost = optimizer_roofline(make, spec, next(bench.model.parameters()).dtype)
    else:
        groups = [
            [t for t in state_of(bench.traced, layer.nodes).values() if isinstance(t, nn.Parameter)]
            for layer in bench.traced.layers
        ]
        held = list(bench.model.parameters())
        before = [p.detach().clone() for p in held]
        with bench.platform.clock() as clock:
            cost = measure_optimizer(make, held, groups, clock)
        # Its steps are on gradients of zeros, which not every optimizer takes for nothing.
        with torch.no_grad():
            for p, own in zip(held, before, strict=True):
                p.copy_(own)
    if task is not None:
        _try_scheduler(task, made[-1], _usual_length(bench, task))
    return cost
