"""Running a system of ours as a user would: tp-profile, tp-plan, tp-run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
from timeprest.planner.plan import Plan, pipeline_of, read_plan
from timeprest.planner.recordings.lane_times import of_wall
from timeprest.planner.schedules.steady_state import steady_state
from timeprest.planner.search.answer.recheck import recheck
from timeprest.planner.systems.operations import UPDATE
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.files import read_file, write_file
from timeprest.profiles.profile import Profile
from timeprest.runtime.prepare.workers import all_replicas, workers_of
from timeprest.runtime.records.metrics import RunSummary, StageReport, decode
from timeprest.runtime.records.progress import read_losses
from timeprest.runtime.records.run_dir import RunDir

from ... import shared
from ..contestants import Contestant, file_name
from ..report.records import Figures, StageFigures
from ..tasks import ALL_RACES, target_of
from .rivals import LONGEST_S, Choice, Length, chosen

DRAIN = 3
"""Mini-batches behind the timed ones, so that the pipeline is full while the clock runs; more,
where more may be in flight."""

UNEVEN = 5
"""Of updates that come in no pattern, the first so many times the mini-batches in flight are
left out, and twice as many are timed."""


command = partial(shared.command, limit_s=LONGEST_S)


def profiled(model: str, folder: Path, seconds: float, stages: int, device: str) -> Path:
    """The model's profile; measured once for a folder. `device`: "cpu" or "cuda"."""
    path = folder / model / "profile.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        size = str(ALL_RACES[model].mini_batch)
        how = ["--batch-size", size, "--seconds", str(seconds), "--device", device]
        how += ["--together", str(stages)] if device == "cpu" else []
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
    """The plan that tp-plan chooses for a device each: cuts and micro-batches free.

    Raises UserError, also where it is to be cut as a rival that isn't prepared yet.
    """
    path = folder / model / f"{contestant.file_name}.plan.json"
    if not path.exists():
        like = chosen(folder, model, file_name(contestant.cut_as)) if contestant.cut_as else None
        count = str(like.micro_batches if like else contestant.micro_batches or "auto")
        what = ["--variant", contestant.variant, "--micro-batches", count]
        where = ["--cluster", str(folder / "cluster.toml"), "--replicas", "off"]
        if contestant.stages_per_rank > 1:
            where += ["--stages-per-device", str(contestant.stages_per_rank)]
        elif like:
            where += ["--stages", str(len(like.cuts) + 1)]
        elif VARIANTS[contestant.variant].placement == "any":
            where += ["--stages", str(contestant.processes)]
        profile = str(folder / model / "profile.json")
        command("plan", "solve", profile, *what, *where, "-q", "-o", str(path))
        if like:
            cut_as(path, Path(profile), like)
    return path


def cut_as(path: Path, profile_path: Path, like: Choice) -> None:
    """Give the plan a rival's cuts, behind whole modules, and predict it anew."""
    plan, profile = read_plan(path), read_file(profile_path, Profile)
    names = [layer.name for layer in profile.layers]
    modules = [name.partition(".")[0] for name in names]
    borders = [0, *(modules.index(str(cut)) for cut in like.cuts), len(names)]
    stages = tuple(
        msgspec.structs.replace(stage, nodes=tuple(names[begin:end]))
        for stage, begin, end in zip(plan.stages, borders[:-1], borders[1:], strict=True)
    )
    # The solver's bound is for this question, whatever the cuts.
    write_file(path, recheck(msgspec.structs.replace(plan, stages=stages), profile).plan)


def race_ours(contestant: Contestant, model: str, folder: Path, length: Length) -> Figures:
    """Run the plan once. Raises UserError when it fails."""
    plan_path = planned(contestant, model, folder)
    plan = read_plan(plan_path)
    length = whole_cycles(plan, length)
    where = folder / model / "run"
    shutil.rmtree(where, ignore_errors=True)
    steps = length.warm + length.timed + max(DRAIN, *(s.in_flight for s in plan.stages))
    quick = ["--no-evaluate", "--checkpoint-every", "0", "--no-distances", "--log-operations"]
    what = ["--steps", str(steps), "--run-dir", str(where)]
    command("run", str(plan_path), *what, *quick, "-q")
    return figures_of(RunDir(where), plan, length)


