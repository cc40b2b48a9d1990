"""What a study with a budget trains, on made-up landscapes of curves: nothing is trained."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, replace

import msgspec
import pytest
from helpers.by_hand.studies import PLAIN_ARM, arm, curve, study
from helpers.plans import chain_plan
from timeprest.profiles.errors import UserError
from timeprest.runtime.study.figures.results import results_of
from timeprest.runtime.study.figures.rungs import Rung
from timeprest.runtime.study.figures.study import (
    PLAIN,
    Budget,
    Curve,
    DroppedArm,
    StudyArm,
    read_study,
    short,
    studied,
    write_study,
)
from timeprest.runtime.study.trainings.choosing import Choosing
from timeprest.runtime.study.trainings.work import ArmSpec

LENGTH = 600


@dataclass(frozen=True)
class System:
    """How an arm learns.

    Attributes:
        slow: mini-batches for each of plain training's, at its best rate.
        rate: that one.
        period: of its plan.
        early: what `slow` is in the first quarter of a training.
        early_rate: the best there.
    """

    slow: float
    rate: float
    period: float
    early: float | None = None
    early_rate: float | None = None


def curve_of(systems, noise=0.02):
    """Losses (1 + progress)^-0.5 with noise; slower, the farther the rate is from the best, and
    diverging from 6 times that."""

    def trained(asked):
        system = systems[asked.arm]
        drawn = random.Random(f"{asked.arm} {asked.seed} {asked.length} {asked.rate}")
        by_seed = math.exp(0.03 * drawn.gauss(0, 1))
        off = by_seed / system.slow * math.exp(-0.5 * math.log(asked.rate / system.rate) ** 2)
        early = system.early or system.slow
        wanted = system.early_rate or system.rate
        early_off = by_seed / early * math.exp(-0.5 * math.log(asked.rate / wanted) ** 2)
        window, done, losses = max(asked.length // 100, 1), 0.0, []
        for t in range(0, asked.length, window):
            done += window * (early_off if t < LENGTH / 4 else off)
            losses.append(short((1 + done / 10) ** -0.5 * math.exp(noise * drawn.gauss(0, 1))))
        wild = asked.rate > 6 * system.rate
        return Curve(
            seed=asked.seed,
            rate=asked.rate,
            warmup=asked.warmup,
            phase="final",
            length=asked.length,
            window=window,
            losses=tuple(losses[:1] if wild else losses),
            diverged_at=window if wild else None,
        )

    return trained


def choosing(systems, budget=None, known=None, seconds=1.0, **more):
    question = {
        "steps": 400,
        "length": LENGTH,
        "tune_length": LENGTH,
        "tune": 5,
        "confirm": 2,
        "seeds": 3,
        **more,
    }
    asked = study([PLAIN_ARM], {}, **question).question
    asked = msgspec.structs.replace(asked, budget=budget or msgspec.UNSET)
    names = [PLAIN, *(f"s{k}" for k in range(1, len(systems)))]
    arms = [
        ArmSpec(name=name, kind="pipeline" if k else "plain", plan=k, rules=name)
        for k, name in enumerate(names)
    ]
    plans = [
        msgspec.structs.replace(
            studied(chain_plan("v-timeprest"), name, f"{name}.json", name), period_s=system.period
        )
        for name, system in zip(names, systems, strict=True)
    ]
    return Choosing(asked, arms, plans, known or curve_of(systems), lambda _: seconds)


def conducted(systems, budget=None, at_once=3, noise=0.02, **more):
    """The study, and the trainings that it took; the rest of what is due is asked anew."""
    known = {}
    made = choosing(systems, budget, known.get, **more)
    landscape = curve_of(systems, noise)
    while due := made.due():
        for asked in due[:at_once]:
            known[asked] = landscape(asked)
    spent = sum(asked.length for asked in known) / LENGTH
    return made, made.study(), spent, known


def drawn_systems(seed, count=12):
    drawn = random.Random(seed)
    plain = System(1.0, 0.1 * math.exp(drawn.uniform(-1, 1)), 2.0)
    return [
        plain,
        *(
            System(
                math.exp(drawn.uniform(0.1, 1.2)),
                plain.rate * math.exp(drawn.uniform(-1, 0.3)),
                drawn.uniform(0.8, 1.6),
            )
            for _ in range(count)
        ),
    ]


def best_of(systems):
    return min(range(len(systems)), key=lambda k: systems[k].slow * systems[k].period)


@pytest.mark.parametrize("seed", [0, 4, 6, 11])
def test_the_right_plan_is_found_in_a_fraction_of_the_whole_grid(seed):
    systems = drawn_systems(seed)
    _, found, spent, _ = conducted(systems, Budget(trainings=50))
    assert spent <= 50 < 117 == conducted(systems)[2]
    assert results_of(found).recommendation.plan == f"s{best_of(systems)}"
    assert len(found.arms) + len(found.dropped) == len(systems)


def lying(late):
    """All look alike in short trainings, which are best at a quarter of the rate."""
    early = {"early": 1.5, "early_rate": 0.1}
    slows = [2.2, 1.9, late, 2.0, 2.1, 1.8]
    return [
        System(1.0, 0.2, 2.0),
        *(System(slow, 0.4, 1.0, **early) for slow in slows),
    ]


def test_a_short_training_that_lies_decides_nothing():
    """Rates are tried anew at the whole length, and what was dropped is called back where those
    that were trained to the end turn out otherwise than their short trainings had them."""
    systems = lying(1.0)
    systems[3] = replace(systems[3], early=2.2)
    made, found, spent, _ = conducted(systems, Budget(trainings=60))
    assert any("dropped for now" in note and "s3" in note for note in made.notes)
    assert results_of(found).recommendation.plan == "s3"
    rates = {curve.rate for curve in found.arm("s3").curves if curve.phase == "rung"}
    assert max(rates) < found.arm("s3").rate == pytest.approx(0.4, rel=0.5)
    assert spent <= 60


def test_it_stops_where_the_best_is_apart_or_the_budget_is_over():
    systems = drawn_systems(4)
    made, found, spent, _ = conducted(systems, Budget(trainings=90))
    assert spent < 60
    assert made.notes[-1] == "no plan that was dropped may be the best"
    assert found.dropped
    assert not results_of(found).recommendation.open
    close = [System(1.0, 0.1, 2.0), *(System(1.3 + 0.01 * k, 0.1, 1.0) for k in range(10))]
    _, found, _, _ = conducted(close, Budget(trainings=40))
    said = results_of(found).recommendation
    assert set(said.open) == {plan.plan for plan in results_of(found).dropped}
    assert "not decided within the budget: " in said.why


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_it_is_the_same_study_however_it_was_stopped_and_read(at_once, tmp_path):
    systems = drawn_systems(3)
    _, found, _, known = conducted(systems, Budget(trainings=50), at_once)
    write_study(tmp_path / "a.json", found)
    for part in (0.0, 0.3, 0.8):
        again = dict(itertools.islice(known.items(), int(part * len(known))))
        made = choosing(systems, Budget(trainings=50), again.get)
        while due := made.due():
            again[due[-1]] = curve_of(systems)(due[-1])
        write_study(tmp_path / "b.json", made.study())
        assert (tmp_path / "b.json").read_bytes() == (tmp_path / "a.json").read_bytes()
        assert set(again) == set(known)
    assert read_study(tmp_path / "a.json") == found


def test_a_budget_that_is_enough_for_all_drops_nothing():
    systems = drawn_systems(0, 3)
    _, whole, spent, _ = conducted(systems)
    _, found, same, _ = conducted(systems, Budget(trainings=spent))
    assert (found.arms, found.plans, found.dropped) == (whole.arms, whole.plans, ())
    assert same == spent


def test_too_small_a_budget_is_refused_and_says_what_is_enough():
    systems = drawn_systems(0, 5)
    with pytest.raises(UserError, match=r"--budget: too little .* give (\d+) trainings") as refused:
        choosing(systems, Budget(trainings=9))
    enough = int(str(refused.value).split(" trainings")[0].rsplit(" ", 1)[1])
    assert conducted(systems, Budget(trainings=enough))[2] <= enough


def test_a_time_is_a_budget_by_what_the_first_rung_took():
    """Each of its trainings, an eighth of the length, takes a second here."""
    systems = drawn_systems(0)
    budget = Budget(seconds=50 * 4, processes=2)
    _, found, spent, _ = conducted(systems, budget)
    assert spent <= 50
    assert found.arms == conducted(systems, Budget(trainings=50))[1].arms
    with pytest.raises(UserError, match=r"give \d+min or more"):
        conducted(systems, Budget(seconds=9.0))


def test_what_is_equal_gets_more_seeds_as_long_as_the_budget_allows(tmp_path):
    """As many for plain training, which they are held against; none for what is slower."""
    close = [
        System(1.0, 0.1, 2.0),
        System(1.30, 0.1, 1.0),
        System(1.33, 0.1, 1.0),
        System(1.4, 0.1, 1.5),
    ]
    made, found, spent, _ = conducted(close, Budget(trainings=45), noise=0.05)
    assert any(note.startswith("another seed, since s1, s2 are equal") for note in made.notes)
    seeds = {arm.name: len(arm.finals()) for arm in found.arms}
    assert seeds[PLAIN] == seeds["s1"] == seeds["s2"] > seeds["s3"] == 3
    assert spent <= 45
    write_study(tmp_path / "study.json", found)
    assert read_study(tmp_path / "study.json") == found
    results = results_of(found)
    assert len(results.arm("s1").samples) == seeds["s1"]
    assert results.plan("s3").over_best.low > 1
    fewer = replace_plain(found, 3)
    write_study(tmp_path / "fewer.json", fewer)
    with pytest.raises(UserError, match="as many as plain training"):
        read_study(tmp_path / "fewer.json")


def replace_plain(found, seeds):
    plain = found.plain
    finals = plain.finals()[:seeds]
    own = msgspec.structs.replace(plain, curves=finals)
    return msgspec.structs.replace(found, arms=(own, *found.arms[1:]))


def test_plain_training_reaches_its_own_level_in_a_rung():
    """Of a short and noisy one: whoever learns more than it did, hasn't diverged."""
    noise = (0.01, -0.01, 0.02, 0.0, 0.01, -0.02, 0.01, 0.02, -0.01, 0.02, -0.03, -0.04)

    def short_curve(slope):
        losses = tuple(short(0.69 - slope * k + each) for k, each in enumerate(noise))
        return curve(phase="rung", length=12, losses=losses)

    question = study([PLAIN_ARM], {}, steps=32, length=32).question
    plain = short_curve(1e-4)
    rung = Rung(question, [plain])
    overheads = [rung.overhead(short_curve(slope)) for slope in (1e-2, 1e-3, 1e-4)]
    assert overheads[-1] == 1.0
    assert overheads == sorted(overheads)
    assert rung.overhead(msgspec.structs.replace(plain, diverged_at=7)) == math.inf


