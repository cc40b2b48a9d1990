"""The cut and the replicas: what goes between stages, each replica's share of a mini-batch, and the
messages between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import NamedTuple

from torch import Tensor

from ...planner.plan import Plan, check_cut
from ...planner.simulator.pipeline import Pipeline
from ...profiles.errors import PlanError
from ...profiles.tracing.graph import shared_state, values
from ...profiles.tracing.shapes import ValueSpec
from .messages import MessageRoute, Rows, tensor_of
from .traced_task import TracedTask
from .workers import Replica, Share

Specs = Mapping[str, ValueSpec]


class SentValue(NamedTuple):
    """A value that one stage makes and another takes."""

    name: str
    source: int
    target: int


def laid_on(
    plan: Plan, task: TracedTask, samples: int, specs: Specs | None = None
) -> tuple[list[list[int]], list[SentValue]]:
    """The plan's cut on the model: the layers of each stage, and what goes from stage to stage.

    Args:
        samples: at which the model was traced.
        specs: of all values then, where the model was run.

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
    planned = {(e.tensor, e.source, e.target): e.needs_grad for e in plan.edges}
    odd = {
        value: f"{'is missing' if value in sent else 'is not needed'} for these stages"
        for value in set(sent) ^ set(planned)
    }
    if specs is not None and not odd:
        # Schedules follow from what the plan says of it: a backward would find no gradient.
        odd = {
            value: f"has needs_grad {str(not needs_grad).lower()} in this model"
            for value, needs_grad in planned.items()
            if specs[value[0]].needs_grad != needs_grad
        }
    if odd:
        name, source, target = min(odd)
        raise PlanError(
            f"plan: edges: {name!r} from stage {source} to {target} {odd[name, source, target]}; "
            "after editing stages, run tp-plan check PLAN --profile PROFILE -o PLAN"
        )
    return groups, sent


@dataclass(frozen=True)
class Distribution:
    """Every replica's share of a mini-batch, and the routes of messages between replicas.

    Attributes:
        shares: by the replicas' numbers.
        routes: of training; the sequence is the same on every worker.
        known: per stage, values that aren't sent, since they follow from how many samples a
            replica has there: numbers and sizes.
        evaluation_routes: between the stages' replicas 0, which evaluate alone.
        evaluation_samples: in a micro-batch of evaluation: what every stage has room for.
    """

    shares: tuple[Share, ...]
    routes: tuple[MessageRoute, ...]
    known: tuple[Mapping[str, Tensor], ...]
    evaluation_routes: tuple[MessageRoute, ...]
    evaluation_samples: int


def distribute(
    pipeline: Pipeline,
    replicas: Sequence[Replica],
    shares: Sequence[Share],
    sent: Sequence[SentValue],
    specs: Mapping[int, Specs],
    *,
    varying: bool = False,
) -> Distribution:
    """Deal training and evaluation to the replicas, micro-batches round-robin.

    Args:
        specs: of all values, by number of samples.
        varying: mini-batches differ in shape, and these are the specs of one.

    Raises:
        PlanError: a value whose samples can't be told apart would have to be dealt.
    """
    leads = [replica for replica in replicas if replica.leads]
    of_stage = [[replica for replica in replicas if replica.stage == s.stage] for s in leads]
    samples = [shares[replica.number].samples for replica in leads]
    found: list[MessageRoute] = []
    known: list[dict[str, Tensor]] = [{} for _ in samples]
    whole = pipeline.variant.whole_mini_batches
    for value in sent:
        here, there = (specs[samples[s]][value.name] for s in (value.source, value.target))
        sources, targets = of_stage[value.source], of_stage[value.target]
        dimension = None
        if whole and len(sources) != len(targets):
            if here.numbers != there.numbers:
                _check_numbers(value, here, there, samples, varying=varying)
                known[value.target][value.name] = tensor_of(there)
                continue
            dimension = _sample_dimension(value, here, there, samples)
        for a in sources:
            for b in targets:
                if (a.index - b.index) % gcd(a.count, b.count):
                    continue
                if not whole:
                    found.append(_dealt(len(found), here, a, b, pipeline))
                elif dimension is not None:
                    found.append(_part(len(found), here, a, b, dimension))
                elif a.index == b.index % gcd(a.count, b.count):
                    # As many replicas: each its own. Else it is the same for all samples, and
                    # the first that has it sends it.
                    found.append(_whole(len(found), here, a, b))
    least = min(samples)
    evaluation = (
        _whole(len(found) + k, specs[least][value.name], leads[value.source], leads[value.target])
        for k, value in enumerate(sent)
    )
    return Distribution(tuple(shares), tuple(found), tuple(known), tuple(evaluation), least)


