"""Checkpoints: a run that was stopped and resumed is the run that wasn't, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import warnings
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch
from click.testing import CliRunner
from helpers.drawn.pipelines import ALL
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import (
    Stopped,
    StopsAfter,
    assert_same,
    check_resumed,
    run_and_stop,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file
from timeprest.cli.run import main
from timeprest.cli.tables.run import summary_lines
from timeprest.planner.plan import read_plan
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import (
    FileError,
    RunError,
    StoppedError,
    TargetError,
    TaskWarning,
    UserError,
)
from timeprest.profiles.files import write_file
from timeprest.profiles.measuring.measure import measure
from timeprest.profiles.target import resolve
from timeprest.runtime.checkpoint.checkpoint import CheckpointWriter, find_whole
from timeprest.runtime.checkpoint.export import export
from timeprest.runtime.checkpoint.worker_state import give_kept, pack, unpack
from timeprest.runtime.prepare.data import segments
from timeprest.runtime.prepare.samples import Samples
from timeprest.runtime.records.progress import Observer, read_losses
from timeprest.runtime.records.run_dir import (
    RunDir,
    load_weights,
    read_tensors,
    save_tensors,
    tensor_bytes,
)
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import OptimizerChoice, RunSettings

RUNNING = list(ALL)
WHOLE = [name for name in RUNNING if VARIANTS[name].whole_mini_batches]
MOMENTUM = OptimizerChoice(name="sgd", lr=0.05, momentum=0.9)
PLAIN = OptimizerChoice(name="sgd", lr=0.05)
ADAM = OptimizerChoice(name="adam", lr=0.02)

_profiles = {}


def profile_of(target):
    if target not in _profiles:
        found = measure(resolve(target), batch_size=8, micro_batch_sizes=[2, 4, 8], seconds=0)
        _profiles[target] = with_times(found)
    return _profiles[target]


def plan_for(target, variant, stages=3, n=4, **how):
    n = 1 if VARIANTS[variant].whole_mini_batches else n
    return plan_by_hand(profile_of(target), variant, stages, n, **how)


def settings_for(target, **how):
    return RunSettings(
        **{"task": target, "steps": 12, "checkpoint_every": 4, "evaluate": False, **how}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "optimizer"),
    [(name, MOMENTUM) for name in RUNNING]
    + [(name, ADAM) for name in ("timeprest", "pipedream-2bw", "pipemare", "pipeoptim", "gpipe")],
)
def test_every_system_goes_on_bit_for_bit(variant, optimizer, mlp_target, tmp_path):
    check_resumed(
        plan_for(mlp_target, variant), settings_for(mlp_target, optimizer=optimizer), tmp_path
    )


SHORT = {"steps": None, "epochs": 3, "checkpoint_every": 4, "evaluate": True}
"""Epochs of five mini-batches and one with two samples: checkpoints at 4, 8, 12 and 15."""

TASKS = str(TESTS / "tasks/checkpoint_tasks.py")
TIED = str(TESTS / "tasks/variety_tasks.py") + ":TiedTask"


@pytest.mark.choice("i-timeprest", "zb-h1", "Cycled", "Stepped", "timeprest-mlp", "how12")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "task", "how", "options"),
    [
        ("timeprest", f"{TASKS}:ShakenTask", {}, SHORT),
        ("i-timeprest", f"{TASKS}:ShakenTask", {"update_every": 2}, {**SHORT, "ragged": "pad"}),
        ("gpipe", f"{TASKS}:ShakenTask", {"update_every": 2}, {"clip_norm": 0.5}),
        ("v-timeprest", f"{TASKS}:ShakenTask", {"replicas": (2, 1, 2)}, SHORT),
        ("zb-h1", f"{TASKS}:ShakenTask", {"replicas": (1, 2, 1)}, {"deferred_batch_norm": True}),
        ("pipedream", f"{TASKS}:ShakenTask", {"recompute": (True, True)}, {}),
        ("pipedream-2bw", f"{TASKS}:Cycled", {}, SHORT),
        ("pipemare", f"{TASKS}:ShakenTask", {"replicas": (2, 1, 2)}, SHORT),
        ("spectrain", f"{TASKS}:Stepped", {}, {"lr_rescheduling": 7}),
        ("spectrain", "mlp", {}, {"optimizer": PLAIN}),
        ("timeprest", "mlp", {"stages": 1}, {"lr_schedule": "cosine", "warmup": 3}),
        ("pipedream-flush", TIED, {"tied": "split"}, {"steps": 11}),
        ("gpipe", TIED, {"tied": "split", "replicas": (2, 1, 1)}, {}),
    ],
)  # fmt: skip
def test_whatever_else_there_is_to_remember(variant, task, how, options, mlp_target, tmp_path):
    """Random numbers, running statistics, schedules, last gradients, copies, replicas."""
    task = mlp_target if task == "mlp" else task
    settings = settings_for(task, **options)
    plan = plan_for(task, variant, **how)
    at, last = (14, 15) if "epochs" in options else (9, settings.steps)
    # An epoch's last two samples are trained on, too.
    last += 3 * ("ragged" in options)
    summary = check_resumed(plan, settings, tmp_path, at, last)
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert [e.train_loss for e in summary.epochs] == [e["train_loss"] for e in whole["epochs"]]
    assert [e.test for e in summary.epochs] == [e["test"] for e in whole["epochs"]]
    assert [e.lr for e in summary.epochs] == [e["lr"] for e in whole["epochs"]]
    # What each worker saw is of the epochs before, too: times, idle and version differences.
    for report, other in zip(summary.stages, whole["stages"], strict=True):
        assert [e.epoch for e in report.epochs] == [e["epoch"] for e in other["epochs"]]
        seen = {str(d): count for d, count in report.version_differences.items()}
        assert seen == other["version_differences"]


def places(settings, plan, samples=42):
    found = segments(plan, settings, samples)
    assert [s.first for s in found[1:]] == [s.end for s in found[:-1]]
    return [s.end for s in found if s.checkpoint], [s.end for s in found]


def test_where_checkpoints_are(mlp_target):
    plan = plan_for(mlp_target, "gpipe")
    settings = settings_for(mlp_target, **SHORT)
    assert places(settings, plan) == ([4, 8, 12, 15], [4, 5, 8, 10, 12, 15])
    assert places(msgspec.structs.replace(settings, checkpoint_every=None), plan)[0] == [5, 10, 15]
    assert places(msgspec.structs.replace(settings, checkpoint_every=0), plan) == ([], [5, 10, 15])
    assert places(msgspec.structs.replace(settings, checkpoint_every=99), plan)[0] == [15]
    assert places(msgspec.structs.replace(settings, checkpoint_every=1), plan)[0] == [*range(1, 16)]
    # An update is made of the mini-batches 0 and 1, 2 and 3, and 4 alone.
    by_two = plan_for(mlp_target, "gpipe", update_every=2)
    assert places(settings, by_two)[0] == [4, 9, 12, 15]


@pytest.mark.parametrize("update_every", [1, 2])
def test_systems_that_flush_train_the_same_with_and_without(update_every, mlp_target, tmp_path):
    plan = plan_for(
        f"{TESTS / 'tasks/mlp_task.py'}:ShortEpochs", "gpipe", update_every=update_every
    )
    found = []
    for every in (0, None, 3):
        settings = settings_for(plan.profile.target, **{**SHORT, "checkpoint_every": every})
        summary = run(plan, settings, tmp_path / str(every), inline=True)
        losses = read_losses(tmp_path / str(every) / "metrics.jsonl")
        epochs = [(e.mini_batches, e.test, e.train_loss) for e in summary.epochs]
        found.append((losses, epochs, load_weights(tmp_path / str(every))["l0.weight"].tolist()))
    assert found[0] == found[1] == found[2]
    assert not (tmp_path / "0" / "checkpoints").exists()


def test_buffers_that_arent_persistent_go_on_and_are_no_weights(tmp_path):
    """Nor are constants of the trace: the model takes its weights back as they are."""
    task = f"{TASKS}:FadingTask"
    check_resumed(plan_for(task, "timeprest"), settings_for(task), tmp_path, 9, 12)
    resolve(task).model().load_state_dict(load_weights(tmp_path / "whole"))


def test_more_epochs(tmp_path, mlp_target):
    """A run that ended goes on to what it would have been."""
    plan = plan_for(f"{TASKS}:ShakenTask", "timeprest")
    settings = settings_for(f"{TASKS}:ShakenTask", **SHORT)
    few = msgspec.structs.replace(settings, epochs=2)
    run(plan, settings, tmp_path / "whole", inline=True)
    run(plan, few, tmp_path / "grown", inline=True)
    with pytest.raises(UserError, match=r"has ended, after 10 mini-batches; .* above 2"):
        resume(tmp_path / "grown", inline=True)
    with pytest.raises(UserError, match="may be more, not fewer"):
        resume(tmp_path / "grown", epochs=1, inline=True)
    summary = resume(tmp_path / "grown", epochs=3, inline=True)
    assert_same(tmp_path / "whole", tmp_path / "grown", 15)
    # Its mini-batches are all that were done, its time isn't.
    assert (summary.mini_batches, summary.resumed_at) == (15, 10)
    assert "since it went on after mini-batch 10" in str(summary_lines(plan, summary)[0])


def test_of_a_plan_that_was_edited_a_line_says_so(tmp_path, mlp_target):
    plan = plan_for(mlp_target, "gpipe", stages=2)
    path = tmp_path / "plan.json"
    other = msgspec.structs.replace(plan.stages[1], devices=plan.stages[0].devices)
    for edited in (plan, msgspec.structs.replace(plan, stages=(plan.stages[0], other))):
        path.write_bytes(msgspec.json.encode(edited))
        words = [str(path), "--task", mlp_target, "--steps", "1", "--inline", "--no-evaluate"]
        where = tmp_path / str(edited is plan)
        told = CliRunner().invoke(main, [*words, "--run-dir", str(where)])
        assert told.exit_code == 0, told.output
        line = f"{where}/plan.json: edited since it was made"
        assert (line in told.stderr) == (edited is not plan)


def test_half_of_a_runs_weights_are_none(tmp_path, mlp_target):
    plan = plan_for(mlp_target, "gpipe", stages=2)
    run(plan, settings_for(mlp_target, steps=2, checkpoint_every=0), tmp_path, inline=True)
    assert load_weights(tmp_path)
    (tmp_path / "weights/stage1.safetensors").unlink()
    lacking = r"weights: has no weights of 1 of its 2 stages, of stage 1 first"
    with pytest.warns(TaskWarning, match=lacking):
        assert load_weights(tmp_path)
    with pytest.raises(FileError, match=lacking):
        export(tmp_path, tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_a_run_that_grew_is_stopped_and_goes_on(tmp_path, mlp_target):
    """With the updates, and so the rates, of the run that grew and wasn't stopped."""
    plan = plan_for(mlp_target, "gpipe", stages=2, update_every=2)
    settings = settings_for(
        mlp_target, steps=5, checkpoint_every=2, keep_checkpoints=9, lr_schedule="cosine"
    )
    run(plan, settings, tmp_path / "whole", inline=True)
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    resume(tmp_path / "whole", steps=13, inline=True)
    with pytest.raises(Stopped):
        resume(tmp_path / "stopped", steps=13, inline=True, observer=StopsAfter(4))
    assert RunDir(tmp_path / "stopped").checkpoints.places()[-1] not in (5, 13)
    with pytest.raises(FileError, match="no weights in it; has the run ended"):
        load_weights(tmp_path / "stopped")
    resume(tmp_path / "stopped", inline=True)
    assert_same(tmp_path / "whole", tmp_path / "stopped", 13)


