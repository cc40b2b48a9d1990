"""Orders, versions and simulation: timetables written out, closed forms, drawn pipelines."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

import pytest
from drawn_pipelines import pipelines
from hypothesis import given
from hypothesis import strategies as st
from order_by_hand import list_schedule
from timeprest.planner.operations import Op, op_text, order_text, parse_op, parse_order
from timeprest.planner.order_check import check_order
from timeprest.planner.orders import limit_ranges, make_order
from timeprest.planner.simulate import simulate, steady_period_s, warm_mini_batches
from timeprest.planner.variants import VARIANTS
from timeprest.planner.versions import entry_versions, version_use
from timeprest.profiles.errors import OrderError
from unit_pipelines import unit_pipeline


def bound_limits(stages, n):
    return [1 + ceil(2 * (stages - 1 - s) / (n + 1)) for s in range(stages)]


def steady_difference(pipeline, order, stage, count):
    use = version_use(pipeline.variant, pipeline.micro_batches, order[stage])
    return set(use.differences[count // 3 : 2 * count // 3])


# Written out by hand -----------------------------------------------------------------------


def test_one_forward_one_backward_timetable():
    order = make_order(unit_pipeline("pipedream", 3, 1), 4)
    assert order_text(order).replace(".0", "").splitlines() == [
        "0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0B2 0U2 0B3 0U3",
        "1F0 1F1 1B0 1U0 1F2 1B1 1U1 1F3 1B2 1U2 1B3 1U3",
        "2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 2U3",
    ]


def test_gpipe_timetable():
    order = make_order(unit_pipeline("gpipe", 2, 2, [1, 1]), 1)
    assert order_text(order).splitlines() == [
        "0F0.0 0F0.1 0B0.0 0B0.1 0U0",
        "1F0.0 1F0.1 1B0.0 1B0.1 1U0",
    ]


def test_pipedream_flush_timetable():
    order = make_order(unit_pipeline("pipedream-flush", 2, 2), 2)
    assert order_text(order).splitlines() == [
        "0F0.0 0F0.1 0B0.0 0B0.1 0U0 0F1.0 0F1.1 0B1.0 0B1.1 0U1",
        "1F0.0 1B0.0 1F0.1 1B0.1 1U0 1F1.0 1B1.0 1F1.1 1B1.1 1U1",
    ]


def test_pipedream_2bw_timetable():
    """S = 2, N = 2: stage 0 has two micro-batches in flight, across mini-batches."""
    order = make_order(unit_pipeline("pipedream-2bw", 2, 2), 3)
    assert order_text(order).splitlines() == [
        "0F0.0 0F0.1 0B0.0 0F1.0 0B0.1 0U0 0F1.1 0B1.0 0F2.0 0B1.1 0U1 0F2.1 0B2.0 0B2.1 0U2",
        "1F0.0 1B0.0 1F0.1 1B0.1 1U0 1F1.0 1B1.0 1F1.1 1B1.1 1U1 1F2.0 1B2.0 1F2.1 1B2.1 1U2",
    ]
    # Mini-batch b runs on version b − 1 at both stages: W(t+1) = W(t) − η·g(W(t−1)).
    entries = entry_versions(order[0])
    assert entries == (0, 0, 1)
    for ops in order:
        use = version_use(VARIANTS["pipedream-2bw"], 2, ops, entries)
        passes = [
            (op.mini_batch, v) for op, v in zip(ops, use.versions, strict=True) if op.kind != "U"
        ]
        assert all(version == entries[b] for b, version in passes)


def test_nf1b_timetable():
    """S = 2, N = 2, f = 1, β = 1. Stage 1 runs its backward as soon as it can, from 3 to 4."""
    order = make_order(unit_pipeline("timeprest", 2, 2), 3)
    assert order_text(order).splitlines() == [
        "0F0.0 0F0.1 0F1.0 0F1.1 0B0 0U0 0F2.0 0F2.1 0B1 0U1 0B2 0U2",
        "1F0.0 1F0.1 1B0 1U0 1F1.0 1F1.1 1B1 1U1 1F2.0 1F2.1 1B2 1U2",
    ]


def test_update_lands_between_the_micro_batches_of_a_mini_batch():
    """N = 4: stage 0's first update comes while mini-batch 1 is under way there."""
    pipeline = unit_pipeline("timeprest", 2, 4)
    order = make_order(pipeline, 3)
    ops = order_text(order).splitlines()[0].split()
    assert ops[4:11] == ["0F1.0", "0F1.1", "0B0", "0U0", "0F1.2", "0F1.3", "0F2.0"]
    pinned = version_use(VARIANTS["timeprest"], 4, order[0])
    latest = version_use(VARIANTS["v-timeprest"], 4, order[0])
    # 1F1.2 runs after the update: on the first micro-batch's version, or on the latest.
    assert (pinned.versions[8], latest.versions[8]) == (0, 1)
    assert (pinned.most_held, latest.most_held) == (2, 1)


