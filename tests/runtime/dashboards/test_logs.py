"""Metrics for dashboards: what is in them, read back by the programs that they are for."""

from __future__ import annotations

import csv
import itertools
import math
import sys
import time
from functools import partial
from types import SimpleNamespace

import msgspec
import pytest
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import Stopped
from timeprest import Callback, Trainer
from timeprest.profiles import plugins
from timeprest.profiles.errors import UserError
from timeprest.runtime.dashboards import services
from timeprest.runtime.records.events import EvaluationDone, MiniBatchDone, RunBegun, RunEnded
from timeprest.runtime.records.metric_logs import NAMES, VALIDATION, MetricLogs, metrics_of, peak_of
from timeprest.runtime.records.progress import Losses, read_losses, read_progress
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings
from timeprest.runtime.verify.dry_run import dry_run

LOSS, RATE = NAMES["loss"], NAMES["lr"]


def plan_of(profile, variant="gpipe"):
    return plan_by_hand(with_times(profile), variant, 2, 2)


def train(profile, target, where, log, *, variant="gpipe", inline=True, **more):
    how = {"task": target, "steps": 6, "eval_every": 4, "log": log, **more}
    return Trainer(plan_of(profile, variant), where, inline=inline, **how)


def rows(where, name="metrics.csv"):
    with (where / "dashboards" / name).open(newline="") as file:
        return list(csv.DictReader(file))


def column(found, name):
    return [float(row[name]) for row in found]


def test_csv_has_each_mini_batch(mlp_profile, mlp_target, tmp_path):
    """Loss, rate, gradient norm, throughput, memory; figures of evaluations in a file of theirs."""
    schedule = {"lr_schedule": "linear", "optimizer": OptimizerChoice(name="sgd", lr=0.05)}
    run_dir = tmp_path / "run"
    train(mlp_profile, mlp_target, run_dir, "csv", clip_norm=0.1, **schedule).run()
    found = rows(run_dir)
    assert list(found[0]) == ["step", "epoch", *NAMES.values()]
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5", "6"]
    assert column(found, LOSS) == read_losses(run_dir / "metrics.jsonl")
    assert column(found, RATE) == pytest.approx([0.05 * (1 - k / 6) for k in range(6)])
    assert all(norm > 0.1 for norm in column(found, NAMES["gradient_norm"]))
    for row in found:
        seconds, rate = float(row[NAMES["seconds"]]), float(row[NAMES["samples_per_s"]])
        assert seconds * rate == pytest.approx(8)
        assert float(row[NAMES["memory"]]) > 0
        assert 0 < float(row[NAMES["loading_s"]]) < seconds
        share = 100 * float(row[NAMES["loading_s"]]) / seconds
        assert float(row[NAMES["loading"]]) == pytest.approx(share)
        # Of each linear layer a product of matrices; backwards take two.
        flops = 8 * 3 * sum(2 * a * b for a, b in itertools.pairwise((5, 7, 6, 4, 3)))
        assert float(row[NAMES["tflops"]]) * seconds * 2e12 == pytest.approx(flops)
        assert row[NAMES["mfu"]] == row[NAMES["tokens_per_s"]] == ""
    evaluated = rows(run_dir, "evaluations.csv")
    lines = read_progress(run_dir / "metrics.jsonl")
    told = [line.test["loss"] for line in lines if not isinstance(line, Losses)]
    assert [row["step"] for row in evaluated] == ["4", "6"]
    assert column(evaluated, f"{VALIDATION}loss") == told


def test_a_figure_that_isnt_finite_at_first_has_a_column(mlp_profile, tmp_path):
    logs = MetricLogs()
    plan, settings = plan_of(mlp_profile), RunSettings(task="", log="csv")
    how = {"mini_batches": 2, "epoch_mini_batches": 1}
    logs.on_begin(RunBegun(plan=plan, settings=settings, run_dir=tmp_path, **how))
    for k, f1 in enumerate((math.nan, 0.5)):
        figures = {"loss": 1.0, "f1": f1}
        logs.on_evaluation(EvaluationDone(mini_batch=1 + k, epoch=k, figures=figures))
    logs.on_end(RunEnded(summary=None))
    found = rows(tmp_path, "evaluations.csv")
    assert [row[f"{VALIDATION}f1"] for row in found] == ["", "0.5"]