def test_checkpoints_after_the_one_that_a_run_goes_on_from_are_not_its_own(tmp_path, mlp_target):
    plan = plan_for(mlp_target, "timeprest", stages=2)
    run(plan, settings_for(mlp_target, keep_checkpoints=9), tmp_path, inline=True)
    with (
        pytest.warns(TaskWarning, match="after mini-batch 4; later checkpoints are removed: 8, 12"),
        pytest.raises(Stopped),
    ):
        resume(tmp_path, at=4, inline=True, observer=StopsAfter(1))
    assert RunDir(tmp_path).checkpoints.places() == [4]


@pytest.mark.parametrize("inline", [True, pytest.param(False, marks=pytest.mark.processes)])
def test_a_run_that_was_killed_after_its_last_checkpoint(inline, tmp_path, mlp_target):
    """Nothing is left to train, and weights and summary still to be written."""
    plan = plan_for(mlp_target, "timeprest", stages=2)
    run(plan, settings_for(mlp_target, evaluate=True), tmp_path, inline=True)
    wanted = load_weights(tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    (tmp_path / "summary.json").unlink()
    shutil.rmtree(tmp_path / "weights")
    found = resume(tmp_path, inline=inline)
    assert [e.test for e in found.epochs] == [e["test"] for e in summary["epochs"]]
    assert found.mini_batches == 12
    assert load_weights(tmp_path).keys() == wanted.keys()
    assert all(torch.equal(load_weights(tmp_path)[name], w) for name, w in wanted.items())
    with pytest.raises(UserError, match="has ended, after 12"):
        resume(tmp_path, inline=True)


@pytest.mark.parametrize(("variant", "few"), [("gpipe", 7), ("timeprest", 8)])
def test_more_steps(variant, few, tmp_path, mlp_target):
    """The same; systems that flush also where no checkpoint would have been."""
    plan = plan_for(f"{TASKS}:ShakenTask", variant)
    settings = settings_for(f"{TASKS}:ShakenTask", steps=13, checkpoint_every=4)
    run(plan, settings, tmp_path / "whole", inline=True)
    run(plan, msgspec.structs.replace(settings, steps=few), tmp_path / "grown", inline=True)
    with pytest.raises(UserError, match=rf"has ended, after {few} mini-batches; .* above {few}"):
        resume(tmp_path / "grown", inline=True)
    with pytest.raises(UserError, match=r"--steps 5: .* may be more, not fewer"):
        resume(tmp_path / "grown", steps=5, inline=True)
    with pytest.raises(UserError, match=rf"--epochs: this run is of --steps {few}, which may grow"):
        resume(tmp_path / "grown", epochs=5, inline=True)
    summary = resume(tmp_path / "grown", steps=13, inline=True)
    assert_same(tmp_path / "whole", tmp_path / "grown", 13)
    assert summary.mini_batches == 13


def test_logs_go_on_where_the_checkpoint_was(mlp_target, tmp_path):
    """What was logged after it isn't there twice; a run without one yet starts anew."""
    plan = plan_for(mlp_target, "timeprest", 2)
    settings = settings_for(mlp_target, log_operations=True)
    run(plan, settings, tmp_path / "whole", inline=True)
    run_and_stop(plan, settings, tmp_path / "late", 6)
    run_and_stop(plan, settings, tmp_path / "early", 2)
    for name in ("late", "early"):
        resume(tmp_path / name, inline=True)
        assert_same(tmp_path / "whole", tmp_path / name)
        for s in (0, 1):
            one, other = (
                [
                    {k: v for k, v in json.loads(line).items() if k in ("op", "version", "held")}
                    for line in path.read_text().splitlines()
                ]
                for path in (
                    tmp_path / n / "operations" / f"stage{s}.jsonl" for n in ("whole", name)
                )
            )
            assert one == other
            lines = (tmp_path / name / "stages" / f"stage{s}.jsonl").read_text().splitlines()
            assert len(lines) == 1


def test_the_last_few_are_kept(mlp_target, tmp_path):
    plan = plan_for(mlp_target, "v-timeprest", 2)
    for keep, left in ((1, ["00000012"]), (2, ["00000010", "00000012"])):
        settings = settings_for(mlp_target, checkpoint_every=2, keep_checkpoints=keep)
        run(plan, settings, tmp_path / str(keep), inline=True)
        assert sorted(p.name for p in (tmp_path / str(keep) / "checkpoints").iterdir()) == left


# Processes -----------------------------------------------------------------------------------


class KillsAll(Observer):
    """Kills all workers once the first checkpoint is there and training goes on."""

    def __init__(self, run_dir):
        self.run_dir = run_dir

    def mini_batch(self, epoch, done, of, loss, figures):
        if len(list(self.run_dir.glob("checkpoints/0*"))) >= 2:
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "timeprest.runtime.training.worker" in child.cmdline():
                        child.kill()


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_killed_processes_go_on_bit_for_bit(tmp_path):
    """Inline, the same run has the same checkpoints."""
    task = f"{TASKS}:ShakenTask"
    plan = plan_for(task, "timeprest", 2)
    settings = settings_for(task, steps=200, checkpoint_every=20, evaluate=False)
    with pytest.raises(RunError, match="SIGKILL"):
        run(plan, settings, tmp_path / "killed", observer=KillsAll(tmp_path / "killed"))
    summary = resume(tmp_path / "killed")
    assert summary.mini_batches == 200
    run(plan, settings, tmp_path / "whole", inline=True)
    assert_same(tmp_path / "whole", tmp_path / "killed", 200)


# What breaks ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(mlp_target, tmp_path_factory):
    """A run of two stages, stopped after its second checkpoint. To be copied."""
    where = tmp_path_factory.mktemp("stopped") / "run"
    run_and_stop(plan_for(mlp_target, "timeprest", 2), settings_for(mlp_target), where)
    return where


def flip(path):
    content = bytearray(path.read_bytes())
    content[-9] ^= 16
    path.write_bytes(content)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-100])


