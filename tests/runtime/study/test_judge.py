"""tp-plan solve --study: plans with the least time to a study's target."""

from __future__ import annotations

import json
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path

import msgspec
import pytest
import timeprest
from helpers.by_hand.profiles import chain
from helpers.by_hand.studies import LENGTH, PLAIN_ARM, STEPS, arm, curve, study
from helpers.output.commands import called
from helpers.plans import lone_stages
from timeprest.cli.tables.plans import periods_alone
from timeprest.planner.evaluate import evaluate
from timeprest.planner.plan import read_plan
from timeprest.planner.schedules.schedules import PAPER_STALENESS, limit_ranges
from timeprest.planner.search.answer.recheck import question_of
from timeprest.planner.search.choices import all_limits
from timeprest.planner.search.request import PlanRequest
from timeprest.profiles.files import write_file
from timeprest.profiles.profile import Profile
from timeprest.runtime.study.figures.choose import StudyFigures, search_to_target
from timeprest.runtime.study.figures.overhead import LatePlan
from timeprest.runtime.study.figures.study import DroppedArm, StudyArm, read_study, write_study

call = partial(called, "tp-plan")

SLOW = {
    "timeprest": 3.0,
    "v-timeprest": 1.3,
    "pipedream-unstashed": 1.35,
    "pipedream": 1.15,
    "pipedream-vertical-sync": 1.25,
    "pipedream-nesterov": 1.1,
}
"""How many samples more these take, as far as the study goes; the first never gets there."""