def test_what_delays_rule_out_isnt_trained():
    """Larger delays than those of plans that were trained take no fewer samples."""
    plain = [curve(seed) for seed in range(3)]
    rung = [curve(0, phase="rung", length=150, losses=plain[0].losses[:150])]
    arms = [msgspec.structs.replace(PLAIN_ARM, curves=(*rung, *plain))]
    arms += [arm(f"late {d}", [1.1 + 0.08 * d] * 3) for d in range(1, 5)]
    plan = studied(chain_plan("pipedream"), "", "x.json", "")
    plans = [
        msgspec.structs.replace(plan, name=f"late {d}", arm=f"late {d}", delays=(d, d, d))
        for d in range(1, 8)
    ]
    found = msgspec.structs.replace(study(arms, {}), plans=tuple(plans[:4]))
    fast = curve(0, phase="rung", length=150)
    own = {"rate": 0.1, "warmup": 0, "at_edge": False, "kind": "pipeline"}
    late = StudyArm(
        name="late 7",
        curves=(msgspec.structs.replace(fast, losses=fast.losses[:150]),),
        **own,
    )
    dropped = DroppedArm(arm=late, plans=(plans[6],))
    (told,) = results_of(msgspec.structs.replace(found, dropped=(dropped,))).dropped
    assert told.after == 150
    assert 1.3 < told.overhead.low == told.overhead.mean < told.overhead.high
    unlike = msgspec.structs.replace(plans[6], variant="v-timeprest")
    other = msgspec.structs.replace(dropped, plans=(unlike,))
    (told,) = results_of(msgspec.structs.replace(found, dropped=(other,))).dropped
    assert told.overhead.low < told.overhead.mean == pytest.approx(1.0, rel=0.05)