BREAK = {"flipped": flip, "truncated": cut_off, "missing": Path.unlink}


def tp_run(*arguments):
    """Exit code and the only line on stderr of tp-run in this process."""
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    return done.exit_code, lines[0]


@pytest.mark.parametrize("how", BREAK)
@pytest.mark.parametrize("name", ["weights/stage1.safetensors", "state/stage0.json"])
def test_a_broken_checkpoint_is_refused(how, name, stopped, mlp_target, tmp_path):
    where = tmp_path / "run"
    shutil.copytree(stopped, where)
    broken = where / "checkpoints" / "00000008" / name
    BREAK[how](broken)
    for arguments, instead in (
        (("--resume", "--run-dir", where, "--inline"), "--resume-at 4"),
        (("export", where, "-o", tmp_path / "model"), "--at 4"),
    ):
        code, line = tp_run(*arguments)
        assert code == 2
        assert f"{broken}: " in line
        assert line.endswith(f"The one before it is whole: {instead}")
    assert not (tmp_path / "model").exists()
    resume(where, at=4, inline=True)
    assert sorted(p.name for p in (where / "checkpoints").iterdir()) == [
        "00000004", "00000008", "00000012",
    ]  # fmt: skip
    assert resume_places(where)[8] is not None


def as_another(where):
    """The folder of one checkpoint holds another one."""
    shutil.rmtree(where / "00000008")
    shutil.copytree(where / "00000004", where / "00000008")


