"""Starting workers' processes: forked from one that has loaded their module, or by themselves."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from timeprest.profiles.errors import RunError
from timeprest.runtime.processes import start

WORKER = """
import json, os, random, sys, time

LOADED_IN = os.getpid()

def main(arguments):
    import numpy
    told = {
        "arguments": arguments, "argv": sys.argv[1:], "loaded_in": LOADED_IN, "pid": os.getpid(),
        "parent": os.getppid(), "folder": os.getcwd(), "session": os.getsid(0),
        "rank": os.environ.get("RANK"), "other": os.environ.get("OTHER"),
        "drawn": [random.random(), numpy.random.rand()], "first": sys.path[0],
        "library_in": getattr(sys.modules.get("drawn_library"), "LOADED_IN", None),
    }
    print(json.dumps(told), flush=True)
    print("to stderr", file=sys.stderr, flush=True)
    what = arguments[0]
    if what == "sleep":
        time.sleep(100)
    if what == "kill":
        os.kill(os.getpid(), 9)
    if what == "raise":
        raise ValueError("no")
    os._exit(int(what))

if __name__ == "__main__":
    main(sys.argv[1:])
"""


class Started:
    """Processes of the worker above, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[start.WorkerProcess] = []

    def __call__(self, what: str, libraries=(), **variables: str) -> start.WorkerProcess:
        at = len(self.all)
        with (
            (self.folder / f"{at}.out").open("wb") as out,
            (self.folder / f"{at}.err").open("wb") as err,
        ):
            process = start.start_process("drawn_worker", [what], variables, out, err, libraries)
        self.all.append(process)
        return process

    def told(self, at: int) -> dict:
        """What it has printed."""
        for _ in range(500):
            text = (self.folder / f"{at}.out").read_text()
            if text.endswith("\n"):
                return json.loads(text)
            time.sleep(0.02)
        raise AssertionError((self.folder / f"{at}.err").read_text())


