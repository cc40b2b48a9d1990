"""Solves published planners' workloads and look-alikes of larger ones: `make bench-planner`.

Prints a line for each case and writes docs/planner_benchmark.md and docs/planner_two_stages.md,
from heads of theirs (`.head.md`) beside them. Objectives, bounds and seconds of ours are of this
run; what other planners took is quoted. A table is a `Table` in `tables()`; a case is whatever
makes a `StageProblem`.

With words as arguments only cases whose table and label have them all are run, and no page is
written.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from timeprest.planner.cluster.cluster import Cluster, uniform_cluster
from timeprest.planner.partition.problem import StageProblem, cut_load
from timeprest.planner.plan import Plan
from timeprest.planner.search.solve import solve
from timeprest.planner.systems.placement import numbered_devices, pattern_of
from timeprest.profiles.errors import InfeasibleError
from timeprest.profiles.profile import Profile
from timeprest.profiles.units import format_bytes
from timeprest.tests.benchmarks.published.cost_models import problem_of
from timeprest.tests.benchmarks.published.cut import CutAnswer, solve_cut
from timeprest.tests.benchmarks.published.reader import import_published, read_workload
from timeprest.tests.benchmarks.published.workload import Workload
from timeprest.tests.benchmarks.shared import head_of, markdown
from timeprest.tests.helpers.drawn import lattices

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
DATA = ROOT.parent / "shared" / "data"
TIME_LIMIT_S = 60
GIB = 2**30

SYSTEM, MICRO_BATCHES = "timeprest", 4
"""Of plans under our own cost model; a mini-batch has so many micro-batches."""

EFFORT, LONGEST_S = 800_000, 60.0
"""Simulated operations for each of its plans, and time."""


@dataclass(frozen=True)
class Rival:
    """What another planner is known to make of a case.

    Attributes:
        objective: as it was printed, in the case's unit; empty where unknown.
        seconds: as it was measured; for people.
    """

    objective: str = ""
    seconds: str = ""


@dataclass(frozen=True)
class OwnCase:
    """The same under our own cost model.

    Attributes:
        file: in the folder of published ones.
        samples: in a mini-batch, in the file's units.
        replicas: plans with one stage on each device may have them.
    """

    file: str
    samples: int
    cluster: Cluster
    replicas: bool

    def profile(self) -> Profile:
        """With times of a micro-batch."""
        sizes = [self.samples // MICRO_BATCHES]
        return import_published(str(DATA / self.file), self.samples, sizes)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        nodes: of the file, or layers of a made graph.
        memory: the limit of a device, for people.
        make: makes the problem; its time counts.
        own: None for made graphs.
        unit_s: seconds in the unit of the row's objectives.
    """

    label: str
    nodes: int
    memory: str
    make: Callable[[], StageProblem]
    rival: Rival
    own: OwnCase | None = None
    unit_s: float = 1e-3


@dataclass(frozen=True)
class Table:
    """Rows under one heading.

    Attributes:
        text: what people should know about them.
        cases: none where their files are missing.
    """

    title: str
    text: str
    cases: Callable[[], Iterator[Case]]


# PipeDream -------------------------------------------------------------------------------------

PIPEDREAM_MACHINES = [(4, 1e9), (4, 1e10), (8, 1e9), (8, 1e10)]
PIPEDREAM_SAMPLES = 128
PIPEDREAM = {
    ("vgg16", False): (["411.0", "235.6", "411.0", "235.6"], "0.2"),
    ("resnet50", False): (["258.1", "111.5", "258.1", "82.2"], "0.3–0.4"),
    ("gnmt", False): (["25.87", "25.87", "19.29", "19.03"], "0.2"),
    ("vgg16", True): (["205.5", "170.2", "103.8", "89.9"], ""),
    ("resnet50", True): (["162.9", "111.5", "92.0", "56.6"], ""),
    ("gnmt", True): (["25.87", "25.87", "19.28", "17.12"], ""),
}