def edited(where):
    """What a checkpoint says of itself isn't what was written, nor is its folder's name."""
    info = where / "00000008" / "checkpoint.json"
    info.write_text(info.read_text().replace('"mini_batches": 8', '"mini_batches": 9'))
    (where / "00000008").rename(where / "00000009")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (as_another, "00000008: holds the checkpoint after 4 mini-batches, and is named as the one"
         " after 8: put back what was there, or remove it"),
        (edited, "00000009/checkpoint.json: is broken: it doesn't match its checksum"),
    ],
)  # fmt: skip
def test_a_folder_is_held_against_what_is_in_it(change, message, stopped, mlp_target, tmp_path):
    """No run goes on from one by mistake, and those that are whole stay."""
    where = tmp_path / "run"
    shutil.copytree(stopped, where)
    change(where / "checkpoints")
    before = sorted(where.rglob("*"))
    start = settings_for(mlp_target, start_from=str(where), steps=1)
    plan = plan_for(mlp_target, "gpipe", 2)
    for arguments in (
        ("--resume", "--run-dir", where, "--inline"),
        ("export", where, "-o", tmp_path / "model"),
    ):
        code, line = tp_run(*arguments)
        assert code == 2
        assert message in line
        assert "The one before it is whole: --" in line
    with pytest.raises(FileError, match=re.escape(message)):
        run(plan, start, tmp_path / "other", inline=True)
    assert sorted(where.rglob("*")) == before


