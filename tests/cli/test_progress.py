"""Progress of long work: what a bar says on a terminal and elsewhere, and what a run tells it."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from helpers.output.lines import is_progress
from helpers.plans import plan_by_hand, with_times
from timeprest.cli import progress
from timeprest.cli.errors import PlainConsole
from timeprest.cli.progress import Bar, time_left
from timeprest.cli.run import main
from timeprest.cli.run_commands.progress import (
    BusyShares,
    Rate,
    TrainingProgress,
    busy_text,
    training_text,
)
from timeprest.profiles.files import write_file
from timeprest.runtime.records.events import MiniBatchDone
from timeprest.runtime.records.progress import Observer
from timeprest.runtime.records.status import WorkerStatus
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def work(clock, seconds, *, quiet=False):
    """A bar is told every second."""
    with Bar("planning", quiet=quiet) as bar:
        for k in range(seconds):
            bar(f"layer {k}", k, seconds)
            clock.now += 1


def test_a_file_gets_a_plain_line_now_and_then(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    work(clock, 30)
    assert sys.stderr.getvalue() == ""
    work(clock, 300)
    lines = sys.stderr.getvalue().splitlines()
    assert lines[0].endswith("planning: layer 30 (30 s, 4 min left)")
    assert 5 <= len(lines) <= 8
    assert all(line.isprintable() and is_progress(line) for line in lines)


def test_a_terminal_gets_a_bar_and_quiet_nothing(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    work(clock, 3)
    assert "planning" in sys.stderr.getvalue()
    monkeypatch.setattr(sys, "stderr", Terminal())
    work(clock, 300, quiet=True)
    assert sys.stderr.getvalue() == ""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    work(clock, 300, quiet=True)
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_names_in_progress_move_no_cursor(terminal, clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    with Bar("profiling \x1b[5m[red]m", quiet=False) as bar:
        for k in range(40):
            bar("layer \x1b[2J\u202e\x9b1m", k, 40)
            clock.now += 1
    said = sys.stderr.getvalue()
    assert "profiling \\x1b[5m[red]m" in said
    assert "layer \\x1b[2J\\u202e\\x9b1m" in said
    assert not any(evil in said for evil in ("\x1b[2J", "\x1b[5m", "\u202e", "\x9b"))


def test_what_has_no_steps_is_said_at_once_on_a_terminal(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "200")
    with Bar("timeprest", quiet=False) as bar:
        bar.doing("building the model")
        bar.doing("starting 2 processes")
    assert "starting 2 processes" in sys.stderr.getvalue()


def test_what_has_no_steps_is_said_elsewhere_where_it_takes_long(clock, monkeypatch):
    monkeypatch.setattr(progress, "_WATCHED_S", 1e6)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Bar("timeprest", quiet=False) as bar:
        bar.doing("importing it")
        bar.say_if_long(clock.now + 5)
        bar.doing("building the model")
        clock.now += 20
        bar.say_if_long(clock.now)
        bar.say_if_long(clock.now + 1)
        bar.doing("starting 2 processes")
        # Work with steps begins.
        bar("epoch 1", 1, 10)
        bar.say_if_long(clock.now + 100)
    (line,) = sys.stderr.getvalue().splitlines()
    assert line.endswith("timeprest: building the model (20 s)")
    assert is_progress(line)
    with Bar("timeprest", quiet=True) as bar:
        bar.doing("building the model")
        bar.say_if_long(clock.now + 100)
    assert sys.stderr.getvalue().count("\n") == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_an_epoch_is_one_line_of_a_log(terminal, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal() if terminal else io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    line = "epoch   1" + "".join(f"  test figure{k} 0.1234" for k in range(20))
    with Bar("timeprest", quiet=False) as bar:
        bar.print(line)
    assert (f"{line}\n" == sys.stdout.getvalue()) == (not terminal)


class Tells(Observer):
    def __init__(self):
        self.said = []

    def starting(self, what):
        self.said.append(what)

    def mini_batch(self, epoch, done, of, loss, figures):
        self.said.append("trains")


@pytest.mark.processes
@pytest.mark.parametrize("inline", [True, False])
def test_a_run_says_what_it_does_until_it_trains(inline, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2)
    settings = RunSettings(task=mlp_target, steps=2, evaluate=False)
    tells = Tells()
    run(plan, settings, tmp_path / "run", inline=inline, observer=tells)
    said = tells.said
    assert said[:4] == [
        f"importing {mlp_target}",
        "building the model",
        "tracing the model and holding it against the plan",
        "cutting the model into stages",
    ]
    if inline:
        assert said[4:] == ["loading the data", "trains", "trains"]
    else:
        assert said[4] == "starting 2 processes: 2 starting"
        last = said.index("trains")
        assert all(s.startswith("starting 2 processes: ") or s == WAITS for s in said[4:last])
        assert set(said[last:]) == {"trains"}


WAITS = "waiting for the first mini-batch"


def test_time_left():
    assert time_left(10, 1, 4) == "30 s left"
    assert time_left(100, 1, 11) == "17 min left"
    assert time_left(10_000, 1, 3) == "6 h left"
    # Too early, without an end, or beyond it.
    assert time_left(0.5, 1, 4) == time_left(10, 0, 4) == time_left(10, 1, 0) == ""
    assert time_left(10, 5, 4) == ""


def test_the_time_left_is_of_the_steps_since_the_last_phase(clock, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Bar("training", quiet=False) as bar:
        for before in (50, 20):
            bar.doing("loading")
            for k in range(41):
                bar("epoch 1", before + k, 100)
                clock.now += 1
    assert "epoch 1 (68 s, 53 s left)" in sys.stderr.getvalue()


def test_nothing_is_said_to_be_left_where_no_end_is_known(clock, monkeypatch):
    """Neither of what has none, nor does it count for what has one."""
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Bar("profiling", quiet=False) as bar:
        for _ in range(40):
            bar("finding the graph", 0, 0)
            clock.now += 1
        for k in range(60):
            bar("timing", k, 60)
            clock.now += 1
        for _ in range(200):
            bar("memory", 0, 0)
            clock.now += 1
    lines = sys.stderr.getvalue().splitlines()
    assert lines[0].endswith(": profiling: finding the graph (30 s)")
    assert lines[1].endswith(": profiling: timing (45 s, 55 s left)")
    assert [line for line in lines if "memory" in line]
    assert not [line for line in lines if "memory" in line and "left" in line]


def test_samples_per_second_are_of_the_last_seconds():
    rate = Rate(16)
    assert rate(1, 0.0) is None
    assert rate(11, 1.0) == pytest.approx(160)
    for second in range(2, 20):
        found = rate(11 + (second - 1), float(second))
    assert found == pytest.approx(16)


@pytest.mark.parametrize(("ragged", "samples"), [("pad", 42 / 6), ("drop", 40 / 5)])
def test_samples_per_second_leave_padding_out(ragged, samples, mlp_profile, mlp_target, tmp_path):
    """An epoch of 42 samples in mini-batches of 8: the last one has 2 of its own, or there is none
    of them."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    settings = RunSettings(task=mlp_target.replace("MLPTask", "ShortEpochs"), ragged=ragged)
    shown = TrainingProgress(Bar("training", quiet=True), plan, None, list)

    class Begins(Observer):
        def begin(self, begun):
            shown.on_begin(begun)

    run(plan, settings, tmp_path / "run", inline=True, observer=Begins())
    shown._rate(1, 0.0)
    assert shown._rate(2, 1.0) == pytest.approx(samples)


