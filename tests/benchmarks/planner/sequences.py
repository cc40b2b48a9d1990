"""Clusters of devices of several kinds: what the best sequence of them gains over the listed one.

    python tests/benchmarks/planner/sequences.py [--count 100]

Draws clusters of 2 to 4 kinds and plans published workloads for them, once on devices as listed
and once in whatever sequence; writes docs/planner_sequences.md.
"""

from __future__ import annotations

import argparse
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
from timeprest.tests.benchmarks.shared import head_of, machine

PAGE = Path(__file__).parents[3] / "docs" / "planner_sequences.md"
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "pipedream"
WORKLOADS = ("vgg16", "gnmt")
SYSTEMS = ("timeprest", "pipedream-flush", "pipedream-2bw", "gpipe")
SAMPLES, MICRO_BATCHES = 128, 8
TIME_LIMIT_S = 60.0
SAME = 1e-9


class Drawn(NamedTuple):
    """What is planned.

    Attributes:
        counts: devices of each kind, as listed.
    """

    workload: str
    system: str
    cluster: Cluster
    counts: tuple[int, ...]


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
    if seed % 4 > 1:
        rng.shuffle(devices)
    network = Network(bandwidth_bytes_per_s=rng.choice([1e9, 10e9]), latency_s=1e-5)
    return Drawn(workload, system, Cluster(devices=tuple(devices), network=network), counts)


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
        " + ".join(map(str, case.counts)) + ("" if seed % 4 < 2 else ", mixed"),
        "yes" if case.cluster.devices[0].memory_bytes else "no",
        f"{found.listed_s * 1e3:.6g}" if found.listed_s < float("inf") else none,
        f"{found.best_s * 1e3:.6g}" if found.best_s < float("inf") else none,
        f"{found.shorter:.1%}" if found.listed_s < float("inf") else "",
        f"{found.gap:.1%}" if found.gap else "0",
        f"{found.listed_cpu_s:.1f}",
        f"{found.best_cpu_s:.1f}",
    ]
    return "| " + " | ".join(cells) + " |"


def page(seeds: Sequence[int], rows: list[str], all_found: list[Found]) -> str:
    """The page's text."""
    both = [found for found in all_found if found.listed_s < float("inf")]
    worse = sum(found.best_s > found.listed_s * (1 + SAME) for found in all_found)
    freed = sum(found.best_s < float("inf") == found.listed_s for found in all_found)
    halves: list[list[float]] = [[], []]
    for seed, found in zip(seeds, all_found, strict=True):
        if found.listed_s < float("inf"):
            halves[seed % 4 > 1].append(found.shorter)
    by_kind, mixed = (statistics.median(half) for half in halves)
    gains = [found.shorter for found in both]
    faster = [found.listed_s / found.best_s - 1 for found in both]
    proven = [found for found in all_found if found.gap == 0 and found.best_s < float("inf")]
    known = [found.shorter for found in proven if found.listed_s < float("inf")]
    most = [1 - found.best_s / (1 + found.gap) / found.listed_s for found in both]
    plans = sum(found.best_s < float("inf") for found in all_found)
    head = f"""# Devices of several kinds, in the best sequence

Made by `make bench-sequences` on {machine()}. Clusters are drawn: 2 to 4
kinds of 1 or 2 devices each, half of them listed kind by kind, the kinds in any sequence, the other
half (*mixed*) in any sequence at all. Kinds are 0.4 to 3 times as fast as the device that was
profiled; every other cluster limits memory, each kind's to 1 to 4 times an even share. Models are
those of PipeDream's files, systems our own, with {MICRO_BATCHES} micro-batches, one device a stage.
*listed*: the period of `--sequence listed`, *best*: of
`--sequence best`; *shorter*: by how much; *gap*: between the latter and its bound over all
sequences, 0 where it is proven best of them. Each search has the effort that
`tp-plan solve` has by itself and {TIME_LIMIT_S:.0f} s; *seconds* are of a processor.

**{len(all_found)} clusters, {worse} of them worse than as listed. Of {len(both)} with a plan as
listed the period is shorter by {statistics.median(gains):.1%} at the median
({statistics.mean(gains):.1%} on average, {max(gains):.1%} at most), which is
{statistics.median(faster):.1%} more samples a second; {sum(g > SAME for g in gains)} gain anything.
Those listed kind by kind: {by_kind:.1%} at the median, the mixed: {mixed:.1%}.
{freed} have a plan in another sequence alone. {len(proven)} of {plans} plans are proven best of all
sequences: those are shorter by {statistics.median(known):.1%} at the median
({statistics.mean(known):.1%} on average), and nothing more is to be had there. By the bounds
no sequences whatever are shorter by more than {statistics.median(most):.1%} at the median.**
Where a gap is left, a better sequence may have been missed; where time ends a search of all
sequences, those as listed had about half of it, so that a plan may even be worse.
"""
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
