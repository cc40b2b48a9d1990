"""Orders, versions and simulation: timetables written out, closed forms, drawn pipelines."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil
from random import Random

import pytest
from helpers.by_hand.nf1b import list_schedule, list_schedule_of_replicas
from helpers.by_hand.unit_pipelines import steady_period_s, unit_pipeline
from helpers.by_hand.versions import version_use
from helpers.drawn.pipelines import pipelines
from helpers.output.schedules import parse_schedule, schedule_text
from hypothesis import example, given
from hypothesis import strategies as st
from timeprest.planner.schedules.check import check_schedule
from timeprest.planner.schedules.schedules import StalenessBounds, limit_ranges, make_schedule
from timeprest.planner.search.choices import all_limits
from timeprest.planner.simulator.pipeline import Link, Route
from timeprest.planner.simulator.timeline import simulate, warm_mini_batches
from timeprest.planner.systems.operations import Op, Schedule, op_text, parse_op
from timeprest.planner.systems.variants import VARIANTS
from timeprest.planner.systems.versions import entry_versions
from timeprest.profiles.errors import ScheduleError


def bound_limits(stages, n):
    return [1 + ceil(2 * (stages - 1 - s) / (n + 1)) for s in range(stages)]


def steady_difference(pipeline, order, stage, count):
    entries = entry_versions(pipeline.variant, pipeline.micro_batches, order[0])
    use = version_use(pipeline.variant, pipeline.micro_batches, order[stage], entries)
    return set(use.differences[count // 3 : 2 * count // 3])


# Written out by hand -----------------------------------------------------------------------


def test_one_forward_one_backward_timetable():
    order = make_schedule(unit_pipeline("pipedream", 3, 1), 4)
    assert schedule_text(order).replace(".0", "").splitlines() == [
        "0F0 0F1 0F2 0B0 0U0 0F3 0B1 0U1 0B2 0U2 0B3 0U3",
        "1F0 1F1 1B0 1U0 1F2 1B1 1U1 1F3 1B2 1U2 1B3 1U3",
        "2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 2U3",
    ]


def test_gpipe_timetable():
    order = make_schedule(unit_pipeline("gpipe", 2, 2, [1, 1]), 1)
    assert schedule_text(order).splitlines() == [
        "0F0.0 0F0.1 0B0.0 0B0.1 0U0",
        "1F0.0 1F0.1 1B0.0 1B0.1 1U0",
    ]


def test_pipedream_flush_timetable():
    order = make_schedule(unit_pipeline("pipedream-flush", 2, 2), 2)
    assert schedule_text(order).splitlines() == [
        "0F0.0 0F0.1 0B0.0 0B0.1 0U0 0F1.0 0F1.1 0B1.0 0B1.1 0U1",
        "1F0.0 1B0.0 1F0.1 1B0.1 1U0 1F1.0 1B1.0 1F1.1 1B1.1 1U1",
    ]


def test_pipedream_2bw_timetable():
    """S = 2, N = 2: stage 0 has two micro-batches in flight, across mini-batches."""
    pipeline = unit_pipeline("pipedream-2bw", 2, 2)
    order = make_schedule(pipeline, 3)
    assert schedule_text(order).splitlines() == [
        "0F0.0 0F0.1 0B0.0 0F1.0 0B0.1 0U0 0F1.1 0B1.0 0F2.0 0B1.1 0U1 0F2.1 0B2.0 0B2.1 0U2",
        "1F0.0 1B0.0 1F0.1 1B0.1 1U0 1F1.0 1B1.0 1F1.1 1B1.1 1U1 1F2.0 1B2.0 1F2.1 1B2.1 1U2",
    ]
    # Mini-batch b runs on version b − 1 at both stages: W(t+1) = W(t) − η·g(W(t−1)).
    entries = entry_versions(pipeline.variant, pipeline.micro_batches, order[0])
    assert entries == (0, 0, 0, 0, 1, 1)
    for ops in order:
        use = version_use(VARIANTS["pipedream-2bw"], 2, ops, entries)
        passes = [
            (op.mini_batch, v) for op, v in zip(ops, use.versions, strict=True) if op.kind != "U"
        ]
        assert all(version == entries[2 * b] for b, version in passes)


def test_nf1b_timetable():
    """S = 2, N = 2, f = 1, β = 1. Stage 1 runs its backward as soon as it can, from 3 to 4."""
    order = make_schedule(unit_pipeline("timeprest", 2, 2), 3)
    assert schedule_text(order).splitlines() == [
        "0F0.0 0F0.1 0F1.0 0F1.1 0B0 0U0 0F2.0 0F2.1 0B1 0U1 0B2 0U2",
        "1F0.0 1F0.1 1B0 1U0 1F1.0 1F1.1 1B1 1U1 1F2.0 1F2.1 1B2 1U2",
    ]


def in_slots(pipeline, order, last):
    """Per stage, what runs in time slots 1 to `last`; "-" where it idles. Updates take no time."""
    rows = []
    for events in simulate(pipeline, order).stages:
        row = ["-"] * last
        for event in events:
            if event.op.kind != "U" and event.start_s < last:
                row[round(event.start_s)] = op_text(0, event.op)[1:]
        rows.append(" ".join(row))
    return rows


def test_the_journals_timetable():
    """TiMePReSt's journal version, figure 2c: S = 3, N = 2, slots 1 to 10."""
    pipeline = unit_pipeline("timeprest", 3, 2)
    assert in_slots(pipeline, make_schedule(pipeline, 9), 10) == [
        "F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 B0 F3.0 F3.1 B1",
        "- F0.0 F0.1 F1.0 F1.1 B0 F2.0 F2.1 B1 F3.0",
        "- - F0.0 F0.1 B0 F1.0 F1.1 B1 F2.0 F2.1",
    ]


