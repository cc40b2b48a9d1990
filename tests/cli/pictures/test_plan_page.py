"""The page of a plan, in a browser: what it shows, and what hand, wheel and keys do to it."""

from __future__ import annotations

import json
import re
from functools import partial

import msgspec
import pytest
from helpers.by_hand.profiles import chain, profile_by_hand
from helpers.output.browser import Watched, chromium
from helpers.output.commands import called
from helpers.plans import ALL, chain_plan, plan_by_hand
from timeprest.cli.pictures.html.page import page as page_text
from timeprest.cli.pictures.html.page import plan_part, plans_report, script_text
from timeprest.cli.pictures.svg.frame import FigureSettings, window_of
from timeprest.planner.cluster.headroom import Headroom
from timeprest.planner.engine_runs import run_by
from timeprest.planner.plan import FastestPlan, read_plan
from timeprest.planner.recordings.predicted import default_mini_batches, predicted
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.files import write_file
from timeprest.profiles.units import format_bytes, format_seconds

pytestmark = pytest.mark.browser

S, N = 4, 4
HOSTILE = '</script><script>alert("x")</script>'
WIDE = {"width": 1200, "height": 900}


def made(variant="timeprest", micro_batches=N, **more):
    plan = plan_by_hand(
        chain(8, parameters=1000, saved=100), variant, S, micro_batches, mini_batch=N, **more
    )
    devices = [msgspec.structs.replace(d, memory_bytes=20_000) for d in plan.cluster.devices]
    cluster = msgspec.structs.replace(plan.cluster, devices=tuple(devices))
    return msgspec.structs.replace(plan, cluster=cluster)


@pytest.fixture(scope="module")
def plan():
    return made()


@pytest.fixture(scope="module")
def path(plan, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    plans_report({"plan.json": plan}, str(path))
    return path


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def opened(browser, path):
    """The page in a wide window; it must not complain of anything in any test."""
    watched = Watched(browser.new_page(viewport=WIDE, color_scheme="light"))
    yield watched.open(path)
    assert watched.complaints == []
    assert watched.requests == []
    watched.page.context.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of plans, each in a wide window; none may complain of anything in any test."""
    every = []

    def shown(plans):
        plans_report(plans, str(tmp_path / "page.html"))
        every.append(Watched(browser.new_page(viewport=WIDE)))
        return every[-1].open(tmp_path / "page.html")

    yield shown
    for watched in every:
        assert watched.complaints == []
        watched.page.context.close()


# Where things are drawn, and which operation is which, as the page itself sees them.
PLACE = """([lane, kind, mini]) => {
    const { gantt, recording } = TP.timeline;
    gantt.canvas.scrollIntoView({ block: "center", behavior: "instant" });
    for (let k = recording.laneBegin[lane]; k < recording.laneBegin[lane + 1]; k++) {
        if (recording.kind(k) !== kind || recording.spans.mini[k] !== mini) continue;
        const box = gantt.canvas.getBoundingClientRect();
        const x = gantt.x((recording.start(k) + recording.end(k)) / 2);
        return [box.left + x, box.top + gantt.y(lane) + gantt.laneHeight / 2];
    }
}"""
RANGE = "() => TP.timeline.group.t1 - TP.timeline.group.t0"


def drawn(page, what):
    """A count of what the timeline last drew."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done()))")
    page.evaluate("() => TP.timeline.gantt.draw()")
    return page.evaluate(f"() => TP.timeline.gantt.drawn.{what}")


def test_it_needs_nothing_from_elsewhere(opened, browser, path):
    policy = opened.locator("meta[http-equiv]").get_attribute("content")
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", path.read_text())
    # The policy holds: what would load something is refused before it gets anywhere.
    refused = """() => new Promise((done) => {
        document.addEventListener("securitypolicyviolation", (event) => done(event.blockedURI));
        fetch("https://example.org/").catch(() => {});
    })"""
    watched = Watched(browser.new_page())
    assert watched.open(path).evaluate(refused).startswith("https://example.org")
    assert watched.requests == []
    watched.page.context.close()


