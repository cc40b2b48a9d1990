"""A process that does one training of a study: ``python -m timeprest.runtime.study.trainings.worker
WORK SAID TRAINING PARENT``.

It reads the study's work from a file, trains what is asked for as JSON, and writes lines of JSON
to another file: how far it is, and what the training gave. It ends with its parent.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from ....profiles.errors import TimeprestError
from ....profiles.measuring.process_settings import end_with_parent, keep_freed_memory
from ...records.growing_file import GrowingFile
from ..figures.study import Curve
from .training import train_one
from .work import Asked, StudyWork

WORK = "work.json"
_SAID_S = 0.2


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a process that trains."""

    done: int = 0
    """Mini-batches."""
    curve: Curve | None = None
    """Of the training, which is over."""
    seconds: float = 0.0
    error: str = ""
    """Why it failed."""
    exit_code: int = 1


def main(arguments: list[str]) -> None:
    """Train, and say how it goes on."""
    work, path, asked, parent = arguments
    end_with_parent(int(parent))
    keep_freed_memory()
    file = GrowingFile(Path(path))

    def say(said: Said) -> None:
        file.append(msgspec.json.encode(said) + b"\n")
        file.flush()

    begin = last = time.monotonic()

    def progress(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > _SAID_S:
            last = time.monotonic()
            say(Said(done=done))

    say(Said())
    try:
        known = msgspec.json.decode(Path(work).read_bytes(), type=StudyWork)
        curve = train_one(known, msgspec.json.decode(asked, type=Asked), progress)
    except TimeprestError as error:
        say(Said(error=str(error), exit_code=error.exit_code))
    else:
        say(Said(curve=curve, seconds=time.monotonic() - begin))
    file.close()


if __name__ == "__main__":
    main(sys.argv[1:])
