"""When a worker dies, raises or stops: everybody ends soon, and the report names the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from plans import plan_by_hand, with_times
from timeprest.profiles.errors import FileError, RunError
from timeprest.profiles.files import write_file
from timeprest.runtime.observer import Silent
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

HERE = Path(__file__).parent
ONE = r"stage 1 \(rank 1\)"
AT_TRAP = "last finished 1B4, next 1U4"
TRAP = f"{HERE / 'failing_tasks.py'}:TrapTask"


def workers(run_dir):
    """Stage processes of a run that are still there."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "timeprest.runtime.worker" in line and str(run_dir) in line:
            found.append(process)
    return found


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("trap", "bound_s", "message"),
    [
        ("raise:0", 45, r"stage 0, at 0U4: .*failing_tasks\.py:\d+: ValueError: the trap went off"),
        (
            "SIGKILL:1",
            45,
            rf"{ONE} was killed by SIGKILL; {AT_TRAP}",
        ),
        ("exit:0", 45, r"stage 0 \(rank 0\) ended with exit code 3"),
        (
            "SIGSTOP:1",
            45,
            rf"{ONE} is stopped \(SIGSTOP\); {AT_TRAP}; stage 0, at .*for 3 s",
        ),
    ],
)
def test_all_end_soon_and_the_cause_is_named(
    trap, bound_s, message, mlp_profile, tmp_path, monkeypatch
):
    monkeypatch.setenv("TRAP", trap)
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    settings = RunSettings(task=TRAP, steps=40, evaluate=False, timeout_s=3)
    begin = time.monotonic()
    with pytest.raises(RunError, match=message) as caught:
        run(plan, settings, tmp_path / "run")
    assert time.monotonic() - begin < bound_s
    assert "\n" not in str(caught.value)
    assert not workers(tmp_path / "run")


@pytest.mark.processes
def test_a_local_run_listens_on_the_loopback_device_alone(mlp_profile, mlp_target, tmp_path):
    """Sockets of all processes below this one, while a run is under way."""
    seen = set()

    class Look(Silent):
        def mini_batch(self, epoch, done, of, loss):
            for process in psutil.Process(os.getpid()).children(recursive=True):
                if process.is_running():
                    for c in process.net_connections():
                        if c.status == psutil.CONN_LISTEN:
                            seen.add(c.laddr.ip)

    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    settings = RunSettings(task=mlp_target, epochs=12, evaluate=False)
    run(plan, settings, tmp_path / "run", observer=Look())
    assert seen == {"127.0.0.1"}


def test_a_run_directory_is_never_overwritten(mlp_profile, mlp_target, tmp_path):
    plan = plan_by_hand(with_times(mlp_profile), "gpipe", 2, 4)
    settings = RunSettings(task=mlp_target, steps=1, evaluate=False)
    run(plan, settings, tmp_path / "run", inline=True)
    with pytest.raises(FileError, match="holds a run already"):
        run(plan, settings, tmp_path / "run", inline=True)


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
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, stderr = process.communicate(timeout=60)
    assert time.monotonic() - begin < 20
    assert process.returncode == 130
    assert stderr.strip().splitlines() == ["tp-run: stopped"]
    assert not workers("run")
