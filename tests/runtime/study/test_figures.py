"""The figures of a study: curves, intervals, rates, what is recommended. No training here."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import msgspec
import pytest
from helpers.by_hand.studies import LENGTH, PLAIN_ARM, STEPS, arm, curve, study
from helpers.plans import chain_plan
from hypothesis import given
from hypothesis import strategies as st
from timeprest.planner.comparison.pareto import unbeaten
from timeprest.profiles.errors import FileError
from timeprest.profiles.files import MAX_FACTOR
from timeprest.runtime.study.command.tables import study_lines
from timeprest.runtime.study.figures.curves import (
    end_value,
    noise_of,
    points_of,
    samples_to,
    smoothed,
    value_at,
)
from timeprest.runtime.study.figures.results import results_of
from timeprest.runtime.study.figures.spread import spread_of
from timeprest.runtime.study.figures.study import (
    PLAIN,
    Curve,
    EvaluationPoint,
    plan_names,
    read_study,
    write_study,
)
from timeprest.runtime.study.figures.tuning import (
    Trial,
    TuningGrid,
    at_edge,
    badness_of,
    best_trial,
    candidates,
    next_trials,
    together,
)

# Curves ------------------------------------------------------------------------------------------


def test_points_stand_in_the_middle_of_their_window():
    found = Curve(
        seed=0, rate=1, warmup=0, phase="final", length=5, window=2, losses=(3.0, 2.0, 1.0)
    )
    assert points_of(found, "loss", 10) == [(10, 3.0), (30, 2.0), (45, 1.0)]


def test_evaluations_are_curves_too():
    tests = (EvaluationPoint(mini_batches=3, figures={"loss": 0.5, "accuracy": 0.9}),)
    found = curve(tests=tests)
    assert points_of(found, "accuracy", 8) == [(24.0, 0.9)]
    assert points_of(found, "test loss", 8) == [(24.0, 0.5)]


LISTS = st.lists(st.floats(-10, 10), min_size=1, max_size=200)


@given(LISTS, st.floats(-3, 3), st.floats(-3, 3))
def test_smoothing_keeps_straight_lines_and_bounds(values, slope, start):
    points = [(float(k), v) for k, v in enumerate(values)]
    found = smoothed(points)
    assert [at for at, _ in found] == [at for at, _ in points]
    assert all(min(values) - 1e-9 <= v <= max(values) + 1e-9 for _, v in found)
    line = [(float(k), start + slope * k) for k in range(len(values))]
    assert [v for _, v in smoothed(line)] == pytest.approx([v for _, v in line], abs=1e-9)


@given(LISTS, st.floats(-10, 10), st.booleans())
def test_a_crossing_is_the_first(values, level, rises):
    points = [(float(k), v) for k, v in enumerate(values)]
    at = samples_to(points, level, rises=rises)
    good = [v >= level if rises else v <= level for v in values]
    if at is None:
        assert not any(good)
        return
    first = good.index(True)
    assert max(first - 1, 0) <= at <= first
    assert value_at(points, at) == pytest.approx(values[0] if first == 0 else level, abs=1e-6)


def test_a_crossing_of_a_line_is_where_it_is():
    points = [(0.0, 1.0), (10.0, 0.5), (20.0, 0.0)]
    assert samples_to(points, 0.25, rises=False) == 15.0
    assert samples_to(points, -0.1, rises=False) is None
    assert samples_to([(0.0, 0.0), (4.0, 1.0)], 0.75, rises=True) == 3.0


def test_a_curve_that_diverged_ends_nowhere():
    assert end_value(curve(), "loss") == pytest.approx(statistics.mean(curve().losses[-30:]))
    assert end_value(curve(diverged_at=9), "loss") is None
    assert end_value(curve(), "accuracy") is None


# Intervals ---------------------------------------------------------------------------------------


def test_the_interval_is_students():
    found = spread_of([1.0, math.e, math.e**2])
    half = 4.303 / math.sqrt(3)
    assert found.mean == pytest.approx(math.e)
    assert (found.low, found.high) == (
        pytest.approx(math.exp(1 - half)),
        pytest.approx(math.exp(1 + half)),
    )
    assert spread_of([2.0]).low is None


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=8), st.floats(0.1, 10))
def test_an_interval_holds_its_mean_and_scales(values, factor):
    found = spread_of(values)
    assert min(values) * (1 - 1e-9) <= found.mean <= max(values) * (1 + 1e-9)
    assert found.low <= found.mean * (1 + 1e-9)
    assert found.mean <= found.high * (1 + 1e-9)
    scaled = spread_of([value * factor for value in values])
    assert scaled.high == pytest.approx((found * factor).high)


# Rates -------------------------------------------------------------------------------------------


def tuned(grid, badness):
    done = []
    while due := next_trials(grid, done):
        done += [Trial(rate, warmup, (0.0, badness(rate, warmup))) for rate, warmup in due]
    return done


@given(
    st.floats(1e-4, 10), st.floats(1.3, 10), st.integers(1, 12), st.floats(1e-5, 100), st.booleans()
)
def test_the_budget_is_spent_to_the_last(rate, factor, budget, best, cliff):
    def badness(rate, warmup):
        return math.inf if cliff and rate > best else abs(math.log(rate / best))

    done = tuned(TuningGrid(rate, factor, budget, (0,)), badness)
    assert len(done) == budget
    rates = sorted(trial.rate for trial in done)
    assert all(b / a <= factor * 1.01 for a, b in itertools.pairwise(rates))


def test_a_grid_moves_on_while_its_best_is_at_an_edge():
    done = tuned(TuningGrid(0.1, 2, 7, (0,)), lambda rate, _: abs(math.log(rate / 1.6)))
    assert [trial.rate for trial in done] == [0.1, 0.2, 0.05, 0.4, 0.8, 1.6, 3.2]
    assert best_trial(done).rate == 1.6
    assert not at_edge(done, 1.6)
    assert at_edge(done[:-1], 1.6)


def test_a_grid_halves_the_gap_beside_its_best():
    done = tuned(TuningGrid(1, 4, 5, (0,)), lambda rate, _: abs(math.log(rate / 1.9)))
    assert [trial.rate for trial in done] == [1, 4, 0.25, 2.0, 1.414]


def test_where_all_diverge_rates_fall():
    done = tuned(TuningGrid(1, 10, 5, (0,)), lambda rate, _: math.inf)
    assert [trial.rate for trial in done] == [1, 10, 0.1, 0.01, 0.001]
    assert at_edge(done, 0.001)


@pytest.mark.parametrize("rate", [1e9, 9e8, 3e-300])
@pytest.mark.parametrize("towards", [1, -1])
def test_a_grid_stays_within_the_limits_of_files(rate, towards):
    done = tuned(TuningGrid(rate, 10, 8, (0,)), lambda rate, _: towards * rate)
    rates = [trial.rate for trial in done]
    assert len(set(rates)) == 8
    assert all(1e-300 <= rate <= MAX_FACTOR for rate in rates)
    assert done[0].rate == rate


def test_warm_ups_have_their_part_of_the_budget():
    done = tuned(
        TuningGrid(1, 2, 6, (0, 10, 20)), lambda rate, warmup: abs(rate - 2) + abs(warmup - 20)
    )
    assert [(trial.rate, trial.warmup) for trial in done[4:]] == [(2, 10), (2, 20)]
    assert len(done) == 6
    assert best_trial(done).warmup == 20


def test_rates_are_judged_by_what_is_asked():
    """By samples to the target, then by the end, and last what diverged."""
    curves = [curve(slow=slow) for slow in (1.0, 1.2, 40, 20)] + [curve(diverged_at=5)]
    found = [badness_of(each, "loss", target=0.1, steps=STEPS) for each in curves]
    assert sorted(found) == [found[k] for k in (0, 1, 3, 2, 4)]
    assert found[0][1] == pytest.approx(99, abs=1)
    # Plain training, which sets the target, by where it is then.
    plain = badness_of(curves[0], "loss", target=None, steps=STEPS)
    assert plain == (0.0, pytest.approx((1 + STEPS) ** -0.5, rel=0.01))
    rising = curve(tests=tuple(point(k, k / 300) for k in range(1, 301)))
    assert badness_of(rising, "accuracy", target=0.5, steps=1)[1] == pytest.approx(150)
    assert badness_of(rising, "accuracy", target=None, steps=150)[1] == pytest.approx(-0.5)


def test_the_best_rates_are_confirmed_by_all_seeds():
    done = [
        Trial(rate, 0, bad) for rate, bad in ((1, (0, 5)), (2, (0, 4)), (3, (2, 0)), (4, (1, 9)))
    ]
    assert [trial.rate for trial in candidates(done, 2)] == [2, 1]
    assert [trial.rate for trial in candidates(done, 9)] == [2, 1, 4]
    assert [trial.rate for trial in candidates(done[2:3], 2)] == [3]
    # A seed that fails counts more than how good the others are.
    assert together([(0, 9), (0, 7)]) == (0, 8) < together([(0, 1), (1, 2)]) == (1, 2)


def point(mini_batches, accuracy):
    return EvaluationPoint(mini_batches=mini_batches, figures={"accuracy": accuracy})


# Results -----------------------------------------------------------------------------------------


def test_the_target_is_what_plain_training_reaches_after_the_steps():
    found = results_of(study([PLAIN_ARM], {}))
    (plain,) = found.arms
    assert statistics.mean(plain.samples) == pytest.approx(STEPS * 4, rel=0.02)
    assert plain.overhead.mean == plain.overhead.low == 1


def test_an_overhead_is_paired_by_seed():
    # Twice as slow as plain training with the same seed, whose seeds differ by far more.
    slows = (2.0, 2.2, 1.8)
    some = study([PLAIN_ARM, arm("slow", slows)], {"slow": 0.01}, target=0.15, steps=50)
    found = results_of(some).arm("slow")
    assert found.overhead.mean == pytest.approx(2, rel=0.02)
    assert found.overhead.high - found.overhead.low < 0.05


def test_time_is_overhead_times_period():
    some = study([PLAIN_ARM, arm("slow", (1.3, 1.43, 1.17))], {"slow": 0.01})
    found = results_of(some)
    plain = statistics.geometric_mean(found.arm(PLAIN).samples)
    overhead = found.arm("slow").overhead
    assert found.plan("slow").time_s.mean == pytest.approx(overhead.mean * plain * 0.01 / 4)
    assert found.plan("slow").time_s.high == pytest.approx(overhead.high * plain * 0.01 / 4)


def late(plans):
    return [msgspec.structs.replace(plan, period_s=9) for plan in plans]


def test_a_target_out_of_reach_is_none_with_a_bound():
    some = study(
        [PLAIN_ARM, arm("slow", (2, 2, 2)), arm("fast", (1, 1, 1))], {"slow": 1e-3, "fast": 1}
    )
    found = results_of(some)
    assert found.arm("slow").overhead is None
    assert found.arm("slow").at_least == pytest.approx(LENGTH / STEPS, rel=0.02)
    assert found.plan("slow").time_s is None
    assert found.plan("slow").at_least_s == pytest.approx(LENGTH * 1e-3)
    assert found.recommendation.plan == "fast"
    # What it has trained takes it less time than the other takes to the target.
    assert found.recommendation.open == ("slow",)
    assert "not decided" in found.recommendation.why
    slower = results_of(msgspec.structs.replace(some, plans=(some.plans[1], *late(some.plans[:1]))))
    assert slower.recommendation.open == ()
    nothing = results_of(study([PLAIN_ARM, arm("slow", (2, 2, 2))], {"slow": 1e-3}))
    assert nothing.recommendation.plan is None
    assert "longer" in nothing.recommendation.why


def test_seeds_that_reach_the_target_count_in_the_bound_of_those_that_do_not():
    arms = [PLAIN_ARM, arm("some", (1.1, 1.1, 3)), arm("best", (1.35, 1.45, 1.25))]
    found = results_of(study(arms, {"some": 1e-3, "best": 1e-3}))
    plain = found.arm(PLAIN).samples
    needed = [*found.arm("some").samples[:2], LENGTH * 4]
    ratios = [a / b for a, b in zip(needed, plain, strict=True)]
    assert found.arm("some").reached == 2
    assert found.arm("some").at_least == pytest.approx(statistics.geometric_mean(ratios))
    least_s = statistics.geometric_mean(needed) * 1e-3 / 4
    assert found.plan("some").at_least_s == pytest.approx(least_s)
    # All that was trained takes longer than the best plan does.
    assert least_s < found.plan("best").time_s.mean < LENGTH * 1e-3
    assert found.recommendation.open == ("some",)


def test_what_differs_by_less_than_the_seeds_is_equal():
    arms = [PLAIN_ARM, arm("a", (1.1, 1.2, 1.0)), arm("b", (1.2, 1.1, 1.1)), arm("c", (1, 1.1, 1))]
    some = study(arms, {"a": 1.0, "b": 0.99, "c": 3.0}, {"a": 2, "b": 1})
    found = results_of(some).recommendation
    assert {found.plan, *found.equal} == {"a", "b"}
    assert "equal within the seeds' spread: " in found.why
    sure = results_of(study(arms, {"a": 1.0, "c": 3.0})).recommendation
    assert (sure.plan, sure.equal) == ("a", ())
    assert "beyond the seeds' spread" in sure.why


def test_of_equals_with_as_little_memory_the_fastest_is_named():
    arms = [
        PLAIN_ARM,
        arm("a", (1.1, 1.2, 1.0)),
        arm("b", (1.2, 1.1, 1.1)),
        arm("c", (1, 1.1, 1.2)),
    ]
    some = study(arms, {"b": 1.02, "c": 1.0, "a": 0.99}, {"a": 2, "b": 1, "c": 1})
    found = results_of(some)
    names = sorted("abc", key=lambda name: found.plan(name).time_s.mean)
    assert (found.recommendation.plan, set(found.recommendation.equal)) == ("a", {"b", "c"})
    assert names == ["a", "c", "b"]
    assert "spread: a, c, b;" in found.recommendation.why
    assert found.recommendation.why.endswith("; of these c holds least memory")


def test_of_plans_that_take_as_long_the_one_with_less_memory_is_recommended():
    arms = [PLAIN_ARM, arm("a", (1.1, 1.2, 1.0)), arm("b", (1.1, 1.2, 1.0))]
    found = results_of(study(arms, {"a": 1.0, "b": 1.0}, {"a": 2, "b": 1}))
    assert found.recommendation.plan == "b"
    assert [plan.plan for plan in found.plans if plan.on_front] == ["b"]


def test_where_training_has_hardly_begun_it_is_said():
    # Losses fall by 0.3 in all, and jump by as much from one mini-batch to the next.
    level = [2.3 - 0.001 * k for k in range(LENGTH)]
    restless = [v - 0.3 * (-1) ** k for k, v in enumerate(level)]
    said = []
    for losses in (level, restless):
        curves = [curve(seed, losses=tuple(losses)) for seed in range(3)]
        plain = msgspec.structs.replace(PLAIN_ARM, curves=tuple(curves))
        other = msgspec.structs.replace(arm("a", (1, 1, 1)), curves=tuple(curves))
        said.append(results_of(study([plain, other], {"a": 1.0})).recommendation)
    assert [found.plan for found in said] == ["a", "a"]
    assert [found.begun for found in said] == [True, False]
    assert ["hardly begun" in found.why for found in said] == [False, True]


def test_the_noise_of_a_curve_knows_of_no_trend():
    drawn = random.Random(0)
    noisy = [(float(k), 0.01 * k + drawn.gauss(0, 2)) for k in range(2000)]
    assert noise_of(noisy) == pytest.approx(2, rel=0.1)
    assert noise_of(noisy[:1]) == noise_of([]) == 0


def test_without_plain_training_there_is_no_target():
    wild = [curve(seed, diverged_at=3, losses=(1.0, 2.0)) for seed in range(3)]
    plain = msgspec.structs.replace(PLAIN_ARM, curves=tuple(wild))
    found = results_of(study([plain, arm("a", (1, 1, 1))], {"a": 1.0}))
    assert found.target is None
    assert found.recommendation.plan is None
    assert "lower --lr" in found.recommendation.why
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found


def test_one_seed_has_no_spread():
    arms = [arm(PLAIN, (1.0,), "plain"), arm("a", (1.0,)), arm("b", (1.3,))]
    found = results_of(study(arms, {"a": 1.0, "b": 1.0}, seeds=1))
    assert found.recommendation.plan == "a"
    assert "one seed" in found.recommendation.why
    assert found.plan("b").time_s.low is None


@pytest.mark.parametrize(("mixes", "said"), [(False, "no delay: a"), (True, "as many micro-b")])
def test_plans_that_share_plain_training_are_said(mixes, said):
    some = study([PLAIN_ARM, arm("a", (1, 1, 1), "plain")], {"a": 1.0}, mixes=mixes)
    lines = [line.plain for line in study_lines(some, results_of(some), verbose=False)]
    assert any(line.startswith("plain training, trained once") and said in line for line in lines)


def test_overheads_are_given_along_the_way():
    some = study([PLAIN_ARM, arm("slow", (1.3, 1.43, 1.17))], {"slow": 1.0})
    places = results_of(some).arm("slow").by_level
    assert [place.mini_batches for place in places] == [50, 100, 150, 200]
    assert [place.overhead.mean for place in places] == pytest.approx([1.3] * 4, rel=0.03)


@given(
    st.dictionaries(
        st.sampled_from("abcdefgh"), st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1
    )
)
def test_the_front_is_what_nothing_beats(prices):
    found = unbeaten(prices)
    for name, (time, memory) in prices.items():
        beaten = any(
            (t <= time and m <= memory) and (t < time or m < memory) for t, m in prices.values()
        )
        assert (name in found) == (not beaten)


# The file ----------------------------------------------------------------------------------------


def test_a_study_is_read_as_it_was_written(tmp_path):
    some = study([PLAIN_ARM, arm("slow", (1.4, 1.5, 1.3))], {"slow": 1.0})
    write_study(tmp_path / "study.json", some)
    assert read_study(tmp_path / "study.json") == some
    # Curves are a line each.
    assert len((tmp_path / "study.json").read_text().splitlines()) < 400


def test_a_study_that_contradicts_itself_is_refused(tmp_path):
    some = study([PLAIN_ARM, arm("slow", (1.4, 1.5, 1.3))], {"slow": 1.0})
    broken = {
        "no 'plain'": msgspec.structs.replace(some, arms=some.arms[1:]),
        "'slow' is none": msgspec.structs.replace(some, arms=some.arms[:1]),
        "each of the seeds 0 to 4": msgspec.structs.replace(
            some, question=msgspec.structs.replace(some.question, seeds=5)
        ),
    }
    (plan,) = some.plans
    for said, changes in {
        r"plans\[0\].version_differences: has 1 numbers": {"version_differences": (1,)},
        r"plans\[0\].in_flight: has 1 numbers": {"in_flight": (1,)},
        r"plans\[0\].variant: unknown system 'none'; known are .* --plugin": {"variant": "none"},
    }.items():
        plans = (msgspec.structs.replace(plan, **changes),)
        broken[said] = msgspec.structs.replace(some, plans=plans)
    broken["arms: two have the name 'slow'"] = msgspec.structs.replace(
        some, arms=(*some.arms, some.arms[1])
    )
    broken["plans: two have the name 'slow'"] = msgspec.structs.replace(some, plans=(plan, plan))
    for said, value in broken.items():
        write_study(tmp_path / "study.json", value)
        with pytest.raises(FileError, match=f"study.json: .*{said}") as refused:
            read_study(tmp_path / "study.json")
        assert "\n" not in str(refused.value)


def test_plans_have_names_that_tell_them_apart():
    plans = [chain_plan("gpipe"), chain_plan("timeprest"), chain_plan("timeprest", n=2)]
    assert plan_names(plans) == ["gpipe", "timeprest S=3 N=4", "timeprest S=3 N=2"]
    every = msgspec.structs.replace(plans[1], update_every=2)
    assert plan_names([plans[1], every]) == ["timeprest K=1", "timeprest K=2"]
    names = plan_names([plans[1], plans[1]])
    assert len(set(names)) == 2
