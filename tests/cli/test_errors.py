"""What ends a command besides its errors."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import warnings
import weakref
from importlib import import_module
from importlib.metadata import entry_points

import pytest
from click.testing import CliRunner
from helpers.output.commands import called
from helpers.plans import chain_plan
from timeprest import cli
from timeprest.cli.errors import errors_as_lines, program
from timeprest.profiles.files import write_file


class Tensor:
    """Something that a weak reference can be kept of."""


@pytest.fixture
def interruptible():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_where_nothing_can_be_raised_ends_the_command(interruptible, capsys):
    """In the callback of a weak reference, Python would forget it."""
    heard = []

    def gone(_):
        heard.append(True)
        signal.raise_signal(signal.SIGINT)

    @errors_as_lines
    def command():
        tensor = Tensor()
        reference = weakref.ref(tensor, gone)
        del tensor
        assert reference() is None
        assert heard
        time.sleep(10)
        pytest.fail("forgotten")

    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 130
    assert capsys.readouterr().err.endswith(": stopped\n")


def test_a_librarys_warning_is_one_line_once(capsys):
    @errors_as_lines
    def command():
        for size in (2, 4, 8):
            # What sets filters anew has Python forget what was shown.
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.warn(f"a target\nof size {size}", stacklevel=1)

    command()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(r": warning: .*test_errors\.py:\d+: a target of size 2$", line)


@pytest.mark.parametrize("name", ["profile", "plan", "run"])
def test_ctrl_c_while_a_command_is_loaded_is_a_line_too(monkeypatch, capsys, name):
    def stopped(module):
        raise KeyboardInterrupt

    command = getattr(cli, f"tp_{name}")
    monkeypatch.setattr(cli, "import_module", stopped)
    with pytest.raises(SystemExit) as ended:
        command()
    assert ended.value.code == 130
    assert capsys.readouterr().err == f"tp-{name}: stopped\n"


@pytest.mark.parametrize("name", ["profile", "plan", "run"])
def test_commands_are_those_that_are_installed(monkeypatch, capsys, name):
    (script,) = entry_points(group="console_scripts", name=f"tp-{name}")
    monkeypatch.setattr(sys, "argv", [f"tp-{name}", "--help"])
    with pytest.raises(SystemExit) as ended:
        script.load()()
    assert ended.value.code == 0
    assert f"tp-{name} [OPTIONS]" in capsys.readouterr().out.splitlines()[0]


def test_a_terminal_without_columns_has_some(tmp_path):
    """Shells without a terminal say COLUMNS=0, where rich prints nothing at all."""
    plan = tmp_path / "plan.json"
    write_file(plan, chain_plan("gpipe", 2))
    runner, words = CliRunner(), ["show", str(plan)]
    found = runner.invoke(import_module("timeprest.cli.plan").main, words, env={"COLUMNS": "0"})
    assert found.output == called("tp-plan", *words)
    assert found.output


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_errors(closed, tmp_path):
    """As daemons and some schedulers start commands."""
    line = f'exec "$0" -m timeprest.cli.plan --help {closed}'
    done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize(
    ("started", "called"),
    [
        ("/bin/tp-plan", "tp-plan"),
        ("/timeprest/cli/run.py", "tp-run"),
        ("/site-packages/ipykernel_launcher.py", "timeprest"),
        ("-c", "timeprest"),
        ("", "timeprest"),
    ],
)
def test_messages_name_the_command_or_the_package(started, called, monkeypatch):
    monkeypatch.setattr(sys, "argv", [started])
    assert program() == called
