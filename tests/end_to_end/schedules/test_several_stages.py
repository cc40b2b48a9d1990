"""Workers that run several stages: runs against the oracle, inline and in processes."""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.against_oracle import STEPS, train
from helpers.alike import assert_same_weights, check_processes, run_replicated
from helpers.paths import TESTS
from helpers.plain_training import assert_trained_as, train_plainly
from helpers.plans import plan_by_hand, profiled, with_times
from helpers.processes.stopped_runs import assert_same, check_resumed, run_and_stop
from timeprest.cli.pictures.html.run_data import read_facts, run_figures
from timeprest.cli.run_commands.report import page_data
from timeprest.cli.tables.run import summary_table
from timeprest.planner.recordings.predicted import predicted
from timeprest.planner.systems.placement import placements
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.autograd.boundary import storage_key
from timeprest.profiles.errors import RunError
from timeprest.runtime.records.recording import measured
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.stage.messages import HandedOver
from timeprest.runtime.verify.check import check
from timeprest.runtime.verify.dry_run import dry_run


def layouts(variant, devices):
    """Placements with two stages on each device, where the system takes them."""
    found = placements("loop", 2 * devices, devices) + placements("v", 2 * devices, devices)
    found += placements("v", 2 * devices - 1, devices)
    kind = VARIANTS[variant].placement
    return found if kind == "any" else found[:1] if kind == "loop" else found[1:2]


def cases(devices, counts):
    for name, variant in VARIANTS.items():
        for d in devices:
            for placement in layouts(name, d):
                least = variant.least_micro_batches(len(placement))
                several = sorted({max(n, least) for n in counts})
                for n in [1] if variant.whole_mini_batches else several:
                    yield name, placement, n


@pytest.mark.choice(20)
@pytest.mark.parametrize(("variant", "placement", "n"), [*cases((2, 3), (2, 4))])
def test_inline_equals_the_oracle(variant, placement, n, mlp_profile, mlp_target, tmp_path):
    stages = len(placement)
    profile = with_times(mlp_profile)
    plan = plan_by_hand(profile, variant, stages, n, placement=placement)
    summary = train(plan, mlp_target, "momentum", tmp_path / "run")
    for report in summary.stages:
        assert report.worker == placement[report.stage]
        assert report.peak.total <= plan.predicted.device_of(report.stage).memory_bytes
    assert summary.mini_batches == STEPS


# All that runs may have ------------------------------------------------------------------------

FLUSH = [name for name, variant in VARIANTS.items() if variant.flushes]
V = (0, 1, 1, 0)


def fit(variant, placement=V):
    """The placement, or one that the system takes."""
    return placement if placement in layouts(variant, 2) else layouts(variant, 2)[0]


def n_of(variant):
    return 1 if VARIANTS[variant].whole_mini_batches else 4


@pytest.mark.choice(9)
@pytest.mark.parametrize("variant", VARIANTS)
def test_everything_at_once(variant, mlp_profile, mlp_target, tmp_path):
    """Weighted losses, updates after two mini-batches, an epoch's rest, clipping, a warm-up."""
    profile, placement = with_times(mlp_profile, backward_s=0.25e-3), fit(variant)
    how = {"update_every": 2, "placement": placement}
    if not VARIANTS[variant].recompute_refusal:
        how["recompute"] = (True, False, True, False)
    plan = plan_by_hand(profile, variant, 4, n_of(variant), **how)
    more = {"clip_norm": 0.3, "lr_schedule": "linear", "warmup": 4, "ragged": "pad"}
    target = mlp_target.replace("MLPTask", "ShortWeighted")
    train(plan, target, "adam", tmp_path / "run", **more)


@pytest.mark.parametrize("variant", FLUSH)
def test_systems_that_flush_are_plain_training(variant, mlp_profile, mlp_target, tmp_path):
    placement = fit(variant)
    plan = plan_by_hand(with_times(mlp_profile), variant, 4, 4, placement=placement)
    run(plan, RunSettings(task=mlp_target, steps=6, evaluate=False), tmp_path / "run", inline=True)
    assert_trained_as(tmp_path / "run", train_plainly(mlp_target, plan.mini_batch, 6))