def test_busy_shares_are_those_of_the_looks():
    busy = BusyShares(None, [0, 1, 1])
    at = WorkerStatus(rank=0, name="stage 0", host="here", pid=1, at="0F1.0")
    waits = WorkerStatus(rank=0, name="stage 0", host="here", pid=1, at="0B1", waits_for=(1,))
    between = WorkerStatus(rank=0, name="stage 0", host="here", pid=1, at="")
    busy.look({0: at}, 0.0)
    assert busy.shares() == []
    busy.look({0: at, 1: waits, 2: at}, 1.0)
    busy.look({0: between, 1: waits, 2: at}, 1.5)
    assert busy.shares() == [pytest.approx(2 / 3), 0.5]
    # What is long past doesn't count.
    busy.look({0: at, 1: at, 2: at}, 6.2)
    assert busy.shares() == [0.5, 0.75]


def test_what_training_says():
    at = MiniBatchDone(mini_batch=3, epoch=0, done=3, of=22, loss=2.25)
    text = training_text(at, 1422.4, [0.5, 0.925])
    assert text == "epoch 1: 3/22, 1422 samples/s, loss 2.2500, busy 50 92%"
    assert training_text(replace(at, epoch=4), None, []) == "epoch 5: 3/22, loss 2.2500"
    assert busy_text([0.25, 0.75] * 8) == "busy 25% to 75%, mean 50%"


def test_a_reader_that_has_had_enough_ends_the_command_in_silence():
    """``tp-plan show plan.json | head -1``: rich would end it with an exit code of its own."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        PlainConsole(file=Closed()).print("a line")


@pytest.mark.parametrize("more", ["--steps", "--epochs"])
def test_a_bar_of_a_run_that_grows_goes_to_its_new_end(
    more, mlp_profile, mlp_target, tmp_path, monkeypatch
):
    seen = []
    monkeypatch.setattr(Bar, "__call__", lambda self, what, done, of: seen.append((done, of)))
    monkeypatch.chdir(tmp_path)
    write_file("plan.json", plan_by_hand(with_times(mlp_profile), "gpipe", 2, 2))
    how = ["--inline", "--run-dir", "run", "-q"]
    for words in (["plan.json", "--task", mlp_target, more, "1"], ["--resume", more, "2"]):
        done = CliRunner().invoke(main, [*words, *how])
        assert done.exit_code == 0, done.output
    done, of = seen[-1]
    assert done == of == 2 * seen[0][1]
