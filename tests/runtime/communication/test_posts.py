"""Nothing that is posted can hold a device up, even where every operation waits for all of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from helpers.drawn.cases import examples
from helpers.drawn.pipelines import ALL, laid_out, pipelines, times
from helpers.processes import hostile_device
from helpers.processes.hostile_device import run_on_hostile_devices, workers_and_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.planner.costs.stage_costs import RECEIVES_AHEAD
from timeprest.planner.schedules.schedules import limit_ranges, make_schedule
from timeprest.planner.simulator.pipeline import Link, Pipeline
from timeprest.planner.simulator.timeline import updates_last, whole_sequence
from timeprest.planner.systems.variants import VARIANTS
from timeprest.runtime.communication.channel import PeerError
from timeprest.runtime.communication.posts import Post, posts

EVERY = tuple(sorted(VARIANTS))
PLACEMENTS = {"straight": (), "loop": (0, 1, 0, 1), "v": (0, 1, 1, 0)}


def chain_of(variant, stages, n, placement=()):
    """Equal stages, with the largest limits that make sense."""
    row = VARIANTS[variant]
    ranges = limit_ranges(row, stages, several=bool(placement))
    return Pipeline(
        variant=row,
        micro_batches=n,
        forward_s=(1.0,) * stages,
        backward_s=(2.0,) * stages,
        weight_s=(1.0,) * stages if row.split_backward else (),
        update_s=(0.5,) * stages,
        links=tuple(Link(s, s + 1, 0.25, 0.25, 0.125, True) for s in range(stages - 1)),
        limits=tuple(most for _, most in ranges),
        placement=placement,
    )


def cases():
    for name in EVERY:
        row = VARIANTS[name]
        for shape, placement in PLACEMENTS.items():
            if row.placement not in ("any", shape) or (shape == "straight") != (not placement):
                continue
            for stages in (len(placement),) if placement else (2, 3, 4):
                for n in (1,) if row.whole_mini_batches else (1, 2, 3, 4):
                    if n >= row.least_micro_batches(stages):
                        yield name, shape, stages, n


CASES = list(cases())


def test_the_cases_are_all_systems_on_all_placements():
    assert {name for name, *_ in CASES} == {*EVERY}
    assert {shape for _, shape, *_ in CASES} == {*PLACEMENTS}


def check(pipeline, mini_batches=5, waits=1.0, seed=0):
    sequence = whole_sequence(pipeline, make_schedule(pipeline, mini_batches))
    run_on_hostile_devices(pipeline, sequence, posts, waits, seed)


@pytest.mark.choice(120)
@pytest.mark.parametrize(("name", "shape", "stages", "n"), CASES)
def test_no_run_stands_still_on_a_device_where_all_wait_for_all(name, shape, stages, n):
    check(chain_of(name, stages, n, PLACEMENTS[shape]))


@pytest.mark.slow
@settings(max_examples=examples(90))
@given(pipelines(EVERY, most_stages=4, most_micro_batches=4), st.integers(0, 99))
def test_nor_do_drawn_pipelines(pipeline, seed):
    check(pipeline, 4)
    check(pipeline, 4, waits=0.4, seed=seed)


@pytest.mark.slow
@settings(max_examples=examples(90))
@given(pipelines(ALL, most_micro_batches=4, placed=True), st.integers(0, 99))
def test_nor_those_with_several_stages_on_a_device(pipeline, seed):
    check(pipeline, 4)
    check(pipeline, 4, waits=0.4, seed=seed)


@pytest.mark.slow
@settings(max_examples=examples(90))
@given(laid_out(), st.integers(0, 99))
def test_nor_those_with_replicas(pipeline, seed):
    check(pipeline, 3)
    check(pipeline, 3, waits=0.4, seed=seed)


@st.composite
def orders(draw):
    """Pipelines with orders that come of other times than theirs."""
    pipeline = draw(
        pipelines(EVERY, most_stages=4, most_micro_batches=4, placed=draw(st.booleans()))
    )
    schedule = make_schedule(pipeline, 4)
    others = {
        name: tuple(draw(times) for _ in getattr(pipeline, name))
        for name in ("forward_s", "backward_s")
    }
    share = [0.5 * seconds for seconds in others["backward_s"]]
    return replace(pipeline, **others, weight_s=tuple(share[: len(pipeline.weight_s)])), schedule


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(orders(), st.integers(0, 99))
def test_nor_do_orders_that_others_have_made(drawn, seed):
    pipeline, schedule = drawn
    sequence = whole_sequence(pipeline, schedule)
    for waits in (1.0, 0.4):
        run_on_hostile_devices(pipeline, sequence, posts, waits, seed)


def early(rank, *others):
    """Receives posted as far ahead as there is memory for, and sends as soon as they are made."""
    found, coming = [], {}
    for post in posts(rank, *others):
        maker, taker = post.route.between(post.kind)
        if maker.rank == rank:
            found.append(post)
            continue
        earlier = coming.setdefault((taker, post.kind), [])
        earlier.append(post)
        k = len(earlier) - 1 - RECEIVES_AHEAD[post.kind]
        after = 0 if k < 0 else earlier[k].after + 1
        found.append(Post(after, post.route, post.kind))
    return sorted(found, key=lambda each: each.after)


@pytest.mark.parametrize("name", ["timeprest", "gpipe"])
def test_receives_that_are_posted_ahead_of_all_do(name, monkeypatch):
    monkeypatch.setattr(hostile_device, "STUCK_S", 0.5)
    pipeline = chain_of(name, 2, 2)
    sequence = whole_sequence(pipeline, make_schedule(pipeline, 3))
    with pytest.raises(PeerError):
        run_on_hostile_devices(pipeline, sequence, early)


@pytest.mark.parametrize("name", ["timeprest", "pipedream-2bw", "gpipe", "zb-h1"])
def test_a_receive_goes_out_when_all_that_its_sender_waits_for_is_handed_in(name):
    """And no earlier message of the same tensor still has the memory for it."""
    pipeline = chain_of(name, 3, 4)
    sequence = whole_sequence(pipeline, make_schedule(pipeline, 4))
    replicas, distribution = workers_and_distribution(pipeline)
    for rank in range(3):
        own = [at for at in sequence if at[0] == rank]
        handed_in = list(accumulate(s == rank for s, _ in sequence))
        seen: dict[tuple[int, str], int] = {}
        mine = posts(rank, sequence, replicas, distribution.shares, distribution.routes)
        assert all(a.after <= b.after for a, b in pairwise(mine))
        for after, route, kind in mine:
            k = seen[route.number, kind] = seen.get((route.number, kind), -1) + 1
            maker, taker = route.between(kind)
            makes, takes = (
                [j for j, (s, op) in enumerate(sequence) if s == end.stage and op.kind == kind]
                for end in (maker, taker)
            )
            made = [op for s, op in own if s == rank][: handed_in[makes[k]]]
            assert after >= len(made)
            if taker.rank == rank:
                assert after < handed_in[takes[k]]
                assert k - sum(handed_in[j] <= after for j in takes) < RECEIVES_AHEAD[kind]
            else:
                assert after >= handed_in[makes[k]]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(pipelines(EVERY, placed=True) | laid_out())
def test_a_worker_runs_its_part_of_the_sequence_of_all(pipeline):
    schedule = make_schedule(pipeline, 4)
    whole = whole_sequence(pipeline, schedule)
    replicas, distribution = workers_and_distribution(pipeline)
    for rank in {replica.rank for replica in replicas}:
        shares = {r.stage: distribution.shares[r.number] for r in replicas if r.rank == rank}

        def own(sequence, shares=shares):
            return [(s, op) for s, op in sequence if s in shares and shares[s].has(op)]

        (device,) = (d for d, stages in enumerate(pipeline.stages_of) if set(stages) == set(shares))
        assert own(whole) == own(updates_last(pipeline, schedule.on_devices()[device]))