def test_evaluation_is_that_of_a_stage_per_device(mlp_profile, mlp_target, tmp_path):
    """Each stage a micro-batch behind the one before it."""
    tests = []
    for k, placement in enumerate([V, (0, 1, 0, 1), ()]):
        plan = plan_by_hand(with_times(mlp_profile), "gpipe", 4, 4, placement=placement)
        settings = RunSettings(task=mlp_target.replace("MLPTask", "ShortEpochs"), epochs=2)
        summary = run(plan, settings, tmp_path / str(k), inline=True)
        tests.append([epoch.test["loss"] for epoch in summary.epochs])
    for found in tests[:-1]:
        assert found == pytest.approx(tests[-1], abs=1e-10)


profile_of = cache(profiled)


def plan_for(file, name, variant, placement, n=4, **more):
    target = f"{TESTS / 'tasks' / file}:{name}"
    profile = profile_of(target)
    return target, plan_by_hand(profile, variant, len(placement), n, placement=placement, **more)


@pytest.mark.parametrize(
    ("name", "variant", "placement"),
    [
        ("SkipsTask", "gpipe", V),
        ("SkipsTask", "zb-h1", (0, 1, 0)),
        ("MaskedTask", "pipedream-flush", (0, 1, 0, 1)),
        ("ResNetTask", "gpipe", (0, 1, 0)),
        ("GPTTask", "pipedream-flush", V),
        ("FrozenTask", "gpipe", (0, 1, 0)),
    ],
)
def test_check_finds_plain_training(name, variant, placement):
    """Several tensors at a cut, over a stage, with and without gradients; batch norms, dropout."""
    target, plan = plan_for("variety_tasks.py", name, variant, placement)
    report = check(plan, RunSettings(task=target), inline=True)
    assert report.verdict == "same"


@pytest.mark.parametrize(
    ("variant", "placement", "replicas", "workers"),
    [
        ("timeprest", (0, 1, 0), (2, 1), [0, 1, 2, 0, 1]),
        ("pipedream", (0, 1, 0), (2, 1), [0, 1, 2, 0, 1]),
        ("gpipe", (0, 1, 0), (1, 2), [0, 1, 2, 0]),
        ("interleaved-1f1b", (0, 1, 0, 1), (2, 1), [0, 1, 2, 0, 1, 2]),
        ("zb-v", V, (2, 2), [0, 1, 2, 3, 2, 3, 0, 1]),
    ],
)
def test_replicas_equal_one_worker(
    variant, placement, replicas, workers, mlp_profile, mlp_target, tmp_path
):
    """The devices of stages that share them have a replica of each."""
    n, stages = n_of(variant), len(placement)
    how = {"placement": placement}
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n, replicas=replicas, **how)
    alone = plan_by_hand(with_times(mlp_profile), variant, stages, n, **how)
    settings = RunSettings(task=mlp_target, steps=6, clip_norm=0.3, evaluate=False)
    summary, _ = run_replicated(plan, alone, settings, tmp_path)
    assert [report.worker for report in summary.stages] == workers


def test_a_dry_run_knows_the_workers(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 4, 4, placement=V)
    found = dry_run(plan, RunSettings(task=mlp_target, steps=7), str(tmp_path / "run"))
    assert [worker.name for worker in found.workers] == ["stages 0 and 3", "stages 1 and 2"]
    planned = [device.memory_bytes for device in plan.predicted.devices]
    assert [worker.planned_bytes for worker in found.workers] == planned
    assert [(cut.source, cut.target) for cut in found.cuts] == [
        (f"stage {s}", f"stage {s + 1}") for s in range(3)
    ]


# Hand-over --------------------------------------------------------------------------------------


def test_what_is_handed_over_is_copied_where_a_piece_changes_it():
    x = torch.ones(3)
    handed = HandedOver({"x": lambda: {"x"}})
    first = handed.safe({"x": x, "y": x})
    assert first["x"] is not x
    assert first["y"] is x
    watched = handed.watch(["x", "y"], [first["x"], first["y"]])
    handed.check()
    # It is left as it was: the next one is the maker's own, which keeps it anyway.
    again = handed.safe({"x": x})["x"]
    assert again is x
    watched = handed.watch(["x"], [again])
    assert handed.storages_kept_elsewhere(watched) == {storage_key(x)}
    again.add_(1)
    with pytest.raises(RunError, match="'x' is changed in place, and wasn't in the first run"):
        handed.check()
    changing = HandedOver({"x": lambda: {"x"}})
    for _ in range(2):
        copy = changing.safe({"x": x})["x"]
        watched = changing.watch(["x"], [copy])
        copy.zero_()
        changing.check()
        assert copy is not x
        assert not changing.storages_kept_elsewhere(watched)