def test_numbers_are_those_of_the_plan(opened, plan):
    found = json.loads(msgspec.json.encode(plan))
    shown = opened.eval_on_selector_all(
        "data[data-path]", "all => all.map((data) => [data.dataset.path, data.value])"
    )
    for where, text in shown:
        value = found
        for step in where.split("."):
            value = value[int(step) if isinstance(value, list) else step]
        assert float(text) == pytest.approx(float(value), rel=1e-12), where
    paths = {where for where, _ in shown}
    assert {"predicted.period_s", "predicted.samples_per_s", "solver.bound_s"} <= paths
    for s in range(S):
        for name in ("forward_s", "memory_bytes", "version_difference", "versions_held"):
            assert f"predicted.stages.{s}.{name}" in paths
    opened.click("#bytes summary")
    opened.wait_for_selector("#bytes td data")
    parts = opened.eval_on_selector_all("#bytes td data", "all => all.map((d) => Number(d.value))")
    assert sum(parts) == 2 * sum(stage.memory_bytes for stage in plan.predicted.stages)


def test_limits_that_differ_are_not_told_as_one(show, plan):
    first, *rest = plan.cluster.devices
    large = [msgspec.structs.replace(d, memory_bytes=2**31) for d in rest]
    devices = (msgspec.structs.replace(first, memory_bytes=2**30), *large)
    cluster = msgspec.structs.replace(plan.cluster, devices=devices)
    page = show({"p": msgspec.structs.replace(plan, cluster=cluster)})
    told = page.locator("#bytes .lead").inner_text()
    assert "The limits, 1.0 GiB and more, lie far to the right" in told


def test_what_is_kept_free_and_what_was_given_away_are_shown(show, plan):
    cluster = plan.cluster.with_headroom(Headroom(nbytes=1024))
    fastest = FastestPlan(version_difference=9, memory_bytes=20_000, given_for="staleness")
    objective_s = plan.predicted.period_s / 1.006
    solver = msgspec.structs.replace(plan.solver, fastest=fastest, objective_s=objective_s)
    page = show({"p": msgspec.structs.replace(plan, cluster=cluster, solver=solver)})
    assert page.locator("#bytes .bar .free").count() == S
    assert "kept free" in page.locator("#bytes .legend").inner_text()
    assert "1.0 KiB kept free" in page.locator("#summary").inner_text()
    given = f"0.6 % of the period for a version difference of {plan.predicted.version_difference}"
    told = page.locator("#solver").inner_text()
    assert f"{given} instead of 9" in " ".join(told.split())


def test_another_engines_run_has_its_memory_and_order(show):
    there = run_by(made("pipedream-flush"), "deepspeed")
    page = show({"p": there})
    kept = format_bytes(there.predicted.stages[0].memory.engine_bytes)
    titles = page.eval_on_selector_all("#bytes .bar .part", "all => all.map((one) => one.title)")
    assert titles.count(f"engine's own: {kept}") == S
    assert "engine's own" in page.locator("#bytes .legend").inner_text()
    assert "pipedream-flush in DeepSpeed" in page.title()
    assert "deepspeed" in page.locator("#provenance").inner_text()
    assert "with tp-run" in page.locator("#solver").inner_text()


def test_a_plan_that_was_edited_says_so(show, plan):
    for edited in (plan, msgspec.structs.replace(plan, mini_batch=2 * N)):
        told = show({"p": edited}).locator("#summary").inner_text()
        assert ("edited since it was made" in told) == (edited is not plan)


def test_the_cut_shows_every_layer_and_what_crosses(opened, plan):
    cards = opened.locator("#graph .card")
    for s, stage in enumerate(plan.stages):
        assert cards.nth(s).locator(".layers li").all_text_contents() == list(stage.nodes)
    assert opened.locator("#graph svg .edge").count() == len(plan.edges)