@pytest.fixture
def forked(tmp_path, monkeypatch):
    (tmp_path / "drawn_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # Those of other tests stay.
    monkeypatch.setattr(start, "_servers", threading.local())
    made = Started(tmp_path)
    yield made
    for process in made.all:
        process.end(signal.SIGKILL)
        process.wait(5)
        process.forget()
    start._close_servers()


@pytest.fixture(params=["forked", "by themselves"])
def started(request, forked, monkeypatch):
    if request.param != "forked":
        monkeypatch.setattr(sys, "platform", "another")
    return forked


def test_it_is_as_a_process_of_its_own(started, tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER", "seen")
    first, second = started("0", RANK="0"), started("7", RANK="1")
    assert (first.wait(30), second.wait(30)) == (0, 7)
    told = [started.told(0), started.told(1)]
    assert [one["rank"] for one in told] == ["0", "1"]
    for one, what in zip(told, "07", strict=True):
        assert one["other"] == "seen"
        assert one["arguments"] == [what, str(one["parent"])] == one["argv"]
        assert one["folder"] == os.getcwd() == one["first"]
        assert one["session"] == one["pid"]
    assert told[0]["drawn"][0] != told[1]["drawn"][0]
    assert told[0]["drawn"][1] != told[1]["drawn"][1]
    assert (tmp_path / "0.err").read_text() == "to stderr\n"


def test_libraries_are_loaded_once_for_all(forked, tmp_path):
    """Also after the first worker; one that can't be loaded is for who needs it to complain of."""
    (tmp_path / "drawn_library.py").write_text("import os\nLOADED_IN = os.getpid()\n")
    (tmp_path / "broken_library.py").write_text("raise SystemError\n")
    assert forked("0").wait(30) == 0
    both = ["broken_library", "drawn_library", *(f"no_such{k}" for k in range(500))]
    processes = [forked("0", libraries=both), forked("0", libraries=both)]
    assert [process.wait(30) for process in processes] == [0, 0]
    told = [forked.told(k) for k in range(3)]
    assert [one["library_in"] for one in told] == [None, told[0]["parent"], told[0]["parent"]]


def test_what_is_loaded_ahead_is_there_for_the_first_worker(forked, tmp_path):
    (tmp_path / "drawn_library.py").write_text("import os\nLOADED_IN = os.getpid()\n")
    start.load_ahead("drawn_worker")
    start.load_ahead("drawn_worker", ["drawn_library"])
    server = start._servers.kept[0].process.pid
    assert forked("0").wait(30) == 0
    told = forked.told(0)
    assert told["loaded_in"] == told["library_in"] == told["parent"] == server


@pytest.mark.parametrize("late", [False, True])
def test_what_it_cant_load_ahead_is_said_in_the_workers_log(forked, late):
    """Whether it is still at it when it is asked for the worker, or has given up."""
    text = "import time; time.sleep(0.5); import no_such_module_at_all"
    (forked.folder / "drawn_worker.py").write_text(text)
    start.load_ahead("drawn_worker")
    if late:
        start._servers.kept[0].process.wait(30)
    assert forked("0").wait(30) == 1
    assert "No module named 'no_such_module_at_all'" in (forked.folder / "0.err").read_text()


def test_slow_libraries_are_those_that_are_installed(monkeypatch):
    site = "/somewhere/lib/python3/site-packages"
    for name, file in (
        ("transformers", f"{site}/transformers/__init__.py"),
        ("transformers.models", f"{site}/transformers/models/__init__.py"),
        ("transformers.models.of_mine", f"{site}/transformers/models/of_mine.py"),
        ("datasets", "/home/somebody/datasets.py"),
    ):
        module = ModuleType(name)
        module.__file__ = file
        monkeypatch.setitem(sys.modules, name, module)
    found = start.slow_libraries()
    assert found[0] == "torch._dynamo"
    assert "transformers.models.of_mine" in found
    assert not {"transformers", "transformers.models", "datasets"} & {*found}


def test_how_it_ended_is_known(started):
    killed, failed = started("kill"), started("raise")
    assert killed.wait(30) == -signal.SIGKILL
    assert failed.wait(30) == 1
    assert "ValueError: no" in (started.folder / "1.err").read_text()


def test_a_signal_ends_it_and_what_it_is_called_is_seen(started):
    process = started("sleep")
    told = started.told(0)
    assert process.poll() is None
    assert process.wait(0.05) is None
    line = [part for part in psutil.Process(told["pid"]).cmdline() if part]
    assert line[-4:] == ["-m", "drawn_worker", "sleep", str(told["parent"])]
    process.end(signal.SIGTERM)
    assert process.wait(10) == -signal.SIGTERM
    assert process.poll() == -signal.SIGTERM


def test_a_module_that_cant_be_loaded_ends_with_its_traceback(started):
    (started.folder / "drawn_worker.py").write_text("import no_such_module_at_all")
    process = started("0")
    assert process.wait(30) == 1
    assert "No module named 'no_such_module_at_all'" in (started.folder / "0.err").read_text()


def test_the_module_is_loaded_once(forked, tmp_path, monkeypatch):
    for at in range(3):
        forked("0").wait(30)
        forked.all[at].forget()
    monkeypatch.chdir(tmp_path)
    forked("0").wait(30)
    told = [forked.told(at) for at in range(4)]
    assert {one["loaded_in"] for one in told} == {told[0]["parent"]}
    assert told[3]["folder"] == told[3]["first"] == str(tmp_path)


def test_another_environment_is_another_server(forked, monkeypatch):
    forked("0").wait(30)
    monkeypatch.setenv("OTHER", "one")
    forked("0").wait(30)
    assert forked.told(0)["loaded_in"] != forked.told(1)["loaded_in"]
    assert (forked.told(0)["other"], forked.told(1)["other"]) == (None, "one")
    # That of before stays for who goes back to it, until there is a third.
    for value in (None, "one", "two", "one"):
        monkeypatch.setenv("OTHER", value) if value else monkeypatch.delenv("OTHER")
        forked("0").wait(30)
    told = [forked.told(at)["loaded_in"] for at in range(6)]
    assert told[2:4] == told[:2]
    assert told[5] == told[1]
    monkeypatch.delenv("OTHER")
    forked("0").wait(30)
    assert forked.told(6)["loaded_in"] not in told


def test_a_server_that_is_killed_takes_its_workers_along(forked):
    process = forked("sleep")
    told = forked.told(0)
    os.kill(told["parent"], signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    psutil.wait_procs([psutil.Process(told["pid"])] if psutil.pid_exists(told["pid"]) else [], 5)
    assert not psutil.pid_exists(told["pid"]) or psutil.Process(told["pid"]).status() == "zombie"
    assert forked("3").wait(30) == 3


def test_a_server_that_is_stopped_goes_on(forked):
    process = forked("sleep")
    told = forked.told(0)
    os.kill(told["parent"], signal.SIGSTOP)
    os.kill(told["pid"], signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL


def test_one_that_isnt_there_yet_can_be_ended(forked):
    process = forked("sleep")
    process.end(signal.SIGTERM)
    assert process.wait(10) is not None
    assert (forked.folder / "0.out").read_text() == ""


def test_a_server_that_nobody_asks_ends(forked, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'timeprest.runtime.processes.start' in sys.orig_argv:\n"
        "    import selectors\n"
        "    real = selectors.EpollSelector.select\n"
        "    selectors.EpollSelector.select = lambda self, s: real(self, min(s, 0.2))\n"
    )
    forked("0").wait(30)
    forked.all[0].forget()
    parent = forked.told(0)["parent"]
    psutil.Process(parent).wait(10)
    assert forked("0").wait(30) == 0
    assert forked.told(1)["parent"] != parent


def test_a_server_that_never_loads_is_given_up(forked, monkeypatch):
    (forked.folder / "drawn_worker.py").write_text("import time; time.sleep(100)")
    monkeypatch.setattr(start, "LOADING_S", 0.3)
    process = forked("0")
    with pytest.raises(RunError, match=r"loading torch took longer than 0.3 s: no worker was"):
        process.wait(10)
