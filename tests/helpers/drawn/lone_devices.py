"""Drawn questions whose stages have a device each, and none has replicas; and all their plans."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import msgspec
from helpers.drawn.pipelines import ALL
from helpers.drawn.questions import (
    Drawn,
    all_plans,
    counts_of,
    drawn_cluster,
    drawn_profile,
    looked_at,
    with_memory,
)
from timeprest.planner.evaluate import Evaluation, Question, evaluate
from timeprest.planner.partition.dp.critical_cycles import CriticalCycles
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.problem import StageProblem
from timeprest.planner.schedules.schedules import StalenessBounds
from timeprest.planner.search.choices import Branch, Freedom
from timeprest.planner.search.relaxed.cycles import cycle_problem
from timeprest.planner.search.relaxed.relaxation import Relaxation
from timeprest.planner.systems.variants import VARIANTS

INF = float("inf")
MOST_MICRO_BATCHES, MOST_STAGES = 8, 4


def drawn_alone(
    seed: int, most_plans: int = 300, systems: Sequence[str] = tuple(ALL)
) -> Drawn | None:
    """The question with this number, of one of these systems, with one N; None where it has more
    plans than `most_plans`, or none. Most clusters send beside computing."""
    rng = random.Random(seed)
    variant, profile = VARIANTS[rng.choice(systems)], drawn_profile(rng)
    tied = rng.choice(["together", "split"]) if variant.flushes else "together"
    factor, cluster = rng.choice([0.0, 1.0, 2.0]), _mostly_beside(rng, drawn_cluster(rng))
    question = Question(profile, cluster, variant.name, profile.batch_size, factor, 1, tied)
    again = rng.choice(["off", "off", "on", "auto", "selective"])
    again = "off" if variant.recompute_refusal else again
    freedom = Freedom(False, again, StalenessBounds(rng.choice(["paper", "auto"])))
    counts = [n for n in counts_of(question, None) if n <= MOST_MICRO_BATCHES]
    if not counts:
        return None
    n = rng.choice(counts)
    every = list(islice(all_plans(question, freedom, n), most_plans + 1))
    if not 0 < len(every) <= most_plans:
        return None
    plans = [evaluate(question, stages, n) for _, stages in every]
    question = replace(question, cluster=with_memory(rng, cluster, plans))
    found = [(n, plan) for plan in plans if looked_at(question, again, plan)]
    return Drawn(question, freedom, n, found)


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
    """

    stages: int
    program: CriticalCycles
    plans: list[Evaluation]
    fitting: list[Evaluation]

    @property
    def best_s(self) -> float:
        """The shortest period; infinite where nothing fits."""
        return min((found.prediction.period_s for found in self.fitting), default=INF)


def parts(drawn: Drawn) -> Iterator[Part]:
    """A question's plans by numbers of stages, where critical cycles are known of them."""
    relaxation, cluster = Relaxation(drawn.question, drawn.freedom), drawn.question.cluster
    for stages in sorted({len(found.stages) for _, found in drawn.plans}):
        problem = cycle_problem(relaxation, Branch(drawn.asked, stages))
        if problem is None:
            continue
        program = CriticalCycles.of(problem, find_downsets(problem.loads, 10_000))
        plans = [found for _, found in drawn.plans if len(found.stages) == stages]
        fitting = [found for found in plans if not found.over_limit(cluster)]
        yield Part(stages, program, plans, fitting)


def borders(problem: StageProblem, masks: Sequence[int], found: Evaluation) -> tuple[int, ...]:
    """A plan's downsets, by position: behind each of its stages."""
    position = {name: j for j, name in enumerate(problem.names)}
    at, below, places = {mask: k for k, mask in enumerate(masks)}, 0, list[int]()
    for stage in found.stages:
        below |= sum(1 << position[name] for name in stage.nodes)
        places.append(at[below])
    return tuple(places)
