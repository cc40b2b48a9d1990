"""Orders with split backwards: timetables, the bubble by the paper's formula, memory, messages."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from helpers.output.schedules import schedule_text
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.costs.memory import holdings
from timeprest.planner.schedules.check import check_schedule
from timeprest.planner.schedules.schedules import make_schedule, schedule_patterns
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.schedules.zero_bubble import WeightsWhenIdle, postponed
from timeprest.planner.simulator.pipeline import Link, Pipeline
from timeprest.planner.simulator.timeline import least_period_s, simulate
from timeprest.planner.systems.operations import Op, Schedule
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import ScheduleError

ZB, FLUSH = VARIANTS["zb-h1"], VARIANTS["pipedream-flush"]


def equal_stages(stages, n, forward=1.0, inputs=1.0, weights=1.0, wire=0.0):
    return Pipeline(
        variant=ZB,
        micro_batches=n,
        forward_s=(forward,) * stages,
        backward_s=(inputs + weights,) * stages,
        weight_s=(weights,) * stages,
        update_s=(0.0,) * stages,
        links=tuple(Link(s, s + 1, wire, wire, 0.0) for s in range(stages - 1)),
        limits=(1,) * stages,
    )


def unsplit(pipeline):
    return replace(pipeline, variant=FLUSH, weight_s=())


def most_kept(pipeline):
    """Per stage, micro-batches whose activations it keeps at once."""
    return [
        holdings(
            pipeline.variant, pipeline.micro_batches, pipeline.replicas(s), pattern.block(1)[0]
        ).micro_batches_kept
        for s, pattern in enumerate(schedule_patterns(pipeline))
    ]


def test_the_papers_timetable():
    """Figure 2's schedule for 4 stages and 8 micro-batches, weight parts s backwards late."""
    lines = schedule_text(make_schedule(equal_stages(4, 8), 1)).splitlines()
    assert [" ".join(word[1] for word in line.split()) for line in lines] == [
        "F F F F B W F B W F B W F B W F B W B W B W B W U",
        "F F F B F B W F B W F B W F B W F B W B W B W W U",
        "F F B F B F B W F B W F B W F B W F B W B W W W U",
        "F B F B F B F B W F B W F B W F B W F B W W W W U",
    ]
    assert lines[3].split()[:10] == [
        *("3F0.0", "3B0.0", "3F0.1", "3B0.1", "3F0.2", "3B0.2", "3F0.3", "3B0.3", "3W0.0"),
        "3F0.4",
    ]


@pytest.mark.parametrize(
    ("forward", "inputs", "weights"), [(1, 1, 1), (1.0, 1.25, 0.75), (2.0, 1.0, 1.0), (1, 1.5, 1)]
)
@pytest.mark.parametrize(("stages", "n"), [(2, 2), (2, 5), (4, 8), (4, 13), (8, 16), (8, 32)])
def test_the_bubble_is_the_papers(stages, n, forward, inputs, weights):
    """(p − 1)·(T_F + T_B − T_W), a third of 1F1B's where the three are equal."""
    pipeline = equal_stages(stages, n, forward, inputs, weights)
    work = n * (forward + inputs + weights)
    bubble = steady_state(pipeline).period_s - work
    assert bubble == pytest.approx((stages - 1) * (forward + inputs - weights))
    plain = steady_state(unsplit(pipeline)).period_s - work
    assert plain == pytest.approx((stages - 1) * (forward + inputs + weights))


@pytest.mark.parametrize("stages", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 64])
def test_orders_keep_the_rules(stages, n):
    """Any N, also below S: legal, no slower than without the split, no more memory at the peak."""
    pipeline = equal_stages(stages, n)
    check_schedule(pipeline, make_schedule(pipeline, 2), 2)
    plain = unsplit(pipeline)
    period_s, plain_s = steady_state(pipeline).period_s, steady_state(plain).period_s
    assert period_s <= plain_s * (1 + 1e-9)
    if stages > 1:
        assert period_s < plain_s
    assert max(most_kept(pipeline)) == max(most_kept(plain)) == min(stages, n)


times = st.floats(0.1, 4)


@st.composite
def uneven(draw):
    """Stages with times of their own, skips, links of any speed and without gradients."""
    stages, n = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    pairs = {(s, s + 1) for s in range(stages - 1)}
    if stages > 2 and draw(st.booleans()):
        pairs.add((0, stages - 1))
    backward_s = [draw(times) for _ in range(stages)]
    seconds = st.floats(0, 1)
    return Pipeline(
        variant=ZB,
        micro_batches=n,
        forward_s=tuple(draw(times) for _ in range(stages)),
        backward_s=tuple(backward_s),
        weight_s=tuple(draw(st.floats(0, 1)) * whole for whole in backward_s),
        update_s=tuple(draw(st.sampled_from([0.0, 0.5])) for _ in range(stages)),
        links=tuple(
            Link(a, b, draw(seconds), draw(seconds), 0.1, draw(st.integers(0, 5)) > 0)
            for a, b in sorted(pairs)
        ),
        limits=(1,) * stages,
    )


