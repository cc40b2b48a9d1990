"""Plan and task made ready to train: model built, checked against the plan, cut into pieces,
workers dealt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ...planner.plan import Plan, pipeline_of
from ...planner.schedules.check import check_schedule
from ...planner.schedules.schedules import make_schedule
from ...profiles.measuring.process_settings import one_at_a_time
from ..settings import RunSettings
from .data import Segment, check_padding, fills_up, segments, training_samples
from .devices import Modes, modes_of
from .distribution import distribute, laid_on
from .loss import check_parameters, kind_of_loss, why_apart, why_mixed
from .model import matrices_of, model_of, stages_of
from .prepared import Prepared
from .tied_parameters import check_memory, check_stages, give_copies, names_in_state
from .traced_task import ForwardLook, TracedTask
from .tracing import trace_for_run
from .workers import all_replicas, share_of, workers_of

_PADDING = (
    "some micro-batches are filled up with copies of a sample, and layers that mix samples (batch "
    "norms) take them for samples of their own: leave the rest out (--ragged drop), and plan with "
    "--micro-batches that divide the mini-batch"
)


@one_at_a_time
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
        look = looks[samples[-1]]
        loss = kind_of_loss(traced.task, look.result, look.target)
        mixed, apart = _apart(traced, settings, look, samples, [share.parts for share in shares])
    model, specs = traced.model, {n: look.specs for n, look in looks.items()}
    matrices = matrices_of(traced, least)
    groups, sent = laid_on(plan, traced, least, specs[least])
    random = None
    # What is compiled draws where nobody sees it.
    if not settings.dropout and not settings.compile:
        with modes.on():
            random = traced.random_calls(least, plan.mini_batch, groups)
    report("cutting the model into stages")
    pipeline, varying = pipeline_of(plan), plan.profile.varying is not msgspec.UNSET
    distribution = distribute(pipeline, replicas, shares, sent, specs, varying=varying)
    saved = names_in_state(model)
    stages = stages_of(traced, groups, samples, specs, saved)
    if not pipeline.variant.flushes:
        check_memory([model, *(module for stage in stages for module in stage.modules)])
    ties = give_copies([stage.modules for stage in stages], pipeline.placement)
    check_stages(ties, plan)
    # What the loss takes is looked at below, and isn't held on to.
    kind = replace(loss, takes=())
    cut_model = model_of(traced, stages, ties, saved, matrices, kind, modes)
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
        cautions=_cautions(plan, course, model, mixed, apart),
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


def _apart(
    traced: TracedTask,
    settings: RunSettings,
    look: ForwardLook,
    samples: Sequence[int],
    parts: Sequence[int],
) -> tuple[str, str]:
    """Why forward and loss of a mini-batch aren't what those of its parts are together; empty where
    they are, or there are no parts.

    Args:
        look: at a micro-batch of the last stage.
        samples: in a micro-batch of each stage.
        parts: of a mini-batch, of which each replica sees one at a time.
    """
    fills = settings.ragged == "pad"
    mixed = why_mixed(traced, min(samples)) if max(parts) > 1 or fills else ""
    apart = ""
    if parts[-1] > 1:
        apart = why_apart(traced, samples[-1], look.result, look.target, mixed=bool(mixed))
    return mixed, apart


def _cautions(
    plan: Plan, course: Sequence[Segment], model: nn.Module, mixed: str, apart: str
) -> tuple[str, ...]:
    """As `Prepared` has them. `mixed`, `apart`: as of `_apart`."""
    filled = mixed or any(isinstance(m, _BatchNorm) and m.training for m in model.modules())
    padding = _PADDING if filled and fills_up(plan, course) else ""
    several = plan.micro_batches > 1 or any(len(stage.devices) > 1 for stage in plan.stages)
    return tuple(filter(None, (mixed if several else "", apart, padding)))
