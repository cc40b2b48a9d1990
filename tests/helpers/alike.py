"""Runs that must end alike."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from timeprest.planner.plan import pipeline_of
from timeprest.planner.schedules.schedules import make_schedule
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import load_weights
from timeprest.runtime.run import run
from timeprest.runtime.training import loop


def assert_same_weights(one, other, atol=0.0):
    """Of runs' folders, or by name; to the last bit unless they may be so far apart."""
    found, wanted = (w if isinstance(w, Mapping) else load_weights(w) for w in (one, other))
    torch.testing.assert_close(found, wanted, rtol=0, atol=atol)


def assert_same_training(one, other, atol=0.0):
    """And losses."""
    assert_same_weights(one, other, atol)
    losses, others = (read_losses(where / "metrics.jsonl") for where in (one, other))
    assert losses == pytest.approx(others, rel=0, abs=atol)


def check_processes(plan, settings, where, atol=0.0):
    """Run a plan inline and in processes, to the same weights, losses and test figures.

    Returns both summaries.
    """
    inline, processes = (
        run(plan, settings, where / mode, inline=mode == "inline")
        for mode in ("inline", "processes")
    )
    assert_same_training(where / "processes", where / "inline", atol)
    for mine, other in zip(inline.epochs, processes.epochs, strict=True):
        assert mine.test == pytest.approx(other.test, rel=0, abs=atol)
    return inline, processes


def run_replicated(plan, alone, settings, where):
    """Run a plan with replicas, and one without in the first one's order, inline, to the same
    weights and losses, but for rounding.

    Returns both summaries.
    """
    found = run(plan, settings, where / "replicated", inline=True)
    pipeline = pipeline_of(plan)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(loop, "make_schedule", lambda _, count: make_schedule(pipeline, count))
        wanted = run(alone, settings, where / "alone", inline=True)
    assert_same_training(where / "replicated", where / "alone", 1e-10)
    return found, wanted
