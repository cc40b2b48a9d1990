"""What ends a command besides its errors."""

from __future__ import annotations

import signal
import sys
import time
import weakref
from importlib.metadata import entry_points

import pytest
from timeprest import cli
from timeprest.cli.errors import errors_as_lines


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