FAST = [
    System(1.0, 0.1, 2.0),
    System(1.3, 0.1, 2.0),
    System(4.0, 0.1, 0.3),
    System(60.0, 0.1, 0.3),
]
"""The first takes 2, the third 1.2, but four times as many mini-batches; the last one
needs too many."""


@pytest.mark.parametrize("budget", [None, Budget(trainings=140)])
def test_what_is_late_but_fast_trains_until_it_is_decided(budget):
    longest = {"longest": 20.0} if budget is None else {}
    made, found, spent, _ = conducted(FAST, budget, **longest)
    said = results_of(found).recommendation
    assert (said.plan, said.open) == ("s2", ())
    lengths = {arm.name: arm.length for arm in found.arms}
    assert lengths[PLAIN] == lengths["s1"] == LENGTH < lengths["s2"]
    # No longer than what the best plan takes: 4 times as many as plain training.
    assert lengths["s3"] == pytest.approx(4 * 400, rel=0.2)
    assert {curve.length for curve in found.arm("s2").curves if curve.phase != "rung"} == {2400}
    assert "s2 may be the best: for 1200 mini-batches" in made.notes
    assert budget is None or spent <= budget.trainings


def test_without_more_time_it_is_said_to_be_open():
    _, found, _, _ = conducted(FAST)
    said = results_of(found).recommendation
    assert (said.plan, set(said.open)) == (PLAIN, {"s2", "s3"})
    assert "a larger --longest" in said.why
    # Two thirds of what it needs.
    made, found, _, _ = conducted(FAST, longest=3.0)
    assert results_of(found).recommendation.open
    assert max(arm.length for arm in found.arms) == 1200
    made, found, spent, _ = conducted(FAST, Budget(trainings=27))
    assert spent <= 27
    assert "the budget is over; s2 may be the best, too" in made.notes


