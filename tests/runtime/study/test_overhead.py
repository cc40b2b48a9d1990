"""Overheads as functions of delays. Trainings here are curves that are slower by a known factor."""

from __future__ import annotations

import math

import msgspec
import pytest
from helpers.by_hand.studies import LENGTH, PLAIN_ARM, STEPS, arm, curve, study
from helpers.plans import chain_plan
from hypothesis import given
from hypothesis import strategies as st
from timeprest.profiles.errors import UserError
from timeprest.runtime.study.figures.overhead import LatePlan, fit_overheads
from timeprest.runtime.study.figures.study import read_study, write_study

REACH = LENGTH / STEPS
"""What is slower by more doesn't reach the target, with the mean of the seeds."""


def trained(overheads, system="pipedream", plain=PLAIN_ARM, seeds=(1.0, 1.1, 0.9), **question):
    """A study of one system's plans.

    Args:
        overheads: by delays of its stages.
        seeds: how much slower each is, besides.
    """
    plans, arms = {}, [plain]
    for delays, overhead in overheads.items():
        name = "-".join(map(str, delays))
        plan = chain_plan(system, stages=len(delays))
        stages = tuple(
            msgspec.structs.replace(stage, delay=d, parameter_bytes=10)
            for d, stage in zip(delays, plan.predicted.stages, strict=True)
        )
        predicted = msgspec.structs.replace(plan.predicted, stages=stages)
        plans[name] = msgspec.structs.replace(plan, predicted=predicted)
        arms.append(arm(name, tuple(overhead * own for own in seeds[: len(plain.curves)])))
    return study(arms, dict.fromkeys(plans, 1.0), plans=plans, seeds=len(plain.curves), **question)


def asked(*delays, system="pipedream", n=1, parameters=None):
    return LatePlan(system, 1, n, delays, parameters or (10,) * len(delays))


def test_between_trainings_an_overhead_is_between_theirs():
    fit = fit_overheads(trained({(1, 0): 1.1, (2, 0): 1.2, (4, 0): 1.33}))
    found = fit.at(asked(3, 0))
    assert found.mean == pytest.approx(math.sqrt(1.2 * 1.33), rel=0.02)
    assert (found.exact, found.reached) == (False, True)
    # All that rising allows.
    assert found.low <= 1.2 * 1.01
    assert found.high >= 1.33 * 0.99
    # No delay is plain training, and what was trained is what it was.
    none = fit.at(asked(0, 0))
    assert (none.mean, none.low, none.high, none.exact) == (1, 1, 1, True)
    own = fit.at(asked(2, 0))
    assert own.exact
    assert own.mean == pytest.approx(1.2, rel=0.02)


def test_what_is_cured_has_a_function_of_its_own():
    made = trained({(1, 0): 1.2, (2, 0): 1.3, (4, 0): 1.33, (1, 1): 1.05, (2, 1): 1.1, (4, 1): 1.2})
    plans = tuple(
        msgspec.structs.replace(plan, cure="lambda=2") if plan.delays[1] else plan
        for plan in made.plans
    )
    fit = fit_overheads(msgspec.structs.replace(made, plans=plans))
    assert fit.trained_with("pipedream") == [(1, None, ""), (1, None, "lambda=2")]
    for delays, own in (((2, 0), 1.3), ((2, 1), 1.1)):
        bare, cured = (asked(*delays)._replace(cure=cure) for cure in ("", "lambda=2"))
        found = fit.at(cured if delays[1] else bare)
        assert (found.exact, found.mean) == (True, pytest.approx(own, rel=0.02))
        assert not fit.at(bare if delays[1] else cured).exact
    assert (
        fit.at(asked(3, 1)).mean > 1.29 > 1.2 > fit.at(asked(3, 1)._replace(cure="lambda=2")).mean
    )


def test_what_more_parameters_wait_for_costs_more():
    fit = fit_overheads(trained({(1, 0): 1.1, (2, 0): 1.2, (2, 2): 1.35}))
    first = fit.at(asked(2, 0, parameters=(90, 10)))
    last = fit.at(asked(2, 0, parameters=(11, 89)))
    assert fit.number == "the mean delay of a parameter"
    assert (first.exact, last.exact) == (True, True)
    first, last = (fit.at(asked(3, 0, parameters=p)) for p in ((50, 50), (20, 80)))
    assert first.mean > last.mean > 1


