"""A plan and its task made ready to run; all checks that need no other worker."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...planner.plan import Plan, check_cut, check_plan, pipeline_of
from ...planner.schedules.check import check_schedule
from ...planner.schedules.schedules import make_schedule
from ...planner.simulator.pipeline import Pipeline
from ...profiles.errors import PlanError, TargetError, TimeprestError, TraceError
from ...profiles.profile import IMPORTED
from ...profiles.target import Target, resolve
from ...profiles.tasks.hooks import describe_error
from ...profiles.tasks.task import Task, dataset_size
from ...profiles.tracing.front_ends import TRACE_SAMPLES, trace
from ...profiles.tracing.graph import (
    TracedModel,
    fingerprint,
    shared_parameters,
    tied_layers,
    values,
)
from ...profiles.tracing.pieces import Piece, cut
from ...profiles.tracing.shapes import ValueSpec, result_shapes, specs_and_result
from ..settings import RunSettings
from .data import DIVIDE, DROP, NO_EVALUATION, Segment, check_result, segments
from .devices import autocast_of, forward_context
from .distribution import (
    Distribution,
    SentValue,
    Specs,
    distribute,
    share_of,
)
from .loss import LossKind, kind_of_loss
from .tied_parameters import TiedParameters, first_names, give_copies
from .workers import Worker, workers_of

_SMALL_BYTES = 2**28


@dataclass(frozen=True)
class PreparedStage:
    """A stage's piece of the model.

    Attributes:
        piece: for training.
        evaluation_piece: the same in evaluation mode; the two share parameters and leaf modules.
        specs: of every value that layers take from each other, for a replica's micro-batch.
    """

    piece: Piece
    evaluation_piece: Piece
    specs: Specs


@dataclass(frozen=True)
class PreparedModel:
    """The model, cut into stages.

    Attributes:
        inputs: names of the model's own inputs.
        names: for each name of a parameter, the first that the model has for it.
        tied: parameters that several stages hold copies of.
        unused: parameters and buffers of the model that no stage uses, under its names.
        loss: what the task's loss gives.
        autocast: dtype of torch.autocast for the forwards; None: off.
    """

    stages: tuple[PreparedStage, ...]
    inputs: tuple[str, ...]
    names: Mapping[str, str]
    tied: tuple[TiedParameters, ...]
    unused: Mapping[str, Tensor]
    loss: LossKind
    autocast: torch.dtype | None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of all stages, for training."""
        return tuple(stage.piece for stage in self.stages)


@dataclass(frozen=True)
class Prepared:
    """A plan ready to run.

    Attributes:
        samples: in the training data.
        workers: by rank.
    """

    plan: Plan
    settings: RunSettings
    task: Task
    samples: int
    segments: tuple[Segment, ...]
    pipeline: Pipeline
    workers: tuple[Worker, ...]
    model: PreparedModel
    distribution: Distribution


def prepare(
    plan: Plan, settings: RunSettings, tell: Callable[[str], None] = lambda what: None
) -> Prepared:
    """Build the model with its seed, check it against the plan and cut it.

    Args:
        tell: is told what is being done.

    Raises:
        TargetError: the task can't be imported or built, or has too little data.
        TraceError: the model can't be traced.
        PlanError: the plan is for another model, its stages don't fit together, or it has what
            can be planned but not run yet.
    """
    check_plan(plan)
    _check_profiled(plan)
    autocast = autocast_of(plan, settings)
    tell(f"importing {settings.task}")
    target = resolve(settings.task)
    if target.task is None:
        raise TargetError(
            f"{settings.task}: is a model, not a task: training needs data, a loss and an "
            "optimizer too (docs/tasks.md)"
        )
    torch.set_num_threads(settings.threads)
    tell("building the model")
    model = target.model(settings.seed)
    model.train()
    pipeline = pipeline_of(plan)
    workers = workers_of(plan.stages)
    shares = tuple(share_of(pipeline, plan.micro_batch, worker) for worker in workers)
    samples = [share.samples for worker, share in zip(workers, shares, strict=True) if worker.leads]
    tell("tracing the model and holding it against the plan")
    traced = _trace_for_training(plan, model, target, samples)
    with forward_context(autocast):
        looked = {n: _look(plan, traced[n], target, n) for n in traced}
    specs = {n: found for n, (found, _, _) in looked.items()}
    _, result, wanted = looked[samples[-1]]
    loss = kind_of_loss(target.task, result, wanted, autocast)
    del looked, result
    # What every stage has room for.
    least = min(samples)
    position = {layer.name: k for k, layer in enumerate(traced[least].layers)}
    groups = [sorted(position[name] for name in stage.nodes) for stage in plan.stages]
    pieces = {n: cut(of_size, groups) for n, of_size in traced.items()}
    evaluated = _trace_for_evaluation(plan, model, target, traced[least])
    tell("cutting the model into stages")
    sent = _sent(plan, traced[least], groups)
    distribution = distribute(pipeline, workers, shares, sent, specs)
    chosen = [pieces[n][s] for s, n in enumerate(samples)]
    evaluation_pieces = cut(evaluated, groups)
    modes = zip(chosen, evaluation_pieces, strict=True)
    tied = give_copies([[piece.module for piece in both] for both in modes])
    stages = zip(chosen, evaluation_pieces, (specs[n] for n in samples), strict=True)
    size = dataset_size(target.task.data("train"), "train")
    prepared = Prepared(
        plan=plan,
        settings=settings,
        task=target.task,
        samples=size,
        segments=segments(plan, settings, size),
        pipeline=pipeline,
        workers=workers,
        model=PreparedModel(
            stages=tuple(PreparedStage(*stage) for stage in stages),
            inputs=tuple(node.name for node in traced[least].inputs),
            names=first_names(model),
            tied=tied,
            unused=_unused(model, chosen),
            loss=loss,
            autocast=autocast,
        ),
        distribution=distribution,
    )
    _check_padding(prepared, target, traced, samples[-1])
    few = min(3, max(segment.mini_batches for segment in prepared.segments))
    check_schedule(pipeline, make_schedule(pipeline, few), few)
    return prepared


