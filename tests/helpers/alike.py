"""Runs that must end alike."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import pytest
import torch
from timeprest.planner.plan import pipeline_of
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.runtime.records.progress import read_epochs, read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.training import operation_loop


def assert_same_weights(one, other, atol=0.0):
    """Of runs' folders, or by name; to the last bit unless they may be so far apart."""
    found, wanted = (w if isinstance(w, Mapping) else load_weights(w) for w in (one, other))
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def assert_same_training(one, other, atol=0.0):
    """And losses, and figures of tests."""
    assert_same_weights(one, other, atol)
    logs = [where / "metrics.jsonl" for where in (one, other)]
    found, wanted = map(read_losses, logs)
    assert found == pytest.approx(wanted, rel=0, abs=atol)
    for mine, own in zip(*map(read_epochs, logs), strict=True):
        assert mine.test == pytest.approx(own.test, rel=0, abs=atol)


def check_processes(plan, settings, where, atol=0.0):
    """Run a plan inline and in processes: `assert_same_training`.

    Returns both summaries.
    """
    inline, processes = (
        run(plan, settings, where / mode, inline=mode == "inline")
        for mode in ("inline", "processes")
    )
    assert_same_training(where / "processes", where / "inline", atol)
    return inline, processes


def run_replicated(plan, alone, settings, where):
    """Run a plan with replicas, and one without in the first one's order, inline: the same
    training but for rounding.

    Returns both summaries.
    """
    found = run(plan, settings, where / "replicated", inline=True)
    pipeline = pipeline_of(plan)
    with pytest.MonkeyPatch.context() as patched:
        made = partial(make_schedule, pipeline)
        patched.setattr(operation_loop, "make_schedule", lambda _, count: made(count))
        wanted = run(alone, settings, where / "alone", inline=True)
    assert_same_training(where / "replicated", where / "alone", 1e-10)
    return found, wanted