def test_a_training_that_never_got_there_is_a_lower_bound():
    fit = fit_overheads(trained({(1, 0): 1.1, (2, 0): 1.2, (3, 0): 9.0, (5, 0): 9.0}))
    beyond = fit.at(asked(4, 0))
    assert (beyond.reached, beyond.high) == (False, None)
    assert 1.2 < beyond.low <= beyond.mean
    assert beyond.mean == pytest.approx(REACH, rel=0.05)
    # It says nothing of smaller delays.
    below = fit.at(asked(2, 0))
    assert below.mean == pytest.approx(1.2, rel=0.02)
    own = fit.at(asked(3, 0))
    assert (own.exact, own.reached, own.high) == (True, False, None)


def test_a_training_that_most_seeds_end_has_a_figure_without_an_upper_end():
    """1.45 times 1.1 isn't reached in 1.5 times the steps."""
    found = fit_overheads(trained({(1, 0): 1.45, (2, 0): 1.48})).at(asked(1, 0))
    assert (found.reached, found.exact, found.high) == (True, True, None)
    assert found.low <= found.mean
    assert found.mean == pytest.approx(1.45, rel=0.03)


def test_a_bound_below_what_is_known_changes_nothing():
    """Trained for too short to show anything."""
    known = {(1, 0): 1.3, (2, 0): 1.35, (4, 0): 1.33}
    short = fit_overheads(trained({**known, (6, 0): 9.0}))
    for delays in ((3, 0), (1, 1)):
        assert short.at(asked(*delays)).mean == pytest.approx(
            fit_overheads(trained(known)).at(asked(*delays)).mean
        )


def test_overheads_are_of_systems_with_the_same_rules():
    fit = fit_overheads(trained({(1, 0): 1.1, (2, 0): 1.2, (4, 0): 1.33}))
    stashing = fit.at(asked(3, 0, system="timeprest-stashed", n=4))
    assert stashing == fit.at(asked(3, 0))
    assert fit.at(asked(3, 0, system="timeprest", n=4)) is None
    assert fit.at(asked(3, 0, system="pipedream-nesterov")) is None
    # Without a delay every system is plain training.
    assert fit.at(asked(0, 0, system="timeprest", n=4)).mean == 1


def test_with_another_optimizer_no_delay_is_not_plain_training():
    fit = fit_overheads(
        trained({(1, 0): 0.9, (2, 0): 1.2, (4, 0): 1.33}, system="pipedream-nesterov")
    )
    least = fit.at(asked(0, 0, system="pipedream-nesterov"))
    assert (least.exact, least.reached, least.low) == (False, True, None)
    assert least.mean == pytest.approx(0.9, rel=0.02)


def test_where_samples_are_mixed_micro_batches_count():
    plain = arm("plain, 4", (1.2, 1.3, 1.1), "plain", micro_batches=4)
    some = trained({(1, 0): 1.3, (2, 0): 1.32, (4, 0): 1.35}, "timeprest", mixes=True)
    some = msgspec.structs.replace(some, arms=(*some.arms, plain))
    fit = fit_overheads(some)
    assert fit.at(asked(0, 0, system="timeprest", n=4)).mean == pytest.approx(1.2, rel=0.05)
    between = fit.at(asked(1, 0, system="timeprest", n=4, parameters=(1, 19)))
    assert between.exact
    assert fit.at(asked(3, 0, system="timeprest", n=2)) is None


def test_a_fit_is_a_function_of_the_studys_file(tmp_path):
    """Whatever the sequence of what was trained in it."""
    some = trained({(1, 0): 1.1, (2, 0): 1.25, (2, 2): 1.2, (4, 0): 1.33, (6, 3): 9.0})
    plain, *arms = some.arms
    turned = msgspec.structs.replace(some, arms=(*reversed(arms), plain), plans=some.plans[::-1])
    fits = [fit_overheads(some)]
    for made in (some, turned):
        write_study(tmp_path / "study.json", made)
        fits.append(fit_overheads(read_study(tmp_path / "study.json")))
    asked_of = [asked(*delays) for delays in ((1, 1), (3, 0), (3, 3), (5, 3), (7, 7), (2, 0))]
    own, read, other = (
        [(f.number, f.miss, f.residual), *map(f.at, asked_of), *map(f.least, asked_of)]
        for f in fits
    )
    assert own == read == other


