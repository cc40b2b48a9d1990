"""The integer programs: what they find, what they prove, and how they stop."""

from __future__ import annotations

import _thread
import itertools
import math
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from helpers.drawn import lattices
from helpers.drawn.cases import examples
from helpers.drawn.problems import all_cuts, best_cut, brute_force, by_hand, drawn_problems
from hypothesis import given, settings
from timeprest.planner.partition.dp.lattice import find_downsets
from timeprest.planner.partition.ilp import mip
from timeprest.planner.partition.ilp import search as ilp_search
from timeprest.planner.partition.ilp.mip import Mip, MipAnswer, SolverSettings, Terms
from timeprest.planner.partition.ilp.search import solve_ilp
from timeprest.planner.partition.ilp.stages import StageModel
from timeprest.planner.partition.ilp.variables import least_load, make_slots, make_units
from timeprest.planner.partition.problem import (
    ChosenStage,
    Cut,
    CutTensor,
    Option,
    Place,
    StageProblem,
    cut_load,
)
from timeprest.planner.partition.warm_start import good_cut
from timeprest.tests.benchmarks.published.non_contiguous import (
    assignment_load,
    device_slots,
    parted,
    solve_noncontiguous,
)

INF = float("inf")


def problem(compute, needs, tensors=(), **changes):
    """Transfers are added to computing."""
    return by_hand(compute, needs, tensors, **{"overlap": False, **changes})


def chain(compute, sent, **changes):
    """A chain; `sent` are the transfer times between its layers."""
    tensors = [CutTensor(3 << j, s, s) for j, s in enumerate(sent)]
    return problem(compute, lattices.chain(len(compute)), tensors, **changes)


def cells(count, devices, seed=0, sent=0.02, overlap=True):
    """A network of cells of two branches, each on the two cells before it."""
    draw = random.Random(seed)
    needs, compute = [], []

    def layer(inputs):
        needs.append(sum(1 << i for i in set(inputs)))
        compute.append(draw.uniform(0.1, 3.0))
        return len(needs) - 1

    older = newer = layer([])
    for _ in range(count):
        branches = [layer([layer([older])]), layer([layer([newer])])]
        older, newer = newer, layer(branches)
    tensors = []
    for j in range(len(needs)):
        ends = 1 << j | sum(1 << u for u, mask in enumerate(needs) if mask >> j & 1)
        seconds = draw.uniform(0.2, 1.0) * sent * sum(compute) / devices
        tensors.append(CutTensor(ends, seconds, seconds))
    return problem(compute, needs, tensors, devices=devices, overlap=overlap)


def balanced(count, devices):
    """A start that cuts the layers' order into equal parts."""

    def cut(of):
        edges = [of.layers * s // count for s in range(count + 1)]
        masks = [(1 << b) - (1 << a) for a, b in itertools.pairwise(edges)]
        stages = tuple(ChosenStage(mask, 0, devices - s) for s, mask in enumerate(masks))
        return Cut(stages, cut_load(of, Cut(stages, 0.0)))

    return cut


def every_cut(of):
    """Load of each cut, by its stages' layers and options: the least over their places."""
    found = {}
    for cut in all_cuts(of):
        found[key(cut)] = min(cut.objective_s, found.get(key(cut), INF))
    return found


def key(cut):
    return tuple((stage.layers, stage.option) for stage in cut.stages)


def check(of, answer):
    """The answer is what trying everything finds."""
    best = brute_force(of)
    assert answer.optimal
    assert not answer.interrupted
    if best is None:
        assert answer.cut is None
        assert answer.bound_s == INF
        return
    assert answer.cut.objective_s == cut_load(of, answer.cut)
    assert answer.cut.objective_s == pytest.approx(best.objective_s, rel=1e-7, abs=1e-9)
    assert answer.bound_s == answer.cut.objective_s
    used = sum(of.options[stage.option].replicas for stage in answer.cut.stages)
    assert used <= answer.cut.stages[0].k <= of.devices


# The best cut --------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(50), deadline=None)
@given(drawn_problems(most=6))
def test_the_program_finds_what_trying_everything_finds(of):
    check(of, solve_ilp(of))


@pytest.mark.parametrize(
    ("remade", "once", "units", "load_s"),
    [(None, 0, 1, 7), (0, 0, 1, 9), (1, 0, 1, 7), (0, 1, 1, 7), (0, 1, 2, 9)],
)
def test_what_is_made_anew_is_kept_where_it_is_sent_to(remade, once, units, load_s):
    """Then it is too much behind the one cut or the other, but for what was counted once."""
    of = chain([5, 4, 3], [0, 0], place=lambda o, k: Place(memory_bytes=8, units=units))
    tensors = [
        replace(tensor, remade_bytes=each)
        for tensor, each in zip(of.tensors, [(10.0, 0.0), (0.0, 10.0)], strict=True)
    ]
    modes = [replace(mode, remade=remade, remade_once=once) for mode in of.modes]
    of = replace(of, tensors=tuple(tensors), modes=tuple(modes))
    check(of, solve_ilp(of))
    assert brute_force(of).objective_s == load_s
    assert best_cut(of, find_downsets(of, 4)).objective_s == load_s


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(drawn_problems(most=6))
def test_so_it_does_by_rising_limits(of):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ilp_search, "SMALL", 0)
        check(of, solve_ilp(of))


