"""Plans and studies of the claims' cells: a cell is a task and a number of devices.

Everything goes through the commands, and stays where it is: a study that was stopped goes on.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from timeprest.planner.systems.variants import VARIANTS
from timeprest.profiles.errors import UserError
from timeprest.profiles.files import write_bytes

HERE = Path(__file__).resolve().parent
STUDIES = HERE.parents[2] / "docs" / "claims"
DEVICES = (2, 4, 8)
BANDWIDTH = "10Gbit/s"


@dataclass(frozen=True)
class TaskPlan:
    """How a task is studied.

    Attributes:
        name: in tasks.py.
        title: for people.
        mini_batch: samples.
        steps: after which plain training's level is the target.
        options: of the optimizer; the rate is where grids begin.
        file: that has the task.
    """

    name: str
    title: str
    mini_batch: int
    steps: int
    options: tuple[str, ...]
    file: str = "tasks.py"

    def target(self) -> str:
        """As the commands take it."""
        return f"{HERE / self.file}:{self.name}"


_SGD = ("--optimizer", "sgd", "--momentum", "0.9")
TASKS = (
    TaskPlan("plain", "CNN without norms", 32, 400, (*_SGD, "--lr", "0.02")),
    TaskPlan("characters", "GPT on text", 8, 400, ("--optimizer", "adam", "--lr", "0.002")),
    TaskPlan("normed", "CNN with BatchNorm", 32, 400, (*_SGD, "--lr", "0.05")),
)


@dataclass(frozen=True)
class Effort:
    """How much is trained.

    Attributes:
        share: of a task's steps.
        evaluations: in so many steps; the target is a training loss, which needs none.
        name: what the study's file ends in.
    """

    share: float
    seeds: int
    tune: int
    evaluations: int = 0
    name: str = ""


FULL = Effort(1.0, seeds=3, tune=5, evaluations=4)
SHORT = Effort(0.1, seeds=3, tune=5, name="-short")
QUICK = Effort(0.05, seeds=2, tune=2, name="-quick")


@dataclass(frozen=True)
class Cell:
    """A task on so many devices."""

    task: TaskPlan
    devices: int

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.task.name}-{self.devices}"

    @property
    def micro_batches(self) -> int:
        """N of systems that know micro-batches: no fewer than stages, as `pipedream-2bw` asks."""
        return max(4, self.devices)


def cells(tasks: str, devices: str) -> list[Cell]:
    """Those of two lists with commas, "all" for all. Raises UserError."""
    names = [task.name for task in TASKS] if tasks == "all" else tasks.split(",")
    known = {str(count): count for count in DEVICES}
    asked = list(known) if devices == "all" else devices.split(",")
    by_name = {task.name: task for task in TASKS}
    for name in names:
        if name not in by_name:
            raise UserError(f"task {name!r}: choose of {', '.join(by_name)}")
    for count in asked:
        if count not in known:
            raise UserError(f"devices {count!r}: choose of {', '.join(known)}")
    # All of a task's sizes first: what it is compared with, plain training, is trained once.
    return [Cell(by_name[name], count) for name in names for count in map(known.__getitem__, asked)]


def command(tool: str, *arguments: str) -> None:
    """Run tp-profile, tp-plan or tp-run. Raises UserError where it fails."""
    done = subprocess.run([sys.executable, "-m", f"timeprest.cli.{tool}", *arguments])
    if done.returncode:
        raise UserError(f"tp-{tool} {' '.join(arguments[:2])} failed")


def profiled(task: TaskPlan, work: Path) -> Path:
    """The task's profile, reckoned: the same wherever it is made."""
    path = work / task.name / "profile.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        how = ["--device", "meta", "--spec", str(HERE / "device.toml")]
        size = str(task.mini_batch)
        command("profile", task.target(), "--batch-size", size, *how, "-q", "-o", str(path))
    return path


def planned(cell: Cell, work: Path, jobs: int) -> list[Path]:
    """A plan of every system with a device for each stage, or two stages on each where the system
    has them so."""
    return solved([(cell, name, BANDWIDTH) for name in VARIANTS], work, jobs)


def solved(wanted: Sequence[tuple[Cell, str, str]], work: Path, jobs: int) -> list[Path]:
    """Plans of systems in cells, for links of a bandwidth; `jobs` are made at once. Raises
    UserError."""
    for task in {cell.task for cell, _, _ in wanted}:
        profiled(task, work)
    with ThreadPoolExecutor(jobs) as pool:
        each = [pool.submit(solved_as, c, n, work, bandwidth=b) for c, n, b in wanted]
        return [one.result() for one in each]


def solved_as(
    cell: Cell,
    name: str,
    work: Path,
    micro_batches: int | None = None,
    most: int | None = None,
    *,
    bandwidth: str = BANDWIDTH,
    parts: int = 1,
) -> Path:
    """A system's plan.

    Args:
        micro_batches: None: those of the cell.
        most: mini-batches in flight at the most; None: as many as the papers have.
        parts: mini-batches are so many times as small.

    Raises UserError.
    """
    variant = VARIANTS[name]
    named = [name, f"N{micro_batches}" if micro_batches else "", f"L{most}" if most else ""]
    named.append(f"of{parts}" if parts > 1 else "")
    link = "" if bandwidth == BANDWIDTH else f"@{bandwidth.replace('/', '')}"
    path = work / cell.task.name / str(cell.devices) / f"{'-'.join(filter(None, named))}{link}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        n = micro_batches or (1 if variant.whole_mini_batches else cell.micro_batches)
        what = ["--variant", name, "--micro-batches", str(n), "--replicas", "off"]
        where = ["--devices", str(cell.devices), "--bandwidth", bandwidth]
        if variant.placement == "any":
            where += ["--stages", str(cell.devices)]
        if most is not None:
            where += ["--max-in-flight", str(most)]
        if parts > 1:
            what += ["--mini-batch", str(cell.task.mini_batch // parts)]
        profile = str(profiled(cell.task, work))
        command("plan", "solve", profile, *what, *where, "-q", "-o", str(path))
    return path


def study_path(cell: Cell, effort: Effort, studies: Path = STUDIES) -> Path:
    """Where a cell's study is kept."""
    return studies / f"{cell.name}{effort.name}.json"


def studied(cell: Cell, effort: Effort, work: Path, studies: Path, jobs: int) -> Path:
    """Study a cell; what was trained before isn't trained again."""
    path = study_path(cell, effort, studies)
    path.parent.mkdir(parents=True, exist_ok=True)
    plans = [str(plan) for plan in planned(cell, work, jobs)]
    steps = max(round(cell.task.steps * effort.share), 10)
    spent = ["--steps", str(steps), "--seeds", str(effort.seeds), "--tune", str(effort.tune)]
    # One folder for all sizes of a task: their plain training is the same.
    kept = ["--trainings", str(work / cell.task.name / f"trainings{effort.name}")]
    every = steps // effort.evaluations if effort.evaluations else 0
    spent += ["--eval-every", str(every)]
    rest = ["--uniform-delay", "--jobs", str(jobs), "-o", str(path)]
    command("run", "study", *plans, *cell.task.options, *spent, *kept, *rest)
    write_bytes(path, in_repository(path.read_text(encoding="utf-8"), work).encode())
    return path


def in_repository(text: str, work: Path) -> str:
    """A study's text as it is kept: it names no folder of the machine that it was made on."""
    return text.replace(f"{HERE.parents[2]}/", "").replace(f"{work}/", "runs/claims/")
