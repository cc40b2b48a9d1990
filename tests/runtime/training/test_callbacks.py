"""Callbacks: what they are told, and runs that they end early."""

from __future__ import annotations

import dataclasses

import pytest
import torch.distributed as dist
from helpers.alike import assert_same_weights
from helpers.plans import plan_by_hand, with_times
from helpers.processes.stopped_runs import assert_same
from timeprest import Callback, EarlyStopping, Stop, Trainer
from timeprest.profiles.errors import RunError, UserError
from timeprest.runtime.checkpoint.checkpoint import Saved
from timeprest.runtime.communication.channel import PeerError
from timeprest.runtime.processes.store import LaunchingProcess, LocalStore
from timeprest.runtime.records.events import EvaluationDone, RunBegun
from timeprest.runtime.records.progress import read_epochs, read_losses
from timeprest.runtime.records.run_dir import RunDir
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings


class Notes(Callback):
    """Writes everything down, and stops at one event."""

    def __init__(self, stop_at=None, *, waited_for=True):
        self.waited_for = waited_for
        self.events = []
        self.stop_at = stop_at

    def _note(self, event):
        self.events.append(event)
        at = type(event).__name__, getattr(event, "mini_batch", None)
        return Stop("enough") if at == self.stop_at else None

    on_begin = on_mini_batch = on_evaluation = on_epoch = on_checkpoint = on_end = _note

    def named(self):
        return [(type(e).__name__, getattr(e, "mini_batch", None)) for e in self.events]


@pytest.fixture(scope="module")
def short_epochs(mlp_target):
    """Five mini-batches each."""
    return mlp_target.replace("MLPTask", "ShortEpochs")


@pytest.fixture(scope="module")
def plan(mlp_profile):
    return plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)


def of_epochs(short_epochs, **more):
    return RunSettings(task=short_epochs, **{"epochs": 3, **more})


@pytest.fixture(scope="module")
def whole(plan, short_epochs, tmp_path_factory):
    """The run that nothing stops, and its losses."""
    where = tmp_path_factory.mktemp("whole") / "run"
    run(plan, of_epochs(short_epochs, keep_checkpoints=9), where, inline=True)
    return where


def test_callbacks_are_told_in_sequence(plan, short_epochs, whole, tmp_path):
    notes = Notes()
    trainer = Trainer(
        plan, tmp_path / "run", of_epochs(short_epochs, epochs=2), callbacks=[notes], inline=True
    )
    summary = trainer.run()
    each = summary.epochs[0].mini_batches
    assert notes.named() == [
        ("RunBegun", None),
        *[
            told
            for end in (each, 2 * each)
            for told in (
                *[("MiniBatchDone", k + 1) for k in range(end - each, end)],
                ("EvaluationDone", end),
                ("EpochDone", end),
                ("CheckpointWritten", end),
            )
        ],
        ("RunEnded", None),
    ]
    begun, ended = notes.events[0], notes.events[-1]
    assert (begun.mini_batches, begun.epoch_mini_batches) == (2 * each, each)
    assert ended.summary == summary
    assert ended.error is None
    losses = [e.loss for e in notes.events if type(e).__name__ == "MiniBatchDone"]
    assert losses == read_losses(tmp_path / "run" / "metrics.jsonl")
    assert losses == read_losses(whole / "metrics.jsonl")[: 2 * each]
    assert [e.record for e in notes.events if type(e).__name__ == "EpochDone"] == summary.epochs
    with pytest.raises(dataclasses.FrozenInstanceError):
        begun.mini_batches = 3