@settings(max_examples=examples(15), deadline=None)
@given(drawn_problems(most=5))
def test_so_it_does_in_the_last_way_that_highs_is_asked_in(of):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mip, "ATTEMPTS", mip.ATTEMPTS[-1:])
        check(of, solve_ilp(of))


@settings(max_examples=examples(15), deadline=None)
@given(drawn_problems(most=5))
def test_starting_from_the_answer_gives_the_answer(of):
    best = brute_force(of)
    if best is not None:
        check(of, solve_ilp(of, warm=best))


def test_a_chain_by_hand():
    """Cut in the middle: 5 + 1 and 1 + 7. A layer earlier it is 2 + 10, 10 + 10; later, 9 + 1."""
    of = chain([2, 3, 4, 3], [10, 1, 1])
    answer = solve_ilp(of)
    assert [stage.layers for stage in answer.cut.stages] == [0b0011, 0b1100]
    assert answer.cut.objective_s == 8
    # On one device there is nothing to send, but that is 12.
    assert solve_ilp(chain([2, 3, 4, 3], [10, 10, 10])).cut.objective_s == 12


def test_one_tensor_of_several_users_is_sent_once():
    """0 feeds 1, 2 and 3; each stage pays its tensor's 2 s once."""
    of = problem([4, 4, 4, 4], [0, 1, 1, 1], [CutTensor(0b1111, 2, 2)], devices=2)
    assert solve_ilp(of).cut.objective_s == 10


def test_layers_that_need_each_other_by_way_of_groups_are_one():
    of = problem([1, 2, 4, 8], [0, 0b1, 0b10, 0b100], together=(0b0101,))
    units = make_units(of)
    assert units.layers == (0b0111, 0b1000)
    assert units.needs == ((), (0,))
    assert solve_ilp(of).cut.objective_s == 8


def test_the_least_load_counts_speeds_and_replicas():
    """Devices of speed 2 and 1: 12 s of work take 4 s at least, a layer of 10 s at least 5."""

    def place(o, k):
        return Place(speed=2.0 if k == 2 else 1.0)

    of = chain([4, 4, 4], [0, 0], place=place)
    assert least_load(of, make_slots(of)) == 4
    assert least_load(replace(of, options=(Option(2),)), make_slots(of)) == 4
    of = chain([1, 10, 1], [0, 0], place=place)
    assert least_load(of, make_slots(of)) == 5


def test_good_starts_make_small_programs():
    of = cells(20, 4)
    best = good_cut(of)
    large, small = StageModel(of), StageModel(of, best.objective_s)
    assert len(small.values_of(best)) < len(large.values_of(best)) / 4


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "overlap"), [(0.05, True), (0.1, False)])
def test_larger_graphs_are_solved_from_any_start(sent, overlap):
    of = cells(12, 3, sent=sent, overlap=overlap)
    cold = solve_ilp(of)
    start = balanced(3, 3)(of)
    warm = solve_ilp(of, warm=start)
    assert cold.optimal
    assert warm.optimal
    assert warm.cut.objective_s < start.objective_s
    assert cold.cut.objective_s == pytest.approx(warm.cut.objective_s, rel=1e-6)


