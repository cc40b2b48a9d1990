"""Loading ahead in the background, and random numbers of its own for what is loaded."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Generic, TypeVar

from ..errors import RunError
from ..tracing.random_states import same_states, seed_all, set_states, states

T = TypeVar("T")

AHEAD = 2
"""Items that are loaded before they are asked for."""
LOADING = threading.RLock()
"""Held by whoever runs the user's data set in this process: it needn't be one for several threads.
"""
_LOOK_S = 0.1
_END_S = 1.0

# Random numbers ---------------------------------------------------------------------------------


class OwnRandomness:
    """Random numbers that don't depend on anybody else's draws, and change nobody's.

    Attributes:
        used: something was drawn.
    """

    def __init__(self, seed: int) -> None:
        self.used = False
        self._seed: int | None = seed
        self._states: tuple[Any, ...] = ()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The three generators go on where the last such block ended, and are put back after."""
        before = states()
        try:
            if self._seed is None:
                set_states(self._states)
            else:
                seed_all(self._seed)
                self._seed, self._states = None, states()
            yield
            now = states()
            self.used = self.used or not same_states(now, self._states)
            self._states = now
        finally:
            set_states(before)


# Ahead of whoever takes ---------------------------------------------------------------------------


class Ahead(Generic[T]):
    """Items that a thread makes before they are asked for."""

    def __init__(
        self,
        items: Iterator[T],
        ahead: int = AHEAD,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        """`ahead`: how many at most. `lock`: held while an item is made."""
        self._items = items
        self._lock = nullcontext() if lock is None else lock
        self._ready: queue.Queue[tuple[bool, Any]] = queue.Queue(maxsize=ahead)
        self._ends = threading.Event()
        # A data set that never gives anything mustn't keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="loading", daemon=True)
        self._thread.start()

    def next(self, wait_s: float, what: str) -> T:
        """The next item. Raises whatever making it raised, StopIteration at the end, and RunError
        when `what` gives none within `wait_s` seconds."""
        try:
            good, found = self._ready.get(timeout=wait_s)
        except queue.Empty:
            raise RunError(
                f"{what} gave nothing for {wait_s:g} s; give it more time with --timeout"
            ) from None
        if good:
            return found  # type: ignore[no-any-return]
        raise found

    def close(self) -> bool:
        """Make no more. Returns whether the thread has ended."""
        self._ends.set()
        self._thread.join(_END_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                with self._lock:
                    found: tuple[bool, Any] = True, next(self._items)
            except BaseException as error:  # the user's code runs here
                found = False, error
            while not self._ends.is_set():
                try:
                    self._ready.put(found, timeout=_LOOK_S)
                    break
                except queue.Full:
                    continue
            if not found[0]:
                return
