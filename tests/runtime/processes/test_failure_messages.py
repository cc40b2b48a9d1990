"""What is said of a run that failed, from what each worker was at."""

from __future__ import annotations

import os
import re
import socket
import time

import msgspec
import pytest
from helpers.paths import ROOT
from timeprest.cli.errors import errors_as_lines
from timeprest.profiles.errors import RunError
from timeprest.runtime.processes import store
from timeprest.runtime.processes.failures import (
    blame,
    circumstances,
    culprit,
    limit_reached,
    settled,
    stopped_ranks,
)
from timeprest.runtime.processes.launcher import _of_its_end
from timeprest.runtime.records.run_dir import RunDir
from timeprest.runtime.records.status import StatusFile, WorkerStatus, read_statuses


def at(rank, op, *waits, finished="", since=0.0):
    return WorkerStatus(
        rank=rank,
        name=f"stage {rank}",
        host="here",
        pid=os.getpid(),
        finished=finished,
        at=op,
        waits_for=waits,
        since=since,
    )


def table(*statuses):
    return {status.rank: status for status in statuses}


def test_the_chain_of_waits_leads_to_the_one_that_computes():
    statuses = table(at(0, "0B3", 1), at(1, "1B3", 2), at(2, "2B3"), at(3, "3F5.0", 2))
    assert culprit(statuses, 0) == culprit(statuses, 3) == 2


@pytest.mark.parametrize("complaining", [0, 2])
def test_in_a_barrier_it_is_the_one_that_isnt_there(complaining):
    statuses = table(at(0, "start", 1, 2), at(1, "1U9"), at(2, "start", 0, 1))
    assert culprit(statuses, complaining) == 1


def test_a_worker_without_a_status_is_the_culprit():
    assert culprit(table(at(0, "0B3", 1), at(1, "1B3", 2)), 0) == 2


def test_workers_that_wait_for_each_other_lost_a_message():
    statuses = table(at(0, "0B3", 1), at(1, "1F4", 0))
    assert culprit(statuses, 0) is None
    message = "stage 0, at 0B3: waiting for stage 1: nothing came for 3 s (--timeout)"
    assert (
        blame(statuses, 0, message, frozenset())
        == f"{message}; waiting: stage 1 at 1F4 for stage 0"
    )


def test_one_that_stands_still_is_the_culprit_whatever_it_said_last():
    statuses = table(at(0, "0U48", 1), at(1, "1F49.0", 0))
    message = "stage 1: waiting for stage 0: nothing came for 5 s (--timeout)"
    said = blame(statuses, 1, message, frozenset({0}))
    assert said.startswith("stage 0 (rank 0) is stopped (SIGSTOP)")


def test_the_report_names_the_culprit_its_operations_and_the_waiting():
    statuses = table(
        at(0, "0B3", 1, finished="0F5.1"), at(1, "1B3", 2), at(2, "2U3", finished="2B3")
    )
    message = "stage 0, at 0B3: waiting for stage 1: nothing came for 3 s (--timeout)"
    assert blame(statuses, 0, message, frozenset({2})) == (
        "stage 2 (rank 2) is stopped (SIGSTOP); last finished 2B3, next 2U3; "
        f"{message}; waiting: stage 1 at 1B3 for stage 2"
    )
    assert "doesn't answer; last" in blame(statuses, 0, message, frozenset())


def test_of_a_worker_that_tells_nothing_any_more_only_the_last_word_is_known():
    statuses = table(at(0, "0B3", 1), at(1, "1F3.0", 0, finished="1U1"))
    message = "stage 0, at 0B3: waiting for stage 1: it is gone"
    said = blame(statuses, 0, message, frozenset(), [1])
    assert (
        said == f"stage 1 (rank 1) is gone; last heard of: last finished 1U1, next 1F3.0; {message}"
    )


def test_of_one_that_hadnt_begun_when_it_last_told():
    statuses = table(at(0, "0B3", 1), at(1, "start"))
    message = "stage 0, at 0B3: waiting for stage 1: it is gone"
    said = blame(statuses, 0, message, frozenset(), [1])
    assert said == f"stage 1 (rank 1) is gone; last heard of: nothing finished yet; {message}"
    assert circumstances(statuses, 1) == ""