# Other cuts ----------------------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(drawn_problems(most=4, devices=3))
def test_forbidden_cuts_give_the_next_best(of):
    loads = every_cut(of)
    forbidden = []
    for expected in sorted(loads.values())[:3]:
        answer = solve_ilp(of, forbidden=forbidden)
        assert answer.cut.objective_s == pytest.approx(expected, rel=1e-7, abs=1e-9)
        assert key(answer.cut) not in map(key, forbidden)
        assert loads[key(answer.cut)] == pytest.approx(expected, rel=1e-7, abs=1e-9)
        forbidden.append(answer.cut)
    if len(loads) == len(forbidden):
        assert solve_ilp(of, forbidden=forbidden).cut is None


def test_a_forbidden_start_is_not_the_answer():
    of = chain([2, 3, 4, 3], [10, 1, 1])
    best = solve_ilp(of).cut
    second = solve_ilp(of, warm=best, forbidden=[best]).cut
    assert second.objective_s == 10
    assert key(second) != key(best)


def test_only_cuts_below_a_load_are_looked_for():
    of = chain([2, 3, 4, 3], [10, 1, 1])
    nothing = solve_ilp(of, below=8.0)
    assert (nothing.cut, nothing.bound_s, nothing.optimal) == (None, 8.0, True)
    assert solve_ilp(of, below=8.001).cut.objective_s == 8
    start = solve_ilp(of).cut
    assert solve_ilp(of, warm=start, below=8.0).cut is None


def test_nothing_fits():
    of = chain([2, 3], [1], place=lambda o, k: Place(memory_bytes=5))
    of = replace(of, parameter_bytes=np.array([1.0, 6.0]))
    answer = solve_ilp(of)
    assert (answer.cut, answer.bound_s, answer.optimal) == (None, INF, True)
    assert solve_ilp(chain([2, 3], [1], stages=3)).cut is None
    assert solve_ilp(chain([2, 3], [1], options=(Option(3),))).cut is None


def test_what_does_not_fit_after_all_is_left_out(monkeypatch):
    """As where bytes are above the limit by less than the solver's tolerance."""
    of = chain([2, 3, 4, 3], [10, 1, 1])
    best = solve_ilp(of).cut
    real = StageModel.answer_of

    def answer_of(self, values):
        cut = real(self, values)
        return Cut(cut.stages, INF) if key(cut) == key(best) else cut

    monkeypatch.setattr(StageModel, "answer_of", answer_of)
    assert solve_ilp(of).cut.objective_s == 10


# Bounds and ends -----------------------------------------------------------------------------


def test_a_spent_time_limit_gives_the_start_and_a_bound():
    of = cells(12, 3)
    start = balanced(3, 3)(of)
    best = solve_ilp(of).cut.objective_s
    answer = solve_ilp(of, warm=start, time_limit_s=0)
    assert answer.cut == start
    assert sum(of.modes[0].compute_s) / 3 <= answer.bound_s <= best < start.objective_s
    assert not answer.optimal
    assert not answer.interrupted
    assert solve_ilp(of, time_limit_s=0).cut is None


def test_a_time_limit_is_no_proof():
    of = cells(40, 4, sent=0.5, overlap=False)
    start = balanced(4, 4)(of)
    answer = solve_ilp(of, warm=start, time_limit_s=0.6)
    assert not answer.optimal
    assert answer.cut.objective_s <= start.objective_s
    assert answer.bound_s < answer.cut.objective_s
    assert answer.bound_s >= sum(of.modes[0].compute_s) / 4 * (1 - 1e-9)


def test_a_gap_is_enough():
    of = cells(20, 4)
    answer = solve_noncontiguous(of, gap=0.02)
    assert 0.98 * answer.objective_s <= answer.bound_s <= answer.objective_s


def test_progress_is_told_in_seconds():
    of = cells(20, 4, sent=0.3, overlap=False)
    told = []
    answer = solve_ilp(of, progress=lambda bound_s, load_s: told.append((bound_s, load_s)))
    assert told
    assert all(bound_s <= answer.cut.objective_s * (1 + 1e-6) for bound_s, _ in told)
    assert all(load_s >= answer.cut.objective_s * (1 - 1e-6) for _, load_s in told)


def endless():
    """Weights without transfers: nearly equal cuts by the thousand."""
    draw = random.Random(1)
    n = 60
    return problem([draw.uniform(1, 100) for _ in range(n)], [0] * n, devices=5)


