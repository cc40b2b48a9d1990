"""How long loading takes, by itself: what bounds the rate of any pipeline."""

from __future__ import annotations

import time
from typing import Any

from torch.utils.data import DataLoader, TensorDataset

from .batches import Batches, DryError
from .prefetch import OwnRandomness
from .samples import Names, batch_size_of, comes_in_batches, dataset_size, fetch, size_of

SECONDS = 3.0
"""To spend on it; two rounds of a loader's workers are waited for in any case."""
_MOST = 1000
"""Batches."""


def loading_s_per_sample(
    given: Any, mini_batch: int, names: Names = sorted, seconds: float = SECONDS
) -> float | None:
    """Seconds between two samples of what the task's data("train") gave, loaded as a run loads
    them, when nobody does anything else; None for what is in memory, and for too few batches to
    tell. Raises as `Batches.batch`."""
    if isinstance(given, TensorDataset):
        return None
    if not comes_in_batches(given):
        return _one_by_one(given, mini_batch, names, seconds)
    workers = max(given.num_workers if isinstance(given, DataLoader) else 0, 1)
    size = size_of(given, "train", mini_batch)
    most = _MOST if size is None else size // (batch_size_of(given) or mini_batch)
    batches = Batches(given, "train", 0, mini_batch, names)
    # Workers come with their first batches at once, late by their start; what several of them make
    # comes in bursts: whole rounds are timed.
    first, rounds = workers, 2
    passed, done, samples = 0.0, 0, 0
    try:
        for k in range(first):
            batches.batch(0, k)
        begin = time.perf_counter()
        while first + done + workers <= most:
            numbers = range(first + done, first + done + workers)
            rows = sum(batches.batch(0, k).rows for k in numbers)
            passed = time.perf_counter() - begin
            done, samples = done + workers, samples + rows
            if passed > seconds and done >= rounds * workers:
                break
    except DryError:
        # Data without a length may be few.
        pass
    finally:
        batches.close()
    return passed / samples if samples else None


def _one_by_one(given: Any, mini_batch: int, names: Names, seconds: float) -> float:
    size = dataset_size(given, "train")
    begin, done = time.perf_counter(), 0
    with OwnRandomness(0)():
        while True:
            fetch(given, [(done + k) % size for k in range(mini_batch)], names)
            done += mini_batch
            passed = time.perf_counter() - begin
            # What is in memory after all is known at once.
            if passed > seconds / 10 or done >= size:
                return passed / done
