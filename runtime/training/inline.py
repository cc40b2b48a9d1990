"""Inline training: all workers in one process, in simulated order, on the same weight versions."""

from __future__ import annotations

from ..prepare.prepared import Prepared
from ..records.metrics import StageReport
from ..records.progress import Observer
from ..records.run_dir import RunDir
from .runners import load_samples, local_runners
from .train import train
from .warm_up import capture_graphs


def run_inline(prepared: Prepared, where: RunDir, observer: Observer) -> list[StageReport]:
    """Train in this process. Returns the replicas' reports. Raises as `run`."""
    observer.starting("loading the data")
    runners = local_runners(prepared, where)
    load_samples(runners)
    for runner in runners:
        capture_graphs(runner)
    return train(where, runners, observer)
