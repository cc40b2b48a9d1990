"""Dynamic programming over downsets: against trying everything, and by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import accumulate, pairwise
from operator import or_

import numpy as np
import pytest
from helpers.drawn import lattices
from helpers.drawn.cases import examples
from helpers.drawn.problems import (
    INF,
    all_cuts,
    best_cut,
    brute_force,
    by_hand,
    drawn_problems,
    is_downset,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from timeprest.planner.partition.dp import cost_tables, minimax
from timeprest.planner.partition.dp import lattice as dp_lattice
from timeprest.planner.partition.dp.enumerate import chains_below
from timeprest.planner.partition.dp.lattice import Containment, find_downsets, joined, lattice_of
from timeprest.planner.partition.dp.minimax import minimax_with_bound
from timeprest.planner.partition.problem import CutTensor as Edge
from timeprest.planner.partition.problem import Option, OutOfTime, Place, cut_load, members
from timeprest.planner.partition.warm_start import (
    around,
    cheapest,
    good_cut,
    good_orders,
    groups_of,
    prefix_lattice,
)

MANY = 10**6

VARIANTS = {
    "as it is": (),
    "places asked for one by one": ((cost_tables, "WHOLE", 0),),
    "fewer downsets first": (
        (minimax, "THINNED_STEP", 0),
        (minimax, "SHARES", 2),
        (minimax, "EACH", 1),
    ),
    "many words": ((dp_lattice, "WORD_BITS", 4),),
}


def solve(problem, **arguments):
    return best_cut(problem, find_downsets(problem, MANY), **arguments)


def layers_of(cut):
    return [list(members(stage.layers)) for stage in cut.stages]


def same_places(problem):
    """Whether it makes no difference where a stage stands."""
    every = [
        [problem.place(o, k) for k in range(option.replicas, problem.devices + 1)]
        for o, option in enumerate(problem.options)
    ]
    if all(place.memory_bytes == float("inf") for row in every for place in row):
        every = [[replace(place, units=1, copies=1) for place in row] for row in every]
    return all(len(set(row)) < 2 for row in every)


# Downsets --------------------------------------------------------------------------------------


@given(drawn_problems(most=9))
def test_downsets_are_those_of_the_definition(problem):
    expected = [d for d in range(problem.full + 1) if is_downset(problem, d)]
    expected.sort(key=lambda d: (d.bit_count(), d))
    lattice = find_downsets(problem, len(expected))
    assert list(lattice.masks) == expected
    assert lattice.complete
    assert find_downsets(problem, len(expected) - 1) is None
    assert lattice_of(problem, expected[::-1]).masks == lattice.masks


def test_layers_are_joined_across_cycles():
    """Layers 0 and 3 share a stage, and 1 and 2 lie between them one after the other; 4 doesn't."""
    needs = [0, 0b1, 0b10, 0b100, 0b10]
    problem = by_hand([1] * 5, needs, together=(0b1001,))
    assert joined(problem) == [0b1111, 0b10000]
    # Two groups, each of which needs the other.
    problem = by_hand([1] * 4, [0, 0b1, 0, 0b100], together=(0b1001, 0b0110))
    assert joined(problem) == [0b1111]
    # Groups that share a layer.
    problem = by_hand([1] * 4, [0, 0, 0, 0], together=(0b0011, 0b0110))
    assert joined(problem) == [0b0111, 0b1000]


@pytest.mark.parametrize("lengths", [(3,), (4, 2), (30, 40, 33), (6, 6, 9, 6)])
def test_parallel_chains_have_a_product_of_downsets(lengths):
    graph = lattices.Graph()
    graph.split(lengths, graph.add())
    count = 2 + np.prod([length + 1 for length in lengths])
    lattice = find_downsets(lattices.problem(graph.needs, 2), MANY)
    assert lattice.size == count
    assert all(a < b for a, b in pairwise((m.bit_count(), m) for m in lattice.masks))


def test_listing_stops_at_the_deadline():
    problem = lattices.problem(lattices.gnmt_like(), 2)
    assert find_downsets(problem, MANY, time.monotonic() - 1) is None