def test_a_checkpoint_of_another_plan_is_no_start(stopped, mlp_target, tmp_path):
    """Put into the directory of a run with another plan, it is taken for nobody's."""
    where = tmp_path / "run"
    run(plan_for(mlp_target, "gpipe", 2), settings_for(mlp_target, steps=2), where, inline=True)
    shutil.copytree(stopped / "checkpoints/00000008", where / "checkpoints/00000008")
    for arguments in (
        ("export", where, "-o", tmp_path / "model"),
        (where / "plan.json", "--from", where, "--run-dir", tmp_path / "other"),
    ):
        code, line = tp_run(*arguments)
        assert code == 2
        assert "00000008: was written by another plan than" in line
        assert not (tmp_path / "model").exists()
        assert not (tmp_path / "other").exists()


def resume_places(where):
    """Every checkpoint that is whole, by its place."""
    return {
        place: find_whole(RunDir(where), place, str) for place in RunDir(where).checkpoints.places()
    }


def test_none_is_whole(stopped, tmp_path):
    where = tmp_path / "run"
    shutil.copytree(stopped, where)
    for path in where.glob("checkpoints/*/checkpoint.json"):
        path.write_text("{}")
    code, line = tp_run("--resume", "--run-dir", where, "--inline")
    assert code == 2
    assert "00000008/checkpoint.json: not a checkpoint file" in line
    assert line.endswith("No other one before it is whole")
    code, line = tp_run("--resume-at", 5, "--run-dir", where, "--inline")
    assert (code, line.split(": ", 2)[2]) == (2, "has no checkpoint at 5; they are at 4, 8")


def test_what_was_edited_since_is_refused(stopped, tmp_path):
    where = tmp_path / "run"
    for name, old, new in (("plan.json", '"in_flight": 2', '"in_flight": 3'),
                           ("settings.json", '"seed": 0', '"seed": 1')):  # fmt: skip
        shutil.copytree(stopped, where)
        text = (where / name).read_text()
        assert old in text
        (where / name).write_text(text.replace(old, new))
        code, line = tp_run("--resume", "--run-dir", where, "--inline")
        assert code == 2
        assert f"{where / name}: isn't what" in line
        shutil.rmtree(where)


def test_options_of_a_resumed_run(stopped, tmp_path):
    for options, message in (
        (["--lr", 1, "--seed", 3], "--lr, --seed: a resumed run keeps its settings"),
        (["--checkpoint-every", 2], "--checkpoint-every: a resumed run keeps"),
        (["--from", "x"], "--resume, --from: give one of them"),
        (["--check"], "--check: trains anew"),
        (["--epochs", 9], "--epochs: this run is of --steps"),
        (["--resume-at", 5], "has no checkpoint at 5; they are at 4, 8"),
    ):
        code, line = tp_run("--resume", "--run-dir", stopped, *options)
        assert code == 2
        assert message in line
    assert tp_run("--resume")[1].endswith("--resume: name the run with --run-dir")


@pytest.mark.parametrize(
    ("stop", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "stopped"),
        (StoppedError("stopped by SIGTERM"), 1, "stopped by SIGTERM"),
    ],
)
def test_what_is_stopped_names_the_newest_checkpoint(
    stop, code, said, mlp_target, tmp_path, monkeypatch
):
    """And what the line says to type goes on to the end."""
    write_file(tmp_path / "plan.json", plan_for(mlp_target, "timeprest", 2))
    where = tmp_path / "run"
    write = CheckpointWriter.write

    def write_and_stop(self, segment, workers):
        write(self, segment, workers)
        if segment.end == 8:
            raise stop

    options = ("--steps", 12, "--checkpoint-every", 4, "--inline", "--run-dir", where, "-q")
    with monkeypatch.context() as patched:
        patched.setattr(CheckpointWriter, "write", write_and_stop)
        ended, line = tp_run(tmp_path / "plan.json", *options)
    assert ended == code
    go_on = f"tp-run --resume --run-dir {where}"
    newest = where / "checkpoints" / "00000008"
    assert line.endswith(f": {said}; its newest checkpoint is {newest}; go on with {go_on}")
    printed = tp_run_prints(*go_on.split()[1:], "--inline")
    assert "from mini-batch 8 on" in " ".join(printed.split())
    assert len(read_losses(where / "metrics.jsonl")) == 12


def test_a_resumed_run_has_its_own_plan(stopped, tmp_path):
    other = msgspec.structs.replace(read_plan(stopped / "plan.json"), mini_batch=16)
    write_file(tmp_path / "plan.json", other)
    code, line = tp_run(tmp_path / "plan.json", "--resume", "--run-dir", stopped)
    assert code == 2
    assert "isn't the plan of" in line


