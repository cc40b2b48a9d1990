"""Whether systems without a flush are ahead in mid-training, as TiMePReSt's reproduction found, on
small networks of the kinds that it and the paper trained (small.py).

As there: N = 3, mini-batches of three times as many samples, one rate for all systems, a warm-up
and a cosine. What has a stage for each of four devices is beside that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.files import write_bytes
from timeprest.runtime.study.figures.curves import points_of, samples_to, smoothed, value_at
from timeprest.runtime.study.figures.spread import spread_of
from timeprest.runtime.study.figures.study import PLAIN, Curve, Study, StudyArm, read_study

from ..shared import markdown
from .claims import Verdict, by_interval, marked
from .studies import Cell, TaskPlan, command, in_repository, solved_as

MICRO_BATCHES = 3
STEPS, SEEDS = 240, 3
SHARES = (1 / 3, 1 / 2, 1.0)
"""Of the steps: where losses are told."""
SYNCHRONOUS = "pipedream-flush"
SYSTEMS = {
    2: (SYNCHRONOUS, "pipedream", "timeprest", "timeprest-stashed"),
    4: ("pipedream", "timeprest"),
}
"""By devices. What flushes trains the same on any number."""
_SCHEDULE = ("--lr-schedule", "cosine", "--warmup", "20")
_SGD = ("--optimizer", "sgd", "--momentum", "0.9", "--weight-decay", "0.0005")
_ADAMW = ("--optimizer", "adamw", "--betas", "0.9,0.95", "--weight-decay", "0.1")


class Original(NamedTuple):
    """A network, and the rates that all systems train at."""

    task: TaskPlan
    rates: tuple[float, ...]


ORIGINALS = (
    Original(
        TaskPlan("bottlenecks", "thin ResNet", 48, STEPS, (*_SGD, *_SCHEDULE), "small.py"),
        (0.02, 0.05),
    ),
    Original(
        TaskPlan("llama", "small Llama", 12, STEPS, (*_ADAMW, *_SCHEDULE), "small.py"),
        (0.001, 0.003),
    ),
)


def _path(each: Original, rate: float, studies: Path) -> Path:
    return studies / f"{each.task.name}-{rate:g}.json"


def study_originals(work: Path, studies: Path, jobs: int) -> None:
    """Train what isn't yet, a study for each network and rate. Raises UserError."""
    for each in ORIGINALS:
        plans = [
            str(solved_as(Cell(each.task, devices), name, work, _micro_batches(name)))
            for devices, names in SYSTEMS.items()
            for name in names
        ]
        for rate in each.rates:
            path = _path(each, rate, studies)
            spent = ["--steps", str(STEPS), "--longer", "1", "--seeds", str(SEEDS), "--tune", "1"]
            spent += ["--lr", str(rate), "--eval-every", str(STEPS // 2), "--jobs", str(jobs)]
            kept = ["--trainings", str(work / each.task.name / "trainings"), "-o", str(path)]
            command("run", "study", *plans, *each.task.options, *spent, *kept)
            write_bytes(path, in_repository(path.read_text(encoding="utf-8"), work).encode())


def _micro_batches(name: str) -> int:
    return 1 if VARIANTS[name].whole_mini_batches else MICRO_BATCHES


# The page's section -----------------------------------------------------------------------------


def originals(studies: Path) -> list[str]:
    """What was found, of the studies there are."""
    found = [
        (each, rate, read_study(path))
        for each in ORIGINALS
        for rate in each.rates
        if (path := _path(each, rate, studies)).exists()
    ]
    if not found:
        return []
    pairs = [
        *((system, SYNCHRONOUS) for system in ("timeprest", "timeprest-stashed")),
        ("pipedream", PLAIN),
        ("timeprest", "pipedream"),
    ]
    columns = [(PLAIN, 0), *((name, s) for s, names in SYSTEMS.items() for name in names)]
    compared = [(*pair, s) for pair in pairs for s, names in SYSTEMS.items() if pair[0] in names]
    losses, ahead, judged = [], [], {pair: list[Verdict]() for pair in pairs}
    for each, rate, study in found:
        label = [each.task.title, f"{rate:g}"]
        arms = [_arm(study, *column) for column in columns]
        losses.append([*label, "loss", *map(_losses, arms)])
        losses.append([*label, "accuracy", *map(_accuracies, arms)])
        verdicts = [
            _half_way(_arm(study, one, s), _arm(study, other, s)) for one, other, s in compared
        ]
        for (one, other, _), verdict in zip(compared, verdicts, strict=True):
            judged[one, other].append(verdict)
        ahead.append([*label, *map(marked, verdicts)])
    heads = [PLAIN, *(_headed(name, s) for name, s in columns[1:])]
    over = [f"`{one}` over `{other}`, S = {s}" for one, other, s in compared]
    return [
        "## The set-ups of TiMePReSt and its reproduction, in small",
        _SET_UPS,
        markdown(["", "rate", "", *heads], losses),
        f"**{_shown(judged)}** Samples to the loss that the second has half-way, over its own: "
        f"{_told(judged)}",
        markdown(["", "rate", *over], ahead),
    ]


_SET_UPS = (
    "The reproduction finds `timeprest` ahead in mid-training, of PipeDream and of synchronous "
    f"pipelines, all at one rate. So its settings (S = 2, N = {MICRO_BATCHES}, as large "
    "mini-batches for PipeDream; SGD, momentum 0.9, weight decay 0.0005, warm-up, cosine, and "
    "rates that it has) on a bottleneck ResNet with BatchNorm of 17 convolutions on coloured "
    "digits, mini-batches of 48; and a Llama of four blocks (RMSNorm, SwiGLU, rotary positions) on "
    "characters by AdamW, of which no settings are known. S = 4 beside that. "
    f"{STEPS} mini-batches, {SEEDS} seeds: means of the training loss at ⅓, ½ and the end, and of "
    "the test accuracy at ½ and the end."
)


def _arm(study: Study, system: str, stages: int) -> StudyArm:
    """That a system's plan of so many stages was trained by; what flushes is alike on any."""
    if system == PLAIN:
        return study.plain
    asked = (system, min(SYSTEMS) if system == SYNCHRONOUS else stages)
    return study.arm(next(p.arm for p in study.plans if (p.variant, p.stages) == asked))


def _headed(system: str, stages: int) -> str:
    return f"`{system}`" if system == SYNCHRONOUS else f"`{system}`, S = {stages}"


def _loss(curve: Curve, share: float) -> float:
    """Infinite: it diverged before."""
    at = share * curve.length
    value = value_at(smoothed(points_of(curve, "loss", 1)), at)
    return float("inf") if value is None or at > (curve.diverged_at or at) else value


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _losses(arm: StudyArm) -> str:
    means = [_mean([_loss(curve, share) for curve in arm.finals()]) for share in SHARES]
    return " / ".join(f"{mean:.3f}" if mean < float("inf") else "diverged" for mean in means)


def _accuracies(arm: StudyArm) -> str:
    by_point = zip(*(curve.tests for curve in arm.finals()), strict=False)
    return " / ".join(f"{_mean([t.figures['accuracy'] for t in p]):.1%}" for p in by_point)


def _half_way(one: StudyArm, other: StudyArm) -> Verdict:
    """Samples to the loss that the other has half-way, over its own, paired by seed."""
    level = _mean([_loss(curve, 1 / 2) for curve in other.finals()])
    counts = [
        [samples_to(smoothed(points_of(c, "loss", 1)), level, rises=False) for c in arm.finals()]
        for arm in (one, other)
    ]
    ratios = [a / b for a, b in zip(*counts, strict=True) if a and b]
    if len(ratios) < len(counts[0]):
        return Verdict("no", "not reached")
    return by_interval(spread_of(ratios))


def _shown(judged: dict[tuple[str, str], list[Verdict]]) -> str:
    """Whether the finding is seen."""
    one = [verdicts for (name, _), verdicts in judged.items() if name == "timeprest"]
    by_cell = list(zip(*one, strict=True))
    both = sum(all(each.outcome == "yes" for each in cell) for cell in by_cell)
    some = f"shows in {both} of {len(by_cell)}" if both else f"isn't seen in any of {len(by_cell)}"
    return f"That `timeprest` is ahead of both half-way {some} (beyond the seeds' spread)."


def _told(judged: dict[tuple[str, str], list[Verdict]]) -> str:
    """How often the first is ahead, beyond the seeds' spread."""
    lines = []
    for (one, other), verdicts in judged.items():
        of = Counter(each.outcome for each in verdicts)
        lines.append(
            f"`{one}` over `{other}`: ahead in {of['yes']}, equal within the seeds' spread in "
            f"{of['equal']}, behind in {of['no']}"
        )
    return "; ".join(lines) + "."
