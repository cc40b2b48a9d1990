"""Makes the pictures of docs/pictures_of_systems.md, and the pages with them: `make pictures`.

One model, profiled by a device's data sheet so that nothing is measured and the pictures are the
same everywhere; a plan of 4 stages for every system; its figures, and a picture of its page where
there is a Chromium. (Pictures of pages are made smaller where pngquant is installed.)
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timeprest.planner.plan import Plan, read_plan
from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.units import format_bytes, format_seconds

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"
WORK = HERE.parent / "build" / "pictures"

PROFILE = (
    "gpt2:tied=0,length=64,vocabulary=8192 --device meta --spec v100-sxm2-32gb "
    "--batch-size 16 --micro-batch-sizes 4,16"
)
SOLVE = "--devices 4 --stages 4 --replicas off --memory 2GiB --bandwidth 12GB/s --latency 10us"
MICRO_BATCHES = 4

PLACED = {
    "timeprest-v": (
        "--variant timeprest --micro-batches 4 --stages-per-device 2 --placement v --stages 4",
        "--from-mini-batch 4 --mini-batches 3",
    ),
    "interleaved-1f1b": (
        "--variant interleaved-1f1b --micro-batches 4 --stages-per-device 2 --stages 4",
        "--from-mini-batch 1 --mini-batches 1",
    ),
    "zb-v": (
        "--variant zb-v --micro-batches 4 --stages-per-device 2 --stages 4",
        "--from-mini-batch 1 --mini-batches 1",
    ),
    "v-half": (
        "--variant v-half --micro-batches 4 --stages-per-device 2 --stages 4",
        "--from-mini-batch 1 --mini-batches 1",
    ),
}
"""Plans whose devices have several stages: how they are solved, for two devices, and drawn."""

STACKED = ("timeprest", "pipedream", "gpipe")
"""Systems whose timelines stand on one axis."""

PAGE = (1340, 1680)
"""Of the pictures of pages: width and height, in pixels."""


def command(tool: str, *arguments: str | Path) -> str:
    """Run one of the three commands. Returns what it prints."""
    line = [sys.executable, "-m", f"timeprest.cli.{tool}", *map(str, arguments)]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def solve(profile: Path, variant: str) -> Path:
    """The system's plan."""
    path = WORK / f"{variant}.json"
    whole = VARIANTS[variant].whole_mini_batches
    micro = [] if whole else ["--micro-batches", str(MICRO_BATCHES)]
    command(
        "plan", "solve", profile, "-q", *SOLVE.split(), "--variant", variant, *micro, "-o", path
    )
    return path


def draw_placed(profile: Path) -> None:
    """The timelines of plans whose devices have several stages."""
    machines = SOLVE.replace("--devices 4 --stages 4 --replicas off", "--devices 2").split()
    for name, (asked, shown) in PLACED.items():
        plan = WORK / f"{name}.json"
        command("plan", "solve", profile, "-q", *machines, *asked.split(), "-o", plan)
        path = PICTURES / f"{name}.timeline.svg"
        command("plan", "show", plan, "-q", "--svg", path, "--svg-messages", *shown.split())


def draw_stacked(plans: Sequence[Path]) -> None:
    """Timelines of several systems, one above the other."""
    path = PICTURES / "stacked.timeline.svg"
    command("plan", "compare", *plans, "-q", "--svg", path, "--mini-batches", "6")


def draw(plan: Path, variant: str) -> None:
    """The plan's figures, and its page."""
    command(
        "plan",
        "show",
        plan,
        "-q",
        *("--svg", PICTURES / f"{variant}.timeline.svg", "--svg-versions"),
        *("--svg-memory", PICTURES / f"{variant}.memory.svg"),
        *("--html", WORK / f"{variant}.html"),
    )


def photograph(variant: str, chromium: str) -> None:
    """A picture of the plan's page."""
    path = PICTURES / f"{variant}.page.png"
    subprocess.run(
        [
            chromium,
            *["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"],
            "--virtual-time-budget=3000",
            f"--window-size={PAGE[0]},{PAGE[1]}",
            f"--screenshot={path}",
            (WORK / f"{variant}.html").as_uri(),
        ],
        check=True,
        capture_output=True,
        timeout=120,
    )
    pngquant = shutil.which("pngquant")
    if pngquant:
        subprocess.run(
            [pngquant, "--force", "--strip", "--speed", "1", "--output", path, "64", "--", path],
            check=True,
        )


@dataclass(frozen=True)
class Told:
    """A plan's figures in words, as the page has them."""

    period: str
    speedup: str
    idle: str
    most_idle: str
    memory: str
    versions: str
    difference: str
    v: int | None

    @staticmethod
    def of(plan: Plan) -> Told:
        """From the plan's predictions."""
        stages = plan.predicted.stages
        idle = [stage.idle_share for stage in stages]

        def each(name: str) -> str:
            return " ".join(str(getattr(stage, name)) for stage in stages)

        return Told(
            period=format_seconds(plan.predicted.period_s),
            speedup=f"{plan.predicted.speedup:.2f}",
            idle=f"{sum(idle) / len(idle):.0%}",
            most_idle=f"{max(idle):.0%}",
            memory=format_bytes(max(stage.memory_bytes for stage in stages)),
            versions=each("versions_held"),
            difference=each("version_difference"),
            v=plan.predicted.sequence_distance,
        )


def table(told: dict[str, Told]) -> str:
    """All systems' figures."""
    rows = [
        "| system | period | speed-up | idle, mean | largest peak | weight versions held, "
        "by stage | "
        "version difference, by stage | v |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| `{variant}` | {t.period} | {t.speedup} | {t.idle} | {t.memory} | {t.versions} | "
        f"{t.difference} | {t.v} |"
        for variant, t in told.items()
    ]
    return "\n".join(rows)


def main() -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
    WORK.mkdir(parents=True, exist_ok=True)
    PICTURES.mkdir(exist_ok=True)
    profile = WORK / "profile.json"
    command("profile", *PROFILE.split(), "-q", "-o", profile)
    draw_placed(profile)
    told: dict[str, Any] = {}
    # With a stage on each device; those that place their stages themselves have more.
    straight = [name for name, variant in VARIANTS.items() if variant.placement == "any"]
    for variant in straight:
        plan = solve(profile, variant)
        draw(plan, variant)
        if chromium:
            photograph(variant, chromium)
        told[variant] = Told.of(read_plan(plan))
        print(variant, told[variant], flush=True)
    draw_stacked([WORK / f"{variant}.json" for variant in STACKED])
    column = ["--svg-width", "85mm", "--svg-messages", "--mini-batches", "4"]
    path = PICTURES / "column.svg"
    command("plan", "show", WORK / "pipedream.json", "-q", "--svg", path, *column)
    for page in ("reading_pictures", "pictures_of_systems"):
        head = (HERE / f"{page}.head.md").read_text()
        text = head.format(p=told, table=table(told), profile=PROFILE, solve=SOLVE)
        (HERE / f"{page}.md").write_text(text)


if __name__ == "__main__":
    main()
