"""nF1B: what is simulated at once is what each list schedule makes of it; what those keep."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from timeprest.planner.schedules.nf1b_together import SETTLING
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.schedules.together import periods_s, simulates_together
from timeprest.planner.simulator.pipeline import Link, Pipeline
from timeprest.planner.simulator.timeline import round_trip_s, simulate
from timeprest.planner.systems.operations import BACKWARDS, FORWARDS
from timeprest.planner.systems.variants import VARIANTS


def drawn_links(rng: random.Random, stages: int) -> tuple[Link, ...]:
    """A chain; sometimes with a tensor that passes stages, or a place that has no link."""
    times = [(rng.choice([0, 0.2, 1]), rng.choice([0, 0.1, 0.3])) for _ in range(stages)]
    links = [Link(s, s + 1, *times[s], rng.choice([0, 0.1])) for s in range(stages - 1)]
    if stages > 2 and rng.random() < 0.5:
        links.append(Link(0, stages - 1, 0.3, 0.1, 0.0, has_gradient=rng.random() < 0.5))
    if stages > 3 and rng.random() < 0.3:
        links = [link for link in links if link.source != 1] + [Link(1, 3, 0.2, 0.2, 0.1)]
    return tuple(links)


def drawn_pipeline(rng: random.Random, stages: int, n: int, every: int) -> Pipeline:
    limits = sorted((rng.randint(1, stages) for _ in range(stages - 1)), reverse=True)
    return Pipeline(
        VARIANTS["timeprest"],
        n,
        tuple(rng.uniform(0.5, 2) for _ in range(stages)),
        tuple(rng.uniform(0.5, 3) for _ in range(stages)),
        tuple(rng.choice([0, 0.3]) for _ in range(stages)),
        drawn_links(rng, stages),
        (*limits, 1),
        update_every=every,
    )


@pytest.mark.parametrize(
    ("stages", "n", "every"), [(1, 2, 1), (2, 4, 1), (3, 4, 2), (4, 2, 1), (5, 3, 1)]
)
def test_pipelines_that_settle_have_their_period(stages, n, every):
    rng = random.Random(stages)
    pipelines = [drawn_pipeline(rng, stages, n, every) for _ in range(40)]
    assert all(map(simulates_together, pipelines))
    found, steady = periods_s(pipelines), [steady_state(each) for each in pipelines]
    exact = np.array([each.period_s for each in steady])
    at_once = np.array([each.cycle == every and each.mini_batches < 8 for each in steady])
    assert at_once.sum() >= 2
    assert found[at_once] == pytest.approx(exact[at_once])
    assert np.abs(found / exact - 1).max() < 0.5


@pytest.mark.parametrize(("stages", "n"), [(2, 3), (4, 2), (5, 3)])
@pytest.mark.parametrize("slower", [1, 6])
def test_what_is_simulated_at_once_runs_as_its_own_list_schedule(stages, n, slower):
    """Operation by operation, settled or not, however long messages take."""
    rng = random.Random(10 * stages + slower)
    pipelines = []
    for _ in range(30):
        each = drawn_pipeline(rng, stages, n, 1)
        slow = (
            replace(link, forward_s=slower * link.forward_s, latency_s=slower * link.latency_s)
            for link in each.links
        )
        pipelines.append(replace(each, links=tuple(slow)))
    deep = max(max(each.limits) for each in pipelines)
    span = max(deep, 2)
    last = 2 * deep + span + SETTLING - 1
    for found_s, each in zip(periods_s(pipelines), pipelines, strict=True):
        timeline = simulate(each, make_schedule(each, last + 1 + deep))
        ends = [
            {e.op.mini_batch: e.start_s for e in mine if e.op.kind == "U"}
            for mine in timeline.stages
        ]
        assert found_s == pytest.approx(max(mine[last] - mine[last - span] for mine in ends) / span)


def most_kept(kinds: bytes, n: int) -> int:
    """Micro-batches from a mini-batch's first on that are run forward before its backward."""
    forwards, found, done = 0, [n], 0
    for kind in kinds:
        forwards += kind == FORWARDS
        if kind == BACKWARDS:
            found.append(forwards - done * n)
            done += 1
    return max(found)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_period_leaves_what_is_kept_time_to_come_back(stages):
    """What bounds of memory rest on, at every stage; the first is full, too, if it ever idles."""
    rng, full = random.Random(stages), 0
    for n in [1, 2, 3, 5] * 20:
        pipeline = drawn_pipeline(rng, stages, n, 1)
        steady = steady_state(pipeline)
        if not steady.cycle:
            continue
        kept = [most_kept(mine, n) for mine in steady.kinds]
        assert steady.period_s >= round_trip_s(pipeline, kept) * (1 - 1e-9)
        if steady.period_s > pipeline.work_s(0) * (1 + 1e-9):
            full += 1
            assert kept[0] == pipeline.limits[0] * n
    assert full > 10