def is_small(plan: Plan) -> bool:
    """Whether the whole model may be run for real, to learn its shapes; else on fake tensors."""
    return sum(stage.memory_bytes for stage in plan.predicted.stages) <= _SMALL_BYTES


def with_own_weights(prepared: Prepared, worker: Worker) -> Prepared:
    """The same, where the replicas of a stage in one process need weights of their own."""
    if worker.leads:
        return prepared
    stages = list(prepared.model.stages)
    # Together: both modes of a stage share their parameters.
    stages[worker.stage] = copy.deepcopy(stages[worker.stage])
    return replace(prepared, model=replace(prepared.model, stages=tuple(stages)))


def _unused(model: nn.Module, pieces: Sequence[Piece]) -> dict[str, Tensor]:
    names = first_names(model)
    used = {names.get(name, name) for piece in pieces for name in piece.module.state_dict()}
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if names.get(name, name) not in used and isinstance(tensor, Tensor)
    }


def _look(
    plan: Plan, traced: TracedModel, target: Target, samples: int
) -> tuple[dict[str, ValueSpec], Any, Any]:
    """Specs of what layers take from each other, for so many samples; the model's result, which
    may be of fake tensors; the target that belongs to it."""
    inputs, wanted = target.sample(samples)
    try:
        specs, result = specs_and_result(traced, inputs, fake=not is_small(plan))
    except TimeprestError:
        raise
    except Exception as error:  # the user's model runs here
        raise TargetError(
            f"{target.name}: the model failed on its own inputs: {describe_error(error)}"
        ) from error
    for node in traced.inputs:
        specs.pop(node.name, None)
    return specs, result, wanted


def _check_profiled(plan: Plan) -> None:
    """Refuse what a profile can be of, and a run can't."""
    made_from = plan.profile
    if made_from.front_end in IMPORTED:
        raise PlanError(
            f"plan: was made from {IMPORTED[made_from.front_end]} ({made_from.target}): costs "
            "without a model, which can be planned and shown but not run. Profile a model of your "
            "own with tp-profile"
        )


def _check_padding(
    prepared: Prepared, target: Target, traced: Mapping[int, TracedModel], result_samples: int
) -> None:
    """Refuse results that padding can't be cut off, where there is going to be any.

    Args:
        traced: by number of samples.
        result_samples: in a micro-batch of the last stage.

    Raises TargetError.
    """
    plan, size = prepared.plan, result_samples
    if plan.mini_batch % plan.micro_batches:
        advice = DIVIDE
    elif any(segment.samples % plan.mini_batch for segment in prepared.segments):
        advice = DROP
    elif prepared.settings.evaluate:
        size = prepared.distribution.evaluation_samples
        if not _test_size(prepared.task) % size:
            return
        advice = NO_EVALUATION
    else:
        return
    graph = traced[size]
    # A graph of one size alone is tried at that one.
    other = size if graph.only_size is not None else size + 1
    try:
        shapes, others = (
            result_shapes(graph, target.sample(samples)[0], fake=not is_small(plan))
            for samples in (size, other)
        )
    except TraceError:
        raise
    except Exception:  # the user's model, which needn't take that other size
        return
    check_result(shapes, others, size, other, advice)


