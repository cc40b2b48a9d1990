"""Running a command on broken input in this process, and judging how it ended."""

from __future__ import annotations

import json
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner, Result
from timeprest.cli.errors import errors_as_lines
from timeprest.planner.plan import Plan, read_plan
from timeprest.profiles.files import read_file
from timeprest.profiles.profile import Profile, check_profile

LONGEST_S = 60
"""A command that takes longer hangs. Those here take a processor a second at most; ten, where
stages are compiled."""
_LOOK_S = 2
MOST_BYTES = 12 * 2**30
"""Address space of the process meanwhile: what needs more than there is fails at once."""


class Hang(BaseException):
    """A command took too long."""


class StillTraining(BaseException):
    """A run that was asked to be long, and is under way."""


@click.command()
@click.argument("path")
@errors_as_lines
def read_run(path: str) -> None:
    """What workers read first: plan and settings of a run directory."""
    from timeprest.runtime.records.run_dir import RunDir

    RunDir(path).read()


@dataclass(frozen=True)
class Call:
    """A command line. `writes`: the file that it makes, of what kind."""

    command: str
    words: tuple[str, ...]
    writes: tuple[str, type] | None = None


def command_named(name: str) -> click.Command:
    """``"tp-plan"`` → its click command."""
    if name == "read-run":
        return read_run
    found: click.Command = import_module(f"timeprest.cli.{name.removeprefix('tp-')}").main
    return found


@contextmanager
def bounded(box: Path) -> Iterator[list[str]]:
    """Raises Hang in code that takes too long, and MemoryError where it wants too much. Yields what
    was stopped as it trained: what it was in then may make an error of its own of that."""
    looks, stopped = 0, list[str]()

    def look(number: int, frame: Any) -> None:
        nonlocal looks
        looks += 1
        if any(path.stat().st_size for path in box.rglob("metrics.jsonl")):
            stopped.append("training")
            raise StillTraining
        if looks * _LOOK_S >= LONGEST_S:
            raise Hang("".join(traceback.format_stack(frame)[-6:]))

    before = signal.signal(signal.SIGALRM, look)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, hard))
    signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _LOOK_S)
    try:
        yield stopped
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


@contextmanager
def inside(box: Path) -> Iterator[None]:
    """With `box` as the working directory."""
    before = Path.cwd()
    os.chdir(box)
    try:
        yield
    finally:
        os.chdir(before)


def complaint_about(box: Path, calls: Sequence[Call], broken: str | None = None) -> str | None:
    """Run the calls in a row, up to the first that refuses; say what is wrong with how it ended.

    Args:
        broken: name of the file that was broken; None: the command line was.
    """
    for call in calls:
        with inside(box):
            try:
                with bounded(box) as stopped:
                    result = CliRunner().invoke(
                        command_named(call.command), list(call.words), prog_name=call.command
                    )
            except StillTraining:
                return None
            except Hang as hang:
                return f"{_shown(call)}\nhangs:\n{hang}"
            if stopped:
                return None
            wrong = _judge(result, call, broken) or _left_behind(box, call)
            if wrong:
                return f"{_shown(call)}\n{wrong}"
        if result.exit_code:
            return None
    return None


def _shown(call: Call) -> str:
    return " ".join([call.command, *(repr(w) if len(w) < 200 else "…" for w in call.words)])


def _judge(result: Result, call: Call, broken: str | None) -> str | None:
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return "".join(traceback.format_exception(result.exception)[-12:])
    lines = result.stderr.splitlines()
    if result.exit_code == 0:
        if "Traceback" in result.stderr:
            return result.stderr
        return _check_written(call)
    if result.exit_code != 2:
        # A run may fail while it trains, and a check may find a difference.
        if result.exit_code == 1 and call.command == "tp-run":
            return None if len(lines) <= 1 else f"code 1: {result.stderr}"
        return f"code {result.exit_code}: {result.stderr}"
    if len(lines) != 1:
        return f"{len(lines)} lines: {result.stderr[:2000]}"
    if len(lines[0]) > 2000:
        return f"a line of {len(lines[0])} characters: {lines[0][:1000]}"
    given = [broken or "", *(word for word in call.words if "." in word)]
    if broken and "--" not in lines[0] and not any(word in lines[0] for word in given):
        return f"doesn't name {broken}: {lines[0]}"
    return None


def _check_written(call: Call) -> str | None:
    """What a command that succeeded has written can be read again."""
    if call.writes is None:
        return None
    name, kind = call.writes
    read: Callable[[], object] = {
        Plan: lambda: read_plan(name),
        Profile: lambda: check_profile(read_file(name, Profile), name),
    }[kind]
    try:
        read()
    except Exception as error:
        return f"wrote what can't be read: {error}"
    return None


def _left_behind(box: Path, call: Call) -> str | None:
    """Temporary files that weren't renamed, and JSON that ends in the middle."""
    for path in box.rglob("*"):
        if path.name.startswith(".") and path.is_file():
            return f"left {path.name} behind"
    if call.writes and (box / call.writes[0]).exists():
        try:
            json.loads((box / call.writes[0]).read_bytes())
        except ValueError as error:
            return f"{call.writes[0]} is half-written: {error}"
    return None
