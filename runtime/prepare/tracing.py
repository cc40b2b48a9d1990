"""The task's model traced for a run: its graph at every micro-batch size, in training and
evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from ...planner.plan import Plan
from ...profiles.errors import PlanError, TargetError, TraceError
from ...profiles.files import is_file
from ...profiles.profile import ProfileReference, made_of
from ...profiles.target import TASK_NEEDED, Target, resolve
from ...profiles.tasks.hooks import check_reads
from ...profiles.tasks.shapes import at_profiled
from ...profiles.tasks.task import Task
from ...profiles.tracing.call import Call
from ...profiles.tracing.front_ends import TRACE_SAMPLES, first_forward, trace
from ...profiles.tracing.graph import TracedModel, fingerprint, layers_and_values, why_not_evaluated
from .devices import Modes, modes_of_profile
from .traced_task import OtherModes, TracedTask

_SMALL_BYTES = 2**28


def is_small(plan: Plan) -> bool:
    """Whether the whole model may be run for real, to learn its shapes; else on fake tensors."""
    return sum(stage.memory_bytes for stage in plan.predicted.stages) <= _SMALL_BYTES


def task_to_train(name: str, made_from: ProfileReference) -> tuple[Target, Task]:
    """Import the task that a plan or --task names.

    Args:
        made_from: the profile that the plan was made from.

    Raises:
        TargetError: it can't be imported or built, or is no task.
        PlanError: the profile is one without a model.
    """
    if numbers := made_of(made_from):
        raise PlanError(
            f"plan: was made from {numbers} ({made_from.target}): costs "
            "without a model, which can be planned and shown but not run. Profile a model of your "
            "own with tp-profile"
        )
    file = name.rpartition(":")[0]
    if name == made_from.target and file.endswith(".py") and not is_file(Path(file)):
        raise TargetError(
            f"{name}: no such file: {file}; the plan names it as seen from the folder where it was "
            "profiled: start there; a new run may say where it is with --task"
        )
    target = resolve(name, to_train=True)
    if target.task is None:
        raise TargetError(f"{name}: is a model, not a task: {TASK_NEEDED}")
    return target, target.task


def trace_for_run(
    name: str,
    plan: Plan,
    samples: Collection[int],
    *,
    evaluate: bool,
    seed: int = 0,
    threads: int | None = None,
    report: Callable[[str], None] = lambda what: None,
    modes: Modes | None = None,
) -> TracedTask:
    """Trace a task's model as the profiler did, for each of these numbers of samples.

    Args:
        name: of the task.
        plan: whose profile must have been of the same model.
        evaluate: in evaluation mode, too.
        seed: of the model's weights.
        threads: torch's, from when the task is imported; None: as they are.
        report: is told what is being done.
        modes: that are on, those of a run; None: as the profile was made.

    Raises:
        TargetError: the task can't be imported or built, or is no task.
        TraceError: the model can't be traced, or has other layers for another number of samples
            or in evaluation mode.
        PlanError: it is another model than the profile's, or that is one without a model.
    """
    made_from, fake = plan.profile, not is_small(plan)
    report(f"importing {name}")
    target, task = task_to_train(name, made_from)
    if threads is not None:
        torch.set_num_threads(threads)
    report("building the model")
    model = target.model(seed)
    model.train()
    left = _in_other_mode(model)
    report("tracing the model and holding it against the plan")
    given, wanted = target.call(TRACE_SAMPLES)
    tracer = _Tracer(target, model, made_from, given, fake=fake)
    first_forward(model, target.name, at_profiled(given, made_from.varying), fake=fake)
    if not fake:
        check_reads("loss", task.loss, model, given, wanted)
    first = tracer.first()
    if fingerprint(first) != made_from.fingerprint:
        _refuse_model(tracer, first, modes)
    training = {
        n: first if first.only_size in (None, n) else tracer.graph(n) for n in sorted(set(samples))
    }
    evaluation, left_evaluated = None, frozenset[str]()
    if evaluate:
        model.eval()
        left_evaluated = _in_other_mode(model)
        figures = getattr(task, "metrics", None)
        if figures is not None and not fake:
            check_reads("metrics", figures, model, given, wanted)
        size = training[min(samples)].only_size or TRACE_SAMPLES
        evaluation = tracer.evaluation(size)
    _check_layers(target.name, first, training.values(), evaluation)
    return TracedTask(
        target,
        task,
        model,
        training,
        evaluation,
        fake,
        given.names,
        made_from.varying,
        OtherModes(left, left_evaluated),
    )


@dataclass(frozen=True)
class _Tracer:
    """Traces a model as its profile says.

    Attributes:
        given: what the model is called with, for `TRACE_SAMPLES` samples.
        fake: on fake tensors.
    """

    target: Target
    model: nn.Module
    made_from: ProfileReference
    given: Call
    fake: bool

    def graph(self, samples: int, *, verify: bool = False) -> TracedModel:
        """The model's graph in the mode that it is in. `verify`: run it beside the model."""
        call = self.given if samples == TRACE_SAMPLES else self.target.call(samples)[0]
        return trace(
            self.model,
            self.target.name,
            at_profiled(call, self.made_from.varying),
            front_end=self.made_from.front_end,
            granularity=self.made_from.granularity,
            verify=verify,
        )

    def first(self) -> TracedModel:
        """That of a few samples, in training mode."""
        try:
            # Nothing was run for a profile of a device that wasn't there.
            return self.graph(TRACE_SAMPLES, verify=not self.fake)
        except TraceError as error:
            if self.target.name == self.made_from.target:
                raise
            raise PlanError(
                f"plan: was made for {self.made_from.target}, and as that was traced "
                f"{self.target.name} can't be: profile and solve this one, or name the right task "
                f"with --task ({error})"
            ) from error

    def evaluation(self, samples: int) -> TracedModel:
        """That in evaluation mode, which the model is in; afterwards it is in training mode."""
        try:
            return self.graph(samples, verify=not self.fake)
        except TraceError as error:
            raise TraceError(f"in evaluation mode: {error}; or train with --no-evaluate") from error
        finally:
            self.model.train()


