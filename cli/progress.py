"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Any

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from .errors import PlainConsole, log, output, printable

_REFRESH_S = 0.1
_FIRST_LINE_S = 30.0
_LONG_S = 10.0
"""What is done before there are steps is said where it takes so long; looked at every"""
_WATCHED_S = 1.0
_LINES_APART = 1.5
"""Each line comes so many times later than the one before, and no later than"""
_MOST_BETWEEN_S = 300.0


class Bar:
    """Progress on stderr: a bar on a terminal, else lines without control characters; or nothing.

    Where stderr isn't a terminal, work of half a minute says nothing.
    """

    def __init__(self, title: str, *, quiet: bool) -> None:
        self._title = title
        self.quiet = quiet
        console = PlainConsole(stderr=True)
        self._progress = Progress(
            TextColumn("{task.fields[title]}", markup=False),
            BarColumn(bar_width=24 if console.width >= 120 else 10),
            # Takes what is left, so that the bar keeps its width.
            TextColumn(
                "{task.description}",
                markup=False,
                table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"),
            ),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
            expand=True,
        )
        self._task: TaskID = self._progress.add_task(
            "", total=None, title=printable(title), left=""
        )
        self._begin = time.monotonic()
        self._first: tuple[float, float] | None = None
        self._shown_at = 0.0
        self._next_line = self._begin + _FIRST_LINE_S
        self._phase: tuple[str, float] | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def shown(self) -> bool:
        """Whether there is a bar, on a terminal."""
        return not self._progress.disable

    def __call__(self, what: str, done: float, total: float) -> None:
        """Show a step; called at every one, it shows a few a second."""
        now = time.monotonic()
        with self._lock:
            self._phase = None
        over = self._first is not None and not total  # what was estimated is
        if self.quiet or (now - self._shown_at < _REFRESH_S and not over):
            return
        self._shown_at = now
        # What came before the first step, such as start-up, says nothing about the others, and
        # neither does what has no end that is known.
        self._first = (self._first or (now, done)) if total else None
        since, before = self._first or (now, done)
        left = time_left(now - since, done - before, total - before)
        if self.shown:
            self._progress.update(
                self._task,
                description=printable(what),
                completed=done,
                # Without an end, the bar only shows that there is life.
                total=total or None,
                left=left,
            )
        elif now >= self._next_line:
            self._line(what, left, now)

    def doing(self, what: str) -> None:
        """Show a phase without steps, before work that has steps.

        On a terminal at once; elsewhere once it has taken a while.
        """
        if self.quiet:
            return
        # A run that is restarted has fewer steps done than before.
        self._first = None
        with self._lock:
            self._phase = what, time.monotonic()
        if self.shown:
            self._progress.update(self._task, description=printable(what), total=None, left="")
        elif self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(_WATCHED_S):
            # Where stderr is full, what ends the work in this thread would show nothing either.
            with contextlib.suppress(OSError):
                self.say_if_long(time.monotonic())

    def say_if_long(self, now: float) -> None:
        """Print a line for a phase that has taken long, once."""
        with self._lock:
            if self._phase is not None and now - self._phase[1] > _LONG_S:
                log(f"{self._title}: {self._phase[0]} ({now - self._begin:.0f} s)")
                self._phase = None

    def _line(self, what: str, left: str, now: float) -> None:
        passed = now - self._begin
        self._next_line = now + min((_LINES_APART - 1) * passed, _MOST_BETWEEN_S)
        share = f", {left}" if left else ""
        log(f"{self._title}: {what} ({passed:.0f} s{share})")

    def note(self, line: str) -> None:
        """Print a line on stderr, above the bar."""
        if self.quiet:
            return
        if self.shown:
            self._progress.console.print(printable(line), highlight=False, markup=False)
        else:
            log(f"{self._title}: {line}")

    def print(self, *lines: Any) -> None:
        """Print results while the bar is shown: above it where both are on a terminal. Elsewhere a
        text stays one line, for grep."""
        console, terminal = self._progress.console, sys.stdout.isatty()
        if self._progress.disable or not terminal:
            console = output()
        for line in lines:
            whole = isinstance(line, str) and not terminal
            console.print(line, highlight=False, soft_wrap=whole)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._progress.stop()


def time_left(passed_s: float, done: float, total: float) -> str:
    """``"40 s left"``, from what took how long so far; empty where that says nothing yet."""
    if not 0 < done <= total or passed_s < 1:
        return ""
    left = passed_s * (total - done) / done
    if left < 100:
        return f"{left:.0f} s left"
    return f"{left / 60:.0f} min left" if left < 6000 else f"{left / 3600:.0f} h left"
