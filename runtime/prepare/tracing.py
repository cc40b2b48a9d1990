"""The task's model traced for a run: its graph at every micro-batch size, in training and
evaluation mode."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ...planner.plan import Plan
from ...profiles.autograd.dropout import BATCH_NORMS, WithoutDropout
from ...profiles.autograd.random_numbers import RandomCalls, random_calls
from ...profiles.errors import PlanError, TargetError, TraceError
from ...profiles.files import is_file
from ...profiles.profile import ProfileReference, VaryingShapes, made_of
from ...profiles.target import TASK_NEEDED, Target, resolve
from ...profiles.tasks.hooks import check_reads, in_one_line
from ...profiles.tasks.loss_parts import own_copy
from ...profiles.tasks.shapes import at_profiled
from ...profiles.tasks.task import Task
from ...profiles.tracing.call import Call, unchanged, without_data
from ...profiles.tracing.front_ends import TRACE_SAMPLES, first_forward, trace
from ...profiles.tracing.graph import GraphBody, TracedModel, fingerprint, graph_of, values
from ...profiles.tracing.pieces import take_apart
from ...profiles.tracing.random_states import seed_everywhere
from ...profiles.tracing.shapes import ValueSpec, rewritten_by, run_node_by_node, specs_and_result
from ...profiles.tracing.verify import all_same
from .devices import Modes, modes_of_profile

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
            "profiled: start there, or say where it is with --task"
        )
    target = resolve(name, to_train=True)
    if target.task is None:
        raise TargetError(f"{name}: is a model, not a task: {TASK_NEEDED}")
    return target, target.task


@dataclass(frozen=True)
class ForwardLook:
    """Results and shapes of one forward of some number of samples.

    Attributes:
        specs: of what layers take from each other; where mini-batches differ in shape, in one of
            those shapes that were profiled.
        result: the model's, of fake tensors where it ran on such.
        target: that belongs to it.
    """

    specs: Mapping[str, ValueSpec]
    result: Any
    target: Any

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors in the result."""
        return [tuple(tensor.shape) for tensor in tensors_in(self.result)]


