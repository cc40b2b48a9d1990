"""Running a system of ours as a user would: tp-profile, tp-plan, tp-run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from timeprest.planner.plan import Plan, read_plan
from timeprest.planner.recording import of_wall
from timeprest.planner.systems.operations import UPDATE
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import UserError
from timeprest.runtime.prepare.workers import all_replicas
from timeprest.runtime.records.metrics import RunSummary, StageReport, decode
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import RunDir

from ..contestants import Contestant
from ..report.records import Figures, StageFigures
from ..tasks import RACES, target_of
from .rivals import LONGEST_S, Length

DRAIN = 3
"""Mini-batches behind the timed ones, so that the pipeline is full while the clock runs."""


def command(tool: str, *arguments: str) -> None:
    """Run tp-profile, tp-plan or tp-run. Raises UserError with its last words."""
    line = [sys.executable, "-m", f"timeprest.cli.{tool}", *arguments]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        raise UserError(f"tp-{tool}: took more than {LONGEST_S:.0f} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise UserError("".join(last) or f"tp-{tool} failed")


def profiled(model: str, folder: Path, seconds: float, stages: int) -> Path:
    """The model's profile; measured once for a folder."""
    path = folder / model / "profile.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        size = str(RACES[model].mini_batch)
        how = ["--batch-size", size, "--seconds", str(seconds), "--together", str(stages)]
        command("profile", target_of(model), *how, "-q", "-o", str(path))
    return path


def linked(folder: Path, processes: int) -> Path:
    """The links between local processes, measured once for a folder."""
    path = folder / "cluster.toml"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command("profile", "--links", "--processes", str(processes), "-q", "-o", str(path))
    return path


def planned(contestant: Contestant, model: str, folder: Path) -> Path:
    """The plan that tp-plan chooses for a device each: cuts and micro-batches free."""
    path = folder / model / f"{contestant.file_name}.plan.json"
    if not path.exists():
        count = str(contestant.micro_batches or "auto")
        what = ["--variant", contestant.variant, "--micro-batches", count]
        where = ["--cluster", str(folder / "cluster.toml"), "--replicas", "off"]
        if contestant.stages_per_rank > 1:
            where += ["--stages-per-device", str(contestant.stages_per_rank)]
        elif VARIANTS[contestant.variant].placement == "any":
            where += ["--stages", str(contestant.processes)]
        profile = str(folder / model / "profile.json")
        command("plan", "solve", profile, *what, *where, "-q", "-o", str(path))
    return path


def race_ours(contestant: Contestant, model: str, folder: Path, length: Length) -> Figures:
    """Run the plan once. Raises UserError when it fails."""
    plan_path = planned(contestant, model, folder)
    plan = read_plan(plan_path)
    where = folder / model / "run"
    shutil.rmtree(where, ignore_errors=True)
    steps = length.warm + length.timed + DRAIN
    quick = ["--no-evaluate", "--checkpoint-every", "0", "--no-distances", "--log-operations"]
    what = ["--steps", str(steps), "--run-dir", str(where)]
    command("run", str(plan_path), *what, *quick, "-q")
    return figures_of(RunDir(where), plan, length)


def figures_of(where: RunDir, plan: Plan, length: Length) -> Figures:
    """What a run left behind: times from its operations, bytes from its own account."""
    summary = decode((where.path / "summary.json").read_bytes(), RunSummary)
    windows = [window_of(where.operations(w), length) for w in all_replicas(plan.stages)]
    period = max(window.period_s for window in windows)
    sent = [report.sent_bytes / summary.mini_batches for report in summary.stages]
    stages = [
        _stage(plan, report, period, window, summary.mini_batches)
        for report, window in zip(summary.stages, windows, strict=True)
    ]
    return Figures(
        period_s=period,
        samples_per_s=plan.mini_batch / period,
        micro_batches=plan.micro_batches,
        cuts=tuple(stage.nodes[0] for stage in plan.stages[1:]),
        stages=tuple(stages),
        losses=tuple(read_losses(where.metrics)),
        sent_bytes=sum(sent),
        predicted_period_s=plan.predicted.period_s,
        predicted_speedup=plan.predicted.speedup,
        foreign_share=0.0,
    )


class Window(NamedTuple):
    """Seconds of a mini-batch in the steady state, and those of them that were spent on what."""

    period_s: float
    compute_s: float
    communication_s: float


def window_of(log: Path, length: Length) -> Window:
    """The timed mini-batches of a worker's log, from update to update."""
    lines = log.read_text(encoding="utf-8").splitlines()
    operations = [json.loads(line) for line in lines]
    ends = [op["end_s"] for op in operations if _kind(op) == UPDATE]
    begin, end = ends[length.warm - 1], ends[length.warm + length.timed - 1]
    inside = [op for op in operations if begin <= op["begin_s"] < end]
    compute, communication = (
        sum(op[what] for op in inside) / length.timed for what in ("compute_s", "communication_s")
    )
    return Window((end - begin) / length.timed, compute, communication)


def _kind(op: dict[str, float]) -> str:
    """``0F3.1`` → ``F``."""
    return next(letter for letter in str(op["op"]) if not letter.isdigit())


def _stage(
    plan: Plan, report: StageReport, period_s: float, window: Window, mini_batches: int
) -> StageFigures:
    predicted = plan.predicted.stages[report.stage]
    count = plan.micro_batches
    return StageFigures(
        compute_s=window.compute_s,
        communication_s=window.communication_s,
        idle_s=of_wall(period_s, window.compute_s, window.communication_s).idle_s,
        peak_bytes=report.peak.total if report.peak else None,
        rss_bytes=report.rss_peak_bytes,
        sent_bytes=report.sent_bytes / mini_batches,
        predicted_compute_s=count * (predicted.forward_s + predicted.backward_s)
        + predicted.update_s / plan.update_every,
        predicted_bytes=predicted.accounted_memory.total,
        predicted_sent_bytes=sent_by(plan)[report.stage],
    )


def sent_by(plan: Plan) -> Counter[int]:
    """Bytes that each stage should send in a mini-batch: outputs, and gradients back."""
    found: Counter[int] = Counter()
    for edge in plan.edges:
        nbytes = edge.bytes_per_micro_batch * plan.micro_batches
        found[edge.source] += nbytes
        if edge.needs_grad:
            found[edge.target] += nbytes
    return found