@pytest.mark.parametrize("fails_at", ["weights/stage1.safetensors", "checkpoint.json", "rename"])
def test_a_full_disk_loses_nothing(fails_at, mlp_target, tmp_path, monkeypatch):
    """One line, the checkpoint before it whole, and nothing half-written left."""
    replace, rename = os.replace, os.rename
    full = OSError(errno.ENOSPC, "No space left on device")

    def full_replace(source, target):
        if "00000008" in str(target) and str(target).endswith(fails_at):
            raise full
        replace(source, target)

    def full_rename(source, target):
        if fails_at == "rename" and str(target).endswith("00000008"):
            raise full
        rename(source, target)

    plan, settings = plan_for(mlp_target, "timeprest", 2), settings_for(mlp_target)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", full_replace)
        patched.setattr(os, "rename", full_rename)
        with pytest.raises(
            FileError, match=r"00000008.*: can't be written: No space left"
        ) as found:
            run(plan, settings, tmp_path / "run", inline=True)
    assert "\n" not in str(found.value)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000004"]
    run(plan, settings, tmp_path / "whole", inline=True)
    resume(tmp_path / "run", inline=True)
    assert_same(tmp_path / "whole", tmp_path / "run")


def test_a_folder_that_cant_be_made(mlp_target, tmp_path):
    class InTheWay(Observer):
        def begin(self, begun):
            (tmp_path / "run" / "checkpoints").write_text("in the way")

    plan, settings = plan_for(mlp_target, "timeprest", 2), settings_for(mlp_target)
    with pytest.raises(FileError, match=r"checkpoints.*: can't be written: Not a directory"):
        run(plan, settings, tmp_path / "run", inline=True, observer=InTheWay())


CHANGING = """
import sys

import numpy as np
import torch

sys.path.append({tasks!r})
from mlp_task import ShortEpochs


def adam(self, parameters):
    return torch.optim.Adam(parameters)


def slower(self, parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


class Falling(torch.optim.SGD):
    def step(self, closure=None):
        self.param_groups[0]["lr"] *= 0.9
        return super().step(closure)


def falling(self, parameters):
    return Falling(parameters, lr=0.05)


class Decays:
    def __init__(self, optimizer):
        self.group, self.updates = optimizer.param_groups[0], 0

    def step(self):
        self.updates += 1
        self.group["weight_decay"] = 0.01 * self.updates

    def state_dict(self):
        return {{"updates": self.updates}}

    def load_state_dict(self, state):
        self.updates = state["updates"]


def decays(self, optimizer):
    return Decays(optimizer)


def waves(self, optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 + np.cos(update))


def by_steps(self, optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def two(self, named):
    first, *others = dict(named).values()
    return [{{"params": [first]}}, {{"params": others}}]


def few(self, split):
    return torch.utils.data.Subset(ShortEpochs.data(self, split), range(24))


def fewer(self, split):
    return torch.utils.data.Subset(ShortEpochs.data(self, split), range(41))


class Changing(ShortEpochs):
    scheduler_step = "update"
    {hook}
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("", "optimizer = adam", "its optimizer was SGD, and is Adam now"),
        ("", "scheduler = waves", "its scheduler was None, and is LambdaLR now"),
        (
            "scheduler = waves",
            "scheduler = by_steps",
            "its scheduler was LambdaLR, and is StepLR now",
        ),
        ("", "parameter_groups = two", "number of parameter groups was 1, and is 2 now"),
        ("", "data = few", r"another length .* was the 4\. of epoch 1 of 42 samples; they have 24"),
        # Epochs have as many mini-batches as before, of another shuffle.
        ("", "data = fewer", r"epoch 1 of 42 samples; they have 41 now: put them back"),
    ],
)
def test_a_task_that_was_changed_since(before, after, message, tmp_path):
    path, target = tmp_path / "changing.py", f"{tmp_path / 'changing.py'}:Changing"
    path.write_text(CHANGING.format(tasks=str(TESTS / "tasks"), hook=before))
    plan = plan_for(target, "gpipe", 2)
    run(plan, settings_for(target, steps=4), tmp_path / "run", inline=True)
    path.write_text(CHANGING.format(tasks=str(TESTS / "tasks"), hook=after))
    with pytest.raises((UserError, FileError), match=message):
        resume(tmp_path / "run", steps=8, inline=True)
    # It is still the run that has ended.
    assert (tmp_path / "run/summary.json").exists()
    assert load_weights(tmp_path / "run")


@pytest.mark.parametrize("hook", ["optimizer = falling", "scheduler = decays"])
def test_a_rate_or_decay_that_steps_change_is_no_other_one(hook, tmp_path):
    path, target = tmp_path / "changing.py", f"{tmp_path / 'changing.py'}:Changing"
    path.write_text(CHANGING.format(tasks=str(TESTS / "tasks"), hook=hook))
    run(plan_for(target, "gpipe", 2), settings_for(target, steps=4), tmp_path / "run", inline=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskWarning)
        resume(tmp_path / "run", steps=6, inline=True)


@pytest.mark.parametrize("hook", ["", "scheduler = waves"])
def test_a_rate_that_was_changed_in_the_task_is_warned_of(hook, tmp_path):
    """The checkpoint's counts."""
    path, target = tmp_path / "changing.py", f"{tmp_path / 'changing.py'}:Changing"
    path.write_text(CHANGING.format(tasks=str(TESTS / "tasks"), hook=hook))
    run(plan_for(target, "gpipe", 2), settings_for(target, steps=4), tmp_path / "run", inline=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskWarning)
        resume(tmp_path / "run", steps=6, inline=True)
    hook = f"optimizer = slower; {hook}"
    path.write_text(CHANGING.format(tasks=str(TESTS / "tasks"), hook=hook))
    with pytest.warns(TaskWarning, match=r"has lr 0\.01 now, .* its checkpoint's, 0\.05;") as told:
        resume(tmp_path / "run", steps=8, inline=True)
    assert len(told) == 1


