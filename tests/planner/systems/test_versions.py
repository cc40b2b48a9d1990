"""Versions, differences and distances that the planner counts: the oracle's, and closed forms.

The oracle runs drawn orders without any layers; what it uses and holds is counted all the same.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import numpy as np
import pytest
from helpers.by_hand.unit_pipelines import steady_period_s, unit_pipeline
from helpers.by_hand.versions import version_use
from helpers.drawn.cases import examples
from helpers.drawn.pipelines import pipelines
from helpers.oracle import SGD, SYSTEMS, Oracle, distances, parse
from helpers.output.schedules import schedule_text
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.planner.schedules.check import check_schedule
from timeprest.planner.schedules.prediction import prediction_distances
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.planner.schedules.steady_state import sequence_distance, steady_state
from timeprest.planner.simulator.timeline import simulate
from timeprest.planner.systems.operations import Op, Schedule
from timeprest.planner.systems.variants import VARIANTS
from timeprest.planner.systems.versions import VersionWalk, entry_versions

PREDICTING = tuple(name for name, variant in VARIANTS.items() if variant.prediction)

updates = st.sampled_from([1, 1, 2, 3, 7])


def chain(pipeline, update_every):
    """Gradients come back over every link: the oracle knows no others."""
    links = tuple(replace(link, has_gradient=True) for link in pipeline.links)
    return replace(pipeline, links=links, update_every=update_every)


def ask_oracle(system, n, order, mini_batches):
    sample = np.zeros((1, 1))
    oracle = Oracle(system, [[] for _ in order], {}, SGD, [[(sample, sample)] * n] * mini_batches)
    return oracle.run(schedule_text(order))


@given(pipelines(most_stages=16, most_micro_batches=64), st.integers(1, 5), updates)
def test_every_order_obeys_its_rules(pipeline, mini_batches, every):
    pipeline = replace(pipeline, update_every=every)
    check_schedule(pipeline, make_schedule(pipeline, mini_batches), mini_batches)


@pytest.mark.choice(9)
@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@settings(max_examples=examples(60))
@given(data=st.data())
def test_what_is_used_and_held_is_the_oracles(system, data):
    placed = VARIANTS[system].placement != "any"
    drawn = data.draw(pipelines((system,), most_stages=5, most_micro_batches=6, placed=placed))
    pipeline = chain(drawn, data.draw(updates))
    mini_batches = data.draw(st.integers(1, 9))
    # A line for each stage, whichever device it is on.
    order = Schedule(make_schedule(pipeline, mini_batches).stages)
    oracle = ask_oracle(system, pipeline.micro_batches, order, mini_batches)
    entries = entry_versions(pipeline.variant, pipeline.micro_batches, order[0])
    again = [False] if pipeline.variant.recompute_refusal else [False, True]
    for s, ops in enumerate(order):
        for recompute in again:
            use = version_use(
                pipeline.variant, pipeline.micro_batches, ops, entries, recompute=recompute
            )
            assert list(use.versions) == [version for _, version in oracle.log[s]]
            assert use.most_held == oracle.most_held(s, recompute=recompute)
            assert list(use.differences) == oracle.differences[s]


@pytest.mark.parametrize("system", PREDICTING)
@given(data=st.data())
def test_distances_are_the_oracles(system, data):
    drawn = data.draw(pipelines((system,), most_stages=16))
    pipeline = chain(drawn, data.draw(updates))
    order = make_schedule(pipeline, data.draw(st.integers(1, 40)))
    found = prediction_distances(pipeline.variant, order)
    forward, backward = distances(parse(schedule_text(order)), SYSTEMS[system].aim)
    for s in range(pipeline.stages):
        assert dict(enumerate(found[s].forward)) == forward[s]
        assert dict(enumerate(found[s].backward)) == backward[s]


def test_a_version_is_needed_until_the_last_micro_batch_that_used_it():
    """Mixing in its memory would change what the next micro-batch's backward mixes."""
    variant = replace(VARIANTS["pipemare"], backward_weights="intermediate")
    walk = VersionWalk(variant, 2)
    for i in range(2):
        walk.forward(Op("F", 0, i))
    walk.update()
    found = []
    for op in (Op("B", 0, 0), Op("B", 0, 1)):
        walk.backward(op)
        found.append((walk.last_use(op, 0), walk.mixes_aside(op)))
        walk.finish(op)
    assert found == [(False, True), (True, False)]


