"""Figures for papers: they say what the recording says, and nothing stands where it shouldn't."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from xml.etree import ElementTree

import msgspec
import pytest
from helpers.drawn.plans import evaluated
from helpers.output.commands import called
from helpers.plans import ALL, REPORT, chain_plan
from hypothesis import given, settings
from timeprest.cli.pictures.svg.frame import FigureSettings, window_of
from timeprest.cli.pictures.svg.memory import memory_svg
from timeprest.cli.pictures.svg.options import limits, width_in_points, write_run_figure
from timeprest.cli.pictures.svg.svg import SHADES, has_pattern, memory_shade, shade, text_width
from timeprest.cli.pictures.svg.timeline import ordinal, timelines_svg
from timeprest.cli.tables.palette import MEMORY
from timeprest.planner.evaluate import make_plan
from timeprest.planner.recordings.lane_times import steady_times
from timeprest.planner.recordings.predicted import predicted
from timeprest.planner.recordings.recording import Lane, MemoryPoint, Recording, Span
from timeprest.profiles.files import write_file
from timeprest.profiles.units import format_bytes

SVG = "{http://www.w3.org/2000/svg}"
KINDS = ("F", "B", "W", "U")


def timeline_svg(recording, settings=None):
    return timelines_svg([("", recording)], settings)


class Figure:
    """A parsed figure; groups' attributes are handed down to what is in them."""

    def __init__(self, text):
        self.root = ElementTree.fromstring(text)
        self.elements = list(self._walk(self.root, {}))

    def _walk(self, element, inherited):
        for child in element:
            name = child.tag.removeprefix(SVG)
            if name == "defs":
                continue
            found = {**inherited, **child.attrib}
            if name == "g":
                yield from self._walk(child, found)
            else:
                yield name, found, child.text

    def of(self, name):
        return [(found, text) for kind, found, text in self.elements if kind == name]

    def marks(self):
        """(kind, x, y, width, height) of operations."""
        return [
            (found["class"], *(float(found[edge]) for edge in ("x", "y", "width", "height")))
            for found, _ in self.of("rect")
            if found.get("class") in KINDS
        ]

    def lanes(self):
        """(x, y, width) of the ground of each lane."""
        grounds = [
            tuple(float(found[edge]) for edge in ("x", "y", "width"))
            for found, _ in self.of("rect")
            if found.get("fill") == "#f0f1f3" and "stroke" not in found
        ]
        return sorted(grounds, key=lambda ground: ground[1])

    def texts(self):
        """(x of the left end, x of the right end, baseline, size, words)."""
        found = []
        for attributes, words in self.of("text"):
            size, x = float(attributes["font-size"]), float(attributes["x"])
            width = text_width(words, size)
            left = {"middle": x - width / 2, "end": x - width}.get(attributes.get("text-anchor"), x)
            found.append((left, left + width, float(attributes["y"]), size, words))
        return found


def boxes_of(figure):
    """Of everything that is drawn: (left, top, right, bottom)."""
    for found, _ in figure.of("rect"):
        x, y = float(found.get("x", 0)), float(found.get("y", 0))
        yield x, y, x + float(found["width"]), y + float(found["height"])
    for found, _ in figure.of("line"):
        x, y = ([float(found[f"{axis}{end}"]) for end in "12"] for axis in "xy")
        yield min(x), min(y), max(x), max(y)
    for found, _ in figure.of("path"):
        xs = [float(v) for v in re.findall(r"[MH]([\d.]+)", found["d"])]
        ys = [float(v) for v in re.findall(r"(?:V| )([\d.]+)", found["d"])]
        yield min(xs), min(ys), max(xs), max(ys)
    for left, right, baseline, size, _ in figure.texts():
        yield left, baseline - 0.8 * size, right, baseline + 0.22 * size


def check_inside(figure):
    _, _, width, height = map(float, figure.root.get("viewBox").split())
    for left, top, right, bottom in boxes_of(figure):
        assert left >= -0.01
        assert top >= -0.01
        assert right <= width + 0.01
        assert bottom <= height + 0.01


def labels_of(figure):
    """Of each lane (by its top), the labels on its marks."""
    tops = [y for _, y, _ in figure.lanes()]
    height = max((mark[4] for mark in figure.marks()), default=0)
    left = min((x for x, _, _ in figure.lanes()), default=0)
    right = max(x + width for x, _, width in figure.lanes())
    found = defaultdict(list)
    for text in figure.texts():
        for top in tops:
            if top <= text[2] <= top + height and left <= text[0] <= text[1] <= right + 0.01:
                found[top].append(text)
    return found


