"""Status of each worker, which others can read even when it has been killed or stopped."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ...profiles.errors import FileError
from ...profiles.files import check_regular, file_errors, read_limited

_BYTES = 4096


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker at some moment."""

    rank: int
    name: str
    """`Replica.name` of the stage at hand; `Worker.name` at first."""
    host: str
    pid: int
    finished: str = ""
    """The last operation that is done; empty before the first one."""
    at: str = "start"
    """The operation at hand, or what it does before and after training."""
    waits_for: tuple[int, ...] = ()
    """Ranks whose message it waits for, or that it found gone; empty: it computes."""
    since: float = 0.0
    """When it began to do so, by its host's clock."""

    @property
    def label(self) -> str:
        """As `Worker.label`."""
        return f"{self.name} (rank {self.rank})"


class Status:
    """Is told what a worker does; this one tells nobody."""

    def begin(self, op: str, who: str = "") -> None:
        """An operation is at hand. `who`: the name of the stage it is of; empty: as before."""

    def done(self) -> None:
        """It is done."""

    def wait(self, ranks: Sequence[int]) -> None:
        """A wait for these begins, or they turned out to be gone."""

    def go_on(self) -> None:
        """It has ended well. After a failure it stands."""


class StatusFile(Status):
    """Writes a worker's status into a file's memory: no system call for an operation.

    Attributes:
        now: the status as it is.
    """

    def __init__(self, path: Path, rank: int, name: str) -> None:
        """Raises FileError when it can't be written. Later on it needs no more room on the disk."""
        with file_errors(path, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if os.path.lexists(path):
                check_regular(path)
            path.write_bytes(b" " * _BYTES)
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), _BYTES)
        self._length = 0
        self.now = WorkerStatus(rank=rank, name=name, host=socket.gethostname(), pid=os.getpid())
        self._put(self.now)

    def begin(self, op: str, who: str = "") -> None:
        name = who or self.now.name
        now = msgspec.structs.replace(self.now, name=name, at=op, waits_for=(), since=time.time())
        self._put(now)

    def done(self) -> None:
        # Something else begins at once, and then it is written too.
        self.now = msgspec.structs.replace(self.now, finished=self.now.at, at="", waits_for=())

    def wait(self, ranks: Sequence[int]) -> None:
        self._put(msgspec.structs.replace(self.now, waits_for=tuple(ranks), since=time.time()))

    def go_on(self) -> None:
        self._put(msgspec.structs.replace(self.now, waits_for=(), since=time.time()))

    def _put(self, status: WorkerStatus) -> None:
        self.now = status
        text, before = msgspec.json.encode(status)[:_BYTES], self._length
        self._length = len(text)
        # Over all of the one before; behind that there are spaces.
        self._memory[: max(self._length, before)] = text.ljust(before)


def read_statuses(folder: Path) -> dict[int, WorkerStatus]:
    """All that lie there and can be read, by rank."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        for _ in range(3):
            try:
                text = read_limited(path, "", most=2 * _BYTES)
                status = msgspec.json.decode(text, type=WorkerStatus)
            except FileError:
                break
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                # Read while it was being written.
                time.sleep(0.01)
                continue
            found[status.rank] = status
            break
    return found