def test_ctrl_c_keeps_the_best_cut():
    of = endless()
    # Other tests of this process may have left a handler of their own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer = threading.Timer(0.7, _thread.interrupt_main)
        timer.start()
        answer = solve_ilp(of)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert answer.interrupted
    assert answer.cut.objective_s == cut_load(of, answer.cut)
    assert answer.bound_s == pytest.approx(sum(of.modes[0].compute_s) / 5, rel=1e-5)


def test_an_error_of_the_listener_ends_the_solver():
    def listen(bound_s, load_s):
        raise ValueError("heard enough")

    with pytest.raises(ValueError, match="heard enough"):
        solve_ilp(endless(), progress=listen)
    assert solve_ilp(chain([2, 3], [1])).cut.objective_s == 4


# Solvers -------------------------------------------------------------------------------------


def test_highs_is_asked_otherwise_where_it_fails(monkeypatch):
    failed = MipAnswer(None, -INF, False, False, False, "solve error")
    solved, tried = Mip._solved, []

    def some(self, settings, *how):
        tried.append(how)
        return solved(self, settings, *how) if how == mip.ATTEMPTS[-1] else failed

    monkeypatch.setattr(Mip, "_solved", some)
    of = chain([2, 3, 4, 3], [10, 1, 1])
    assert solve_ilp(of).cut.objective_s == 8
    assert tried == list(mip.ATTEMPTS)


def test_who_is_asked_again_has_what_is_left_of_the_time(monkeypatch):
    failed = MipAnswer(None, -INF, False, False, False, "solve error")
    given = []

    def fail(self, settings, *how):
        given.append(settings.time_limit_s)
        time.sleep(0.02)
        return failed

    monkeypatch.setattr(Mip, "_solved", fail)
    made = Mip()
    made.minimise(made.binary())
    assert made.solve(SolverSettings(time_limit_s=60.0)) == failed
    assert 0 < given[-1] <= 59.96
    made.solve(SolverSettings(time_limit_s=0.03))
    assert given[-1] == 0


@pytest.mark.parametrize("infeasible", [True, False])
def test_a_proof_that_a_known_cut_disproves_is_not_believed(monkeypatch, infeasible):
    wrong = MipAnswer(None, INF if infeasible else 1e6, False, infeasible, False, "wrong")
    solved = Mip._solved
    monkeypatch.setattr(
        Mip, "_solved", lambda self, x, *how: solved(self, x, *how) if x.doubted else wrong
    )
    of = chain([2, 3, 4, 3], [10, 1, 1])
    start = balanced(2, 2)(chain([2, 3, 4, 3], [1, 5, 1]))
    start = replace(start, objective_s=cut_load(of, start))
    answer = solve_ilp(of, warm=start)
    assert (answer.cut.objective_s, answer.optimal) == (8, True)
    monkeypatch.setattr(Mip, "_solved", lambda self, settings, *how: wrong)
    answer = solve_ilp(of, warm=start)
    assert not answer.optimal
    assert answer.bound_s == 6


def test_a_program_without_whole_numbers_or_variables():
    made = Mip()
    variable = made.variable(2.5)
    made.minimise(variable)
    made.at_most(Terms(1.0).add(variable, -1.0))
    answer = made.solve(SolverSettings())
    assert (answer.values, answer.bound, answer.optimal) == ((2.5,), 2.5, True)
    made.at_most(Terms(1.0))
    assert made.solve(SolverSettings()).infeasible


