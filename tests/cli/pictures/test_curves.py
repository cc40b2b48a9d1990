"""Curves of runs as figures and tables, time to accuracy, and figures as PDF."""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from xml.etree import ElementTree

import click
import pytest
from timeprest.cli.pictures.curves import (
    AXES,
    TRAINING,
    CurvePoint,
    CurveTarget,
    RunCurve,
    as_csv,
    axes_of,
    curves_of,
    read_target,
    target_figures,
    thinned,
)
from timeprest.cli.pictures.svg.curves import curves_svg
from timeprest.cli.pictures.svg.options import write_curves, write_figure
from timeprest.profiles.errors import FileError, UserError
from timeprest.profiles.files import Kind, check_output, write_bytes

SVG = "{http://www.w3.org/2000/svg}"


def figures(name="first", system="timeprest", losses=(2.0, 1.0, None, 0.5), mode="processes"):
    return {
        "name": name,
        "variant": system,
        "mode": mode,
        "losses": list(losses),
        "loss_seconds": [0.5 * (k + 1) for k in range(len(losses))],
        "epochs": [
            {"mini_batches": 2, "seconds": 1.0, "test": {"loss": 1.5, "accuracy": 0.4}},
            {"mini_batches": 4, "seconds": 2.0, "test": {"loss": 0.7, "accuracy": 0.9}},
        ],
    }


def texts(svg):
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_curves_are_those_of_the_run():
    training, loss, accuracy = curves_of(figures(), 2)
    assert [curve.quantity for curve in (training, loss, accuracy)] == [
        TRAINING,
        "test loss",
        "test accuracy",
    ]
    assert [(p.mini_batches, p.epochs, p.seconds) for p in training.points] == [
        (1, 0.5, 0.5),
        (2, 1.0, 1.0),
        (3, 1.5, 1.5),
        (4, 2.0, 2.0),
    ]
    assert math.isnan(training.points[2].value)
    assert [(p.epochs, p.value) for p in accuracy.points] == [(1.0, 0.4), (2.0, 0.9)]
    assert [p.at(axis) for axis in AXES for p in accuracy.points] == [2, 4, 1, 2, 1, 2]
    assert curves_of({**figures(losses=()), "epochs": []}, None) == ()


def test_evaluations_within_epochs_are_drawn():
    often = [
        {"mini_batches": k, "seconds": k / 2, "test": {"loss": 2.0 - k / 4}} for k in (1, 2, 3, 4)
    ]
    (_, loss) = curves_of({**figures(), "evaluations": often}, 4)
    assert [point.epochs for point in loss.points] == [0.25, 0.5, 0.75, 1.0]


def test_a_target_is_reached_at_the_first_point_that_is_there():
    curves = (*curves_of(figures(), 2), *curves_of(figures("slow", "gpipe"), 2))
    reached = read_target("accuracy=0.9", curves).reached(curves)
    assert {run: point.mini_batches for run, point in reached.items()} == {"first": 4, "slow": 4}
    assert read_target("test loss=1.5", curves).reached(curves)["first"].mini_batches == 2
    missed = read_target("accuracy=0.95", curves)
    assert target_figures(missed, curves) == {
        "quantity": "test accuracy",
        "value": 0.95,
        "reached": {"first": None, "slow": None},
    }
    done = target_figures(CurveTarget(TRAINING, 0.6), curves)["reached"]["first"]
    assert done == {"mini_batches": 4, "epochs": 2.0, "seconds": 2.0}
    assert read_target(None, curves) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("accuracy", "'accuracy': write it like accuracy=0.9"),
        ("accuracy=much", "write it like accuracy=0.9"),
        ("accuracy=nan", "write it like accuracy=0.9"),
        ("f1=0.9", "no run has it; there is training loss, test loss, test accuracy"),
    ],
)
def test_a_target_that_says_nothing_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        read_target(text, curves_of(figures(), 2))


