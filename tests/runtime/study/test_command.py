"""tp-run study, in this process: what it prints, writes and refuses, and its page in a browser."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner
from helpers.by_hand.studies import PLAIN_ARM, arm, curve, study
from helpers.output.browser import Watched, chromium
from helpers.plans import plan_by_hand, with_times
from timeprest.cli.progress import Bar
from timeprest.cli.run import main
from timeprest.profiles.files import write_file
from timeprest.runtime.study.command.page import study_page
from timeprest.runtime.study.figures.results import results_of
from timeprest.runtime.study.figures.study import (
    PLAIN,
    Budget,
    DroppedArm,
    EvaluationPoint,
    read_study,
)

TRAINING = ("--steps", 12, "--seeds", 2, "--tune", 3, "--jobs", 1, "--eval-every", 6)
SGD = ("--optimizer", "sgd", "--lr", 0.05, "--momentum", 0.9)
VARIANTS = ("timeprest", "v-timeprest", "gpipe")


@pytest.fixture(scope="module")
def plans(mlp_profile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("plans")
    for variant in (*VARIANTS, "timeprest-stashed"):
        write_file(folder / f"{variant}.json", plan_by_hand(with_times(mlp_profile), variant, 2, 2))
    return folder


@pytest.fixture
def call(plans, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run_study(*words, code=0, variants=VARIANTS, errors=False):
        files = [str(plans / f"{variant}.json") for variant in variants]
        done = CliRunner().invoke(main, ["study", *files, *map(str, words)], prog_name="tp-run")
        assert done.exit_code == code, (done.output, done.exception)
        return done.stderr if code or errors else done.stdout

    return run_study


def test_a_study_from_the_command_line(call, tmp_path):
    text = call(*TRAINING, *SGD, "-o", "found.html", "-v")
    assert max(map(len, text.splitlines())) <= 100
    for said in (*VARIANTS, "recommended: ", "overhead", "by rate: ", "wrote found.json and"):
        assert said in text
    found = read_study(tmp_path / "found.json")
    assert [plan.variant for plan in found.plans] == list(VARIANTS)
    assert found.question.length == 18
    assert (tmp_path / "found.html").read_text().startswith("<!doctype html>")
    # What is done is there for another question, too; rates are tuned for its target.
    done = set((tmp_path / "found.trainings").iterdir())
    assert len(done) == 3 * (3 + 2)
    told = json.loads(call(*TRAINING, *SGD, "-o", "found.json", "--target-loss", 0.3, "--json"))
    assert told["results"]["target"] == 0.3
    assert told["study"]["question"]["target"] == 0.3
    assert set((tmp_path / "found.trainings").iterdir()) >= done


def test_a_setting_that_does_nothing_is_said(call):
    """Where weights are stashed no stage has a version difference, though gradients are late."""
    few = ("--steps", 2, "--seeds", 1, "--tune", 1, "--jobs", 1, "--eval-every", 0, *SGD)
    asked = {"variants": ("timeprest", "timeprest-stashed"), "errors": True}
    told = call(*few, "--stagewise-momentum", **asked)
    nothing = "--stagewise-momentum: does nothing in timeprest-stashed (docs/weights.md)"
    assert told.rstrip().endswith(f"warning: {nothing}")
    # Its epochs are short, which is said of any.
    (line,) = call(*few, "--cure", "stagewise-momentum", **asked).splitlines()
    assert "warning: pipelines run empty after every" in line


def test_a_study_with_cures(call, tmp_path):
    """Each is a training of every plan that it changes."""
    few = ("--steps", 12, "--seeds", 1, "--tune", 1, "--jobs", 1, "--eval-every", 0, *SGD)
    text = call(*few, "--cure", "stagewise-momentum", "-o", "found.json")
    names = ["timeprest", "timeprest with stagewise-momentum"]
    assert names[1] in text
    assert [plan.name for plan in read_study(tmp_path / "found.json").plans[:2]] == names
    told = call(*few, "--cure", "lr-rescheduling=6", code=2)
    assert "--cure lr-rescheduling=6: changes nothing in these plans (--lr-res" in told
    assert "is for version differences above 1" in told
    told = call(*few, "--cure", "stagewise-momentum", code=2, variants=("gpipe",))
    assert "changes nothing in these plans (all flush or have no delay)" in told


def test_a_budget_drops_plans_and_says_which(call, tmp_path):
    more = ("--steps", 40, "--seeds", 2, "--tune", 3, "--jobs", 1, "--eval-every", 0)
    text = call(*more, *SGD, "--budget", 14, "-o", "found.html")
    assert "dropped: what is expected of a whole training" in text
    found = read_study(tmp_path / "found.json")
    assert found.question.budget == Budget(trainings=14)
    (dropped,) = found.dropped
    assert dropped.plans[0].name not in {plan.name for plan in found.plans}
    assert {curve.phase for curve in dropped.arm.curves} == {"rung"}
    finished = [json.loads(path.read_text()) for path in (tmp_path / "found.trainings").iterdir()]
    spent = sum(each["curve"]["length"] for each in finished)
    assert spent <= 14 * found.question.length
    assert f'"plan":"{dropped.plans[0].name}"' in (tmp_path / "found.html").read_text()
    told = json.loads(call(*more, *SGD, "--budget", 14, "-o", "found.json", "--json"))
    assert told["results"]["dropped"][0]["arm"] == dropped.arm.name


def test_ctrl_c_says_how_to_go_on(call, tmp_path, monkeypatch):
    calls = []

    def stop(self, what, done, total):
        calls.append(done)
        if len(calls) == 60:
            raise KeyboardInterrupt

    monkeypatch.setattr(Bar, "__call__", stop)
    line = call(*TRAINING, *SGD, code=130)
    done = len(list((tmp_path / "study.trainings").iterdir()))
    assert done > 0
    assert f"stopped; {done} trainings are done, in study.trainings: the same command goes" in line
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    call(*TRAINING, *SGD, "-q")
    assert read_study(tmp_path / "study.json").plain.name == PLAIN


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--epochs", 1, "--steps", 2), "--epochs, --steps"),
        (("--target-loss", 1, "--target-accuracy", 0.5), "--target-loss, --target-accuracy"),
        (("--target", "accuracy", "--target-loss", 1), "leave one of them out"),
        (("--target", "accuracy"), "no metrics"),
        (("--warmup", "1,x"), "--warmup '1,x'"),
        (("--warmup", "3"), "goes with an --lr-schedule"),
        (("--lr", 1), "name the --optimizer too"),
        (("--tune-factor", 1), "--tune-factor"),
        (("--jobs", 0), "--jobs"),
        (("--budget", "2d"), "--budget '2d': give a time, like 2h"),
        (("--budget", -3), "--budget '-3'"),
        (("--budget", 3), "--budget: too little for 3 things to train; give"),
        (("--budget", "1h", "--tune-steps", 9), "--tune-steps: leave it out with --budget"),
        (("--budget", "1h", "--uniform-delay"), "--uniform-delay: leave it out with --budget"),
        (("-o", "there.json"), "isn't overwritten"),
        (("--task", "nowhere.py:Task"), "nowhere.py"),
    ],
)
def test_what_is_refused_is_one_line(call, tmp_path, words, said):
    (tmp_path / "there.json").write_text("{}")
    (line,) = call(*words, code=2).splitlines()
    assert said in line


def test_no_plan_is_a_usage_error(call):
    assert "Missing argument" in call(code=2, variants=())


# The page ----------------------------------------------------------------------------------------


def full_study():
    """Three arms with evaluations, one of which diverges at one rate."""

    def tested(found):
        tests = [
            EvaluationPoint(mini_batches=k, figures={"loss": 1 / k, "accuracy": 1 - 1 / k})
            for k in (10, 100, 300)
        ]
        return [curve(c.seed, slow=1.0, tests=tuple(tests), losses=c.losses) for c in found.curves]

    arms = [PLAIN_ARM, arm("a", (1.3, 1.43, 1.17)), arm("</script>", (2, 2, 2))]
    arms = [msgspec.structs.replace(each, curves=tuple(tested(each))) for each in arms]
    blown = curve(0, rate=0.4, phase="tuning", losses=(1.0, 9.0), diverged_at=3)
    arms[1] = msgspec.structs.replace(arms[1], curves=(*arms[1].curves, blown))
    made = study(arms, {"a": 1e-3, "</script>": 2e-3}, {"a": 2**20, "</script>": 2**21})
    short = {"phase": "rung", "length": 100}
    rung = curve(0, losses=PLAIN_ARM.curves[0].losses[:100], **short)
    plain = msgspec.structs.replace(made.plain, curves=(rung, *made.plain.curves))
    slow = msgspec.structs.replace(
        arms[1], name="slow", curves=(curve(0, losses=rung.losses[:99], diverged_at=99, **short),)
    )
    own = msgspec.structs.replace(made.plans[0], name="slow", arm="slow")
    dropped = DroppedArm(arm=slow, plans=(own,))
    return msgspec.structs.replace(made, arms=(plain, *made.arms[1:]), dropped=(dropped,))


def test_a_page_without_a_target_is_written(tmp_path):
    wild = tuple(curve(seed, diverged_at=3, losses=(1.0, 2.0)) for seed in range(3))
    plain = msgspec.structs.replace(PLAIN_ARM, curves=wild)
    study_page(study([plain, arm("a", (1, 1, 1))], {"a": 1.0}), tmp_path / "study.html")
    assert "diverges at all rates" in (tmp_path / "study.html").read_text()


@pytest.mark.browser
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_the_page_draws_a_study(width, scheme, tmp_path):
    found = full_study()
    study_page(found, tmp_path / "study.html")
    with chromium() as browser:
        size = {"width": width, "height": 800}
        watched = Watched(browser.new_page(viewport=size, color_scheme=scheme))
        page = watched.open(tmp_path / "study.html")
        sections = page.eval_on_selector_all("main > section", "all => all.map((s) => s.id)")
        assert sections == ["answer", "samples", "seconds", "front", "length", "rates"]
        for box in page.query_selector_all("details"):
            box.query_selector("summary").click()
        # Every chart is drawn, and nothing is wider than the page.
        assert page.locator("svg.lines").count() == 3 + 3 + 3
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        (shown,) = page.eval_on_selector_all(
            "#answer data[data-path=time_s]", "all => all.map((data) => Number(data.value))"
        )
        assert shown == pytest.approx(results_of(found).plan("a").time_s.mean)
        assert page.locator("#stability path[stroke-width='2']").count() == 1
        assert "slow" in page.text_content("#answer details table")
        # A curve that is switched off is gone.
        lines = page.locator("#samples-loss path.mean")
        assert lines.count() == 3
        page.locator("#samples .toggles button").nth(1).click()
        assert lines.count() == 2
        assert watched.complaints == []
        assert watched.requests == []
