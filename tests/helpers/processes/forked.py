"""Python processes that have torch from the beginning, forked as workers are.

For tests of which a process of its own is a part, and how it starts isn't: loading torch takes a
processor two to four seconds.
"""

from __future__ import annotations

import os
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from timeprest.runtime.processes.start import WORKER, end_processes, start_process

MODULE = "timeprest.tests.helpers.processes.forked"


class Python:
    """``python WORDS``: a script, or ``-c`` and a program, with arguments; it begins at once."""

    def __init__(self, *words: object, **variables: str) -> None:
        self._folder = TemporaryDirectory()
        texts, files = [str(word) for word in words], [self._file(k) for k in range(2)]
        with files[0].open("wb") as out, files[1].open("wb") as err:
            # As a run's workers do, which the same server forks.
            self._process = start_process(MODULE, texts, variables, out, err, [WORKER])

    def _file(self, k: int) -> Path:
        return Path(self._folder.name, str(k))

    def ended(self, timeout_s: float = 100) -> str:
        """What it printed. It has to end by then, and well."""
        try:
            code = self._process.wait(timeout_s)
        finally:
            end_processes([self._process], 1)
        out, err = (self._file(k).read_text() for k in range(2))
        assert code == 0, f"code {code}: {out}{err}"
        return out


def main(arguments: list[str]) -> None:
    """Be that process."""
    *words, _ = arguments
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")
    with suppress(BrokenPipeError):
        sys.stdout.flush()
