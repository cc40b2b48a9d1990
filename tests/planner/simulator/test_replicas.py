"""Replicas and wires on the clock: every micro-batch once, nothing twice at a time."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from helpers.by_hand.unit_pipelines import steady_period_s
from helpers.by_hand.versions import version_use
from helpers.drawn.pipelines import laid_out
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.schedules import steady_state as steady_states
from timeprest.planner.schedules.check import check_schedule
from timeprest.planner.schedules.nf1b import ListScheduler
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.simulator.clock import SimulatedClock
from timeprest.planner.simulator.executor import ContendedExecutor, ListExecutor, codes
from timeprest.planner.simulator.pipeline import Link, Pipeline, Route
from timeprest.planner.simulator.timeline import (
    filled_and_drained_s,
    least_period_s,
    round_trip_s,
    simulate,
)
from timeprest.planner.systems.operations import FORWARDS, UPDATES, numbered_schedule
from timeprest.planner.systems.variants import VARIANTS
from timeprest.planner.systems.versions import entry_versions


@given(laid_out(), st.integers(1, 3))
def test_every_share_runs_once_on_its_replica(pipeline, mini_batches):
    order = make_schedule(pipeline, mini_batches)
    check_schedule(pipeline, order, mini_batches)
    timeline = simulate(pipeline, order)
    for s, ops in enumerate(order):
        workers = timeline.lanes[s]
        assert len(workers) == pipeline.replicas(s)
        for j, events in enumerate(workers):
            mine = [
                op
                for op in ops
                if op.kind == "U"
                or op.micro_batch is None
                or pipeline.variant.whole_mini_batches
                or op.micro_batch % len(workers) == j
            ]
            assert [event.op for event in events] == mine
            for before, after in pairwise(events):
                assert after.start_s >= before.end_s
        # All replicas update at once.
        for updates in zip(
            *([e for e in events if e.op.kind == "U"] for events in workers), strict=True
        ):
            assert len(set(updates)) == 1


@given(laid_out(variants=("pipedream-2bw",)))
def test_2bw_runs_on_the_version_before_whatever_the_replicas(pipeline):
    order = make_schedule(pipeline, 5)
    entries = entry_versions(pipeline.variant, pipeline.micro_batches, order[0])
    late = pipeline.stages > 1
    n = pipeline.micro_batches
    assert entries == tuple(max(0, b - late) for b in range(5) for _ in range(n))
    for ops in order:
        use = version_use(pipeline.variant, pipeline.micro_batches, ops, entries)
        assert use.most_held <= 2


@given(laid_out(), st.integers(1, 3))
def test_nothing_starts_before_its_messages(pipeline, mini_batches):
    order = make_schedule(pipeline, mini_batches)
    timeline = simulate(pipeline, order)
    ended = [
        {op: [e.end_s for events in stage for e in events if e.op == op] for op in ops}
        for stage, ops in zip(timeline.lanes, order, strict=True)
    ]
    for link in pipeline.links:
        takes_s = min(r.forward_s + r.latency_s for r in link.all_routes)
        for events in timeline.lanes[link.target]:
            for event in events:
                if event.op.kind == "F":
                    earliest = min(ended[link.source][event.op]) + takes_s
                    assert event.start_s >= earliest - 1e-9


@given(laid_out(), st.sampled_from([1, 2]))
def test_a_pipeline_fills_and_drains_from_whichever_stage_takes_longest(pipeline, every):
    """Beside each stage's work its way from any other one, and back, by all ways between them."""
    pipeline = replace(pipeline, update_every=every)
    paces = [min(mine) for mine in pipeline.paces] or [1.0] * pipeline.stages

    def way_s(source, target, both):
        if source == target:
            return 0.0
        ways = [-inf]
        for link in pipeline.links:
            if link.source == source and (link.has_gradient or not both):
                each = (pipeline.forward_s[source], pipeline.backward_op_s(source))[both]
                took_s = each * paces[source] + link.fastest_s[both]
                ways.append(took_s + way_s(link.target, target, both))
        return max(ways)

    most = 0.0
    for first in range(pipeline.stages):
        after_s = pipeline.weight_op_s(first) * paces[first]
        after_s += pipeline.update_op_s(first) * (every == 1)
        for s in range(pipeline.stages):
            each_s = pipeline.forward_s[s] + pipeline.backward_op_s(s)
            work_s = each_s * pipeline.micro_batches_per_replica(s)
            ways_s = way_s(first, s, both=False) + way_s(first, s, both=True)
            most = max(most, work_s + ways_s + after_s)
    assert filled_and_drained_s(pipeline) == pytest.approx(most)


