"""A model and its task's hooks called before anything is measured, so that what is wrong with them
isn't blamed on a trace, and shows before the measuring."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import TargetError, TaskWarning, TraceError
from ..target import Target
from ..tasks.hooks import (
    RunLength,
    before_training,
    call_hook,
    check_reads,
    in_one_line,
    reading,
    stand_in,
    task_scheduler,
    try_figures,
)
from ..tasks.loading import loading_s_per_sample
from ..tasks.samples import comes_in_batches, dataset_size, size_of, some_samples
from ..tasks.task import Task
from ..tracing.call import Call, unchanged
from ..tracing.front_ends import TRACE_SAMPLES, trace_alike
from ..tracing.graph import why_not_evaluated
from ..tracing.pieces import map_items
from .bench import Bench
from .platforms import Platform

_EPOCHS = 5


def place_call(place: Callable[[Tensor], Tensor], call: Call, target: Any) -> tuple[Call, Any]:
    """A call and its target, with each tensor put where it is needed."""

    def there(value: Any) -> Any:
        return place(value) if isinstance(value, Tensor) else map_items(there, value)

    return call.with_tensors([*map(place, call.tensors)]), there(target)


def try_model(target: Target, call: Callable[[], Any]) -> None:
    """Call the model as the user would: so that what's wrong with it isn't blamed on a trace."""
    with failures(target), torch.no_grad():
        call()


def try_parts(target: Target, model: nn.Module, platform: Platform) -> None:
    """Look whether parts of a batch, which the data put together by themselves, are batches too:
    they aren't where numbers count in the whole of it."""
    found = target.whole_and_parts(TRACE_SAMPLES)
    if found is None:
        return
    whole, *parts = (place_call(platform.place, call, ())[0] for call in (found[0], *found[1]))
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


def try_reads(
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


def failures(target: Target, on: str = "its own inputs") -> AbstractContextManager[None]:
    """Have whatever fails say that it was the model, in a line."""
    return in_one_line(f"{target.name}: the model failed on {on}")


def try_evaluation(bench: Bench, task: Task, trained: tuple[Call, Any]) -> None:
    """Evaluate on a micro-batch of the smallest size, of training samples (`trained`) where there
    is no test data, so that what is wrong with the task's hooks shows before the measuring.

    Raises TargetError naming the hook. Figures that aren't means get a warning.
    """
    target, platform, model = bench.target, bench.platform, bench.model
    size = trained[0].tensors[0].shape[0]
    try:
        with reading("test"), _disable_current_modes():
            dataset = call_hook("data('test')", task.data, "test")
            some = size
            if not comes_in_batches(dataset):
                some = min(size, dataset_size(dataset, "test"))
            names = trained[0].names
            call, wanted = call_hook("data('test')", some_samples, dataset, "test", some, names)
    except TargetError as error:
        warn(str(error))
        call, wanted = trained
    placed, wanted_there = place_call(platform.place, call, wanted)
    model.eval()
    try:
        with (
            failures(target, "test samples in evaluation mode"),
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
        warn(line)


def try_stages(bench: Bench, call: Call) -> None:
    """Warn of a model that can't be evaluated with the stages that it is trained with."""
    model, name, traced = bench.model, bench.target.name, bench.traced
    model.eval()
    try:
        with unchanged(model), bench.platform.forward_context():
            evaluated = trace_alike(traced, model, name, call)
        if odd := why_not_evaluated(traced, evaluated):
            warn(f"{name}: {odd}")
    except Exception as error:  # what else the user's forward does in this mode, a run tells
        if isinstance(error, TraceError):
            warn(f"in evaluation mode: {error}; or train with tp-run --no-evaluate")
    finally:
        model.train()


def try_scheduler(task: Task, optimizer: torch.optim.Optimizer, length: RunLength) -> None:
    """Step it once. `optimizer`: one that has been stepped."""
    with _disable_current_modes(), warnings.catch_warnings():
        # Torch looks for a step that the optimizer makes after the scheduler is made.
        warnings.simplefilter("ignore")
        scheduler = task_scheduler(task, optimizer, length)
        if scheduler is not None:
            call_hook("scheduler", scheduler.step, doing="step()")


def usual_length(bench: Bench, task: Task) -> RunLength:
    """Of a run with as many epochs as tp-run trains where nothing else is said."""
    with _disable_current_modes():
        given = call_hook("data('train')", task.data, "train")
        samples = size_of(given, "train", bench.batch_size) or 0
    updates = max(samples // bench.batch_size, 1)
    return RunLength(_EPOCHS * updates, updates)


def time_loading(bench: Bench, call: Call) -> float | None:
    """Seconds a sample that its loading takes; None: there is no task, or nothing is run."""
    task = bench.target.task
    if task is None or bench.platform.computed:
        return None
    bench.progress("loading samples", 0, 0)
    given = call_hook("data('train')", task.data, "train")
    size = size_of(given, "train", bench.batch_size)
    if size is not None and size < bench.batch_size:
        warn(
            f"{bench.target.name}: data('train') has {size} samples, which don't fill a mini-batch "
            f"of {bench.batch_size}: give a smaller --batch-size, or train with --ragged pad"
        )
    with in_one_line(f"{bench.target.name}: data('train') failed"):
        return loading_s_per_sample(given, bench.batch_size, call.names)


def warn(line: str) -> None:
    """Warn who has called `measure`, from a function which that calls."""
    warnings.warn(line, TaskWarning, stacklevel=4)