def check_labels(figure):
    """No label leaves the marks it stands on or touches another."""
    marks = figure.marks()
    for top, texts in labels_of(figure).items():
        own = sorted((x, x + width) for _, x, y, width, _ in marks if y == top)
        for left, right, baseline, size, _ in texts:
            under = [(a, b) for a, b in own if b > left and a < right]
            assert under[0][0] <= left + 0.01
            assert under[-1][1] >= right - 0.01
            assert all(b[0] - a[1] < 0.7 for a, b in pairwise(under)), "a label stands on a gap"
            for other in texts:
                apart = other[0] >= right - 0.01 or other[1] <= left + 0.01
                if (left, baseline) != (other[0], other[2]):
                    assert apart or abs(other[2] - baseline) >= 0.8 * size


def shown(recording, setting):
    window = window_of(recording, setting)
    spans = [
        span
        for span in recording.spans
        if span.start_s < window.end_s and span.end_s > window.begin_s
    ]
    return window, spans


@pytest.mark.parametrize("variant", ALL)
def test_a_timeline_has_a_mark_for_every_operation(variant):
    """Each where and as long as the recording says; labels name its mini-batch."""
    recording = predicted(chain_plan(variant, 4))
    setting = FigureSettings(mini_batches=4, first=1)
    figure = Figure(timeline_svg(recording, setting))
    window, spans = shown(recording, setting)
    assert {span.mini_batch for span in spans} >= {1, 2, 3, 4}
    marks = figure.marks()
    assert Counter(kind for kind, *_ in marks) == Counter(span.kind for span in spans)
    lanes = figure.lanes()
    assert len(lanes) == 4
    left, per_s = lanes[0][0], lanes[0][2] / window.seconds
    for lane, (_, top, _) in enumerate(lanes):
        for kind in KINDS:
            drawn = sorted((x, width) for k, x, y, width, _ in marks if (k, y) == (kind, top))
            own = [span for span in spans if (span.lane, span.kind) == (lane, kind)]
            for (x, width), span in zip(drawn, own, strict=True):
                begin = max(span.start_s, window.begin_s)
                assert x == pytest.approx(left + (begin - window.begin_s) * per_s, abs=0.02)
                end = min(span.end_s, window.end_s)
                assert width == pytest.approx((end - begin) * per_s, abs=0.02)
        for label_left, label_right, *_, words in labels_of(figure)[top]:
            at_s = window.begin_s + ((label_left + label_right) / 2 - left) / per_s
            near = min(
                (span for span in spans if span.lane == lane and span.kind != "U"),
                key=lambda span: max(span.start_s - at_s, at_s - span.end_s),
            )
            names = {str(near.mini_batch), str(near.micro_batch)}
            assert words in names | {f"{near.mini_batch}.{near.micro_batch}"}
    assert any(labels_of(figure).values())
    check_inside(figure)
    check_labels(figure)


@pytest.mark.parametrize("variant", ALL)
def test_words_of_a_timeline_are_the_plans_figures(variant):
    """Idle shares and the period."""
    plan = chain_plan(variant)
    words = [text[-1] for text in Figure(timeline_svg(predicted(plan))).texts()]
    idle = [word for word in words if word.endswith("% idle")]
    assert idle == [f"{stage.idle_share:.0%} idle" for stage in plan.predicted.stages]
    assert [word for word in words if word.startswith("period ")]


