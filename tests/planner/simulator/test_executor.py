"""Simulation of given lists of operations."""

from __future__ import annotations

from dataclasses import replace

from helpers.drawn.pipelines import laid_out, pipelines
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.simulator.executor import execute
from timeprest.planner.simulator.pipeline import Route


def with_shared_wires(pipeline):
    """Links of the same two devices share a wire in each direction."""
    on, links = pipeline.placement, []
    for link in pipeline.links:
        ends, times = (on[link.source], on[link.target]), (link.forward_s, link.backward_s)
        links.append(replace(link, routes=(Route(0, 0, *times, link.latency_s, ends, ends[::-1]),)))
    return replace(pipeline, links=tuple(links))


PLACED = pipelines(placed=True)


@given(st.one_of(pipelines(), PLACED, PLACED.map(with_shared_wires), laid_out()), st.integers(1, 4))
def test_times_are_the_same_where_messages_are_noted(pipeline, mini_batches):
    """Where they aren't, and each device has one replica, the clock's steps are written out."""
    schedule = make_schedule(pipeline, mini_batches)
    quick, noted = execute(pipeline, schedule), execute(pipeline, schedule, sent := [])
    assert quick.clock.starts_s == noted.clock.starts_s
    assert quick.clock.free_s == noted.clock.free_s
    assert quick.sequence == noted.sequence
    assert bool(sent) == bool(pipeline.links)
