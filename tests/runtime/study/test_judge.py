"""tp-plan solve --study: plans judged by their time to a study's target."""

from __future__ import annotations

import json
from functools import partial

import msgspec
import pytest
from helpers.by_hand.profiles import chain
from helpers.by_hand.studies import PLAIN_ARM, STEPS, arm, study
from helpers.output.commands import called
from timeprest.planner.plan import read_plan
from timeprest.profiles.files import write_file
from timeprest.runtime.study.figures.study import write_study

call = partial(called, "tp-plan")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a profile of eight equal layers."""
    write_file(tmp_path / "profile.json", chain(8, parameters=1000, saved=100))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def planned(name, **more):
    """All systems' plans, and a study of two of them: one 1.3 times as slow in samples, the other
    never there."""
    words = [word for option, value in more.items() for word in (f"--{option}", value)]
    call("solve", "profile.json", "--variant", "all", *words, "-o", "p.json")
    plans = {v: read_plan(f"p.{v}.json") for v in ("v-timeprest", "pipedream")}
    arms = [PLAIN_ARM, arm("v-timeprest", (1.3, 1.43, 1.17)), arm("pipedream", (2, 2, 2))]
    mini_batch = plans["pipedream"].mini_batch
    found = study(arms, dict.fromkeys(plans, 1.0), plans=plans, mini_batch=mini_batch)
    write_study(name, found)
    return words


def test_plans_are_judged_by_a_study(folder):
    words = planned("study.json", bandwidth="100MB/s")
    solve = ("solve", "profile.json", "--variant", "all", *words, "--study", "study.json")
    found = json.loads(call(*solve, "-o", "best.json", "--json"))
    points = found["by_study"]["points"]
    times = [point["time_s"]["mean"] for point in points]
    assert times == sorted(times)
    best, chosen = points[0], read_plan("best.json")
    assert (chosen.variant, chosen.micro_batches) == (best["variant"], best["micro_batches"])
    assert chosen.predicted.period_s == best["period_s"]
    for point in points:
        overhead = 1.3 if point["variant"] == "v-timeprest" and point["stages"] > 1 else 1
        expected = overhead * STEPS * point["period_s"]
        assert point["time_s"]["mean"] == pytest.approx(expected, rel=0.03)
    # On the front nothing is beaten in time to target and memory.
    prices = [(point["time_s"]["mean"], point["memory_bytes"]) for point in points]
    for point, (time, memory) in zip(points, prices, strict=True):
        beaten = any(t <= time and m <= memory and (t, m) != (time, memory) for t, m in prices)
        assert point["on_front"] == (not beaten)
    without, *_ = found["by_study"]["without_figure"]
    text = call(*solve, "-o", "best.json")
    assert "Pareto front of time to target and memory" in text
    assert "don't reach the target in the study, or with other stages: pipedream\n" in text
    assert f"the study has no figure for: {without}, " in text
    assert "wrote best.json (the best by time to target)" in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_study_of_something_else_is_refused(folder):
    planned("study.json")
    solve = ("solve", "profile.json", "--variant", "all", "--study")
    assert "not 2" in call(*solve, "study.json", "--mini-batch", 2, code=2)
    assert "--variant all" in call("solve", "profile.json", "--study", "study.json", code=2)
    assert "not a study file" in call(*solve, "profile.json", code=2)
    assert "tp-run study" in call(*solve, "none.json", code=2)
    other = msgspec.structs.replace(chain(8, parameters=1000, saved=100), fingerprint="another")
    write_file("profile.json", other)
    assert "another model" in call(*solve, "study.json", code=2)
