"""One run on two hosts with a wire between them: network namespaces, where the machine has them."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time

import psutil
import pytest
from helpers.alike import assert_same_weights
from helpers.output.lines import complaints
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.two_hosts import TwoHosts, why_not
from timeprest.planner.cluster.cluster import read_cluster
from timeprest.profiles.files import write_file
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

HOW = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@pytest.fixture(scope="module")
def hosts():
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with TwoHosts(rate="100mbit") as found:
        yield found


@pytest.fixture
def plan(mlp_profile, tmp_path):
    found = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    write_file(tmp_path / "plan.json", found)
    return found


def start(hosts, folder, *options, **environment):
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    given = {"PYTHONPATH": paths, "TIMEPREST_SECRET": "what these two hosts alone know"}
    how = {**HOW, "cwd": folder, "env": {**os.environ, **given, **environment}}
    return [
        hosts.torchrun(host, 1, ["plan.json", "--run-dir", f"run{host}", *options], **how)
        for host in (0, 1)
    ]


def left_in(folder):
    """Processes that still work in a folder, a moment after those that were waited for."""
    end = time.monotonic() + 5
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cwd() == str(folder):
                    found.append(process.cmdline())
        if not found or time.monotonic() > end:
            return found
        time.sleep(0.1)


@pytest.mark.processes
def test_two_hosts_train_as_one_process_does(hosts, plan, mlp_target, tmp_path):
    """Bit by bit; its messages go over the wire, and each host has its own stage's weights."""
    before = [hosts.sent_bytes(host) for host in (0, 1)]
    processes = start(hosts, tmp_path, "--epochs", "2", "--no-evaluate")
    outs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outs
    # The last stage's host tells of progress.
    assert [out.count("\nepoch") for out, _ in outs] == [0, 2]
    settings = RunSettings(task=mlp_target, epochs=2, evaluate=False)
    summary = run(plan, settings, tmp_path / "inline", inline=True)
    found = {**load_weights(tmp_path / "run0"), **load_weights(tmp_path / "run1")}
    assert_same_weights(found, tmp_path / "inline")
    boundary = sum(edge.bytes_per_micro_batch for edge in plan.edges) * plan.micro_batches
    for host in (0, 1):
        sent = hosts.sent_bytes(host) - before[host]
        assert sent > boundary * summary.mini_batches


@pytest.mark.choice(0)
@pytest.mark.processes
def test_a_worker_that_dies_ends_both_hosts(hosts, plan, tmp_path):
    task = f"{TESTS / 'tasks/failing_tasks.py'}:TrapTask"
    processes = start(hosts, tmp_path, "--task", task, "--timeout", "5", TRAP="SIGKILL:1")
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    told = [line for text in errors for line in complaints(text)]
    assert len(told) == 1
    assert told[0].startswith("tp-run: stage 1 (rank 1) is gone; last heard of: ")
    # Which of its messages still arrived is a matter of time.
    assert re.search(r"stage 0, at 0[FB]\d[.\d]*: waiting for stage 1: it is gone", told[0])
    assert not left_in(tmp_path)


@pytest.mark.choice(0)
@pytest.mark.processes
@pytest.mark.parametrize("how", ["lost", "down"])
def test_two_hosts_without_a_network_both_end(how, hosts, plan, mlp_target, tmp_path):
    """Also the one that doesn't have the store, which answers nothing and fails nothing."""
    processes = start(hosts, tmp_path, "--epochs", "100000", "--no-evaluate", "--timeout", "3")
    begun = time.monotonic()
    while not (tmp_path / "run1" / "metrics.jsonl").exists() and time.monotonic() < begun + 90:
        time.sleep(0.2)
    with hosts.cut(how):
        errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [1, 1]
    told = [complaints(text) for text in errors]
    assert [len(lines) for lines in told] == [1, 1], errors
    assert "nothing came for 3 s (--timeout)" in told[0][0]
    assert "nothing came for 3 s (--timeout)" in told[1][0]
    assert "rank 0's store at 10.77.0.1:29500 doesn't answer" in told[1][0]
    assert not left_in(tmp_path)


MEASURE = """
from timeprest.cli.profile import main
from timeprest.runtime.calibration import link_worker

link_worker.MESSAGE_BYTES = (1048576, 2097152)
main()
"""


@pytest.mark.choice(0)
@pytest.mark.processes
def test_links_between_hosts_are_measured_into_one_file(hosts, tmp_path):
    """By the first process; the wire carries 12.5 MB/s, and the first 256 KB at once."""
    (tmp_path / "measure.py").write_text(MEASURE)
    words = ["--links", "--quiet"]
    processes = [
        hosts.torchrun(
            host, 1, [*words, "-o", f"{host}.toml"], ["measure.py"], **{**HOW, "cwd": tmp_path}
        )
        for host in (0, 1)
    ]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert not (tmp_path / "1.toml").exists()
    cluster = read_cluster(tmp_path / "0.toml")
    assert [device.machine for device in cluster.devices] == ["host-a", "host-b"]
    assert 10e6 < cluster.between_machines.bandwidth_bytes_per_s < 25e6
    assert cluster.all_reduce.processes == 2
    assert "links in a machine were not measured" in (tmp_path / "0.toml").read_text()
    assert not left_in(tmp_path)
