"""tp-run as one worker that torchrun or srun started."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
from helpers.alike import assert_same_weights
from helpers.output.lines import complaints
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from helpers.processes.chaos import left_behind
from timeprest.cli.run_commands.rank import one_rank_reports
from timeprest.profiles.errors import UserError
from timeprest.profiles.files import write_file
from timeprest.runtime.communication.channel import PeerError
from timeprest.runtime.communication.signed_store import Secret
from timeprest.runtime.processes import store
from timeprest.runtime.processes.environment import (
    VARIABLE,
    Launched,
    check_world_size,
    interface_of,
    launched_by,
    own_address,
    use_interface,
    variables_of,
)
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.training import launched

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
SRUN = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def listening(process):
    """Addresses and ports that a process listens at."""
    try:
        found = process.net_connections()
    except psutil.Error:
        return set()
    return {tuple(c.laddr) for c in found if c.status == psutil.CONN_LISTEN}


# Who a process is ---------------------------------------------------------------------------


def test_started_by_hand_it_starts_its_workers_itself():
    assert launched_by({}) is None
    # A script that sbatch runs is no step, and a step of one task is nothing to join.
    assert launched_by({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "MASTER_ADDR": "a"}) is None
    assert launched_by({**SRUN, "SLURM_NTASKS": "1"}) is None


def test_torchruns_variables():
    wanted = Launched("torchrun", 1, 4, "a", 29500, agent_store=True)
    assert launched_by({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == wanted
    again = {**TORCHRUN, "MASTER_PORT": "7", "TORCHELASTIC_RESTART_COUNT": "2"}
    assert launched_by(again) == Launched("torchrun", 1, 4, "a", 7, attempt=2)
    assert launched_by({**TORCHRUN, "WORLD_SIZE": "2"}).one_host


def test_our_own_launcher_tells_a_worker_what_torchrun_does():
    local = Launched("torchrun", 1, 4, "127.0.0.1", 7, one_host=True, agent_store=True)
    assert launched_by(variables_of(local)) == local


def test_sruns_variables():
    wanted = Launched("srun", 1, 4, "a")
    assert launched_by({**SRUN, "MASTER_ADDR": "a"}) == wanted
    step = {**SRUN, "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1", "MASTER_ADDR": "a"}
    assert launched_by(step) == Launched("srun", 1, 3, "a", one_host=True)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (SRUN, "srun: MASTER_ADDR isn't set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun: MASTER_ADDR isn't set"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' isn't a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "-1"}, "MASTER_PORT: '-1' isn't a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT: 99999 is more than 65535"),
    ],
)
def test_half_of_the_variables_is_refused(environment, message):
    with pytest.raises(UserError, match=message):
        launched_by(environment)


def test_there_is_a_process_for_each_worker():
    check_world_size(Launched("torchrun", 0, 3, "a"), 3)
    with pytest.raises(UserError, match="--nproc-per-node × --nnodes must be 3"):
        check_world_size(Launched("torchrun", 0, 2, "a"), 3)
    with pytest.raises(UserError, match=r"srun started 4 processes.*--ntasks must be 3"):
        check_world_size(Launched("srun", 0, 4, "a"), 3)


def test_a_rank_beyond_the_last_says_so_itself(monkeypatch):
    for name, value in {**TORCHRUN, "RANK": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="rank 4: there are 4 ranks, and the first is 0"):
        one_rank_reports(list)()


@pytest.mark.parametrize(("by", "bound"), [("torchrun", "AGENT_S"), ("srun", "ARRIVAL_S")])
def test_who_finds_nobody_waits_as_long_as_it_says(by, bound, monkeypatch, capfd):
    monkeypatch.setattr(store, bound, 0.5)
    nobody = Launched(by, 1, 2, "127.0.0.1", free_port(), agent_store=by == "torchrun")
    begin = time.monotonic()
    with pytest.raises(PeerError, match=r"nobody answers.*within 0.5 s: Connection refused"):
        store.connect(nobody, Secret(b""), serve=False)
    assert time.monotonic() - begin < 5
    assert capfd.readouterr().err == ""


def test_workers_compare_their_settings_one_by_one(plan, monkeypatch):
    told = []
    here = Launched("torchrun", 0, 2, "127.0.0.1", one_host=True)
    others = SimpleNamespace(rank=0, launched=here, open_to_all="", check_same=told.append)
    monkeypatch.setattr(launched, "use_interface", lambda _: None)
    for seed in (0, 3):
        launched.LaunchedWorker(others, plan, RunSettings(task="digits", seed=seed))
    assert [name for name in told[0] if told[0][name] != told[1][name]] == ["setting seed"]


# Which interface ----------------------------------------------------------------------------


def test_the_interface_is_that_of_the_way_to_the_address(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    assert own_address("127.0.0.1", 29500) == "127.0.0.1"
    assert interface_of("127.0.0.1") in ("lo", "lo0")
    assert interface_of("192.0.2.1") is None
    assert use_interface(Launched("srun", 0, 2, "localhost", one_host=True)) == "127.0.0.1"
    assert os.environ[VARIABLE] in ("lo", "lo0")


def test_the_loopback_device_reaches_no_other_host(monkeypatch):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(UserError, match="which other hosts can't reach"):
        use_interface(Launched("torchrun", 0, 2, "127.0.0.1"))
    monkeypatch.setenv(VARIABLE, "lo")
    use_interface(Launched("torchrun", 0, 2, "127.0.0.1"))
    assert os.environ[VARIABLE] == "lo"


# Runs ---------------------------------------------------------------------------------------


@pytest.fixture
def plan(mlp_profile, tmp_path):
    found = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    write_file(tmp_path / "plan.json", found)
    return found


def torchrun(folder, processes, *options, **environment):
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    where = ["--nproc-per-node", str(processes), "--master-port", str(free_port())]
    return subprocess.Popen(
        [*launcher, *where, "-m", "timeprest.cli.run", "plan.json", *options],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.processes
def test_torchrun_runs_the_same_run(plan, mlp_target, tmp_path):
    """Bit by bit; and its workers listen on the loopback device alone."""
    process = torchrun(tmp_path, 2, "--epochs", "2", "--no-evaluate", "--run-dir", "run")
    launcher = psutil.Process(process.pid)
    seen, launchers = set(), set()
    while process.poll() is None:
        for child in launcher.children():
            seen |= listening(child)
        # A child just forked, that has yet to exec, shows the socket of torchrun's own store.
        launchers |= listening(launcher)
        time.sleep(0.1)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert out.count("\nepoch") == 2
    assert {ip for ip, _ in seen - launchers} == {"127.0.0.1"}
    run(plan, RunSettings(task=mlp_target, epochs=2, evaluate=False), tmp_path / "in", inline=True)
    assert_same_weights(tmp_path / "run", tmp_path / "in")
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.processes
def test_srun_runs_it_with_a_directory_for_each_host(plan, mlp_target, tmp_path):
    """The store of rank 0 listens on the address that was named, as gloo does."""
    port = free_port()
    processes, seen = [], set()
    for rank in (0, 1):
        variables = {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_NNODES": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-m", "timeprest.cli.run", "plan.json", "--epochs", "2", "-q"]
        started = subprocess.Popen(
            [*command, "--no-evaluate", "--run-dir", f"host{rank}"],
            cwd=tmp_path,
            env={**os.environ, **variables},
        )
        processes.append(started)
    while any(process.poll() is None for process in processes):
        for process in processes:
            if process.poll() is None:
                seen |= listening(psutil.Process(process.pid))
        time.sleep(0.1)
    assert [process.returncode for process in processes] == [0, 0]
    assert {ip for ip, _ in seen} == {"127.0.0.1"}
    weights = [
        sorted(p.name for p in (tmp_path / f"host{r}" / "weights").iterdir()) for r in (0, 1)
    ]
    assert weights == [["stage0.safetensors"], ["stage1.safetensors"]]


def trapped(folder, processes, trap, *options):
    """torchrun with the task whose optimizer fails."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    task = ["--task", f"{TESTS / 'tasks/failing_tasks.py'}:TrapTask", "--run-dir", "run"]
    return torchrun(folder, processes, *task, *options, TRAP=trap, PYTHONPATH=paths)