def tensors_in(result: Any) -> list[Tensor]:
    """Those of a model's result."""
    return [leaf for leaf in take_apart(result)[0] if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class OtherModes:
    """Modules that a model's own `train` leaves in the other mode, as where batch norms are frozen.

    Attributes:
        training: names of those in evaluation mode while the model is trained.
        evaluation: names of those in training mode while it is evaluated.
    """

    training: frozenset[str] = frozenset()
    evaluation: frozenset[str] = frozenset()

    def set(self, module: nn.Module, *, training: bool) -> None:
        """Set a piece's mode; it has the model's modules, but not what holds them."""
        module.train(training)
        names = self.training if training else self.evaluation
        for name, inner in module.named_modules(remove_duplicate=False) if names else ():
            if name in names:
                inner.training = not training


def _in_other_mode(model: nn.Module) -> frozenset[str]:
    every = model.named_modules(remove_duplicate=False)
    return frozenset(name for name, module in every if module.training != model.training)


@dataclass(frozen=True)
class TracedTask:
    """The model's graphs, one for each micro-batch size, with the same layers in all.

    Attributes:
        model: that was traced, in training mode.
        training: by number of samples.
        evaluation: in evaluation mode: tracing fixes what depends on `self.training`; None where
            nothing is evaluated.
        fake: forwards run on fake tensors.
        varying: shapes of mini-batches, where they aren't all alike.
        arguments: names of the model's arguments, None for one that goes by position.
        modes: which modules the model's own train() and eval() leave in the other mode.
    """

    target: Target
    task: Task
    model: nn.Module
    training: Mapping[int, TracedModel]
    evaluation: TracedModel | None
    fake: bool
    arguments: tuple[str | None, ...]
    varying: VaryingShapes | msgspec.UnsetType
    modes: OtherModes

    def look(self, samples: int, graph: TracedModel | None = None) -> ForwardLook:
        """Run the model on so many samples.

        Args:
            graph: one of `training`; that for so many samples by default.

        Raises:
            TargetError: the model fails.
            TraceError: what a layer gives can't cross a cut.
        """
        graph = graph or self.training[samples]
        call, wanted = self.target.call(samples)
        with in_one_line(f"{self.target.name}: the model failed on its own inputs"):
            specs, result = specs_and_result(graph, call.tensors, fake=self.fake)
            if self.varying is not msgspec.UNSET:
                profiled = at_profiled(call, self.varying).tensors
                specs, _ = specs_and_result(graph, profiled, fake=self.fake)
        for node in graph.inputs:
            specs.pop(node.name, None)
        return ForwardLook(specs, result, wanted)

    def check_without_gradients(self, samples: int) -> None:
        """Check that a forward of so many samples does the same without gradients, as the first run
        of what is computed again has none.

        Raises PlanError.
        """
        module, results = self.training[samples].module, list[Sequence[Any]]()
        tensors = self.target.call(samples)[0].tensors
        for grad in (True, False):
            with unchanged(module), torch.set_grad_enabled(grad):
                seed_everywhere(0)
                results.append(take_apart(module(*[t.clone() for t in tensors]))[0])
        if not all_same(*results):
            raise PlanError(
                f"plan: the forward of {self.target.name} asks whether gradients are on "
                "(torch.is_grad_enabled), and does something else without them: what is computed "
                "again is run without first; plan without --recompute"
            )

    def rewritten(self, samples: int) -> frozenset[int]:
        """Storages of the parameters that aren't trained and that a forward of so many samples
        changes. Call it where `look` was successful."""
        graph = self.training[samples]
        return rewritten_by(graph, self.target.call(samples)[0].tensors, fake=self.fake)

    def random_calls(
        self, samples: int, mini_batch: int, groups: Sequence[Sequence[int]]
    ) -> RandomCalls | None:
        """What draws random numbers in training, dropout left out.

        Args:
            samples: in a micro-batch.
            groups: the layers of each stage.

        Returns None where it can't be told which stage draws what.
        """
        graph, sizes = self.training[samples], (samples, mini_batch)
        looking = without_data(self.model) if self.fake else unchanged(self.model)

        def inputs(call: Call, mode: Any) -> list[Tensor]:
            given = at_profiled(call, self.varying).tensors
            return [t.clone() if mode is None else mode.from_tensor(t) for t in given]

        calls = {n: self.target.call(n) for n in sizes}

        def loss(n: int, result: Any) -> None:
            with suppress(Exception):  # the user's code
                own_copy(self.task).loss(result, calls[n][1])

        names = [{node.name for k in group for node in graph.layers[k].nodes} for group in groups]
        names[-1].update(node.name for node in graph.packing())
        try:
            with looking as mode, torch.no_grad(), WithoutDropout():
                return random_calls(
                    lambda n: calls[n][0].of(self.model, inputs(calls[n][0], mode)),
                    loss,
                    sizes,
                    partial(run_node_by_node, graph, inputs(calls[samples][0], mode)),
                    names,
                )
        except Exception:  # the user's model, or an operation without a fake form
            return None

    def flops_per_sample(self, samples: int) -> float | None:
        """Floating-point operations of a forward, of so many samples, for each of them; as
        torch.utils.flop_counter has it: of matrix products, convolutions and attention, a
        multiply-add being two. None: they can't be counted, or there are none."""
        from torch.utils.flop_counter import FlopCounterMode

        graph = self.training[samples]
        call, _ = self.target.call(samples)
        try:
            # The other way round, the cache of fake tensors would hide operations.
            with without_data(graph.module) as mode:
                given = [mode.from_tensor(tensor) for tensor in call.tensors]
                with FlopCounterMode(display=False) as counter:
                    graph.module(*given)
        except Exception:  # an operation without a fake form, of whatever library
            return None
        return counter.get_total_flops() / samples or None


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
    # Nothing was run for a profile of a device that wasn't there.
    first = tracer.graph(TRACE_SAMPLES, verify=not fake)
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

    def evaluation(self, samples: int) -> TracedModel:
        """That in evaluation mode, which the model is in; afterwards it is in training mode."""
        try:
            return self.graph(samples, verify=not self.fake)
        except TraceError as error:
            raise TraceError(f"in evaluation mode: {error}; or train with --no-evaluate") from error
        finally:
            self.model.train()


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
    same = _layers_and_values(first)
    if any(_layers_and_values(other) != same for other in training):
        raise TraceError(
            f"{name}: the model's forward has other layers for another number of samples; it can't "
            "be cut into stages"
        )
    if evaluation is not None and _layers_and_values(evaluation) != same:
        raise TraceError(
            f"{name}: the model's forward has other layers in evaluation mode than in training "
            "mode; it can't be evaluated with the pipeline it is trained with: train with "
            "--no-evaluate"
        )


def _layers_and_values(traced: TracedModel) -> tuple[list[str], list[str]]:
    return [layer.name for layer in traced.layers], [v.node.name for v in values(traced)]


def has_statistics(model: nn.Module, bodies: Iterable[GraphBody]) -> bool:
    """Whether something of a model, which is cut into these bodies, has running statistics."""
    return any(name.endswith("running_mean") for name, _ in model.named_buffers()) or any(
        node.target in BATCH_NORMS for body in bodies for node in graph_of(body).nodes
    )