# Closed forms ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("stages", range(1, 9))
def test_sequences_of_updates_with_unit_times(stages, n):
    """v = ⌈S / (N + 1)⌉: one sequence exactly where N ≥ S − 1 (TiMePReSt's journal version)."""
    v = sequence_distance(steady_state(unit_pipeline("timeprest", stages, n)))
    assert v == ceil(stages / (n + 1))
    assert (v == 1) == (n >= stages - 1)


@pytest.mark.parametrize("system", ["gpipe", "pipedream-flush", "zb-h1"])
def test_pipelines_that_flush_have_one_sequence(system):
    for stages in (1, 2, 5):
        assert sequence_distance(steady_state(unit_pipeline(system, stages, 4))) == 1


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_fewer_updates_make_smaller_differences(stages, every):
    """D = S − 1 − s mini-batches overtake at most; ⌈D / k⌉ updates of each k-th land among them.

    With k ≥ S − 1 no difference is larger than 1, without any stash (2606.07881).
    """
    pipeline = replace(unit_pipeline("v-timeprest", stages, 1), update_every=every)
    for s, ops in enumerate(make_schedule(pipeline, 6 * stages * every)):
        differences = version_use(pipeline.variant, 1, ops).differences
        assert max(differences) == ceil((stages - 1 - s) / every)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["timeprest", "v-timeprest"])
@pytest.mark.parametrize("n", [2, 4, 16])
@pytest.mark.parametrize("stages", [2, 3, 5, 8, 16])
def test_nf1b_differences_are_never_under_the_bound_where_no_stage_idles(system, stages, n):
    """⌈2D / (N + 1)⌉ with unit times and a period of N + 1; with limits of S − s at most D.

    Of stage 0 at all stages where passes use one version everywhere.
    """
    pipeline = unit_pipeline(system, stages, n)
    count = 6 * stages
    order = make_schedule(pipeline, count)
    assert steady_period_s(simulate(pipeline, order)) == pytest.approx(n + 1)
    entries = entry_versions(pipeline.variant, n, order[0])
    for s, ops in enumerate(order):
        behind = stages - 1 - (0 if pipeline.variant.synchronises else s)
        seen = version_use(pipeline.variant, n, ops, entries).differences
        assert max(seen) <= behind
        steady = seen[2 * stages : count - 2 * stages]
        assert min(steady) >= ceil(2 * behind / (n + 1))


@pytest.mark.parametrize("more", [0, 1, 3])
@pytest.mark.parametrize("stages", [2, 3, 8, 16])
def test_2bw_and_vertical_sync_use_one_version_at_all_stages(stages, more):
    """2BW: mini-batch b on version b − 1; vertical sync: on b − S + 1. No differences."""
    for system, n, late in (
        ("pipedream-2bw", stages + more, 1),
        ("pipedream-vertical-sync", 1, stages - 1),
    ):
        order = make_schedule(unit_pipeline(system, stages, n), 3 * stages)
        entries = entry_versions(VARIANTS[system], n, order[0])
        for ops in order:
            use = version_use(VARIANTS[system], n, ops, entries)
            passes = zip(ops, use.versions, strict=True)
            used = {(op.mini_batch, version) for op, version in passes if op.kind != "U"}
            assert used == {(b, max(0, b - late)) for b in range(3 * stages)}
            assert set(use.differences) == {0}
            assert use.most_held <= late + 1
