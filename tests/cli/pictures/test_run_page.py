"""The page of runs, in a browser: measured beside predicted, and runs over each other."""

from __future__ import annotations

import json

import pytest
from helpers.output.browser import Watched, chromium
from helpers.output.commands import called
from helpers.plans import plan_by_hand, with_times
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings

pytestmark = pytest.mark.browser

WIDE = {"width": 1200, "height": 900}


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def runs(browser, mlp_profile, mlp_target, tmp_path_factory):
    """Two runs of 20 mini-batches, of other systems."""
    folder = tmp_path_factory.mktemp("runs")
    for variant in ("timeprest", "gpipe"):
        plan = plan_by_hand(with_times(mlp_profile), variant, 2, 4)
        run(plan, RunSettings(task=mlp_target, steps=20), folder / variant, inline=True)
    return folder


def look(browser, runs, names, tmp_path):
    """The page of these runs, watched, and the figures of `--json`."""
    path = tmp_path / "report.html"
    where = [runs / name for name in names]
    printed = called("tp-run", "report", *where, "-o", path, "--json")
    watched = Watched(browser.new_page(viewport=WIDE, color_scheme="dark"))
    return watched, watched.open(path), json.loads(printed)


def at_rest(watched):
    assert watched.complaints == []
    assert watched.requests == []
    watched.page.context.close()


def test_measured_stands_beside_predicted(browser, runs, tmp_path):
    watched, page, figures = look(browser, runs, ["timeprest"], tmp_path)
    for box in page.query_selector_all("details"):
        box.query_selector("summary").click()
    shown = page.eval_on_selector_all(
        "data[data-path^='runs.']", "all => all.map((data) => [data.dataset.path, data.value])"
    )
    assert len(shown) > 40
    for where, text in shown:
        value = figures
        for step in where.split("."):
            value = value[int(step) if isinstance(value, list) else step]
        assert float(text) == pytest.approx(float(value), rel=1e-12), where
    # Shares are rounded as the commands round them.
    shares = [0.0, 0.005, 0.015, 0.125, 0.375, 0.0349, 0.996, 1.0]
    rounded = page.evaluate("(shares) => shares.map(TP.share)", shares)
    assert rounded == [f"{share:.0%}".replace("%", " %") for share in shares]
    # Both timelines have the same operations, on one axis.
    measured, predicted = page.evaluate(
        "() => [TP.runTimeline.measured, TP.runTimeline.predicted].map((r) => r.spans.count)"
    )
    assert measured == predicted > 0
    followed = "() => TP.runTimeline.charts.map((c) => c.recording.follow(10).spans.length)"
    assert page.evaluate(followed) == [2 * (4 + 1 + 1)] * 2
    text = page.inner_text("main")
    for word in ("undefined", "NaN", "[object", "null"):
        assert word not in text
    at_rest(watched)


def test_what_isnt_finite_is_told_from_what_wasnt_measured(
    browser, runs, mlp_profile, mlp_target, tmp_path
):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 4)
    diverges = OptimizerChoice(name="sgd", lr=1e9, momentum=0.9)
    settings = RunSettings(task=mlp_target, steps=20, on_nan="warn", optimizer=diverges)
    run(plan, settings, runs / "nan", inline=True)
    watched, page, figures = look(browser, runs, ["nan"], tmp_path)
    assert figures["runs"][0]["epochs"][-1]["train_loss"] is None
    assert (
        page.locator("#runs .tiles").inner_text().split("train loss")[1].startswith("\nnot finite")
    )
    at_rest(watched)
    watched, page, _ = look(browser, runs, ["nan", "gpipe"], tmp_path)
    rows = page.locator("#runs tbody tr").all_inner_texts()
    assert ["not finite" in row for row in rows] == [True, False]
    at_rest(watched)


def test_runs_lie_over_each_other(browser, runs, tmp_path):
    watched, page, figures = look(browser, runs, ["timeprest", "gpipe"], tmp_path)
    assert page.locator("#loss .legend").first.inner_text().split() == ["timeprest", "gpipe"]
    for chart in ("loss-by-mini-batch", "loss-by-second"):
        assert page.locator(f"#{chart} path.mean").count() == 2
    chart = page.locator("#loss-by-mini-batch svg")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.975 * box["width"], box["y"] + box["height"] / 2)
    values = page.locator("#loss-by-mini-batch .values").inner_text()
    for one in figures["runs"]:
        assert f"{one['name']} {one['losses'][-1]:.3g}" in values
    # Colours begin again after the sixth, with other dashes.
    looks = "() => [...Array(14).keys()].map((k) => TP.seriesColour(k) + TP.seriesDash(k))"
    assert len(set(page.evaluate(looks))) == 14
    # Losses have a logarithmic scale: equal steps down are equal shares.
    assert "(logarithmic)" in page.locator("#loss-by-mini-batch").inner_text()
    # A level that all reach, at first; when each did is what the figures say.
    level = page.locator("#time-to input")
    assert all(
        min(epoch["test"]["loss"] for epoch in one["epochs"]) <= float(level.input_value())
        for one in figures["runs"]
    )
    rows = page.locator("#time-to tbody tr")
    done = figures["runs"][0]["epochs"][-1]["mini_batches"]
    assert rows.nth(0).inner_text().split()[:3] == ["timeprest", "timeprest", str(done)]
    level.fill("-1")
    assert rows.all_inner_texts()[1].split()[:4] == ["gpipe", "gpipe", "not", "reached"]
    # Timelines of all runs stand on one axis, until one is chosen.
    titles = page.locator("#run-timeline h3").all_inner_texts()
    assert titles == ["timeprest", "gpipe"]
    ends = page.evaluate("() => TP.runTimeline.recordings.map((one) => one.end_s)")
    assert page.evaluate("() => TP.runTimeline.group.end_s") == max(ends)
    page.select_option("#run-timeline select", label="gpipe")
    assert page.evaluate("() => TP.runTimeline.measured.variant") == "gpipe"
    at_rest(watched)