def test_too_few_trainings_are_refused_and_plain_training_must_get_there():
    few = fit_overheads(trained({(1, 0): 1.1, (2, 0): 1.2}))
    assert few.refusal.startswith("2 trainings with delays are too few")
    assert fit_overheads(trained({(1, 0): 1.1, (2, 0): 1.2, (3, 0): 1.3})).refusal == ""
    with pytest.raises(UserError, match="plain training doesn't reach the target"):
        fit_overheads(trained({(1, 0): 1.1}, target=-1.0))


def test_where_training_has_hardly_begun_nothing_is_known_of_delays():
    losses = tuple(2.3 - 0.001 * k - 0.3 * (-1) ** k for k in range(LENGTH))
    restless = msgspec.structs.replace(
        PLAIN_ARM, curves=tuple(curve(seed, losses=losses) for seed in range(3))
    )
    fit = fit_overheads(trained({(1, 0): 1.1, (2, 0): 1.2, (4, 0): 1.33}, plain=restless))
    for delays in ((2, 0), (3, 0)):
        found = fit.at(asked(*delays))
        assert (found.reached, found.low, found.high) == (False, None, None)
    assert fit.at(asked(0, 0)).reached
    assert fit.least(asked(3, 0)) == 0


def test_one_seed_has_the_interval_of_what_was_left_out():
    plain = arm("plain", (1.0,), "plain")
    fit = fit_overheads(trained({(1, 0): 1.3, (2, 0): 1.1, (4, 0): 1.33}, plain=plain))
    # 1.3 and 1.1 can't both be on a function that rises.
    assert fit.residual > 0.01
    found = fit.at(asked(3, 0))
    assert found.low < found.mean < found.high
    # Where all are on one, it still isn't known how far seeds are apart.
    fit = fit_overheads(trained({(1, 0): 1.1, (2, 0): 1.2, (4, 0): 1.33}, plain=plain))
    assert fit.residual == 0 < fit.miss
    found = fit.at(asked(2, 0, system="timeprest-stashed"))
    assert found.low < found.mean * 0.98 < found.mean * 1.02 < found.high
    # Of one that got there nothing can be left out and held against others.
    fit = fit_overheads(trained({(1, 0): 1.1, (3, 0): 9.0, (4, 0): 9.0}, plain=plain))
    found = fit.at(asked(1, 0, system="timeprest-stashed"))
    assert (found.reached, found.low, found.high) == (True, 1, None)
    # But plain training is as long as itself.
    none = fit.at(asked(0, 0))
    assert (none.mean, none.low, none.high) == (1, 1, 1)


def test_what_is_fitted_is_no_surer_than_what_it_is_fitted_to():
    """Of one training that got there two seeds have one degree of freedom, whatever didn't."""
    plain = arm("plain", (1.0, 1.1), "plain")
    some = {(1, 0): 1.2, **{(d, 0): 9.0 for d in range(3, 9)}}
    fit = fit_overheads(trained(some, plain=plain, seeds=(1.0, 1.25)))
    own, found = fit.at(asked(1, 0)), fit.at(asked(1, 0, system="timeprest-stashed"))
    assert (own.exact, found.exact) == (True, False)
    assert found.mean == pytest.approx(own.mean)
    assert found.high == pytest.approx(own.high)
    assert found.low == pytest.approx(max(own.low, 1))
    assert (fit.trainings, fit.told) == (7, 1)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.8, 3)), min_size=1, max_size=6),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_overheads_never_fall_with_delays(points, one, other):
    fit = fit_overheads(trained({(d, 0): overhead for d, overhead in points}, seeds=(1, 1, 1)))
    less, more = sorted((one, other))
    # Uneven parameters, so that nothing is exact.
    found = [fit.at(asked(d, 0, 0)) for d in (less, more)]
    if less:
        assert found[0].mean <= found[1].mean * (1 + 1e-9)
        assert found[0].low <= found[1].low * (1 + 1e-9)
    assert all(each.low <= each.mean * (1 + 1e-9) for each in found)
    assert all(each.high is None or each.mean <= each.high * (1 + 1e-9) for each in found)
    floor = fit.least(asked(less, 0, 0))
    assert all(floor <= each.low * (1 + 1e-9) for each in found)