def test_others_get_to_come_to_their_waits():
    failed, gone = (
        at(1, "1U4"),
        msgspec.structs.replace(at(2, "2F5.0"), pid=2**22, host=socket.gethostname()),
    )
    looks = [
        table(at(0, "0F5.0"), failed, gone),
        table(at(0, "0F5.1"), failed, gone),
        table(at(0, "0B5", 1), failed, gone),
    ]
    left = iter(looks)
    assert settled(lambda: next(left), 1) is looks[-1]


def test_nobody_waits_for_what_cannot_be_told(monkeypatch):
    """Where a worker hadn't begun, nothing is said of the others; and some compute for long."""
    monkeypatch.setattr("timeprest.runtime.processes.failures.SETTLE_S", 0.2)
    starting, computing = table(at(0, "0F5.0"), at(1, "start")), table(at(0, "0F5.0"), at(1, "1U4"))
    left = iter([starting])
    assert settled(lambda: next(left), 1) is starting
    begin = time.monotonic()
    assert settled(lambda: computing, 1) is computing
    assert time.monotonic() - begin >= 0.2


def test_only_some_of_many_that_wait_are_named():
    statuses = table(at(0, "0U0"), *(at(rank, f"{rank}F1.0", 0) for rank in range(1, 9)))
    said = circumstances(statuses, 0)
    assert said.startswith(
        "; nothing finished yet, next 0U0; waiting: stage 1 at 1F1.0 for stage 0"
    )
    assert said.endswith("and 5 more")


def test_status_files_say_what_was_told_last(tmp_path):
    told = StatusFile(tmp_path / "stage0.json", 0, "stage 0")
    StatusFile(tmp_path / "stage1.json", 1, "stage 1")
    told.begin("0F0.0")
    told.done()
    told.begin("0F0.1")
    told.wait([1])
    found = read_statuses(tmp_path)
    assert (found[0].finished, found[0].at, found[0].waits_for) == ("0F0.0", "0F0.1", (1,))
    assert found[1].at == "start"
    told.go_on()
    assert read_statuses(tmp_path)[0].waits_for == ()
    (tmp_path / "stage1.json").write_text("{")
    assert list(read_statuses(tmp_path)) == [0]
    assert stopped_ranks(found) == frozenset()


@pytest.mark.parametrize(
    "words",
    ["can't start new thread", "[Errno 11] Resource temporarily unavailable", "no memory is left"],
)
def test_a_limit_of_the_system_is_named_as_one(words):
    found = limit_reached(f"RuntimeError: {words}")
    assert found.startswith("; this user's processes, threads or memory have come to a limit")
    assert limit_reached("RuntimeError: a bug") == ""


def test_a_worker_that_could_start_no_thread_is_said_to_have_come_to_a_limit(tmp_path):
    (tmp_path / "rank0.stderr").write_text("Traceback\nRuntimeError: can't start new thread\n")
    failure = _of_its_end([1], ["stage 0"], RunDir(tmp_path), tmp_path, kept=True)
    assert "stage 0 ended with exit code 1; this user's processes" in failure.message
    assert str(tmp_path) in failure.message


def test_a_store_that_can_start_no_thread_is_one_line(monkeypatch):
    def none(*_, **__):
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(store.dist, "TCPStore", none)
    with pytest.raises(RunError, match=r"can't be started: Resource temporarily unavailable; this"):
        store.LocalStore()


def test_a_command_that_comes_to_a_limit_ends_in_a_line(capsys):
    def command(error):
        raise error

    no_process = BlockingIOError(11, "Resource temporarily unavailable")
    for error in (MemoryError(), RuntimeError("can't start new thread"), no_process):
        with pytest.raises(SystemExit) as caught:
            errors_as_lines(command)(error)
        assert caught.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "have come to a limit (ulimit -a shows them)" in line
    with pytest.raises(SystemExit) as caught:
        errors_as_lines(command)(RuntimeError("a plugin's"))
    assert caught.value.code == 2
    assert re.search(r"test_failure_messages\.py:\d+: RuntimeError: a plugin's$", last_line(capsys))


def last_line(capsys):
    return capsys.readouterr().err.splitlines()[-1]


def test_a_bug_of_ours_is_a_traceback():
    """Also where a user's code has called it."""
    ours = {}
    source = "def fails():\n    raise RuntimeError('a bug')\n"
    exec(compile(source, str(ROOT / "cli/somewhere.py"), "exec"), ours)
    for command in (ours["fails"], lambda: ours["fails"]()):
        with pytest.raises(RuntimeError, match="a bug"):
            errors_as_lines(command)()