# Checkpoints ------------------------------------------------------------------------------------

SHAKEN = {"steps": None, "epochs": 3, "checkpoint_every": 4}
"""Epochs of five mini-batches: checkpoints at 4, 8, 12 and 15."""


@pytest.mark.parametrize("variant", ["timeprest", "zb-h1"])
def test_runs_go_on_bit_for_bit(variant, tmp_path):
    """Random numbers of each stage of a worker, running statistics, what was seen before."""
    target, plan = plan_for("checkpoint_tasks.py", "ShakenTask", variant, V)
    summary = check_resumed(plan, RunSettings(task=target, **SHAKEN), tmp_path, 14, 15)
    assert [len(report.epochs) for report in summary.stages] == [3] * 4


def test_a_checkpoint_starts_a_run_under_another_placement(mlp_profile, mlp_target, tmp_path):
    """As under the same: gpipe is plain training, wherever its stages are."""
    settings = RunSettings(
        task=mlp_target,
        steps=6,
        optimizer=OptimizerChoice(name="sgd", lr=0.05, momentum=0.9),
        evaluate=False,
    )
    profile = with_times(mlp_profile)
    plans = [
        plan_by_hand(profile, "gpipe", len(placement) or 3, 2, placement=placement)
        for placement in (V, (0, 1, 0, 1), (0, 1, 0), ())
    ]
    run(plans[0], settings, tmp_path / "first", inline=True)
    settings = msgspec.structs.replace(settings, start_from=str(tmp_path / "first"))
    for k, plan in enumerate(plans):
        run(plan, settings, tmp_path / str(k), inline=True)
        assert_same_weights(tmp_path / str(k), tmp_path / "0", atol=1e-10)


# In processes -----------------------------------------------------------------------------------


@pytest.mark.choice("zb-v", "placement3", "placement4")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("variant", "placement", "n"),
    [
        ("timeprest", V, 4),
        ("pipedream-2bw", (0, 1, 0, 1), 4),
        ("zb-v", V, 4),
        ("i-timeprest", (0, 1, 2, 0, 1, 2), 2),
        ("timeprest", (0, 0), 2),
    ],
)
def test_processes_are_the_inline_run(variant, placement, n, mlp_profile, mlp_target, tmp_path):
    """Bit for bit, and what the oracle says."""
    stages = len(placement)
    plan = plan_by_hand(with_times(mlp_profile), variant, stages, n, placement=placement)
    summary = train(plan, mlp_target, "momentum", tmp_path / "processes", inline=False)
    train(plan, mlp_target, "momentum", tmp_path / "inline")
    assert_same_weights(tmp_path / "processes", tmp_path / "inline")
    for report in summary.stages:
        predicted_ = plan.predicted.device_of(report.stage)
        assert report.peak.total <= predicted_.accounted.total
        assert report.idle_share is not None


@pytest.mark.processes
def test_dropout_statistics_and_evaluation_in_processes(tmp_path):
    """As inline, through gloo, from a checkpoint on."""
    target, plan = plan_for("checkpoint_tasks.py", "ShakenTask", "timeprest", V)
    settings = RunSettings(task=target, transport="gloo", **SHAKEN)
    whole = run(plan, settings, tmp_path / "whole", inline=True)
    run_and_stop(plan, settings, tmp_path / "stopped", 9)
    summary = resume(tmp_path / "stopped")
    assert_same(tmp_path / "whole", tmp_path / "stopped", 15)
    assert [e.test for e in summary.epochs] == [e.test for e in whole.epochs]


@pytest.mark.processes
def test_replicas_with_sums_over_all_workers_in_processes(mlp_profile, mlp_target, tmp_path):
    """Clipped by the norm of the whole model, of losses with weights of their own."""
    plan = plan_by_hand(
        with_times(mlp_profile), "gpipe", 3, 4, replicas=(2, 1), placement=(0, 1, 0)
    )
    target = mlp_target.replace("MLPTask", "WeightedTask")
    settings = RunSettings(task=target, steps=4, clip_norm=0.1, on_nan="skip")
    check_processes(plan, settings, tmp_path, 1e-12)


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_who_failed_is_named_with_its_stages(mlp_profile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("trap.txt").write_text("SIGKILL:1")
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 4, 2, placement=V)
    target = f"{TESTS / 'tasks/failing_tasks.py'}:TrapTask"
    settings = RunSettings(task=target, steps=40, evaluate=False, timeout_s=3)
    message = (
        r"stages 1 and 2 \(rank 1\) was killed by SIGKILL; last finished 1B4\.1, next 1U4; "
        r"waiting: stage \d at \d\S+ for stage 1"
    )
    with pytest.raises(RunError, match=message):
        run(plan, settings, tmp_path / "run")