@pytest.mark.parametrize("inline", [True, pytest.param(False, marks=pytest.mark.processes)])
def test_a_run_stops_where_the_pipeline_drains(inline, plan, short_epochs, whole, tmp_path):
    """With the weights that the whole run had there, and everything that a run leaves; and it
    can be resumed as if nothing had stopped it."""
    each = read_epochs(whole / "metrics.jsonl")[0].mini_batches
    notes, where = Notes(("MiniBatchDone", each + 1)), tmp_path / "run"
    settings = of_epochs(short_epochs)
    summary = Trainer(plan, where, settings, callbacks=[notes], inline=inline).run()
    assert summary.stopped == "enough"
    assert summary.mini_batches == 2 * each
    assert len(summary.epochs) == 2
    assert notes.named()[-2:] == [("CheckpointWritten", 2 * each), ("RunEnded", None)]
    assert_losses = read_losses(whole / "metrics.jsonl")[: 2 * each]
    assert read_losses(where / "metrics.jsonl") == assert_losses
    there = Saved(whole / "checkpoints" / f"{2 * each:08d}").weights()
    assert_same_weights(where, there)
    if inline:
        again = Trainer(None, where, inline=True).resume()
        assert again.stopped is None
        assert_same(whole, where, 3 * each)


def test_a_run_stops_in_the_middle_of_an_epoch(plan, short_epochs, tmp_path):
    """At the next checkpoint, after which the epoch's part is evaluated as at the end of a run."""
    settings = of_epochs(short_epochs, checkpoint_every=3, keep_checkpoints=9)
    run(plan, settings, tmp_path / "whole", inline=True)
    notes, where = Notes(("MiniBatchDone", 1)), tmp_path / "run"
    summary = Trainer(plan, where, settings, callbacks=[notes], inline=True).run()
    assert summary.mini_batches == 3
    assert [record.mini_batches for record in summary.epochs] == [3]
    assert summary.epochs[0].test
    assert RunDir(where).checkpoints.places() == [3]
    there = Saved(tmp_path / "whole" / "checkpoints" / "00000003").weights()
    assert_same_weights(where, there)
    Trainer(None, where, inline=True).resume()
    last = RunDir(where).checkpoints.places()[-1]
    assert_same(tmp_path / "whole", where, last)
    records = [
        [(r.epoch, r.mini_batches, r.train_loss, r.test) for r in read_epochs(each)]
        for each in (tmp_path / "whole" / "metrics.jsonl", where / "metrics.jsonl")
    ]
    assert records[0] == records[1]