def test_axes_are_listed():
    assert axes_of("seconds, epochs") == ("seconds", "epochs")
    with pytest.raises(click.BadParameter, match="'hours': choose of mini-batches, epochs, sec"):
        axes_of("hours")


def test_the_table_has_all_points():
    rows = list(csv.DictReader(io.StringIO(as_csv(curves_of(figures('a "b"'), 2)))))
    assert len(rows) == 8
    assert rows[0] == {
        "run": 'a "b"',
        "system": "timeprest",
        "quantity": TRAINING,
        "epochs": "0.5",
        "mini_batches": "1",
        "seconds": "0.5",
        "value": "2.0",
    }
    assert rows[2]["value"] == ""


def test_of_many_points_means_are_drawn():
    points = tuple(CurvePoint(k + 1, k / 10, k / 100, float(k)) for k in range(10))
    thin, width = thinned(RunCurve("a", "gpipe", TRAINING, points), 4)
    assert width == 3
    assert [point.value for point in thin.points] == [1, 4, 7, 9]
    assert [point.mini_batches for point in thin.points] == [3, 6, 9, 10]
    assert thinned(thin, 4) == (thin, 1)


def test_the_figure_has_a_panel_for_each_quantity_and_axis():
    curves = (*curves_of(figures(), 2), *curves_of(figures("slow", "gpipe"), 2))
    svg = curves_svg(curves, ("epochs", "seconds"), 400)
    assert svg == curves_svg(curves, ("epochs", "seconds"), 400)
    words = texts(svg)
    assert words[:2] == ["timeprest", "gpipe"]
    assert words.count("epochs") == words.count("seconds of training") == 3
    assert "test accuracy" in words
    assert "test loss (logarithmic)" in words
    root = ElementTree.fromstring(svg)
    # A loss that wasn't a number is a gap: two points are left of it and one right.
    lines = [path.get("d") for path in root.iter(f"{SVG}path")]
    assert len(lines) == 2 * 3 * 2
    assert all(line.count("L") == 1 for line in lines)
    x = [float(at) for at in re.findall(r"[ML]([\d.]+) ", lines[-1])]
    assert 200 < x[0] < x[1] <= 400


def test_no_two_of_many_runs_look_alike():
    curves = [c for k in range(14) for c in curves_of(figures(f"run {k}", "gpipe"), 2)]
    drawn = re.findall(r'<line [^>]*stroke-width="0.8"[^>]*>', curves_svg(curves, AXES, 500))
    root = [ElementTree.fromstring(line) for line in drawn]
    looks = {(line.get("stroke"), line.get("stroke-dasharray")) for line in root}
    assert len(looks) == len(drawn) == 14


def test_a_target_is_marked():
    curves = curves_of(figures(), 2)
    svg = curves_svg(curves, ("epochs",), 300, CurveTarget("test accuracy", 0.9))
    assert "target test accuracy 0.9: timeprest after 4 mini-batches;" in svg
    never = curves_svg(curves, ("epochs",), 300, CurveTarget("test accuracy", 0.99))
    assert "timeprest not reached;" in never
    mark = 'stroke="#1f5fbf" stroke-width="0.6"'
    assert (svg.count(mark), never.count(mark)) == (1, 0)


def test_what_curves_dont_show_is_said():
    several = (*curves_of(figures(mode="inline"), 2), *curves_of(figures("b", "gpipe"), 2))
    words = "inline: all stages took turns, so its seconds aren't a pipeline's"
    below = f"timeprest: {words}; training loss: 1 of 4 aren't finite"
    assert below in texts(curves_svg(several, ("seconds",), 400))
    assert words not in curves_svg(several, ("mini-batches",), 400)
    long = curves_of(figures(losses=[1.0 + k for k in range(1000)]), 10)
    assert "timeprest: training loss: means of 7 mini-batches" in texts(
        curves_svg(long, ("epochs",), 500)
    )


