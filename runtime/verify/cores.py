"""Whether the workers of a host compute at once, or take turns on its cores."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may compute on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def unplanned_turns(workers: int, threads: int, cores: int, planned: int | None) -> str | None:
    """That a host's workers take turns, where their plan doesn't know. None: no, or it does.

    Args:
        workers: that compute on the host's cores.
        threads: of each worker.
        cores: usable ones of the host.
        planned: devices of a machine that compute at once, as the plan's cluster has it.
    """
    at_once = max(cores // threads, 1)
    if workers <= at_once or (workers if planned is None else planned) <= at_once:
        return None
    return (
        f"{workers} processes take turns on {cores} {'core' if cores == 1 else 'cores'}: slower "
        f"than planned; tp-plan solve --cores {at_once} plans for it"
    )
