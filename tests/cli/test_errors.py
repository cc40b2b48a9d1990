"""What ends a command besides its errors."""

from __future__ import annotations

import signal
import time
import weakref

import pytest
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