# Records -----------------------------------------------------------------------------------


def test_a_lane_is_a_worker_with_its_stages(mlp_profile, mlp_target, tmp_path):
    """Spans don't overlap, messages go between lanes alone, memory is the worker's."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 4, 4, placement=(0, 1, 1, 0))
    summary = train(plan, mlp_target, "momentum", tmp_path / "run")
    found = measured(tmp_path / "run", (0, STEPS))
    assert [lane.stages for lane in found.lanes] == [(0, 3), (1, 2)]
    for k, lane in enumerate(found.lanes):
        spans = [span for span in found.spans if span.lane == k]
        assert {span.stage for span in spans} == {*lane.stages}
        assert all(a.end_s <= b.start_s for a, b in pairwise(spans))
        most = max(sum(point.nbytes) for point in found.memory if point.lane == k)
        assert most == summary.stages[lane.stages[0]].peak.total
    between = {(m.source_stage, m.target_stage, m.backward) for m in found.messages}
    assert between == {(0, 1, False), (1, 0, True), (2, 3, False), (3, 2, True)}
    wanted = predicted(plan, STEPS)
    assert len(found.messages) == len(wanted.messages)


def test_times_of_a_worker_are_of_all_its_stages(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 4, 2, placement=(0, 1, 0, 1))
    settings = RunSettings(task=mlp_target, steps=4)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    for first, second in (summary.stages[::2], summary.stages[1::2]):
        assert first.wall_s == second.wall_s
        assert first.idle_s == pytest.approx(second.idle_s, abs=1e-9)
        busy_s = sum(r.compute_s + r.communication_s + r.loading_s for r in (first, second))
        assert first.wall_s == pytest.approx(busy_s + first.idle_s)
        assert first.sent_bytes > 0
    # The last stage's worker ends before the first one's last backward.
    first, last = summary.stages[0].wall_s, summary.stages[-1].wall_s
    assert first > last == pytest.approx(summary.epochs[0].seconds)
    assert summary.samples_per_s == pytest.approx(4 * plan.mini_batch / first)


def test_a_report_has_a_row_for_each_worker(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 4, 4, placement=V)
    settings = RunSettings(task=mlp_target, steps=12, evaluate=False)
    summary = run(plan, settings, tmp_path / "run", inline=True)
    # What stage 1 hands over to stage 2, and is handed back, isn't sent.
    sent = [report.sent_bytes for report in summary.stages]
    assert sent[0] == sent[1] > 0
    assert sent[2] == sent[3] > 0
    facts = read_facts(tmp_path / "run")
    assert [worker.name for worker in facts.workers] == ["stages 0 and 3", "stages 1 and 2"]
    assert not any("No operations" in line for line in facts.missing)
    page = run_figures(facts)
    for worker, row in zip(facts.workers, page["workers"], strict=True):
        of_stages = [summary.stages[s] for s in worker.stages]
        assert row["compute_s"] == pytest.approx(sum(report.compute_s for report in of_stages))
        assert row["idle_s"] == pytest.approx(of_stages[0].idle_s, abs=1e-9)
        assert sum(row["memory"]["measured"]) == of_stages[0].peak.total
        weights = plan.predicted.device_of(worker.stages[0]).memory.weights_bytes
        assert [report.peak.weights_bytes for report in of_stages] == [weights, weights]
        assert sum(row["memory"]["predicted"]) >= of_stages[0].peak.total
        (epoch,) = row["epochs"]
        counts = [Counter(report.version_differences) for report in of_stages]
        assert sum(counts, Counter()) == {
            int(d): count for d, count in epoch["version_differences"].items()
        }
    (of_plan,) = page_data([facts])["plans"]
    assert of_plan["placement"] == "v"
    title, table = summary_table(plan, summary, 200).renderables
    assert table.row_count == 4
    assert str(title) == "timeprest, 4 stages on 2 workers, inline"
