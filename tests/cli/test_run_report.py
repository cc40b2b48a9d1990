"""Runs as they were recorded, and reported: measured figures beside those of the plan."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from functools import partial

import msgspec
import pytest
from helpers.output.commands import called
from helpers.output.trace_format import check_trace
from helpers.plans import plan_by_hand, with_times
from rich.console import Console
from timeprest.cli.pictures.curves import curves_of
from timeprest.cli.pictures.html.run_data import read_facts, run_figures
from timeprest.cli.tables.names import names_by_system, names_of_paths
from timeprest.cli.tables.run import period_text, summary_table
from timeprest.planner.recordings.lane_times import lane_times
from timeprest.planner.recordings.recording import window
from timeprest.planner.systems.operations import Op
from timeprest.profiles.errors import FileError, UserError
from timeprest.runtime.prepare.data import Segment
from timeprest.runtime.processes.locks import alone
from timeprest.runtime.records.metrics import RunSummary, decode
from timeprest.runtime.records.operation_log import ALL, NONE, record_named
from timeprest.runtime.records.recording import counterpart, measured, mini_batches_of
from timeprest.runtime.records.run_dir import RunDir
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import RunSettings


def make_run(profile, target, folder, variant="timeprest", *, inline=True, replicas=None, **how):
    plan = plan_by_hand(
        with_times(profile), variant, 2, 1 if variant == "pipedream" else 4, replicas=replicas
    )
    settings = RunSettings(**{"task": target, "steps": 20, **how})
    run(plan, settings, folder, inline=inline)
    return plan


@pytest.fixture(scope="module")
def runs(mlp_profile, mlp_target, tmp_path_factory):
    """A folder with runs: timeprest, gpipe on four workers, and one that recorded nothing."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(mlp_profile, mlp_target, folder / "one")
    make_run(mlp_profile, mlp_target, folder / "two", "gpipe", replicas=[2, 2])
    make_run(mlp_profile, mlp_target, folder / "bare", record="none", evaluate=False)
    return folder


@pytest.fixture(scope="module")
def processes(mlp_profile, mlp_target, tmp_path_factory):
    """A run in two processes, all operations logged."""
    folder = tmp_path_factory.mktemp("processes") / "run"
    make_run(mlp_profile, mlp_target, folder, inline=False, log_operations=True)
    return folder


# What is recorded ----------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "steady", "first:0", "last:-1", "8", "none:1", "all:2"])
def test_what_cant_be_recorded_is_refused(text):
    with pytest.raises(UserError, match="--record"):
        record_named(text)


@pytest.mark.parametrize(
    ("text", "first", "mini_batches", "expected"),
    [
        ("all", 0, 5, range(5)),
        ("first:3", 0, 5, range(3)),
        ("first:7", 5, 5, range(2)),
        ("first:3", 5, 5, range(0)),
        ("last:3", 5, 5, range(2, 5)),
        ("last:7", 0, 5, range(3, 5)),
        ("last:3", 0, 5, range(0)),
        ("steady:3", 0, 5, range(2, 5)),
        ("steady:8", 0, 5, range(5)),
        ("steady:8", 0, 30, range(8, 16)),
        ("steady:8", 30, 30, range(0)),
        ("none", 0, 5, range(0)),
    ],
)
def test_which_mini_batches_are_recorded(text, first, mini_batches, expected):
    """Of a run of 10, of 60 for the long ones."""
    end = 10 if mini_batches == 5 else 60
    segment = Segment(0, first, mini_batches, 0, 8, 1)
    ops = [Op(kind, b) for b in range(mini_batches) for kind in "FBU"]
    found = record_named(text).first_and_last(segment, ops, end)
    if expected:
        assert found == (Op("F", expected[0]), Op("U", expected[-1]))
    else:
        assert found == (None, None)


def test_none_and_all_have_names():
    assert (record_named("none"), record_named("all")) == (NONE, ALL)