@given(drawn_problems(), st.integers(1, 64))
def test_counts_along_chains_say_what_holds_what(problem, bits):
    lattice = find_downsets(problem, MANY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dp_lattice, "WORD_BITS", bits)
        inside = Containment(lattice)
    everything = np.arange(lattice.size)
    values = np.arange(1.0, len(inside.groups) + 1)
    for at, below in enumerate(lattice.masks):
        held = inside.holding(at, inside.counts | inside.guards[:, None])
        assert held.tolist() == [not below & ~above for above in lattice.masks]
        largest = inside.largest(values, at, everything[held])
        for above, found in zip(everything[held], largest, strict=True):
            within = lattice.masks[above] & ~below
            mine = [v for v, g in zip(values, inside.groups, strict=True) if g & within]
            assert found == max(mine, default=0)


# Against trying everything ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=examples(50), deadline=None)
@given(problem=drawn_problems())
def test_the_best_cut_is_the_best_of_all(name, problem):
    with pytest.MonkeyPatch.context() as patch:
        for module, attribute, value in VARIANTS[name]:
            patch.setattr(module, attribute, value)
        found, expected = solve(problem), brute_force(problem)
    if expected is None:
        assert found is None
        return
    assert found.objective_s == pytest.approx(expected.objective_s, rel=1e-9, abs=1e-12)
    assert cut_load(problem, found) == found.objective_s
    assert list(accumulate((s.layers for s in found.stages), or_))[-1] == problem.full
    ends = [stage.k - problem.options[stage.option].replicas for stage in found.stages]
    assert all(end >= after.k for end, after in zip(ends, found.stages[1:], strict=False))
    assert found.stages[0].k <= problem.devices
    assert ends[-1] >= 0


@settings(max_examples=examples(100), deadline=None)
@given(drawn_problems(most=5, devices=3))
def test_of_the_best_it_has_the_fewest_devices_then_stages(problem):
    found = solve(problem)
    if found is None:
        return

    def cost(cut):
        return sum(problem.options[s.option].replicas for s in cut.stages), len(cut.stages)

    limit = found.objective_s * (1 + 1e-11)
    assert cost(found) == min(cost(c) for c in all_cuts(problem) if c.objective_s <= limit)
    if same_places(problem):
        # On the first devices.
        used = [problem.options[stage.option].replicas for stage in found.stages]
        starts = [problem.devices - sum(used[:s]) for s in range(len(used))]
        assert [stage.k for stage in found.stages] == starts


@settings(max_examples=examples(50), deadline=None)
@given(drawn_problems())
def test_below_leaves_out_what_isnt_better(problem):
    found = solve(problem)
    if found is None:
        return
    assert solve(problem, below=found.objective_s) is None
    assert solve(problem, below=found.objective_s * (1 + 1e-6) + 1e-9) == found
    answer = minimax_with_bound(problem, find_downsets(problem, MANY), below=0.0)
    assert (answer.cut, answer.bound_s, answer.optimal) == (None, 0.0, True)


@pytest.mark.parametrize("name", ["as it is", "places asked for one by one"])
@settings(max_examples=examples(100), deadline=None)
@given(problem=drawn_problems(most=5, devices=3), factor=st.sampled_from([1.0, 1.2, 2.0, 1e9]))
def test_all_cuts_below_a_target_are_listed_once(name, problem, factor):
    cuts = list(all_cuts(problem))
    target = min((cut.objective_s for cut in cuts), default=1.0) * factor + 1e-3
    with pytest.MonkeyPatch.context() as patch:
        for module, attribute, value in VARIANTS[name]:
            patch.setattr(module, attribute, value)
        found = list(chains_below(problem, find_downsets(problem, MANY), lambda: target))
    if same_places(problem):

        def key(cut):
            return tuple((stage.layers, stage.option) for stage in cut.stages)

        starts = {problem.devices} if found else set()
        assert {cut.stages[0].k for cut in found} == starts
    else:

        def key(cut):
            return cut.stages

    expected = {key(cut): cut.objective_s for cut in cuts if cut.objective_s < target}
    assert len(found) == len(expected)
    assert {key(cut): pytest.approx(cut.objective_s, abs=1e-9) for cut in found} == expected