def _in_other_mode(model: nn.Module) -> frozenset[str]:
    every = model.named_modules(remove_duplicate=False)
    return frozenset(name for name, module in every if module.training != model.training)


def _refuse_model(tracer: _Tracer, found: TracedModel, modes: Modes | None) -> None:
    """Raise PlanError for a model whose fingerprint isn't its profile's.

    `modes`: that are on; None: as the profile was made.
    """
    name, made_from = tracer.target.name, tracer.made_from
    profiled = replace(modes_of_profile(made_from), deterministic=False)
    if modes is not None and modes != profiled:
        with profiled.on(), suppress(TraceError):
            if fingerprint(tracer.graph(TRACE_SAMPLES)) == made_from.fingerprint:
                raise PlanError(
                    f"plan: the forward of {name} asks which modes are on, and does something else "
                    f"under those of this run ({modes}) than under those of the profile "
                    f"({profiled}): run it as it was profiled, or profile it as it is to run"
                )
    raise PlanError(
        f"plan: was made for another model: {made_from.target} with fingerprint "
        f"{made_from.fingerprint}; {name} has {fingerprint(found)}. Profile and solve again, or "
        "name the right task with --task"
    )


def _check_layers(
    name: str, first: TracedModel, training: Iterable[TracedModel], evaluation: TracedModel | None
) -> None:
    same = layers_and_values(first)
    if any(layers_and_values(other) != same for other in training):
        raise TraceError(
            f"{name}: the model's forward has other layers for another number of samples; it can't "
            "be cut into stages"
        )
    if evaluation is not None and (odd := why_not_evaluated(first, evaluation)):
        raise TraceError(f"{name}: {odd}")
