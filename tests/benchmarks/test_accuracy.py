"""Predictions of others' runs: of small tables of our own, and of Sailor's where they are."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from math import inf

import pytest
import timeprest
from helpers.paths import published
from timeprest.planner.costs.stage_costs import Costs
from timeprest.profiles.errors import FileError
from timeprest.tests.benchmarks.accuracy.calibrate import Calibration
from timeprest.tests.benchmarks.accuracy.others import ccl_bench, titan
from timeprest.tests.benchmarks.accuracy.page import (
    by_run,
    doubted,
    foretold,
    halves,
    judged,
    own,
    spread,
    summary,
)
from timeprest.tests.benchmarks.accuracy.races import raced
from timeprest.tests.benchmarks.accuracy.rivals import naive_s, sailors_s
from timeprest.tests.benchmarks.accuracy.sailor import Figures, Reckoned, read_runs, read_tables

SAMPLES_S = {"fast": (0.010, 0.020), "slow": (0.015, 0.030)}
"""Of a block, by GPU: forward and backward of a sample."""


def fact(parameters, kept):
    return {"params_floats": parameters, "act_output_floats": 250_000, "act_mem_floats": kept}


def tables(folder, blocks=4):
    """A model of blocks between two ends, on two kinds of GPU; links of 1 GB/s."""
    layers = range(blocks + 2)
    facts = {str(k): fact(1_000_000 if k in (0, blocks + 1) else 500_000, 750_000) for k in layers}
    profiles = {
        gpu: {
            str(size): {
                "2": {str(k): [f * size, b * size, 0.002] for k in layers},
            }
            for size in (1, 4)
        }
        for gpu, (f, b) in SAMPLES_S.items()
    }
    curve = {gpu: {"2": [[0.0, 0.0, 1.0], 1e9], "1": [[0.0, 0.0, 1.0], 1e9]} for gpu in profiles}
    ends = {gpu: {count: {"here": curve} for count in "12"} for gpu in profiles}
    write(folder / "profiles_tmp.json", {"net": profiles})
    write(folder / "llm_info.json", {"net": {"1": facts, "2": facts}})
    write(folder / "multizone_bandwidths_het.json", {"here": ends})
    return read_tables(folder)


def write(path, what):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(what), encoding="utf-8")


def run(folder, name, stages, gpus, micro_batch, mini_batch, **measured):
    """A run's file; `gpus`: per stage, of each replica."""
    borders = [round(k * 6 / stages) for k in range(stages + 1)]
    layers = [list(range(a, b)) for a, b in pairwise(borders)]
    groups = [[[[[gpu, 2, "here"]], 2] for gpu in mine] for mine in gpus]
    pipeline = {"layers_per_stage": layers, "tmp_per_stage": groups, "dp": [len(m) for m in gpus]}
    found = {"real": 1.0, **measured, "mbs": micro_batch, "gbs": mini_batch}
    write(folder / f"{name}.json", {**found, "pipeline_list": [pipeline]})


def test_a_run_is_reckoned_by_its_tables(tmp_path):
    known = tables(tmp_path)
    run(tmp_path / "runs", "one", 1, [["fast"]], 4, 8)
    run(tmp_path / "runs", "two", 2, [["fast", "slow"], ["slow", "slow"]], 1, 8)
    one, two = (Reckoned(known, each) for each in read_runs(tmp_path / "runs", known)[0])
    # The update was timed on two blocks and both ends: 3 M of 4 M parameters.
    assert one.period_s() == pytest.approx(2 * 6 * 4 * 0.030 + 0.002 * 4 / 3)
    assert two.pipeline.forward_s == pytest.approx((3 * 0.015, 3 * 0.015))
    assert two.pipeline.paces == ((pytest.approx(2 / 3), 1.0), (1.0, 1.0))
    assert two.pipeline.links[0].forward_s == pytest.approx(1e6 / 1e9)
    # Two ranks of 2 M floats each, half of it passed on twice.
    assert two.pipeline.all_reduce_s == pytest.approx((2 * 2e6 * 4 * 2 / 2 / 1e9,) * 2)
    slower = two.period_s(Figures(receive_bytes_per_s=1e9))
    assert slower > two.period_s() > 4 * 3 * 0.045
    held = 4 * 2e6 * (2 + 2 + 2) + 2 * 3 * 750_000 * 4
    assert two.memory_bytes() == held
    assert two.memory_bytes(Figures(context_bytes=5.0, cached=2.0)) == held + 2 * 9e6 + 5


def test_sizes_between_those_measured_lie_on_a_line(tmp_path):
    known = tables(tmp_path)
    run(tmp_path, "between", 1, [["fast"]], 2, 2)
    run(tmp_path, "beyond", 1, [["fast"]], 8, 8)
    (between,), lines = read_runs(tmp_path, known)
    assert Reckoned(known, between).period_s() == pytest.approx(6 * 2 * 0.030 + 0.002 * 4 / 3)
    assert lines == [
        "beyond: not predicted: no profile of net on fast, 2 ranks, has a micro-batch of 8, or one "
        "on either side"
    ]