@pytest.mark.parametrize(
    "values", [(1e-4, 3.0), (2.31, 2.29), (5.0, 5.0), (0.0, 1.0), (-1, 1), (5e-324, 1.7e308)]
)
def test_numbers_stand_beside_every_axis(values):
    """Many decades, a part of one, nothing, and what has no logarithm."""
    points = tuple(CurvePoint(k + 1, k + 1.0, k + 1.0, value) for k, value in enumerate(values))
    svg = curves_svg([RunCurve("a", "gpipe", TRAINING, points)], ("epochs",), 300)
    numbers = [text for text in texts(svg) if re.fullmatch(r"-?[\d.e-]+", text)]
    across = [text for text in numbers if float(text) in (0, 0.5, 1, 1.5, 2)]
    assert len(numbers) - len(across) >= 1 or values[0] in (0.0, -1)
    assert "nan" not in svg


@pytest.mark.parametrize(("quantity", "least"), [(TRAINING, 0.7), ("test accuracy", -3e10)])
def test_what_blows_up_has_numbers_that_fit(quantity, least):
    points = (CurvePoint(1, 1.0, 1.0, least), CurvePoint(2, 2.0, 2.0, 6e10))
    svg = curves_svg([RunCurve("a", "gpipe", quantity, points)], ("epochs",), 300)
    upright = re.findall(r'<text x="27.5"[^>]*>([^<]+)<', svg)
    assert len(upright) > 2
    assert max(map(len, upright)) <= 7


@pytest.mark.parametrize("high", [0.95, 0.99, 1.0, 1.15, 1.9, 3.9, 7.9])
def test_a_scale_has_two_numbers_at_the_least(high):
    points = (CurvePoint(1, 1.0, 1.0, 0.13), CurvePoint(2, 2.0, 2.0, high))
    svg = curves_svg([RunCurve("a", "gpipe", "test accuracy", points)], ("epochs",), 300)
    upright = re.findall(r'<text x="27.5"[^>]*>[\d.]+<', svg)
    assert len(upright) >= 2


def test_files_are_what_their_names_say(tmp_path):
    curves = curves_of(figures(), 2)
    paths = [str(tmp_path / f"curves.{end}") for end in ("svg", "csv", "pdf")]
    for path, kind in zip(paths, (Kind.FIGURE, Kind.CURVES, Kind.FIGURE), strict=True):
        for _ in range(2):
            check_output(path, kind)
            write_curves(path, curves, ("epochs",), 241.0)
    with open(paths[0], encoding="utf-8") as file:
        assert file.read() == curves_svg(curves, ("epochs",), 241.0)
    with open(paths[1], encoding="utf-8") as file:
        assert file.read() == as_csv(curves)
    with open(paths[2], "rb") as file:
        pdf = file.read()
    assert pdf.startswith(b"%PDF-")
    # Of the same size, in points.
    assert re.search(rb"MediaBox ?\[0 0 241 ", pdf)
    with pytest.raises(FileError, match=r"curves.csv: isn't overwritten: a table \(CSV\) of cur"):
        check_output(paths[1], Kind.FIGURE)
    write_bytes(tmp_path / "foreign.pdf", b"%PDF-1.7\nsomebody's\n%%EOF\n")
    with pytest.raises(FileError, match=r"foreign.pdf: isn't overwritten: a file of another kind"):
        check_output(tmp_path / "foreign.pdf", Kind.FIGURE)
    with pytest.raises(UserError, match=r"--curves none.svg: no mini-batch is done yet"):
        write_curves("none.svg", (), ("epochs",), 241.0)


def test_pdf_says_what_it_takes(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    path = tmp_path / "figure.pdf"
    with pytest.raises(UserError, match=r"figure.pdf: PDF takes the package vl-convert-python: "):
        write_figure(str(path), "<svg/>")
    assert not path.exists()