def test_a_longer_training_is_the_same_however_it_was_stopped():
    _, found, _, known = conducted(FAST, longest=20.0)
    again = dict(itertools.islice(known.items(), len(known) // 2))
    made = choosing(FAST, None, again.get, longest=20.0)
    while due := made.due():
        again[due[-1]] = curve_of(FAST)(due[-1])
    assert made.study() == found
    assert set(again) == set(known)


def drawn_by_period(seed):
    """The shorter a period, the more mini-batches, but not in proportion."""
    drawn = random.Random(seed)
    found = [System(1.0, 0.1 * math.exp(drawn.uniform(-1, 1)), 1.0)]
    for _ in range(8):
        period = math.exp(drawn.uniform(math.log(0.15), 0))
        slow = math.exp(drawn.uniform(0.1, 1.0)) * period ** -drawn.uniform(0.2, 1.2)
        found.append(System(slow, found[0].rate * math.exp(drawn.uniform(-1, 0.3)), period))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_soonest_plan_is_found_by_its_period(seed):
    systems = drawn_by_period(seed)
    _, found, _, _ = conducted(systems, tune=3, confirm=1, longest=6.0)
    told = results_of(found).recommendation.plan
    times = {f"s{k}": system.slow * system.period for k, system in enumerate(systems)}
    times[PLAIN] = times.pop("s0")
    assert times[told] <= 1.05 * min(times.values())
