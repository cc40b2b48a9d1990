"""Inline training: all workers in one process, in simulated order, on the same weight versions."""

from __future__ import annotations

from ..communication.opening import local_transport
from ..prepare.devices import own_device
from ..prepare.prepare import Prepared, with_own_weights
from ..records.metrics import StageReport
from ..records.progress import Observer
from ..records.run_dir import RunDir
from .loop import load_samples, stage_runner, train
from .warm_up import capture_graphs


def run_inline(prepared: Prepared, where: RunDir, observer: Observer) -> list[StageReport]:
    """Train in this process. Returns the replicas' reports. Raises as `run`."""
    observer.starting("loading the data")
    device = own_device(prepared.plan, prepared.settings, 0)
    runners = [
        stage_runner(where, own, replica, channels, all_reduce, device)
        for replica, own, (channels, all_reduce) in zip(
            prepared.replicas, with_own_weights(prepared), local_transport(prepared), strict=True
        )
    ]
    load_samples(runners)
    for runner in runners:
        capture_graphs(runner)
    return train(where, runners, observer)