def _test_size(task: Task) -> int:
    """Samples in the test data; 0 where it can't be had, which the evaluation is to say."""
    try:
        return dataset_size(task.data("test"), "test")
    except Exception:  # the user's code
        return 0


def _trace(plan: Plan, model: nn.Module, target: Target, samples: int) -> TracedModel:
    """The graph as the profiler found it."""
    return trace(
        model,
        target.name,
        target.call(samples)[0],
        front_end=plan.profile.front_end,
        granularity=plan.profile.granularity,
        verify=False,
    )


def _trace_for_training(
    plan: Plan, model: nn.Module, target: Target, samples: Sequence[int]
) -> dict[int, TracedModel]:
    """The graph for each of these numbers of samples: the same one, where it is for any."""
    first = _trace(plan, model, target, TRACE_SAMPLES)
    _check_model(plan, first, target)
    found = {
        n: first if first.only_size in (None, n) else _trace(plan, model, target, n)
        for n in sorted(set(samples))
    }
    if any(not _same_graph(traced, first) for traced in found.values()):
        raise TraceError(
            f"{target.name}: the model's forward has other layers for another number of samples; "
            "it can't be cut into stages"
        )
    return found


def _trace_for_evaluation(
    plan: Plan, model: nn.Module, target: Target, traced: TracedModel
) -> TracedModel:
    """The model as it is in evaluation mode: tracing fixes what depends on `self.training`."""
    model.eval()
    try:
        evaluation = _trace(plan, model, target, traced.only_size or TRACE_SAMPLES)
    finally:
        model.train()
    if not _same_graph(evaluation, traced):
        raise TraceError(
            f"{target.name}: the model's forward has other layers in evaluation mode than in "
            "training mode; it can't be evaluated with the pipeline it is trained with"
        )
    return evaluation


def _same_graph(one: TracedModel, other: TracedModel) -> bool:
    """Whether both have the same layers, with the same values between them."""
    layers = [[layer.name for layer in traced.layers] for traced in (one, other)]
    names = [[value.node.name for value in values(traced)] for traced in (one, other)]
    return layers[0] == layers[1] and names[0] == names[1]


def _check_model(plan: Plan, traced: TracedModel, target: Target) -> None:
    found = fingerprint(traced)
    if found != plan.profile.fingerprint:
        raise PlanError(
            f"plan: was made for another model: {plan.profile.target} with fingerprint "
            f"{plan.profile.fingerprint}; {target.name} has {found}. Profile and solve again, or "
            "name the right task with --task"
        )
    names = [layer.name for layer in traced.layers]
    owner = traced.owner()
    edges = [
        (names[owner[value.node]], names[consumer])
        for value in values(traced)
        if value.node in owner
        for consumer in value.consumers
        if consumer < len(names)
    ]
    check_cut([stage.nodes for stage in plan.stages], names, edges)
    stage_of = {name: s for s, stage in enumerate(plan.stages) for name in stage.nodes}
    free = shared_parameters(traced) if plan.tied == "split" else {}
    for group in tied_layers(traced):
        if group not in free and len({stage_of[names[k]] for k in group}) > 1:
            shared = ", ".join(repr(names[k]) for k in group)
            raise PlanError(f"plan: layers {shared} share parameters and must be on one stage")


def _sent(plan: Plan, traced: TracedModel, groups: list[list[int]]) -> list[SentValue]:
    """What goes from stage to stage. Raises PlanError when the plan says otherwise."""
    stage_of = {layer: s for s, group in enumerate(groups) for layer in group}
    stage_of[len(traced.layers)] = len(groups) - 1
    found: list[SentValue] = []
    for value in values(traced):
        if value.producer is None:
            continue
        source = stage_of[value.producer]
        for target in sorted({stage_of[k] for k in value.consumers} - {source}):
            found.append(SentValue(value.node.name, source, target))
    mine: set[tuple[str, int, int]] = set(found)
    planned = {(e.tensor, e.source, e.target) for e in plan.edges}
    if mine != planned:
        odd = sorted(mine ^ planned)[0]
        raise PlanError(
            f"plan: edges: {odd[0]!r} from stage {odd[1]} to {odd[2]} "
            f"{'is missing' if odd in mine else 'is not needed'} for these stages; after editing "
            "stages, run tp-plan check PLAN --profile PROFILE -o PLAN"
        )
    return found
