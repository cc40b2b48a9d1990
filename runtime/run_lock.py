"""One run at a time in a run directory: locks that the system drops when a process dies.

Who starts the workers holds ``RUN/lock`` alone; the workers it starts share ``RUN/lock.workers``,
so that workers which outlived it are seen too. On file systems without locks nothing is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ..profiles.errors import FileError, UserError

ORPHANS_S = 5.0
"""What workers whose launcher has died get to end, before a run is refused."""


@contextmanager
def alone(path: Path, token: str = "") -> Iterator[None]:
    """Have a run directory for oneself.

    Args:
        token: the same for all processes of one run; whoever has the lock with it is no other run.

    Raises:
        UserError: another run is going on there.
        FileError: it can't be written.
    """
    mine = f"{os.getpid()} on {socket.gethostname()} {token}"
    with _opened(path / "lock") as file:
        if not _try(file, fcntl.LOCK_EX):
            _check_same_run(path, file, token)
            yield
            return
        with contextlib.suppress(OSError):
            file.truncate(0)
            file.seek(0)
            file.write(mine.encode())
            file.flush()
        _wait_for_orphans(path)
        yield


@contextmanager
def as_worker(path: Path) -> Iterator[None]:
    """Work in a run directory until the process ends, at the latest."""
    with _opened(path / "lock.workers") as file:
        _try(file, fcntl.LOCK_SH)
        yield


def _check_same_run(path: Path, file: BinaryIO, token: str) -> None:
    """Raise UserError unless the holder is of this run. It may be about to say so."""
    end = time.monotonic() + ORPHANS_S
    while True:
        file.seek(0)
        holder = file.read(400).decode(errors="replace")
        if token and holder.endswith(f" {token}"):
            return
        if not token or time.monotonic() > end:
            break
        time.sleep(0.05)
    pid = " ".join(holder.split()[:3]) or "unknown"
    raise UserError(f"{path}: a run is going on in it (process {pid}); wait for its end, or end it")


def _wait_for_orphans(path: Path) -> None:
    with _opened(path / "lock.workers") as file:
        end = time.monotonic() + ORPHANS_S
        while not _try(file, fcntl.LOCK_EX):
            if time.monotonic() > end:
                raise UserError(
                    f"{path}: workers of a run are still there, whose tp-run has died; end them"
                )
            time.sleep(0.05)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        # Neither read only nor emptied: another process may hold it.
        file = open(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")  # noqa: SIM115
    except OSError as error:
        raise FileError(f"{path}: can't be written: {error.strerror}") from None
    with file:
        yield file


def _try(file: BinaryIO, kind: int) -> bool:
    """Whether the lock was free. Where there are none, it is."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
