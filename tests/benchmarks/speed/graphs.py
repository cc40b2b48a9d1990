"""One stage in one process, with CUDA graphs and without, beside a plain loop on the same model.

    python -m timeprest.tests.benchmarks.speed.graphs FOLDER [MODEL ...]

Prints a line for each way: milliseconds of a mini-batch, how much of the plain speed that is, how
many times that without graphs, and what isn't captured. Without a GPU it runs on the CPU, where
there are none.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Literal

import timeprest
import torch

from .racing.rank import RankSpec, measured
from .tasks import ALL_RACES, target_of

STEPS = 40
DEVICE: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
GRAPHS = ("off", "auto") if DEVICE == "cuda" else ("off",)


def compare(model: str, folder: Path) -> None:
    """Train each way for a little while."""
    spec = RankSpec(model=model, kind="plain", warm=5, timed=STEPS, computes_on=DEVICE)
    plain_s = measured(spec).period_s
    print(f"{model}: plain loop {plain_s * 1e3:.1f} ms", flush=True)
    size = ALL_RACES[model].mini_batch
    profile = timeprest.profile(
        target_of(model),
        batch_size=size,
        micro_batch_sizes=(size // 4, size),
        seconds=1,
        device=DEVICE,
    )
    for n in (1, 4):
        plan = timeprest.plan(profile, devices=1, variant="timeprest", micro_batches=n)
        without_s = 0.0
        for graphs in GRAPHS:
            shutil.rmtree(folder, ignore_errors=True)
            done = timeprest.run(
                plan,
                folder,
                steps=STEPS,
                evaluate=False,
                checkpoint_every=0,
                device=DEVICE,
                graphs=graphs,
                inline=True,
            )
            assert done.summary is not None
            (stage,) = done.summary.stages
            (period_s,) = stage.periods_s
            without_s = without_s or period_s
            print(
                f"{model}: N = {n}, --graphs {graphs}: {period_s * 1e3:.1f} ms, speed "
                f"{plain_s / period_s:.2f} of the plain loop, {without_s / period_s:.2f} of it "
                f"without graphs, predicted "
                f"{plan.predicted.period_s * 1e3:.1f} ms; {stage.graphs}",
                flush=True,
            )


if __name__ == "__main__":
    for name in sys.argv[2:] or ["resnet50", "gpt"]:
        compare(name, Path(sys.argv[1]))