def pipedream_cases() -> Iterator[Case]:
    """Straight pipelines, and stages with replicas."""
    for (name, replicas), (objectives, seconds) in PIPEDREAM.items():
        file = f"pipedream/{name}.graph.txt"
        workload = published(file)
        if workload is None:
            continue
        for (devices, bandwidth), objective in zip(PIPEDREAM_MACHINES, objectives, strict=True):
            yield workload_case(
                f"{name}, {bandwidth / 1e9:.0f} GB/s, {'replicas' if replicas else 'straight'}",
                workload,
                Rival(objective, seconds),
                # The file's numbers are for a mini-batch, here of so many samples.
                own=own_case(file, PIPEDREAM_SAMPLES, devices, bandwidth, replicas=replicas),
                devices=devices,
                bandwidth_bytes_per_s=bandwidth,
                replicas=replicas,
            )


# The placement paper ---------------------------------------------------------------------------

PLACEMENT = [
    ("operator_bert_l-3_training", "", 1.0, Rival("65.3031", "2.9")),
    ("layer_bert24_training", ", costs as shipped", 1e-3, Rival("41.7458", "0.01")),
    ("layer_bert24_training", ", costs × 1000", 1.0, Rival("46.6082", "0.01")),
]
PLACEMENT_BYTES_PER_S = 2**31
"""A tensor's size over its cost in the files, where that means what it says."""


def placement_cases() -> Iterator[Case]:
    """Accelerators and memory are the files' own."""
    for name, variant, scale, rival in PLACEMENT:
        file = f"placement/{name}.json"
        workload = published(file)
        if workload is None:
            continue
        assert workload.devices is not None
        own = own_case(
            file,
            MICRO_BATCHES,
            workload.devices,
            PLACEMENT_BYTES_PER_S / scale,
            memory_bytes=workload.memory_bytes,
        )
        yield workload_case(f"{name}{variant}", workload, rival, own=own, transfer_scale=scale)


# Piper -----------------------------------------------------------------------------------------

PIPER = {
    8: Rival("165.856", "0.04"),
    32: Rival("41.5155", "0.16"),
    128: Rival("10.1209", "0.31"),
    1024: Rival("1.30318", "9.7"),
}


def piper_cases() -> Iterator[Case]:
    """The machines of their own experiments."""
    file = "piper/bert32a100.json"
    workload = published(file)
    for devices, rival in PIPER.items():
        if workload is not None:
            yield workload_case(
                "bert32a100, 25 GiB/s",
                workload,
                rival,
                own=own_case(
                    file, MICRO_BATCHES, devices, 25 * GIB, memory_bytes=8 * GIB, replicas=True
                ),
                devices=devices,
                memory_bytes=8 * GIB,
                bandwidth_bytes_per_s=25 * GIB,
            )


# Look-alikes -----------------------------------------------------------------------------------

LOOK_ALIKES: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("chain of 1,000, replicas", "chain", {"layers": 1000}, 64, ""),
    ("operators, 12 blocks", "operators", {"blocks": 12}, 6, "17–19 (2,938 downsets)"),
    ("GNMT-like", "gnmt_like", {}, 8, "15; Piper 236 (17,914)"),
    ("Inception-like", "inception_like", {}, 8, "over 300 (36,596)"),
    (
        "Inception-like, larger",
        "inception_like",
        {"lengths": (9, 10, 12, 13)},
        8,
        "PipeDream: out of 10 GB (221,564)",
    ),
    ("NASNet-like", "nasnet_like", {}, 4, "PipeDream: over 300"),
]


def look_alike_cases() -> Iterator[Case]:
    """Graphs of tests/helpers/drawn/lattices.py: no memory limit, then one that binds."""
    for label, shape, arguments, devices, seconds in LOOK_ALIKES:
        replicas = tuple(range(1, devices + 1)) if "replicas" in label else (1,)
        for memory in (None, 1.3):
            rival = Rival(seconds=seconds)
            how = {"replicas": replicas, "memory": memory}
            yield drawn_case(label, getattr(lattices, shape)(**arguments), devices, rival, **how)


DEAR = (1.0, 16.0, 64.0)
"""All tensors' wire times over all computing. At 64 the busiest stage's transfers take as long as
its computing."""


def dear_cases() -> Iterator[Case]:
    """The Inception-like graphs with transfers that cost as much as computing, and more."""
    for label, shape, arguments, devices, _ in LOOK_ALIKES:
        if shape == "inception_like":
            needs = lattices.inception_like(**arguments)
            for wire in DEAR:
                yield drawn_case(f"{label}, {wire:g} ×", needs, devices, Rival(), wire=wire)


