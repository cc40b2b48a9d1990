"""Drawn questions whose stages have a device each, and none has replicas; and all their plans."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice, permutations
from typing import Any, NamedTuple

import msgspec
from helpers.drawn.pipelines import ALL
from helpers.drawn.questions import (
    Drawn,
    all_plans,
    counts_of,
    drawn_cluster,
    drawn_profile,
    far_apart,
    looked_at,
    with_memory,
)
from hypothesis import assume
from timeprest.planner.evaluate import Evaluation, evaluate
from timeprest.planner.partition.dp.critical_cycles import CriticalCycles
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.problem import StageProblem
from timeprest.planner.plan import PlanStage
from timeprest.planner.question import Question
from timeprest.planner.schedules.schedules import StalenessBounds
from timeprest.planner.search.choices import Branch, Freedom
from timeprest.planner.search.relaxed.cycles import cycle_problem, kinds_of
from timeprest.planner.search.relaxed.relaxation import Relaxation
from timeprest.planner.systems.variants import VARIANTS

INF = float("inf")
MOST_MICRO_BATCHES, MOST_STAGES = 8, 4


def drawn_alone(
    seed: int,
    most_plans: int = 300,
    systems: Sequence[str] = tuple(ALL),
    *,
    any_sequence: bool = False,
    replicas: bool = False,
    far: bool = False,
) -> Drawn | None:
    """The question with this number, of one of these systems, with one N; None where it has more
    plans than `most_plans`, or none. Most clusters send beside computing.

    Args:
        any_sequence: plans take devices in any, not only as they are listed.
        replicas: of each plan some stage has several, on equal devices.
        far: devices are equal ones, in machines with slow links between.
    """
    rng = random.Random(seed)
    variant, profile = VARIANTS[rng.choice(systems)], drawn_profile(rng)
    tied = rng.choice(["together", "split"]) if variant.flushes else "together"
    factor, cluster = rng.choice([0.0, 1.0, 2.0]), _mostly_beside(rng, drawn_cluster(rng))
    if replicas:
        alike = tuple(msgspec.structs.replace(device, speed=1.0) for device in cluster.devices)
        cluster = msgspec.structs.replace(cluster, devices=alike)
    if far:
        cluster = far_apart(random.Random(-seed), cluster)
    question = Question(profile, cluster, variant.name, profile.batch_size, factor, 1, tied)
    again = rng.choice(["off", "off", "on", "auto", "selective"])
    again = "off" if variant.recompute_refusal else again
    freedom = Freedom(replicas, again, StalenessBounds(rng.choice(["paper", "auto"])))
    counts = [n for n in counts_of(question, None) if n <= MOST_MICRO_BATCHES]
    if not counts:
        return None
    n = rng.choice(counts)
    plans = all_plans(question, freedom, n)
    if any_sequence:
        plans = in_any_sequence(plans, len(cluster.devices))
    if replicas:
        plans = ((n, mine) for n, mine in plans if any(len(x.devices) > 1 for x in mine))
    every = list(islice(plans, most_plans + 1))
    if not 0 < len(every) <= most_plans:
        return None
    plans = [evaluate(question, stages, n) for _, stages in every]
    question = replace(question, cluster=with_memory(rng, cluster, plans))
    found = [(n, plan) for plan in plans if looked_at(question, again, plan)]
    return Drawn(question, freedom, n, found)


def some_alone(*asked: Any, **how: Any) -> Drawn:
    """As `drawn_alone`; a test's drawn seed that has no such question is passed over."""
    drawn = drawn_alone(*asked, **how)
    assume(drawn is not None)
    return drawn


def in_any_sequence(
    plans: Iterable[tuple[int, tuple[PlanStage, ...]]], devices: int
) -> Iterator[tuple[int, tuple[PlanStage, ...]]]:
    """Of plans on listed devices, those in all sequences."""
    for n, stages in plans:
        if [stage.devices[0] for stage in stages] == list(range(len(stages))):
            for chosen in permutations(range(devices), len(stages)):
                yield (
                    n,
                    tuple(
                        msgspec.structs.replace(stage, devices=(device,))
                        for stage, device in zip(stages, chosen, strict=True)
                    ),
                )