def whole_cycles(plan: Plan, length: Length) -> Length:
    """As long or longer: the clock begins when the simulation repeats itself. A schedule whose
    updates come in bunches is timed from bunch to bunch, and where they come unevenly for longer
    than that, their mean is taken over many of them, after the beginning, whose bunches are the
    largest."""
    steady = steady_state(pipeline_of(plan))
    deep = max(stage.in_flight for stage in plan.stages)
    if not 0 < steady.cycle <= length.timed:
        return Length(max(length.warm, UNEVEN * deep), max(length.timed, 2 * UNEVEN * deep))
    warm = max(length.warm, steady.mini_batches)
    return Length(warm, -(-length.timed // steady.cycle) * steady.cycle)


def figures_of(where: RunDir, plan: Plan, length: Length) -> Figures:
    """What a run left behind: times from its operations, bytes from its own account."""
    summary = decode((where.path / "summary.json").read_bytes(), RunSummary)
    windows = [window_of(where.operations(w), length) for w in all_replicas(plan)]
    period = max(window.period_s for window in windows)
    sent = sum(report.sent_bytes for report in summary.stages) / summary.mini_batches
    by_replica = dict(
        zip(all_replicas(plan), zip(summary.stages, windows, strict=True), strict=True)
    )
    processes = [
        _process(plan, [by_replica[r] for r in worker.replicas], period, summary.mini_batches)
        for worker in workers_of(plan)
    ]
    return Figures(
        period_s=period,
        samples_per_s=plan.mini_batch / period,
        micro_batches=plan.micro_batches,
        cuts=tuple(stage.nodes[0] for stage in plan.stages[1:]),
        stages=tuple(processes),
        losses=tuple(read_losses(where.metrics)),
        sent_bytes=sent,
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
        sum(op[what] for op in inside for what in kinds) / length.timed
        # Whoever else races loads while it computes.
        for kinds in (("compute_s", "loading_s"), ("communication_s",))
    )
    return Window((end - begin) / length.timed, compute, communication)


def _kind(op: dict[str, float]) -> str:
    """``0F3.1`` → ``F``."""
    return next(letter for letter in str(op["op"]) if not letter.isdigit())


def _process(
    plan: Plan,
    stages: Sequence[tuple[StageReport, Window]],
    period_s: float,
    mini_batches: int,
) -> StageFigures:
    """One worker with all its stages."""
    compute_s = sum(window.compute_s for _, window in stages)
    communication_s = sum(window.communication_s for _, window in stages)
    numbers = [report.stage for report, _ in stages]
    predicted = [plan.predicted.stages[s] for s in numbers]
    # Of the whole worker, whichever of its stages says it.
    report, _ = stages[0]
    return StageFigures(
        compute_s=compute_s,
        communication_s=communication_s,
        idle_s=of_wall(period_s, compute_s, communication_s).idle_s,
        peak_bytes=report.peak.total if report.peak else None,
        rss_bytes=report.rss_peak_bytes,
        sent_bytes=sum(each.sent_bytes for each, _ in stages) / mini_batches,
        predicted_compute_s=sum(
            plan.micro_batches * (each.forward_s + each.backward_s)
            + each.update_s / plan.update_every
            for each in predicted
        ),
        predicted_bytes=plan.predicted.device_of(numbers[0]).accounted_memory.total,
        predicted_sent_bytes=sum(sent_by(plan)[s] for s in numbers),
    )


def sent_by(plan: Plan) -> Counter[int]:
    """Bytes that each stage should send in a mini-batch: outputs, and gradients back.

    What goes to a stage on the same device is handed over, not sent.
    """
    found: Counter[int] = Counter()
    for edge in plan.edges:
        if plan.stages[edge.source].devices == plan.stages[edge.target].devices:
            continue
        nbytes = edge.bytes_per_micro_batch * plan.micro_batches
        found[edge.source] += nbytes
        if edge.needs_grad:
            found[edge.target] += nbytes
    return found
