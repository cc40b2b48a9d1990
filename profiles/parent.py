"""Processes that end with the one that started them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time

_PR_SET_PDEATHSIG = 1

LOOK_S = 1.0
"""Between two looks at the parent, where the system doesn't tell of its end."""


def end_with_parent(parent: int) -> None:
    """Have this process killed when its parent is gone, however that ended.

    On Linux the kernel does it, whatever this process is doing: it may be stopped, out of
    memory, or inside a call that lets no other thread run. Elsewhere a thread looks.

    Args:
        parent: its process number, as the parent itself said, or as read when this one began.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have gone before that.
    _end_without(parent)
    threading.Thread(target=_look, args=(parent,), daemon=True).start()


def _look(parent: int) -> None:
    while True:
        time.sleep(LOOK_S)
        _end_without(parent)


def _end_without(parent: int) -> None:
    # A process whose parent has gone is given another one.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
