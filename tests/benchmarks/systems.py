"""Trains digits with every system and writes docs/systems_measured.md: `make bench-systems`.

Four stages in one process, the same weight versions as in four. Figures are measured anew each
time; the page says on what. With names of systems as arguments only those are run, and no page is
written.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from timeprest import plan as solve
from timeprest import profile as measure
from timeprest.planner.cluster.cluster import uniform_cluster
from timeprest.planner.plan import Plan
from timeprest.planner.systems.variants import VARIANTS, Variant
from timeprest.profiles.profile import Profile
from timeprest.profiles.units import format_bytes
from timeprest.runtime.records.metrics import RunSummary, StageReport
from timeprest.runtime.run import run
from timeprest.runtime.settings import OptimizerChoice, RunSettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "systems_measured.md"
STAGES, MICRO_BATCHES, MINI_BATCH = 4, 4, 64
EPOCHS, SEEDS = 40, (0,)
OPTIMIZER = OptimizerChoice(name="sgd", lr=0.01, momentum=0.9)
LONGER = OptimizerChoice(name="sgd", lr=0.1, momentum=0.9)
"""Where the gradient is discounted by 1 − γ: steps as long as the others'."""
WANTED = 0.96


@dataclass(frozen=True)
class Found:
    """One system's runs, one for each seed."""

    plan: Plan
    runs: tuple[RunSummary, ...]

    @property
    def accuracies(self) -> list[float]:
        """After the last epoch."""
        return [summary.epochs[-1].test["accuracy"] for summary in self.runs]


def planned(profile: Profile, variant: Variant) -> Plan:
    """The best plan with four stages, in whole mini-batches or four micro-batches."""
    return solve(
        profile,
        uniform_cluster(STAGES),
        variant=variant.name,
        mini_batch=MINI_BATCH,
        stages=STAGES,
        micro_batches=1 if variant.whole_mini_batches else MICRO_BATCHES,
    )


def trained(plan: Plan, optimizer: OptimizerChoice = OPTIMIZER) -> Found:
    """Train once for each seed."""
    runs = []
    for seed in SEEDS:
        settings = RunSettings(task="digits", epochs=EPOCHS, optimizer=optimizer, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(plan, settings, Path(folder) / "run", inline=True))
    return Found(plan, tuple(runs))


def per_stage(stages: list[StageReport], what: str) -> str:
    """One figure of every stage."""
    return ", ".join(str(getattr(stage, what)) for stage in stages)


def row(found: Found, note: str = "") -> list[str]:
    """The system's line in the table."""
    stages = found.runs[0].stages
    bytes_held = [stage.peak.total for stage in stages if stage.peak]
    apart = max(stage.weight_distance for summary in found.runs for stage in summary.stages)
    return [
        f"`{found.plan.variant}`{note}",
        per_stage(stages, "versions_held"),
        ", ".join(str(max(stage.version_differences)) for stage in stages),
        f"{apart:.2%}" if apart else "0",
        " + ".join(format_bytes(nbytes) for nbytes in bytes_held),
        format_bytes(sum(bytes_held)),
        ", ".join(f"{accuracy:.1%}" for accuracy in found.accuracies),
    ]


HEAD = [
    "system",
    "versions held",
    "largest difference",
    "weights apart",
    "bytes held per stage",
    "in all",
    "accuracy",
]


def page(rows: list[list[str]], short: list[str], seconds: float) -> str:
    """The page's text."""
    table = [HEAD, ["---"] * len(HEAD), *rows]
    lines = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
    verdict = (
        f"Every system reaches {WANTED:.0%}."
        if not short
        else f"Under {WANTED:.0%}: {', '.join(short)}."
    )
    discounted = [name for name, v in VARIANTS.items() if v.update_rule != "optimizer"]
    verdict += (
        f" Delay-corrected Nesterov momentum ({', '.join(f'`{name}`' for name in discounted)}) "
        f"discounts gradients by 1 − γ = {1 - OPTIMIZER.momentum:.1g}, so at one learning rate "
        f"its steps are that much shorter: with lr {LONGER.lr} they are as long as the others'."
    )
    o = OPTIMIZER
    return f"""# Every system on one model

Made by `make bench-systems` on {os.cpu_count()} cores ({platform.machine()}), Python \
{platform.python_version()}, torch {torch.__version__}, in {seconds / 60:.0f} min.

The digits task (1,797 images, a network of three convolutions and two linear layers), \
S = {STAGES} stages cut by the planner, mini-batch {MINI_BATCH}, N = {MICRO_BATCHES} micro-batches \
(systems of whole mini-batches: 1), {EPOCHS} epochs, {o.name} with lr {o.lr} and momentum \
{o.momentum} for all, seed {", ".join(map(str, SEEDS))}; inline, which has exactly the versions \
of a run in processes. Figures per stage run from stage 0 to stage {STAGES - 1}.

- *versions held*: of the weights at once, the latest among them.
- *largest difference*: version of a backward less that of its forward.
- *weights apart*: ‖W_B − W_F‖ / ‖W_F‖ of the weights that backwards and their forwards used, the \
mean over an epoch, in the stage and epoch where it is largest.
- *bytes held*: the runtime's own account at its peak: weights, older versions, gradients, \
optimizer, activations, messages.
- *accuracy*: on the test images after the last epoch, for each seed.

{lines}

{verdict}
"""


def main() -> None:
    """Run what is asked for."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    profile = measure("digits", batch_size=MINI_BATCH, threads=1)
    asked = sys.argv[1:] or list(VARIANTS)
    rows, short = [], []
    for name in asked:
        plan = planned(profile, VARIANTS[name])
        found = trained(plan)
        rows.append(row(found))
        if min(found.accuracies) < WANTED:
            short.append(f"`{name}`")
        print("  ".join(rows[-1]), flush=True)
        if VARIANTS[name].update_rule != "optimizer":
            rows.append(row(trained(plan, LONGER), f", lr {LONGER.lr}"))
            print("  ".join(rows[-1]), flush=True)
    if not sys.argv[1:]:
        PAGE.write_text(page(rows, short, time.perf_counter() - begin), encoding="utf-8")
        print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