def test_a_resumed_run_knows_what_was_before(plan, short_epochs, tmp_path):
    """Up to its checkpoint; a line after that may have broken off."""
    where, settings = tmp_path / "run", of_epochs(short_epochs, checkpoint_every=3)
    notes = Notes(("EvaluationDone", 5))
    Trainer(plan, where, settings, callbacks=[notes], inline=True).run()
    (seen,) = [e for e in notes.events if type(e).__name__ == "EvaluationDone"]
    (where / "summary.json").unlink()
    with (where / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "mini_ba\n')
    for at, before in ((5, (seen,)), (3, ())):
        notes = Notes(("MiniBatchDone", 6))
        Trainer(None, where, callbacks=[notes], inline=True).resume(at=at)
        assert notes.events[0].before == before
        assert notes.events[0].resumed_at == at


def test_evaluations_of_an_epoch_that_went_on_are_where_they_were(plan, short_epochs, tmp_path):
    """The run grew in the middle of an epoch, which has several records then."""
    settings = of_epochs(short_epochs, epochs=1, steps=3, eval_every=1)
    Trainer(plan, tmp_path, settings, inline=True).run()
    notes = Notes(("EvaluationDone", 4))
    Trainer(None, tmp_path, callbacks=[notes], inline=True).resume(steps=5)
    notes = Notes()
    Trainer(None, tmp_path, callbacks=[notes], inline=True).resume()
    assert [e.mini_batch for e in notes.events[0].before] == [1, 2, 3, 4]


def test_answers_of_callbacks_come_in_time_or_the_run_ends():
    store, answers = dist.HashStore(), []
    local, worker = object.__new__(LocalStore), LaunchingProcess(store, 1, 1.0)
    local._space, local._answered = store, 0
    assert not worker.is_asked()
    local.be_asked()
    assert worker.is_asked()
    for going in (True, False):
        worker._within_s = 0.01
        message = r"no answer within 0\.01 s after mini-batch 7: a callback"
        with pytest.raises(PeerError, match=message):
            worker.drained(7, checkpoint=True)
        local.answer(lambda *asked, going=going: answers.append(asked) or going)
        worker._within_s = 1.0
        assert worker.drained(7, checkpoint=True) == going
    assert answers == [(7, True)] * 2


def test_python_leaves_torchrun_to_the_command(plan, short_epochs, tmp_path, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="that torchrun has started; start tp-run by torchrun"):
        Trainer(plan, tmp_path / "run", of_epochs(short_epochs))


def test_a_stop_at_the_end_is_none(plan, short_epochs, tmp_path):
    notes = Notes(("MiniBatchDone", 4))
    settings = of_epochs(short_epochs, steps=4)
    summary = Trainer(plan, tmp_path / "run", settings, callbacks=[notes], inline=True).run()
    assert (summary.mini_batches, summary.stopped) == (4, None)


def test_what_only_watches_is_not_waited_for(plan, short_epochs, tmp_path):
    """It is told the same of mini-batches and epochs."""
    notes = Notes(waited_for=False)
    settings = of_epochs(short_epochs, steps=4, evaluate=False)
    trainer = Trainer(plan, tmp_path / "run", settings, callbacks=[notes], inline=True)
    assert not trainer._observer.waited_for
    trainer.run()
    assert ("MiniBatchDone", 4) in notes.named()
    assert not any(name == "EvaluationDone" for name, _ in notes.named())


class Fails(Callback):
    def on_mini_batch(self, event):
        return 1 // (2 - event.mini_batch) and None


class Says(Callback):
    def on_begin(self, event):
        return True


def test_a_callback_that_fails_ends_the_run_with_one_line(plan, short_epochs, tmp_path):
    settings = of_epochs(short_epochs, steps=4)
    notes = Notes()
    trainer = Trainer(plan, tmp_path / "fails", settings, callbacks=[Fails(), notes], inline=True)
    message = r"callback Fails.on_mini_batch failed: .*test_callbacks.py:\d+: ZeroDivisionError"
    with pytest.raises(RunError, match=message) as found:
        trainer.run()
    assert notes.events[-1].error is found.value
    trainer = Trainer(plan, tmp_path / "says", settings, callbacks=[Says()], inline=True)
    with pytest.raises(UserError, match=r"callback Says.on_begin gave True: return Stop\('why'\)"):
        trainer.run()
    with pytest.raises(UserError, match="Notes isn't a callback: give objects"):
        Trainer(plan, tmp_path / "run", settings, callbacks=[Notes])
    with pytest.raises(UserError, match="give the plan"):
        Trainer(None, tmp_path / "run").run()
    for task in (None, object()):
        with pytest.raises(UserError, match="epochs: leave out"):
            Trainer(None, tmp_path / "run", task=task, epochs=3)


def test_one_callback_is_no_list_of_them(plan, tmp_path):
    with pytest.raises(UserError, match="callbacks: give a list of them, not Callback"):
        Trainer(plan, tmp_path / "run", callbacks=Callback())
    for given, why in (
        ({"epochs": 1, "steps": 2}, "epochs, steps: give one of them"),
        ({"inline": "no"}, "inline: give True or False, not 'no'"),
        ({"max_restarts": "2"}, "max_restarts '2': give a whole number from 0"),
    ):
        with pytest.raises(UserError, match=why):
            Trainer(plan, tmp_path / "run", **given)


# Early stopping ---------------------------------------------------------------------------------


def stops_after(callback, figures, plan, settings, before=()):
    """At which of these evaluations it stops; None: at none."""
    done = len(before)
    begun = RunBegun(
        plan=plan,
        settings=settings,
        run_dir="run",
        mini_batches=99,
        epoch_mini_batches=9,
        before=tuple(
            EvaluationDone(mini_batch=k + 1, epoch=k, figures=f) for k, f in enumerate(before)
        ),
    )
    callback.on_begin(begun)
    for k, each in enumerate(figures, done):
        event = EvaluationDone(mini_batch=k + 1, epoch=k, figures=each)
        if callback.on_evaluation(event) is not None:
            return k + 1
    return None


def test_early_stopping(plan, short_epochs):
    losses = [{"loss": loss} for loss in (3.0, 2.0, 2.5, 1.9, 1.9, 1.95, float("nan"), 1.0)]
    settings = of_epochs(short_epochs)
    for patience, delta, at in ((1, 0.0, 3), (2, 0.0, 6), (3, 0.0, 7), (4, 0.0, None), (2, 0.2, 4)):
        callback = EarlyStopping(patience=patience, min_delta=delta)
        assert stops_after(callback, losses, plan, settings) == at
    callback = EarlyStopping(patience=3)
    stops_after(callback, losses, plan, settings)
    assert (callback.best, callback.best_mini_batch) == (1.9, 4)
    # A resumed run goes on with what was seen before.
    assert stops_after(callback, losses[5:], plan, settings, losses[:5]) == 7
    rising = [{"accuracy": figure} for figure in (0.5, 0.6, 0.55, 0.6)]
    callback = EarlyStopping("accuracy", patience=2, mode="max")
    assert stops_after(callback, rising, plan, settings) == 4
    with pytest.raises(UserError, match="has no 'loss'; it has accuracy"):
        stops_after(EarlyStopping(), rising, plan, settings)
    with pytest.raises(UserError, match="goes by evaluations"):
        stops_after(EarlyStopping(), [], plan, of_epochs(short_epochs, evaluate=False))
    for bad in (
        {"mode": "most"},
        {"patience": 0},
        {"patience": "3"},
        {"patience": float("nan")},
        {"min_delta": -1.0},
    ):
        with pytest.raises(UserError, match="EarlyStopping"):
            EarlyStopping(**bad)


def test_early_stopping_ends_a_run(plan, short_epochs, tmp_path):
    """Nothing is better by 1000 than the first evaluation."""
    stopping = EarlyStopping(patience=1, min_delta=1000)
    settings = of_epochs(short_epochs)
    trainer = Trainer(plan, tmp_path / "run", settings, callbacks=[stopping], inline=True)
    summary = trainer.run()
    assert len(summary.epochs) == 2
    assert summary.stopped.startswith("test loss no better than")


@pytest.mark.parametrize("inline", [True, pytest.param(False, marks=pytest.mark.processes)])
def test_the_best_is_kept_whatever_the_patience(inline, plan, short_epochs, tmp_path):
    """With one checkpoint kept besides, after four more; what was the best before isn't."""
    stopping = EarlyStopping(patience=4, min_delta=1000)
    other = EarlyStopping(patience=99)
    settings = of_epochs(short_epochs, epochs=9, keep_checkpoints=1)
    how = {"callbacks": [stopping, other], "inline": inline}
    Trainer(plan, tmp_path / "run", settings, **how).run()
    where = RunDir(tmp_path / "run")
    assert stopping.best_mini_batch == 5
    assert where.checkpoints.places() == sorted({5, other.best_mini_batch, 25})
    best = Saved(where.checkpoints.folder(5))
    best.verify()
    stopping.patience = 99
    Trainer(None, tmp_path / "run", **how).resume()
    # What was the best until the last checkpoint goes with the next one.
    assert {5, other.best_mini_batch, 45} <= {*where.checkpoints.places()}
    assert len(where.checkpoints.places()) <= 3
    # Of a run that nobody stops, the newest alone.
    run(plan, settings, tmp_path / "plain", inline=True)
    assert RunDir(tmp_path / "plain").checkpoints.places() == [45]