@pytest.mark.choice("SIGKILL")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("processes", "options", "trap", "message"),
    [
        (1, [], "", "torchrun started 1 processes, and the plan has 2 workers"),
        (2, ["--timeout", "3"], "SIGKILL:1", "stage 1 (rank 1) has died; torchrun says how; last "),
        (2, ["--timeout", "3"], "SIGSTOP:1", "stage 1 (rank 1) is stopped (SIGSTOP); last finishe"),
    ],
)
def test_one_line_from_one_rank(processes, options, trap, message, plan, tmp_path):
    process = trapped(tmp_path, processes, trap, *options)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    told = complaints(err)
    assert len(told) == 1
    assert told[0].startswith(f"tp-run: {message}")


@pytest.mark.choice(0)
@pytest.mark.processes
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT"])
def test_what_ends_torchrun_is_said_once(how, plan, mlp_target, tmp_path):
    """torchrun's own traceback comes besides; it is told the signal's name, and passes it on."""
    process = torchrun(tmp_path, 2, "--epochs", "100000", "--no-evaluate", "--run-dir", "run")
    begun = time.monotonic()
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < begun + 60:
        time.sleep(0.1)
    process.send_signal(getattr(signal, how))
    _, err = process.communicate(timeout=60)
    assert process.returncode
    told = complaints(err)
    assert told == [f"tp-run: stopped by {how}"]