@pytest.mark.parametrize("placement", [(0, 1, 0), (0, 1, 0, 1), (0, 1, 0, 1, 0, 1, 0, 1, 0, 1)])
def test_stages_of_a_device_are_told_apart(placement):
    """By rules along the upper edges of their operations, in grey as in colour, and by labels."""
    plan = chain_plan("timeprest", placement=placement, n=2)
    recording = predicted(plan, 4)
    figure = Figure(timeline_svg(recording, FigureSettings(width=1500, mini_batches=4)))
    check_inside(figure)
    rules = sorted(
        (float(found["x1"]), float(found["x2"]) - float(found["x1"]))
        for found, _ in figure.of("line")
        if found.get("class") == "stages"
    )
    tops = [y for _, y, _ in figure.lanes()]
    by_lane = [sorted(m for m in figure.marks() if m[2] == top) for top in tops]
    assert len(by_lane) == max(placement) + 1
    wanted = []
    for k, marks in enumerate(by_lane):
        spans = [span for span in recording.spans if span.lane == k and span.end_s > span.start_s]
        by_time = sorted((m for m in marks if m[3]), key=lambda mark: mark[1])
        assert len(by_time) == len(spans)
        for (kind, x, _, width, _), span in zip(by_time, spans, strict=True):
            assert kind == span.kind
            count = recording.lanes[k].stages.index(span.stage) % 4
            wanted += [(x, width)] * count
    assert [*chain.from_iterable(rules)] == pytest.approx(
        [*chain.from_iterable(sorted(wanted))], abs=0.02
    )
    words = [text[-1] for text in figure.texts()]
    most = max(len(lane.stages) for lane in recording.lanes)
    assert ("1st stage of a device" if most < 5 else "1st, 5th stage of a device") in words
    assert "2nd stage" in words
    # Five stages of a device are too short for labels here.
    for s, device in enumerate(placement if len(placement) < 5 else ()):
        alone = placement.count(device) == 1
        assert any(re.fullmatch(r"\d+\.\d" if alone else rf"{s}:\d+\.\d", word) for word in words)
    assert not {"1st stage of a device", "2nd stage"} & {
        text[-1] for text in Figure(timeline_svg(predicted(chain_plan("timeprest")))).texts()
    }


@pytest.mark.parametrize(
    ("most", "first", "second"),
    [
        (9, "1st, 5th, 9th stage of a device", "2nd, 6th stage"),
        (24, "1st, 5th, 9th, … stage of a device", "2nd, 6th, 10th, … stage"),
    ],
)
def test_every_stage_of_a_device_is_in_the_legend(most, first, second):
    lane = Lane("device0", tuple(range(most)), 0)
    spans = tuple(Span(0, k, "F", 0, None, k, k + 1.0, 0, None) for k in range(most))
    words = Figure(timeline_svg(Recording("x", "gpipe", (lane,), spans, (), (), 0.0))).texts()
    assert {first, second} <= {text[-1] for text in words}
    assert [ordinal(n) for n in (3, 11, 12, 21, 111)] == ["3rd", "11th", "12th", "21st", "111th"]


@pytest.mark.parametrize("variant", ["timeprest", "gpipe"])
def test_predicted_idle_has_one_answer(variant, tmp_path):
    """Table, simulation, page, figure and the times beside a run say the same."""
    plan = chain_plan(variant)
    write_file(tmp_path / "plan.json", plan)
    wanted = [f"{stage.idle_share:.0%}" for stage in plan.predicted.stages]
    shares = [times.idle_share for times in steady_times(plan)]
    assert shares == pytest.approx([stage.idle_share for stage in plan.predicted.stages])
    assert list(predicted(plan).idle_shares) == [s.idle_share for s in plan.predicted.stages]
    for command, column in (("show", "idle"), ("simulate", "idle, steady")):
        lines = called("tp-plan", command, tmp_path / "plan.json").splitlines()
        head = next(line for line in lines if column in line)
        end = head.index(column) + len(column)
        rows = lines[lines.index(head) + 2 :][: len(wanted)]
        assert [row[:end].split()[-1] for row in rows] == wanted


@pytest.mark.parametrize("variant", ALL)
def test_a_memory_figure_peaks_where_the_plan_does(variant):
    plan = chain_plan(variant)
    recording = predicted(plan)
    most = max(stage.memory_bytes for stage in plan.predicted.stages)
    text = memory_svg(recording, [round(most * 1.2)] * 3, FigureSettings(mini_batches=99))
    figure = Figure(text)
    check_inside(figure)
    lines = [float(f["y1"]) for f, _ in figure.of("line") if f.get("stroke") == "#c62828"]
    areas = defaultdict(list)
    for found, _ in figure.of("path"):
        ground = float(re.match(r"M[\d.]+ ([\d.]+)V", found["d"])[1])
        areas[ground].append(min(float(v) for v in re.findall(r"V([\d.]+)", found["d"])))
    limit_lines = sorted(lines)[-3:]
    for stage, ground, limit in zip(plan.predicted.stages, sorted(areas), limit_lines, strict=True):
        per_point = round(most * 1.2) / (ground - limit)
        peak = (ground - min(areas[ground])) * per_point
        assert peak == pytest.approx(stage.memory_bytes, abs=0.02 * per_point)


