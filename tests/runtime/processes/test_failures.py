"""When a worker dies, raises or stops: everybody ends soon, and the report names the cause."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers.output.lines import is_progress
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.chaos import left_behind
from timeprest.profiles.errors import FileError, RunError, UserError
from timeprest.profiles.files import write_file
from timeprest.runtime.communication.shared_memory import HostMemory
from timeprest.runtime.processes.launcher import _signals
from timeprest.runtime.processes.locks import alone
from timeprest.runtime.records.growing_file import GrowingFile
from timeprest.runtime.records.progress import Observer
from timeprest.runtime.records.status import StatusFile
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

ONE = r"stage 1 \(rank 1\)"
AT_TRAP = "last finished 1B4, next 1U4"
TRAP = f"{TESTS / 'tasks/failing_tasks.py'}:TrapTask"


def workers(run_dir):
    """Stage processes of a run that are still there. Other tests' runs are named alike, and where
    they are is relative to where their processes began."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        line = process.info["cmdline"] or []
        if "timeprest.runtime.training.worker" in line and process.info["cwd"]:
            where = Path(process.info["cwd"])
            if any((where / argument).absolute() == run_dir for argument in line):
                found.append(process)
    return found


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("trap", "transport", "message"),
    [
        (
            "raise:0",
            "gloo",
            r"stage 0, at 0U4: .*failing_tasks\.py:\d+: ValueError: the trap went off; "
            r"last finished 0B4, next 0U4; waiting: stage 1 at 1F\d\.\d for stage 0",
        ),
        (
            "SIGKILL:1",
            "auto",
            rf"{ONE} was killed by SIGKILL; {AT_TRAP}; waiting: stage 0 at 0[FB]\d[.\d]* for st",
        ),
        ("exit:0", "auto", r"stage 0 \(rank 0\) ended with exit code 3"),
        (
            "KeyboardInterrupt:0",
            "auto",
            r"stage 0, at 0U4: the task's optimizer .*failing_tasks.*: KeyboardInterrupt: 2; ",
        ),
        (
            "full:1",
            "auto",
            r"stage 1, at 1U\d+: .*/(metrics|recorded/stage1)\.jsonl: can't be written: File too ",
        ),
        (
            "SIGSTOP:1",
            "auto",
            rf"{ONE} is stopped \(SIGSTOP\); {AT_TRAP}; stage 0, at .*for 3 s",
        ),
    ],
)
def test_all_end_soon_and_the_cause_is_named(
    trap, transport, message, mlp_profile, tmp_path, monkeypatch
):
    """The others still compute when the worker fails; some find out when they send to it."""
    monkeypatch.chdir(tmp_path)
    Path("trap.txt").write_text(f"{trap}:0.4")
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    settings = RunSettings(task=TRAP, steps=40, evaluate=False, timeout_s=3, transport=transport)
    begin = time.monotonic()
    with pytest.raises(UserError if "full" in trap else RunError, match=message) as caught:
        run(plan, settings, tmp_path / "run")
    assert time.monotonic() - begin < 45
    assert "\n" not in str(caught.value)
    assert not workers(tmp_path / "run")


@pytest.mark.processes
@pytest.mark.parametrize("task", ["GoesElsewhere", "OtherDefault"])
def test_what_a_task_sets_for_its_process_ends_no_run(task, mlp_profile, tmp_path, monkeypatch):
    """Another folder, where a run directory is relative; another default dtype, on one stage: gloo
    ended the process then."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    named = f"{TESTS / 'tasks/failing_tasks.py'}:{task}"
    before = torch.get_default_dtype()
    try:
        run(plan, RunSettings(task=named, steps=6, on_nan="skip"), "run")
    finally:
        torch.set_default_dtype(before)
    assert (tmp_path / "run" / "summary.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("renamed", ["run/log.jsonl", "run"])
def test_a_file_that_is_renamed_while_it_is_written_to_is_missed(renamed, tmp_path):
    file = GrowingFile(tmp_path / "run" / "log.jsonl")
    file.append(b"a line\n")
    file.flush()
    assert file.size() == 7
    (tmp_path / renamed).rename(tmp_path / "elsewhere")
    file.append(b"a line\n")
    with pytest.raises(FileError, match=r"log\.jsonl: isn't there any more: it, or its f"):
        file.flush()
    assert file.size() == 14


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_what_cannot_be_written_is_said_once():
    """A failure of the disk isn't met again when the file is closed."""
    file = GrowingFile(Path("/dev/full"))
    file.append(b"a line\n")
    with pytest.raises(FileError, match="/dev/full: can't be written: No space left on device"):
        file.flush()
    file.close()
    log = GrowingFile(Path("/dev/full"), buffer_bytes=10)
    log.append(b"0123456789")
    with pytest.raises(FileError, match="No space left"):
        log.append(b"0")
    with pytest.raises(FileError, match="status/x: can't be written: Not a directory"):
        StatusFile(TESTS / "conftest.py" / "status/x", 0, "stage 0")


def test_without_room_for_shared_memory_it_names_another_way(monkeypatch):
    def refuse(file, size):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(RunError, match=r"stage 1: 64.0 KiB of shared .* too large .*gloo takes no"):
        HostMemory("stage 1").offer(None, [SimpleNamespace(end=1 << 16)])


