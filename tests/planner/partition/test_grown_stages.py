"""Targets where stages are grown layer by layer: against trying everything, and against sweeps."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.drawn import lattices
from helpers.drawn.cases import examples
from helpers.drawn.problems import INF, all_cuts, best_cut, brute_force, drawn_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.planner.partition.dp import grown_stages as grown
from timeprest.planner.partition.dp import minimax
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.dp.program import Program
from timeprest.planner.partition.problem import Option, Place, cut_load, stage_load

MANY = 10**6


@st.composite
def added_loads(draw, limited=False):
    """Drawn problems whose loads are sums: a device for each stage, and no transfer hidden."""
    problem = draw(drawn_problems())
    speed, lower, upper = draw(st.sampled_from([(1.0, 1.0, 1.0), (2.0, 1.5, 0.5)]))
    memory = draw(st.sampled_from([INF, 300.0, 150.0, 60.0])) if limited else INF
    return replace(
        problem,
        options=(Option(1, draw(st.integers(0, len(problem.modes) - 1))),),
        place=lambda o, k: Place(speed, memory, 0.0, 0.0, lower, upper, units=k),
        overlap=False,
        stages=None,
        pins=(),
        serial_fixed_s=0.0,
    )


def grown_of(problem):
    return grown.grown_stages(Program(problem, find_downsets(problem, MANY)))


@settings(max_examples=examples(300), deadline=None)
@given(problem=added_loads())
def test_states_say_what_stages_cost(problem):
    stages, masks = grown_of(problem), find_downsets(problem, MANY).masks
    if stages is None:
        return
    first = stages._first
    for at, below in enumerate(masks):
        # All that a stage from here may grow to, whichever way.
        grow, seen = [int(first[at + 1]) - 1], {}
        while grow:
            state = grow.pop()
            above = int(np.searchsorted(first, state, "right")) - 1
            if above in seen:
                assert seen[above] == state
                continue
            seen[above] = state
            grow += [to for to in stages._next[:, state].tolist() if to < first[-1]]
            if above != at:
                load = stage_load(problem, below, masks[above] & ~below, 0, 1)
                assert stages._alone[state] - stages._lower[at] == pytest.approx(load, abs=1e-9)
        assert sorted(seen) == [k for k, above in enumerate(masks) if not below & ~above]


@settings(max_examples=examples(100), deadline=None)
@given(problem=added_loads(), factor=st.sampled_from([0.5, 1 - 1e-6, 1.0, 1.1, 1.7]))
def test_a_target_is_met_where_any_cut_meets_it(problem, factor):
    stages, best = grown_of(problem), brute_force(problem)
    if stages is None:
        assert not any(t.lower_s or t.upper_s for t in problem.tensors)
        return
    target = best.objective_s * factor
    cut = stages.under(target)
    if factor < 1:
        # Nothing lies below no load at all.
        assert cut is None or not best.objective_s
        return
    assert cut.objective_s == cut_load(problem, cut) <= target + 1e-9
    within = [c for c in all_cuts(problem, lambda: target + 1e-9) if c.objective_s <= target]
    assert len(cut.stages) == min(len(c.stages) for c in within)
    assert cut.stages[0].k == problem.devices


@settings(max_examples=examples(100), deadline=None)
@given(problem=added_loads(limited=True))
def test_the_best_cut_is_the_best_of_all(problem):
    lattice, best = find_downsets(problem, MANY), brute_force(problem)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("THINNED_STEP", 0), ("SHARES", 1), ("EACH", 1), ("DEAR", 0)):
            patch.setattr(minimax, name, value)
        cut = best_cut(problem, lattice)
    assert (cut is None) == (best is None)
    if cut is not None:
        assert cut.objective_s == cut_load(problem, cut) == pytest.approx(best.objective_s)


@pytest.mark.parametrize("memory", [None, 1.3])
def test_a_large_lattice_has_the_cut_that_sweeps_find(memory, monkeypatch):
    needs = lattices.inception_like(modules=3)
    problem = lattices.problem(needs, 4, wire=16.0, overlap=False, memory=memory)
    lattice, asked = find_downsets(problem, MANY), []

    def counted(stages, target, deadline, under=grown.GrownStages.under):
        asked.append(target)
        return under(stages, target, deadline)

    monkeypatch.setattr(grown.GrownStages, "under", counted)
    quick = best_cut(problem, lattice)
    assert asked
    monkeypatch.setattr(minimax, "DEAR", INF)
    sweeps = best_cut(problem, lattice)
    assert len(quick.stages) == len(sweeps.stages)
    assert quick.objective_s == pytest.approx(sweeps.objective_s, rel=1e-9)


def test_where_time_runs_out_a_bound_is_left(monkeypatch):
    problem = lattices.problem(lattices.inception_like(modules=3), 4, wire=16.0, overlap=False)
    lattice = find_downsets(problem, MANY)
    best = best_cut(problem, lattice).objective_s
    under = grown.GrownStages.under

    def late(stages, target, deadline):
        return under(stages, target, deadline if target > best else 0.0)

    monkeypatch.setattr(grown.GrownStages, "under", late)
    answer = minimax.minimax_with_bound(problem, lattice, deadline=time.monotonic() + 600)
    assert not answer.optimal
    assert answer.bound_s < best <= answer.cut.objective_s


def test_what_is_no_sum_is_left_to_sweeps(monkeypatch):
    problem = lattices.problem(lattices.gnmt_like(3), 3, overlap=False)
    assert grown_of(problem) is not None
    for change in (
        {"overlap": True},
        {"stages": 2},
        {"options": (Option(1), Option(2)), "place": lambda o, k: Place()},
        {"serial_fixed_s": 1.0},
        {"tensors": ()},
        {"place": lambda o, k: Place(speed=float(k))},
        {"place": lambda o, k: Place(sync_s=1.0)},
    ):
        assert grown_of(replace(problem, **change)) is None, change
    for name, value in (("MOST_STEPS", 1000), ("MOST_SLOTS", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(grown, name, value)
            assert grown_of(problem) is None