def test_state_that_no_file_can_hold(tmp_path):
    plan = plan_for(f"{TASKS}:Odd", "timeprest", 2)
    settings = settings_for(f"{TASKS}:Odd")
    with pytest.raises(TargetError, match=r"can't hold groups/0/rule: it is a Odd.*-every 0"):
        run(plan, settings, tmp_path / "run", inline=True)
    assert list(tmp_path.glob("run/checkpoints/*")) == []
    settings = msgspec.structs.replace(settings, checkpoint_every=0)
    run(plan, settings, tmp_path / "without", inline=True)
    with pytest.raises(UserError, match="has ended, and it has no checkpoints"):
        resume(tmp_path / "without", inline=True)


def test_conjugates_come_back_as_they_are(tmp_path):
    """torch leaves those in memory as they were."""
    conjugate = torch.tensor([1.0 + 2.0j]).conj()
    save_tensors(tmp_path / "it", {"it": conjugate})
    torch.testing.assert_close(read_tensors(tmp_path / "it")["it"], conjugate.resolve_conj())


TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.integers() | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.slow
@given(tree=TREES)
def test_plain_state_comes_back_as_it_was(tree):
    found = unpack(json.loads(json.dumps(pack(tree, {}, "state"))), {})
    assert repr(found) == repr(tree)


def test_a_shared_weight_with_channels_last_is_written_under_both_names():
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    found = load(tensor_bytes({"a": weight, "b": weight, "c": weight[0].transpose(0, 2)}))
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight)
    assert torch.equal(found["c"], weight[0].transpose(0, 2))


def test_a_rate_that_numpy_has_computed_comes_back():
    """As of a LambdaLR whose function calls np.cos."""
    found = unpack(json.loads(json.dumps(pack({"lr": np.float64(0.1)}, {}, "groups/0"))), {})
    assert repr(found) == "{'lr': 0.1}"


# Other plans, other tools --------------------------------------------------------------------


def plain_model(target, steps, optimizer=None, model=None):
    """Plain training for so many mini-batches of the first epoch, gone on with or from scratch."""
    task = resolve(target).task
    if model is None:
        torch.manual_seed(0)
        model = task.model()
        optimizer = optimizer(model.parameters())
    samples = Samples(task, "train", 8, seed=0)
    for b in range(steps):
        inputs, wanted = samples.take(0, range(b * 8, b * 8 + 8))
        optimizer.zero_grad()
        task.loss(model(*inputs), wanted).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [("gpipe", "zb-h1"), ("pipedream-flush", "gpipe")])
@pytest.mark.parametrize("optimizer", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@pytest.mark.parametrize(("stages", "then"), [(3, 2), (1, 4)])
def test_another_plan_goes_on_from_a_checkpoint(
    one, other, optimizer, stages, then, mlp_target, tmp_path
):
    """As plain training that goes on with its optimizer: weights to 1e-10."""
    settings = settings_for(mlp_target, steps=8, optimizer=optimizer)
    run(plan_for(mlp_target, one, stages), settings, tmp_path / "one", inline=True)
    settings = msgspec.structs.replace(settings, start_from=str(tmp_path / "one"), steps=6)
    run(plan_for(mlp_target, other, then), settings, tmp_path / "other", inline=True)

    def make(parameters):
        if optimizer is ADAM:
            return torch.optim.Adam(parameters, lr=0.02)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    trained = plain_model(mlp_target, 8, make)
    model, _ = plain_model(mlp_target, 6, trained[1], trained[0])
    state = load_weights(tmp_path / "other")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(state[name], weight, rtol=0, atol=1e-10)


def test_starting_from_weights_alone_or_one_checkpoint(stopped, mlp_target, tmp_path):
    """A safetensors file, a checkpoint, and a run of another system with replicas."""
    assert tp_run_prints("export", stopped, "--at", 4, "-o", tmp_path / "m.safetensors").startswith(
        f"wrote {tmp_path / 'm.safetensors'}, from {stopped / 'checkpoints' / '00000004'}"
    )
    plan = plan_for(mlp_target, "pipedream", 3, replicas=(1, 2, 1))
    settings = settings_for(mlp_target, steps=5, optimizer=PLAIN)
    found = []
    for name, start in (
        ("file", tmp_path / "m.safetensors"),
        ("one", stopped / "checkpoints" / "00000004"),
    ):
        start_from = msgspec.structs.replace(settings, start_from=str(start))
        run(plan, start_from, tmp_path / name, inline=True)
        found.append(read_losses(tmp_path / name / "metrics.jsonl"))
    # The optimizer has no momentum, so its state makes no difference.
    assert found[0] == found[1]
    run(plan, settings, tmp_path / "new", inline=True)
    assert found[0][0] != read_losses(tmp_path / "new" / "metrics.jsonl")[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    ],
)
def test_an_optimizer_may_keep_more_than_the_one_before(kind, options):
    """It goes on as one that was told of the options then, with nothing of what they ask for."""
    module = torch.nn.Linear(2, 1)
    updated = list(module.parameters())
    before, after = kind(updated, lr=0.1), kind(updated, lr=0.1, **options)
    for p in updated:
        p.grad = torch.ones_like(p)
    before.step()
    named = dict(module.named_parameters())
    give_kept(after, named, {name: before.state[p] for name, p in named.items()})
    after.step()
    for p in updated:
        assert before.state[p].keys() <= after.state[p].keys()
        assert after.state[p].get("step", 2) == 2