def test_a_resumed_run_goes_on_in_the_same_files(mlp_profile, mlp_target, tmp_path):
    """What came after the checkpoint is cut off; each mini-batch is there once."""
    run_dir = tmp_path / "run"
    how = {"checkpoint_every": 2, "eval_every": 3, "callbacks": [Unplugged()]}
    with pytest.raises(Stopped):
        train(mlp_profile, mlp_target, run_dir, "csv", **how).run()
    before = rows(run_dir)
    assert [row["step"] for row in before] == ["1", "2", "3", "4", "5"]
    with (run_dir / "dashboards/metrics.csv").open("a") as file:
        file.write("6,1,0.")
    Trainer(None, run_dir, inline=True).resume()
    after = rows(run_dir)
    assert [row["step"] for row in after] == ["1", "2", "3", "4", "5", "6"]
    assert after[:4] == before[:4]
    assert column(after, LOSS) == read_losses(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows(run_dir, "evaluations.csv")] == ["3", "6"]


@pytest.mark.parametrize("kept", [0, 2])
def test_a_part_of_a_line_is_written_anew(kept, mlp_profile, mlp_target, tmp_path):
    """A full disk leaves some of the head, or all columns of a row, the last number cut."""
    run_dir = tmp_path / "run"
    how = {"checkpoint_every": 4, "eval_every": 2, "callbacks": [Unplugged()]}
    with pytest.raises(Stopped):
        train(mlp_profile, mlp_target, run_dir, "csv", **how).run()
    before = {name: rows(run_dir, name) for name in ("metrics.csv", "evaluations.csv")}
    for name in before:
        path = run_dir / "dashboards" / name
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: kept + 1])[:-4])
    Trainer(None, run_dir, inline=True).resume()
    for name, wanted in before.items():
        there = [row for row in wanted if int(row["step"]) <= 4]
        assert rows(run_dir, name)[: len(there)] == there


@pytest.mark.parametrize("log", ["", "csv"])
def test_rows_that_a_killed_launcher_didnt_write(log, mlp_profile, mlp_target, tmp_path):
    """What the workers had by the checkpoint is filled in; also where no log was asked for then."""
    run_dir = tmp_path / "run"
    how = {"checkpoint_every": 4, "eval_every": 2, "callbacks": [Unplugged(6)]}
    with pytest.raises(Stopped):
        train(mlp_profile, mlp_target, run_dir, log, **how).run()
    wanted = []
    if log:
        wanted = rows(run_dir)
        metrics = run_dir / "dashboards/metrics.csv"
        metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:2]))
        (run_dir / "dashboards/evaluations.csv").unlink()
    Trainer(None, run_dir, inline=True).resume({"log": "csv"})
    found, evaluated = rows(run_dir), rows(run_dir, "evaluations.csv")
    assert [row["step"] for row in found] == ["1", "2", "3", "4", "5", "6"]
    assert column(found, LOSS) == read_losses(run_dir / "metrics.jsonl")
    assert found[: len(wanted[:4])] == wanted[:4]
    lines = read_progress(run_dir / "metrics.jsonl")
    told = [line.test["loss"] for line in lines if not isinstance(line, Losses)]
    assert [row["step"] for row in evaluated] == ["2", "4", "6"]
    assert column(evaluated, f"{VALIDATION}loss") == told


class Unplugged(Callback):
    def __init__(self, at=6):
        self.at = at

    def on_mini_batch(self, event):
        if event.mini_batch == self.at:
            raise Stopped


