"""A process that trains for a study: ``python -m timeprest.runtime.study.trainings.worker PARENT``.

It reads the study's work and then trainings, a line of JSON each, and writes lines of JSON: how far
it is, and what a training gave. It ends with its parent, or when there is nothing more to read.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

import msgspec

from ....profiles.errors import TimeprestError
from ....profiles.measuring.process_settings import end_with_parent, keep_freed_memory
from ..figures.study import Curve
from .training import train_one
from .work import Asked, StudyWork

_TOLD_S = 0.2


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a process that trains."""

    done: int = 0
    """Mini-batches of the training at hand."""
    curve: Curve | None = None
    """Of the training, which is over."""
    seconds: float = 0.0
    error: str = ""
    """Why it failed."""
    exit_code: int = 1


def serve(work: StudyWork, lines: BinaryIO, say: Callable[[Said], None]) -> None:
    """Do trainings, one after another, until there are no more lines."""
    for line in lines:
        asked = msgspec.json.decode(line, type=Asked)
        told = [0.0]

        def tell(done: int, told: list[float] = told) -> None:
            now = time.monotonic()
            if now - told[0] > _TOLD_S:
                told[0] = now
                say(Said(done=done))

        begin = time.monotonic()
        say(Said())
        try:
            curve = train_one(work, asked, tell)
        except TimeprestError as error:
            say(Said(error=str(error), exit_code=error.exit_code))
            return
        say(Said(curve=curve, seconds=time.monotonic() - begin))


def main(parent: int) -> None:
    """Serve the parent."""
    end_with_parent(parent)
    keep_freed_memory()
    # What the user's code prints must not come between.
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    lines = sys.stdin.buffer
    work = msgspec.json.decode(lines.readline(), type=StudyWork)
    serve(work, lines, lambda said: _write(out, msgspec.json.encode(said) + b"\n"))


def _write(out: BinaryIO, text: bytes) -> None:
    # A pipe may take a part.
    rest = memoryview(text)
    while rest:
        rest = rest[out.write(rest) :]


if __name__ == "__main__":
    main(int(sys.argv[1]))