@pytest.mark.processes
def test_a_local_run_listens_on_the_loopback_device_alone(mlp_profile, mlp_target, tmp_path):
    """Sockets of all processes below this one, while a run is under way."""
    seen = set()

    class Look(Observer):
        def mini_batch(self, epoch, done, of, loss, figures):
            if done % 15:
                # Of many at once one is told, and a look takes long.
                return
            for process in psutil.Process(os.getpid()).children(recursive=True):
                if process.is_running():
                    for c in process.net_connections():
                        if c.status == psutil.CONN_LISTEN:
                            seen.add(c.laddr.ip)

    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    settings = RunSettings(task=mlp_target, epochs=3, evaluate=False)
    run(plan, settings, tmp_path / "run", observer=Look())
    assert seen == {"127.0.0.1"}


def test_a_run_directory_is_never_overwritten(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 4)
    settings = RunSettings(task=mlp_target, steps=1, evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    with pytest.raises(FileError, match="holds a run already"):
        run(plan, settings, tmp_path / "run", inline=True)


@pytest.mark.choice("SIGKILL")
@pytest.mark.processes
@pytest.mark.parametrize("how", ["SIGKILL", "SIGUSR1"])
def test_no_worker_outlives_its_launcher(how, mlp_profile, tmp_path):
    """However it ends, and whatever a worker is doing; the directory is free at once."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    write_file(tmp_path / "plan.json", plan)
    tp_run = Path(sys.executable).parent / "tp-run"
    command = [tp_run, "plan.json", "--task", TRAP, "--run-dir", "run", "--max-restarts", "1"]
    with (tmp_path / "errors").open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "TRAP": "hold:1"},
        )
    sent = getattr(signal, how)
    assert not left_behind(process, tmp_path / "run", sent)
    assert process.returncode == (1 if how == "SIGUSR1" else -sent)
    # Of a slow start it says after a while what it is at.
    told = [x for x in (tmp_path / "errors").read_text().splitlines() if not is_progress(x)]
    assert told == (["tp-run: stopped by SIGUSR1"] if how == "SIGUSR1" else [])
    with alone(tmp_path / "run"):
        pass


@pytest.mark.choice(0)
@pytest.mark.processes
def test_a_run_that_can_show_nothing_more_ends(mlp_profile, mlp_target, tmp_path):
    """Its reader goes after the first line; what shows progress is a thread of its own."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    write_file(tmp_path / "plan.json", plan)
    tp_run = Path(sys.executable).parent / "tp-run"
    command = [tp_run, "plan.json", "--epochs", "100000", "--no-evaluate", "--run-dir", "run"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        assert process.stdout.readline().startswith("training ")
        process.stdout.close()
        told = process.stderr.read()
        process.wait(60)
    assert process.returncode == 1
    *before, last = told.splitlines()
    assert last == "tp-run: stopped: what it prints can't be written: Broken pipe"
    # Of a slow start it says after a while what it is at.
    assert all(map(is_progress, before))
    assert not workers(tmp_path / "run")


def test_what_ignores_a_hangup_goes_on_ignoring_it():
    """As under nohup; and what a program has of handlers of its own is left to it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.signal(signal.SIGUSR2, print)
    try:
        with _signals() as arrived:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            assert arrived == [signal.SIGTERM]
            assert signal.getsignal(signal.SIGUSR2) == print
            signal.signal(signal.SIGUSR1, print)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before[0])
        signal.signal(signal.SIGUSR2, before[1])


ORPHAN = """
import os, sys, time
from timeprest.profiles.measuring import process_settings as parent
if sys.argv[1] == "look":
    parent.ctypes, parent.LOOK_S = None, 0.1
if not os.fork():
    started = os.getppid()
    if sys.argv[1] == "late":
        os.write(1, b"there")
        while os.getppid() == started:
            time.sleep(0.01)
    parent.end_with_parent(started)
    os.write(1, b"there")
    time.sleep(100)
time.sleep(100)
"""


@pytest.mark.parametrize("how", ["told", "look", "late"])
def test_a_process_ends_with_its_parent(how):
    """Told by the system, where that doesn't tell, and where the parent had gone before."""
    process = subprocess.Popen([sys.executable, "-c", ORPHAN, how], stdout=subprocess.PIPE)
    assert process.stdout.read(5) == b"there"
    process.kill()
    # Its other end is open as long as the child is there, which says no more after that.
    assert process.stdout.read() == b""
    process.wait()
    process.stdout.close()


@pytest.mark.processes
def test_ctrl_c_ends_the_run_at_once(mlp_profile, mlp_target, tmp_path):
    """SIGINT while workers train: exit code 130, one line, no worker left."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    write_file(tmp_path / "plan.json", plan)
    tp_run = Path(sys.executable).parent / "tp-run"
    command = [tp_run, "plan.json", "--epochs", "100000", "--no-evaluate", "--run-dir", "run"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.1)
        there = len(workers(tmp_path / "run"))
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert there == 2
    assert process.returncode == 130
    *before, last = stderr.strip().splitlines()
    assert last == "tp-run: stopped"
    # Of a slow start it says after a while what it is at.
    assert all(map(is_progress, before))
    assert not workers(tmp_path / "run")
