"""Evaluations within epochs (--eval-every): where they come, and what is made of them."""

from __future__ import annotations

import json
import random

import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from graph_task import GraphTask
from helpers.alike import assert_same_weights, check_processes
from helpers.plans import plan_by_hand, profiled, with_times
from helpers.processes.stopped_runs import check_resumed
from timeprest import Callback, EarlyStopping, Trainer
from timeprest.cli.pictures.html.run_data import read_facts, run_figures
from timeprest.cli.run import main
from timeprest.profiles.errors import UserError
from timeprest.profiles.target import resolve
from timeprest.profiles.tracing.random_states import seed_all
from timeprest.runtime.communication.channel import LocalChannels
from timeprest.runtime.prepare.data import segments
from timeprest.runtime.records.metrics import EpochRecord, EvaluationRecord
from timeprest.runtime.records.progress import Losses, read_losses, read_progress
from timeprest.runtime.records.run_dir import RunDir, load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.training.evaluation import EVALUATION_AHEAD


def plan_of(profile, variant="timeprest", **more):
    return plan_by_hand(with_times(profile), variant, 2, 2, **more)


def evaluations(where):
    """Mini-batches of the run and figures of each evaluation, in the sequence of the file."""
    found, before = [], 0
    for line in read_progress(where / "metrics.jsonl"):
        if isinstance(line, Losses):
            continue
        found.append((before + line.mini_batches, line.test))
        before += line.mini_batches if isinstance(line, EpochRecord) else 0
    return found


def test_where_they_come(mlp_profile):
    """At multiples of the run's mini-batches, or the next update; epochs' ends have theirs."""
    settings = RunSettings(task="t", epochs=2, eval_every=3, checkpoint_every=4)
    found = segments(plan_of(mlp_profile), settings, 56)
    assert [(s.end, s.evaluation, s.checkpoint) for s in found] == [
        (3, True, False),
        (4, False, True),
        (6, True, False),
        (7, False, False),
        (8, False, True),
        (9, True, False),
        (12, True, True),
        (14, False, True),
    ]
    several = segments(plan_of(mlp_profile, update_every=2), settings, 56)
    assert [s.end for s in several if s.evaluation] == [4, 6, 9, 13]
    off = msgspec.structs.replace(settings, evaluate=False)
    assert not any(s.evaluation for s in segments(plan_of(mlp_profile), off, 56))


@pytest.mark.parametrize("variant", ["timeprest", "gpipe"])
def test_each_is_that_of_the_weights_there(variant, mlp_profile, mlp_target, tmp_path):
    """As plain PyTorch has it, of the checkpoint at the same place; and training that flushes is
    what it is without them."""
    plan = plan_of(mlp_profile, variant)
    how = {"task": mlp_target, "steps": 10, "checkpoint_every": 4, "keep_checkpoints": 9}
    run(plan, RunSettings(**how, eval_every=4), tmp_path / "run", inline=True)
    found = dict(evaluations(tmp_path / "run"))
    assert list(found) == [4, 8, 10]
    task = resolve(mlp_target).task
    inputs, wanted = task.data("test").tensors
    for place, figures in found.items():
        model = task.model()
        path = RunDir(tmp_path / "run").checkpoints.folder(place)
        model.load_state_dict(load_weights(path))
        with torch.no_grad():
            loss = float(task.loss(model(inputs), wanted))
        assert figures["loss"] == pytest.approx(loss, abs=1e-10)
    if variant == "gpipe":
        run(plan, RunSettings(**how), tmp_path / "without", inline=True)
        losses = [read_losses(tmp_path / w / "metrics.jsonl") for w in ("run", "without")]
        assert losses[0] == losses[1]


def test_a_resumed_run_has_them_all(mlp_profile, mlp_target, tmp_path):
    """Stopped between a checkpoint and an evaluation: the same weights, and each of them once."""
    settings = RunSettings(task=mlp_target, steps=12, checkpoint_every=4, eval_every=3)
    check_resumed(plan_of(mlp_profile), settings, tmp_path)
    whole, resumed = (evaluations(path.parent) for path in sorted(tmp_path.glob("*/metrics.jsonl")))
    assert [place for place, _ in whole] == [3, 6, 9, 12]
    assert whole == resumed


class Places(Callback):
    """Notes what it is told of evaluations."""

    def __init__(self):
        self.found = []

    def on_evaluation(self, event):
        self.found.append((event.mini_batch, event.figures))


