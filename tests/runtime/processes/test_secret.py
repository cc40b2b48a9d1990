"""The secret of a run's workers: where it is found, who sees it, and what is refused without it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from timeprest.profiles.errors import FileError, UserError
from timeprest.runtime.communication.signed_store import ForeignEntryError
from timeprest.runtime.processes import environment, secret
from timeprest.runtime.processes.environment import Launched, other_users, own_sockets
from timeprest.runtime.processes.secret import take_secret
from timeprest.runtime.processes.store import LocalStore
from timeprest.runtime.records.progress import Observer
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

KEY = "0123456789abcdef"


def launched(*, one_host=False, attempt=0):
    return Launched("torchrun", 0, 2, "127.0.0.1", 1, one_host=one_host, attempt=attempt)


def of(variables, **how):
    found = take_secret(launched(**how), variables)
    return found and found.signature("what")


def test_it_is_in_a_variable_or_in_a_file(tmp_path):
    file, variables = tmp_path / "secret", {"TIMEPREST_SECRET": KEY, "HOME": "/"}
    file.write_text(f"{KEY}\n")
    file.chmod(0o600)
    given = of(variables)
    # The user's code, and what it starts, is told no more of it.
    assert variables == {"HOME": "/"}
    assert given == of({"TIMEPREST_SECRET_FILE": str(file)})
    assert given != of({"TIMEPREST_SECRET": KEY[::-1]})
    assert given != of({"TIMEPREST_SECRET": KEY}, attempt=1)
    assert of({}) is None


def test_without_one_the_processes_of_a_user_on_one_host_share_one(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = of({}, one_host=True)
    assert first == of({}, one_host=True)
    (folder,) = tmp_path.iterdir()
    (file,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    file.unlink()
    assert first != of({}, one_host=True)


def opened(tmp_path):
    (tmp_path / f"timeprest-{os.getuid()}").mkdir(mode=0o755)
    return {}


def a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"timeprest-{os.getuid()}").symlink_to("elsewhere")
    return {}


def seen_by_others(tmp_path):
    file = tmp_path / "secret"
    file.write_text(KEY)
    file.chmod(0o640)
    return {"TIMEPREST_SECRET_FILE": str(file)}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (opened, r"/timeprest-\d+: isn't a folder of yours alone \(mode 700\).*TIMEPREST_SECRET$"),
        (a_link, r"/timeprest-\d+: isn't a folder of yours alone"),
        (seen_by_others, r"/secret: others may read this secret: chmod 600 /"),
        (lambda _: {"TIMEPREST_SECRET": "short"}, "^TIMEPREST_SECRET: a secret of fewer than 16 "),
        (lambda _: {"TIMEPREST_SECRET_FILE": "/none"}, "^/none: no such file; TIMEPREST_SECRET_F"),
    ],
)
def test_one_that_others_may_know_is_refused(made, message, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises((UserError, FileError), match=message) as caught:
        of(made(tmp_path), one_host=True)
    assert KEY not in str(caught.value)


MEETS = """
import sys
from timeprest.runtime.processes.environment import Launched
from timeprest.runtime.processes.rendezvous import Rendezvous
rank, port = map(int, sys.argv[1:])
mine = Rendezvous(Launched("srun", rank, 2, "127.0.0.1", port), print)
mine.run(lambda: mine.gather("places", b"here"))
"""


def test_hosts_with_different_secrets_are_told_so_in_a_line():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", MEETS, str(rank), port],
            env={**os.environ, "TIMEPREST_SECRET": f"{KEY}{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [each.communicate(timeout=60)[0] for each in ranks]
    assert [each.returncode for each in ranks] == [1, 1]
    for line in "".join(said).splitlines():
        assert "Traceback" not in line
    assert re.search(
        r"in the run's store has no signature of this run: somebody else .* \(TIMEPREST_SECRET: ",
        "".join(said),
    )
    assert KEY not in "".join(said)


def test_who_reaches_the_launchers_store_cannot_speak_for_it():
    store = LocalStore()
    stranger = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    stranger.set("timeprest/0/question/0", b'{"mini_batches":1,"checkpoint":true}')
    with pytest.raises(ForeignEntryError, match="'timeprest/0/question/0' in the run's"):
        store.answer(lambda asked: True)


@pytest.mark.processes
def test_nobody_sees_the_secret_of_a_local_run(mlp_profile, tmp_path, monkeypatch):
    """In ps, in files, or in what the task's code has of the environment."""
    monkeypatch.setattr(secret.secrets, "token_hex", lambda count: KEY)
    monkeypatch.chdir(tmp_path)
    lines = []

    class Look(Observer):
        def starting(self, what):
            for process in psutil.Process().children(recursive=True):
                # Some end meanwhile.
                with contextlib.suppress(psutil.Error):
                    lines.extend(process.cmdline())

    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    task = f"{TESTS / 'tasks/failing_tasks.py'}:NotesEnvironment"
    settings = RunSettings(task=task, steps=4, evaluate=False)
    run(plan, settings, tmp_path / "run", observer=Look())
    assert any("training.worker" in line for line in lines)
    assert not any(KEY in line for line in lines)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert tmp_path / "seen" in files
    for path in files:
        assert KEY.encode() not in path.read_bytes(), path


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system doesn't tell")
@pytest.mark.parametrize("family", ["127.0.0.1", "::1"])
def test_other_users_at_the_end_of_a_connection_are_seen(family, monkeypatch):
    kind = socket.AF_INET6 if ":" in family else socket.AF_INET
    with socket.socket(kind) as listener:
        try:
            listener.bind((family, 0))
        except OSError:
            pytest.skip(f"there is no {family} here")
        listener.listen()
        before = own_sockets()
        with socket.socket(kind) as caller:
            caller.connect(listener.getsockname())
            with listener.accept()[0]:
                assert other_users(before) == []
                assert other_users(own_sockets()) == []
                # As somebody else would see it.
                monkeypatch.setattr(environment.os, "getuid", lambda: -1)
                assert other_users(before) == [os.geteuid()]