def test_pointing_at_an_operation_tells_all_about_it(opened, plan):
    recording = predicted(plan)
    span = next(s for s in recording.spans if (s.lane, s.kind, s.mini_batch) == (1, "B", 3))
    opened.mouse.move(*opened.evaluate(PLACE, [1, "B", 3]))
    tip = opened.locator(".tip")
    assert tip.is_visible()
    text = tip.inner_text()
    assert "B3 · backward · stage 1" in text
    assert f"version {span.version}" in text
    assert f"version {span.forward_version}" in text
    assert len(re.findall(r"\d+ (?:ms|s|µs)", text)) >= 3
    nbytes = sum(m.nbytes for m in recording.messages if m.backward and m.mini_batch == 3) // 3
    assert text.count(f"{nbytes} B ") == 2
    opened.mouse.move(5, 5)
    assert tip.is_hidden()


def test_wheel_buttons_and_dragging_move_in_time(opened):
    whole = opened.evaluate(RANGE)
    x, y = opened.evaluate(PLACE, [0, "F", 6])
    opened.mouse.move(x, y)
    before = opened.evaluate("() => scrollY")
    opened.mouse.wheel(0, 100)
    opened.wait_for_function(f"() => scrollY !== {before}")
    assert opened.evaluate(RANGE) == whole
    x, y = opened.evaluate(PLACE, [0, "F", 6])
    opened.mouse.move(x, y)
    left = "TP.timeline.gantt.canvas.getBoundingClientRect().left"
    time = f"() => TP.timeline.gantt.time({x} - {left})"
    under = opened.evaluate(time)
    opened.keyboard.down("Control")
    opened.mouse.wheel(0, -300)
    opened.keyboard.up("Control")
    opened.wait_for_function(f"() => ({RANGE})() < {whole / 2}")
    assert opened.evaluate(time) == pytest.approx(under, abs=whole / 1000)
    opened.mouse.down()
    opened.mouse.move(x - 120, y, steps=4)
    opened.mouse.up()
    assert opened.evaluate(time) > under
    assert opened.evaluate("() => TP.timeline.group.followed") == -1
    opened.get_by_role("button", name="Show the whole time").click()
    whole = opened.evaluate("() => TP.timeline.recording.end_s")
    assert opened.evaluate(RANGE) == whole
    opened.get_by_role("button", name="Zoom in").click()
    assert opened.evaluate(RANGE) == pytest.approx(whole / 2)
    shown = opened.locator(".range")
    assert float(shown.get_attribute("data-t1")) - float(shown.get_attribute("data-t0")) < whole


def test_it_opens_where_a_figure_is_drawn(opened, plan):
    """With the last period of it between two lines, and each lane's idle share."""
    recording = predicted(plan)
    window = window_of(recording, FigureSettings())
    assert window.end_s < recording.end_s
    shown = opened.evaluate("() => [TP.timeline.group.t0, TP.timeline.group.t1]")
    assert shown == pytest.approx([window.begin_s, window.end_s])
    period = plan.predicted.period_s
    marked = opened.evaluate("() => TP.timeline.recording.lastPeriod")
    assert marked == pytest.approx([window.end_s - period, window.end_s])
    assert f"period {format_seconds(period)}" in opened.locator(".period").inner_text()
    texts = """() => {
        const { gantt } = TP.timeline, said = [], context = gantt.canvas.getContext("2d");
        const real = context.fillText;
        context.fillText = (text) => said.push(text);
        gantt.draw();
        context.fillText = real;
        return said.filter((text) => text.endsWith(" idle"));
    }"""
    idle = [f"{share:.0%} idle".replace("%", " %") for share in recording.idle_shares]
    assert opened.evaluate(texts) == idle


