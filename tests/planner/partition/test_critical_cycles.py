"""Critical cycles of cuts: no plan is below the bound, and no cut that is better is left out."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from math import prod

import msgspec
import numpy as np
import pytest
from helpers.by_hand.profiles import chain, profile_by_hand, row_of_layers, without_gradients
from helpers.drawn.cases import examples
from helpers.drawn.lone_devices import INF, all_alone, borders, kinds, parts, replicated, some_alone
from helpers.drawn.questions import Drawn
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from timeprest.planner.cluster.cluster import Cluster, Device, uniform_cluster
from timeprest.planner.cluster.links import Network
from timeprest.planner.partition.dp.critical_cycles import CriticalCycles
from timeprest.planner.partition.problem import SAME
from timeprest.planner.question import Question
from timeprest.planner.search.choices import Freedom
from timeprest.planner.systems.variants import VARIANTS

MOST_PLANS = examples(600)
"""Of a question."""

MOST_TARGETS = 3
MOST_TABLES = 200
"""Of a bound, to the last digits."""

ROUNDING = 1e-9

MINI_BATCHES = tuple(
    name for name, variant in VARIANTS.items() if variant.schedule == "1f1b" and name != "given"
)
"""Systems of 1F1B over mini-batches."""

REPLICATED = (
    ("pipedream-flush", "gpipe", "zb-h1"),
    ("pipedream-2bw",),
    ("pipemare",),
    ("timeprest", "timeprest-stashed", "v-timeprest", "i-timeprest"),
    MINI_BATCHES,
)
"""Systems whose replicas take turns, or share each mini-batch."""

ONE_BY_ONE = (*MINI_BATCHES, "pipedream-2bw", "pipemare")

seeds = st.integers(0, 10**5)


def above(bound_s: float, period_s: float) -> bool:
    """Whether a bound is above a period that some plan has."""
    return bound_s > period_s * SAME


def check_best(drawn: Drawn, *, any_sequence: bool = False) -> None:
    """No plan that fits is below the bound; where it is infinite, none fits."""
    for _, program, _, fitting, _ in parts(drawn, any_sequence=any_sequence):
        best_s = min((found.prediction.period_s for found in fitting), default=INF)
        tables = counted(program)
        answer = program.best(0.0, INF)
        assert not above(answer.bound_s, best_s)
        assert len(tables) < MOST_TABLES
        if answer.cut is not None:
            # Where pipelines flush, a cut's ways before its stages are the least of any cut's.
            if not drawn.question.system.flushes:
                assert answer.cut.period_s <= answer.bound_s * (1 + 1e-6)
            assert program.period_s(answer.cut.steps) == pytest.approx(answer.cut.period_s)
        if not fitting:
            continue
        for below_s in (best_s * 0.8, best_s * 1.05, best_s * 1.4):
            # What is known of plans below a period that is known.
            answer = program.best(best_s / 2, below_s)
            assert not above(answer.bound_s, min(best_s, below_s))


def counted(program) -> list[float]:
    """The periods that it is asked for a cut of, from now on."""
    asked, keeps = list[float](), program.keeps

    def counting(target, deadline=None):
        asked.append(target)
        return keeps(target, deadline)

    program.keeps = counting
    return asked


def check_cuts(drawn: Drawn, *, any_sequence: bool = False) -> None:
    """Of plans below a period all cuts are listed, once for each way to compute again."""
    for part in parts(drawn, any_sequence=any_sequence):
        periods = sorted({found.prediction.period_s for found in part.fitting})
        step = max(len(periods) // MOST_TARGETS, 1)
        for period_s in [s * f for s in periods[::step] for f in (1.001, 1.3)]:
            check_cuts_below(part, period_s)


def check_cuts_below(part, target) -> None:
    found, program = set(), part.program
    for steps in program.each_below(lambda: target):
        # In machines a cut comes once for each way to share out its stages among them.
        key = tuple((x.above, x.mode, x.place.device, x.place.wires) for x in steps)
        assert key not in found
        found.add(key)
        assert steps[0].below == 0
        assert all(a.above == b.below for a, b in pairwise(steps))
    cuts = {tuple((place, device) for place, _, device, _ in key) for key in found}
    masks, problem = program.lattice.masks, program.problem.loads
    wanted = {
        tuple(zip(borders(problem, masks, plan), kinds(part, plan), strict=True))
        for plan in part.fitting
        if plan.prediction.period_s * SAME < target
    }
    assert wanted <= cuts
    kept = program.keeps(target)
    if kept is None:
        assert not wanted
    elif program.problem.rule in ("turns", "room"):
        assert kept.period_s <= target * (1 + ROUNDING)


def check_falling(drawn: Drawn, *, any_sequence: bool = False) -> None:
    """The best plan is of a listed cut, too, where only what is better than all so far is asked
    for."""
    for part in parts(drawn, any_sequence=any_sequence):
        masks, problem, best = part.program.lattice.masks, part.program.problem.loads, {}
        for plan in part.fitting:
            cut = borders(problem, masks, plan), kinds(part, plan)
            best[cut] = min(best.get(cut, INF), plan.prediction.period_s)
        below = [1.3 * max(best.values(), default=1.0)]
        for steps in part.program.each_below(lambda below=below: below[-1]):
            cut = (
                tuple(step.above for step in steps),
                tuple(step.place.device for step in steps),
            )
            below.append(min(below[-1], best.get(cut, INF)))
        if best:
            assert below[-1] <= part.best_s * SAME


def check_all(drawn: Drawn, *, any_sequence: bool = False) -> None:
    for check in (check_best, check_cuts, check_falling):
        check(drawn, any_sequence=any_sequence)


# Drawn questions --------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(seeds)
@example(45)
@example(62)
@example(165)
@example(185)
@example(200)
def test_no_plan_that_fits_is_below_the_bound(seed):
    check_best(some_alone(seed))


@settings(max_examples=examples(60))
@given(seeds)
@example(45)
@example(57)
@example(62)
@example(165)
@example(185)
@example(228)
def test_every_cut_of_plans_below_a_period_is_listed(seed):
    with np.errstate(invalid="raise"):
        check_cuts(some_alone(seed))


@settings(max_examples=examples(60))
@given(seeds)
@example(189)
@example(1157)
@example(45)
def test_the_best_cut_is_listed_while_what_is_asked_for_falls(seed):
    check_falling(some_alone(seed))


@settings(max_examples=examples(60))
@given(seeds)
def test_devices_may_come_in_any_sequence(seed):
    check_all(some_alone(seed, MOST_PLANS, any_sequence=True), any_sequence=True)


@pytest.mark.parametrize("systems", REPLICATED, ids="-".join)
@settings(max_examples=examples(60))
@given(seed=seeds, stages=st.sampled_from([None, None, 1, 2, 3]))
def test_stages_may_have_replicas(systems, seed, stages):
    """No plan that fits is below the bound, and every cut of one below a period is listed with its
    replicas."""
    part = replicated(some_alone(seed, MOST_PLANS, systems, replicas=True), stages)
    assume(part is not None and part.fitting)
    program, target = part.program, part.best_s * 1.3
    assert not above(program.best(0.0, INF).bound_s, part.best_s)
    assert program.keeps(part.best_s * SAME) is not None
    cuts = set()
    for steps in program.each_below(lambda: target):
        assert any(step.place.stage.replicas > 1 for step in steps)
        cuts.add(tuple((step.above, step.place.stage.replicas) for step in steps))
    masks, problem = program.lattice.masks, program.problem.loads
    for plan in part.fitting:
        if plan.prediction.period_s * SAME < target:
            replicas = [len(stage.devices) for stage in plan.stages]
            assert tuple(zip(borders(problem, masks, plan), replicas, strict=True)) in cuts


@pytest.mark.parametrize("systems", REPLICATED, ids="-".join)
@settings(max_examples=examples(24))
@given(seed=seeds)
def test_links_between_machines_may_be_slow_where_stages_have_replicas(systems, seed):
    """Whatever machines replicas are in."""
    drawn = some_alone(seed, MOST_PLANS, systems, replicas=True, far=True)
    part = replicated(drawn, None)
    assume(part is not None and part.fitting)
    assert not above(part.program.best(0.0, INF).bound_s, part.best_s)
    assert part.program.keeps(part.best_s * SAME) is not None


@settings(max_examples=examples(36))
@given(seeds)
def test_links_between_machines_may_be_slow(seed):
    """In whatever sequence machines are, also where only messages decide."""
    drawn = some_alone(seed, MOST_PLANS, any_sequence=True, far=True)
    for _, program, _, fitting, _ in parts(drawn, any_sequence=True):
        best_s = min((found.prediction.period_s for found in fitting), default=INF)
        assert not above(program.best(0.0, INF).bound_s, best_s)


@settings(max_examples=examples(36))
@given(seeds)
def test_what_takes_turns_is_bound_and_listed(seed):
    """More of the systems of 1F1B without a flush."""
    check_all(some_alone(seed, systems=ONE_BY_ONE))


@settings(max_examples=examples(36))
@given(seeds)
@example(312)
@example(694)
@example(701)
def test_a_cut_has_in_flight_what_its_messages_take(seed):
    """Also those past a stage: none that keeps to the period, or to the next longer one that the
    memory allows, is left for what tables know of."""
    drawn = some_alone(seed, systems=ONE_BY_ONE)
    for part in parts(drawn):
        program = part.program
        periods = sorted({found.prediction.period_s for found in part.fitting})
        for target in periods[:: max(len(periods) // MOST_TARGETS, 1)]:
            cut = program.keeps(target)
            if cut is None:
                continue
            flights = [step.place.stage.flights for step in cut.steps]
            least_s = INF
            for some in product(*flights) if prod(map(len, flights)) < MOST_TABLES else ():
                steps = [s._replace(flight=f) for s, f in zip(cut.steps, some, strict=True)]
                if program._fits(steps):
                    least_s = min(least_s, program.period_s(steps))
            assert cut.period_s <= max(target, least_s) * (1 + 2e-4)


def everywhere(program: CriticalCycles, _: float) -> list[np.ndarray]:
    """As `CriticalCycles.borders`, with all downsets."""
    flags = np.ones(program.lattice.size, dtype=np.bool_)
    return [flags] * (len(program.problem.stages) + 1)


@settings(max_examples=examples(30))
@given(seeds)
@example(45)
@example(62)
@example(185)
def test_tables_of_fewer_stages_say_the_same(seed):
    """Without those that devices before and behind leave too much to do, or that no cut for a
    longer period has, as with them all; where pipelines flush, no less."""
    drawn = some_alone(seed)
    for _, program, _, _, _ in parts(drawn):
        answer = program.best(0.0, INF)
        if answer.cut is None:
            continue
        for factor in (3.0, 1.3, 1.001, 0.999, 0.9):
            target = answer.cut.period_s * factor
            every = CriticalCycles(program.problem, program.all)
            every.borders = partial(everywhere, program)
            few, all_of_them = program.table(target, None), every.table(target, None)
            waits_s = [
                INF if table is None else min(w.linked[:, 0].min() for w in table.waits[0])
                for table in (few, all_of_them)
            ]
            if drawn.question.system.flushes:
                assert waits_s[0] >= waits_s[1] * (1 - ROUNDING)
            else:
                assert waits_s[0] == pytest.approx(waits_s[1])


@st.composite
def chains(draw):
    """A question with a chain of layers on equal devices, which messages have wires to both ways,
    and without memory limits. Some layers take no time."""
    count, seconds = draw(st.integers(2, 7)), st.integers(0, 9).map(lambda k: k * 1e-3)
    times = [(draw(seconds), draw(seconds)) for _ in range(count)]
    assume(any(forward + backward for forward, backward in times))
    parameters = st.sampled_from([0, 10**6])
    layers = [(f"n{k}", draw(parameters), *each, 0, []) for k, each in enumerate(times)]
    sent = [draw(st.sampled_from([0, 0, 1000, 4000, 20_000])) for _ in range(count)]
    profile = row_of_layers(layers, sent[:-1], sizes=(1,))
    optimizer = msgspec.structs.replace(
        profile.optimizer, update_fixed_s=draw(st.sampled_from([0.0, 1e-3]))
    )
    network = Network(bandwidth_bytes_per_s=1e6, latency_s=draw(st.sampled_from([0.0, 1e-4, 3e-3])))
    devices = tuple(Device(name=f"d{k}") for k in range(draw(st.integers(1, 4))))
    cluster = Cluster(devices=devices, network=network)
    profile = msgspec.structs.replace(profile, optimizer=optimizer)
    return Question(profile, cluster, draw(st.sampled_from(MINI_BATCHES)), 1, 1.0)


@settings(max_examples=examples(36))
@given(chains())
def test_of_chains_the_bound_is_the_best_period(question):
    drawn = all_alone(question, Freedom(), 1)
    for part in parts(drawn):
        answer = part.program.best(0.0, INF)
        assert answer.bound_s == pytest.approx(part.best_s, rel=1e-6)
        assert answer.cut is not None
        cut = tuple(step.above for step in answer.cut.steps)
        masks, problem = part.program.lattice.masks, part.program.problem.loads
        of_cut = [
            plan.prediction.period_s for plan in part.plans if borders(problem, masks, plan) == cut
        ]
        assert min(of_cut) == pytest.approx(part.best_s, rel=1e-6)


# Causes -----------------------------------------------------------------------------------------


def just_fits(question: Question, n: int) -> list[Drawn]:
    """The question, and the same with the memory that its best plan needs."""
    drawn = all_alone(question, Freedom(), n)
    by_period = sorted((plan for _, plan in drawn.plans), key=lambda p: p.prediction.period_s)
    found = [drawn]
    for plan in by_period[:1]:
        most = max(stage.memory_bytes for stage in plan.prediction.stages)
        devices = (
            msgspec.structs.replace(device, memory_bytes=most)
            for device in question.cluster.devices
        )
        cluster = msgspec.structs.replace(question.cluster, devices=tuple(devices))
        found.append(replace(drawn, question=replace(question, cluster=cluster)))
    return found


SYSTEMS = ("pipedream", "pipedream-2bw", "timeprest", "pipedream-flush", "gpipe", "zb-h1")


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("dead", [("n0",), ("n2",), ("n0", "n2")])
def test_stages_wait_for_no_gradient_that_does_not_come(system, dead):
    """What is behind a cut that no gradient crosses holds nothing up before it, and in memory there
    is no more than the schedule has."""
    profile = without_gradients(chain(4, saved=1000), *dead)
    n = 1 if VARIANTS[system].whole_mini_batches else 4
    question = Question(profile, uniform_cluster(3), system, 4, 1.0)
    for drawn in just_fits(question, n):
        check_all(drawn)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("beside_s", [5e-4, 4e-3])
def test_stages_wait_for_nothing_beside_them(system, beside_s):
    """A stage between others, of a layer that has nothing to do with them."""
    times = {"first": 3e-3, "beside": beside_s, "middle": 3e-3, "last": 3e-3}
    layers = [(name, 100, each / 4, each / 2, 100, []) for name, each in times.items()]
    edges = [
        ("first", "middle", "x", 8),
        ("middle", "last", "y", 8),
        ("last", "output", "z", 8),
        ("beside", "output", "b", 8),
    ]
    profile = profile_by_hand(layers, edges)
    n = 1 if VARIANTS[system].whole_mini_batches else 4
    question = Question(profile, uniform_cluster(4), system, 4, 1.0)
    for drawn in just_fits(question, n):
        check_all(drawn)
