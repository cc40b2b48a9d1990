"""Blocks of layers: a cut between them costs what it does in the problem that they were made of."""

from __future__ import annotations

from helpers.drawn.cases import examples
from helpers.drawn.problems import best_cut, drawn_problems, is_downset
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.planner.partition.dp.blocks import blocks
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.problem import cut_load


@settings(max_examples=examples(80))
@given(drawn_problems(most=7, devices=3), st.integers(1, 6))
def test_a_cut_between_blocks_is_a_cut_of_the_layers(problem, most):
    lattice = find_downsets(problem, 10_000)
    found = blocks(problem, lattice, most)
    assert sum(found.masks) == problem.full
    assert len(found.masks) <= most
    below = 0
    for mask in found.masks:
        below |= mask
        assert is_downset(problem, below)
    coarse, places = found.coarse(problem)
    cut = best_cut(coarse, places)
    best = best_cut(problem, lattice)
    if cut is None:
        return
    fine = found.fine(cut)
    load = cut_load(problem, fine)
    assert abs(load - cut.objective_s) <= 1e-9 * max(load, 1e-12)
    assert best is not None
    assert best.objective_s <= load * (1 + 1e-9)