def test_all_workers_start_from_the_same_checkpoint(stopped, mlp_target, tmp_path):
    """The run that another starts from may be going on, and write newer ones."""
    shutil.copytree(stopped, tmp_path / "first")
    newest = tmp_path / "first/checkpoints/00000008"

    class Goes(Observer):
        def begin(self, begun):
            shutil.copytree(stopped / "checkpoints/00000004", newest.with_name("00000012"))

    plan = plan_for(mlp_target, "gpipe", 2)
    settings = settings_for(mlp_target, steps=2, start_from=str(tmp_path / "first"))
    run(plan, settings, tmp_path / "then", inline=True, observer=Goes())
    settings = msgspec.structs.replace(settings, start_from=str(newest))
    run(plan, settings, tmp_path / "named", inline=True)
    found = [read_losses(tmp_path / name / "metrics.jsonl") for name in ("then", "named")]
    assert found[0] == found[1]


def tp_run_prints(*arguments):
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_starting_from_what_doesnt_fit(stopped, tmp_path):
    plan = plan_for(f"{TASKS}:ShakenTask", "gpipe", 2)
    saved = tmp_path / "weights.pt"
    torch.save(resolve(f"{TASKS}:ShakenTask").model(0).state_dict(), saved)
    for start, message in (
        (tmp_path / "nowhere", "no such run directory, checkpoint or safetensors file"),
        (tmp_path, "holds no checkpoint and no weights"),
        (saved, "weights.pt: was written by torch.save, and this takes safetensors: .*save_file"),
        (stopped, "'l0.weight' has shape \\[7, 5\\], and \\[6, 5\\] in this model"),
    ):
        settings = settings_for(f"{TASKS}:ShakenTask", start_from=str(start))
        with pytest.raises(FileError, match=message):
            run(plan, settings, tmp_path / "run", inline=True)
        assert not (tmp_path / "run").exists()


def test_weights_that_start_a_run_are_the_models(tmp_path):
    """Names that it hasn't are said; integers in the place of a weight are a mistake, and so are
    names as a wrapper has them."""
    plan = plan_for(f"{TASKS}:ShakenTask", "gpipe", 2)
    model = resolve(f"{TASKS}:ShakenTask").model(1)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    start = tmp_path / "start.safetensors"
    settings = settings_for(f"{TASKS}:ShakenTask", start_from=str(start), steps=1, evaluate=False)
    save_file({**weights, "head.weight": torch.ones(2)}, start)
    with pytest.warns(TaskWarning, match="the model has no weights of these names: head"):
        run(plan, settings, tmp_path / "more", inline=True)
    save_file(weights, start)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TaskWarning)
        run(plan, settings, tmp_path / "same", inline=True)
    save_file({f"module.{name}": value for name, value in weights.items()}, start)
    with pytest.raises(FileError, match=r"has no 'l0.weight', but 'module.l0.weight': give"):
        run(plan, settings, tmp_path / "wrapped", inline=True)
    save_file({**weights, "l0.bias": torch.ones_like(weights["l0.bias"]).long()}, start)
    with pytest.raises(FileError, match="is of int64, and of float64 in this"):
        run(plan, settings, tmp_path / "run", inline=True)


@pytest.mark.parametrize("name", ["ShakenTask", "IdleTask"])
def test_an_exported_model_is_the_one_that_was_evaluated(name, tmp_path):
    """In plain PyTorch, by load_state_dict: loss on the test data as the run told it."""
    task = f"{TASKS}:{name}"
    settings = settings_for(task, **SHORT)
    summary = run(plan_for(task, "timeprest", 2), settings, tmp_path / "run", inline=True)
    tp_run_prints("export", tmp_path / "run", "-o", tmp_path / "model.safetensors", "-q")
    found = resolve(task).task
    model = found.model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    model.eval()
    inputs, wanted = found.data("test").tensors
    with torch.no_grad():
        loss = found.loss(model(inputs), wanted)
    assert float(loss) == pytest.approx(summary.epochs[-1].test["loss"], abs=1e-10)
