"""How fast the machine is at this moment, against what it has shown that it can be.

Whom a virtual machine shares its processors, caches and memory with can't be seen from inside:
no counter shows it. Fixed work that takes longer does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import msgspec
from timeprest.profiles.errors import UserError
from timeprest.profiles.files import write_bytes

Rates = tuple[float, float]
"""Of computing and of memory, the slower of two cores."""

PROCESSES = 2
SAMPLES = 3
LEARNING = 20
"""Samples before anything is known."""
LEAST = 0.88
"""Share of the best pace that a run needs before it and behind it."""
PATIENCE_S = 120.0


class Pace:
    """Asks two processes at once, and remembers what they answered.

    What was best is kept in a file, so that a profile and races that use it days later know the
    same machine.
    """

    def __init__(self, path: Path, least: float = LEAST) -> None:
        """
        Args:
            least: 0: never ask, every pace will do.
        """
        self.path, self.least = path, least
        self._asked: list[subprocess.Popen[str]] = []
        self._best: Rates | None = None
        if path.exists():
            self._best = msgspec.json.decode(path.read_bytes(), type=Rates)

    def now(self) -> float:
        """The present pace as a share of the best; 1 where nobody asks."""
        if not self.least:
            return 1.0
        if self._best is None:
            self._learn()
        assert self._best is not None
        found = self._typical([self._sample() for _ in range(SAMPLES)])
        share = min(one / most for one, most in zip(found, self._best, strict=True))
        self._keep(found)
        return share

    def wait(self, tell: Callable[[str], None], until: float) -> float:
        """Wait for a good pace, as long as patience lasts. Returns the last one seen.

        Args:
            until: of time.monotonic(); no longer than that.
        """
        until = min(until, time.monotonic() + PATIENCE_S)
        share = self.now()
        told = False
        while share < self.least and time.monotonic() < until:
            if not told:
                tell(f"  the machine is at {share:.0%} of its best pace: waiting")
                told = True
            time.sleep(1.0)
            share = self.now()
        return share

    def _learn(self) -> None:
        # What nine of ten don't reach may be a slip of the clock.
        found = [self._sample() for _ in range(LEARNING)]
        first, second = (sorted(each)[int(0.9 * LEARNING)] for each in zip(*found, strict=True))
        self._keep((first, second))

    def _keep(self, found: Rates) -> None:
        best = self._best or found
        better = (max(best[0], found[0]), max(best[1], found[1]))
        if better != self._best:
            self._best = better
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, msgspec.json.encode(better))

    @staticmethod
    def _typical(samples: list[Rates]) -> Rates:
        first, second = (median(each) for each in zip(*samples, strict=True))
        return first, second

    def _sample(self) -> Rates:
        for process in self._processes():
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        answers = []
        for process in self._processes():
            assert process.stdout is not None
            words = process.stdout.readline().split()
            if not words:
                raise UserError("the process that tells the machine's pace has ended")
            answers.append([float(word) for word in words])
        first, second = (min(each) for each in zip(*answers, strict=True))
        return first, second

    def _processes(self) -> list[subprocess.Popen[str]]:
        if not self._asked:
            environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
            line = [sys.executable, str(Path(__file__).with_name("pacer.py"))]
            pipe = subprocess.PIPE
            self._asked = [
                subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=environment)
                for _ in range(PROCESSES)
            ]
        return self._asked

    def close(self) -> None:
        """End both."""
        for process in self._asked:
            process.kill()
            process.communicate()
        self._asked = []