@pytest.mark.usefixtures("plugins_forgotten")
def test_plugins_log_to_a_folder_that_is_there(mlp_profile, mlp_target, tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Log:\n"
        "    def __init__(self, folder, begun):\n"
        "        self.file = open(folder / 'mine.txt', 'a')\n"
        "    def write(self, step, epoch, metrics):\n"
        "        print(step, file=self.file)\n"
        "    def write_evaluation(self, step, epoch, metrics):\n"
        "        pass\n"
        "    def close(self):\n"
        "        self.file.close()\n\n\n"
        "LOGS = {'mine': Log}\n"
    )
    plugins.load_file(str(tmp_path / "mine.py"))
    train(mlp_profile, mlp_target, tmp_path / "run", "mine,csv").run()
    steps = (tmp_path / "run/dashboards/mine.txt").read_text().split()
    assert len(steps) == len(rows(tmp_path / "run")) == 6


def test_without_the_option_nothing_is_written(mlp_profile, mlp_target, tmp_path):
    train(mlp_profile, mlp_target, tmp_path / "run", "").run()
    assert not (tmp_path / "run" / "dashboards").exists()
    lines = read_progress(tmp_path / "run/metrics.jsonl")
    assert not any(line.figures for line in lines if isinstance(line, Losses))


@pytest.mark.slow
def test_tensorboard_reads_its_files(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """By TensorBoard's own reader; in a resumed run, also from its beginning, each step once."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir = tmp_path / "run"
    how = {"checkpoint_every": 2, "callbacks": [Unplugged(5)]}
    with monkeypatch.context() as lost:
        # It is killed before all is on the disk.
        from torch.utils.tensorboard import SummaryWriter

        write = SummaryWriter.add_scalar
        lost.setattr(services, "_NOTED_S", 0.0)
        lost.setattr(services.Written, "note", note_up_to(2))
        lost.setattr(SummaryWriter, "add_scalar", lambda *a: None if a[3] > 3 else write(*a))
        with pytest.raises(Stopped):
            train(mlp_profile, mlp_target, run_dir, "tensorboard", **how).run()
    assert (run_dir / "dashboards/tensorboard/written.txt").read_text() == "2"
    Trainer(None, run_dir, inline=True).resume()
    Trainer(None, run_dir, inline=True).resume(steps=8)
    found = EventAccumulator(str(run_dir / "dashboards/tensorboard"))
    found.Reload()
    assert {LOSS, RATE, f"{VALIDATION}loss", NAMES["samples_per_s"]} <= set(found.Tags()["scalars"])
    losses = found.Scalars(LOSS)
    assert [each.step for each in losses] == list(range(1, 9))
    wanted = read_losses(run_dir / "metrics.jsonl")
    assert [each.value for each in losses] == pytest.approx(wanted, rel=1e-6)
    evaluated = found.Scalars(f"{VALIDATION}loss")
    assert [each.step for each in evaluated] == [4, 6, 8]


def test_a_step_that_is_to_be_written_anew_isnt_there(tmp_path):
    """Nor for a run that is killed before it notes another, and goes on at a later checkpoint."""
    path = tmp_path / "written.txt"
    path.write_text("43")
    assert services.Written(path, 10, list).step == 10
    assert services.Written(path, 20, list).step == 10
    assert services.Written(path, 0, list).step == 0
    assert services.Written(path, 20, list).step == 0


def note_up_to(step):
    """What is noted of a log, up to this step and no further."""
    note = services.Written.note

    def noted(written):
        if written._latest <= step + 1:
            note(written)

    return noted


@pytest.mark.slow
def test_wandb_writes_offline(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """To the disk alone: a file that its own reader takes, with the losses in it."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_dir = tmp_path / "run"
    train(mlp_profile, mlp_target, run_dir, "wandb").run()
    (file,) = (run_dir / "dashboards/wandb").rglob("offline-run-*/*.wandb")
    wanted = read_losses(run_dir / "metrics.jsonl")
    losses, end = [], time.monotonic() + 20
    # Its own process writes the file, and may be at it still.
    while len(losses) < len(wanted) and time.monotonic() < end:
        time.sleep(0.1)
        found = list(wandb_history(file.read_bytes()))
        losses = [float(items[LOSS]) for items in found if LOSS in items]
    assert losses == pytest.approx(wanted)
    assert any(f"{VALIDATION}loss" in items for items in found)


def wandb_history(data):
    """What a transaction log of wandb's has of each step: LevelDB's log format behind a head of
    7 bytes, a protocol buffer in each record."""
    from wandb.proto import wandb_internal_pb2

    at, waiting = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        waiting += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(waiting)
            waiting = b""
            if record.HasField("history"):
                items = record.history.item
                yield {item.key or "/".join(item.nested_key): item.value_json for item in items}


@pytest.mark.choice(0)
@pytest.mark.slow
@pytest.mark.processes
def test_processes_log_what_an_inline_run_does(mlp_profile, mlp_target, tmp_path):
    for name in ("inline", "processes"):
        how = {"variant": "timeprest", "inline": name == "inline"}
        train(mlp_profile, mlp_target, tmp_path / name, "csv", **how).run()
    one, other = (rows(tmp_path / name) for name in ("inline", "processes"))
    for key in ("step", "epoch", LOSS, RATE):
        assert [row[key] for row in one] == [row[key] for row in other]
    assert all(float(row[NAMES["seconds"]]) > 0 for row in other)


def test_a_peak_is_that_of_the_data_sheet(mlp_profile):
    settings = RunSettings(task="t", device="cuda")
    on_sheet = msgspec.structs.replace(mlp_profile, device="meta:a100-40gb")
    plan = plan_of(on_sheet)
    assert peak_of(plan, settings) == 19.5e12
    assert peak_of(plan, msgspec.structs.replace(settings, autocast="bfloat16")) == 312e12
    assert peak_of(plan, msgspec.structs.replace(settings, device="cpu")) is None
    assert peak_of(plan_of(mlp_profile), settings) is None


def test_what_is_counted_is_told_as_tokens():
    figures = {"seconds": 0.5, "samples": 4.0, "counted": 60.0, "flops": 3e12, "lr": math.inf}
    event = MiniBatchDone(mini_batch=1, epoch=0, done=1, of=2, loss=math.nan, figures=figures)
    assert metrics_of(event, devices=3, peak=8e12) == {
        NAMES["tflops"]: 2.0,
        NAMES["mfu"]: 25.0,
        NAMES["seconds"]: 0.5,
        NAMES["samples_per_s"]: 8.0,
        NAMES["tokens_per_s"]: 40.0,
    }


def test_what_isnt_there_is_said_before_anything_starts(
    mlp_profile, mlp_target, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    for log, message in (
        ("csv,wandb", r"--log wandb: needs the library wandb .*pip install -e '\.\[wandb\]'"),
        ("cvs", "--log 'cvs': there is no 'cvs'; give csv, tensorboard, wandb"),
    ):
        settings = RunSettings(task=mlp_target, log=log)
        with pytest.raises(UserError, match=message):
            run(plan_of(mlp_profile), settings, tmp_path / "run", inline=True)
        assert not (tmp_path / "run").exists()
    train(mlp_profile, mlp_target, tmp_path / "run", "").run()
    with pytest.raises(UserError, match="--log wandb"):
        resume(tmp_path / "run", {"log": "wandb"}, steps=7, inline=True)


def test_nor_is_anything_started_where_nobody_is_logged_in(
    mlp_profile, mlp_target, tmp_path, monkeypatch
):
    library = SimpleNamespace(api=SimpleNamespace(api_key=None))
    monkeypatch.setitem(sys.modules, "wandb", library)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    plan, settings = plan_of(mlp_profile), RunSettings(task=mlp_target, log="wandb")
    for start in (partial(run, inline=True), dry_run):
        with pytest.raises(UserError, match="--log wandb: nobody is logged in"):
            start(plan, settings, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    library.api.api_key = "a key"
    assert dry_run(plan, settings, tmp_path / "run") is not None