def test_listing_cuts_ends_in_time_though_places_take_long():
    asked = []

    def place(option, k):
        asked.append(k)
        return Place()

    problem = by_hand([1, 2, 3], [0, 1, 2], place=place)
    with pytest.raises(OutOfTime):
        list(chains_below(problem, find_downsets(problem, MANY), lambda: 9.0, deadline=0.0))
    assert not asked


@settings(max_examples=examples(50), deadline=None)
@given(drawn_problems(most=6, devices=3))
def test_a_target_may_fall_while_cuts_are_listed(problem):
    lattice = find_downsets(problem, MANY)
    found = []

    def target():
        return found[-1].objective_s if found else float("inf")

    for cut in chains_below(problem, lattice, target):
        assert cut.objective_s < target()
        found.append(cut)
    best = best_cut(problem, lattice)
    assert (best is None) == (not found)
    if found:
        # Once it is found, nothing is below it.
        assert found[-1].objective_s == pytest.approx(best.objective_s, rel=1e-9, abs=1e-12)


# By hand ---------------------------------------------------------------------------------------


def test_a_chain_of_equal_layers_is_cut_evenly():
    cut = solve(by_hand([1.0] * 12, lattices.chain(12), devices=4))
    assert layers_of(cut) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert cut.objective_s == 3.0
    assert [stage.k for stage in cut.stages] == [4, 3, 2, 1]


def test_devices_that_dont_help_are_left_out():
    """A layer of 10 can't be cut: 2 devices are as good as 5, and the cut after it as any."""
    cut = solve(by_hand([10.0, 1, 2, 3, 4], lattices.chain(5), devices=5))
    assert layers_of(cut) == [[0], [1, 2, 3, 4]]
    assert [stage.k for stage in cut.stages] == [5, 4]


def test_replicas_share_a_layer_that_cant_be_cut():
    options = (Option(1), Option(2))
    cut = solve(by_hand([10.0, 4, 1], lattices.chain(3), devices=3, options=options))
    assert layers_of(cut) == [[0], [1, 2]]
    assert [(options[s.option].replicas, s.k) for s in cut.stages] == [(2, 3), (1, 1)]
    assert cut.objective_s == 5.0


def test_branches_may_be_on_different_stages():
    """Two branches of 3 and 3 between layers of 0: one to each stage, however they are listed."""
    graph = lattices.Graph()
    graph.split((3, 3), graph.add())
    compute = [0.0, *[1.0] * 6, 0.0]
    cut = solve(by_hand(compute, graph.needs))
    assert cut.objective_s == 3.0


def test_a_wire_moves_the_cut():
    """Layers of 1: the even cut sends 5 s; one layer further on it is 1 s."""
    edges = [Edge(0b11 << j, upper_s=wire) for j, wire in enumerate((5.0, 5.0, 1.0))]
    problem = by_hand([1.0] * 4, lattices.chain(4), tensors=edges)
    assert layers_of(solve(problem)) == [[0, 1, 2], [3]]
    assert solve(problem).objective_s == 3.0
    # Where computing waits for it, one stage is as good as two.
    assert layers_of(solve(replace(problem, overlap=False))) == [[0, 1, 2, 3]]


def test_layers_together_and_pinned():
    problem = by_hand([1.0] * 6, lattices.chain(6), together=(0b001110,))
    assert solve(problem).objective_s == 4.0
    pinned = by_hand([1.0] * 6, lattices.chain(6), stages=2, pins=((4, 0),))
    assert layers_of(solve(pinned)) == [[0, 1, 2, 3, 4], [5]]
    pinned = replace(pinned, pins=((4, 0), (1, 1)))
    assert solve(pinned) is None


def test_a_stage_count_is_kept_to():
    problem = by_hand([1.0] * 6, lattices.chain(6), devices=3)
    for stages, objective in ((1, 6.0), (2, 3.0), (3, 2.0)):
        cut = solve(replace(problem, stages=stages))
        assert (len(cut.stages), cut.objective_s) == (stages, objective)
    assert solve(replace(problem, stages=4)) is None


