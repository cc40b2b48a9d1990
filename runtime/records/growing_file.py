"""Files that a run appends to."""

from __future__ import annotations

import os
from pathlib import Path

from ...profiles.errors import FileError
from ...profiles.files import file_errors


def new_lines(path: Path, position: int) -> tuple[list[bytes], int]:
    """The whole lines behind a position of a file that somebody appends to, and where they end;
    none while there is no such file."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            new = file.read()
    except OSError:
        return [], position
    whole = new[: new.rfind(b"\n") + 1]
    return whole.splitlines(), position + len(whole)


class GrowingFile:
    """Base of files that are appended to: metrics, operations.

    What is on disk of it is whole up to the last `flush`. A full disk, or a limit on a file's size
    (``ulimit -f``), leaves part of a line there, which every reader leaves out.

    Args:
        more: go on with what is there.
        buffer_bytes: that may wait in memory; 0: all waits for a `flush`.

    Raises FileError, wherever something of it can't be written.
    """

    def __init__(self, path: Path, *, more: bool = False, buffer_bytes: int = 0) -> None:
        self.path = path
        self._most = buffer_bytes
        self._waiting: list[bytes] = []
        self._bytes = 0
        with file_errors(path, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab" if more else "wb", buffering=0)

    def append(self, data: bytes) -> None:
        """Add to it."""
        self._waiting.append(data)
        self._bytes += len(data)
        if self._most and self._bytes > self._most:
            self.flush()

    def flush(self) -> None:
        """Write what waits. What the file is called is looked at, too: in a folder that was renamed
        nobody would find what is written."""
        left = memoryview(b"".join(self._waiting))
        # What fails isn't tried again when the file is closed.
        self._waiting, self._bytes = [], 0
        with file_errors(self.path, "written"):
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            gone = not os.path.lexists(self.path)
        if gone:
            raise FileError(
                f"{self.path}: isn't there any more: it, or its folder, was renamed or removed "
                "while it was written to; put it back, and go on with --resume"
            )

    def size(self) -> int:
        """Bytes of it, with what was there before."""
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Write what waits, and close the file."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()