@pytest.mark.parametrize("name", ["one", "two"])
def test_measured_and_predicted_are_of_the_same_operations(runs, name):
    """With the same weight versions, and the same messages."""
    found = measured(runs / name)
    facts = read_facts(runs / name)
    other = counterpart(facts.plan, found, facts.of_epoch)
    assert found.lanes == other.lanes

    def operations(recording):
        return [(s.lane, s.name, s.version, s.forward_version) for s in recording.spans]

    assert operations(found) == operations(other)

    def messages(recording):
        fields = ("source", "target", "tensor", "mini_batch", "micro_batch", "backward")
        return {tuple(getattr(m, f) for f in fields): m.nbytes for m in recording.messages}

    both = messages(found).keys() & messages(other).keys()
    assert len(both) > 0.8 * len(found.messages) > 0
    assert all(messages(found)[key] == messages(other)[key] for key in both)


def test_an_epoch_that_went_on_when_the_run_grew(mlp_profile, mlp_target, tmp_path):
    """It has two records: seconds, evaluations and times of a mini-batch are of both."""
    make_run(mlp_profile, mlp_target, tmp_path / "run", eval_every=10)
    resume(tmp_path / "run", steps=50, inline=True)
    figures = run_figures(read_facts(tmp_path / "run"))
    assert [(e["epoch"], e["mini_batches"]) for e in figures["epochs"]] == [(0, 20), (0, 50)]
    assert figures["loss_seconds"][19] == pytest.approx(figures["epochs"][0]["seconds"])
    assert figures["loss_seconds"][49] == pytest.approx(figures["epochs"][1]["seconds"])
    evaluated = figures["evaluations"]
    assert [each["mini_batches"] for each in evaluated] == [10, 20, 30, 40, 50]
    assert [e["seconds"] for e in evaluated] == sorted(e["seconds"] for e in evaluated)
    for worker in figures["workers"]:
        each = worker["per_mini_batch"]["measured"]["compute_s"]
        assert 50 * each == pytest.approx(worker["compute_s"])


@pytest.mark.slow
def test_processes_on_one_host_have_one_clock(processes):
    """No message is there before it was sent, nor used before it is there."""
    found = measured(processes)
    spans = {(s.lane, s.kind, s.mini_batch, s.micro_batch): s for s in found.spans}
    assert found.messages
    for m in found.messages:
        kind = "B" if m.backward else "F"
        assert 0 <= m.sent_s <= m.start_s <= m.end_s
        used = spans.get((m.target, kind, m.mini_batch, m.micro_batch))
        if used is not None:
            assert m.end_s <= used.start_s
    for a, b in zip(found.spans, found.spans[1:], strict=False):
        assert a.lane < b.lane or a.end_s <= b.start_s
    assert found.period_s > 0