def drawn_case(label: str, needs: list[int], devices: int, rival: Rival, **how: Any) -> Case:
    """Costs drawn for a graph; `how` as `lattices.problem` takes it."""

    def make() -> StageProblem:
        problem: StageProblem = lattices.problem(needs, devices, overlap=False, **how)
        return problem

    memory = how.get("memory")
    limit = "none" if memory is None else f"{memory} shares"
    return Case(label, len(needs), limit, make, rival)


# Shared ----------------------------------------------------------------------------------------


def published(name: str) -> Workload | None:
    """A published file's workload; None where the file is missing."""
    path = DATA / name
    return read_workload(path) if path.exists() else None


def own_case(
    file: str,
    samples: int,
    devices: int,
    bandwidth_bytes_per_s: float,
    *,
    memory_bytes: float | None = None,
    replicas: bool = False,
) -> OwnCase:
    """A published file as our own planner takes it, on equal devices."""
    memory = None if memory_bytes is None else f"{memory_bytes:.0f}B"
    cluster = uniform_cluster(devices, memory, f"{bandwidth_bytes_per_s:.0f}B/s", "0s")
    return OwnCase(file, samples, cluster, replicas)


def workload_case(
    label: str, workload: Workload, rival: Rival, own: OwnCase, **arguments: Any
) -> Case:
    """A case of a workload under its own cost model; `arguments` are `problem_of`'s."""
    limit = arguments.get("memory_bytes", workload.memory_bytes)
    return Case(
        label=label,
        nodes=workload.listed,
        memory="none" if limit is None else format_bytes(limit),
        make=lambda: problem_of(workload, **arguments),
        rival=rival,
        own=own,
    )


def tables() -> list[Table]:
    """All tables of the page, in order."""
    return [
        Table(
            "PipeDream's optimizer",
            "Its files hold one mini-batch; its cost model is `pipedream`. Theirs: with "
            "`--activation_compression_ratio 1`, and `--straight_pipeline` where it says straight. "
            "It charges a cut twice where one producer feeds several consumers, as in ResNet-50.",
            pipedream_cases,
        ),
        Table(
            "The placement paper's dynamic program",
            "Exact optimum over contiguous cuts, no CPU. The layer graphs' edge costs are in "
            "seconds beside latencies in ms, and its program takes them for ms, as shipped; "
            "× 1000 they are what they mean.",
            placement_cases,
        ),
        Table(
            "Piper",
            "BERT-32 at 1,920 micro-batches per mini-batch; objectives are per micro-batch. Only "
            "tensor-parallel degree 1 is planned.",
            piper_cases,
        ),
        Table(
            "Look-alikes of larger workloads",
            "Graphs of the shapes and sizes that other planners are known to find hard, with costs "
            "made up from a seed ([lattices.py](../tests/helpers/drawn/lattices.py)); transfers "
            "add to computing, a tenth of it in all. A memory limit of 1.3 shares is 1.3 times "
            "what an even split would hold. *their seconds* are the placement paper's program's, "
            "or another's where it says so, on the real graph with as many downsets as in "
            "brackets; other costs, so only their size compares.",
            look_alike_cases,
        ),
        Table(
            "Dear transfers",
            "Of those, the lattices with the most places to cut, where all tensors' wire times "
            "together are so many times all computing, and add to it. At 64 × the busiest stage's "
            "transfers take as long as its computing.",
            dear_cases,
        ),
    ]


def solved(case: Case) -> tuple[StageProblem, CutAnswer, float]:
    """The problem, what came out, and the seconds that making and solving it took."""
    began = time.perf_counter()
    problem = case.make()
    answer = solve_cut(problem, time_limit_s=TIME_LIMIT_S)
    took_s = time.perf_counter() - began
    if answer.cut is not None:
        load = cut_load(problem, answer.cut)
        if not math.isclose(load, answer.objective_s, rel_tol=1e-9):
            raise SystemExit(f"{case.label}: the cut's load is {load}, not {answer.objective_s}")
    return problem, answer, took_s


class Solved(NamedTuple):
    """What came of a case.

    Attributes:
        above: 1 where another planner's objective is lower, as far as it was printed, -1 where it
            is higher; None: not known.
        line: of the page's table.
    """

    proven: bool
    above: int | None
    seconds: float
    line: str