def test_a_limit_far_away_is_told_in_words():
    """A line at a thousand times what is held would flatten all the rest."""
    recording = predicted(chain_plan("gpipe"))
    near, far = (memory_svg(recording, [limit] * 3) for limit in (None, 2**50))
    assert "#c62828" not in far
    assert format_bytes(2**50) in far
    assert "limit" not in near


def test_numbers_of_memory_stand_beside_the_names():
    recording = predicted(chain_plan("gpipe"))
    factor = 2000 * 2**20 // max(sum(point.nbytes) for point in recording.memory)
    larger = [p._replace(nbytes=tuple(factor * n for n in p.nbytes)) for p in recording.memory]
    texts = Figure(memory_svg(replace(recording, memory=tuple(larger)), [None] * 3)).texts()
    (number, *_) = [left for left, *_, words in texts if words == "1000 MiB"]
    assert all(right < number for _, right, *_, words in texts if words.startswith("stage"))


@settings(max_examples=25)
@given(evaluated() | evaluated(placed=True))
def test_nothing_stands_outside_or_over_another(drawn):
    """Any system, replicas, links; on a column and on a page; as text, without scripts."""
    recording = predicted(make_plan(*drawn, REPORT), 6)
    for width, more in ((241, True), (504, False)):
        setting = FigureSettings(width=width, messages=more, versions=not more)
        text = timeline_svg(recording, setting)
        figure = Figure(text)
        check_inside(figure)
        check_labels(figure)
        check_inside(Figure(memory_svg(recording, [None] * len(recording.lanes), setting)))
        assert "<script" not in text
        assert "nan" not in text


@pytest.mark.parametrize("variant", ALL)
def test_versions_stand_below_the_labels(variant):
    """Forwards say theirs; backwards theirs, and their forward's where it is another."""
    recording = predicted(chain_plan(variant, 4))
    figure = Figure(timeline_svg(recording, FigureSettings(versions=True, width=800)))
    check_inside(figure)
    check_labels(figure)
    for width in (170.1, 241):
        check_inside(Figure(timeline_svg(recording, FigureSettings(versions=True, width=width))))
    _, spans = shown(recording, FigureSettings())
    known = {f"v{span.version}" for span in spans}
    changed = {
        f"v{span.forward_version}→v{span.version}"
        for span in spans
        if span.kind == "B" and span.forward_version != span.version
    }
    words = [text[-1] for text in figure.texts() if re.match(r"v\d", text[-1])]
    drawn = {word for word in words if "→" in word}
    assert drawn <= changed | {"v0→v1: that of the forward, that of the backward"}
    assert bool(drawn) == bool(changed)
    plain = {part for word in words if "→" not in word for part in word.split(", ")}
    assert plain
    assert plain <= known


def test_little_is_enough_for_a_figure():
    """Nothing recorded, or neither memory nor messages, as of a run whose log doesn't have them."""
    full = predicted(chain_plan("gpipe"), 1)
    empty = Recording("measured", "gpipe", full.lanes, (), (), (), 0.0)
    bare = Recording("measured", "gpipe", full.lanes, full.spans, (), (), full.period_s)
    for recording in (empty, bare):
        for text in (timelines_svg([("a run", recording)]), memory_svg(recording, [5] * 3)):
            check_inside(Figure(text))


def test_the_same_plan_gives_the_same_bytes():
    first, second = (
        (timeline_svg(r, FigureSettings(messages=True)), memory_svg(r, [2**20] * 3))
        for r in (predicted(chain_plan("timeprest")) for _ in range(2))
    )
    assert first == second


def test_messages_go_from_lane_to_lane():
    """Forward ones down, gradients up."""
    recording = predicted(chain_plan("pipedream"))
    setting = FigureSettings(messages=True, mini_batches=5)
    figure = Figure(timeline_svg(recording, setting))
    window, _ = shown(recording, setting)
    inside = [
        m for m in recording.messages if window.begin_s <= m.start_s and m.end_s <= window.end_s
    ]
    lines = [
        found
        for found, _ in figure.of("line")
        if found.get("stroke-width") == "0.4" and "stroke" in found
    ]
    assert len(lines) == len(inside) > 0
    # Between neighbours, they cross the gap alone.
    assert all(abs(float(line["y2"]) - float(line["y1"])) < 10 for line in lines)
    up = [line for line in lines if float(line["y2"]) < float(line["y1"])]
    assert len(up) == sum(m.backward for m in inside)
    assert all("stroke-dasharray" in line for line in up)


