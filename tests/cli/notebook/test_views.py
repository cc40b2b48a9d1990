"""Profiles, plans and runs load, save and show themselves, alone and side by side."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import msgspec
import pytest
import timeprest
from helpers.plans import plan_by_hand, with_times
from timeprest import Plan, Profile, Run
from timeprest.profiles.errors import FileError, UserError


@pytest.fixture(scope="module")
def profile(mlp_profile):
    return with_times(mlp_profile)


@pytest.fixture(scope="module")
def plans(profile):
    return [plan_by_hand(profile, name, 2, n) for name, n in (("timeprest", 2), ("gpipe", 2))]


@pytest.fixture(scope="module")
def runs(plans, mlp_target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    task = mlp_target.replace("MLPTask", "ShortEpochs")
    return [
        timeprest.run(plan, folder / plan.variant, task=task, epochs=2, inline=True)
        for plan in plans
    ]


def parts(shown):
    """Title, head and rows of what a notebook would show, and its figure; all well-formed."""
    text = shown._repr_html_()
    root = ElementTree.fromstring(text.replace("&nbsp;", " "))
    assert "<?xml" not in text
    assert not re.search(r"<script|https?://(?!www\.w3\.org)", text)
    cells = [["".join(c.itertext()) for c in row] for row in root.iter("tr")]
    figure = root.find("{http://www.w3.org/2000/svg}svg")
    facts = [d.text for d in root.findall("div")]
    return root.find("b").text, cells[0], cells[1:], facts, figure


def test_files_there_and_back(profile, plans, tmp_path):
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == profile
    plans[0].save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plans[0]
    with pytest.raises(FileError, match="not a profile file"):
        Profile.load(tmp_path / "plan.json")
    # What a file has is what it always had; the rest is there where there is something to say.
    assert set(msgspec.json.decode((tmp_path / "plan.json").read_bytes())) == {
        "format",
        *(f.encode_name for f in msgspec.structs.fields(Plan) if f.default is not msgspec.UNSET),
    }


def test_files_are_written_over_their_own_kind_alone(profile, plans, tmp_path):
    path, text = tmp_path / "made.json", tmp_path / "notes.txt"
    profile.save(path)
    profile.save(path)
    text.write_text("keep me")
    refused = [
        (plans[0], path, "made.json: isn't overwritten: a profile stands there, and this would be"),
        (plans[0], text, "notes.txt: isn't overwritten: a file of another kind stands there"),
        (profile, text, "notes.txt: isn't overwritten: a file of another kind stands there"),
    ]
    for shown, place, why in refused:
        with pytest.raises(FileError, match=why):
            shown.save(place)
    assert Profile.load(path) == profile
    assert text.read_text() == "keep me"
    plans[0].save(tmp_path / "plan.json")
    plans[1].save(tmp_path / "plan.json")
    with pytest.raises(FileError, match="a plan stands there"):
        profile.save(tmp_path / "plan.json")


def test_a_run_there_and_back(runs, tmp_path):
    run = runs[0]
    run.save(tmp_path / "copy")
    copy = Run.load(tmp_path / "copy")
    assert (copy.plan, copy.settings, copy.summary) == (run.plan, run.settings, run.summary)
    assert copy.losses == run.losses
    assert len(run.losses) == run.summary.mini_batches == 10
    assert copy.weights().keys() == run.weights().keys()
    assert repr(copy) == f"Run('{tmp_path}/copy')"
    with pytest.raises(FileError, match="is there already"):
        run.save(tmp_path / "copy")
    with pytest.raises(FileError, match="holds no run"):
        Run.load(tmp_path)
    (tmp_path / "copy" / "summary.json").unlink()
    assert copy.summary is None


def test_a_profile_shows_its_layers(profile, capsys):
    title, head, rows, facts, figure = parts(profile)
    assert title.endswith(f"MLPTask: {len(profile.layers)} layers")
    assert head[:3] == ["layer", "kind", "parameters"]
    assert [row[0] for row in rows] == [layer.name for layer in profile.layers]
    assert "micro-batch of 8" in facts[0]
    assert figure is None
    profile.show()
    assert "whole model" in capsys.readouterr().out
    first = msgspec.structs.replace(profile.layers[0], frozen_bytes=2048)
    layers = first, *profile.layers[1:]
    facts = parts(msgspec.structs.replace(profile, layers=layers))[3]
    assert "that are trained, 2.0 KiB that are frozen, forward" in facts[0]


def test_a_plan_shows_its_stages_and_its_timeline(profile, plans, capsys):
    title, head, rows, facts, figure = parts(plans[0])
    assert title == "timeprest: 2 stages on 2 devices, mini-batch of 8 in 2 micro-batches"
    assert len(rows) == 2
    assert len(head) == len(rows[0])
    assert facts[0].startswith("period ")
    assert len(list(figure.iter("{http://www.w3.org/2000/svg}rect"))) > 10
    plans[0].show()
    printed = capsys.readouterr().out
    assert "period" in printed
    assert "0F0.0 0F0.1" in printed
    replicated = plan_by_hand(profile, "gpipe", 2, 2, replicas=[2, 1])
    assert [row[2] for row in parts(replicated)[2]] == ["device0–1 (2)", "device2"]


def test_a_run_shows_its_epochs(runs, capsys):
    title, head, rows, facts, _ = parts(runs[0])
    assert title.endswith("ShortEpochs with timeprest")
    assert head[:2] == ["epoch", "mini-batches"]
    assert head[-1] == "test loss"
    assert [row[:2] for row in rows] == [["1", "5"], ["2", "5"]]
    assert rows[0][-1] == f"{runs[0].epochs[0].test['loss']:.4g}"
    assert facts[0].startswith("period predicted")
    runs[0].show()
    assert "after 10 mini-batches (epoch 2)" in capsys.readouterr().out


def test_side_by_side(profile, plans, runs, capsys):
    _, head, rows, _, figure = parts(plans[0].compare(*plans[1:]))
    assert [row[0] for row in rows] == ["timeprest", "gpipe"]
    assert head[4] == "period"
    told = [t.text for t in figure.iter("{http://www.w3.org/2000/svg}text")]
    # One above the other, on one axis.
    assert told.index("timeprest") < told.index("gpipe")
    _, _, rows, _, _ = parts(plans[0].compare(plans[0]))
    assert [row[0] for row in rows] == ["timeprest (1)", "timeprest (2)"]
    _, head, rows, _, figure = parts(runs[0].compare(runs[1]))
    told = [t.text for t in figure.iter("{http://www.w3.org/2000/svg}text")]
    assert told.index("timeprest") < told.index("gpipe")
    assert [row[:3] for row in rows] == [
        ["timeprest", "timeprest", "10"],
        ["gpipe", "gpipe", "10"],
    ]
    assert head[-2:] == ["train loss", "test loss"]
    twice = msgspec.structs.replace(profile, layers=with_times(profile, shares=None).layers)
    _, head, rows, _, _ = parts(profile.compare(twice))
    assert len(head) == 3
    assert rows[0][0] == "whole model"
    assert rows[1][2].endswith("(1.00 ×)")
    comparison = plans[0].compare(plans[1])
    comparison.show()
    printed = capsys.readouterr().out
    assert "timeprest" in printed
    assert "gpipe" in printed
    with pytest.raises(UserError, match="alone, not Plan, Profile"):
        plans[0].compare(profile)


def test_names_in_tables_are_text(profile):
    odd = msgspec.structs.replace(profile, target="<script>alert(1)</script>\x1b[2J")
    title, *_ = parts(odd)
    assert title.startswith("<script>alert(1)</script>")
    assert "\x1b" not in odd._repr_html_()