@pytest.mark.choice(0)
@pytest.mark.processes
def test_one_line_of_data_that_differ(plan, tmp_path):
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    task = ["--task", f"{TESTS / 'tasks/data_tasks.py'}:UnseededLength", "--run-dir", "run"]
    process = torchrun(tmp_path, 2, *task, PYTHONPATH=paths)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    (told,) = complaints(err)
    assert told.startswith("tp-run: data('train') has ")
    assert told.endswith("(docs/tasks.md)")


@pytest.mark.choice(0)
@pytest.mark.processes
def test_no_worker_outlives_torchrun(plan, tmp_path):
    process = trapped(tmp_path, 2, "hold:1")
    assert not left_behind(process, tmp_path / "run", signal.SIGKILL)


SILENT = """
import os, signal, time
import torch.distributed as dist
from timeprest.runtime.processes import rendezvous
from timeprest.runtime.processes.environment import Launched
ours, theirs = os.pipe()
host = os.fork()
if not host:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(theirs, str(store.port).encode())
    time.sleep(100)
port = int(os.read(ours, 10))
rendezvous.SILENCE_S = 1.0
launched = Launched("torchrun", 1, 2, "127.0.0.1", port, agent_store=True)
rendezvous.Rendezvous(launched, lambda line: (print(line), os.kill(host, signal.SIGKILL)))
os.kill(host, signal.SIGSTOP)
time.sleep(100)
"""


def test_a_store_that_answers_nothing_ends_a_worker_that_computes():
    """As behind a broken network, where nothing is closed."""
    done = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True)
    assert done.returncode == 1
    at = r"rank 1: rank 0's store at 127.0.0.1:\d+ doesn't answer"
    assert re.fullmatch(rf"{at}: .*\? Silent for 1 s\n", done.stdout)


ASKED_WHILE_FAILING = """
import os, signal, time
from timeprest.profiles.errors import RunError
from timeprest.runtime.processes.environment import Launched
from timeprest.runtime.processes import rendezvous
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
launched = Launched("torchrun", 0, 1, "127.0.0.1", store.port, one_host=True, agent_store=True)
mine = rendezvous.Rendezvous(launched, print)
mine.end_when_asked()

def no_answer(*_):
    mine._lost.set()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
    raise RuntimeError

rendezvous.line_of_all = no_answer

def work():
    raise RunError("the cause")

mine.run(work)
"""


def test_a_launcher_that_ends_what_fails_anyway_adds_no_line():
    """Of a broken network workers hear first, then the launcher, which sends SIGTERM."""
    done = subprocess.run(
        [sys.executable, "-c", ASKED_WHILE_FAILING], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert re.fullmatch(
        r"rank 0: the cause.*; rank 0's store at .* doesn't answer.*\n", done.stdout
    )


ASKED_WHILE_OTHERS_COMPUTE = """
import sys, time
from timeprest.runtime.processes import rendezvous
from timeprest.runtime.processes.environment import Launched
rendezvous.GRACE_S = 50.0
rank, port = map(int, sys.argv[1:])
mine = rendezvous.Rendezvous(Launched("srun", rank, 2, "127.0.0.1", port), print)
mine.end_when_asked()

def work():
    mine.gather("here")
    print("computing", flush=True)
    time.sleep(100)

mine.run(work)
"""


def test_when_somebody_has_said_why_the_others_end_at_once():
    """Even those that compute for long, and so wait for nobody."""
    command = [sys.executable, "-c", ASKED_WHILE_OTHERS_COMPUTE]
    port = str(free_port())
    ranks = [
        subprocess.Popen([*command, rank, port], stdout=subprocess.PIPE, text=True) for rank in "01"
    ]
    try:
        assert [each.stdout.readline() for each in ranks] == ["computing\n"] * 2
        ranks[0].send_signal(signal.SIGTERM)
        # Each would wait as long as it leaves one that knows more.
        said = [each.communicate(timeout=30)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert said == ["stopped by SIGTERM\n", ""]
    assert [each.returncode for each in ranks] == [1, 1]