def _whole(number: int, spec: ValueSpec, a: Replica, b: Replica) -> MessageRoute:
    return MessageRoute(number, spec, a, b, (0,), 1)


def _dealt(
    number: int, spec: ValueSpec, a: Replica, b: Replica, pipeline: Pipeline
) -> MessageRoute:
    """For the micro-batches that both run."""
    n, r = pipeline.micro_batches, lcm(a.count, b.count)
    both = tuple(range(_common(a, b), n, r))
    stacked = 1 if pipeline.variant.backward_unit == "micro" else len(both)
    return MessageRoute(number, spec, a, b, both, stacked)


def _part(number: int, spec: ValueSpec, a: Replica, b: Replica, dimension: int) -> MessageRoute:
    """For the samples that both have."""
    r, k = lcm(a.count, b.count), _common(a, b)
    shape = list(spec.shape)
    shape[dimension] = shape[dimension] * a.count // r
    return replace(
        _whole(number, replace(spec, shape=tuple(shape)), a, b),
        taken=Rows(dimension, k // a.count, r // a.count),
        placed=Rows(dimension, k // b.count, r // b.count),
    )


def _common(a: Replica, b: Replica) -> int:
    """The first micro-batch, or sample, that is dealt to both."""
    both = range(a.index, lcm(a.count, b.count), a.count)
    return next(k for k in both if k % b.count == b.index)


def _check_numbers(
    value: SentValue,
    here: ValueSpec,
    there: ValueSpec,
    samples: Sequence[int],
    *,
    varying: bool,
) -> None:
    """Raise PlanError for a number that isn't a count of samples, nor a multiple of it; where
    shapes vary, for any but the count itself."""
    m, n = samples[value.source], samples[value.target]
    if varying and any(
        x != y and (x, y) != (m, n) for x, y in zip(here.numbers, there.numbers, strict=True)
    ):
        raise PlanError(
            f"plan: {_between(value)}: {value.name!r} is a number that depends on the samples, and "
            "may on the mini-batch's shape too, which differs from one to the next; give both "
            "stages as many devices, or cut elsewhere"
        )
    if any(x != y and x * n != y * m for x, y in zip(here.numbers, there.numbers, strict=True)):
        raise PlanError(
            f"plan: {_between(value)}: {value.name!r} is a number that each replica would make "
            "differently of its samples; give both stages as many devices, or cut elsewhere"
        )


def _sample_dimension(
    value: SentValue, here: ValueSpec, there: ValueSpec, samples: Sequence[int]
) -> int | None:
    """The dimension with an entry for each sample; None: the tensor is the same for all of them.

    Raises PlanError where it can't be known which entries are a sample's.
    """
    m, n = samples[value.source], samples[value.target]
    if here.shape == there.shape:
        return None
    same_rank = len(here.shape) == len(there.shape)
    differ = [
        d for d, pair in enumerate(zip(here.shape, there.shape, strict=False)) if len(set(pair)) > 1
    ]
    if same_rank and len(differ) == 1:
        (d,) = differ
        if (here.shape[d], there.shape[d]) == (m, n):
            return d
    raise PlanError(
        f"plan: {_between(value)}: {value.name!r} has shape {list(here.shape)} for {m} samples and "
        f"{list(there.shape)} for {n}, without one dimension that counts them, so it can't be "
        "dealt to replicas; give both stages as many devices, or cut elsewhere"
    )


def _between(value: SentValue) -> str:
    return f"stages {value.source} and {value.target} have different numbers of replicas"