@given(laid_out(), st.sampled_from([1, 2, 3]))
def test_the_steady_state_goes_on(pipeline, every):
    """A period found by repetition is that of a longer run; and no device or wire is too slow."""
    pipeline = replace(pipeline, update_every=every)
    steady = steady_state(pipeline)
    assert steady.period_s >= least_period_s(pipeline) * (1 - 1e-9)
    if not steady.cycle:
        return
    assert steady.period_s >= round_trip_s(pipeline) * (1 - 1e-9)
    count = steady.mini_batches + 2 * steady.cycle
    count += -count % every
    # The end of the run must be out of sight for stages that are ahead, too.
    timeline = simulate(pipeline, make_schedule(pipeline, count + 20))
    for stage in timeline.stages:
        updates = {e.op.mini_batch: e.start_s for e in stage if e.op.kind == "U"}
        span = updates[count - 1] - updates[count - 1 - steady.cycle]
        assert span == pytest.approx(steady.cycle * steady.period_s)


@given(laid_out(), st.integers(1, 3))
def test_waiting_for_wires_changes_nothing_where_none_are_shared(pipeline, mini_batches):
    """Times by both ways of running lists are the same where both can."""
    links = tuple(
        replace(
            link,
            routes=tuple(
                r._replace(
                    wire=(k, r.source, r.target),
                    wire_back=(r.target, r.source, k, 0),
                    overlaps=True,
                )
                for r in link.all_routes
            ),
        )
        for k, link in enumerate(pipeline.links)
    )
    pipeline = replace(pipeline, links=links)
    order = make_schedule(pipeline, mini_batches)
    clocks = SimulatedClock(pipeline), SimulatedClock(pipeline)
    for clock in clocks:
        clock.grow(mini_batches)
    assert not clocks[0].contended
    lists = codes(clocks[0], order.on_devices())
    listed = ListExecutor(clocks[0])
    listed.lists = lists
    assert listed.run()
    clocks[1].contended = True
    assert ContendedExecutor(clocks[1], lists).run(mini_batches)
    assert clocks[0].starts_s == clocks[1].starts_s


@given(laid_out(), st.integers(1, 3))
def test_a_schedule_has_the_times_of_its_order(pipeline, mini_batches):
    """One device for each stage: the list schedule already knows when everything runs."""
    pipeline = replace(pipeline, variant=VARIANTS["timeprest"])
    if pipeline.paces:
        return
    schedule = ListScheduler(pipeline, mini_batches)
    schedule.run(mini_batches)
    ran = numbered_schedule(schedule.kinds, schedule.turns, pipeline.micro_batches, micro=False)
    timeline = simulate(pipeline, ran)
    for s, events in enumerate(timeline.stages):
        for kind, name in ((FORWARDS, "F"), (UPDATES, "U")):
            times = [e.start_s for e in events if e.op.kind == name]
            assert schedule.clock.starts_s[kind][s][: len(times)] == times


# By hand -----------------------------------------------------------------------------------


def two_stages(variant="pipedream", n=1, limits=(2, 1), **link):
    """f = b = 1 at two stages."""
    return Pipeline(
        variant=VARIANTS[variant],
        micro_batches=n,
        forward_s=(1.0, 1.0),
        backward_s=(1.0, 1.0),
        update_s=(0.0, 0.0),
        links=(Link(0, 1, **{"forward_s": 0.0, "backward_s": 0.0, "latency_s": 0.0, **link}),),
        limits=limits,
    )


def route(forward_s, backward_s, *, half_duplex=False, overlaps=True):
    back = "there" if half_duplex else "back"
    return Route(0, 0, forward_s, backward_s, 0.0, "there", back, overlaps)


def test_replicas_halve_the_work_and_wait_for_each_other():
    """Stage 1 on two devices of which one is half as fast: it is the slowest that counts."""
    pipeline = replace(
        two_stages("timeprest", 4, (3, 1)),
        forward_s=(0.25, 1.0),
        backward_s=(0.25, 1.0),
        paces=((1.0,), (1.0, 0.5)),
        all_reduce_s=(0.0, 0.5),
        links=(
            Link(
                0,
                1,
                0.0,
                0.0,
                0.0,
                routes=tuple(Route(0, j, 0.0, 0.0, 0.0, ("a", j), ("b", j)) for j in range(2)),
            ),
        ),
    )
    timeline = simulate(pipeline, make_schedule(pipeline, 2))
    slow, fast = timeline.lanes[1]
    assert [e.end_s - e.start_s for e in slow[:3]] == [1.0, 1.0, 2.0]
    assert [e.end_s - e.start_s for e in fast[:3]] == [0.5, 0.5, 1.0]
    assert slow[3] == fast[3]
    assert slow[3].start_s == slow[2].end_s
    assert slow[3].end_s - slow[3].start_s == 0.5
    assert steady_state(pipeline).period_s == pytest.approx(2 * (1.0 + 1.0) + 0.5)