WORDS = ("--devices", 3, "--bandwidth", "100MB/s", "--replicas", "off", "--stages-per-device", 1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a profile of six layers, plans of three stages each, and a study of these."""
    folder = tmp_path_factory.mktemp("by_study")
    profile = folder / "profile.json"
    write_file(profile, chain(6, parameters=1000, saved=100))
    names = ",".join(SLOW)
    call("solve", profile, "--variant", names, *WORDS, "--stages", 3, "-o", folder / "p.json")
    plans = {name: read_plan(folder / f"p.{name}.json") for name in SLOW}
    arms = [arm(name, tuple(by * one for one in (1, 1.1, 0.9))) for name, by in SLOW.items()]
    of_all = study(
        [PLAIN_ARM, *arms], dict.fromkeys(SLOW, 1.0), plans=plans, mini_batch=chain(6).batch_size
    )
    write_study(folder / "study.json", of_all)
    return folder


@pytest.fixture
def folder(made, monkeypatch, tmp_path):
    """A folder with these files."""
    for name in ("profile.json", "study.json"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("system", ["pipedream", "pipedream-unstashed", "v-timeprest"])
def test_no_plan_takes_less_than_the_one_found(folder, system):
    """Of all cuts, in-flight limits and micro-batches; nor less than the bound."""
    asked = {"devices": 3, "bandwidth": "100MB/s", "replicas": "off", "stages_per_device": 1}
    request = PlanRequest(Profile.load("profile.json"), variant=system, tolerance=0, **asked)
    planning = request.read()
    figures = StudyFigures(read_study("study.json"))
    search, plans = search_to_target(planning, {system: system}, figures)
    own = plans[system]
    question, names = question_of(own, planning.profile), [f"n{k}" for k in range(6)]
    times = []
    for stages in (1, 2, 3):
        limits = all_limits(limit_ranges(own.system, stages, within=PAPER_STALENESS))
        for cut in combinations(range(1, 6), stages - 1):
            ends = [0, *cut, 6]
            nodes = [names[a:b] for a, b in pairwise(ends)]
            for n in (1,) if own.system.whole_mini_batches else (1, 2, 4):
                for vector in limits:
                    found = evaluate(question, lone_stages(nodes, vector), n)
                    judged = figures.judge(system, 1, n, found.prediction)
                    if judged.overhead.reached:
                        times.append(judged.time_s)
    assert own.to_target.time_s == pytest.approx(min(times), rel=1e-6)
    assert own.to_target.bound_s <= min(times) * (1 + 1e-9)
    assert search.bound_s > 0


def test_a_plan_says_which_cure_it_was_found_with(folder):
    """Here it makes the slowest system the one that needs the fewest samples."""
    before = read_study("study.json")
    own = next(plan for plan in before.plans if plan.name == "timeprest")
    name, cure = "timeprest with more", "lr-rescheduling=9,stagewise-momentum"
    cured = msgspec.structs.replace(own, name=name, arm=name, cure=cure)
    made = msgspec.structs.replace(
        before, arms=(*before.arms, arm(name, (1.01, 1.1, 0.9))), plans=(*before.plans, cured)
    )
    write_study("study.json", made)
    solve = ("solve", "profile.json", "--variant", "timeprest,pipedream", *WORDS)
    told = call(*solve, "--study", "study.json", "-o", "best.json")
    plan = read_plan("best.json")
    assert (plan.variant, plan.to_target.cure) == ("timeprest", cure)
    assert plan.to_target.overhead == pytest.approx(1.01, rel=0.02)
    options = "--lr-rescheduling 9 --stagewise-momentum"
    assert f"as studied, timeprest is to be trained with {options}" in " ".join(told.split())
    assert options in " ".join(call("show", "best.json").split())
    check = ("check", "best.json", "--profile", "profile.json", "-o")
    assert "left out" not in call(*check, "same.json")
    assert read_plan("same.json").to_target == plan.to_target
    edited = json.loads(Path("best.json").read_text())
    edited["cluster"]["network"]["latency_s"] = 1e-6
    Path("edited.json").write_text(json.dumps(edited))
    checked = call("check", "edited.json", "--profile", "profile.json", "-o", "other.json")
    assert "the time to the study's target is left out" in " ".join(checked.split())
    assert "lr-rescheduling" not in read_plan("best.pipedream.json").to_target.options


def test_a_plan_says_the_learning_rate_that_was_best_with_its_delays(folder):
    before = read_study("study.json")
    rates = {each.name: 0.1 * (1 + k) for k, each in enumerate(before.arms)}
    arms = [
        msgspec.structs.replace(each, rate=rates[each.name], warmup=20 * (each.name == "pipedream"))
        for each in before.arms
    ]
    own = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True, "betas": None}
    training = {"optimizer": own, "decay_only": "matrices", "clip_norm": 0.5, "ragged": "pad"}
    training |= {"autocast": "off", "deferred_batch_norm": True, "discrepancy_correction": False}
    asked = msgspec.structs.replace(
        before.question, rate_of="learning rate", training={**before.question.training, **training}
    )
    others = (
        "--optimizer sgd --momentum 0.9 --nesterov --decay-only matrices "
        "--no-discrepancy-correction --clip-norm 0.5 --ragged pad --autocast off "
        "--deferred-batch-norm"
    )
    assert asked.options == others
    write_study("study.json", msgspec.structs.replace(before, arms=tuple(arms), question=asked))
    systems = ("pipedream", "timeprest", "gpipe")
    solve = ("solve", "profile.json", "--variant", ",".join(systems), *WORDS)
    told = call(*solve, "--study", "study.json", "-o", "best.json")
    plans = {name: read_plan(f"best.{name}.json") for name in systems}
    assert plans["pipedream"].to_target.options == (
        f"{others} --lr {rates['pipedream']:g} --warmup 20"
    )
    # Without a delay it is plain training.
    assert {stage.delay for stage in plans["timeprest"].predicted.stages} == {0}
    for name in ("timeprest", "gpipe"):
        assert plans[name].to_target.options == f"{others} --lr {rates['plain']:g}"
    # Delays that weren't trained have the rate of the nearest: here of this system's or another's
    # by the same rules.
    figures = StudyFigures(read_study("study.json"))
    late = LatePlan("timeprest", 1, 2, (1, 0, 0), (1000, 1000, 1000))
    assert not figures.fit.at(late).exact
    assert figures.fit.arm_like(late).name in ("timeprest", "pipedream-unstashed", "v-timeprest")
    best = read_plan("best.json")
    line = f"as studied, {best.variant} is to be trained with {best.to_target.options}"
    assert line in " ".join(told.split())
    assert others in " ".join(call("show", "best.json").split())


def test_plans_are_found_by_a_study(folder):
    systems = ",".join((*SLOW, "timeprest-stashed", "spectrain", "gpipe"))
    solve = ("solve", "profile.json", "--variant", systems, *WORDS, "--study", "study.json")
    found = json.loads(call(*solve, "-o", "best.json", "--json"))
    plans = found["plans"]
    times = [plan["to_target"]["time_s"] for plan in plans.values()]
    assert times == sorted(times)
    best = read_plan("best.json")
    assert best.variant == found["by_study"]["best"] == next(iter(plans))
    lows = []
    for plan in plans.values():
        target, period_s = plan["to_target"], plan["predicted"]["period_s"]
        # Samples of plain training, in the period of this plan.
        expected = target["overhead"] * STEPS * period_s
        assert target["time_s"] == pytest.approx(expected, rel=0.03)
        lows.append(target["time_s"] * (target["overhead_low"] or 0) / target["overhead"])
        assert target["shortest_period_s"] <= period_s
    # No plan's own interval is below the bound of all.
    bounds = {plan["to_target"]["bound_s"] for plan in plans.values()}
    assert 0 < max(bounds) <= min(lows) * (1 + 1e-9)
    # No training with its delays reached the target, and those of smaller ones took longer.
    assert plans["timeprest"]["to_target"]["overhead"] < SLOW["timeprest"]
    assert "timeprest-stashed" in found["by_study"]["open"]
    assert "study says nothing" in found["failed"]["spectrain"]
    # Without a delay it is another optimizer's training still.
    assert found["by_study"]["unbounded"] == ["pipedream-nesterov"]
    told = call(*solve, "-o", "best.json")
    assert max(map(len, told.splitlines())) <= 100
    text = " ".join(told.split())
    for said in (
        "least time to a training loss of",
        "best by time to target: ",
        "the shortest period, ",
        "not decided: ",
        "none that the study bounds takes less than",
        "the bound leaves out delays that the study says too little of: pipedream-nesterov",
        "of 5 trainings that were left out in turn 5 can be held against the others",
        "spectrain",
        "wrote best.json (the best by time to target)",
    ):
        assert said in text


def test_what_a_budget_left_open_is_not_decided(folder):
    """Two systems were dropped: of one the interval reaches below the best plan's time."""
    before, length = read_study("study.json"), LENGTH // 4

    def rung(slow):
        return curve(
            slow=slow, phase="rung", length=length, losses=curve(slow=slow).losses[:length]
        )

    def dropped(name, slow):
        own = StudyArm(
            name=name, kind="pipeline", rate=0.1, warmup=0, at_edge=False, curves=(rung(slow),)
        )
        plan = next(plan for plan in before.plans if plan.name == name)
        return DroppedArm(arm=own, plans=(plan,))

    plain, *arms = before.arms
    plain = msgspec.structs.replace(plain, curves=(rung(1.0), *plain.curves))
    gone = ("pipedream-nesterov", "timeprest")
    made = msgspec.structs.replace(
        before,
        arms=(plain, *(arm for arm in arms if arm.name not in gone)),
        plans=tuple(plan for plan in before.plans if plan.name not in gone),
        dropped=(dropped(gone[0], 1.1), dropped(gone[1], 60.0)),
    )
    write_study("study.json", made)
    systems = ",".join((*SLOW, "gpipe"))
    solve = ("solve", "profile.json", "--variant", systems, *WORDS, "--study", "study.json")
    found = json.loads(call(*solve, "-o", "best.json", "--json"))
    assert found["by_study"]["open"][:1] == [gone[0]]
    assert gone[1] not in found["by_study"]["open"]
    assert found["failed"][gone[0]] == "the study dropped such plans undecided"


def test_what_nothing_bounds_has_no_bound(folder):
    """One seed, and a system whose smaller delays were never trained."""
    before = read_study("study.json")
    kept = [arm for arm in before.arms if arm.name in ("plain", "pipedream-nesterov")]
    few = tuple(msgspec.structs.replace(arm, curves=arm.curves[:1]) for arm in kept)
    made = msgspec.structs.replace(
        before,
        question=msgspec.structs.replace(before.question, seeds=1),
        arms=few,
        plans=tuple(plan for plan in before.plans if plan.name == "pipedream-nesterov"),
    )
    write_study("study.json", made)
    words = (*WORDS, "--study", "study.json", "--variant", "pipedream-nesterov")
    told = " ".join(call("solve", "profile.json", *words, "-o", "best.json").split())
    assert read_plan("best.json").to_target.bound_s == 0
    assert "nothing bounds what others take" in told


def test_one_systems_plan_says_what_its_file_keeps(folder):
    solve = ("solve", "profile.json", "--variant", "pipedream", *WORDS, "--study", "study.json")
    text = " ".join(call(*solve, "--objective", "loss").split())
    kept = read_plan("plan.json").to_target
    assert "to target" in text
    assert "× the samples of plain training" in text
    # How sure that is isn't in its file.
    assert "overheads (≈) by the mean" in text
    assert call("show", "plan.json").count("to target") == 1
    call("check", "plan.json", "--profile", "profile.json", "-o", "again.json")
    assert read_plan("again.json").to_target == kept
    # What it is for another cut isn't known.
    plan = json.loads((folder / "plan.json").read_text())
    if len(plan["stages"]) > 1:
        plan["stages"][0]["nodes"].append(plan["stages"][1]["nodes"].pop(0))
        (folder / "plan.json").write_text(json.dumps(plan))
        call("check", "plan.json", "--profile", "profile.json", "-o", "again.json")
        assert read_plan("again.json").to_target is msgspec.UNSET


def test_python_plans_by_a_study_as_the_command_does(folder):
    how = {"devices": 3, "bandwidth": "100MB/s", "replicas": False, "stages_per_device": 1}
    systems, met = ["pipedream", "pipedream-vertical-sync"], []
    asked = {**how, "objective": "loss", "study": folder / "study.json", "seen": met.append}
    best = timeprest.plan("profile.json", variant=systems, **asked)
    words = (*WORDS, "--study", "study.json", "--variant", ",".join(systems))
    call("solve", "profile.json", *words, "-o", "best.json", "-q")
    kept = read_plan("best.json")
    assert (best.variant, best.stages, best.to_target) == (
        *(kept.variant, kept.stages),
        kept.to_target,
    )
    assert met


def test_periods_alone_are_said_to_be(folder):
    solve = ("solve", "profile.json", *WORDS, "--stages", 3, "--variant", "timeprest,gpipe")
    text = " ".join(call(*solve, "-o", "p.json").split())
    assert "periods alone are compared" in text
    assert "none has more in flight, or larger version differences, than its paper" in text
    assert sorted(path.name for path in folder.glob("p.*.json")) == [
        "p.gpipe.json",
        "p.timeprest.json",
    ]
    plans = {name: read_plan(f"p.{name}.json") for name in ("timeprest", "gpipe")}
    first, *rest = plans["timeprest"].stages
    stages = (msgspec.structs.replace(first, in_flight=4), *rest)
    plans["timeprest"] = msgspec.structs.replace(plans["timeprest"], stages=stages)
    beyond = str(periods_alone(plans))
    assert beyond.endswith("beyond their papers' limits, and so version differences: timeprest")


def test_a_study_of_something_else_is_refused(folder):
    solve = ("solve", "profile.json", "--variant", "all", "--study")
    assert "not 2" in call(*solve, "study.json", "--mini-batch", 2, code=2)
    assert "not a study file" in call(*solve, "profile.json", code=2)
    assert "tp-run study" in call(*solve, "none.json", code=2)
    alone = call("solve", "profile.json", "--objective", "loss", code=2)
    assert "--objective loss: goes with --study" in alone
    period = call(*solve, "study.json", "--objective", "period", code=2)
    assert "--study: is for --objective loss" in period
    front = call("solve", "profile.json", "--front", "--study", "study.json", code=2)
    assert "--front: compares periods" in front
    unknown = call("solve", "profile.json", "--variant", "gpipe,gppipe", code=2)
    assert "gppipe" in unknown
    none = call("solve", "profile.json", "--variant", "spectrain", "--study", "study.json", code=2)
    assert "spectrain: the study says nothing of such plans" in none
    some = read_study("study.json")
    older = tuple(msgspec.structs.replace(plan, delays=None) for plan in some.plans)
    write_study("older.json", msgspec.structs.replace(some, plans=older))
    assert "before delays were written" in call(*solve, "older.json", code=2)
    other = msgspec.structs.replace(Profile.load("profile.json"), fingerprint="another")
    write_file("profile.json", other)
    assert "another model" in call(*solve, "study.json", code=2)
