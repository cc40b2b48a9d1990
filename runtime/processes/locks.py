"""Locks of a run directory: one run at a time. The system drops them when a process dies.

Who starts the workers holds ``RUN/lock`` alone; the workers it starts share ``RUN/lock.workers``,
so that workers which outlived it are seen too. Both say who holds them. On file systems without
locks nothing is locked.
"""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from ...profiles.errors import UserError
from ...profiles.files import file_errors

try:
    import fcntl
except ImportError:
    HAS_LOCKS = False
else:
    HAS_LOCKS = True

ORPHANS_S = 5.0
"""What workers whose launcher has died get to end, before a run is refused."""

_MOST_NAMED = 8
"""Processes that a refusal names."""


def check_system() -> None:
    """Raise UserError where this system isn't one that can be trained on."""
    if not HAS_LOCKS:
        raise UserError(
            f"training isn't supported on this system ({platform.system()}): it takes Linux or "
            "macOS; tp-profile, tp-plan and tp-run report don't"
        )


@contextmanager
def alone(path: Path, token: str = "") -> Iterator[None]:
    """Have a run directory for oneself.

    Args:
        token: the same for all processes of one run; whoever has the lock with it is no other run.

    Raises:
        UserError: another run is going on there; the message names its processes. Or there can
            be none on this system.
        FileError: it can't be written.
    """
    check_system()
    with _opened(path / "lock") as file:
        if not _try(file, fcntl.LOCK_EX):
            _check_same_run(path, file, token)
            yield
            return
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)
            os.write(file, f"{_myself()} {token}".encode())
        try:
            _wait_for_orphans(path)
            yield
        finally:
            # What was forked meanwhile (workers that load samples) may not have ended yet.
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def as_worker(path: Path) -> Iterator[None]:
    """Work in a run directory until the process ends, at the latest."""
    with _opened(path / "lock.workers") as file:
        _try(file, fcntl.LOCK_SH)
        with contextlib.suppress(OSError):
            os.write(file, f"{_myself()}\n".encode())
        yield


def is_over(path: Path) -> bool:
    """Whether nobody works in a run directory any more.

    False too where this host can't know: where there are no locks, or another host's was the last.
    Looks without locking, so that a run which is about to begin isn't in its way.
    """
    lock = path / "lock"
    try:
        pid, _, rest = lock.read_text(encoding="utf-8", errors="replace").partition(" on ")
    except OSError:
        return False
    here = rest.partition(" ")[0] == socket.gethostname()
    return here and pid.isdecimal() and not _has_open(int(pid), lock)


def _myself() -> str:
    return f"{os.getpid()} on {socket.gethostname()}"


def _check_same_run(path: Path, file: int, token: str) -> None:
    """Raise UserError unless the holder is of this run. It may be about to say so."""
    end = time.monotonic() + ORPHANS_S
    while True:
        holder = os.pread(file, 400, 0).decode(errors="replace")
        if token and holder.endswith(f" {token}"):
            return
        if not token or time.monotonic() > end:
            break
        time.sleep(0.05)
    pid = " ".join(holder.split()[:3]) or "unknown"
    raise UserError(f"{path}: a run is going on in it (process {pid}); wait for its end, or end it")


def _wait_for_orphans(path: Path) -> None:
    lock = path / "lock.workers"
    with _opened(lock) as file:
        end = time.monotonic() + ORPHANS_S
        while not _try(file, fcntl.LOCK_EX):
            if time.monotonic() > end:
                raise UserError(
                    f"{path}: workers of a run are still there, whose tp-run has died"
                    f"{_holders(lock, file)}; end them"
                )
            time.sleep(0.05)
        # Those that are named in it have ended.
        with contextlib.suppress(OSError):
            os.ftruncate(file, 0)


def _holders(lock: Path, file: int) -> str:
    """Who has written that it holds a lock, but for those that are known to have ended."""
    found = []
    for line in os.pread(file, 1 << 16, 0).decode(errors="replace").splitlines():
        pid, _, host = line.partition(" on ")
        if host != socket.gethostname() or not pid.isdecimal() or _has_open(int(pid), lock):
            found.append(line)
    if not found:
        return ""
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    noun = "process" if len(found) == 1 else "processes"
    return f" ({noun} {', '.join(found[:_MOST_NAMED])}{more})"


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open; also where only its owner may know."""
    try:
        opened = psutil.Process(pid).open_files()
    except psutil.AccessDenied:
        return True
    except psutil.Error:
        return False
    return str(path.resolve()) in (file.path for file in opened)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    with file_errors(path, "written"):
        # Neither read only nor emptied: another process may hold it.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        yield file
    finally:
        os.close(file)


def _try(file: int, kind: int) -> bool:
    """Whether the lock was free. Where there are none, it is."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