def row(case: Case) -> Solved:
    """Solve it, print a line."""
    problem, answer, took_s = solved(case)
    cells = [
        case.label,
        f"{case.nodes:,}",
        "" if answer.downsets is None else f"{answer.downsets:,}",
        f"{problem.devices:,}",
        case.memory,
        amount(answer.objective_s / case.unit_s),
        amount(answer.bound_s / case.unit_s),
        gap_text(answer.gap, proven=answer.optimal),
        f"{took_s:.2f}",
        case.rival.objective,
        case.rival.seconds,
    ]
    above = above_theirs(case.rival, answer.objective_s / case.unit_s)
    print(f"{' | '.join(cells)}{remark(case.rival, above, took_s)}", flush=True)
    return Solved(answer.optimal, above, took_s, f"| {' | '.join(cells)} |")


def gap_text(gap: float, *, proven: bool) -> str:
    """As pages have it."""
    return "0" if proven else f"{100 * gap:.2f} %"


def amount(value: float) -> str:
    """Six digits, as others print theirs."""
    return f"{value:.6g}" if math.isfinite(value) else "none"


def above_theirs(rival: Rival, objective: float) -> int | None:
    """As `Solved.above`."""
    if not rival.objective:
        return None
    digits = len(rival.objective.partition(".")[2])
    above = objective - float(rival.objective)
    return 0 if abs(above) <= 0.5001 * 10**-digits else 1 if above > 0 else -1


def remark(rival: Rival, above: int | None, took_s: float) -> str:
    """Where another planner's objective is lower, or its time.

    Half a second, or a tenth of their time where that is more, counts as no time.
    """
    if above is None:
        return ""
    their_s = float(rival.seconds.partition("–")[0] or "0")
    slow = took_s > max(their_s / 10, 0.5)
    return "  <- theirs is lower" * (above > 0) + "  <- slow" * slow


# Two stages on each device, under our own cost model ---------------------------------------------


@dataclass(frozen=True)
class TwoEach:
    """The best plan with one stage on each device beside the best with two; None where none fits.

    Attributes:
        straight_s, seconds: spent on each.
    """

    straight: Plan | None
    plan: Plan | None
    straight_s: float
    seconds: float

    @property
    def gain(self) -> float | None:
        """How much shorter the period is, in per cent; less than 0 where it is longer."""
        if self.straight is None or self.plan is None:
            return None
        share = 1 - self.plan.predicted.period_s / self.straight.predicted.period_s
        # No minus before what rounds to nothing.
        return round(100 * share, 2) + 0.0


def with_two_each(own: OwnCase) -> TwoEach:
    """Plan both."""
    straight, straight_s = planned(own, 1)
    plan, seconds = planned(replace(own, replicas=False), 2)
    return TwoEach(straight, plan, straight_s, seconds)


@cache
def planned(own: OwnCase, per_device: int) -> tuple[Plan | None, float]:
    """The best plan found, if any fits, and the seconds of a processor that it took."""
    profile, began = own.profile(), time.process_time()
    try:
        plan = solve(
            profile,
            own.cluster,
            SYSTEM,
            micro_batches=MICRO_BATCHES,
            replicas=own.replicas,
            stages_per_device=per_device,
            run_ahead="auto",
            time_limit_s=LONGEST_S,
            effort=EFFORT,
        )
    except InfeasibleError:
        plan = None
    return plan, time.process_time() - began


TWO_EACH_HEADINGS = (
    "workload",
    "devices",
    "one on each (ms)",
    "its gap",
    "its seconds",
    "two on each (ms)",
    "placement",
    "devices used",
    "gap",
    "seconds",
    "gain",
)


class Gained(NamedTuple):
    """What two stages on each device bring in a case, and a line of that table."""

    replicas: bool
    gain: float | None
    line: str


def two_each_row(case: Case, own: OwnCase) -> Gained:
    """Plan it both ways, print a line."""
    found = with_two_each(own)
    cells = [case.label, f"{len(own.cluster.devices):,}"]
    cells += [*figures(found.straight), f"{found.straight_s:.1f}"]
    period, gap = figures(found.plan)
    placement, used = "", ""
    if found.plan is not None:
        devices = numbered_devices([stage.devices for stage in found.plan.stages])
        placement, used = pattern_of(devices, len(devices)), f"{len(set(devices)):,}"
    cells += [period, placement, used, gap, f"{found.seconds:.1f}"]
    cells.append("" if found.gain is None else f"{found.gain:.2f} %")
    print(f"two on each: {' | '.join(cells)}", flush=True)
    return Gained(own.replicas, found.gain, f"| {' | '.join(cells)} |")