def test_a_mini_batch_is_followed_through_all_stages(opened):
    everything = drawn(opened, "operations")
    opened.mouse.click(*opened.evaluate(PLACE, [2, "F", 2]))
    status = opened.locator(".status")
    assert "Following mini-batch 2" in status.inner_text()
    assert status.get_attribute("data-forward-groups") == str(S)
    assert status.get_attribute("data-backwards") == str(S)
    # S × N forwards, S backwards and S updates are lit; the rest is still there, dimmed.
    assert drawn(opened, "highlighted") == S * N + 2 * S
    assert drawn(opened, "operations") == everything
    # Each forward and each backward but the first has come from a neighbour.
    assert drawn(opened, "arrows") == (S - 1) * N + (S - 1)
    opened.get_by_role("button", name="Stop following").click()
    assert drawn(opened, "highlighted") == 0
    assert status.inner_text() == ""


def test_everything_can_be_done_by_keyboard(opened):
    reached = []
    for _ in range(60):
        opened.keyboard.press("Tab")
        reached.append(opened.evaluate("() => document.activeElement.className"))
        if reached[-1] == "gantt":
            break
    assert reached[-1] == "gantt"
    outline = "() => getComputedStyle(document.activeElement).outlineStyle"
    assert opened.evaluate(outline) == "solid"
    live = opened.locator("[aria-live=polite]")
    opened.keyboard.press("ArrowDown")
    opened.keyboard.press("ArrowDown")
    assert "stage 1" in live.inner_text()
    first = live.inner_text()
    opened.keyboard.press("ArrowRight")
    assert live.inner_text() != first
    opened.keyboard.press("End")
    assert "U" in live.inner_text().split()[0]
    opened.keyboard.press("Home")
    assert live.inner_text().startswith("F0.0 · forward · stage 1")
    opened.keyboard.press("Enter")
    assert "Following mini-batch 0" in opened.locator(".status").inner_text()
    opened.keyboard.press("n")
    assert "Following mini-batch 1" in opened.locator(".status").inner_text()
    whole = opened.evaluate(RANGE)
    opened.keyboard.press("+")
    assert opened.evaluate(RANGE) == pytest.approx(whole / 2)
    opened.keyboard.press("Escape")
    assert opened.locator(".status").inner_text() == ""
    unnamed = """() => [...document.querySelectorAll("button, canvas, [role=img], [tabindex]")]
        .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim())).length"""
    assert opened.evaluate(unnamed) == 0


def test_dark_is_as_the_reader_has_it_and_can_be_chosen(browser, path):
    watched = Watched(browser.new_page(viewport=WIDE, color_scheme="dark"))
    page = watched.open(path)
    # How bright the ground is and the ink in the pictures, from 0 to 255.
    bright = """() => [
        Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]),
        parseInt(TP.colour("ink").slice(1, 3), 16),
    ]"""
    ground, ink = page.evaluate(bright)
    assert ground < 60 < 200 < ink
    page.get_by_role("button", name="light colours").click()
    ground, ink = page.evaluate(bright)
    assert ink < 60 < 200 < ground
    page.get_by_role("button", name="dark colours").click()
    assert page.evaluate("() => document.documentElement.dataset.theme") == "dark"
    assert watched.complaints == []
    page.context.close()


def test_a_phone_shows_it_without_scrolling_sideways(browser, path):
    context = browser.new_context(
        viewport={"width": 375, "height": 740}, has_touch=True, is_mobile=True
    )
    watched = Watched(context.new_page())
    page = watched.open(path)
    assert page.evaluate("() => document.documentElement.scrollWidth") == 375
    for fold in page.locator("details > summary").all():
        fold.click()
    assert page.evaluate("() => document.documentElement.scrollWidth") == 375
    page.touchscreen.tap(*page.evaluate(PLACE, [0, "B", 1]))
    assert "Following mini-batch 1" in page.locator(".status").inner_text()
    pinch = """() => {
        const { canvas } = TP.timeline.gantt, box = canvas.getBoundingClientRect();
        canvas.setPointerCapture = () => {};
        const send = (type, pointerId, x) => canvas.dispatchEvent(new PointerEvent(type, {
            pointerId, pointerType: "touch", clientX: box.left + x, clientY: box.top + 60 }));
        send("pointerdown", 1, 150); send("pointerdown", 2, 200);
        send("pointermove", 1, 100); send("pointermove", 2, 250);
        send("pointerup", 1, 100); send("pointerup", 2, 250);
    }"""
    before = page.evaluate(RANGE)
    page.evaluate(pinch)
    assert page.evaluate(RANGE) == pytest.approx(before / 3, rel=1e-6)
    assert watched.complaints == []
    context.close()