def _mostly_beside(rng: random.Random, cluster):
    def changed(network):
        beside = network.overlap or rng.random() < 0.8
        return msgspec.structs.replace(network, overlap=beside)

    between = cluster.between_machines
    return msgspec.structs.replace(
        cluster,
        network=changed(cluster.network),
        between_machines=None if between is None else changed(between),
    )


def all_alone(question: Question, freedom: Freedom, n: int) -> Drawn:
    """A question with all its plans with so many micro-batches."""
    plans = [(n, evaluate(question, stages, n)) for _, stages in all_plans(question, freedom, n)]
    return Drawn(question, freedom, n, plans)


class Part(NamedTuple):
    """Plans with so many stages, and the critical cycles of them.

    Attributes:
        fitting: those that the devices have memory for.
        kind_of: of each device, what a cut says of it.
    """

    stages: int
    program: CriticalCycles
    plans: list[Evaluation]
    fitting: list[Evaluation]
    kind_of: list[int]

    @property
    def best_s(self) -> float:
        """The shortest period; infinite where nothing fits."""
        return min((found.prediction.period_s for found in self.fitting), default=INF)


def parts(drawn: Drawn, *, any_sequence: bool = False) -> Iterator[Part]:
    """A question's plans by numbers of stages, where critical cycles are known of them."""
    devices = range(len(drawn.question.cluster.devices))
    kind_of = list(devices)
    if any_sequence or drawn.question.cluster.uniform:
        kinds = kinds_of(drawn.question.cluster)
        kind_of = [next(k for k, mine in enumerate(kinds) if d in mine) for d in devices]
    relaxation, cluster = Relaxation(drawn.question, drawn.freedom), drawn.question.cluster
    for stages in sorted({len(found.stages) for _, found in drawn.plans}):
        problem = cycle_problem(relaxation, Branch(drawn.asked, stages), any_sequence=any_sequence)
        if problem is None:
            continue
        program = CriticalCycles.of(problem, find_downsets(problem.loads, 10_000))
        plans = [found for _, found in drawn.plans if len(found.stages) == stages]
        fitting = [found for found in plans if not found.over_limit(cluster)]
        yield Part(stages, program, plans, fitting, kind_of)


def replicated(drawn: Drawn, stages: int | None = None) -> Part | None:
    """All of a question's plans with so many stages, or any number, of which some have replicas,
    and the cycles of them; None where these aren't known."""
    relaxation, devices = Relaxation(drawn.question, drawn.freedom), drawn.question.cluster.devices
    problem = cycle_problem(relaxation, Branch(drawn.asked, stages), replicated=True)
    if problem is None:
        return None
    program = CriticalCycles.of(problem, find_downsets(problem.loads, 10_000))
    plans = [
        found for _, found in drawn.plans if len(found.stages) == (stages or len(found.stages))
    ]
    fitting = [found for found in plans if not found.over_limit(drawn.question.cluster)]
    return Part(stages or 0, program, plans, fitting, [0] * len(devices))


def borders(problem: StageProblem, masks: Sequence[int], found: Evaluation) -> tuple[int, ...]:
    """A plan's downsets, by position: behind each of its stages."""
    position = {name: j for j, name in enumerate(problem.names)}
    at, below, places = {mask: k for k, mask in enumerate(masks)}, 0, list[int]()
    for stage in found.stages:
        below |= sum(1 << position[name] for name in stage.nodes)
        places.append(at[below])
    return tuple(places)


def kinds(part: Part, found: Evaluation) -> tuple[int, ...]:
    """What a cut says of the devices of a plan's stages."""
    return tuple(part.kind_of[stage.devices[0]] for stage in found.stages)
