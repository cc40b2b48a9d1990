"""What a run holds doesn't grow with its mini-batches, nor with its epochs."""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc

import pytest
from helpers.paths import TESTS
from helpers.plans import plan_by_hand, with_times
from timeprest.runtime.records.progress import Observer
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings

WINDOW = 50

# Python notes for each type which names were looked up on it, in a table of 4096, and PyTorch makes
# the names that it looks up anew at each call: the table fills up with them, and what it holds
# counts as made by the line that called PyTorch.
clear_looked_up = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache


class Held(Observer):
    """Looks at what is held of what our code has made, after each `WINDOW` mini-batches."""

    def __init__(self):
        self.done, self.seen = 0, []

    def mini_batch(self, epoch, done, of, loss, figures):
        self.done += 1
        if self.done == WINDOW:
            # What the first ones make isn't looked at.
            tracemalloc.start()
        elif self.done % WINDOW == 0:
            gc.collect()
            clear_looked_up()
            ours = tracemalloc.Filter(True, "*/timeprest/runtime/*")
            statistics = tracemalloc.take_snapshot().filter_traces([ours]).statistics("lineno")
            self.seen.append({str(each.traceback): each.size for each in statistics})

    def grown(self):
        """Bytes for a mini-batch that each line of code has added in every window, where it has."""
        windows = list(itertools.pairwise(self.seen))
        found = {}
        for line in self.seen[-1]:
            least = min(after.get(line, 0) - before.get(line, 0) for before, after in windows)
            if least > 0:
                found[line] = least / WINDOW
        return found


@pytest.mark.slow
@pytest.mark.parametrize(("task", "epochs"), [("LongEpoch", 1), ("ShortEpochs", 50)])
def test_workers_hold_no_more_after_more_mini_batches(task, epochs, mlp_profile, tmp_path):
    """In one long epoch, whose segment is the run, and in many short ones."""
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    settings = RunSettings(
        task=f"{TESTS / 'tasks/mlp_task.py'}:{task}", epochs=epochs, evaluate=False, record="none"
    )
    held = Held()
    try:
        run(plan, settings, tmp_path / "run", inline=True, observer=held)
    finally:
        tracemalloc.stop()
    # A number in a list takes 32 bytes of each worker, and here are two.
    assert sum(held.grown().values()) < 16, held.grown()