def test_devices_with_several_stages(show):
    """A row for each device; stages are told apart, by rules, labels and in words."""
    plan = chain_plan("timeprest", placement=(0, 1, 0))
    page = show({"plan.json": plan})
    assert "3 stages on 2 devices (placement: v)" in page.locator("#summary").inner_text()
    recording = predicted(plan)
    devices = plan.predicted.devices
    assert page.evaluate("() => TP.timeline.recording.laneCount") == 2
    names = page.evaluate(
        "() => Array.from(TP.timeline.recording.spans.kind, "
        "(_, k) => TP.timeline.recording.name(k))"
    )
    assert names == [recording.name(span) for span in recording.spans]
    assert page.evaluate("() => TP.timeline.memory.peaks") == [d.memory_bytes for d in devices]
    # What the second stage of the first device runs has a rule; messages are of the right stage.
    ruled = """() => {
        TP.timeline.group.set(0, TP.timeline.recording.end_s);
        TP.timeline.gantt.draw();
        return TP.timeline.gantt.ruled.filter((_, k) => k % 6 === 0);
    }"""
    assert page.evaluate(ruled) == [
        k for k, s in enumerate(recording.spans) if s.stage == 2 and s.end_s > s.start_s
    ]
    for k, span in enumerate(recording.spans):
        found = page.evaluate(
            """(k) => { const { received, sent } = TP.timeline.recording.messagesOf(k);
                return [received.length, sent.length]; }""",
            k,
        )
        mine = [
            m
            for m in recording.messages
            if (m.mini_batch, m.backward, span.kind in "FB")
            == (span.mini_batch, span.kind == "B", True)
            and (None in (m.micro_batch, span.micro_batch) or m.micro_batch == span.micro_batch)
        ]
        assert found == [
            sum(m.target_stage == span.stage for m in mine),
            sum(m.source_stage == span.stage for m in mine),
        ]
    page.mouse.move(*page.evaluate(PLACE, [0, "B", 1]))
    text = page.locator(".tip").inner_text()
    assert "2B1 · backward · stage 2 · device 0: stages 0, 2" in text
    assert "2nd stage" in page.locator("#timeline .legend").first.inner_text()
    legend = "() => TP.operationLegend({ spans: { kind: [0] }, mostStages: 14 }).textContent"
    assert "1st, 5th, 9th, … stage of a device2nd, 6th, 10th, … stage" in page.evaluate(legend)
    rows = page.locator("#bytes .bar-row .name").all_inner_texts()
    assert rows == ["device0 (stages 0, 2)", "device1 (stage 1)"]


@pytest.mark.slow
def test_every_system_has_its_page(browser, tmp_path):
    watched = Watched(browser.new_page(viewport=WIDE))
    for name in ALL:
        variant = VARIANTS[name]
        micro_batches = 1 if variant.whole_mini_batches else N
        plans_report({f"{name}.json": made(name, micro_batches)}, str(tmp_path / "page.html"))
        page = watched.open(tmp_path / "page.html")
        page.evaluate("() => TP.timeline.group.follow(1)")
        status = page.locator(".status")
        assert status.get_attribute("data-forward-groups") == str(S), name
        each = micro_batches if variant.backward_unit == "micro" else 1
        assert status.get_attribute("data-backwards") == str(S * each), name
        # Memory over time reaches just what the plan says it needs.
        peaks = page.evaluate("() => TP.timeline.memory.peaks")
        found = page.eval_on_selector_all(
            "#stages data[data-path$='.memory_bytes']", "all => all.map((d) => Number(d.value))"
        )
        assert peaks == found, name
    assert watched.complaints == []
    page.context.close()