@pytest.mark.slow
@given(uneven())
def test_uneven_stages_keep_the_rules(pipeline):
    check_schedule(pipeline, make_schedule(pipeline, 2), 2)
    assert max(most_kept(pipeline)) <= max(most_kept(unsplit(pipeline)))
    period_s = steady_state(pipeline).period_s
    assert least_period_s(pipeline) <= period_s * (1 + 1e-9)
    if pipeline.stages == 1 or all(link.has_gradient for link in pipeline.links):
        # Where a stage gets no gradients it may run ahead; then it's no longer the slowest's pace.
        assert period_s <= steady_state(unsplit(pipeline)).period_s * (1 + 1e-6)


@given(uneven())
def test_orders_are_pure_functions(pipeline):
    assert make_schedule(pipeline, 2) == make_schedule(replace(pipeline), 2)


def test_uneven_stages_get_weight_parts_where_they_would_be_idle():
    """Stage 1 waits for stage 2, three times as slow: its weight parts go there."""
    pipeline = replace(
        equal_stages(3, 8, wire=0.25), forward_s=(1.0, 1.0, 3.0), backward_s=(2.0, 2.0, 3.0)
    )
    rows = [pattern.block(1)[0].translate(None, b"\2\3") for pattern in schedule_patterns(pipeline)]
    assert b"\1\3" in postponed(pipeline, rows)[1]
    assert steady_state(pipeline).period_s < steady_state(unsplit(pipeline)).period_s


def test_a_forward_is_ready_when_the_last_of_its_messages_is_there():
    """Stage 2 has those of stage 1 at 7 and 13 s, and those of stage 0 at 11 and 12 s: no gap."""
    pipeline = replace(equal_stages(3, 2), forward_s=(1.0, 6.0, 1.0))
    skip = Link(0, 2, 10.0, 0.0, 0.0, has_gradient=False)
    pipeline = replace(pipeline, links=(*pipeline.links, skip))
    rows = (b"\0\0\1\1", b"\0\0\1\1", b"\0\1\0\1")
    rows = tuple((kinds, (s,) * 4) for s, kinds in enumerate(rows))
    placed = WeightsWhenIdle(pipeline, rows, [2, 2, 2]).place()
    assert placed[2] == (b"\0\1\0\1\3\3", (2,) * 6)


def test_a_gradient_message_leaves_before_the_weight_part():
    timeline = simulate(equal_stages(2, 1), make_schedule(equal_stages(2, 1), 1))
    at = [{event.op.kind: event for event in events} for events in timeline.stages]
    assert at[0]["B"].start_s == at[1]["B"].end_s == 3.0
    assert at[1]["W"].start_s == 3.0
    assert at[0]["U"].start_s == 5.0


def test_a_stage_keeps_its_order_where_rounding_leaves_nothing_of_a_first_part():
    """A weight part that is longer than the whole by a trifle doesn't begin before the first."""
    pipeline = replace(equal_stages(3, 4), backward_s=(0.3,) * 3, weight_s=(0.3 + 1e-12,) * 3)
    assert pipeline.backward_op_s(0) == 0
    order = make_schedule(pipeline, 2)
    timeline = simulate(pipeline, order)
    for s, ops in enumerate(order):
        assert [k for stage, k in timeline.sequence if stage == s] == list(range(len(ops)))
        for before, after in pairwise(timeline.stages[s]):
            assert after.start_s >= before.end_s


def test_the_checker_knows_weight_parts():
    pipeline = equal_stages(1, 1)
    good = [Op("F", 0, 0), Op("B", 0, 0), Op("W", 0, 0), Op("U", 0)]
    check_schedule(pipeline, Schedule((tuple(good),)), 1)
    for order, message in [
        ([good[0], good[2], good[1], good[3]], "0W0.0: runs before 0B0.0"),
        ([good[0], good[1], good[3], good[2]], "0U0: runs before 0W0.0"),
        ([good[0], good[1], good[3]], "0U0: runs before 0W0.0"),
    ]:
        with pytest.raises(ScheduleError, match=message):
            check_schedule(pipeline, Schedule((tuple(order),)), 1)
    with pytest.raises(ScheduleError, match="not expected"):
        check_schedule(unsplit(pipeline), Schedule((tuple(good),)), 1)


def test_very_long_mini_batches_take_the_papers_way():
    pipeline = equal_stages(8, 2100)
    patterns = schedule_patterns(pipeline)
    assert all(len(pattern.block(1)[0]) == 3 * 2100 + 1 for pattern in patterns)
    assert max(most_kept(pipeline)) == 8
