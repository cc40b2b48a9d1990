"""Pipelines that run as one does, simulated at once: each has its own period."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from helpers.by_hand.unit_pipelines import equal_stages
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.schedules.together import periods_like_s, simulates_like
from timeprest.planner.simulator.pipeline import Link, Pipeline, Route

LOOP, V = (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)
SHIFT = 1.02


def over_wires(pipeline: Pipeline) -> Pipeline:
    """With messages that take turns on a wire between each two devices, in each direction."""
    links = list[Link]()
    for s, (a, b) in enumerate(zip(pipeline.placement, pipeline.placement[1:], strict=False)):
        there_s, back_s = (0.0, 0.0) if a == b else (0.2 + 0.05 * s, 0.15)
        route = Route(0, 0, there_s, back_s, 0.01, ("wire", a, b), ("wire", b, a))
        links.append(Link(s, s + 1, there_s, back_s, 0.01, routes=(route,)))
    return replace(pipeline, links=tuple(links))


def shifted(pipeline: Pipeline, stage: int) -> Pipeline:
    """With a stage a little slower, and all others as they are."""
    times = [list(pipeline.forward_s), list(pipeline.backward_s)]
    for mine in times:
        mine[stage] *= SHIFT
    return replace(pipeline, forward_s=tuple(times[0]), backward_s=tuple(times[1]))


@pytest.mark.parametrize(
    ("variant", "placement", "n", "given"),
    [
        ("interleaved-1f1b", LOOP, 6, True),
        ("gpipe", LOOP, 4, True),
        ("pipedream-flush", V, 4, False),
    ],
)
def test_what_runs_alike_has_its_own_period(variant, placement, n, given):
    """Exactly where the schedule is given; where times make it, those of its neighbours may be a
    little shorter."""
    one = over_wires(equal_stages(variant, placement, n))
    near = [one, *(shifted(one, s) for s in range(one.stages))]
    assert simulates_like(one)
    found = periods_like_s(one, near)
    exact = np.array([steady_state(each).period_s for each in near])
    assert found[0] == pytest.approx(exact[0])
    assert np.abs(found / exact - 1).max() < (1e-6 if given else SHIFT - 1)
    # Any stage is waited for by others.
    assert found.max() > found[0]


def test_what_is_straight_or_blocks_or_does_not_flush_runs_by_itself():
    loop = over_wires(equal_stages("gpipe", LOOP, 4))
    assert not simulates_like(replace(loop, placement=()))
    assert not simulates_like(over_wires(equal_stages("pipedream", LOOP, 4)))
    assert not simulates_like(over_wires(equal_stages("zb-h1", LOOP, 4)))
    assert not simulates_like(over_wires(equal_stages("zb-v", V, 6)))
    (first, *rest) = loop.links
    blocking = replace(first, routes=(first.routes[0]._replace(overlaps=False),))
    assert not simulates_like(replace(loop, links=(blocking, *rest)))