def test_update_lands_between_the_micro_batches_of_a_mini_batch():
    """S = N = 4, the journal's figure 2b: of mini-batch 2's micro-batches, the last two enter after
    the first update at stage 0, and use it at every stage; the first two use none."""
    pipeline = unit_pipeline("timeprest", 4, 4)
    order = make_schedule(pipeline, 6)
    ops = schedule_text(order).splitlines()[0].split()
    assert ops[8:14] == ["0F2.0", "0F2.1", "0B0", "0U0", "0F2.2", "0F2.3"]
    entries = entry_versions(pipeline.variant, 4, order[0])
    for stage_ops in order:
        versions = version_use(pipeline.variant, 4, stage_ops, entries).versions
        used = dict(zip(stage_ops, versions, strict=True))
        assert [used[Op("F", 2, i)] for i in range(4)] == [0, 0, 1, 1]
        # Backwards come in the order of their mini-batches: the latest is version b everywhere.
        assert [used[Op("B", b)] for b in range(6)] == list(range(6))


@pytest.mark.parametrize(
    ("system", "stages", "n", "held"),
    [
        ("timeprest", 2, 3, [1, 2]),
        ("timeprest", 4, 3, [1, 2, 3, 3]),
        ("timeprest", 8, 3, [1, 2, 3, 3, 4, 5, 5, 6]),
        ("timeprest", 4, 4, [1, 2, 2, 3]),
        ("pipedream-unstashed", 4, 1, [1, 2, 3, 4]),
        # What a pass in flight used is kept for its backward, at every stage.
        ("timeprest-stashed", 4, 3, [3, 3, 3, 3]),
        ("i-timeprest", 4, 3, [3, 3, 3, 3]),
        ("v-timeprest", 4, 3, [1, 1, 1, 1]),
    ],
)
def test_versions_held_with_unit_times(system, stages, n, held):
    """Late stages hold what stage 0 had when a micro-batch still to come entered there."""
    pipeline = unit_pipeline(system, stages, n)
    order = make_schedule(pipeline, 8 * stages)
    entries = entry_versions(pipeline.variant, n, order[0])
    assert [version_use(pipeline.variant, n, ops, entries).most_held for ops in order] == held


