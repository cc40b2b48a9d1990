"""The three functions that `import timeprest` offers; each is one arrow of the main sentence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .planner.cluster import Cluster, uniform_cluster
from .planner.plan import Plan
from .planner.search import solve
from .profiles.importers.foreign import import_profile, is_foreign
from .profiles.profile import Profile

if TYPE_CHECKING:
    from .runtime.scores import RunSummary


def profile(
    target: str,
    *,
    batch_size: int | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    device: str = "cpu",
    spec: str | None = None,
    autocast: str | None = None,
    threads: int = 1,
    granularity: str = "layer",
    inputs: Sequence[str] = (),
    seconds: float = 15.0,
) -> Profile:
    """Measure a target (`tp-profile`).

    Args:
        target: a built-in task or model, ``file.py:name``, ``pkg.module:name``, an ONNX file, or
            a profile that another planner published, which is imported with the batch sizes.
        batch_size: samples in a mini-batch; by default the largest micro-batch size, or 64.
        micro_batch_sizes: sizes to measure, in samples.
        device: "cpu", "cuda", or "meta" to reckon with a device `spec` without running.
        autocast: dtype of torch.autocast, "bfloat16" or "float16"; None: off.
        granularity: "layer", "op", or name patterns of modules that are one layer each.
        inputs: for a model that isn't a task, ``SHAPE:DTYPE`` of each of its inputs.
        seconds: to spend on timing at most.

    Raises:
        TargetError, TraceError: the model can't be imported, built or traced.
        FileError: a published profile or a device spec can't be read.
    """
    if Path(target).is_file() and is_foreign(target):
        return import_profile(target, batch_size=batch_size, micro_batch_sizes=micro_batch_sizes)
    from .profiles.measuring.measure import measure
    from .profiles.measuring.platforms import platform_of
    from .profiles.target import parse_input, resolve

    return measure(
        resolve(target, [parse_input(text) for text in inputs]),
        batch_size=batch_size or max(micro_batch_sizes or [64]),
        micro_batch_sizes=micro_batch_sizes,
        platform=platform_of(device, spec, autocast),
        threads=threads,
        granularity=granularity,
        seconds=seconds,
    )


def plan(
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    devices: int = 2,
    memory: str | None = None,
    variant: str = "timeprest",
    mini_batch: int | None = None,
    micro_batches: int | None = None,
    stages: int | None = None,
) -> Plan:
    """Find the best plan (`tp-plan solve`).

    Args:
        cluster: by default, `devices` equal ones with `memory` (such as "16GiB") each.

    Raises:
        PlanError, InfeasibleError: the settings contradict each other, or nothing fits.
    """
    return solve(
        profile,
        cluster or uniform_cluster(devices, memory),
        variant,
        mini_batch=mini_batch,
        micro_batches=micro_batches,
        stages=stages,
    )


def run(
    plan: Plan,
    run_dir: str | Path,
    *,
    task: str | None = None,
    epochs: int = 1,
    steps: int | None = None,
    inline: bool = False,
    seed: int = 0,
) -> RunSummary:
    """Train by a plan (`tp-run`).

    Args:
        run_dir: a new directory for metrics, weights and the summary.
        task: by default the target that the plan's profile was made of.
        inline: all stages in this process.

    Raises:
        TargetError, TraceError, PlanError, FileError: found before anything starts.
        RunError: training failed.
    """
    from .runtime.run import run as run_plan
    from .runtime.settings import RunSettings

    settings = RunSettings(
        task=task or plan.profile.target,
        epochs=epochs,
        steps=steps,
        seed=seed,
        threads=plan.profile.threads,
    )
    return run_plan(plan, settings, run_dir, inline=inline)