def test_no_run_is_judged_by_figures_it_had_part_in(tmp_path):
    known = tables(tmp_path)
    for name, stages, size in (("a", 2, 1), ("b", 2, 1), ("c", 3, 1), ("d", 2, 4)):
        run(tmp_path, name, stages, [["fast"]] * stages, size, 16, max_mem=10**9, red_grads=0.0)
    run(tmp_path, "e", 2, [["slow"]] * 2, 1, 16)
    a, b, c, d, e = read_runs(tmp_path, known)[0]
    calibration = Calibration(known, [a, b, c, d, e])
    assert calibration.known_by(a) == [c, d]
    assert calibration.known_by(c, "smaller") == [a, b, d]
    assert calibration.known_by(e, "elsewhere") == [a, b, c, d]
    assert calibration.known_by(e) == []
    # Memory alone is known by another cluster.
    figures = calibration.figures(e)
    assert figures == Figures(context_bytes=figures.context_bytes)


def test_a_receives_cost_is_found_again(tmp_path):
    known = tables(tmp_path)
    truth = Figures(10 ** (190 / 20), 1.0, 0.0, 2e9, 1.25)
    for name, stages, size in (("a", 2, 1), ("b", 3, 1), ("c", 3, 4), ("d", 6, 1), ("e", 2, 4)):
        run(tmp_path, name, stages, [["fast"]] * stages, size, 48)
        (plain,) = (r for r in read_runs(tmp_path, known)[0] if r.name == name)
        reckoned = Reckoned(known, plain)
        measured = {"real": reckoned.period_s(truth), "max_mem": reckoned.memory_bytes(truth)}
        run(tmp_path, name, stages, [["fast"]] * stages, size, 48, **measured)
    calibration = Calibration(known, read_runs(tmp_path, known)[0])
    found = list(judged(calibration))
    for each in found:
        figures = calibration.figures(each.run)
        assert figures.receive_bytes_per_s == truth.receive_bytes_per_s
        assert figures.context_bytes == pytest.approx(2e9, rel=1e-6)
        assert each.periods["sums"] == pytest.approx(0, abs=1e-9)
        assert each.memory == pytest.approx(0, abs=1e-9)
    assert by_run(found).count("\n") == 2 + len(found) - 1
    drawn = halves(calibration, 2)
    assert drawn.periods == drawn.memory == []
    assert "100" not in summary(found, drawn)


def test_what_cant_be_read_is_one_line(tmp_path):
    with pytest.raises(FileError, match="profiles_tmp"):
        read_tables(tmp_path)
    known = tables(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(FileError, match="has no measured runs"):
        read_runs(tmp_path / "runs", known)
    (tmp_path / "runs" / "bad.json").write_text("{")
    with pytest.raises(FileError, match=r"bad\.json: can't be read"):
        read_runs(tmp_path / "runs", known)
    (tmp_path / "llm_info.json").unlink()
    with pytest.raises(FileError, match=r"llm_info\.json: isn't there"):
        read_tables(tmp_path)
    # Tables may be those of another folder.
    tables(tmp_path / "fit")
    assert read_tables(tmp_path / "fit" / "runs", tmp_path).profiles == known.profiles


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"real": 0}, "`$.real`"),
        ({"real": "1.5"}, "`$.real`"),
        ({"mbs": None}, "`$.mbs`"),
        ({"max_mem": -1}, "`$.max_mem`"),
        ({"pipeline_list": []}, "0 pipelines"),
        ({"layers_per_stage": [[0, 1, 2], [4, 5]]}, "all layers in a row"),
        ({"layers_per_stage": [[0, 1, 2], [3, 4]]}, "0 models of 5 layers on fast"),
        ({"tmp_per_stage": [[[[["fast", 2, "here"]], 2]]]}, "with replicas of each"),
        ({"gpus": [["new", 2, "here"]]}, "0 models of 6 layers on new"),
        ({"gpus": [["fast", 2, "mars"]]}, "multizone_bandwidths_het.json has no mars"),
        ({"gpus": [["fast", 1, "here"], ["slow", 1, "here"]]}, "2 kinds of GPUs"),
        ({"gpus": [["fast", 2]]}, "tmp_per_stage"),
        ({"ranks": 4}, "no profile of net on fast, 4 ranks"),
    ],
)
def test_a_run_that_cant_be_predicted_is_a_line_and_the_others_are(tmp_path, what, why):
    known = tables(tmp_path)
    run(tmp_path / "runs", "good", 2, [["fast"], ["fast"]], 1, 8)
    run(tmp_path / "runs", "odd", 2, [["fast"], ["fast"]], 1, 8)
    path = tmp_path / "runs" / "odd.json"
    said = json.loads(path.read_text())
    (pipeline,) = said["pipeline_list"]
    for name, value in what.items():
        if name in ("gpus", "ranks"):
            pipeline["tmp_per_stage"][0][0][name == "ranks"] = value
        else:
            (pipeline if name in pipeline else said)[name] = value
    path.write_text(json.dumps(said), encoding="utf-8")
    runs, (line,) = read_runs(tmp_path / "runs", known)
    assert [each.name for each in runs] == ["good"]
    assert line.startswith("odd: not predicted: ")
    assert why in line
    (alone,) = judged(Calibration(known, runs))
    assert "By their tables alone, as no other run is of their cluster: good." in doubted([alone])


