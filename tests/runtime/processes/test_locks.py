"""One run at a time in a run directory, and workers that are stopped for good."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest
from helpers.plans import plan_by_hand, with_times
from timeprest.profiles.errors import FileError, UserError
from timeprest.runtime.processes import locks as run_lock
from timeprest.runtime.processes import watchdog
from timeprest.runtime.processes.locks import alone, as_worker
from timeprest.runtime.records.run_dir import RunDir
from timeprest.runtime.run import resume, run
from timeprest.runtime.settings import RunSettings

HOLD = """
import sys
from pathlib import Path
from timeprest.runtime.records.run_dir import RunDir
from timeprest.runtime.processes.locks import alone
with alone(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that has the directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_a_second_run_is_refused_while_the_first_lives(holder, tmp_path):
    with pytest.raises(UserError, match=f"a run is going on in it .process {holder.pid} on "):
        alone(tmp_path).__enter__()
    holder.kill()
    holder.wait()
    with alone(tmp_path):
        pass


@pytest.mark.slow
def test_neither_a_new_run_nor_a_resumed_one(holder, mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 2)
    settings = RunSettings(task=mlp_target, steps=2, evaluate=False)
    with pytest.raises(UserError, match="a run is going on in it"):
        run(plan, settings, tmp_path, inline=True)
    assert not (tmp_path / "plan.json").exists()
    holder.communicate()
    run(plan, settings, tmp_path, inline=True)
    with alone(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} on "):
        resume(tmp_path, steps=4, inline=True)
    # Its checkpoints come and go, too.
    (newest,) = (tmp_path / "checkpoints").iterdir()
    (newest / "checkpoint.json").rename(tmp_path / "gone.json")
    with alone(tmp_path), pytest.raises(UserError, match=f"process {os.getpid()} on "):
        resume(tmp_path, steps=4, inline=True)
    (tmp_path / "gone.json").rename(newest / "checkpoint.json")
    assert resume(tmp_path, steps=4, inline=True).mini_batches == 4


def test_processes_of_one_run_have_it_together(tmp_path):
    with alone(tmp_path, "one"), alone(tmp_path, "one"):
        pass


def test_but_not_those_of_another(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "ORPHANS_S", 0.2)
    with alone(tmp_path, "one"), pytest.raises(UserError, match="a run is going on"):
        alone(tmp_path, "two").__enter__()


def test_workers_that_outlive_their_launcher_are_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "ORPHANS_S", 0.2)
    me = f"{os.getpid()} on {socket.gethostname()}"
    named = rf"still there, whose tp-run has died \(processes {me}, {me}, 7 on afar\); end them"
    # One of another host, one that has ended, and one that isn't a worker.
    with subprocess.Popen(["true"]) as ended:
        pass
    here = socket.gethostname()
    others = f"7 on afar\n{ended.pid} on {here}\n{os.getppid()} on {here}\n"
    with as_worker(tmp_path), as_worker(tmp_path):
        # Rank 0 makes the run when all have locked its directory.
        RunDir(tmp_path).check_new()
        (tmp_path / "lock.workers").open("a").write(others)
        with pytest.raises(UserError, match=named):
            alone(tmp_path).__enter__()
    with alone(tmp_path):
        pass
    monkeypatch.setattr(run_lock, "ORPHANS_S", 30.0)
    worker = as_worker(tmp_path)
    worker.__enter__()
    threading.Timer(0.2, lambda: worker.__exit__(None, None, None)).start()
    with alone(tmp_path):
        pass


def test_what_a_run_has_forked_does_not_hold_it(tmp_path):
    """Workers that load samples may end a little after it."""
    with alone(tmp_path):
        child = os.fork()
        if not child:
            signal.pause()
            os._exit(0)
    try:
        with alone(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_directory_without_room_for_a_lock(tmp_path):
    with pytest.raises(FileError, match="lock: can't be written: No such file"):
        alone(tmp_path / "none").__enter__()


WATCHED = """
import sys, time
from timeprest.runtime.processes import watchdog
watchdog.LOOK_S = 0.05
watchdog.watch(float(sys.argv[1]))
print("watched", flush=True)
time.sleep(60)
"""


def watched(seconds):
    process = subprocess.Popen(
        [sys.executable, "-c", WATCHED, str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "watched\n"
    (dog,) = psutil.Process(process.pid).children()
    return process, dog


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's state as Linux has it")
def test_a_process_that_stands_still_is_ended():
    process, dog = watched(0.4)
    process.send_signal(signal.SIGSTOP)
    assert process.wait(20) == -signal.SIGKILL
    process.stdout.close()
    psutil.wait_procs([dog], timeout=20)
    assert not dog.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's state as Linux has it")
def test_a_watchdog_ends_with_its_process():
    process, dog = watched(60)
    process.kill()
    process.wait()
    process.stdout.close()
    psutil.wait_procs([dog], timeout=20)
    assert not dog.is_running()


def test_what_goes_on_again_is_left_alone(monkeypatch):
    """Stopped for less than the bound, twice."""
    states = iter(["stopped", "stopped", "running", "stopped", "stopped", "running", "gone"])

    class Seen:
        def status(self):
            state = next(states)
            if state == "gone":
                raise psutil.NoSuchProcess(1)
            return state

    monkeypatch.setattr(watchdog.psutil, "Process", lambda pid: Seen())
    monkeypatch.setattr(watchdog.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(watchdog.os, "kill", lambda pid, how: pytest.fail("killed"))
    bound = 2 * watchdog.LOOK_S
    assert watchdog.main([str(os.getppid()), str(bound)]) == 0
    assert list(states) == []


ELSEWHERE = """
import sys, psutil
sys.modules["fcntl"] = sys.modules["resource"] = None
from click.testing import CliRunner
from timeprest.cli.run import main as tp_run
from timeprest.profiles.errors import UserError
import timeprest.runtime.run, timeprest.runtime.training.worker
import timeprest.cli.profile, timeprest.cli.plan
asked = CliRunner().invoke(tp_run, ["plan.json"], prog_name="tp-run")
print(asked.exit_code, asked.stderr, end="")
print(CliRunner().invoke(tp_run, ["report", "--help"]).exit_code)
"""


@pytest.mark.slow
def test_a_system_without_locks_is_told_so_in_a_line(tmp_path):
    """Windows has neither fcntl nor resource; all modules can be imported there."""
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True)
    assert not done.stderr
    first, last = done.stdout.splitlines()
    assert "training isn't supported on this system" in first
    assert first.startswith("2 ")
    assert last == "0"