def wide(stages=64, n=256):
    """A plan of many micro-batches on many stages, as `gpipe` would run it; forward 1, backward 2
    ms."""
    period = 3e-3 * (n + stages - 1)
    spans, memory = [], []
    for s in range(stages):
        for b in range(3):
            for i in range(n):
                start = b * period + (s + i) * 1e-3
                spans.append(Span(s, s, "F", b, i, start, start + 1e-3, b, None))
                memory.append(MemoryPoint(s, start, (1000, 0, 0, 0, i, 0, 0, 0)))
            for i in range(n):
                start = b * period + (n + stages - 1 + 2 * (stages - 1 - s) + 2 * i) * 1e-3
                spans.append(Span(s, s, "B", b, i, start, start + 2e-3, b, b))
                memory.append(MemoryPoint(s, start, (1000, 0, 0, 0, n - i, 0, 0, 0)))
    lanes = tuple(Lane(f"stage {s}", (s,), 0) for s in range(stages))
    return Recording("predicted", "gpipe", lanes, tuple(spans), (), tuple(memory), period)


@pytest.mark.slow
def test_figures_of_large_plans_are_small():
    """What is too narrow is drawn together, as long as it was, and the figure says so."""
    recording = wide()
    text = timeline_svg(recording)
    assert len(text) < 200_000
    assert len(memory_svg(recording, [None] * len(recording.lanes))) < 500_000
    assert f"{len(recording.spans)} operations merged into" in text
    figure = Figure(text)
    check_inside(figure)
    window = window_of(recording, FigureSettings())
    _, top, width = figure.lanes()[7]
    drawn = Counter()
    for kind, _, y, mark, _ in figure.marks():
        drawn[kind] += mark if y == top else 0
    for kind, ms in (("F", 1), ("B", 2)):
        assert drawn[kind] == pytest.approx(3 * 256 * ms * 1e-3 / window.seconds * width, rel=0.02)


def test_several_timelines_share_a_scale():
    """A run above its plan: the same mini-batches, side by side from the same place."""
    plan = chain_plan("timeprest")
    recording = predicted(plan)
    figure = Figure(timelines_svg([("measured", recording), ("predicted", recording)]))
    check_inside(figure)
    lanes = figure.lanes()
    assert len(lanes) == 6
    assert len({(x, width) for x, _, width in lanes}) == 1
    marks = figure.marks()
    half = lanes[3][1]
    above = sorted(mark[:2] for mark in marks if mark[2] < half)
    assert above == sorted(mark[:2] for mark in marks if mark[2] >= half)
    assert {"measured", "predicted"} <= {text[-1] for text in figure.texts()}


def test_kinds_differ_in_grey():
    """By lightness or by a pattern, for every mini-batch."""

    def grey(colour):
        red, green, blue = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
        return 0.299 * red + 0.587 * green + 0.114 * blue

    assert has_pattern("W")
    plain = [kind for kind in SHADES if not has_pattern(kind)]
    bands = {kind: [grey(shade(kind, b)) for b in range(2)] for kind in plain}
    lightest_first = sorted(plain, key=lambda kind: -bands[kind][0])
    assert lightest_first == ["F", "B", "U"]
    for lighter, darker in pairwise(lightest_first):
        assert min(bands[lighter]) - max(bands[darker]) > 35
    plain = [kind for kind, paint in MEMORY.items() if paint.pattern == "plain"]
    levels = sorted(grey(memory_shade(kind)) for kind in plain)
    assert len(levels) == 4
    assert all(b - a > 30 for a, b in pairwise(levels))


@pytest.mark.parametrize(
    ("text", "points"), [("85", 240.94), ("85mm", 240.94), ("8.5cm", 240.94), ("241pt", 241)]
)
def test_widths_have_units(text, points):
    assert width_in_points(text) == pytest.approx(points, abs=0.01)


def test_a_run_stands_above_its_plan(tmp_path):
    """What was recorded of the steady state, and idle shares of whole mini-batches alone."""
    plan = chain_plan("pipedream")
    steady = predicted(plan, 5, first=10, more=5)
    svg = tmp_path / "run.svg"
    run = replace(steady, source="measured")
    write_run_figure([("measured", run), ("predicted", steady)], str(svg), 504)
    figure = Figure(svg.read_text(encoding="utf-8"))
    words = [text[-1] for text in figure.texts() if text[-1].endswith("% idle")]
    assert words == 2 * [f"{stage.idle_share:.0%} idle" for stage in plan.predicted.stages]
    assert figure.root.find(SVG + "desc").text.count("mini-batches 8 to 16") == 2