def test_memory_is_known_by_other_clusters_where_a_cluster_says_too_little(tmp_path):
    known = tables(tmp_path)
    truth = Figures(context_bytes=2e9, cached=1.25)
    for k, gpu, size in (
        (0, "fast", 1),
        (1, "fast", 2),
        (2, "fast", 4),
        (3, "fast", 3),
        (4, "slow", 4),
    ):
        run(tmp_path, f"{k}", 1, [[gpu]], size, 48)
        (plain,) = (r for r in read_runs(tmp_path, known)[0] if r.name == f"{k}")
        seen = Reckoned(known, plain).memory_bytes(truth)
        run(tmp_path, f"{k}", 1, [[gpu]], size, 48, max_mem=seen)
    run(tmp_path, "5", 1, [["slow"]], 1, 48)
    calibration = Calibration(known, read_runs(tmp_path, known)[0])
    figures = calibration.figures(calibration.runs[5])
    # One run of its own: as steep as the others', through that one.
    assert figures.cached == pytest.approx(1.25)
    assert figures.context_bytes == pytest.approx(2e9)


def test_the_runs_of_another_folder_go_before_a_folders_own(tmp_path):
    known = tables(tmp_path / "all")
    for name, stages, size in (("a", 2, 1), ("b", 3, 1), ("c", 2, 4)):
        run(tmp_path / "all" / "validation", name, stages, [["fast"]] * stages, size, 16)
    run(tmp_path / "few", "a", 2, [["fast"]] * 2, 1, 16)
    (a,), (others, _) = read_runs(tmp_path / "few", known)[0], read_runs(tmp_path / "all", known)
    calibration = Calibration(known, [a], others)
    # Itself is there, too.
    assert [each.name for each in calibration.known_by(a)] == ["b", "c"]
    assert not calibration.doubts[a]


def test_one_run_says_something_of_another():
    # 8 stages and as many micro-batches: 15 / 8 of the work, or 11.5 / 8 in two rounds of stages.
    ratio = titan()
    assert ratio.predicted == pytest.approx(15 / 11.5)
    found = list(ccl_bench())
    assert found[0].predicted == pytest.approx(0.4866 / 9 * 19 / 2)
    # Sums over 4 replicas take 3 / 2 times those over 2.
    sums_s = 5.889 - 4 * 0.4866 * 2 / 9
    assert found[2].predicted == pytest.approx(1.5 * sums_s + 2 * 0.4743 * 2 / 5)
    assert foretold([ratio, *found]).count("\n") == 2 + len(found)


def test_our_races_are_summed_up():
    found = list(raced())
    assert len(found) > 40
    assert spread(each.error for each in found if not each.shared).median < 0.05
    assert "all but shared" in own(found)


@pytest.mark.slow
def test_sailors_runs_are_predicted():
    known = read_tables(published("sailor"))
    runs, _ = read_runs(published("sailor"), known)
    found = list(judged(Calibration(known, runs)))
    trusted = [each for each in found if "period" not in each.doubts]
    assert len(trusted) >= len(runs) - 2
    for name, most in (("sums", (0.03, 0.08)), ("naive", (inf, inf))):
        errors = spread(each.periods[name] for each in trusted)
        assert (errors.median, errors.ninth) <= most
        assert errors.ninth <= most[1]
    memory = spread(each.memory for each in found if "memory" not in each.doubts)
    assert memory.median < 0.08
    # Both rivals are worse, the naive one by most.
    naive, theirs = (
        spread(rival(known, each.run) / each.run.period_s - 1 for each in trusted)
        for rival in (naive_s, sailors_s)
    )
    assert naive.median > theirs.median > 0.04


def test_stages_cost_what_tp_profile_reads_of_the_same_tables():
    known = read_tables(published("sailor"))
    found = 0
    for each in read_runs(published("sailor"), known)[0]:
        if len(each.gpus) > 1:
            continue
        (gpu,) = each.gpus
        ranks = each.groups[0][0].ranks
        where = published("sailor") / "profiles_tmp.json"
        costs = stage_costs(where, each.model, gpu, ranks)
        for s, layers in enumerate(each.stages):
            last = s == len(each.stages) - 1
            cost = costs.stage(tuple(map(str, layers)), each.micro_batch, last)
            theirs = known.seconds(each, s, each.groups[s][0])
            assert (cost.forward_s, cost.backward_s) == pytest.approx(theirs[:2])
            parameters = known.stage_bytes(each, s, ranks, "params_floats")
            assert cost.parameter_bytes == pytest.approx(ranks * parameters)
            found += 1
    assert found


@cache
def stage_costs(where, model, gpu, ranks):
    return Costs(timeprest.profile(str(where), model=model, gpu=gpu, tp=ranks))
