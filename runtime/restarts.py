"""Starting a run again after a failure, from its newest checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ..profiles.errors import RunError, StoppedError

T = TypeVar("T")


def with_restarts(
    first: Callable[[], T], again: Callable[[], T], most: int, tell: Callable[[str], None]
) -> T:
    """Call `first`, and after a failure of the run `again`, `most` times at most.

    Args:
        tell: is told of each failure that is followed by a restart.

    Raises RunError: the last failure. What the user's input is the cause of isn't tried again,
    nor what a signal has stopped.
    """
    attempt = first
    for restart in range(1, most + 1):
        try:
            return attempt()
        except StoppedError:
            raise
        except RunError as error:
            tell(f"{error}; restart {restart} of {most}")
        attempt = again
    return attempt()