def test_where_no_gradient_goes_back_stage_0_may_be_ahead_of_a_later_one():
    """Then that one uses its own latest version."""
    pipeline = unit_pipeline("timeprest", 3, 2)
    links = (replace(pipeline.links[0], has_gradient=False), pipeline.links[1])
    pipeline = replace(pipeline, links=links)
    order = make_schedule(pipeline, 8)
    entries = entry_versions(pipeline.variant, 2, order[0])
    assert entries == tuple(b for b in range(8) for _ in range(2))
    use = version_use(pipeline.variant, 2, order[1], entries)
    latest, behind = 0, 0
    for op, version in zip(order[1], use.versions, strict=True):
        latest += op.kind == "U"
        assert version == latest
        behind += op.kind == "F" and latest < op.mini_batch
    assert behind
    assert use.most_held == 1


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
        order = make_schedule(pipeline, count)
        assert steady_period_s(simulate(pipeline, order)) == pytest.approx(n + 1)
        assert steady_difference(pipeline, order, 0, count) == {difference}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_pipedream_holds_up_to_s_versions(stages):
    pipeline = unit_pipeline("pipedream", stages, 1)
    order = make_schedule(pipeline, 3 * stages)
    for s, ops in enumerate(order):
        use = version_use(pipeline.variant, 1, ops)
        assert use.most_held == stages - s
        assert set(use.differences) == {0}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_vertical_sync_holds_s_versions_everywhere(stages):
    pipeline = unit_pipeline("pipedream-vertical-sync", stages, 1)
    order = make_schedule(pipeline, 4 * stages)
    entries = entry_versions(pipeline.variant, pipeline.micro_batches, order[0])
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
    order = make_schedule(pipeline, 6)
    entries = entry_versions(pipeline.variant, pipeline.micro_batches, order[0])
    # With one stage it is plain training; else each mini-batch runs on the version before.
    assert entries == tuple(b if stages == 1 else max(0, b - 1) for b in range(6) for _ in range(n))
    for ops in order:
        use = version_use(pipeline.variant, n, ops, entries)
        assert use.most_held == min(stages, 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_pipemare_is_as_deep_as_the_pipeline(stages, n):
    """D micro-batches ahead of the next backward, however few make a mini-batch: one idle-free
    period of N forwards and backwards, and ⌈D / N⌉ updates between a forward and its backward."""
    pipeline = unit_pipeline("pipemare", stages, n)
    order = make_schedule(pipeline, 6 * stages)
    assert steady_period_s(simulate(pipeline, order)) == pytest.approx(2 * n)
    for s, ops in enumerate(order):
        behind = stages - 1 - s
        kinds = "".join(op.kind for op in ops if op.kind != "U")
        assert kinds.startswith("F" * behind + "FBFB"[: 2 * n])
        use = version_use(pipeline.variant, n, ops)
        assert (use.most_held, max(use.differences)) == (1, -(-behind // n))


def test_limits_hold_pipemare_back():
    """(L − 1)·N micro-batches ahead of the next backward."""
    order = make_schedule(unit_pipeline("pipemare", 4, 2, [2, 2, 1, 1]), 8)
    ahead = ["".join(op.kind for op in ops).index("B") - 1 for ops in order]
    assert ahead == [2, 2, 0, 0]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_spectrain_holds_one_version(stages):
    pipeline = unit_pipeline("spectrain", stages, 1)
    order = make_schedule(pipeline, 4 * stages)
    for s, ops in enumerate(order):
        use = version_use(pipeline.variant, 1, ops)
        assert use.most_held == 1
        # Updates that land between forward and backward: what the predictions span.
        assert max(use.differences) == stages - 1 - s
    assert pipeline.variant.scratch_copies == 1


@pytest.mark.parametrize(("stages", "n"), [(2, 1), (3, 1), (4, 2), (4, 4), (4, 16), (6, 2)])
def test_i_timeprest_holds_a_version_for_each_difference_and_one_more(stages, n):
    pipeline = unit_pipeline("i-timeprest", stages, n)
    order = make_schedule(pipeline, 5 * stages)
    entries = entry_versions(pipeline.variant, n, order[0])
    for ops in order:
        use = version_use(pipeline.variant, n, ops, entries)
        assert use.most_held == max(use.differences) + 1


@pytest.mark.parametrize(
    ("variant", "ranges"),
    [
        ("timeprest", ((1, 7), (1, 5), (1, 3), (1, 1))),
        ("pipedream", ((1, 4), (1, 3), (1, 2), (1, 1))),
        ("spectrain", ((1, 4), (1, 3), (1, 2), (1, 1))),
        ("pipedream-2bw", ((2, 2), (2, 2), (2, 2), (1, 1))),
        ("pipemare", ((1, 4), (1, 3), (1, 2), (1, 1))),
        ("pipedream-flush", ((1, 1),) * 4),
        ("gpipe", ((1, 1),) * 4),
    ],
)
def test_limit_ranges(variant, ranges):
    assert limit_ranges(VARIANTS[variant], 4) == ranges


def test_limits_of_the_papers():
    """PipeDream's and TiMePReSt's: a mini-batch for each stage from a stage on."""
    paper = ((1, 4), (1, 3), (1, 2), (1, 1))
    for name in ("timeprest", "pipedream", "pipemare"):
        for several in (False, True):
            found = limit_ranges(VARIANTS[name], 4, several=several, within=StalenessBounds())
            assert found == paper
    two = StalenessBounds(max_in_flight=2)
    assert limit_ranges(VARIANTS["timeprest"], 4, within=two) == ((1, 2), (1, 2), (1, 2), (1, 1))
    assert limit_ranges(VARIANTS["pipedream-2bw"], 3, within=two) == ((2, 2), (2, 2), (1, 1))
    assert limit_ranges(VARIANTS["gpipe"], 2, within=two) == ((1, 1), (1, 1))


@pytest.mark.parametrize("variant", [v for v, row in VARIANTS.items() if row.schedule == "1f1b"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_version_difference_that_implies_a_limit(variant, every):
    """Every plan that keeps to it is among those of these limits, and each of them keeps to it."""
    system, stages, most, count = VARIANTS[variant], 4, 1, 24
    within = StalenessBounds(max_difference=most)
    ranges = limit_ranges(system, stages, within=within, update_every=every)
    for limits in all_limits(limit_ranges(system, stages)):
        pipeline = replace(unit_pipeline(variant, stages, 1, limits), update_every=every)
        order = make_schedule(pipeline, count)
        found = set().union(*(steady_difference(pipeline, order, s, count) for s in range(stages)))
        kept_to = all(limit <= high for limit, (_, high) in zip(limits, ranges, strict=True))
        assert (max(found) <= most) == kept_to


@pytest.mark.parametrize("variant", [v for v, row in VARIANTS.items() if row.schedule == "1f1b"])
def test_a_delay_that_implies_a_limit_where_weights_are_stashed_too(variant):
    within = StalenessBounds("auto", max_delay=1)
    assert limit_ranges(VARIANTS[variant], 3, within=within) == ((1, 2), (1, 2), (1, 1))
    stashed = VARIANTS[variant].backward_weights == "forward"
    assert StalenessBounds(max_difference=0).late(VARIANTS[variant]) == (None if stashed else 0)


@pytest.mark.parametrize(("stages", "n"), [(1, 1), (2, 4), (3, 4), (4, 8), (4, 2)])
def test_pipedream_flush_keeps_less_in_the_same_time(stages, n):
    """As long as GPipe with equal stages and no transfers; at most D + 1 micro-batches kept."""
    periods = []
    for name in ("gpipe", "pipedream-flush"):
        pipeline = replace(unit_pipeline(name, stages, n), backward_s=(2.0,) * stages)
        order = make_schedule(pipeline, 9)
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
    period = steady_period_s(simulate(pipeline, make_schedule(pipeline, 9)))
    assert period == pytest.approx((n + stages - 1) * 3.0)


# Drawn -------------------------------------------------------------------------------------


@given(pipelines(("timeprest",)), st.integers(1, 5))
def test_nf1b_follows_its_rule(pipeline, mini_batches):
    """Orders are those of the rule written out plainly: runs of older plans repeat."""
    assert make_schedule(pipeline, mini_batches) == list_schedule(pipeline, mini_batches)


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
    assert make_schedule(pipeline, mini_batches) == list_schedule(pipeline, mini_batches)


def chain_of_replicas(seed):
    """Stages with one or two replicas, which aren't equally fast."""
    draw = Random(seed)
    replicas = draw.choice([(1, 2), (2, 1), (2, 2), (1, 2, 1), (2, 1, 2), (2, 2, 1)])
    stages = len(replicas)
    links = []
    for s, (r1, r2) in enumerate(pairwise(replicas)):
        ways = sorted({(i % r1, i % r2) for i in range(2)})
        routes = (Route(i, j, 0, 0, 0, ("there", s, i, j), ("back", s, i, j)) for i, j in ways)
        links.append(Link(s, s + 1, 0.0, 0.0, 0.0, routes=tuple(routes)))
    paces = [
        draw.sample([1.0, draw.choice([0.25, 0.5, 0.75])], 2) if r == 2 else [1.0] for r in replicas
    ]
    return replace(
        unit_pipeline("timeprest", stages, draw.choice([2, 4]), [1] * stages),
        forward_s=tuple(draw.choice([1.0, 2.0, 3.0]) for _ in replicas),
        backward_s=tuple(draw.choice([1.0, 2.0, 3.0]) for _ in replicas),
        update_s=tuple(draw.choice([0.0, 0.5]) for _ in replicas),
        links=tuple(links),
        limits=tuple(max(1, stages - s + draw.choice([0, 0, 1])) for s in range(stages)),
        paces=tuple(map(tuple, paces)),
        update_every=draw.choice([1, 1, 3]),
    )


# Of the last ones' replicas, one is to go on long before the other, as no update follows.
@pytest.mark.parametrize("seeds", [range(20), range(20, 40), (656, 958)])
def test_nf1b_follows_its_rule_with_replicas_of_different_pace(seeds):
    """A forward waits for its own replica, a backward for the last of them, as does an update."""
    for seed in seeds:
        pipeline = chain_of_replicas(seed)
        assert make_schedule(pipeline, 6) == list_schedule_of_replicas(pipeline, 6), seed


def test_rounding_breaks_no_ties():
    """Times that are multiples of one that isn't whole: the same order, as long as it goes."""
    whole, scaled = (
        replace(
            unit_pipeline("v-timeprest", 3, 4, [2, 1, 1]),
            forward_s=(2 * unit_s, 3 * unit_s, unit_s),
            backward_s=(9 * unit_s, 2 * unit_s, 3 * unit_s),
            links=tuple(Link(s, s + 1, t * unit_s, t * unit_s, 0.0) for s, t in enumerate((1, 2))),
        )
        for unit_s in (1.0, 1.3e-3)
    )
    assert make_schedule(scaled, 40) == make_schedule(whole, 40)


def draining():
    """Transfers keep devices busy: where none follow, the second stage has time for forwards."""

    def link(s, wire_s):
        route = Route(0, 0, wire_s, wire_s, 0.0, (s, s + 1), (s + 1, s), overlaps=False)
        return Link(s, s + 1, wire_s, wire_s, 0.0, routes=(route,))

    return replace(
        unit_pipeline("v-timeprest", 3, 2, [3, 2, 1]),
        forward_s=(2.0, 3.0, 3.0),
        backward_s=(1.0, 2.0, 2.0),
        links=(link(0, 3.0), link(1, 2.0)),
    )


@example(draining(), 5)
@given(pipelines(), st.integers(1, 6))
def test_a_run_is_the_beginning_of_a_longer_one(pipeline, mini_batches):
    """So it holds no more at its end than the steady state, which plans predict."""
    whole = make_schedule(pipeline, mini_batches + 4)
    for ops, own in zip(whole, make_schedule(pipeline, mini_batches), strict=True):
        assert own == tuple(op for op in ops if op.mini_batch < mini_batches)


def test_what_repeats_does_so_to_the_last_bit():
    """Though sums of these times are rounded, each time in another way."""
    pipeline = replace(
        unit_pipeline("v-timeprest", 3, 2),
        forward_s=(0.1, 0.7, 0.3),
        backward_s=(0.6, 0.2, 0.9),
        links=(Link(0, 1, 0.35, 0.07, 0.011), Link(1, 2, 0.13, 0.9, 0.0)),
    )
    for events in simulate(pipeline, make_schedule(pipeline, 60)).stages:
        ends = [event.end_s for event in events if event.op.kind == "U"][20:40]
        assert len({b - a for a, b in zip(ends, ends[2:], strict=False)}) == 1


@given(pipelines(most_stages=16, most_micro_batches=64), st.integers(1, 3))
def test_large_orders_obey_the_rules_too(pipeline, mini_batches):
    check_schedule(pipeline, make_schedule(pipeline, mini_batches), mini_batches)


@given(pipelines(), st.integers(1, 5))
def test_every_order_obeys_its_rules(pipeline, mini_batches):
    order = make_schedule(pipeline, mini_batches)
    check_schedule(pipeline, order, mini_batches)
    assert parse_schedule(schedule_text(order)) == order
    assert make_schedule(pipeline, mini_batches) == order


@given(pipelines(), st.integers(2, 6))
def test_versions_follow_the_table(pipeline, mini_batches):
    variant = pipeline.variant
    order = make_schedule(pipeline, mini_batches)
    entries = entry_versions(pipeline.variant, pipeline.micro_batches, order[0])
    for ops in order:
        use = version_use(variant, pipeline.micro_batches, ops, entries)
        updates = 0
        for op, version in zip(ops, use.versions, strict=True):
            assert version <= updates + (op.kind == "U")
            if op.kind == "U":
                updates += 1
                assert version == updates
            elif op.kind == "B" and variant.backward_weights != "forward":
                assert version == updates
            elif op.kind == "F":
                wanted = updates
                if variant.synchronises:
                    entered = entries[op.mini_batch * pipeline.micro_batches + op.micro_batch]
                    wanted = min(entered, updates)
                assert version == wanted
        if not variant.stashes and (not variant.synchronises or ops is order[0]):
            assert use.most_held == 1
        if variant.name == "pipedream-2bw":
            assert use.most_held <= 2
        if variant.backward_weights == "forward" or variant.flushes:
            assert set(use.differences) == {0}


@given(pipelines(), st.integers(1, 4))
def test_a_stage_does_one_thing_at_a_time(pipeline, mini_batches):
    timeline = simulate(pipeline, make_schedule(pipeline, mini_batches))
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
    return (*order.stages[:s], tuple(ops), *order.stages[s + 1 :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: (o[0][1:], o[1]), "0B0: runs before 0F0.0|is missing"),
        (lambda o: ((*o[0], o[0][0]), o[1]), "runs twice"),
        (lambda o: ((*o[0], Op("F", 9, 0)), o[1]), "not expected"),
        (lambda o: (o[0][:-1], o[1]), "0U3: is missing"),
        (lambda o: _swapped(o, 1, 0, 1), "1B0: runs before 1F0.0"),
        (lambda o: _swapped(o, 0, 0, 1), "same sequence"),
        (lambda o: o.stages[:1], "stages"),
    ],
)
def test_the_checker_names_what_is_wrong(change, message):
    pipeline = unit_pipeline("pipedream", 2, 1)
    order = make_schedule(pipeline, 4)
    check_schedule(pipeline, order, 4)
    with pytest.raises(ScheduleError, match=message):
        check_schedule(pipeline, Schedule(change(order)), 4)


def test_deadlock_is_named():
    """Both stages wait: 0 wants a gradient before it has sent the activation."""
    pipeline = replace(unit_pipeline("v-timeprest", 2, 1), limits=(2, 1))
    order = make_schedule(pipeline, 2)
    stuck = tuple(op for op in order[0] if op.kind != "F") + tuple(
        op for op in order[0] if op.kind == "F"
    )
    with pytest.raises(ScheduleError, match=r"deadlock.*0B0, 1F0\.0"):
        simulate(pipeline, Schedule((stuck, order[1])))


@given(st.integers(0, 99), st.sampled_from("FBU"), st.integers(0, 999), st.integers(0, 99))
def test_operation_text_round_trips(stage, kind, mini_batch, micro_batch):
    for op in (Op(kind, mini_batch), Op(kind, mini_batch, micro_batch)):
        assert parse_op(op_text(stage, op)) == (stage, op)


@pytest.mark.parametrize("text", ["", "F0", "1X0", "1F", "1F0.", "1F0.0 1F0.1"])
def test_bad_operation_text_is_refused(text):
    with pytest.raises(ScheduleError):
        parse_op(text)