def test_names_from_files_are_text_and_no_more(show):
    layers = [(f"{HOSTILE}.{k}", 100, 1e-3, 1e-3, 10, []) for k in range(4)]
    names = [name for name, *_ in layers]
    edges = [
        (a, b, f"t{k}{HOSTILE}", 8)
        for k, (a, b) in enumerate(zip(names, [*names[1:], "output"], strict=True))
    ]
    plan = plan_by_hand(profile_by_hand(layers, edges), "gpipe", 2, 2, mini_batch=4)
    page = show({f"{HOSTILE}.json": plan})
    assert page.locator("#graph .layers li").all_text_contents() == names
    assert HOSTILE in page.locator("#provenance").inner_text()


def test_a_thousand_layers_fold(show):
    plan = plan_by_hand(chain(1000), "timeprest", 2, 2, mini_batch=4)
    page = show({"plan.json": plan})
    layers = page.locator("#graph .card").first.locator(".layers li")
    assert layers.count() < 12
    page.locator("#graph .more button").first.click()
    assert layers.count() == 500


# Without a browser ----------------------------------------------------------------------------


def test_data_cannot_end_its_script():
    text = script_text({"name": f"{HOSTILE}<!--&\u2028", "half": "\ud800"})
    assert not set("<>&\u2028") & set(text)
    # What nobody could see in a page is shown by its code.
    assert json.loads(text) == {"name": f"{HOSTILE}<!--&\\u2028", "half": "\\ud800"}


def test_the_page_keeps_to_plain_numbers(plan):
    part = plan_part(plan, "plan.json")
    shown = default_mini_batches(plan)
    assert part["mini_batches_shown"] == shown
    with pytest.raises(ValueError, match="JSON"):
        page_text({"plans": [], "bad": float("nan")})
    assert part["recording"]["spans"]["count"] == shown * S * (N + 2)


def test_show_writes_the_page(plan, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_file("plan.json", plan)
    show = partial(called, "tp-plan", "show", "plan.json", "--html")
    assert "wrote report.html" in show("report.html")
    assert "<title>by-hand: timeprest, 4 stages</title>" in (tmp_path / "report.html").read_text()
    write_file("one.json", chain_plan("gpipe", 1))
    called("tp-plan", "show", "one.json", "--html", "one.html")
    assert "gpipe, 1 stage</title>" in (tmp_path / "one.html").read_text()
    show("plan.json/report.html", code=2)
    assert json.loads(show("x.html", "--json"))["variant"] == plan.variant
    assert (tmp_path / "x.html").exists()


def test_plans_that_are_compared_stand_on_one_axis(browser, tmp_path):
    """Each system's timeline, from its first operation on; and one plan's page, by choice."""
    paths = []
    for variant in ("timeprest", "pipedream", "gpipe"):
        plan = made(variant, 1 if variant == "pipedream" else N)
        paths.append(str(tmp_path / f"{variant}.json"))
        write_file(paths[-1], plan)
    page = tmp_path / "all.html"
    assert f"wrote {page}" in called("tp-plan", "compare", *paths, "--html", page)
    watched = Watched(browser.new_page(viewport=WIDE))
    shown = watched.open(page)
    seen = shown.evaluate(
        """() => TP.timelines.recordings.map(
            (one) => [one.variant, one.spans.count > 0])"""
    )
    assert seen == [["timeprest", True], ["pipedream", True], ["gpipe", True]]
    # One plan at a time below.
    shown.get_by_label("Plan shown").select_option("2")
    number = shown.locator('#timelines data[data-path="plans.2.plan.predicted.period_s"]')
    shown.locator("#timelines summary").last.click()
    wanted = read_plan(paths[2]).predicted.period_s
    assert float(number.get_attribute("value")) == pytest.approx(wanted)
    idle = shown.locator("#timelines tbody tr td:last-child").all_inner_texts()
    least = [min(s.idle_share for s in read_plan(path).predicted.stages) for path in paths]
    assert idle == [f"{share:.0%}".replace("%", " %") for share in least]
    assert watched.complaints == []
    assert watched.requests == []
    shown.context.close()
