"""From a plan and its task to what the workers need; all checks that need no other worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..planner.order_check import check_order
from ..planner.orders import make_order
from ..planner.pipeline import Pipeline
from ..planner.plan import Plan, check_cut, check_plan, pipeline_of
from ..planner.variants import variant_named
from ..profiles.errors import PlanError, TargetError, TimeprestError, TraceError
from ..profiles.profile import IMPORTED
from ..profiles.target import Target, describe_error, resolve
from ..profiles.task import Task, dataset_size
from ..profiles.tracing.fingerprint import fingerprint
from ..profiles.tracing.front_ends import TRACE_SAMPLES, trace
from ..profiles.tracing.graph import TracedModel, tied_layers, values
from ..profiles.tracing.pieces import Piece, cut
from ..profiles.tracing.shapes import ValueSpec, result_shapes, value_specs
from .channels import Crossing
from .data import Segment, segments
from .padding import DIVIDE, DROP, NO_EVALUATION, check_result
from .precision import autocast_of, forward_context
from .settings import RunSettings

_SMALL_BYTES = 2**28
"""A model that needs less in all is run once, for real, to learn its shapes."""


@dataclass(frozen=True)
class Prepared:
    """A plan ready to run.

    Attributes:
        pieces: per stage, for training; `evaluation_pieces` the same in evaluation mode.
        autocast: dtype of torch.autocast for the forwards; None: off.
        specs: of every value that layers take from each other.
        crossings: what goes between stages; the same list on every worker.
    """

    plan: Plan
    settings: RunSettings
    task: Task
    pipeline: Pipeline
    pieces: tuple[Piece, ...]
    evaluation_pieces: tuple[Piece, ...]
    autocast: torch.dtype | None
    specs: dict[str, ValueSpec]
    crossings: tuple[Crossing, ...]
    segments: tuple[Segment, ...]
    inputs: tuple[str, ...]


def prepare(plan: Plan, settings: RunSettings) -> Prepared:
    """Build the model with its seed, check it against the plan and cut it.

    Raises:
        TargetError: the task can't be imported or built, or has too little data.
        TraceError: the model can't be traced.
        PlanError: the plan is for another model, its stages don't fit together, or it has what
            can be planned but not run yet.
    """
    check_plan(plan)
    _check_profiled(plan)
    _check_runs(plan)
    autocast = autocast_of(plan, settings)
    target = resolve(settings.task)
    if target.task is None:
        raise TargetError(
            f"{settings.task}: is a model, not a task: training needs data, a loss and an "
            "optimizer too (docs/tasks.md)"
        )
    torch.set_num_threads(settings.threads)
    model = target.model(settings.seed)
    model.train()
    traced = _trace_for_training(plan, model, target)
    position = {layer.name: k for k, layer in enumerate(traced.layers)}
    groups = [sorted(position[name] for name in stage.nodes) for stage in plan.stages]
    inputs, _ = target.sample(plan.micro_batch)
    whole_bytes = sum(stage.memory_bytes for stage in plan.predicted.stages)
    try:
        with forward_context(autocast):
            specs = value_specs(traced, inputs, fake=whole_bytes > _SMALL_BYTES)
    except TimeprestError:
        raise
    except Exception as error:  # the user's model runs here
        raise TargetError(
            f"{target.name}: the model failed on its own inputs: {describe_error(error)}"
        ) from error
    found = segments(plan, settings, dataset_size(target.task.data("train"), "train"))
    _check_padding(plan, settings, target.task, traced, target, found)
    pipeline = pipeline_of(plan)
    crossings = _crossings(plan, traced, groups, specs, pipeline.micro_batches_per_backward)
    prepared = Prepared(
        plan=plan,
        settings=settings,
        task=target.task,
        pipeline=pipeline,
        pieces=tuple(cut(traced, groups)),
        evaluation_pieces=tuple(cut(_trace_for_evaluation(plan, model, target, traced), groups)),
        autocast=autocast,
        specs={name: spec for name, spec in specs.items() if not _is_input(traced, name)},
        crossings=crossings,
        segments=found,
        inputs=tuple(node.name for node in traced.inputs),
    )
    few = min(3, max(segment.mini_batches for segment in prepared.segments))
    check_order(pipeline, make_order(pipeline, few), few)
    return prepared


def _is_input(traced: TracedModel, name: str) -> bool:
    return any(node.name == name for node in traced.inputs)


def _check_profiled(plan: Plan) -> None:
    """Refuse what a profile can be of, and a run can't."""
    made_from = plan.profile
    if made_from.front_end in IMPORTED:
        raise PlanError(
            f"plan: was made from {IMPORTED[made_from.front_end]} ({made_from.target}): costs "
            "without a model, which can be planned and shown but not run. Profile a model of your "
            "own with tp-profile"
        )