def figures(plan: Plan | None) -> list[str]:
    """Its period in ms, and its gap."""
    if plan is None:
        return ["none fits", ""]
    found = plan.solver
    return [amount(plan.predicted.period_s / 1e-3), gap_text(found.gap, proven=found.optimal)]


# The page ---------------------------------------------------------------------------------------

HEADINGS = (
    "workload",
    "nodes",
    "downsets",
    "devices",
    "memory limit",
    "objective (ms)",
    "bound (ms)",
    "gap",
    "seconds",
    "theirs (ms)",
    "their seconds",
)


def section(table: Table, words: list[str]) -> tuple[list[Solved], list[Gained]]:
    """A table's cases, and those with two stages on each device; printed as they come."""
    print(f"-- {table.title}", flush=True)
    every, gained = [], []
    for case in table.cases():
        if all(word in f"{table.title} {case.label}" for word in words):
            every.append(row(case))
            if case.own is not None:
                gained.append(two_each_row(case, case.own))
    return every, gained


def part_of(table: Table, every: Sequence[Solved]) -> str:
    """A table's part of the page."""
    lines = [*head_of(HEADINGS), *(found.line for found in every)]
    if not every:
        lines = ["(Left out: the published files were missing.)"]
    return "\n".join([f"## {table.title}", "", table.text, "", *lines, ""])


def results(found: Mapping[str, Sequence[Solved]]) -> str:
    """A table: what came of each part."""
    rows = []
    for title, every in found.items():
        if not every:
            continue
        theirs = [x.above for x in every if x.above is not None]
        against = [str(theirs.count(k)) if theirs else "" for k in (-1, 0, 1)]
        counts = [str(len(every)), str(sum(x.proven for x in every))]
        rows.append([title, *counts, *against, f"{max(x.seconds for x in every):.2f}"])
    titles = ("part", "problems", "proven best", "lower than theirs", "as low", "higher")
    return markdown((*titles, "seconds, at most"), rows)


def gains(gained: Sequence[Gained]) -> str:
    """A table: what two stages on each device bring beside plans with and without replicas."""
    rows = []
    for replicas in (False, True):
        known = [x.gain for x in gained if x.replicas == replicas and x.gain is not None]
        if known:
            counts = [sum(g > 0 for g in known), known.count(0), sum(g < 0 for g in known)]
            name = "with replicas" if replicas else "without replicas"
            median = f"{statistics.median(known):.2f} %"
            rows.append([name, str(len(known)), *map(str, counts), f"{max(known):.2f} %", median])
    titles = ("one on each", "workloads", "two are faster", "as fast", "slower", "most gained")
    return markdown((*titles, "at the median"), rows)


def write_pages(found: Mapping[str, Sequence[Solved]], gained: Sequence[Gained]) -> None:
    """Both pages, from their heads."""
    own: dict[str, Any] = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    printed = [x.line.strip("| ") for every in found.values() for x in every][:2]
    head = (DOCS / "planner_benchmark.head.md").read_text(encoding="utf-8")
    head = head.format(shown="\n".join(printed), results=results(found), **own)
    parts = [part_of(table, found[table.title]) for table in tables()]
    text = head + "\n" + "\n".join(parts)
    (DOCS / "planner_benchmark.md").write_text(text, encoding="utf-8")
    if gained:
        head = (DOCS / "planner_two_stages.head.md").read_text(encoding="utf-8")
        text = head.format(
            shown="\n".join(f"two on each: {x.line.strip('| ')}" for x in gained[:2]),
            results=gains(gained),
            rows="\n".join([*head_of(TWO_EACH_HEADINGS), *(x.line for x in gained)]),
            system=SYSTEM,
            micro_batches=MICRO_BATCHES,
            effort=f"{EFFORT:,}",
            seconds=f"{LONGEST_S:.0f}",
            **own,
        )
        (DOCS / "planner_two_stages.md").write_text(text, encoding="utf-8")


def main() -> None:
    words = sys.argv[1:]
    found, gained = {}, []
    for table in tables():
        found[table.title], more = section(table, words)
        gained += more
    if not words:
        write_pages(found, gained)


if __name__ == "__main__":
    main()