def test_callbacks_are_told_and_may_stop(mlp_profile, mlp_target, tmp_path):
    """An evaluation within an epoch is told of once, and ends the run where it is."""
    places, patience = Places(), EarlyStopping(min_delta=100.0, patience=2)
    trainer = Trainer(
        plan_of(mlp_profile),
        tmp_path / "run",
        task=mlp_target,
        epochs=1,
        eval_every=2,
        inline=True,
        callbacks=[places, patience],
    )
    summary = trainer.run()
    assert summary.stopped.startswith("test loss no better")
    assert [place for place, _ in places.found] == [2, 4, 6]
    assert summary.mini_batches == 6
    assert summary.epochs[-1].test == places.found[-1][1]
    told = run_figures(read_facts(tmp_path / "run"))["evaluations"]
    assert [(each["mini_batches"], each["test"]) for each in told] == places.found


@pytest.mark.slow
@pytest.mark.processes
def test_processes_evaluate_the_same(mlp_profile, mlp_target, tmp_path):
    settings = RunSettings(task=mlp_target, steps=10, eval_every=4)
    plan = plan_of(mlp_profile)
    check_processes(plan, settings, tmp_path)
    found = [evaluations(tmp_path / name) for name in ("inline", "processes")]
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_the_report_and_the_terminal_have_them(mlp_profile, mlp_target, tmp_path):
    settings = RunSettings(task=mlp_target, steps=10, eval_every=4)
    run(plan_of(mlp_profile), settings, tmp_path / "run", inline=True)
    asked = ["report", str(tmp_path / "run"), "--json"]
    (found,) = json.loads(CliRunner().invoke(main, asked).stdout)["runs"]
    assert [each["mini_batches"] for each in found["evaluations"]] == [4, 8, 10]
    seconds = [each["seconds"] for each in found["evaluations"]]
    assert seconds == sorted(seconds)
    line = next(
        line
        for line in read_progress(tmp_path / "run" / "metrics.jsonl")
        if isinstance(line, EvaluationRecord)
    )
    assert found["evaluations"][0]["test"] == line.test


def test_without_evaluation_there_are_none_within_epochs(mlp_profile, mlp_target, tmp_path):
    settings = RunSettings(task=mlp_target, eval_every=2, evaluate=False)
    with pytest.raises(UserError, match="--eval-every: goes with --evaluate"):
        run(plan_of(mlp_profile), settings, tmp_path / "run", inline=True)


def test_no_stage_evaluates_far_ahead_of_the_next(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """No gradients come back that would hold it: before it has another message under way, it waits
    until a few are left."""
    found, under_way, send = [], 0, LocalChannels.send

    def throttled(channels, most):
        nonlocal under_way
        if channels.rank == 0:
            under_way = min(under_way, most)

    def sent(channels, *message, kept=False):
        nonlocal under_way
        if channels.rank == 0:
            under_way += 1
            found.append(under_way)
        send(channels, *message, kept=kept)

    monkeypatch.setattr(LocalChannels, "throttle", throttled)
    monkeypatch.setattr(LocalChannels, "send", sent)
    settings = RunSettings(task=mlp_target, steps=1)
    run(plan_of(mlp_profile, "gpipe"), settings, tmp_path / "run", inline=True)
    assert len(found) > 2 * EVALUATION_AHEAD
    assert max(found) == EVALUATION_AHEAD + 1


class Drawing(GraphTask):
    """Drops out, its loss draws otherwise, and its metric does both."""

    dropout = 0.3

    def loss(self, output, target):
        return super().loss(output, target) * (1 + np.random.rand() + random.random())

    def metrics(self, output, target):
        return {"drawn": torch.rand(()).item() + np.random.rand() + random.random()}


@pytest.mark.parametrize("placement", [(0,), (0, 1, 0, 1)])
def test_what_evaluating_draws_leaves_training_as_it_is(placement, tmp_path):
    target = f"{__file__}:Drawing"
    plan = plan_by_hand(profiled(target), "gpipe", len(placement), 2, placement=placement)
    for k, how in enumerate(({"evaluate": False}, {"eval_every": 1}, {})):
        seed_all(0)
        run(plan, RunSettings(task=target, steps=5, **how), tmp_path / str(k), inline=True)
        assert_same_weights(tmp_path / str(k), tmp_path / "0")
