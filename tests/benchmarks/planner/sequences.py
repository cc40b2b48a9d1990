"""Clusters of devices of several kinds: what the best sequence of them gains over the listed one.

    python tests/benchmarks/planner/sequences.py [--count 100]

Draws clusters of 2 to 4 kinds and plans published workloads for them, once on devices as listed
and once in whatever sequence; writes docs/planner_sequences.md, from planner_sequences.head.md
beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

from timeprest.planner.cluster.cluster import Cluster, Device
from timeprest.planner.cluster.links import Network
from timeprest.planner.search.solve import solve
from timeprest.profiles.errors import InfeasibleError
from timeprest.profiles.profile import Profile
from timeprest.tests.benchmarks.published.reader import import_published
from timeprest.tests.benchmarks.shared import head_of, machine, markdown

PAGE = Path(__file__).parents[3] / "docs" / "planner_sequences.md"
HEAD = PAGE.with_name("planner_sequences.head.md")
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "pipedream"
WORKLOADS = ("vgg16", "gnmt")
SYSTEMS = ("timeprest", "pipedream-flush", "pipedream-2bw", "gpipe")
SAMPLES, MICRO_BATCHES = 128, 8
TIME_LIMIT_S = 60.0
SAME = 1e-9
WIDE = 0.1


class Drawn(NamedTuple):
    """What is planned.

    Attributes:
        counts: devices of each kind, as listed.
        mixed: kinds aren't listed one after the other.
    """

    workload: str
    system: str
    cluster: Cluster
    counts: tuple[int, ...]
    mixed: bool

    @property
    def limited(self) -> bool:
        """Whether devices have a memory limit."""
        return self.cluster.devices[0].memory_bytes is not None


class Found(NamedTuple):
    """What came of it; in s. Infinite periods: nothing was found to fit."""

    listed_s: float
    best_s: float
    gap: float
    listed_cpu_s: float
    best_cpu_s: float

    @property
    def shorter(self) -> float:
        """How much shorter the period is."""
        return 1 - self.best_s / self.listed_s


@cache
def profile_of(workload: str) -> Profile:
    """With times of a micro-batch; the file's are of a mini-batch."""
    sizes = [SAMPLES // MICRO_BATCHES]
    path = DATA / f"{workload}.graph.txt"
    return import_published(str(path), SAMPLES, sizes)


def drawn(seed: int) -> Drawn:
    """The cluster with this number.

    Kinds are 0.4 to 3 times as fast as the device that was profiled; every other cluster limits
    memory, each kind's to 1 to 4 times an even share of weights, gradients, optimizer state and one
    mini-batch's activations. Devices are listed kind by kind, the kinds in any sequence.
    """
    rng = random.Random(seed)
    workload, system = rng.choice(WORKLOADS), rng.choice(SYSTEMS)
    kinds = rng.choice([2, 3, 4])
    counts = tuple(rng.randint(1, 2) for _ in range(kinds))
    profile = profile_of(workload)
    held = sum(
        3 * layer.parameter_bytes + MICRO_BATCHES * layer.measurements[0].saved_bytes
        for layer in profile.layers
    )
    limited = seed % 2 == 1
    devices: list[Device] = []
    for kind, count in enumerate(counts):
        speed = round(0.4 * 7.5 ** rng.random(), 2)
        share = rng.uniform(1, 4) * held / sum(counts)
        devices += [
            Device(
                name=f"kind{kind}-{k}", speed=speed, memory_bytes=int(share) if limited else None
            )
            for k in range(count)
        ]
    mixed = seed % 4 > 1
    if mixed:
        rng.shuffle(devices)
    network = Network(bandwidth_bytes_per_s=rng.choice([1e9, 10e9]), latency_s=1e-5)
    cluster = Cluster(devices=tuple(devices), network=network)
    return Drawn(workload, system, cluster, counts, mixed)


def compared(seed: int) -> Found:
    """One cluster, both ways."""
    case = drawn(seed)
    periods, gap, spent = [], 0.0, []
    for sequence in ("listed", "best"):
        begin = time.process_time()
        try:
            plan = solve(
                profile_of(case.workload),
                case.cluster,
                case.system,
                optimizer_state_factor=1.0,
                sequence=sequence,
                run_ahead="auto",
                time_limit_s=TIME_LIMIT_S,
            )
            periods.append(plan.predicted.period_s)
            gap = plan.solver.gap
        except InfeasibleError:
            periods.append(float("inf"))
        spent.append(time.process_time() - begin)
    return Found(periods[0], periods[1], gap, spent[0], spent[1])


def row(seed: int, case: Drawn, found: Found) -> str:
    """A line of the page's table."""
    none = "none fits"
    cells = [
        str(seed),
        case.workload,
        case.system,
        " + ".join(map(str, case.counts)) + ", mixed" * case.mixed,
        "yes" if case.limited else "no",
        f"{found.listed_s * 1e3:.6g}" if found.listed_s < float("inf") else none,
        f"{found.best_s * 1e3:.6g}" if found.best_s < float("inf") else none,
        f"{found.shorter:.1%}" if found.listed_s < float("inf") else "",
        f"{found.gap:.1%}" if found.gap else "0",
        f"{found.listed_cpu_s:.1f}",
        f"{found.best_cpu_s:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def share(number: float) -> str:
    """``4.8%``."""
    return f"{number:.1%}"


def results(all_drawn: Sequence[Drawn], all_found: Sequence[Found]) -> str:
    """A table: what was found of all clusters, and of parts of them."""
    both = [(d, f) for d, f in zip(all_drawn, all_found, strict=True) if not math.isinf(f.listed_s)]
    parts: dict[str, list[Found]] = {
        "all": [f for _, f in both],
        "listed kind by kind": [f for d, f in both if not d.mixed],
        "mixed": [f for d, f in both if d.mixed],
        "proven best of all sequences": [f for _, f in both if f.gap == 0],
        **{
            f"`{system}`, memory {'limited' if limited else 'not limited'}": [
                f for d, f in both if d.system == system and d.limited == limited
            ]
            for system in SYSTEMS
            for limited in (False, True)
        },
    }
    rows = []
    for name, found in parts.items():
        gains = [f.shorter for f in found]
        if not gains:
            continue
        shown = map(share, (statistics.median(gains), statistics.mean(gains), max(gains)))
        counts = [
            sum(g > SAME for g in gains),
            sum(f.gap == 0 for f in found),
            sum(f.gap > WIDE for f in found),
        ]
        rows.append([name, str(len(gains)), *shown, *map(str, counts)])
    titles = ["clusters", "of them", "shorter: median", "mean", "most", "any gain", "proven best"]
    return markdown([*titles, f"gap over {WIDE:.0%}"], rows)


def page(seeds: Sequence[int], rows: list[str], all_found: list[Found]) -> str:
    """The page's text."""
    all_drawn = [drawn(seed) for seed in seeds]
    both = [found for found in all_found if not math.isinf(found.listed_s)]
    worse = sum(found.best_s > found.listed_s * (1 + SAME) for found in all_found)
    freed = sum(found.best_s < found.listed_s == math.inf for found in all_found)
    faster = [found.listed_s / found.best_s - 1 for found in both]
    most = [1 - found.best_s / (1 + found.gap) / found.listed_s for found in both]
    head = HEAD.read_text(encoding="utf-8").format(
        shown="\n".join(rows[:2]),
        results=results(all_drawn, all_found),
        faster=share(statistics.median(faster)),
        most=share(statistics.median(most)),
        worse=worse,
        freed=freed,
        micro_batches=MICRO_BATCHES,
        seconds=f"{TIME_LIMIT_S:.0f}",
        machine=machine(),
    )
    titles = [
        "number",
        "workload",
        "system",
        "devices of each kind",
        "memory limited",
        "listed (ms)",
    ]
    titles += ["best (ms)", "shorter", "gap", "seconds, listed", "seconds, best"]
    return "\n".join([head, *head_of(titles), *rows]) + "\n"


def main() -> None:
    """Plan all clusters, write the page."""
    parser = argparse.ArgumentParser(description="Plan clusters of devices of several kinds.")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--page", default=str(PAGE))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    rows, all_found = [], []
    seeds = range(asked.first, asked.first + asked.count)
    with ProcessPoolExecutor(asked.jobs) as pool:
        for seed, found in zip(seeds, pool.map(compared, seeds), strict=True):
            all_found.append(found)
            rows.append(row(seed, drawn(seed), found))
            print(rows[-1], flush=True)
    Path(asked.page).write_text(page(seeds, rows, all_found), encoding="utf-8")
    print(f"wrote {asked.page}")


if __name__ == "__main__":
    main()