def _check_runs(plan: Plan) -> None:
    """Refuse what can be planned and simulated, and a run doesn't do yet."""
    if not variant_named(plan.variant).runs:
        raise PlanError(
            f"plan: variant: {plan.variant} can be planned and simulated; tp-run doesn't train "
            "with it yet"
        )
    for s, stage in enumerate(plan.stages):
        if len(stage.devices) > 1:
            raise PlanError(
                f"plan: stages[{s}].devices: tp-run doesn't train replicas of a stage yet; plan "
                "without them: tp-plan solve --replicas off"
            )


def _check_padding(
    plan: Plan,
    settings: RunSettings,
    task: Task,
    traced: TracedModel,
    target: Target,
    found: Sequence[Segment],
) -> None:
    """Refuse results that padding can't be cut off, where there is going to be any.

    Raises TargetError.
    """
    size = plan.micro_batch
    advice = None
    if plan.mini_batch % plan.micro_batches:
        advice = DIVIDE
    elif any(segment.samples % plan.mini_batch for segment in found):
        advice = DROP
    elif settings.evaluate and _test_size(task) % size:
        advice = NO_EVALUATION
    if advice is None:
        return
    # A graph of one size alone is tried at that one.
    other = size if traced.only_size is not None else size + 1
    fake = sum(stage.memory_bytes for stage in plan.predicted.stages) > _SMALL_BYTES
    try:
        shapes, others = (
            result_shapes(traced, target.sample(samples)[0], fake=fake) for samples in (size, other)
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


def _trace_for_training(plan: Plan, model: nn.Module, target: Target) -> TracedModel:
    traced = _trace(plan, model, target, TRACE_SAMPLES)
    _check_model(plan, traced, target)
    if traced.only_size not in (None, plan.micro_batch):
        traced = _trace(plan, model, target, plan.micro_batch)
    return traced


def _trace_for_evaluation(
    plan: Plan, model: nn.Module, target: Target, traced: TracedModel
) -> TracedModel:
    """The model as it is in evaluation mode: tracing fixes what depends on `self.training`."""
    model.eval()
    try:
        evaluation = _trace(plan, model, target, traced.only_size or TRACE_SAMPLES)
    finally:
        model.train()
    same_layers = [la.name for la in evaluation.layers] == [la.name for la in traced.layers]
    if not same_layers or _names(evaluation) != _names(traced):
        raise TraceError(
            f"{target.name}: the model's forward has other layers in evaluation mode than in "
            "training mode; it can't be evaluated with the pipeline it is trained with"
        )
    return evaluation


def _names(traced: TracedModel) -> list[str]:
    return [value.node.name for value in values(traced)]


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
    for group in tied_layers(traced):
        if len({stage_of[names[k]] for k in group}) > 1:
            shared = ", ".join(repr(names[k]) for k in group)
            raise PlanError(f"plan: layers {shared} share parameters and must be on one stage")


def _crossings(
    plan: Plan,
    traced: TracedModel,
    groups: list[list[int]],
    specs: dict[str, ValueSpec],
    gradient_micro_batches: int,
) -> tuple[Crossing, ...]:
    stage_of = {layer: s for s, group in enumerate(groups) for layer in group}
    stage_of[len(traced.layers)] = len(groups) - 1
    found: list[Crossing] = []
    for value in values(traced):
        if value.producer is None:
            continue
        source = stage_of[value.producer]
        for target in sorted({stage_of[k] for k in value.consumers} - {source}):
            spec = specs[value.node.name]
            found.append(Crossing(len(found), spec, source, target, gradient_micro_batches))
    mine = {(c.spec.name, c.source, c.target) for c in found}
    planned = {(e.tensor, e.source, e.target) for e in plan.edges}
    if mine != planned:
        odd = sorted(mine ^ planned)[0]
        raise PlanError(
            f"plan: edges: {odd[0]!r} from stage {odd[1]} to {odd[2]} "
            f"{'is missing' if odd in mine else 'is not needed'} for these stages; after editing "
            "stages, run tp-plan check PLAN --profile PROFILE -o PLAN"
        )
    return tuple(found)