def test_what_fits_no_device_has_no_cut():
    held = np.full(4, 10.0)
    problem = by_hand([1.0] * 4, lattices.chain(4), parameter_bytes=held)
    assert solve(replace(problem, place=lambda o, k: Place(memory_bytes=20.0))) is not None
    assert solve(replace(problem, place=lambda o, k: Place(memory_bytes=19.0))) is None
    assert solve(replace(problem, options=(Option(3),))) is None


def test_a_slow_device_gets_less():
    speeds = [1.0, 0.5, 2.0]
    problem = by_hand(
        [1.0] * 14, lattices.chain(14), devices=3, place=lambda o, k: Place(speed=speeds[3 - k])
    )
    assert [len(stage) for stage in layers_of(solve(problem))] == [4, 2, 8]


# Time ------------------------------------------------------------------------------------------


def test_time_runs_out():
    problem = lattices.problem(lattices.gnmt_like(8), 4, wire=1.0, overlap=False)
    lattice = find_downsets(problem, MANY)
    past = time.monotonic() - 1
    with pytest.raises(OutOfTime):
        best_cut(problem, lattice, deadline=past)
    answer = minimax_with_bound(problem, lattice, deadline=past)
    best = best_cut(problem, lattice)
    assert not answer.optimal
    assert sum(problem.modes[0].compute_s) / 4 <= answer.bound_s * (1 + 1e-6)
    assert answer.bound_s <= best.objective_s


def test_out_of_time_just_before_the_answer(monkeypatch):
    """The objective is known then, if not the fewest devices it takes."""
    problem = by_hand([10.0, 1, 2, 3, 4], lattices.chain(5), devices=5)

    def late(*_):
        raise OutOfTime

    monkeypatch.setattr(minimax, "fewest_chain", late)
    answer = minimax_with_bound(problem, find_downsets(problem, MANY))
    assert (answer.cut.objective_s, answer.bound_s, answer.optimal) == (10.0, 10.0, False)
    assert cut_load(problem, answer.cut) == 10.0


def test_where_time_is_short_the_bound_rises_on_the_way(monkeypatch):
    problem = lattices.problem(lattices.gnmt_like(8), 4, wire=16.0, overlap=False)
    lattice = find_downsets(problem, MANY)
    best = best_cut(problem, lattice)
    monkeypatch.setattr(minimax, "SHARES", 20)
    monkeypatch.setattr(minimax, "EACH", 2)
    # Stages aren't grown.
    monkeypatch.setattr(minimax, "DEAR", INF)
    last, tried = [], []

    class Late(minimax.Sweep):
        """There is no time for the target of the cut that is known."""

        def __init__(self, program, target, deadline):
            super().__init__(program, target, deadline)
            if program.lattice.complete:
                tried.append(target)
                if last and target >= last[-1]:
                    raise OutOfTime

    monkeypatch.setattr(minimax, "Sweep", Late)
    bounds = []
    for limit_s in (0.0, float("inf")):

        def foreseen_s(search, target, limit_s=limit_s):
            return limit_s if target == search._limit else 0.0

        monkeypatch.setattr(minimax._Search, "_foreseen_s", foreseen_s)
        last.clear(), tried.clear()
        whole = minimax_with_bound(problem, lattice, deadline=time.monotonic() + 600)
        assert whole.cut == best
        last.append(tried[-1])
        answer = minimax_with_bound(problem, lattice, deadline=time.monotonic() + 600)
        assert not answer.optimal
        assert answer.bound_s <= best.objective_s <= answer.cut.objective_s
        bounds.append(answer.bound_s)
    assert bounds[1] > bounds[0]
    assert bounds[1] > tried[-1] / minimax.RISE / minimax.LEAST_RISE * (1 - 1e-9)


def test_the_time_of_a_target_is_foreseen_from_the_last_two():
    problem = by_hand([1.0, 1.0], lattices.chain(2))
    program = minimax.Program(problem, find_downsets(problem, MANY))
    search = minimax._Search(program, 8.0, None)
    assert search._foreseen_s(8.0) == 0
    search._took += [(1.0, 0.1), (2.0, 0.4)]
    assert search._foreseen_s(8.0) == pytest.approx(6.4)