def test_solvers_are_imported_on_use():
    code = (
        "import sys, timeprest.planner.partition.ilp.search\n"
        "import timeprest.tests.benchmarks.published.non_contiguous\n"
        "assert 'highspy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Not contiguous ------------------------------------------------------------------------------


def every_assignment(of, devices):
    """Smallest load of all assignments, by trying them."""
    best = INF
    for where in itertools.product(range(devices), repeat=of.layers):
        masks = tuple(
            sum(1 << j for j, d in enumerate(where) if d == device) for device in range(devices)
        )
        if all(mask & group in (0, group) for group in of.together for mask in masks):
            best = min(best, noncontiguous_load(of, masks))
    return best


def places_used(of, devices):
    """Whether all devices are used by the definition; alike, they are no more than layers."""
    single = [o for o, option in enumerate(of.options) if option.replicas == 1]
    kinds = {tuple(of.place(o, k) for o in single) for k in range(1, of.devices + 1)}
    return min(of.layers, of.stages or devices) if len(kinds) == 1 else devices


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None)
@given(drawn_problems(most=5, devices=3))
def test_assignments_are_the_best_of_all_and_no_worse_than_cuts(of):
    answer = solve_noncontiguous(of)
    best = every_assignment(of, places_used(of, of.devices))
    assert answer.optimal
    assert answer.objective_s == answer.bound_s
    assert answer.objective_s == pytest.approx(best, rel=1e-7, abs=1e-9)
    if answer.devices is not None:
        assert noncontiguous_load(of, answer.devices) == answer.objective_s
        assert sum(answer.devices) == of.full
    else:
        assert best == INF
    single = tuple(option for option in of.options if option.replicas == 1)
    number = [o for o, option in enumerate(of.options) if option.replicas == 1]
    alone = replace(of, options=single, place=lambda o, k: of.place(number[o], k))
    cut = brute_force(alone)
    if cut is not None:
        assert answer.objective_s <= cut.objective_s * (1 + 1e-9)
        warm = solve_noncontiguous(alone, warm=cut)
        assert warm.objective_s == pytest.approx(answer.objective_s, rel=1e-7, abs=1e-9)


@settings(max_examples=examples(60), deadline=None)
@given(drawn_problems(most=5, devices=3))
def test_stages_as_sets_have_the_load_of_stages(of):
    """Where stages are in the only mode that there is, on devices of their own."""
    of = replace(of, before_s=None, after_s=None, options=(Option(1),), modes=of.modes[:1])
    cut = brute_force(of)
    if cut is None or key(cut)[-1][0] >> (of.layers - 1) & 1 == 0:
        return
    devices = [0] * places_used(of, of.devices)
    for number, stage in enumerate(cut.stages):
        devices[number if len(devices) < of.devices else of.devices - stage.k] = stage.layers
    on_result = [t for t in of.tensors if t.ends >> of.layers & 1]
    load = noncontiguous_load(of, tuple(devices))
    assert load <= cut.objective_s * (1 + 1e-9)
    if not on_result:
        assert load == pytest.approx(cut.objective_s, rel=1e-9)


def test_two_stretches_on_one_device_by_hand():
    """3 and 3 s around 6 s: contiguous 9 s, else 6 s and two transfers of 0.5 s."""
    of = chain([3, 6, 3], [0.5, 0.5])
    assert solve_ilp(of).cut.objective_s == 9.5
    answer = solve_noncontiguous(of)
    assert set(answer.devices) == {0b101, 0b010}
    assert answer.objective_s == 7


def test_makers_pay_the_upper_side_and_users_the_lower():
    of = problem([5, 5, 5], [0, 1, 1], [CutTensor(0b111, 2, 1)], devices=2)
    assert noncontiguous_load(of, (0b001, 0b110)) == 12
    assert noncontiguous_load(of, (0b110, 0b001)) == 12
    assert noncontiguous_load(of, (0b011, 0b100)) == 11
    # Without a maker it is the smaller side, for both.
    of = problem([5, 5], [0, 0], [CutTensor(0b11, 2, 1)], devices=2)
    assert noncontiguous_load(of, (0b01, 0b10)) == 6


def test_an_assignment_needs_options_of_one_device():
    of = chain([3, 6, 3], [0.5, 0.5], options=(Option(2),))
    answer = solve_noncontiguous(of)
    assert (answer.devices, answer.bound_s, answer.optimal) == (None, INF, True)


def test_a_spent_time_limit_gives_the_start_as_sets():
    of = chain([3, 6, 3], [0.5, 0.5])
    cut = solve_ilp(of).cut
    answer = solve_noncontiguous(of, warm=cut, time_limit_s=0)
    assert answer.devices == tuple(stage.layers for stage in cut.stages)
    assert (answer.objective_s, answer.bound_s, answer.optimal) == (9.5, 6, False)
    assert math.isfinite(ilp_search.SHARE)


def noncontiguous_load(problem: StageProblem, devices: tuple[int, ...]) -> float:
    """Largest load in s of layers on devices, as in `NoncontiguousAnswer.devices`.

    Straight from the definition; infinite where one doesn't fit its device.
    """
    made = parted(problem)
    return assignment_load(made, device_slots(made), devices)