def test_half_duplex_takes_both_directions_in_turn():
    """Messages of 3 s each way: full duplex is bound by 3 s, half duplex by 6 s."""
    full, half = (
        two_stages(forward_s=3.0, backward_s=3.0, routes=(route(3.0, 3.0, half_duplex=h),))
        for h in (False, True)
    )
    assert (least_period_s(full), least_period_s(half)) == (3.0, 6.0)
    # Under 1F1B's limits the round trip of 10 s has two mini-batches in flight.
    assert round_trip_s(full) == 5.0
    assert steady_state(full).period_s == pytest.approx(5.0)
    assert steady_state(half).period_s == pytest.approx(6.0)


def test_transfers_that_dont_overlap_keep_both_devices_busy():
    pipeline = two_stages(
        forward_s=0.5, backward_s=0.25, routes=(route(0.5, 0.25, overlaps=False),)
    )
    timeline = simulate(pipeline, make_schedule(pipeline, 2))
    # 0F0 0–1, sent 1–1.5, 0F1 1.5–2.5; 1F0 1.5–2.5, then its 1B0 has to wait for 0F1's transfer.
    assert [(e.start_s, e.end_s) for e in timeline.stages[0][:2]] == [(0.0, 1.0), (1.5, 2.5)]
    assert [(e.start_s, e.end_s) for e in timeline.stages[1][:2]] == [(1.5, 2.5), (3.0, 4.0)]
    assert least_period_s(pipeline) == 2.75
    overlapping = replace(pipeline, links=(Link(0, 1, 0.5, 0.25, 0.0),))
    assert least_period_s(overlapping) == 2.0
    assert steady_state(pipeline).period_s >= 2.75


def test_machines_share_a_wire():
    """Stages 0 and 2 in one machine, 1 and 3 in the other: 0 → 1 and 2 → 3 take turns."""

    def chain(shared):
        hops = ("out", "home", "out") if shared else range(3)
        return Pipeline(
            variant=VARIANTS["timeprest"],
            micro_batches=4,
            forward_s=(0.1,) * 4,
            backward_s=(0.1,) * 4,
            update_s=(0.0,) * 4,
            links=tuple(
                Link(
                    s,
                    s + 1,
                    1.0,
                    0.0,
                    0.0,
                    True,
                    (Route(0, 0, 1.0, 0.0, 0.0, ("wire", hop), ("back", s)),),
                )
                for s, hop in enumerate(hops)
            ),
            limits=(7, 5, 3, 1),
        )

    assert least_period_s(chain(False)) == 4.0
    assert least_period_s(chain(True)) == 8.0
    assert steady_state(chain(False)).period_s == pytest.approx(4.0)
    assert steady_state(chain(True)).period_s == pytest.approx(8.0, rel=0.01)


def test_in_flight_limits_bound_the_period_where_messages_take_long():
    """2 mini-batches in flight for a round trip of 4 passes and two latencies of 100."""
    pipeline = two_stages(latency_s=100.0)
    assert round_trip_s(pipeline) == pytest.approx(102.0)
    assert steady_state(pipeline).period_s == pytest.approx(102.0)
    order = make_schedule(pipeline, 40)
    assert steady_period_s(simulate(pipeline, order)) == pytest.approx(102.0)


def test_a_pipeline_that_ran_empty_has_not_settled(monkeypatch):
    """3 mini-batches enter in a row, 5 s apart, and leave so; then nothing until all are back."""
    pipeline = Pipeline(
        variant=VARIANTS["timeprest"],
        micro_batches=1,
        forward_s=(5.0, 4.0, 2.0),
        backward_s=(5.0, 3.0, 1.0),
        update_s=(0.0, 0.0, 1.0),
        links=(Link(0, 1, 2.0, 2.0, 0.0), Link(1, 2, 2.0, 3.0, 0.0)),
        limits=(3, 3, 1),
    )
    steady = steady_state(pipeline)
    assert (steady.cycle, steady.period_s) == (3, pytest.approx(41 / 3))
    # Where it isn't seen to repeat, the mean is that of whole rows.
    with monkeypatch.context() as patch:
        patch.setattr(steady_states._CycleWatch, "cycle", lambda self, done: 0)
        steady = steady_state(pipeline)
    assert (steady.cycle, steady.period_s) == (0, pytest.approx(41 / 3))
    # 0F3 waits for the backwards that came in a row: 31, 36 and 41 s.
    first = simulate(pipeline, make_schedule(pipeline, 6)).stages[0]
    assert [e.start_s for e in first if e.op.kind == "F"][:6] == [0, 5, 10, 41, 46, 51]
    assert [e.start_s for e in first if e.op.kind == "U"][:3] == [31, 36, 41]