# Sizes -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "overlap"), [((1,), True), ((1,), False), ((1, 2, 3), False)])
def test_a_large_lattice_has_the_same_answer_without_shortcuts(overlap, replicas, monkeypatch):
    problem = lattices.problem(
        lattices.gnmt_like(17), 4, wire=2.0, overlap=overlap, replicas=replicas, sync=0.1
    )
    lattice = find_downsets(problem, MANY)
    quick = best_cut(problem, lattice)
    monkeypatch.setattr(minimax, "SHARES", MANY)
    monkeypatch.setattr(minimax, "STEPS", (0.5,))
    whole = best_cut(problem, lattice)
    assert whole.objective_s == pytest.approx(quick.objective_s, rel=1e-9)
    # Which of the best with as many devices is no promise.
    assert (len(whole.stages), whole.stages[0].k) == (len(quick.stages), quick.stages[0].k)


def test_a_long_chain_with_many_replicas():
    """As cutting it by hand: every option of the last stage against the rest's best."""
    problem = lattices.problem(lattices.chain(60), 12, replicas=range(1, 13), sync=0.2)
    compute, held = problem.modes[0].compute_s, problem.parameter_bytes
    best = np.full((61, 13), np.inf)
    best[0] = 0.0
    for b in range(1, 61):
        for a in range(b):
            for r in range(1, 13):
                load = sum(compute[a:b]) / r + 2 * (r - 1) / r * sum(held[a:b])
                wire = 0.0
                for j, ends in ((a - 1, "lower_s"), (b - 1, "upper_s")):
                    if 0 <= j < 59:
                        wire += getattr(problem.tensors[j], ends) / r
                used = np.maximum(best[a, : 13 - r], max(load, wire))
                best[b, r:] = np.minimum(best[b, r:], used)
    assert solve(problem).objective_s == pytest.approx(best[60].min(), rel=1e-12)


# Too many downsets -----------------------------------------------------------------------------


@settings(max_examples=examples(50), deadline=None)
@given(drawn_problems(most=9))
def test_orders_are_topological(problem):
    groups = joined(problem)
    orders = list(good_orders(problem))
    assert len(orders) == 5
    for order in orders:
        assert sorted(order) == sorted(groups)
        assert all(is_downset(problem, mask) for mask in accumulate(order, or_))


@settings(max_examples=examples(50), deadline=None)
@given(drawn_problems())
def test_a_good_cut_is_a_cut(problem):
    found, best = good_cut(problem), solve(problem)
    if found is not None:
        assert cut_load(problem, found) == found.objective_s >= best.objective_s * (1 - 1e-9)
        groups = groups_of(problem)
        near = around(groups, found, 20) | cheapest(groups, 20)
        assert all(is_downset(problem, mask) for mask in near)


def test_an_order_that_keeps_little_open():
    """Four branches that start wide and get narrow: none is left for another at its wide end."""
    graph = lattices.Graph()
    graph.split((3, 3, 3, 3), graph.add())
    wide = {1, 4, 7, 10}
    users = [next(u for u in range(14) if graph.needs[u] >> j & 1) for j in range(1, 13)]
    edges = [
        Edge(1 << j | 1 << user, 10.0 if j in wide else 1.0)
        for j, user in zip(range(1, 13), users, strict=True)
    ]
    problem = by_hand([1.0] * 14, graph.needs, tensors=edges)
    orders = list(good_orders(problem))
    for order in orders[1:]:
        for mask in accumulate(order, or_):
            assert sum(bool(mask >> j & 1 and not mask >> (j + 1) & 1) for j in wide) <= 1


@pytest.mark.parametrize("devices", [4, 8])
def test_nasnet_is_cut_evenly(devices):
    problem = lattices.problem(lattices.nasnet_like(), devices)
    assert find_downsets(problem, 100_000) is None
    cut = good_cut(problem)
    assert cut.objective_s <= 1.01 * sum(problem.modes[0].compute_s) / devices
    assert cut_load(problem, cut) == cut.objective_s
    along = best_cut(problem, prefix_lattice(problem))
    assert cut.objective_s < along.objective_s