def test_a_period_is_a_mini_batchs_however_many_an_update_has(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    plan = msgspec.structs.replace(plan, update_every=3)
    settings = RunSettings(task=mlp_target, steps=8, log_operations=True)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    found = measured(tmp_path / "run")
    periods = []
    for report in summary.stages:
        updates = [s for s in found.spans if (s.stage, s.kind) == (report.stage, "U")]
        assert [u.mini_batch for u in updates] == [2, 5, 7]
        periods.append((updates[-1].end_s - updates[0].end_s) / 5)
        assert report.periods_s == [pytest.approx(periods[-1])]
    assert found.period_s == pytest.approx(max(periods))


def test_of_a_whole_log_any_part_can_be_had(processes):
    part = measured(processes, (1, 3))
    assert mini_batches_of(part) == (1, 3)
    whole = measured(processes, (0, 5))
    assert [s.name for s in window(whole, 1, 3).spans] == [s.name for s in part.spans]
    assert measured(processes, (90, 99)) is None


def test_memory_is_that_of_the_account(runs):
    """Its peak is no more than the whole run's, and weights are always there."""
    found = measured(runs / "one")
    facts = read_facts(runs / "one")
    for worker in facts.workers:
        points = [p for p in found.memory if p.lane == worker.rank]
        most = facts.summary.stages[worker.rank].peak.total
        assert 0.5 * most < max(sum(p.nbytes) for p in points) <= most
        weights = facts.plan.predicted.stages[worker.stages[0]].parameter_bytes
        assert all(p.nbytes[0] == weights for p in points)


# The report ----------------------------------------------------------------------------------


invoke = partial(called, "tp-run", "report")


def test_a_report_has_page_trace_figure_and_text(processes, tmp_path):
    page, trace, svg = tmp_path / "r.html", tmp_path / "r.json", tmp_path / "r.svg"
    text = invoke(processes, "-o", page, "--trace", trace, "--svg", svg)
    assert max(map(len, text.splitlines()[:12])) <= 100
    # Of 75 in an epoch.
    assert "after 20 mini-batches (epoch 1): train loss" in text
    for word in ("period measured", "predicted", "idle", "stage 1", "wrote"):
        assert word in text
    facts = read_facts(processes)
    html = page.read_text()
    data = html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    shown = json.loads(data)["runs"][0]
    assert {k: shown[k] for k in run_figures(facts)} == json.loads(json.dumps(run_figures(facts)))
    assert svg.read_text().count("<svg") == 1
    # What the trace's slices last is what was recorded.
    slices = check_trace(json.loads(trace.read_bytes()))
    lanes = len(facts.workers)
    for first, recording in ((0, facts.measured), (lanes, facts.predicted)):
        for k, times in enumerate(lane_times(recording)):
            busy = sum(e["dur"] for e in slices[first + k, 1])
            # Samples are loaded in the row of the operation that they are for.
            loading = sum(e["dur"] for e in slices[first + k, 1] if e["cat"] == "load")
            assert loading == pytest.approx(times.loading_s * 1e6, abs=0.5)
            assert busy - loading == pytest.approx(times.compute_s * 1e6, abs=0.5)
            if recording is facts.measured:
                sending = sum(e["dur"] for e in slices[k, 2])
                assert sending == pytest.approx(times.communication_s * 1e6, abs=0.5)


def percents(words):
    """The whole percents told in a text, with or without a space before the sign."""
    return [int(number) for number in re.findall(r"(\d+) ?%", words)]


def idle_shown(folder, tmp_path):
    """What the report's table, the page's data and the figure say of a run: for each, idle
    measured and predicted by worker."""
    page, svg = tmp_path / "idle.html", tmp_path / "idle.svg"
    text = invoke(folder, "-o", page, "--svg", svg)
    rows = [line for line in text.splitlines() if line.startswith("stage ")]
    data = page.read_text().split('<script type="application/json" id="data">')[1]
    shown = json.loads(data.split("</script>")[0])
    said = shown["runs"][0]["workers"]
    plan = [stage["idle_share"] for stage in shown["plans"][0]["plan"]["predicted"]["stages"]]
    words = " ".join(re.findall(r"\d+% idle", svg.read_text()))
    return {
        "table": [p for row in rows for p in percents(row)],
        "page": [
            p
            for w in said
            for share in (w["idle_share"], w["idle_share_predicted"])
            if share is not None
            for p in percents(f"{share:.0%}")
        ],
        "bars": [
            p
            for w in said
            for times in w["per_mini_batch"].values()
            for p in percents(f"{times['idle_s'] / sum(times.values()):.0%}")
        ],
        "figure": percents(words),
        "plan": [p for share in plan for p in percents(f"{share:.0%}")],
    }


@pytest.mark.processes
def test_idle_has_one_answer(processes, tmp_path):
    """Summary, report, page, figure and JSON say the same of a run, measured and predicted."""
    plan, _ = RunDir(processes).read()
    ended = decode((processes / "summary.json").read_bytes(), RunSummary)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(summary_table(plan, ended, console.width))
    rows = [line for line in console.export_text().splitlines() if re.match(r"\d", line)]
    summary = [p for row in rows for p in percents(row)]
    assert len(summary) == 4
    shown = idle_shown(processes, tmp_path)
    assert shown["table"] == shown["page"] == shown["bars"] == summary
    measured_ones, predicted_ones = summary[::2], summary[1::2]
    assert shown["figure"] == measured_ones + predicted_ones
    assert shown["plan"] == predicted_ones
    # Of all training, first operations to last ones: not computing, communicating or loading.
    for report_of in ended.stages:
        rest = report_of.wall_s - report_of.compute_s - report_of.communication_s
        rest -= report_of.loading_s
        assert report_of.idle_share == pytest.approx(rest / report_of.wall_s, abs=1e-9)
    assert sum(report_of.wall_s for report_of in ended.stages) > 0


@pytest.mark.parametrize("width", [50, 60, 80])
def test_figures_that_dont_fit_stand_below(runs, width):
    """Each beside its worker and its prediction, and none cut short."""
    where = runs / "two"
    plan, _ = RunDir(where).read()
    console = Console(width=width, record=True, file=io.StringIO())
    summary = decode((where / "summary.json").read_bytes(), RunSummary)
    console.print(summary_table(plan, summary, width))
    said = console.export_text() + invoke(where, width=width)
    assert "…" not in said
    heads = [line for line in said.splitlines() if line.startswith(("stage ", "worker "))]
    for figure in ("compute", "idle", "memory", "peak", "RSS"):
        assert any(figure in line for line in heads)
    assert not any(re.match(r"\w+ +\(pred", line) for line in heads)


def test_an_inline_run_says_nothing_about_idle(runs, tmp_path):
    """Not in the summary, not in the report, not on the page, not in the figure."""
    shown = idle_shown(runs / "one", tmp_path)
    ended = decode((runs / "one" / "summary.json").read_bytes(), RunSummary)
    assert [report_of.idle_share for report_of in ended.stages] == [None, None]
    assert shown["table"] == shown["page"] == shown["figure"] == shown["plan"]


def test_an_inline_run_that_was_stopped_says_so(runs, tmp_path):
    """As one that has ended: neither a measured period nor idle shares."""
    folder = tmp_path / "stopped"
    shutil.copytree(runs / "one", folder)
    (folder / "summary.json").unlink()
    text = invoke(folder)
    assert ", inline" in " ".join(text.split())
    assert "period measured" not in text
    shown = idle_shown(folder, tmp_path)
    assert shown["table"] == shown["page"] == shown["figure"] == shown["plan"]
    (figures,) = json.loads(invoke(folder, "--json"))["runs"]
    assert (figures["mode"], figures["period"]["measured_s"]) == ("inline", None)
    assert all(curve.inline for curve in curves_of(figures, None))


def test_a_period_of_nothing_has_no_ratio():
    assert period_text(0.5, 0.25) == "period measured 500 ms, predicted 250 ms (2.00 ×)"
    assert period_text(0.5, 0.0) == "period measured 500 ms, predicted 0 s"
    assert period_text(None, 0.25) == "period predicted 250 ms"


def test_idle_of_a_run_under_way_is_of_what_was_recorded(processes, tmp_path):
    """Until the first epoch is done; report and figure say the same then, too."""
    folder = tmp_path / "live"
    shutil.copytree(processes, folder)
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").unlink()
    shown = idle_shown(folder, tmp_path)
    times = [percents(f"{lane.idle_share:.0%}") for lane in lane_times(measured(folder))]
    assert shown["table"][::2] == [p for own in times for p in own]
    assert shown["table"] == shown["page"] == shown["bars"]
    assert shown["figure"] == shown["table"][::2] + shown["table"][1::2]


def test_times_add_up(processes):
    """Computing, communication and idleness are all the time there is."""
    found = measured(processes)
    for k, times in enumerate(lane_times(found)):
        begin = min(
            [s.start_s for s in found.spans if s.lane == k]
            + [a.start_s for a in found.activities if a.lane == k]
        )
        end = max(
            [s.end_s for s in found.spans if s.lane == k]
            + [a.end_s for a in found.activities if a.lane == k]
        )
        assert times.wall_s == pytest.approx(end - begin)
        assert times.compute_s > 0


def test_several_runs_are_told_apart(runs, tmp_path):
    page = tmp_path / "both.html"
    text = invoke(runs / "one", runs / "two", "-o", page)
    assert "side by side" in text
    found = json.loads(invoke(runs / "one", runs / "two", "--json"))["runs"]
    assert [(r["name"], r["variant"]) for r in found] == [("one", "timeprest"), ("two", "gpipe")]
    assert len(found[0]["losses"]) == len(found[0]["loss_seconds"]) == found[0]["mini_batches"]
    assert found[0]["loss_seconds"] == sorted(found[0]["loss_seconds"])
    assert found[0]["loss_seconds"][-1] == pytest.approx(found[0]["epochs"][-1]["seconds"])
    assert names_of_paths(["a/x", "b/x"]) == ["a/x", "b/x"]
    assert names_of_paths(["x", "x", "y"]) == ["x (1)", "x (2)", "y"]
    assert names_of_paths(["a/x", "a/x", "b/x"]) == ["a/x (1)", "a/x (2)", "b/x"]
    assert names_by_system(["gpipe", "gpipe"], ["a", "gpipe-2"]) == ["a (gpipe)", "gpipe-2"]
    svg, table = tmp_path / "both.svg", tmp_path / "both.csv"
    for two in (["foo=1", "loss=1"], ["loss=1", "loss=1"]):
        words = [word for text in two for word in ("--target", text)]
        refused = invoke(runs / "one", *words, code=2)
        assert f"--target: {' and '.join(two)}: give one of them" in " ".join(refused.split())
    more = ["--curves", table, "--target", "test loss=1e9"]
    text = invoke(runs / "one", runs / "two", "--svg", svg, *more)
    assert "test loss 1e+09 first reached" in text
    assert svg.read_text().count(">timeprest<") == svg.read_text().count(">gpipe<") == 1
    assert {line.split(",")[0] for line in table.read_text().splitlines()} == {"run", "one", "two"}
    other = invoke(runs / "one", "--curves", tmp_path / "a.xlsx", code=2)
    assert "end the name in .svg, .pdf or, for a table, .csv" in " ".join(other.split())
    bare = invoke(runs / "one", runs / "bare", "--svg", tmp_path / "x.svg", code=2)
    assert "--svg: bare: No timeline" in bare


def test_a_run_without_recording_says_what_is_missing(runs, tmp_path):
    text = " ".join(invoke(runs / "bare", "-o", tmp_path / "bare.html").split())
    assert "No timeline: operations weren't recorded; leave --record none out" in text
    page = tmp_path / "x.html"
    for option, file in (("--svg", tmp_path / "x.svg"), ("--trace", tmp_path / "x.json")):
        said = invoke(runs / "bare", "-o", page, option, file, code=2)
        assert f"{option}: No timeline" in said
        assert not page.exists()
        assert not file.exists()
    for words, other in ((["--over", "epochs"], "--curves"), (["--svg-width", "85mm"], "--svg")):
        assert f"{words[0]}: goes with {other}" in invoke(runs / "bare", *words, code=2)


def test_a_run_without_its_end_is_reported_as_far_as_it_has_come(runs, tmp_path):
    folder = tmp_path / "live"
    shutil.copytree(runs / "one", folder)
    (folder / "summary.json").unlink()
    log = folder / "recorded" / "stage0.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(lines[0] + lines[1][:10])
    text = " ".join(invoke(folder).split())
    done = len(json.loads(lines[0])["losses"])
    assert f"The run stopped before its end, after {done} mini-batch." in text
    with alone(folder):
        text = " ".join(invoke(folder).split())
    assert f"The run hasn't ended; {done} mini-batch so far." in text
    (folder / "lock").write_text("1 on another-host ")
    assert "The run hasn't ended" in " ".join(invoke(folder).split())
    (figures,) = json.loads(invoke(folder, "--json"))["runs"]
    assert (figures["ended"], figures["epochs"]) == (False, [])
    assert all(worker["memory"]["measured"] for worker in figures["workers"])


def test_directories_that_are_no_runs_are_refused_in_a_line(runs, tmp_path):
    assert "holds no run" in invoke(tmp_path, code=2)
    for name, text in (("settings.json", "{}"), ("summary.json", "{}"), ("metrics.jsonl", "{}\n")):
        folder = tmp_path / name
        shutil.copytree(runs / "one", folder)
        (folder / name).write_text(text)
        lines = invoke(folder, code=2).strip().splitlines()
        assert len(lines) == 1
        assert name in lines[0]


def test_logs_of_before_have_no_timeline(runs, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(runs / "one", folder)
    for path in (folder / "recorded").iterdir():
        path.write_text('{"op": "0F0.0", "version": 0, "start_s": 1.0, "end_s": 2.0}\n')
    assert "No timeline" in " ".join(read_facts(folder).missing)
    (folder / "recorded" / "stage0.jsonl").write_text('{"no": 3}\n')
    with pytest.raises(FileError, match=r"stage0\.jsonl: line 1"):
        read_facts(folder)


def test_what_isnt_a_number_is_null(runs):
    facts = read_facts(runs / "one")
    losses = ((float("nan"), *facts.losses[0][1:]), *facts.losses[1:])
    figures = run_figures(dataclasses.replace(facts, losses=losses))
    assert figures["losses"][0] is None
    json.dumps(figures, allow_nan=False)
