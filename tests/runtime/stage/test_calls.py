"""How much Python a worker runs around what torch computes: counted, so that no machine matters."""

from __future__ import annotations

import sys
from pathlib import Path

import timeprest
from helpers.plans import plan_by_hand, with_times
from timeprest.runtime.run import run
from timeprest.runtime.settings import RunSettings
from timeprest.runtime.stage.runner import StageRunner

OURS = f"{Path(timeprest.__file__).parent}/"

WARM, STEPS = 4, 12
"""Mini-batches; the first ones find out what a forward keeps."""

MOST = 190
"""It was 313 when each operation entered contexts and made lists that nothing was asked of, then
224, then 174."""


def test_an_operation_takes_few_calls(mlp_profile, mlp_target, tmp_path, monkeypatch):
    """Of functions of ours and of contextlib, and what these call of C's."""
    calls = operations = 0

    def count(frame, event, _):
        nonlocal calls
        name = frame.f_code.co_filename
        # What is installed may lie in our folder.
        ours = name.startswith(OURS) and "site-packages" not in name
        if event in ("call", "c_call") and (ours or "contextlib" in name):
            calls += 1

    steps = StageRunner.steps

    def counted(self, op):
        nonlocal operations
        operations += op.mini_batch >= WARM
        sys.setprofile(count if op.mini_batch >= WARM else None)
        try:
            yield from steps(self, op)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(StageRunner, "steps", counted)
    plan = plan_by_hand(with_times(mlp_profile), "timeprest", 2, 4)
    settings = RunSettings(task=mlp_target, steps=STEPS, evaluate=False, record="none")
    run(plan, settings, tmp_path / "run", inline=True)
    # Four forwards, a backward and an update of each mini-batch, on two stages.
    assert operations == 2 * 6 * (STEPS - WARM)
    assert calls / operations < MOST
