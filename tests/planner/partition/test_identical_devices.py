"""Devices all alike: the fewest for a target find the same optimum as trying everything."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.drawn import lattices
from helpers.drawn.cases import examples
from helpers.drawn.problems import best_cut, brute_force, drawn_problems, is_downset
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from timeprest.planner.partition.dp import identical_devices as rising
from timeprest.planner.partition.dp.identical_devices import IdenticalPlaces
from timeprest.planner.partition.dp.identical_devices_by_target import (
    identical_by_targets,
    targets_of,
)
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.problem import Mode, Option, Place, cut_load
from timeprest.planner.partition.waits import Waits


def alike(
    problem,
    *,
    limit=float("inf"),
    sync=0.0,
    copies=1.0,
    copies_per_unit=0.0,
    most=float("inf"),
):
    """The problem with equal devices, ⌈k / r⌉ units in flight, and any number of stages."""

    def place(r):
        return Place(
            memory_bytes=limit,
            sync_s=sync * (r - 1),
            sync_s_per_byte=sync * (r - 1) / r,
            lower_scale=1 / r,
            upper_scale=0.5 / r,
            copies=copies,
        )

    places = IdenticalPlaces(
        problem.options, place, copies_per_unit=copies_per_unit, most=lambda r: max(most - r + 1, 1)
    )
    return replace(problem, place=places, stages=None, pins=())


def solved(problem):
    return rising.identical_minimax(problem, find_downsets(problem, 10_000))


def devices_of(problem, cut):
    return sum(problem.options[stage.option].replicas for stage in cut.stages)


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(
    drawn=drawn_problems(most=5, devices=4),
    limit=st.sampled_from([float("inf"), 500.0, 250.0, 120.0]),
    sync=st.sampled_from([0.0, 0.1, 1.0]),
    copies=st.sampled_from([0.0, 1.0, 2.0]),
    copies_per_unit=st.sampled_from([0.0, 1.0]),
    most=st.sampled_from([float("inf"), 1.0, 2.0]),
)
def test_as_good_as_trying_everything(drawn, limit, sync, copies, copies_per_unit, most):
    problem = alike(
        drawn, limit=limit, sync=sync, copies=copies, copies_per_unit=copies_per_unit, most=most
    )
    by_targets = identical_by_targets(problem, find_downsets(problem, 10_000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rising, "FEW", 0)
        answer = solved(problem)
    best = brute_force(problem)
    assert answer.optimal
    assert by_targets.optimal
    if best is None:
        assert answer.cut is None
        assert by_targets.cut is None
        assert answer.bound_s == by_targets.bound_s == float("inf")
        return
    assert cut_load(problem, by_targets.cut) == by_targets.cut.objective_s
    assert by_targets.cut.objective_s == pytest.approx(best.objective_s, rel=1e-8)
    assert answer.cut.objective_s == pytest.approx(best.objective_s, rel=1e-9)
    assert answer.bound_s == pytest.approx(best.objective_s, rel=1e-9)
    assert cut_load(problem, answer.cut) == pytest.approx(best.objective_s, rel=1e-9)
    below = 0
    for stage in answer.cut.stages:
        below |= stage.layers
        assert is_downset(problem, below)
    assert below == problem.full
    # One device less wouldn't do.
    used = devices_of(problem, answer.cut)
    assert answer.cut.stages[0].k == used
    assume(used > 1)
    fewer = brute_force(replace(problem, devices=used - 1))
    assert fewer is None or fewer.objective_s > best.objective_s * (1 + 1e-9)


def many(devices, *, memory=None):
    """Two branches, recomputation layer by layer, and any number of replicas."""
    problem = lattices.problem(lattices.inception_like(2, (3, 4)), 8, wire=0.02)
    plain = problem.modes[0]
    n = problem.layers
    modes = [plain]
    for count in range(1, n + 1):
        again = np.arange(n) < count
        compute = np.where(again, 1.3, 1.0) * plain.compute_s
        flight = np.where(again, 0.1, 1.0) * plain.flight_bytes
        modes.append(Mode("recompute", compute, plain.fixed_bytes, flight))
    options = tuple(Option(r, m) for r in range(1, devices + 1) for m in range(len(modes)))
    drawn = replace(problem, modes=tuple(modes), options=options, devices=devices)
    return alike(drawn, limit=float("inf") if memory is None else memory * plain.flight_bytes.sum())


def test_it_agrees_with_the_other_program():
    for memory in (None, 2.0, 0.8, 0.4):
        problem = many(12, memory=memory)
        answer = solved(problem)
        other = best_cut(problem, find_downsets(problem, 10_000))
        assert answer.cut.objective_s == pytest.approx(other.objective_s, rel=1e-9)
        assert devices_of(problem, answer.cut) == devices_of(problem, other)


@given(
    drawn=drawn_problems(most=6, devices=8),
    limit=st.sampled_from([float("inf"), 500.0, 250.0, 120.0]),
    copies=st.sampled_from([0.0, 1.0, 2.0]),
    copies_per_unit=st.sampled_from([0.0, 1.0]),
    most=st.sampled_from([float("inf"), 1.0, 3.0]),
    flushes=st.sampled_from([None, True, False]),
)
def test_what_is_soon_excluded_no_cut_keeps_to(
    drawn, limit, copies, copies_per_unit, most, flushes
):
    """Looking at each stage finds none either, from what is far below any cut to far above it."""
    n = 840
    problem = alike(drawn, limit=limit, copies=copies, copies_per_unit=copies_per_unit, most=most)
    if flushes is not None:
        each_s = problem.modes[0].compute_s / n
        waits = Waits(n, flushes, 1.0, each_s * problem.parameter_bytes.astype(bool), each_s)
        problem = replace(problem, place=problem.place.with_waits(waits))
    found = targets_of(problem, find_downsets(problem, 10_000))
    assume(found.least_s > 0)
    for factor in (0.5, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0, 4.0):
        target = found.least_s * factor
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(found), "excludes", lambda *_: False)
            cut = found.under(target, None)
        if cut is not None:
            assert not found.excludes(target)


def test_most_of_what_no_cut_keeps_to_is_soon_excluded():
    """Also where it is memory that rules it out: stages that hold the weights are too slow."""
    for memory, share in ((None, 0.97), (2.0, 0.9), (0.8, 0.8), (0.4, 0.7)):
        problem = many(12, memory=memory)
        found = targets_of(problem, find_downsets(problem, 10_000))
        best = solved(problem).cut.objective_s
        assert found.excludes(best * share)
        assert not found.excludes(best)
    full = many(40, memory=1e-3)
    assert targets_of(full, find_downsets(full, 10_000)).excludes(1e9)


def test_where_nothing_fits():
    answer = solved(many(40, memory=1e-3))
    assert (answer.cut, answer.bound_s, answer.optimal) == (None, float("inf"), True)


def test_what_is_known_when_time_is_up():
    problem = many(40)
    lattice = find_downsets(problem, 10_000)
    best = rising.identical_minimax(problem, lattice)
    late = rising.identical_minimax(problem, lattice, deadline=time.monotonic() - 1)
    assert not late.optimal
    assert late.cut is None
    assert 0 < late.bound_s <= best.cut.objective_s


def test_problems_of_other_kinds_are_left_alone():
    problem = many(40)
    lattice = find_downsets(problem, 10_000)
    assert rising.identical_minimax(problem, lattice).optimal
    assert rising.identical_minimax(replace(problem, stages=3), lattice) is None
    assert rising.identical_minimax(replace(problem, place=lambda o, k: Place()), lattice) is None
    assert rising.identical_minimax(replace(problem, devices=2), lattice) is None
    large = replace(problem, options=problem.options * 2000)
    assert rising.identical_minimax(large, lattice) is None


def test_what_holds_nothing_per_unit_is_weighed_all_the_same():
    """Parameters alone are over the limit of a single stage."""
    problem = alike(many(40), limit=float("inf"))
    modes = tuple(
        replace(mode, fixed_bytes=np.zeros(problem.layers), flight_bytes=np.zeros(problem.layers))
        for mode in problem.modes
    )
    light = replace(problem, modes=modes, tensors=(), shared=(), workspace_bytes=None)
    held = np.ones(problem.layers)
    limit = float(held.sum()) / 2
    tight = alike(replace(light, parameter_bytes=held), limit=limit)
    found = solved(tight)
    assert found.cut is not None
    assert cut_load(tight, found.cut) < float("inf")


def test_what_many_hold_at_the_most_bounds_what_fits():
    """A stage that never has more than one unit in flight fits wherever it does with one."""
    problem = alike(many(40), most=1.0)
    assert problem.place(0, 40).units == problem.place(0, 1).units