def test_show_writes_figures(tmp_path):
    """And says so; what is drawn is chosen as for the timeline on a terminal."""
    write_file(tmp_path / "plan.json", chain_plan("timeprest"))
    svg = tmp_path / "t.svg"
    drawn = ("--svg", svg, "--from-mini-batch", 2, "--mini-batches", 3)
    text = called("tp-plan", "show", tmp_path / "plan.json", *drawn)
    assert str(svg) in text.replace("\n", "")
    assert "mini-batches 2 to 4" in svg.read_text(encoding="utf-8")
    drawn = ("--svg", tmp_path / "many.svg", "--mini-batches", 10**5)
    assert "show some of the first" in called(
        "tp-plan", "show", tmp_path / "plan.json", *drawn, code=2
    )
    assert not (tmp_path / "many.svg").exists()


def test_compare_stacks_timelines(tmp_path):
    """On one axis, as many mini-batches of each; what the window cuts off ends with it."""
    names = []
    for variant in ("timeprest", "pipedream", "gpipe"):
        names.append(str(tmp_path / f"{variant}.json"))
        write_file(names[-1], chain_plan(variant))
    svg = tmp_path / "all.svg"
    compare = partial(called, "tp-plan", "compare")
    assert compare(*names, "--svg", svg, "--mini-batches", 4).endswith(f"wrote {svg}\n")
    text = svg.read_text(encoding="utf-8")
    assert text.count("mini-batches 0 to 3") == 3
    figure = Figure(text)
    bold = [words for _, look, words in figure.elements if look.get("font-weight") == "bold"]
    assert bold == ["timeprest", "pipedream", "gpipe"]
    lanes = [
        (float(look["y"]), float(look["x"]) + float(look["width"]))
        for name, look, _ in figure.elements
        if name == "rect" and look.get("fill") == "#f0f1f3" and float(look["x"]) > 1
    ]
    marks = [look for name, look, _ in figure.elements if look.get("class") in KINDS]
    assert marks
    for look in marks:
        ends = [right for y, right in lanes if y == float(look["y"])]
        assert float(look["x"]) + float(look["width"]) <= ends[-1] + 0.02
    compare(names[0], names[0], "--svg", svg)
    assert ">timeprest (2)<" in svg.read_text(encoding="utf-8")
    lone = compare(*names, "--mini-batches", 4, code=2)
    assert "--mini-batches: goes with --svg FILE" in lone


def test_files_are_written(tmp_path):
    """Options, the files they name, and limits by lane."""
    plan = chain_plan("gpipe", replicas=2)
    write_file(tmp_path / "plan.json", plan)

    show = partial(called, "tp-plan", "show", tmp_path / "plan.json")
    names = [str(tmp_path / name) for name in ("t.svg", "m.svg")]
    files = ("--svg", names[0], "--svg-memory", names[1], "--svg-width", "85mm")
    text = show(*files, "--from-mini-batch", 1, "--mini-batches", 2)
    assert [line for line in text.splitlines() if "wrote" in line] == [
        f"wrote {name}" for name in names
    ]
    for name in names:
        with open(name, encoding="utf-8") as file:
            root = ElementTree.fromstring(file.read())
        assert root.get("width") == "85mm"
        assert "mini-batches 1 to 2" in root.find(SVG + "desc").text
    assert len(limits(plan, predicted(plan, 2))) == 6
    old = [msgspec.structs.replace(stage, holds=None) for stage in plan.predicted.stages]
    told = msgspec.structs.replace(plan.predicted, stages=tuple(old))
    write_file(tmp_path / "plan.json", msgspec.structs.replace(plan, predicted=told))
    for words, why in (
        (["--svg-memory", names[1]], "--svg-memory: the plan doesn't say what its stages hold"),
        *((["--svg", names[0], "--svg-width", w], w) for w in ("wide", "3mm", "9000mm")),
        *(
            ([option, "u.PNG"], "u.PNG': figures are SVG or PDF; end the name in .svg or .pdf")
            for option in ("--svg", "--svg-memory")
        ),
    ):
        assert why in show(*words, code=2)