# Closed forms ------------------------------------------------------------------------------

UNIT_FACTS = [
    *((2, n, 1) for n in range(1, 17)),
    *((3, n, 1) for n in (4, 8)),
    (4, 4, 2),
    (4, 8, 1),
    (4, 16, 1),
    (8, 8, 2),
    (8, 16, 1),
]


@pytest.mark.parametrize(("stages", "n", "difference"), UNIT_FACTS)
def test_unit_time_facts(stages, n, difference):
    """f = β = 1, no transfer time: period N + 1, and the version difference at stage 0."""
    count = warm_mini_batches(stages)
    for limits in (bound_limits(stages, n), None):
        pipeline = unit_pipeline("timeprest", stages, n, limits)
        order = make_order(pipeline, count)
        assert steady_period_s(simulate(pipeline, order)) == pytest.approx(n + 1)
        assert steady_difference(pipeline, order, 0, count) == {difference}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_pipedream_holds_up_to_s_versions(stages):
    pipeline = unit_pipeline("pipedream", stages, 1)
    order = make_order(pipeline, 3 * stages)
    for s, ops in enumerate(order):
        use = version_use(pipeline.variant, 1, ops)
        assert use.most_held == stages - s
        assert set(use.differences) == {0}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_vertical_sync_holds_s_versions_everywhere(stages):
    pipeline = unit_pipeline("pipedream-vertical-sync", stages, 1)
    order = make_order(pipeline, 4 * stages)
    entries = entry_versions(order[0])
    assert entries == tuple(max(0, b - stages + 1) for b in range(4 * stages))
    for ops in order:
        use = version_use(pipeline.variant, 1, ops, entries)
        assert use.most_held == stages
        assert set(use.differences) == {0}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_2bw_holds_two_versions(stages, more):
    n = stages + more
    pipeline = unit_pipeline("pipedream-2bw", stages, n)
    order = make_order(pipeline, 6)
    entries = entry_versions(order[0])
    # With one stage it is plain training; else each mini-batch runs on the version before.
    assert entries == tuple(b if stages == 1 else max(0, b - 1) for b in range(6))
    for ops in order:
        use = version_use(pipeline.variant, n, ops, entries)
        assert use.most_held == min(stages, 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_spectrain_holds_one_version(stages):
    pipeline = unit_pipeline("spectrain", stages, 1)
    order = make_order(pipeline, 4 * stages)
    for s, ops in enumerate(order):
        use = version_use(pipeline.variant, 1, ops)
        assert use.most_held == 1
        # Updates that land between forward and backward: what the predictions span.
        assert max(use.differences) == stages - 1 - s
    assert pipeline.variant.scratch_copies == 1


@pytest.mark.parametrize(("stages", "n"), [(2, 1), (3, 1), (4, 2), (4, 4), (4, 16), (6, 2)])
def test_i_timeprest_holds_a_version_for_each_difference_and_one_more(stages, n):
    pipeline = unit_pipeline("i-timeprest", stages, n)
    for ops in make_order(pipeline, 5 * stages):
        use = version_use(pipeline.variant, n, ops)
        assert use.most_held == max(use.differences) + 1


@pytest.mark.parametrize(
    ("variant", "ranges"),
    [
        ("timeprest", ((1, 7), (1, 5), (1, 3), (1, 1))),
        ("pipedream", ((1, 4), (1, 3), (1, 2), (1, 1))),
        ("spectrain", ((1, 4), (1, 3), (1, 2), (1, 1))),
        ("pipedream-2bw", ((2, 2), (2, 2), (2, 2), (1, 1))),
        ("pipedream-flush", ((1, 1),) * 4),
        ("gpipe", ((1, 1),) * 4),
    ],
)
def test_limit_ranges(variant, ranges):
    assert limit_ranges(VARIANTS[variant], 4) == ranges


@pytest.mark.parametrize(("stages", "n"), [(1, 1), (2, 4), (3, 4), (4, 8), (4, 2)])
def test_pipedream_flush_keeps_less_in_the_same_time(stages, n):
    """As long as GPipe with equal stages and no transfers; at most D + 1 micro-batches kept."""
    periods = []
    for name in ("gpipe", "pipedream-flush"):
        pipeline = replace(unit_pipeline(name, stages, n), backward_s=(2.0,) * stages)
        order = make_order(pipeline, 9)
        periods.append(steady_period_s(simulate(pipeline, order)))
        for s, ops in enumerate(order):
            kept = most = 0
            for op in ops:
                kept += {"F": 1, "B": -1, "U": 0}[op.kind]
                most = max(most, kept)
            assert most == (n if name == "gpipe" else min(stages - s, n))
    assert periods[0] == pytest.approx(periods[1])


@pytest.mark.parametrize(("stages", "n"), [(1, 1), (2, 4), (3, 4), (4, 8), (4, 2)])
def test_gpipe_time_is_the_flow_shop_formula(stages, n):
    """(N + S − 1)·(f + b) with equal stages and no transfers."""
    pipeline = replace(unit_pipeline("gpipe", stages, n, [1] * stages), backward_s=(2.0,) * stages)
    period = steady_period_s(simulate(pipeline, make_order(pipeline, 9)))
    assert period == pytest.approx((n + stages - 1) * 3.0)


# Drawn -------------------------------------------------------------------------------------


@given(pipelines(("timeprest",)), st.integers(1, 5))
def test_nf1b_follows_its_rule(pipeline, mini_batches):
    """Orders are those of the rule written out plainly: runs of older plans repeat."""
    assert make_order(pipeline, mini_batches) == list_schedule(pipeline, mini_batches)


@given(pipelines(("timeprest",)), st.integers(1, 5), st.sampled_from([0.0, 1.0, 2.0]))
def test_nf1b_breaks_ties_by_its_rule(pipeline, mini_batches, zero):
    """Whole numbers, so that operations are ready at the same time, some without a duration."""
    pipeline = replace(
        pipeline,
        forward_s=tuple(round(t) * 1.0 for t in pipeline.forward_s),
        backward_s=(zero / pipeline.micro_batches,) * pipeline.stages,
        links=tuple(
            replace(k, forward_s=round(k.forward_s), backward_s=round(k.backward_s), latency_s=0.0)
            for k in pipeline.links
        ),
    )
    assert make_order(pipeline, mini_batches) == list_schedule(pipeline, mini_batches)


@given(pipelines(most_stages=16, most_micro_batches=64), st.integers(1, 3))
def test_large_orders_obey_the_rules_too(pipeline, mini_batches):
    check_order(pipeline, make_order(pipeline, mini_batches), mini_batches)


@given(pipelines(), st.integers(1, 5))
def test_every_order_obeys_its_rules(pipeline, mini_batches):
    order = make_order(pipeline, mini_batches)
    check_order(pipeline, order, mini_batches)
    assert parse_order(order_text(order)) == order
    assert make_order(pipeline, mini_batches) == order


@given(pipelines(), st.integers(2, 6))
def test_versions_follow_the_table(pipeline, mini_batches):
    variant = pipeline.variant
    order = make_order(pipeline, mini_batches)
    entries = entry_versions(order[0])
    for ops in order:
        use = version_use(variant, pipeline.micro_batches, ops, entries)
        updates, first_of = 0, {}
        for op, version in zip(ops, use.versions, strict=True):
            assert version <= updates + (op.kind == "U")
            first_of.setdefault(op.mini_batch, updates)
            if op.kind == "U":
                updates += 1
                assert version == updates
            elif op.kind == "B" and variant.backward_weights != "forward":
                assert version == updates
            elif op.kind == "F":
                wanted = {
                    "latest": updates,
                    "predicted": updates,
                    "first-micro-batch": first_of[op.mini_batch],
                    "entry": entries[op.mini_batch],
                }
                assert version == wanted[variant.forward_weights]
        if not variant.stashes and variant.forward_weights != "first-micro-batch":
            assert use.most_held == 1
        if variant.name in ("timeprest", "pipedream-2bw"):
            assert use.most_held <= 2
        if variant.backward_weights == "forward" or variant.flushes:
            assert set(use.differences) == {0}


@given(pipelines(), st.integers(1, 4))
def test_a_stage_does_one_thing_at_a_time(pipeline, mini_batches):
    timeline = simulate(pipeline, make_order(pipeline, mini_batches))
    for s, events in enumerate(timeline.stages):
        assert sum(e.end_s - e.start_s for e in events) == pytest.approx(
            mini_batches * pipeline.work_s(s)
        )
        for before, after in pairwise(events):
            assert after.start_s >= before.end_s


# The checker finds what is wrong -----------------------------------------------------------


def _swapped(order, s, a, b):
    ops = list(order[s])
    ops[a], ops[b] = ops[b], ops[a]
    return (*order[:s], tuple(ops), *order[s + 1 :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: (o[0][1:], o[1]), "0B0: runs before 0F0.0|is missing"),
        (lambda o: ((*o[0], o[0][0]), o[1]), "runs twice"),
        (lambda o: ((*o[0], Op("F", 9, 0)), o[1]), "not expected"),
        (lambda o: (o[0][:-1], o[1]), "0U3: is missing"),
        (lambda o: _swapped(o, 1, 0, 1), "1B0: runs before 1F0.0"),
        (lambda o: _swapped(o, 0, 0, 1), "same sequence"),
        (lambda o: o[:1], "stages"),
    ],
)
def test_the_checker_names_what_is_wrong(change, message):
    pipeline = unit_pipeline("pipedream", 2, 1)
    order = make_order(pipeline, 4)
    check_order(pipeline, order, 4)
    with pytest.raises(OrderError, match=message):
        check_order(pipeline, change(order), 4)


def test_deadlock_is_named():
    """Both stages wait: 0 wants a gradient before it has sent the activation."""
    pipeline = replace(unit_pipeline("v-timeprest", 2, 1), limits=(2, 1))
    order = make_order(pipeline, 2)
    stuck = tuple(op for op in order[0] if op.kind != "F") + tuple(
        op for op in order[0] if op.kind == "F"
    )
    with pytest.raises(OrderError, match=r"deadlock.*0B0, 1F0\.0"):
        simulate(pipeline, (stuck, order[1]))


@given(st.integers(0, 99), st.sampled_from("FBU"), st.integers(0, 999), st.integers(0, 99))
def test_operation_text_round_trips(stage, kind, mini_batch, micro_batch):
    for op in (Op(kind, mini_batch), Op(kind, mini_batch, micro_batch)):
        assert parse_op(op_text(stage, op)) == (stage, op)


@pytest.mark.parametrize("text", ["", "F0", "1X0", "1F", "1F0.", "1F0.0 1F0.1"])
def test_bad_operation_text_is_refused(text):
    with pytest.raises(OrderError):
        parse_op(text)
