"""Plan and task made ready to train: model built, checked against the plan, cut into pieces,
workers dealt."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from ...planner.costs.tied_parameters import not_behind
from ...planner.plan import Plan, check_cut, pipeline_of
from ...planner.schedules.check import check_schedule
from ...planner.schedules.schedules import make_schedule
from ...planner.simulator.pipeline import Pipeline
from ...profiles.autograd.random_numbers import RandomCalls
from ...profiles.errors import PlanError, TargetError
from ...profiles.tasks.hooks import RunLength
from ...profiles.tasks.task import Task
from ...profiles.tracing.call import Call
from ...profiles.tracing.graph import GraphBody, hidden_matrices, shared_state, values
from ...profiles.tracing.pieces import Piece, cut
from ..settings import RunSettings
from .data import Segment, check_padding, run_length, segments, training_samples
from .devices import Modes, modes_of
from .distribution import Distribution, SentValue, Specs, distribute
from .loss import LossKind, check_parameters, kind_of_loss, why_apart
from .tied_parameters import (
    Ties,
    check_memory,
    check_stages,
    computed_tensors,
    first_names,
    give_copies,
    model_parameters,
    names_in_state,
    state_of,
    treat_alike,
)
from .tracing import ForwardLook, OtherModes, TracedTask, has_statistics, trace_for_run
from .workers import Replica, Worker, all_replicas, share_of, workers_of

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedStage:
    """A stage's piece of the model.

    Attributes:
        piece: for training.
        evaluation_piece: the same in evaluation mode; the two share parameters and leaf modules.
            None where nothing is evaluated.
        specs: of every value that layers take from each other, for a replica's micro-batch.
    """

    piece: Piece
    evaluation_piece: Piece | None
    specs: Specs

    @property
    def modules(self) -> list[GraphBody]:
        """Of its pieces."""
        pieces = (self.piece, self.evaluation_piece)
        return [piece.module for piece in pieces if piece is not None]


@dataclass(frozen=True)
class PreparedModel:
    """The model's pieces, one for each stage, with their parameters' names.

    Attributes:
        inputs: names of the model's own inputs, one for each tensor.
        arguments: names of its arguments, each a tensor or a nest of them; None for one that goes
            by position.
        names: for each name of a parameter, the first that the model has for it.
        saved: for each name of the model's state, the one under which its state_dict has it.
        whole: the model as the task has built it.
        ties: parameters that several stages use.
        unused: parameters and buffers of the model that no stage uses, under its names.
        matrices: names of the parameters that are matrices of hidden layers (Muon's).
        loss: what the task's loss gives.
        autocast: dtype of torch.autocast for the forwards; None: off.
        modes: modules that stay in the other mode.
    """

    stages: tuple[PreparedStage, ...]
    inputs: tuple[str, ...]
    arguments: tuple[str | None, ...]
    names: Mapping[str, str]
    saved: Mapping[str, str]
    whole: nn.Module
    ties: Ties
    unused: Mapping[str, Tensor]
    matrices: frozenset[str]
    loss: LossKind
    autocast: torch.dtype | None
    modes: OtherModes

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Those of all stages, for training."""
        return tuple(stage.piece for stage in self.stages)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Of the whole model, under the first names that it has for them."""
        return dict(self.whole.named_parameters())

    @property
    def has_statistics(self) -> bool:
        """Whether something in it has running statistics, as batch norms do."""
        return has_statistics(self.whole, [piece.module for piece in self.pieces])

    @property
    def first_written(self) -> dict[str, str]:
        """`names`, by those of its state_dict."""
        return {self.saved.get(n, n): self.saved.get(f, f) for n, f in self.names.items()}

    def as_named(self, written: Mapping[str, T]) -> dict[str, T]:
        """What goes by the names of its state_dict, by the model's."""
        names = {other: name for name, other in self.saved.items()}
        return {names.get(name, name): value for name, value in written.items()}

    def owned_elsewhere(self, stage: int) -> frozenset[int]:
        """Ids of parameters that a stage uses and another one of its device owns."""
        return frozenset(
            id(p)
            for one in (*self.ties.shared, *self.ties.frozen)
            if stage in one.stages and stage != one.owner
            for p in one.of(one.owner, self.stages[one.owner].piece.module)
        )

    def owned_by(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """A stage's parameters but for those, trained or not, under the first names that the model
        has for them: copies go by one name, so that parameter groups treat them alike."""
        module, elsewhere = self.stages[stage].piece.module, self.owned_elsewhere(stage)
        return [(n, p) for n, p in model_parameters(module, self.names) if id(p) not in elsewhere]

    def updated_by(self, stage: int) -> list[tuple[str, nn.Parameter]]:
        """Of those, the ones that are trained."""
        return [(name, p) for name, p in self.owned_by(stage) if p.requires_grad]


@dataclass(frozen=True)
class Prepared:
    """A plan and its task, ready to train: pieces, workers, shares, messages, settings.

    Attributes:
        samples: in the training data.
        replicas: of all stages, by number.
        workers: by rank.
        example: gives the model's inputs and the target for some number of samples.
        flops_per_sample: of the model's forward; None: not known, or the settings' `log` doesn't
            ask for it.
        random: what draws random numbers, where samples are to have the same ones in all stages and
            micro-batches; None: it isn't known, or they needn't.
    """

    plan: Plan
    settings: RunSettings
    task: Task
    samples: int
    segments: tuple[Segment, ...]
    pipeline: Pipeline
    replicas: tuple[Replica, ...]
    workers: tuple[Worker, ...]
    model: PreparedModel
    distribution: Distribution
    example: Callable[[int], tuple[Call, Any]]
    flops_per_sample: float | None = None
    random: RandomCalls | None = None

    @property
    def varies(self) -> bool:
        """Whether mini-batches may differ in shape."""
        return self.plan.profile.varying is not msgspec.UNSET

    @property
    def reached(self) -> frozenset[int]:
        """The stages that gradients of the loss come to. The backwards and updates of the others
        wait for nobody, and may come before the last stage's forward."""
        last = len(self.plan.stages) - 1
        routes = self.distribution.routes
        links = {(c.source.stage, c.target.stage) for c in routes if c.spec.needs_grad}
        return frozenset(s for s in range(last + 1) if not_behind(s, [last], links) is None)

    @property
    def length(self) -> RunLength:
        """Updates in the run, and in a whole epoch of it."""
        return run_length(self.segments)


def prepare(
    plan: Plan, settings: RunSettings, report: Callable[[str], None] = lambda what: None
) -> Prepared:
    """Build the model with its seed, check it against the plan and cut it into stages.

    Args:
        plan: consistent in itself (`check_plan`).
        report: is told what is being done.

    Raises:
        TargetError: the task can't be imported or built, has too little data, or a loss that uses
            parameters of other stages.
        TraceError: the model can't be traced.
        PlanError: the plan is for another model, its stages don't fit together, or it has what
            can be planned but not run yet.
    """
    replicas, workers = all_replicas(plan), workers_of(plan)
    shares = tuple(share_of(plan, replica) for replica in replicas)
    samples = [shares[replica.number].samples for replica in replicas if replica.leads]
    # What every stage has room for.
    least = min(samples)
    modes = modes_of(plan, settings)
    with modes.on():
        traced, looks = _traced(plan, settings, samples, modes, report)
        loss = _loss_of(traced, samples[-1], looks[samples[-1]], parts=shares[-1].parts)
    model, specs = traced.model, {n: look.specs for n, look in looks.items()}
    matrices = _matrices_of(traced, least)
    groups, sent = laid_on(plan, traced, least)
    random = None
    # What is compiled draws where nobody sees it.
    if not settings.dropout and not settings.compile:
        with modes.on():
            random = traced.random_calls(least, plan.mini_batch, groups)
    report("cutting the model into stages")
    pipeline, varying = pipeline_of(plan), plan.profile.varying is not msgspec.UNSET
    distribution = distribute(pipeline, replicas, shares, sent, specs, varying=varying)
    saved = names_in_state(model)
    stages = _stages_of(traced, groups, samples, specs, saved)
    if not pipeline.variant.flushes:
        check_memory([model, *(module for stage in stages for module in stage.modules)])
    ties = give_copies([stage.modules for stage in stages], pipeline.placement)
    check_stages(ties, plan)
    # What the loss takes is looked at below, and isn't held on to.
    kind = replace(loss, takes=())
    cut_model = _model_of(traced, stages, ties, saved, matrices, kind, modes)
    size = training_samples(plan, settings, traced.task.data("train"))
    course = segments(plan, settings, size)
    check_padding(plan, settings, traced.task, course, samples, traced, looks)
    prepared = Prepared(
        plan=plan,
        settings=settings,
        task=traced.task,
        samples=size,
        segments=course,
        pipeline=pipeline,
        replicas=replicas,
        workers=workers,
        model=cut_model,
        distribution=distribution,
        example=traced.target.call,
        flops_per_sample=traced.flops_per_sample(least) if settings.log else None,
        random=random,
    )
    updated = [p for _, p in prepared.model.updated_by(len(stages) - 1)]
    check_parameters(loss, dict(model.named_parameters()), updated)
    few = min(3, max(segment.mini_batches for segment in course))
    check_schedule(pipeline, make_schedule(pipeline, few), few)
    return prepared


def _traced(
    plan: Plan,
    settings: RunSettings,
    samples: Sequence[int],
    modes: Modes,
    report: Callable[[str], None],
) -> tuple[TracedTask, dict[int, ForwardLook]]:
    """The task's model, traced for these numbers of samples, with a look at each forward."""
    traced = trace_for_run(
        settings.task,
        plan,
        samples,
        evaluate=settings.evaluate,
        seed=settings.seed,
        threads=settings.threads,
        report=report,
        modes=modes,
    )
    if any(stage.recompute for stage in plan.stages) and not traced.fake:
        traced.check_without_gradients(min(samples))
    return traced, {n: traced.look(n) for n in traced.training}


def _loss_of(traced: TracedTask, samples: int, look: ForwardLook, *, parts: int) -> LossKind:
    """What the task's loss gives. `parts`: of a mini-batch, of which it sees one at a time."""
    loss = kind_of_loss(traced.task, look.result, look.target)
    if parts == 1:
        return loss
    return replace(loss, apart=why_apart(traced, samples, look.result, look.target))


def _stages_of(
    traced: TracedTask,
    groups: Sequence[Sequence[int]],
    samples: Sequence[int],
    specs: Mapping[int, Specs],
    saved: Collection[str],
) -> list[PreparedStage]:
    """The model cut into stages. `saved`: names of its state. Raises as `cut`, `_check_state`."""
    pieces = {n: cut(graph, groups) for n, graph in traced.training.items()}
    chosen = [pieces[n][s] for s, n in enumerate(samples)]
    evaluated = cut(traced.evaluation, groups) if traced.evaluation else [None] * len(chosen)
    for piece in chosen:
        _leave_out_of_state(piece.module, saved)
        _check_state(piece)
    return [
        PreparedStage(piece, other, specs[n])
        for piece, other, n in zip(chosen, evaluated, samples, strict=True)
    ]


def _model_of(
    traced: TracedTask,
    stages: Sequence[PreparedStage],
    ties: Ties,
    saved: Mapping[str, str],
    matrices: frozenset[str],
    loss: LossKind,
    modes: Modes,
) -> PreparedModel:
    model, graph = traced.model, next(iter(traced.training.values()))
    names = first_names(model)
    used = {names.get(name, name) for s in stages for name in state_of(s.piece.module)}
    return PreparedModel(
        stages=tuple(stages),
        inputs=tuple(node.name for node in graph.inputs),
        arguments=traced.arguments,
        names=names,
        saved=saved,
        whole=model,
        ties=ties,
        unused={
            name: tensor
            for name, tensor in state_of(model).items()
            if names.get(name, name) not in used and isinstance(tensor, Tensor)
        },
        matrices=matrices,
        loss=loss,
        autocast=modes.autocast,
        modes=traced.modes,
    )


def _matrices_of(traced: TracedTask, samples: int) -> frozenset[str]:
    """Names of the parameters that are matrices of hidden layers."""
    hidden = {id(p) for p in hidden_matrices(traced.training[samples], traced.model)}
    return frozenset(name for name, p in traced.model.named_parameters() if id(p) in hidden)


def with_own_weights(prepared: Prepared) -> list[Prepared]:
    """Pieces for each replica, by number, with weights of their own, for replicas in one process.
    Stages of one worker go on to share theirs."""
    found = [prepared for _ in prepared.replicas]
    for worker in prepared.workers:
        if worker.replicas[0].leads:
            continue
        stages = list(prepared.model.stages)
        mine = [stages[s] for s in worker.stages]
        # Together: both modes of a stage share their parameters.
        modules = [module for stage in mine for module in stage.modules]
        memo: dict[int, Any] = {k: t for m in modules for k, t in computed_tensors(m).items()}
        copies = copy.deepcopy(mine, memo)
        for key, p in {id(p): p for module in modules for p in module.parameters()}.items():
            treat_alike(p, memo[key])
        for s, copied in zip(worker.stages, copies, strict=True):
            stages[s] = copied
        model = replace(prepared.model, stages=tuple(stages))
        for replica in worker.replicas:
            found[replica.number] = replace(prepared, model=model)
    return found


def _leave_out_of_state(module: nn.Module, saved: Collection[str]) -> None:
    """Leave buffers out of its state that aren't in the model's: a graph has forgotten which are
    `persistent`, and holds the trace's constants as some more."""
    for path, inner in module.named_modules():
        for name, _ in inner.named_buffers(recurse=False, remove_duplicate=False):
            if f"{path}.{name}".lstrip(".") not in saved:
                inner._non_persistent_buffers_set.add(name)


def _check_state(piece: Piece) -> None:
    """Raise TargetError where a module has state that checkpoints can't hold."""
    for name, value in (*state_of(piece.module).items(), *piece.module.named_buffers()):
        if not isinstance(value, Tensor):
            raise TargetError(
                f"the model's state {name!r} is no tensor but {type(value).__name__} "
                "(get_extra_state): checkpoints hold tensors alone; return one, or keep it in a "
                "buffer"
            )
        if value.dtype == torch.complex128:
            raise TargetError(
                f"the model's state {name!r} is of torch.complex128, which checkpoints can't hold: "
                "make it torch.complex64, or hold it as numbers (torch.view_as_real)"
            )


def laid_on(plan: Plan, task: TracedTask, samples: int) -> tuple[list[list[int]], list[SentValue]]:
    """The plan's cut on the model: the layers of each stage, and what goes from stage to stage.

    Args:
        samples: at which the model was traced.

    Raises PlanError where the plan says otherwise, or separates layers that share parameters more
    than it may.
    """
    traced = task.training[samples]
    names = [layer.name for layer in traced.layers]
    made = [
        (value.node.name, value.producer, value.consumers)
        for value in values(traced)
        if value.producer is not None
    ]
    edges = [
        (names[producer], names[k])
        for _, producer, consumers in made
        for k in consumers
        if k < len(names)
    ]
    check_cut([stage.nodes for stage in plan.stages], names, edges)
    position = {name: k for k, name in enumerate(names)}
    groups = [sorted(position[name] for name in stage.nodes) for stage in plan.stages]
    stage_of = {k: s for s, group in enumerate(groups) for k in group}
    shared_by = shared_state(traced)
    apart = any(len({stage_of[k] for k in layers}) > 1 for layers in shared_by.frozen)
    rewritten = task.rewritten(samples) if apart else ()
    free = shared_by.copyable
    for layers in shared_state(traced, rewritten).tied:
        of = {stage_of[k] for k in layers}
        may_copy = plan.tied == "split" or len({plan.stages[s].devices for s in of}) == 1
        if len(of) > 1 and not (layers in free and may_copy):
            shared = ", ".join(repr(names[k]) for k in layers)
            where = "one stage, or on stages of one device" if layers in free else "one stage"
            raise PlanError(f"plan: layers {shared} share parameters and must be on {where}")
    # The model's result.
    stage_of[len(names)] = len(groups) - 1
    sent = [
        SentValue(name, stage_of[producer], target)
        for name, producer, consumers in made
        for target in sorted({stage_of[k] for k in consumers} - {stage_of[producer]})
    ]
    planned = {(e.tensor, e.source, e.target) for e in plan.edges}
    if set(sent) != planned:
        odd = sorted(set(sent) ^ planned)[0]
        raise PlanError(
            f"plan: edges: {odd[0]!r} from stage {odd[1]} to {odd[2]} "
            f"{'is missing' if odd in sent else 'is not needed'} for these stages; after editing "
            "stages, run tp-plan check PLAN --profile PROFILE -o PLAN"
        )
    return groups, sent
